"""Words of 16-bit fields: what the GAAC and the SplitZip kernels share.

A *lane* is ``UNIT`` neighbouring elements: four where the addresses allow it, else one. Arithmetic is
on a *word*, one 16-bit field an element: uint64 for four elements, uint32 for one. ``ONES`` times a
16-bit pattern is that pattern in every field. One byte an element is uint32 or uint8.

Addresses come as integers, so that the compiler knows nothing of their alignment and keeps one lane
to a thread: neighbouring threads then always access neighbouring words.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Columns of the table that describes the chunks (kernels/gpu/chunks.py).
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
def spread_bytes(packed, UNIT: tl.constexpr):
    """Bytes of a lane to the low bytes of the fields."""
    if UNIT == 4:
        word = packed.to(tl.uint64)
        word = (word | word << 16) & 0x0000FFFF0000FFFF
        return (word | word << 8) & 0x00FF00FF00FF00FF
    else:
        return packed.to(tl.uint32)


@triton.jit
def gather_bytes(word, UNIT: tl.constexpr):
    """The inverse of ``spread_bytes``; fields must be below 256."""
    if UNIT == 4:
        word = (word | word >> 8) & 0x0000FFFF0000FFFF
        return (word | word >> 16).to(tl.uint32)
    else:
        return word.to(tl.uint8)


@triton.jit
def spread_sign_mantissa(packed, UNIT: tl.constexpr):
    """Sign-mantissa bytes of a lane to BF16 with exponent zero."""
    if UNIT == 4:
        word = packed.to(tl.uint64)
        word = (word | word << 16) & 0x0000FFFF0000FFFF
        return (
            (word & 0x0000007F0000007F)
            | ((word << 8) & 0x007F8000007F8000)
            | ((word << 16) & 0x8000000080000000)
        )
    else:
        word = packed.to(tl.uint32)
        return (word & 0x7F) | ((word & 0x80) << 8)


@triton.jit
def gather_sign_mantissa(word, UNIT: tl.constexpr):
    """Sign-mantissa bytes of a lane of BF16."""
    ONES: tl.constexpr = 0x0001000100010001 if UNIT == 4 else 1
    return gather_bytes((word & (0x7F * ONES)) | ((word >> 8) & (0x80 * ONES)), UNIT)


@triton.jit
def gather_flags(word, UNIT: tl.constexpr):
    """One bit an element (uint32) that says whether its field, below 512, is not zero."""
    ONES: tl.constexpr = 0x0001000100010001 if UNIT == 4 else 1
    flags = ((word + 0x1FF * ONES) >> 9) & ONES
    if UNIT == 4:
        # field k at bit 16k moves to bit 48 + k
        return (flags * 0x0001000200040008 >> 48).to(tl.uint32) & 15
    else:
        return flags


@triton.jit
def count_flags(flags, UNIT: tl.constexpr):
    """Numbers of set bits of up to three sets of flags, 10 bits apart."""
    if UNIT == 4:
        LOWEST: tl.constexpr = 0x00100401
        flags = flags - ((flags >> 1) & (5 * LOWEST))
        flags = (flags & (3 * LOWEST)) + ((flags >> 2) & (3 * LOWEST))
    return flags
