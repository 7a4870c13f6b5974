"""Keys and values of layers that grow, slide or lie in a buffer of fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvz.formats.errors import InvalidField, UnsupportedCache
from kvz.layers.state import LayerState


def num_held(keys: torch.Tensor | None) -> int:
    """Tokens in keys `[batch, heads, tokens, head_dim]`; None and `(0,)` hold none."""
    return 0 if keys is None or keys.ndim < 2 else keys.shape[-2]


def _check_rank(part: str, tensor: torch.Tensor) -> None:
    if tensor.ndim != 4:
        raise UnsupportedCache(
            f"its {part} has shape {list(tensor.shape)}, not [batch, kv_heads, tokens, head_dim]"
        )


def check_held(name: str, tensor: torch.Tensor, num_tokens: int) -> None:
    """Refuse a tensor of another number of tokens than its record. Raises InvalidField."""
    if tensor.ndim != 4 or tensor.shape[2] != num_tokens:
        raise InvalidField(
            f"{name} has shape {list(tensor.shape)}, metadata says {num_tokens} tokens"
        )


def initialise(layer: Any, key: torch.Tensor, value: torch.Tensor) -> None:
    """Let the layer note dtype, device and shapes as its first update would."""
    layer.update(key[:, :, :0], value[:, :, :0])


class GrowingKeyValue:
    """`keys` and `values` `[batch, heads, tokens, head_dim]`, as they lie.

    The widths may differ and values may have none at all, as in latent attention.
    """

    attributes: Sequence[str] = ("keys", "values")

    def read(self, layer: Any, state: LayerState) -> None:
        held = num_held(layer.keys)
        state.num_tokens = state.cumulative_length = held
        if not held:
            return
        for name, tensor in (("key", layer.keys), ("value", layer.values)):
            # a layer without values keeps None or (0,)
            if tensor is not None and tensor.ndim > 1:
                _check_rank(name, tensor)
                state.add(name, tensor)

    def put(self, layer: Any, state: LayerState) -> None:
        if not state.num_tokens:
            return
        key, value = state.take("key"), state.pop("value")
        check_held("key", key, state.num_tokens)
        initialise(layer, key, key if value is None else value)
        layer.keys = key
        if value is not None:
            check_held("value", value, state.num_tokens)
            layer.values = value


class SlidingKeyValue(GrowingKeyValue):
    """The same with `cumulative_length`, the tokens seen: the next one's position."""

    def read(self, layer: Any, state: LayerState) -> None:
        if getattr(layer, "record_past", False):
            raise UnsupportedCache("it records tokens past its window for a rollback")
        super().read(layer, state)
        state.window = layer.sliding_window
        state.cumulative_length = layer.cumulative_length

    def put(self, layer: Any, state: LayerState) -> None:
        super().put(layer, state)
        layer.cumulative_length = state.cumulative_length


class StaticKeyValue:
    """The filled part of buffers of `max_cache_len` tokens; the rest is zero in a new buffer."""

    attributes = ("keys", "values", "cumulative_length")

    def read(self, layer: Any, state: LayerState) -> None:
        if type(getattr(layer, "max_cache_len", None)) is not int:
            raise UnsupportedCache("it has no max_cache_len")
        state.options["max_cache_len"] = layer.max_cache_len
        if layer.keys is None or not getattr(layer, "is_initialized", True):
            return
        seen = self._seen(layer)
        state.cumulative_length = seen
        state.num_tokens = min(seen, layer.max_cache_len)
        if state.num_tokens:
            state.add("key", layer.keys[:, :, : state.num_tokens])
            state.add("value", layer.values[:, :, : state.num_tokens])

    def _seen(self, layer: Any) -> int:
        seen = getattr(layer, "cumulative_length", None)
        if seen is None:
            raise UnsupportedCache("this release of transformers does not count its tokens")
        return int(seen)

    def put(self, layer: Any, state: LayerState) -> None:
        if not state.num_tokens:
            return
        key, value = state.take("key"), state.take("value")
        check_held("key", key, state.num_tokens)
        check_held("value", value, state.num_tokens)
        if key.shape[2] > layer.max_cache_len:
            raise InvalidField(f"key has {key.shape[2]} tokens, buffer {layer.max_cache_len}")
        layer.lazy_initialization(key, value)
        layer.keys[:, :, : key.shape[2]].copy_(key)
        layer.values[:, :, : key.shape[2]].copy_(value)
        self._set_seen(layer, state.cumulative_length)

    def _set_seen(self, layer: Any, seen: int) -> None:
        layer.cumulative_length.fill_(seen)


class StaticSlidingKeyValue(StaticKeyValue):
    """A buffer of one window; `cumulative_length` stops counting once it is full."""

    def read(self, layer: Any, state: LayerState) -> None:
        super().read(layer, state)
        state.window = layer.max_cache_len
        if state.num_tokens:
            state.options["length_in_buffer"] = int(layer.cumulative_length)

    def _seen(self, layer: Any) -> int:
        if not hasattr(layer, "cumulative_length_int"):
            raise UnsupportedCache("this release of transformers does not count its tokens")
        return int(layer.cumulative_length_int)

    def put(self, layer: Any, state: LayerState) -> None:
        super().put(layer, state)
        if state.cumulative_length:
            layer.cumulative_length.fill_(state.option("length_in_buffer", int))

    def _set_seen(self, layer: Any, seen: int) -> None:
        layer.cumulative_length_int = seen
