"""Bytes of a lane: what the GAAC and the SplitZip kernels share.

A *lane* is ``UNIT`` neighbouring elements: four where the addresses allow it, else one. Values of
a lane's elements are the bytes of a uint32 (of one element: its low byte), and arithmetic is on all
four at once. Rows of ``NUM_FIELDS`` numbers describe the chunks (kernels/gpu/chunks.py).

Addresses come as integers, so that the compiler knows nothing of their alignment and keeps one lane
to a thread: neighbouring threads then access neighbouring words. Where addresses are not
contiguous, ``tl.max_contiguous`` claims that they are, only to keep lanes along the threads: from
the contiguity the compiler derives the order of a tensor's elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_FIELDS = tl.constexpr(16)


@triton.jit
def load_field(row_ptr, index: tl.constexpr):
    return tl.load(row_ptr + index)


@triton.jit
def shift(value, left: tl.constexpr):
    if left >= 0:
        return value << left
    else:
        return value >> (-left)


@triton.jit
def permute(first, second, selector):
    """The bytes of ``second:first`` that the low four digits of ``selector`` name."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [first, second, selector],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def interleave(low, high, UNIT: tl.constexpr, PERMUTE: tl.constexpr):
    """16-bit elements of a lane (uint64 or uint32) from their low and their high bytes.

    ``PERMUTE``: with the GPU's byte permutation, which Triton's interpreter lacks.
    """
    if UNIT == 1:
        return low | high << 8
    elif PERMUTE:
        first, last = permute(low, high, 0x5140), permute(low, high, 0x7362)
        return first.to(tl.uint64) | last.to(tl.uint64) << 32
    else:
        return _spread(low) | _spread(high) << 8


@triton.jit
def _spread(packed):
    word = packed.to(tl.uint64)
    word = (word | word << 16) & 0x0000FFFF0000FFFF
    return (word | word << 8) & 0x00FF00FF00FF00FF


@triton.jit
def deinterleave(word, UNIT: tl.constexpr, PERMUTE: tl.constexpr):
    """Low and high bytes of a lane's 16-bit elements."""
    if UNIT == 1:
        return word.to(tl.uint32) & 0xFF, word.to(tl.uint32) >> 8
    elif PERMUTE:
        first, last = word.to(tl.uint32), (word >> 32).to(tl.uint32)
        return permute(first, last, 0x6420), permute(first, last, 0x7531)
    else:
        return _gather(word), _gather(word >> 8)


@triton.jit
def _gather(word):
    word = word & 0x00FF00FF00FF00FF
    word = (word | word >> 8) & 0x0000FFFF0000FFFF
    return (word | word >> 16).to(tl.uint32)


@triton.jit
def join_bf16(sign_mantissa, exponent, UNIT: tl.constexpr, PERMUTE: tl.constexpr):
    """BF16 elements of a lane from their bytes."""
    high = (sign_mantissa & 0x80808080) | ((exponent >> 1) & 0x7F7F7F7F)
    low = (sign_mantissa & 0x7F7F7F7F) | ((exponent << 7) & 0x80808080)
    return interleave(low, high, UNIT, PERMUTE)


@triton.jit
def split_bf16(word, UNIT: tl.constexpr, PERMUTE: tl.constexpr):
    """Sign-mantissa bytes and exponents of a lane."""
    low, high = deinterleave(word, UNIT, PERMUTE)
    exponent = ((high << 1) & 0xFEFEFEFE) | ((low >> 7) & 0x01010101)
    return (high & 0x80808080) | (low & 0x7F7F7F7F), exponent & (0xFF if UNIT == 1 else 0xFFFFFFFF)


@triton.jit
def subtract_bytes(left, right):
    """``left - right`` modulo 256 in each byte."""
    difference = (left | 0x80808080) - (right & 0x7F7F7F7F)
    return difference ^ 0x80808080 ^ ((left ^ right) & 0x80808080)


@triton.jit
def is_nonzero(value):
    """1 in each byte that is not zero."""
    return ((((value & 0x7F7F7F7F) + 0x7F7F7F7F) | value) >> 7) & 0x01010101


@triton.jit
def flags_to_bits(flags):
    """Bytes of 0 or 1 to the low four bits."""
    return (flags * 0x10204080) >> 28


@triton.jit
def bits_to_flags(bits):
    """The low four bits to bytes of 0 or 1."""
    return (bits * 0x00204081) & 0x01010101


@triton.jit
def count_flags(flags):
    return (flags * 0x01010101) >> 24
