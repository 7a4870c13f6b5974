"""NVIDIA's instructions in Triton's interpreter, so that kernels' fast paths run without a GPU.

The interpreter has no inline assembly, and its fused multiply-add rounds twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Words = NDArray[Any]
_LOW = np.uint64(0xFFFF)


def _words(values: Words) -> Words:
    return np.asarray(values).astype(np.int64).astype(np.uint64) & np.uint64(0xFFFFFFFF)


def permute(first: Words, second: Words, selector: Words) -> Words:
    """``prmt.b32``."""
    first, second, selector = np.broadcast_arrays(*map(_words, (first, second, selector)))
    both = first | second << np.uint64(32)
    result = np.zeros_like(both)
    for k in range(4):
        digit = selector >> np.uint64(4 * k) & np.uint64(15)
        byte = both >> (digit & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = np.where(byte >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
        result |= np.where(digit >> np.uint64(3), sign, byte) << np.uint64(8 * k)
    return result.astype(np.uint32)


def _order(bits: Words) -> Words:
    signed = bits.astype(np.int64)
    return np.where(signed >> 15, 0x7FFF - signed, signed)


def _extreme_bf16x2(first: Words, second: Words, *, greatest: bool) -> Words:
    first, second = np.broadcast_arrays(_words(first), _words(second))
    result = np.zeros_like(first)
    for shift in (np.uint64(0), np.uint64(16)):
        a, b = first >> shift & _LOW, second >> shift & _LOW
        takes_first = _order(a) >= _order(b) if greatest else _order(a) <= _order(b)
        is_nan = ((a & np.uint64(0x7FFF)) > 0x7F80) | ((b & np.uint64(0x7FFF)) > 0x7F80)
        result |= np.where(is_nan, np.uint64(0x7FFF), np.where(takes_first, a, b)) << shift
    return result.astype(np.uint32)


def _to_bf16(values: Words) -> Words:
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), np.uint64(0x7FFF), rounded)


def _convert_bf16x2(upper: Words, lower: Words) -> Words:
    return (_to_bf16(upper) << np.uint64(16) | _to_bf16(lower)).astype(np.uint32)


def _reciprocal(value: Words) -> Words:
    with np.errstate(all="ignore"):
        return (np.float32(1) / np.asarray(value, np.float32)).astype(np.float32)


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "prmt.b32": permute,
    "min.NaN.bf16x2": lambda a, b: _extreme_bf16x2(a, b, greatest=False),
    "max.NaN.bf16x2": lambda a, b: _extreme_bf16x2(a, b, greatest=True),
    "cvt.rn.bf16x2.f32": _convert_bf16x2,
    "rcp.rn.f32": _reciprocal,
}


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, interpreted kernels have :data:`INSTRUCTIONS` and exact fused adds."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    class Results:
        def __init__(self, values: Words) -> None:
            dtype = tl.float32 if values.dtype == np.float32 else tl.uint32
            self._handle = TensorHandle(values, dtype)

        def get_result(self, _: int) -> TensorHandle:
            return self._handle

    def inline_asm(_: Any, text: str, constraints: str, values: Any, *rest: Any) -> Results:
        return Results(np.asarray(INSTRUCTIONS[text.split()[0]](*(v.data for v in values))))

    def fused(_: Any, x: Any, y: Any, z: Any) -> TensorHandle:
        # the product of two float32 is exact in float64
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
        return TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", inline_asm)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
