"""What remains of a chunk when Lynx's encoder has coded its pages: flags, exact tokens, lengths."""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.lynx_pages import align_residual, find_axes
from kvz.kernels.gpu.words import NUM_FIELDS, load_field


@triton.jit
def _store_flags(row_ptr, sizes_ptr, num_pages, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Flags of the pages; each one's first size becomes the place of its elements. Returns their
    number."""
    length, across, slabs = find_axes(row_ptr, TILE)
    pages = (length + TILE.page - 1) // TILE.page
    flags_ptr = load_field(row_ptr, 4) + load_field(row_ptr, 9)
    flags_ptr = flags_ptr.to(tl.pointer_type(tl.uint8))
    total = tl.zeros((), tl.int32)
    # "while": Triton's interpreter cannot take a range whose end is a tensor
    start = 0
    while start < num_pages:
        page = start + tl.arange(0, BLOCK)
        valid = page < num_pages
        own_ptr = sizes_ptr + page.to(tl.int64) * slabs
        is_raw = tl.zeros((BLOCK,), tl.int32)
        slab = 0
        while slab < slabs:
            is_raw |= tl.load(own_ptr + slab, mask=valid, other=0)
            slab += 1
        tl.store(flags_ptr + page, is_raw.to(tl.uint8), mask=valid)
        positions = tl.minimum(length - (page % pages) * TILE.page, TILE.page)
        sizes = is_raw * positions * across * TILE.unit
        tl.store(own_ptr, total + tl.cumsum(sizes, axis=0) - sizes, mask=valid)
        total += tl.sum(sizes, axis=0)
        start += BLOCK
    return total


@triton.jit
def _store_exact(row_ptr, num_outer, BLOCK: tl.constexpr, TILE: tl.constexpr):
    in_ptr = load_field(row_ptr, 0).to(tl.pointer_type(tl.uint16))
    exact_ptr = load_field(row_ptr, 4).to(tl.pointer_type(tl.uint16))
    outer_stride = load_field(row_ptr, 1)
    per_outer = load_field(row_ptr, 12).to(tl.int32) * TILE.inner
    start = 0
    while start < per_outer * num_outer:
        i = start + tl.arange(0, BLOCK)
        outer = i // per_outer
        at = outer.to(tl.int64) * outer_stride + (i - outer * per_outer)
        valid = i < per_outer * num_outer
        tl.store(exact_ptr + i, tl.load(in_ptr + at, mask=valid, other=0), mask=valid)
        start += BLOCK


@triton.jit
def finish_kernel(
    chunks_ptr, sizes_ptr, totals_ptr, lengths_ptr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Per chunk: the streams flags and exact, and zeros between anchor and residual.

    ``totals[chunk]`` becomes the number of elements stored as they are, ``lengths[chunk]`` the
    length of anchor, padding and residual; a page's first size the place of its elements.
    """
    chunk = tl.program_id(0).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    num_outer = load_field(row_ptr, 3).to(tl.int32)
    length, across, _ = find_axes(row_ptr, TILE)
    num_pages = (length + TILE.page - 1) // TILE.page * num_outer
    own_sizes_ptr = sizes_ptr + load_field(row_ptr, 6)
    total = _store_flags(row_ptr, own_sizes_ptr, num_pages, BLOCK, TILE)
    tl.store(totals_ptr + chunk, total)

    end = load_field(row_ptr, 11) + 2 * total.to(tl.int64)
    residual_at = align_residual(end)
    gap = end + tl.arange(0, 64)
    payload_ptr = load_field(row_ptr, 4).to(tl.pointer_type(tl.uint8))
    tl.store(payload_ptr + gap, tl.zeros((64,), tl.uint8), mask=gap < residual_at)
    residual_nbytes = num_outer.to(tl.int64) * length * ((across + 1) // 2 * TILE.unit)
    tl.store(lengths_ptr + chunk, residual_at + residual_nbytes)
    _store_exact(row_ptr, num_outer, BLOCK, TILE)
