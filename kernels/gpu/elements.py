"""Elements of lanes as numbers, and lanes made of them. Lanes: kernels/gpu/words.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.words import permute

#: 2**23: its low bits, or-ed with a byte, add the byte.
BYTE = tl.constexpr(8388608.0)
_BYTE_BITS = tl.constexpr(0x4B000000)
_NAN = tl.constexpr(0x7FC0)
#: Of BF16 bits without a sign.
LARGEST = tl.constexpr(0x7FFF)


@triton.jit
def element(word, k: tl.constexpr, UNIT: tl.constexpr):
    """The bits of a lane's element, uint32."""
    if UNIT == 1:
        return word.to(tl.uint32)
    else:
        pair = (word >> (32 * (k // 2))).to(tl.uint32)
        return pair >> 16 if k % 2 else pair & 0xFFFF


@triton.jit
def to_float(bits):
    """BF16 bits as float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def element_float(word, k: tl.constexpr, UNIT: tl.constexpr):
    """A lane's element as float32."""
    if UNIT == 1:
        return to_float(word)
    else:
        pair = (word >> (32 * (k // 2))).to(tl.uint32)
        bits = pair & 0xFFFF0000 if k % 2 else pair << 16
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def join_elements(bits, UNIT: tl.constexpr):
    """A lane from its elements' bits (uint32 below 2**16)."""
    if UNIT == 1:
        return bits[0].to(tl.uint16)
    else:
        first, last = bits[0] | bits[1] << 16, bits[2] | bits[3] << 16
        return first.to(tl.uint64) | last.to(tl.uint64) << 32


@triton.jit
def set_byte(packed, value, k: tl.constexpr, PERMUTE: tl.constexpr):
    """``packed`` (uint32), whose bytes from ``k`` on are zero, with the lowest one of ``value``.

    ``PERMUTE``: with the GPU's byte permutation, which Triton's interpreter lacks.
    """
    if k == 0:
        return value & 0xFF
    elif PERMUTE:
        return permute(packed, value, 0x3210 + ((4 - k) << 4 * k))
    else:
        return packed | (value & 0xFF) << 8 * k


@triton.jit
def biased_byte(packed, k: tl.constexpr, PERMUTE: tl.constexpr):
    """Byte ``k`` of a uint32, plus ``BYTE``, as float32."""
    if PERMUTE:
        return permute(packed, _BYTE_BITS, 0x7440 + k).to(tl.float32, bitcast=True)
    else:
        return (((packed >> 8 * k) & 0xFF) | _BYTE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def byte_float(packed, k: tl.constexpr, PERMUTE: tl.constexpr):
    """Byte ``k`` of a uint32 as float32."""
    return biased_byte(packed, k, PERMUTE) - BYTE


@triton.jit
def round_pair(first, second):
    """Two float32 rounded to BF16, in one uint32; not for NaN, nor in Triton's interpreter."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;",
        "=r,f,f",
        [second, first],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def round_bits(value):
    """BF16 bits of a float32, to nearest even; the same for every NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, _NAN, rounded)


@triton.jit
def half_float(bits):
    """FP16 bits (the low half of an integer) as float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def least_pair(a, b):
    """Of BF16 pairs; -0 below +0, NaN if there is one. Not in Triton's interpreter."""
    return tl.inline_asm_elementwise(
        "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def order_bits(bits):
    """BF16 bits as integers (int32) in the order of their values, -0 below +0."""
    bits = bits.to(tl.int32)
    return tl.where(bits > LARGEST, LARGEST - bits, bits)


@triton.jit
def split4(joined):
    pairs = tl.split(joined)
    a, b = tl.split(pairs[0])
    c, d = tl.split(pairs[1])
    return a, b, c, d
