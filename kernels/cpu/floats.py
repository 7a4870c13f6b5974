"""Floats and their bits, for loops that numba compiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int16, njit, types, uint16, uint32
from numba.extending import intrinsic


@intrinsic
def to_float(typing_context: Any, bits: Any) -> Any:
    """The float32 with the bits of a uint32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def to_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as a uint32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@njit(nogil=True, cache=True)
def bf16_to_float(bits):
    return to_float(uint32(bits) << uint32(16))


@njit(nogil=True, cache=True)
def float_to_bf16(value):
    """Rounded to nearest even; any NaN becomes 0x7FC0."""
    bits = to_bits(value)
    odd = (bits >> uint32(16)) & uint32(1)
    rounded = (bits + (uint32(0x7FFF) + odd)) >> uint32(16)
    return uint16(rounded if value == value else uint32(0x7FC0))


@njit(nogil=True, cache=True)
def order_bf16(bits):
    """BF16 bits to integers in the order of their values, -0 below +0; its own inverse."""
    signed = int16(bits)
    return int16(signed ^ ((signed >> int16(15)) & int16(0x7FFF)))
