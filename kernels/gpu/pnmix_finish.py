"""What remains when PN-Mix's encoder has coded all groups: flags, lengths, groups stored raw."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.pnmix_encode import encode_group, encode_page, load_flag
from kvz.kernels.gpu.pnmix_tiles import copy_raw, count_groups, find_group, stream_address
from kvz.kernels.gpu.words import NUM_FIELDS, load_field


@triton.jit
def finish_kernel(
    chunks_ptr, sizes_ptr, totals_ptr, lengths_ptr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Per chunk: the flags, and the length of the payload.

    ``totals[chunk]`` becomes the number of tokens in groups that are stored as they are, a group's
    first size how many of these are before it.
    """
    chunk = tl.program_id(0).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    coded, groups = load_field(row_ptr, 14).to(tl.int32), count_groups(row_ptr, TILE)
    num_groups = groups * load_field(row_ptr, 3).to(tl.int32)
    flags_ptr = stream_address(row_ptr, 7).to(tl.pointer_type(tl.uint8))
    own_sizes_ptr = sizes_ptr + load_field(row_ptr, 6)
    total = tl.zeros((), tl.int32)
    # "while": Triton's interpreter cannot take a range whose end is a tensor
    first = 0
    while first < num_groups:
        number = first + tl.arange(0, BLOCK)
        valid = number < num_groups
        own_ptr = own_sizes_ptr + number.to(tl.int64) * TILE.slabs
        is_raw = tl.zeros((BLOCK,), tl.int32)
        slab = 0
        while slab < TILE.slabs:
            is_raw |= tl.load(own_ptr + slab, mask=valid, other=0)
            slab += 1
        tl.store(flags_ptr + number, is_raw.to(tl.uint8), mask=valid)
        tokens = is_raw * tl.minimum(coded - number % groups * TILE.group, TILE.group)
        tl.store(own_ptr, total + tl.cumsum(tokens, axis=0) - tokens, mask=valid)
        total += tl.sum(tokens, axis=0)
        first += BLOCK
    tl.store(totals_ptr + chunk, total)
    length = load_field(row_ptr, 12) + total.to(tl.int64) * (2 * TILE.inner)
    tl.store(lengths_ptr + chunk, length)


@triton.jit
def _has_raw(row_ptr, block, num_groups, TILE: tl.constexpr):
    """Whether one of the groups that follow is stored as it is."""
    found, i = 0, 0
    while i < num_groups:
        found |= load_flag(row_ptr, find_group(row_ptr, block + i * TILE.slabs, TILE))
        i += 1
    return found


@triton.jit
def _encode_page_again(row_ptr, scratch_ptr, sizes_ptr, block, group, TILE: tl.constexpr):
    """The page that begins with ``group``, if one does, and has groups stored as they are."""
    if group % TILE.page_groups == 0:
        num_groups = tl.minimum(count_groups(row_ptr, TILE) - group, TILE.page_groups)
        if _has_raw(row_ptr, block, num_groups, TILE) != 0:
            encode_page(row_ptr, scratch_ptr, sizes_ptr, block, True, TILE)


@triton.jit
def _encode_again(row_ptr, scratch_ptr, sizes_ptr, block, TILE: tl.constexpr):
    where = find_group(row_ptr, block, TILE)
    if TILE.page_groups > 0:
        _encode_page_again(row_ptr, scratch_ptr, sizes_ptr, block, where[2], TILE)
    if load_flag(row_ptr, where) != 0:
        if TILE.page_groups == 0:
            encode_group(row_ptr, scratch_ptr, block, (), True, TILE)
        place = load_field(row_ptr, 6) + where[0].to(tl.int64) * TILE.slabs
        before = tl.load(sizes_ptr + place).to(tl.int64)
        copy_raw(
            row_ptr, where, stream_address(row_ptr, 12) + before * (2 * TILE.inner), True, TILE
        )


@triton.jit
def raw_kernel(chunks_ptr, scratch_ptr, sizes_ptr, totals_ptr, TILE: tl.constexpr):
    """Groups that are stored as they are, and again the rest of their pages.

    Programs ``[chunk, i]`` share the chunk's groups.
    """
    chunk = tl.program_id(0).to(tl.int64)
    if tl.load(totals_ptr + chunk) > 0:
        row_ptr = chunks_ptr + chunk * NUM_FIELDS
        num_groups = count_groups(row_ptr, TILE) * load_field(row_ptr, 3).to(tl.int32)
        block = tl.program_id(1)
        while block < num_groups * TILE.slabs:
            _encode_again(row_ptr, scratch_ptr, sizes_ptr, block, TILE)
            block += tl.num_programs(1)
