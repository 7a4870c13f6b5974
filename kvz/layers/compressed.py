"""Layers with running summaries beside a window: DeepSeek V4 and reference sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvz.formats.errors import UnsupportedCache
from kvz.layers.attention import SlidingKeyValue, check_held, initialise, num_held
from kvz.layers.state import LayerState


class SharedSlidingKeyValue:
    """A window of keys that are the values too: one tensor, stored once, as `key`."""

    attributes = ("keys", "values")

    def read(self, layer: Any, state: LayerState) -> None:
        if getattr(layer, "record_past", False):
            raise UnsupportedCache("it records tokens past its window for a rollback")
        state.window = layer.sliding_window
        state.cumulative_length = layer.cumulative_length
        state.num_tokens = num_held(layer.keys)
        if state.num_tokens:
            if layer.values is not layer.keys:
                raise UnsupportedCache("its values are not its keys")
            state.add("key", layer.keys)

    def put(self, layer: Any, state: LayerState) -> None:
        if state.num_tokens:
            key = state.take("key")
            check_held("key", key, state.num_tokens)
            initialise(layer, key, key)
            layer.keys = layer.values = key
        layer.cumulative_length = state.cumulative_length


class Compressor:
    """DeepSeek V4: dictionaries of tensors by entry name, and the entries emitted so far."""

    def __init__(self, attributes: Sequence[str]) -> None:
        self.attributes = attributes

    def read(self, layer: Any, state: LayerState) -> None:
        for attribute in self.attributes:
            for name, tensor in getattr(layer, attribute).items():
                state.add(f"{name}_{attribute}", tensor)
        for name, count in layer.entry_count.items():
            state.options[f"{name}_entry_count"] = int(count)

    def put(self, layer: Any, state: LayerState) -> None:
        for attribute in self.attributes:
            states = getattr(layer, attribute)
            for name in states:
                states[name] = state.pop(f"{name}_{attribute}")
        for name in layer.entry_count:
            layer.entry_count[name] = state.option(f"{name}_entry_count", int)


class ReferenceSlidingKeyValue(SlidingKeyValue):
    """The prefill kept whole, `prefill_key` and `prefill_value`, then a window of the rest.

    num_tokens and cumulative_length count both; the window's own count is an option.
    """

    attributes = ("keys", "values", "prefill_keys", "prefill_values")

    def read(self, layer: Any, state: LayerState) -> None:
        super().read(layer, state)
        prefill = layer.prefill_cumulative_length
        if layer.prefill_length is not None:
            state.options["prefill_length"] = layer.prefill_length
        state.options["window_length"] = state.cumulative_length
        state.num_tokens += prefill
        state.cumulative_length += prefill
        if prefill:
            state.add("prefill_key", layer.prefill_keys)
            state.add("prefill_value", layer.prefill_values)

    def put(self, layer: Any, state: LayerState) -> None:
        if not state.num_tokens:
            return
        key, value = state.take("prefill_key"), state.take("prefill_value")
        layer.lazy_initialization(key, value)
        layer.prefill_keys, layer.prefill_values = key, value
        layer.prefill_cumulative_length = key.shape[2]
        layer.prefill_length = state.options.get("prefill_length")
        window_key, window_value = state.pop("key"), state.pop("value")
        if window_key is not None and window_value is not None:
            check_held("key", window_key, state.num_tokens - key.shape[2])
            layer.keys, layer.values = window_key, window_value
        layer.cumulative_length = state.option("window_length", int)
