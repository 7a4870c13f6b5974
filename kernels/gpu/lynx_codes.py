"""Lynx's codes of elements in Triton. Names: kernels/reference/lynx.py, lynx_pages.py."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import element_float, set_byte
from kvz.kernels.gpu.words import load_field

#: 1.5 * 2**23: adding it rounds to an integer, to even, and leaves that in the low bits.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _companded_code(rest, reciprocal, thresholds_ptr):
    """The code of an element of each lane."""
    scaled = tl.abs(rest) * reciprocal
    # the table is filled up to 128 thresholds with infinity
    magnitude = tl.where(tl.load(thresholds_ptr + 63) <= scaled, 64, 0)
    for bit in tl.static_range(1, 7):
        probe = magnitude + (64 >> bit)
        # not contiguous: the claim keeps the lanes along the threads (words.py)
        threshold = tl.load(tl.max_contiguous(thresholds_ptr + (probe - 1), (1, 1, 1, 8)))
        magnitude = tl.where(threshold <= scaled, probe, magnitude)
    anchor = (magnitude + 7) >> 4
    residual = magnitude - 16 * anchor + 7
    return (tl.where(rest < 0, 15 - anchor, anchor) << 4 | residual).to(tl.uint32)


@triton.jit
def byte_codes(row_ptr, words, page, groups, where, side: tl.constexpr, TILE: tl.constexpr):
    """The codes of the lower or the upper channels, in bytes (uint32)."""
    UNIT: tl.constexpr = TILE.unit
    minimums, reciprocals = page
    firsts, inverses = groups
    _, _, _, lane, _, across = where
    thresholds_ptr = load_field(row_ptr, 5).to(tl.pointer_type(tl.float32))
    packed = tl.zeros(words[side].shape, tl.uint32)
    for k in tl.static_range(UNIT):
        x = element_float(words[side], k, UNIT)
        units = (x - minimums[side * UNIT + k]) * reciprocals[side * UNIT + k]
        rest, inverse = units - firsts[side * UNIT + k], inverses[side * UNIT + k]
        if TILE.companded:
            code = _companded_code(rest, inverse, thresholds_ptr)
            # a channel that does not exist has the code 0
            code = tl.where(lane + side * ((across + 1) // 2) < across, code, 0)
        else:
            code = (rest * inverse + _ROUND).to(tl.uint32, bitcast=True)
        packed = set_byte(packed, code, k, TILE.fast)
    return packed
