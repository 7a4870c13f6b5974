"""Lynx's decoder in Triton: the kernel alone. Layout and names: kernels/reference/lynx.py.

A program handles ``slab`` lower channels of a page, and the upper ones that go with them. What it
reads depends on nothing in the payload but lengths that it checks.
"""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton has no unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import element
from kvz.kernels.gpu.lynx_pages import (
    align_residual,
    find_axes,
    find_page,
    payload_ptr,
    tensor_offset,
    tensor_ptr,
    tile_group,
    tile_positions,
)
from kvz.kernels.gpu.lynx_values import decoded_value, join_careful, join_rounded, unpack_codes
from kvz.kernels.gpu.words import NUM_FIELDS, load_field

_BLOCK = tl.constexpr(1024)
#: Where the levels of codes and of anchors are in the tables.
_FULL_TABLE = tl.constexpr(512)
_ANCHOR_TABLE = tl.constexpr(512 + 1024)


@triton.jit
def _load_codes(row_ptr, where, residuals, batch, FULL: tl.constexpr, TILE: tl.constexpr):
    """Bytes of a batch of groups' anchors and, if ``FULL``, residuals (else anchors again)."""
    _, outer, first, lane, length, across = where
    half = (across + 1) // 2
    position, own = tile_positions(batch, first, length, TILE)
    own &= lane < half
    outer_at = outer.to(tl.int64) * length * half
    at = position * half + lane
    anchors_ptr = payload_ptr(row_ptr, 10, False, TILE) + outer_at
    anchors = tl.load(anchors_ptr + at, mask=own, other=0).to(tl.uint32)
    if FULL:
        residuals_ptr = residuals.to(tl.pointer_type(TILE.bytes_type)) + outer_at
        return anchors, tl.load(residuals_ptr + at, mask=own, other=0).to(tl.uint32)
    else:
        return anchors, anchors


@triton.jit
def _load_channels(ptr, at, where, mask, TILE: tl.constexpr):
    """A value for each of the lanes' lower channels, and of the upper ones; ``at``: of lane 0.

    Zero for channels that do not exist.
    """
    _, _, _, lane, _, across = where
    upper = lane + (across + 1) // 2
    mask &= lane < (across + 1) // 2
    first = tl.load(ptr + (at + lane), mask=mask, other=0)
    return first, tl.load(ptr + (at + upper), mask=mask & (upper < across), other=0)


@triton.jit
def _load_page(row_ptr, where, TILE: tl.constexpr):
    """Minimums and scales of the lanes' channels (words of bits), lower and upper ones."""
    page, _, _, lane, _, across = where
    ptr = payload_ptr(row_ptr, 7, True, TILE)
    at = page.to(tl.int64) * (2 * across)
    minimums = _load_channels(ptr, at, where, lane >= 0, TILE)
    return minimums, _load_channels(ptr, at + across, where, lane >= 0, TILE)


@triton.jit
def _load_groups(row_ptr, where, batch, TILE: tl.constexpr):
    """Offsets and steps of the lanes' channels (words of bytes), lower and upper ones."""
    _, outer, first, _, length, across = where
    ptr = payload_ptr(row_ptr, 8, False, TILE)
    groups_per_outer = (length + TILE.group - 1) // TILE.group
    in_page = tile_group(batch, TILE)
    group = first // TILE.group + in_page
    here = (in_page * TILE.group < TILE.page) & (group < groups_per_outer)
    at = (outer.to(tl.int64) * groups_per_outer + group) * (2 * across)
    offsets = _load_channels(ptr, at, where, here, TILE)
    return offsets, _load_channels(ptr, at + across, where, here, TILE)


@triton.jit
def _store_elements(row_ptr, where, batch, lower, upper, TILE: tl.constexpr):
    """Words of a batch of groups to the tensor; not those of exact tokens."""
    _, outer, first, lane, length, across = where
    half = (across + 1) // 2
    num_exact = load_field(row_ptr, 12).to(tl.int32)
    out_ptr = tensor_ptr(row_ptr, outer, TILE)
    position, own = tile_positions(batch, first, length, TILE)
    own &= lane < half
    if not TILE.by_token:
        own &= position >= num_exact
    for side in tl.static_range(2):
        channel = lane + side * half
        stored = own & (channel < across)
        if TILE.by_token:
            stored &= channel >= num_exact
        word = upper if side else lower
        tl.store(out_ptr + tensor_offset(position, channel, TILE), word, mask=stored)


