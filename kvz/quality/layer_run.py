"""One layer through every scheme: errors of its tensors and of its attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvz.quality.attention import Attended, AttentionError, Queries, attend, compare
from kvz.quality.cache_file import KEY, VALUE, CacheFile
from kvz.quality.layers import AttentionLayer, AttentionPlan
from kvz.quality.results import LayerQuality, TensorQuality
from kvz.quality.schemes import StoredCache
from kvz.quality.tensor_error import TensorError


class SchemeSums:
    """What is added up for one scheme while the tensors of a capture go by."""

    def __init__(self) -> None:
        self._tensors = {KEY: TensorError(), VALUE: TensorError()}
        self.layers: list[LayerQuality] = []

    def add(self, part: str, exact: torch.Tensor, decoded: torch.Tensor) -> None:
        self._tensors[part].add(exact, decoded)

    def tensor_quality(self, part: str) -> TensorQuality:
        return TensorQuality(self._tensors[part].nmse, self._tensors[part].max_error)


def measure_layer(
    cache: CacheFile,
    plan: AttentionPlan,
    layer: AttentionLayer,
    stored: Sequence[StoredCache],
    sums: Sequence[SchemeSums],
    device: torch.device,
) -> None:
    """Add keys, values and attention of a layer to the sums of each scheme."""
    key, value = (cache.read(name).to(device) for name in (layer.key_name, layer.value_name))
    states = cache.read(layer.query_name)[:, :, plan.query_rows].to(device)
    attended: list[tuple[int, Queries, Attended]] = []
    for batch in range(key.shape[0]):
        queries = plan.queries(layer, states[batch], batch)
        if queries.num_queries:
            exact = attend(queries, key[batch], value[batch], layer.softmax)
            attended.append((batch, queries, exact))
    for store, own in zip(stored, sums, strict=True):
        decoded_key = store.read(layer.key_name).to(device)
        decoded_value = store.read(layer.value_name).to(device)
        own.add(KEY, key, decoded_key)
        own.add(VALUE, value, decoded_value)
        errors = [
            compare(
                queries, exact, key[batch], decoded_key[batch], decoded_value[batch], layer.softmax
            )
            for batch, queries, exact in attended
        ]
        if errors:
            own.layers.append(_summarise(layer, errors))


def measure_tensor(
    cache: CacheFile,
    name: str,
    part: str,
    stored: Sequence[StoredCache],
    sums: Sequence[SchemeSums],
) -> None:
    """Add a tensor without attention to the sums of each scheme."""
    exact = cache.read(name)
    for store, own in zip(stored, sums, strict=True):
        own.add(part, exact, store.read(name))


def _summarise(layer: AttentionLayer, errors: Sequence[AttentionError]) -> LayerQuality:
    kl = torch.cat([error.kl for error in errors], dim=1)
    squared_error = torch.cat([error.squared_error for error in errors], dim=1).sum(dim=1)
    squared_norm = torch.cat([error.squared_norm for error in errors], dim=1).sum(dim=1)
    # a head whose output is zero and stays zero has no error
    relative = torch.where(squared_error == 0, 0.0, squared_error / squared_norm)
    return LayerQuality(
        layer.index, layer.window, kl.shape[1], float(kl.mean()), float(relative.mean())
    )
