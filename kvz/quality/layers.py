"""Which keys each captured query sees: worked out from a capture's metadata."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvz.capture_metadata import LayerRecord, decode_metadata, unpack_layers
from kvz.formats.errors import ConfigError, InvalidField, UnsupportedCache
from kvz.quality.attention import Queries, Softmax
from kvz.source_protocol import CacheSource
from kvz.state_reader import read_tensor

#: A query of a windowed layer counts when the capture holds at least this share of the keys that
#: it saw: the window moves on, and what it leaves behind is not cached.
MIN_HELD_SHARE = 0.5

_FULL_KINDS = ("full", "hybrid")
_WINDOWED_KINDS = ("sliding", "hybrid_sliding")
#: Softmax with a learned term that no capture holds.
_LEARNED_SINKS = ("GptOssForCausalLM",)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer whose attention can be recomputed. window: None where all tokens are seen.

    chunked: the window is one of fixed runs of tokens, not the last tokens before a query.
    """

    index: int
    softmax: Softmax
    num_tokens: int
    window: int | None
    chunked: bool

    @property
    def key_name(self) -> str:
        return f"layers.{self.index}.key"

    @property
    def value_name(self) -> str:
        return f"layers.{self.index}.value"

    @property
    def query_name(self) -> str:
        return f"layers.{self.index}.query"


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What a capture says of its attention.

    columns: int64 `[n]`, columns of the prompt whose queries are used, ascending. query_rows: their
    places in the query tensors. padding: columns of left padding of each sequence of the batch.
    """

    layers: tuple[AttentionLayer, ...]
    num_tokens: int
    columns: torch.Tensor
    query_rows: slice
    padding: tuple[int, ...]

    def queries(self, layer: AttentionLayer, states: torch.Tensor, batch: int) -> Queries:
        """The queries of one sequence that see enough keys.

        states: `[q_heads, n, head_dim]`, those of `columns`, on any device. The result may hold no
        query.
        """
        columns = self.columns
        first = torch.zeros_like(columns)
        if layer.window is not None and layer.chunked:
            first = columns - columns % layer.window
        elif layer.window is not None:
            first = (columns - layer.window + 1).clamp_min(0)
        first = first.clamp_min(self.padding[batch])
        oldest = self.num_tokens - layer.num_tokens
        seen, held = columns + 1 - first, columns + 1 - first.clamp_min(oldest)
        used = (columns >= self.padding[batch]) & (held >= 1) & (held >= MIN_HELD_SHARE * seen)
        start, stop = first.clamp_min(oldest) - oldest, columns + 1 - oldest
        device = states.device
        return Queries(states[:, used.to(device)], start[used].to(device), stop[used].to(device))


def plan_attention(source: CacheSource, num_queries: int) -> AttentionPlan:
    """How to recompute the attention of the last `num_queries` queries that a capture holds.

    Raises ConfigError for a capture without queries, UnsupportedCache for layers whose attention
    needs what the capture does not hold, and what :func:`decode_metadata` raises.
    """
    names = set(source.tensor_names)
    if "query_positions" not in names or not any(name.endswith(".query") for name in names):
        raise ConfigError(
            "holds no queries, without which attention cannot be compared: capture it with "
            f"kvz capture --queries {num_queries}, or leave attention out with --queries 0"
        )
    document = decode_metadata(source.metadata)
    architecture = document["identity"].get("architecture")
    if architecture in _LEARNED_SINKS:
        raise UnsupportedCache(
            f"{architecture} adds learned sinks to its softmax, which a capture does not hold: "
            "leave attention out with --queries 0"
        )
    layers = _layers(document, names)
    for layer in layers:
        _check_shapes(source, layer)
    positions = read_tensor(source, "query_positions")
    kept = min(num_queries, len(positions))
    mask = read_tensor(source, "attention_mask")
    return AttentionPlan(
        layers=layers,
        num_tokens=mask.shape[1],
        columns=positions[len(positions) - kept :],
        query_rows=slice(len(positions) - kept, len(positions)),
        padding=tuple((mask == 0).sum(dim=1).tolist()),
    )


def _layers(document: Mapping[str, Any], names: set[str]) -> tuple[AttentionLayer, ...]:
    records = unpack_layers(document["layers"])
    cached = [i for i, record in enumerate(records) if record.num_tokens]
    scales = _per_layer(document.get("softmax_scale"), len(cached), "softmax_scale")
    softcaps = _per_layer(document.get("softcap"), len(cached), "softcap")
    types = _layer_types(document["identity"].get("config", {}))
    layers = []
    for i, scale, softcap in zip(cached, scales, softcaps, strict=True):
        if f"layers.{i}.query" not in names:
            raise InvalidField(f"tensor layers.{i}.query is missing, other layers have theirs")
        if type(scale) is not float or type(softcap) not in (float, type(None)):
            raise InvalidField(
                f"kvz metadata: layer {i} has softmax_scale {scale!r} and softcap {softcap!r}"
            )
        record = records[i]
        chunked = len(types) > i and types[i] == "chunked_attention"
        softmax = Softmax(scale, softcap)
        layers.append(AttentionLayer(i, softmax, record.num_tokens, _window(i, record), chunked))
    return tuple(layers)


def _window(layer_idx: int, record: LayerRecord) -> int | None:
    if record.kind in _FULL_KINDS:
        return None
    if record.kind in _WINDOWED_KINDS and record.window:
        return record.window
    raise UnsupportedCache(
        f"layer {layer_idx} is of kind {record.kind!r}, whose attention cannot be recomputed: "
        "leave attention out with --queries 0"
    )


def _per_layer(value: Any, num_layers: int, what: str) -> Sequence[Any]:
    """A metadata value that holds for all cached layers, or the list of theirs."""
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers:
        raise InvalidField(f"kvz metadata: {what} has {len(values)} values for {num_layers} layers")
    return values


def _layer_types(config: Mapping[str, Any]) -> list[Any]:
    """The configuration's type of each layer; long lists stand in it as `[type, count]` runs."""
    items = next((v for k, v in config.items() if k.endswith("layer_types")), None) or []
    runs = [item if isinstance(item, list) else [item, 1] for item in items]
    return list(itertools.chain.from_iterable([name] * int(count) for name, count in runs))


def _check_shapes(source: CacheSource, layer: AttentionLayer) -> None:
    names = (layer.query_name, layer.key_name, layer.value_name)
    shapes = []
    for name in names:
        if name not in source.tensor_names:
            raise InvalidField(f"tensor {name} is missing")
        shapes.append(source.shape(name))
    query, key, value = shapes
    fits = (
        len(query) == len(key) == len(value) == 4
        and query[0] == key[0] == value[0]
        and key[1] == value[1]
        and key[2] == value[2] == layer.num_tokens
        and query[3] == key[3]
        and key[1]
        and query[1] % key[1] == 0
    )
    if not fits:
        described = ", ".join(f"{n} {list(s)}" for n, s in zip(names, shapes, strict=True))
        raise InvalidField(f"shapes do not belong together: {described}")