@triton.jit
def _decode_groups(
    row_ptr,
    where,
    batch,
    bytes_of,
    page,
    groups,
    CAREFUL: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
):
    """A batch of groups. Unless ``CAREFUL``, minimums and scales are finite, the code linear."""
    UNIT: tl.constexpr = TILE.unit
    table_ptr = load_field(row_ptr, 5) + (_FULL_TABLE if FULL else _ANCHOR_TABLE)
    table_ptr = table_ptr.to(tl.pointer_type(tl.int32))
    codes = unpack_codes(bytes_of[0], bytes_of[1], FULL, TILE)
    words = ()
    for side in tl.static_range(2):
        # minimums and scales, offsets and steps of the lower or the upper channels
        of_page, of_group = (page[0][side], page[1][side]), (groups[0][side], groups[1][side])
        values = ()
        for k in tl.static_range(UNIT):
            values = values + (decoded_value(codes[side], k, of_page, of_group, table_ptr, TILE),)
        if CAREFUL:
            words = words + (join_careful(values, of_page, TILE),)
        else:
            words = words + (join_rounded(values, TILE),)
    _store_elements(row_ptr, where, batch, words[0], words[1], TILE)


@triton.jit
def _load_and_decode_groups(
    row_ptr,
    where,
    residuals,
    batch,
    CAREFUL: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
):
    bytes_of = _load_codes(row_ptr, where, residuals, batch, FULL, TILE)
    page = _load_page(row_ptr, where, TILE)
    groups = _load_groups(row_ptr, where, batch, TILE)
    _decode_groups(row_ptr, where, batch, bytes_of, page, groups, CAREFUL, FULL, TILE)


@triton.jit
def _decode_page(
    row_ptr,
    where,
    residuals,
    START: tl.constexpr,
    CAREFUL: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
):
    """From batch ``START`` on; there must be one (Triton fails on loops that never run)."""
    batch = START * 1
    while batch < TILE.batches:
        _load_and_decode_groups(row_ptr, where, residuals, batch, CAREFUL, FULL, TILE)
        batch += 1


@triton.jit
def _is_finite(page, TILE: tl.constexpr):
    """Whether minimums and scales of the lanes' channels are all finite."""
    UNIT: tl.constexpr = TILE.unit
    minimums, scales = page
    most = tl.zeros(minimums[0].shape, tl.int32)
    for side in tl.static_range(2):
        for k in tl.static_range(UNIT):
            low, scale = element(minimums[side], k, UNIT), element(scales[side], k, UNIT)
            most = tl.maximum(most, tl.maximum(low & 0x7FFF, scale & 0x7FFF).to(tl.int32))
    return tl.max(most) < 0x7F80


@triton.jit
def _count_raw(flags_ptr, end, where, TILE: tl.constexpr):
    """Elements of the marked pages before page ``end`` (int64), and the largest flag."""
    _, _, _, _, length, across = where
    pages = (length + TILE.page - 1) // TILE.page
    total = tl.zeros((), tl.int64)
    largest = tl.zeros((), tl.int32)
    start = 0
    while start < end:
        page = start + tl.arange(0, _BLOCK)
        flag = tl.load(flags_ptr + page, mask=page < end, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.max(flag, axis=0))
        here = tl.minimum(length - (page % pages) * TILE.page, TILE.page)
        here = tl.sum(tl.where(flag == 1, here, 0), axis=0)
        total += here.to(tl.int64) * (across * TILE.unit)
        start += _BLOCK
    return total, largest


@triton.jit
def _copy_raw(row_ptr, where, raw, TILE: tl.constexpr):
    """A page whose elements lie at address ``raw``."""
    _, _, first, lane, length, across = where
    half = (across + 1) // 2
    raw_ptr = raw.to(tl.pointer_type(TILE.bits_type))
    batch = 0
    while batch < TILE.batches:
        position, own = tile_positions(batch, first, length, TILE)
        own &= lane < half
        at = (position - first) * across + lane
        lower = tl.load(raw_ptr + at, mask=own, other=0)
        upper = tl.load(raw_ptr + (at + half), mask=own & (lane + half < across), other=0)
        _store_elements(row_ptr, where, batch, lower, upper, TILE)
        batch += 1


