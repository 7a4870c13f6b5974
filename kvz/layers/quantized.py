"""Layers that keep keys and values as codes with scales: FP8 and HQQ."""

from __future__ import annotations

from typing import Any

import torch

from kvz.formats.errors import InvalidField, UnsupportedCache
from kvz.layers.attention import check_held
from kvz.layers.state import LayerState
from kvz.torch_dtypes import SAFETENSORS_NAMES, TORCH_DTYPES

_SIDES = (("key", "_quantized_keys"), ("value", "_quantized_values"))


def _remember_dtype(layer: Any, state: LayerState) -> None:
    state.options["dtype"] = SAFETENSORS_NAMES[layer.keys.dtype]


def _initialise(layer: Any, state: LayerState, device: torch.device) -> None:
    name = state.option("dtype", str)
    if name not in TORCH_DTYPES:
        raise InvalidField(f"layer option dtype {name!r} is unknown to torch")
    layer.device = device
    layer.keys = torch.tensor([], dtype=TORCH_DTYPES[name], device=device)
    layer.values = torch.tensor([], dtype=TORCH_DTYPES[name], device=device)
    layer.is_initialized = True


class Fp8KeyValue:
    """FP8 codes `[batch, heads, tokens, head_dim]` and one float32 scale each, kept for ever."""

    attributes = ("keys", "values", "_quantized_keys", "_quantized_values")

    def read(self, layer: Any, state: LayerState) -> None:
        state.num_tokens = state.cumulative_length = layer.cumulative_length
        if not layer.is_initialized:
            return
        _remember_dtype(layer, state)
        for name, attribute in _SIDES:
            codes, scale = getattr(layer, attribute)
            state.add(name, codes)
            state.add(f"{name}_scale", scale)

    def put(self, layer: Any, state: LayerState) -> None:
        layer.cumulative_length = state.cumulative_length
        if not state.num_tokens:
            return
        for name, attribute in _SIDES:
            codes, scale = state.take(name), state.take(f"{name}_scale")
            check_held(name, codes, state.num_tokens)
            if codes.dtype != layer.fp8_dtype:
                raise InvalidField(f"{name} is {codes.dtype}, layer keeps {layer.fp8_dtype}")
            setattr(layer, attribute, (codes, scale))
        _initialise(layer, state, codes.device)


class HqqKeyValue:
    """HQQ codes, scales and zeros, and `key`, `value` of the tokens not yet quantised."""

    attributes = ("keys", "values", "_quantized_keys", "_quantized_values")

    def read(self, layer: Any, state: LayerState) -> None:
        if layer._pending_beam_idx is not None:
            raise UnsupportedCache("it has beams to reorder: one more forward pass settles them")
        state.num_tokens = state.cumulative_length = layer.cumulative_length
        for name in ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length"):
            state.options[name] = getattr(layer, name)
        if not layer.is_initialized:
            return
        _remember_dtype(layer, state)
        for name, attribute in _SIDES:
            codes, meta = getattr(layer, attribute)
            state.add(f"{name}_codes", codes)
            self._read_meta(name, meta, state)
        if layer.keys.numel():
            state.add("key", layer.keys)
            state.add("value", layer.values)

    def _read_meta(self, name: str, meta: dict[str, Any], state: LayerState) -> None:
        for field, value in meta.items():
            if isinstance(value, torch.Tensor):
                state.add(f"{name}_{field}", value)
            elif isinstance(value, torch.dtype):
                state.options[f"{name}_{field}"] = {"dtype": SAFETENSORS_NAMES[value]}
            elif isinstance(value, (torch.Size, list, tuple)):
                state.options[f"{name}_{field}"] = {"shape": [int(size) for size in value]}
            elif value is None or isinstance(value, (bool, int, float, str)):
                state.options[f"{name}_{field}"] = value
            else:
                raise UnsupportedCache(f"HQQ's {field} is a {type(value).__name__}")

    def put(self, layer: Any, state: LayerState) -> None:
        layer.cumulative_length = state.cumulative_length
        if not state.num_tokens:
            return
        for name, attribute in _SIDES:
            codes = state.take(f"{name}_codes")
            setattr(layer, attribute, (codes, self._meta(name, state)))
        _initialise(layer, state, codes.device)
        key, value = state.pop("key"), state.pop("value")
        if key is not None and value is not None:
            layer.keys, layer.values = key, value

    def _meta(self, name: str, state: LayerState) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "scale": state.take(f"{name}_scale"),
            "zero": state.take(f"{name}_zero"),
        }
        for option, value in state.options.items():
            if not option.startswith(f"{name}_"):
                continue
            field = option.removeprefix(f"{name}_")
            meta[field] = _meta_value(option, value)
        return meta


def _meta_value(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    dtype, shape = value.get("dtype"), value.get("shape")
    if dtype in TORCH_DTYPES:
        return TORCH_DTYPES[dtype]
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise InvalidField(f"layer option {name} is {value!r}, neither a dtype nor a shape")
    return torch.Size(shape)
