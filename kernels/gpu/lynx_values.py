"""Values of Lynx's codes in Triton, as BF16. Names: kernels/reference/lynx.py, lynx_pages.py."""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton has no unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import (
    BYTE,
    biased_byte,
    element,
    join_elements,
    round_bits,
    round_pair,
    to_float,
)
from kvz.kernels.gpu.words import permute


@triton.jit
def join_rounded(values, TILE: tl.constexpr):
    """A lane from its elements as float32, none of them NaN."""
    UNIT: tl.constexpr = TILE.unit
    if TILE.fast:
        first, last = round_pair(values[0], values[1]), round_pair(values[2], values[3])
        return first.to(tl.uint64) | last.to(tl.uint64) << 32
    else:
        bits = ()
        for k in tl.static_range(UNIT):
            bits = bits + (round_bits(values[k]),)
        return join_elements(bits, UNIT)


@triton.jit
def _lookup_midpoints(anchors):
    """The 8-bit codes that the low halves of four bytes stand for."""
    both = (anchors & 0x000F000F) | ((anchors >> 4) & 0x00F000F0)
    index = (both & 0xFF) | (both >> 8)
    below8 = permute(0x38281802, 0x78685848, index & 0x7777)
    from8 = permute(0xB7A79787, 0xFDE7D7C7, index & 0x7777)
    return permute(below8, from8, ((index >> 1) & 0x4444) + 0x3210)


@triton.jit
def _midpoint(anchor):
    middle = 16 * anchor + 8 - (anchor >> 3)
    return tl.where(anchor == 0, 2, tl.where(anchor == 15, 253, middle))


@triton.jit
def _midpoints(anchors, TILE: tl.constexpr):
    """The 8-bit codes that the low halves of a lane's bytes stand for, by the linear code."""
    UNIT: tl.constexpr = TILE.unit
    if TILE.fast:
        return _lookup_midpoints(anchors)
    else:
        codes = tl.zeros_like(anchors)
        for k in tl.static_range(UNIT):
            codes |= _midpoint((anchors >> 8 * k) & 15) << 8 * k
        return codes


@triton.jit
def unpack_codes(anchors, residuals, FULL: tl.constexpr, TILE: tl.constexpr):
    """Codes of a lane's lower channels and of its upper ones; companded anchors are 0-15."""
    if FULL:
        lower = ((anchors << 4) & 0xF0F0F0F0) | (residuals & 0x0F0F0F0F)
        return lower, (anchors & 0xF0F0F0F0) | ((residuals >> 4) & 0x0F0F0F0F)
    elif TILE.companded:
        return anchors & 0x0F0F0F0F, (anchors >> 4) & 0x0F0F0F0F
    else:
        return _midpoints(anchors, TILE), _midpoints(anchors >> 4, TILE)


@triton.jit
def _number(codes, k: tl.constexpr, offset, step, TILE: tl.constexpr):
    """The reference's number for element ``k``, linear, over 2**8: an integer below 2**18."""
    offset, step = offset.to(tl.float32) * 256.0, step.to(tl.float32)
    biased = biased_byte(codes, k, TILE.fast)
    if TILE.fast:
        # all exact, so that it makes no difference that this one is fused
        return tl.fma(biased, step, offset - BYTE * step)
    else:
        return (biased - BYTE) * step + offset


@triton.jit
def decoded_value(codes, k: tl.constexpr, page, group, table_ptr, TILE: tl.constexpr):
    """Decoded element ``k`` of lanes (float32), right where the scale is not zero."""
    minimum, scale = to_float(element(page[0], k, TILE.unit)), element(page[1], k, TILE.unit)
    offset = (group[0].to(tl.uint32) >> 8 * k) & 0xFF
    step = (group[1].to(tl.uint32) >> 8 * k) & 0xFF
    if TILE.companded:
        # not contiguous: the claim keeps the lanes along the threads (words.py)
        entry_ptr = tl.max_contiguous(table_ptr + ((codes >> 8 * k) & 0xFF), (1, 1, 1, 8))
        level = tl.load(entry_ptr)
        number = (offset << 16).to(tl.int32) + step.to(tl.int32) * level
        return minimum + to_float(scale) * (number.to(tl.float32) * (1 / (1 << 24)))
    else:
        # adding -0 leaves the minimum as it is, -0, too. A BF16 can be divided by 2**16 and stays
        # exact
        unit = to_float(tl.where(scale == 0, 0x8000, scale)) * (1 / (1 << 16))
        return minimum + unit * _number(codes, k, offset, step, TILE)


@triton.jit
def join_careful(values, page, TILE: tl.constexpr):
    """A lane from its elements as float32; where the scale is zero, from their minimums."""
    UNIT: tl.constexpr = TILE.unit
    bits = ()
    for k in tl.static_range(UNIT):
        constant = element(page[1], k, UNIT) == 0
        bits = bits + (tl.where(constant, element(page[0], k, UNIT), round_bits(values[k])),)
    return join_elements(bits, UNIT)
