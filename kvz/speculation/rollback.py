"""Taking back the last tokens that a live cache has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvz.capture_metadata import LayerRecord, decode_metadata, unpack_layers
from kvz.formats.errors import ConfigError, UnsupportedCache
from kvz.layers.attention import num_held
from kvz.layers.containers import container_of, layer_objects
from kvz.layers.table import layer_kind

_KINDS = frozenset({"full", "sliding", "empty"})


def check_metadata(metadata: Mapping[str, str]) -> tuple[LayerRecord, ...]:
    """The layers of a cache from which tokens can be taken back, by its file's metadata.

    Raises UnsupportedCache for any other cache, and what `decode_metadata` raises.
    """
    document = decode_metadata(metadata)
    layers = unpack_layers(document["layers"])
    check_rollback(layers, container_of(document))
    return layers


def check_rollback(layers: Sequence[LayerRecord], container: Mapping[str, Any]) -> None:
    """Refuse a cache from which tokens cannot be taken back. Raises UnsupportedCache naming why.

    layers, container: as a file describes them, see `kvz.capture_metadata`.
    """
    if container.get("class") != "DynamicCache":
        raise UnsupportedCache(
            f"tokens cannot be taken back from a {container.get('class')}: "
            "generate without speculation"
        )
    for layer_idx, layer in enumerate(layers):
        if layer.kind not in _KINDS:
            raise UnsupportedCache(
                f"tokens cannot be taken back from cache layer {layer_idx} of kind "
                f"{layer.kind!r}, only from full and sliding ones: generate without speculation"
            )


def longest_rollback(layers: Sequence[LayerRecord]) -> int | None:
    """Most tokens of one forward pass that can be taken back; None when there is no limit.

    A sliding layer has dropped its oldest new tokens after a pass over more.
    """
    # a window of one makes transformers keep everything
    limits = [layer.window - 1 for layer in layers if layer.window is not None and layer.window > 1]
    return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class _LayerState:
    """Kind, tokens seen, and of a sliding layer also what it held (not copied)."""

    kind: str
    num_seen: int = 0
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class Snapshot:
    """What a cache of full and sliding layers needs to go back, taken before a forward pass.

    Costs no copy: layers replace their tensors, so those of before stay as they were. Raises
    UnsupportedCache for a layer of another kind.
    """

    def __init__(self, cache: Any) -> None:
        layers = layer_objects(cache)
        self._layers = [(layer, _state(layer, i)) for i, layer in enumerate(layers)]

    def keep(self, num_tokens: int) -> None:
        """Make the cache one that has seen only the first `num_tokens` since the snapshot.

        They must have been fed in one pass, at most `longest_rollback` of them. Raises ConfigError
        when the cache has seen fewer tokens than it is to keep, or has dropped some of them; it
        is then as it was.
        """
        held = [(layer, state) for layer, state in self._layers if state.kind != "empty"]
        for layer, state in held:
            num_new = layer.get_seq_length() - state.num_seen
            if not 0 <= num_tokens <= num_new:
                raise ConfigError(f"cannot keep {num_tokens} of {num_new} new tokens")
            if num_tokens < num_new and num_new > num_held(layer.keys):
                raise ConfigError(
                    f"a layer with a window of {layer.sliding_window} has dropped some of the "
                    f"{num_new} new tokens"
                )
        for layer, state in held:
            if state.kind == "full":
                _cut_full(layer, state.num_seen + num_tokens)
            else:
                _cut_sliding(layer, state, num_tokens)


def _state(layer: Any, layer_idx: int) -> _LayerState:
    kind = layer_kind(layer, layer_idx)
    if kind not in _KINDS:
        raise UnsupportedCache(
            f"tokens cannot be taken back from cache layer {layer_idx} of kind {kind!r}"
        )
    if kind == "empty":
        return _LayerState(kind)
    if kind == "full":
        return _LayerState(kind, layer.get_seq_length())
    if not num_held(layer.keys):
        return _LayerState(kind, layer.cumulative_length)
    return _LayerState(kind, layer.cumulative_length, layer.keys, layer.values)


def _cut_full(layer: Any, num_tokens: int) -> None:
    if layer.keys is not None and num_tokens < num_held(layer.keys):
        layer.keys = layer.keys[:, :, :num_tokens]
        layer.values = layer.values[:, :, :num_tokens]


def _cut_sliding(layer: Any, state: _LayerState, num_tokens: int) -> None:
    num_new = layer.cumulative_length - state.num_seen
    if num_tokens == num_new:
        return
    layer.keys = _window(state.keys, layer.keys, num_new, num_tokens, layer.sliding_window)
    layer.values = _window(state.values, layer.values, num_new, num_tokens, layer.sliding_window)
    layer.cumulative_length = state.num_seen + num_tokens


def _window(
    before: torch.Tensor | None, after: torch.Tensor, num_new: int, num_tokens: int, window: int
) -> torch.Tensor:
    """The last `window` - 1 of the tokens held before and the first `num_tokens` new ones."""
    start = after.shape[2] - num_new
    new = after[:, :, start : start + num_tokens]
    joined = new if before is None else torch.cat([before, new], dim=2)
    # as transformers slices, also where the window is one token
    return joined[:, :, 1 - window :]
