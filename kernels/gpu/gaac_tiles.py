"""What GAAC's encoder and decoder share: where tiles, tags, bases and escapes are.

Lanes and words as in words.py. Per-element flags of a lane (``tag_low``, ``tag_high``: the bits of the
tags) are the low bits of a uint32. Bases are three times one byte an element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.words import count_flags


@triton.jit
def place_tiles(first_tile, in_step, tiles_per_outer, STEP: tl.constexpr):
    """Outer index and first token of the tiles ``first_tile + in_step`` (int32[STEP, 1])."""
    first_outer = first_tile // tiles_per_outer
    first_in_outer = first_tile - first_outer * tiles_per_outer
    outer = tl.zeros_like(in_step) + first_outer
    in_outer = first_in_outer + in_step
    # most steps lie within one outer index, where no thread has to divide
    if first_in_outer + STEP > tiles_per_outer:
        after = in_outer // tiles_per_outer
        outer += after
        in_outer -= after * tiles_per_outer
    return outer, in_outer * 8


@triton.jit
def load_bases(bases_ptr, outer, num_outer, lane, valid, INNER: tl.constexpr, UNIT: tl.constexpr):
    """The bases of the three windows, one byte an element."""
    LANE_COLUMNS: tl.constexpr = INNER // UNIT
    at = outer * LANE_COLUMNS + lane
    stride = num_outer * LANE_COLUMNS
    b2 = tl.load(bases_ptr + at, mask=valid, other=0).to(tl.uint32)
    b3 = tl.load(bases_ptr + stride + at, mask=valid, other=0).to(tl.uint32)
    b4 = tl.load(bases_ptr + 2 * stride + at, mask=valid, other=0).to(tl.uint32)
    return b2, b3, b4


@triton.jit
def select_base(tag_low, tag_high, b2, b3, b4):
    """The base of each element's window, zero for raw; one byte an element."""
    low = ((tag_low * 0x00204081) & 0x01010101) * 0xFF
    high = ((tag_high * 0x00204081) & 0x01010101) * 0xFF
    narrower = (b2 & ~low) | (b3 & low)
    return (narrower & ~high) | (b4 & ~low & high)


@triton.jit
def place_escapes(tag_low, tag_high, NARROW: tl.constexpr, UNIT: tl.constexpr):
    """Where each lane's plane 2, plane 3 and raw bytes start, counted from the first tile's.

    Tags uint32[STEP, LANES]. Also the number of all bytes and that of raw groups.
    """
    stored = (tag_high << 10) | (tag_low & tag_high) << 20
    if NARROW:
        stored |= tag_low | tag_high
    counts = count_flags(stored, UNIT).to(tl.int32)
    exclusive = tl.cumsum(counts, axis=1) - counts
    totals = tl.sum(counts, axis=1)
    total2, total3, total4 = totals & 0x3FF, (totals >> 10) & 0x3FF, totals >> 20
    sizes = total2 + total3 + 4 * total4
    starts = tl.cumsum(sizes, axis=0) - sizes
    place2 = starts[:, None] + (exclusive & 0x3FF)
    place3 = (starts + total2)[:, None] + ((exclusive >> 10) & 0x3FF)
    place4 = (starts + total2 + total3)[:, None] + 4 * (exclusive >> 20)
    return place2, place3, place4, tl.sum(sizes, axis=0), tl.sum(total4, axis=0)
