"""The state of one cache layer as named tensors and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvz.formats.errors import IdentityMismatch, InvalidField
from kvz.torch_dtypes import SAFETENSORS_NAMES, TORCH_DTYPES


@dataclass
class LayerState:
    """Named tensors, JSON options and counts of one layer; see `LayerRecord` for the counts."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    num_tokens: int = 0
    cumulative_length: int = 0

    def add(self, name: str, tensor: torch.Tensor | None) -> None:
        """Keep a tensor; a layer's None stays absent."""
        if tensor is not None:
            self.tensors[name] = tensor.detach()

    def take(self, name: str) -> torch.Tensor:
        """A tensor that the layer cannot do without. Raises IdentityMismatch."""
        if name not in self.tensors:
            raise IdentityMismatch(f"{name} is missing, a part of the layer's state")
        return self.tensors.pop(name)

    def pop(self, name: str) -> torch.Tensor | None:
        """A tensor, or None when the layer had none."""
        return self.tensors.pop(name, None)

    def option(self, name: str, kind: type) -> Any:
        """A number or flag of the record. Raises InvalidField when it is absent or no `kind`."""
        value = self.options.get(name)
        if type(value) is not kind:
            raise InvalidField(f"layer option {name} must be {kind.__name__}, got {value!r}")
        return value


class Part(Protocol):
    """Some attributes of a layer object."""

    @property
    def attributes(self) -> Sequence[str]:
        """Names of the attributes that hold tensors and are taken care of."""
        ...

    def read(self, layer: Any, state: LayerState) -> None:
        """Add to `state` what the layer holds. Raises UnsupportedCache."""
        ...

    def put(self, layer: Any, state: LayerState) -> None:
        """Take tensors out of `state` and give them to a fresh layer."""
        ...


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Safetensors dtype and shape by name, for `LayerRecord.state`."""
    return {name: [SAFETENSORS_NAMES[t.dtype], list(t.shape)] for name, t in tensors.items()}


def empty_like(entry: Sequence[Any], device: torch.device) -> torch.Tensor:
    """A tensor without elements of a described dtype and shape. Raises InvalidField."""
    if entry[0] not in TORCH_DTYPES:
        raise InvalidField(f"layer state has dtype {entry[0]!r}, unknown to torch")
    return torch.empty(tuple(entry[1]), dtype=TORCH_DTYPES[entry[0]], device=device)
