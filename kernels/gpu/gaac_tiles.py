"""What GAAC's encoder and decoder share: where tiles and escapes are, which base a group has.

Lanes as in words.py. ``tag_low`` and ``tag_high`` are the two bits of each element's tag, as bytes.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.words import count_flags


@triton.jit
def place_tiles(outer, in_outer, tiles_per_outer, SHORT: tl.constexpr):
    """``(outer, in_outer)`` of tiles, ``in_outer`` tiles after the first of outer index ``outer``.

    Unless ``SHORT``, they lie within two outer indices.
    """
    if SHORT:
        after = (in_outer.to(tl.uint32) // tiles_per_outer.to(tl.uint32)).to(tl.int32)
    else:
        after = (in_outer >= tiles_per_outer).to(tl.int32)
    return outer + after, in_outer - after * tiles_per_outer


@triton.jit
def load_rows(ptr, rows_left, LANE_COLUMNS: tl.constexpr):
    """The eight rows of tiles; ``ptr`` to the first row, absent rows are zero."""
    rows = ()
    for t in tl.static_range(8):
        row = tl.load(ptr + t * LANE_COLUMNS, mask=rows_left > t, other=0)
        rows = rows + (row,)  # noqa: RUF005  (Triton has no unpacking)
    return rows


@triton.jit
def load_bases(bases_ptr, outer, num_outer, lane, valid, INNER: tl.constexpr, UNIT: tl.constexpr):
    """The bases of the three windows."""
    LANE_COLUMNS: tl.constexpr = INNER // UNIT
    at = outer * LANE_COLUMNS + lane
    stride = num_outer * LANE_COLUMNS
    b2 = tl.load(bases_ptr + at, mask=valid, other=0).to(tl.uint32)
    b3 = tl.load(bases_ptr + stride + at, mask=valid, other=0).to(tl.uint32)
    b4 = tl.load(bases_ptr + 2 * stride + at, mask=valid, other=0).to(tl.uint32)
    return b2, b3, b4


@triton.jit
def select_base(tag_low, tag_high, b2, b3, b4):
    """The base of each element's window, zero for raw."""
    low, high = tag_low * 0xFF, tag_high * 0xFF
    narrower = b2 ^ ((b2 ^ b3) & low)
    wider = b4 ^ (b4 & low)
    return narrower ^ ((narrower ^ wider) & high)


@triton.jit
def place_escapes(tag_low, tag_high, NARROW: tl.constexpr):
    """Where each lane's plane 2, plane 3 and raw bytes start, counted from the first tile's.

    Tags uint32[STEP, LANES]. Also the number of all bytes and that of raw groups.
    """
    # one sum for three numbers, each below 2**10
    counts = count_flags(tag_high) << 10 | count_flags(tag_low & tag_high) << 20
    if NARROW:
        counts |= count_flags(tag_low | tag_high)
    counts = counts.to(tl.int32)
    exclusive = tl.cumsum(counts, axis=1) - counts
    totals = tl.sum(counts, axis=1)
    total2, total3, total4 = totals & 0x3FF, (totals >> 10) & 0x3FF, totals >> 20
    sizes = total2 + total3 + 4 * total4
    starts = tl.cumsum(sizes, axis=0) - sizes
    place2 = starts[:, None] + (exclusive & 0x3FF)
    place3 = (starts + total2)[:, None] + ((exclusive >> 10) & 0x3FF)
    place4 = (starts + total2 + total3)[:, None] + 4 * (exclusive >> 20)
    return place2, place3, place4, tl.sum(sizes, axis=0), tl.sum(total4, axis=0)