@triton.jit
def _copy_exact(row_ptr, outer, per_outer):
    """The exact tokens of an outer index, ``per_outer`` elements."""
    outer = outer.to(tl.int64)
    exact_ptr = load_field(row_ptr, 4).to(tl.pointer_type(tl.uint16)) + outer * per_outer
    out_ptr = load_field(row_ptr, 0).to(tl.pointer_type(tl.uint16))
    out_ptr += outer * load_field(row_ptr, 1)
    start = 0
    while start < per_outer:
        i = start + tl.arange(0, _BLOCK)
        value = tl.load(exact_ptr + i, mask=i < per_outer, other=0)
        tl.store(out_ptr + i, value, mask=i < per_outer)
        start += _BLOCK


@triton.jit
def _decode_any_page(row_ptr, block, where, anchor_nbytes, FULL: tl.constexpr, TILE: tl.constexpr):
    """``anchor_nbytes``: bytes before the residual, or of the anchor alone; not trusted."""
    SMALL: tl.constexpr = TILE.small
    page_index, outer, first, _, length, across = where
    payload = load_field(row_ptr, 4)
    residuals = payload + anchor_nbytes
    # everything is under way before the first of it decides what happens
    bytes_of = _load_codes(row_ptr, where, residuals, 0, FULL, TILE)
    page = _load_page(row_ptr, where, TILE)
    groups = _load_groups(row_ptr, where, 0, TILE)
    flags_ptr = (payload + load_field(row_ptr, 9)).to(tl.pointer_type(tl.uint8))
    flag = tl.load(flags_ptr + page_index)
    if flag == 0:
        if TILE.companded | _is_finite(page, TILE):
            _decode_groups(row_ptr, where, 0, bytes_of, page, groups, TILE.companded, FULL, TILE)
            if TILE.batches > 1:
                _decode_page(row_ptr, where, residuals, 1, TILE.companded, FULL, TILE)
        else:
            _decode_page(row_ptr, where, residuals, 0, True, FULL, SMALL)
    elif flag == 1:
        counted = _count_raw(flags_ptr, page_index, where, TILE)
        raw_at = load_field(row_ptr, 11) + 2 * counted[0]
        here = tl.minimum(length - first, TILE.page).to(tl.int64) * (across * TILE.unit)
        if raw_at + 2 * here <= anchor_nbytes:
            _copy_raw(row_ptr, where, payload + raw_at, SMALL)
    axes = find_axes(row_ptr, TILE)
    if (first == 0) & (block % axes[2] == 0):
        _copy_exact(row_ptr, outer, load_field(row_ptr, 12).to(tl.int32) * TILE.inner)


@triton.jit
def decode_kernel(
    chunks_ptr,
    program_chunk_ptr,
    status_ptr,
    HAS_RESIDUAL: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
):
    """``HAS_RESIDUAL``: payloads have one; ``FULL``: it is used.

    Writes 1 to a chunk's status where flags and the payload's length do not belong together.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(program_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    block = (program - load_field(row_ptr, 6)).to(tl.int32)
    num_outer = load_field(row_ptr, 3).to(tl.int32)
    raw_at = load_field(row_ptr, 11)
    where = find_page(row_ptr, block, TILE)
    _, _, _, _, length, across = where
    anchor_nbytes = load_field(row_ptr, 13)
    misplaced = anchor_nbytes < raw_at
    if HAS_RESIDUAL:
        half_nbytes = (across + 1) // 2 * TILE.unit
        anchor_nbytes -= num_outer.to(tl.int64) * length * half_nbytes
        # from a length that is not right, the residual may not even be aligned
        misplaced = (anchor_nbytes < raw_at) | (anchor_nbytes != align_residual(anchor_nbytes))
    if misplaced:
        tl.store(status_ptr + chunk, 1)
    else:
        if block == 0:
            flags_ptr = load_field(row_ptr, 4) + load_field(row_ptr, 9)
            flags_ptr = flags_ptr.to(tl.pointer_type(tl.uint8))
            num_pages = (length + TILE.page - 1) // TILE.page * num_outer
            counted = _count_raw(flags_ptr, num_pages, where, TILE)
            expected = raw_at + 2 * counted[0]
            if HAS_RESIDUAL:
                expected = align_residual(expected)
            if (counted[1] > 1) | (expected != anchor_nbytes):
                tl.store(status_ptr + chunk, 1)
        _decode_any_page(row_ptr, block, where, anchor_nbytes, FULL, TILE)
