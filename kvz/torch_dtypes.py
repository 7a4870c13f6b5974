"""Torch dtypes and their safetensors names. The only bridge between torch and byte work."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from kvz.formats.errors import SourceError

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
TORCH_DTYPES = {
    name: getattr(torch, attribute)
    for name, attribute in _NAMES.items()
    if hasattr(torch, attribute)
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def describe_tensor(tensor: torch.Tensor) -> tuple[str, NDArray[Any]]:
    """Safetensors dtype and integer view of a tensor (on the CPU without a copy).

    Raises SourceError for a dtype that safetensors does not have.
    """
    name = SAFETENSORS_NAMES.get(tensor.dtype)
    if name is None:
        raise SourceError(f"dtype {tensor.dtype} has no safetensors name")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    host = tensor.detach().cpu()
    return name, host.view(_INTEGERS[host.element_size()]).numpy()


def to_tensor(array: NDArray[Any], dtype: str) -> torch.Tensor:
    """Inverse of :func:`describe_tensor`: an integer view and its safetensors dtype."""
    return torch.from_numpy(array).view(TORCH_DTYPES[dtype])
