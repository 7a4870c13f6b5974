"""Convolution and recurrent states of linear attention and state-space layers."""

from __future__ import annotations

from typing import Any

from kvz.formats.errors import IdentityMismatch, UnsupportedCache
from kvz.layers.state import LayerState


def _name(part: str, index: int) -> str:
    return part if index == 0 else f"{part}_{index}"


class LinearStates:
    """`conv_states[i]` `[batch, channels, kernel]` and `recurrent_states[i]`, any shape.

    Either may be absent: LFM2 has no recurrent state, some linear attention no convolution.
    """

    attributes = ("conv_states", "recurrent_states")

    def read(self, layer: Any, state: LayerState) -> None:
        if getattr(layer, "record_past", False):
            raise UnsupportedCache("it records past states for a rollback")
        if not isinstance(getattr(layer, "conv_states", None), dict):
            raise UnsupportedCache("this release of transformers keeps its states in another way")
        state.options["number_of_states"] = layer.number_of_states
        for index in range(layer.number_of_states):
            state.add(_name("conv_state", index), layer.conv_states[index])
            state.add(_name("recurrent_state", index), layer.recurrent_states[index])
            if layer.has_previous_state[index]:
                state.options[_name("has_previous_state", index)] = True
            if layer.conv_kernel_size[index] is not None:
                state.options[_name("conv_kernel_size", index)] = layer.conv_kernel_size[index]

    def put(self, layer: Any, state: LayerState) -> None:
        if state.option("number_of_states", int) != layer.number_of_states:
            raise IdentityMismatch(
                f"number_of_states: file {state.options['number_of_states']}, "
                f"model {layer.number_of_states}"
            )
        for index in range(layer.number_of_states):
            conv = state.pop(_name("conv_state", index))
            recurrent = state.pop(_name("recurrent_state", index))
            if conv is not None:
                name = _name("conv_kernel_size", index)
                layer.lazy_initialization(conv_states=conv, state_idx=index)
                layer.conv_kernel_size[index] = state.option(name, int)
                layer.conv_states[index].copy_(conv)
            if recurrent is not None:
                layer.lazy_initialization(recurrent_states=recurrent, state_idx=index)
                layer.recurrent_states[index].copy_(recurrent)
            name = _name("has_previous_state", index)
            layer.has_previous_state[index] = bool(state.options.get(name))
