"""Lynx's encoder in Triton: the kernels alone. Layout and names: kernels/reference/lynx.py.

``encode_kernel`` encodes as if no page had to be stored as it is; ``finish_kernel``
(lynx_finish.py) counts those that have to; ``raw_kernel`` encodes their chunks again, with the
residuals behind them. Differences to the reference that change no bit: values in units are ordered
as the elements are, so the least and the greatest are those of the least and the greatest element;
and no code of a page that is coded exceeds 255, no offset 254.
"""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton has no unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import element_float, join_elements, set_byte, to_float
from kvz.kernels.gpu.lynx_codes import byte_codes
from kvz.kernels.gpu.lynx_pages import (
    align_residual,
    find_axes,
    find_page,
    first_of_group,
    payload_ptr,
    tensor_offset,
    tensor_ptr,
    tile_group,
    tile_positions,
)
from kvz.kernels.gpu.lynx_ranges import (
    companded_group,
    group_range,
    limits,
    linear_group,
    merge_ranges,
    page_range,
    page_scale,
    split_range,
)
from kvz.kernels.gpu.words import NUM_FIELDS, load_field


@triton.jit
def _load_tile(row_ptr, where, batch, TILE: tl.constexpr):
    """The words of the lower channels and those of the upper ones.

    Positions that do not exist repeat others of their group, so that they change no least or
    greatest value; exact tokens repeat the first one after them. Channels that do not exist are
    zero.
    """
    _, outer, first, lane, length, across = where
    half = (across + 1) // 2
    in_ptr = tensor_ptr(row_ptr, outer, TILE)
    num_exact = load_field(row_ptr, 12).to(tl.int32)
    position = tl.minimum(tile_positions(batch, first, length, TILE)[0], length - 1)
    lower, upper = lane, lane + half
    if TILE.by_token:
        lower = tl.maximum(lower, tl.minimum(num_exact, across - 1))
        upper = tl.maximum(upper, tl.minimum(num_exact, across - 1))
    else:
        position = tl.maximum(position, tl.minimum(num_exact, length - 1))
    valid = lane < half
    first_words = tl.load(in_ptr + tensor_offset(position, lower, TILE), mask=valid, other=0)
    valid &= lane + half < across
    return first_words, tl.load(in_ptr + tensor_offset(position, upper, TILE), mask=valid, other=0)


@triton.jit
def _store_channels(ptr, at, values, mask, where, WIDE: tl.constexpr, TILE: tl.constexpr):
    """One value per channel, of 16 bits if ``WIDE``, else of 8; ``at``: the place of lane 0."""
    UNIT: tl.constexpr = TILE.unit
    _, _, _, lane, _, across = where
    half = (across + 1) // 2
    for side in tl.static_range(2):
        channel = lane + side * half
        own = ()
        packed = tl.zeros_like(values[0])
        for k in tl.static_range(UNIT):
            own = own + (values[side * UNIT + k],)
            packed = set_byte(packed, values[side * UNIT + k], k, TILE.fast)
        word = join_elements(own, UNIT) if WIDE else packed
        inside = mask & (lane < half) & (channel < across)
        # adding zeros: the interpreter cannot store what was broadcast in another way
        spread = tl.zeros(inside.shape, tl.uint8)
        word = (word | spread).to(ptr.dtype.element_ty)
        tl.store(ptr + (at + channel + spread), word, mask=inside)


@triton.jit
def _batch_range(row_ptr, where, batch, TILE: tl.constexpr):
    return page_range(group_range(_load_tile(row_ptr, where, batch, TILE), TILE), TILE)


@triton.jit
def _page_range(row_ptr, where, groups, TILE: tl.constexpr):
    """The range of a page; ``groups``: those of its first batch.

    A page of several batches is read once for this, and once more when it is encoded.
    """
    page = page_range(groups, TILE)
    if TILE.batches > 1:
        batch = 1
        while batch < TILE.batches:
            page = merge_ranges(page, _batch_range(row_ptr, where, batch, TILE), TILE)
            batch += 1
    return page


@triton.jit
def _sum_units(x, minimum, reciprocal, where, batch, TILE: tl.constexpr):
    """The whole parts of a group's values in units, summed, and how many there are."""
    _, _, first, _, length, _ = where
    _, own = tile_positions(batch, first, length, TILE)
    whole = tl.floor((x - minimum) * reciprocal).to(tl.int32)
    total = tl.sum(tl.sum(tl.where(own, whole, 0), axis=2, keep_dims=True), axis=0, keep_dims=True)
    count = tl.sum(tl.sum(own.to(tl.int32), axis=2, keep_dims=True), axis=0, keep_dims=True)
    # a group beyond the end has no element
    return total, tl.maximum(count, 1)


@triton.jit
def _store_codes(row_ptr, where, residual_at, batch, words, page, groups, keep, TILE: tl.constexpr):
    """The codes of a batch of groups.

    ``page``: minimums and reciprocals of the lanes' channels, ``groups``: 256 times the offsets,
    and the steps' reciprocals.
    """
    _, outer, first, lane, length, across = where
    half = (across + 1) // 2
    low = byte_codes(row_ptr, words, page, groups, where, 0, TILE)
    high = byte_codes(row_ptr, words, page, groups, where, 1, TILE)
    anchors = (((low >> 4) & 0x0F0F0F0F) | (high & 0xF0F0F0F0)) & keep
    residuals = ((low & 0x0F0F0F0F) | ((high << 4) & 0xF0F0F0F0)) & keep
    position, own = tile_positions(batch, first, length, TILE)
    own &= lane < half
    outer_at = outer.to(tl.int64) * length * half
    anchors_ptr = payload_ptr(row_ptr, 10, False, TILE) + outer_at
    residuals_ptr = (load_field(row_ptr, 4) + residual_at).to(tl.pointer_type(TILE.bytes_type))
    residuals_ptr += outer_at
    at = position * half + lane
    tl.store(anchors_ptr + at, anchors.to(TILE.bytes_type), mask=own)
    tl.store(residuals_ptr + at, residuals.to(TILE.bytes_type), mask=own)


@triton.jit
def _encode_groups(
    row_ptr, where, residual_at, batch, words, joined, page, keep, TILE: tl.constexpr
):
    """Offsets, steps and codes of a batch of groups; ``joined``: their ranges."""
    UNIT: tl.constexpr = TILE.unit
    minimums, reciprocals = page
    _, outer, first, _, length, across = where
    ranges = split_range(joined, TILE)
    offsets, steps, firsts, inverses = (), (), (), ()
    for c in tl.static_range(2 * UNIT):
        low, high = limits(ranges, c, TILE)
        low = (to_float(low) - minimums[c]) * reciprocals[c]
        high = (to_float(high) - minimums[c]) * reciprocals[c]
        if TILE.companded:
            x = element_float(words[c // UNIT], c % UNIT, UNIT)
            total, count = _sum_units(x, minimums[c], reciprocals[c], where, batch, TILE)
            group = companded_group(low, high, total, count, TILE.fast)
        else:
            group = linear_group(low, high, TILE.fast)
        offsets = offsets + (group[0].to(tl.int32).to(tl.uint32) & keep,)
        steps = steps + (group[1].to(tl.int32).to(tl.uint32) & keep,)
        firsts, inverses = firsts + (group[2],), inverses + (group[3],)
    groups_per_outer = (length + TILE.group - 1) // TILE.group
    in_page = tile_group(batch, TILE)
    group = first // TILE.group + in_page
    once = first_of_group(TILE) & (in_page * TILE.group < TILE.page) & (group < groups_per_outer)
    at = (outer.to(tl.int64) * groups_per_outer + group) * (2 * across)
    groups_ptr = payload_ptr(row_ptr, 8, False, TILE)
    _store_channels(groups_ptr, at, offsets, once, where, False, TILE)
    _store_channels(groups_ptr, at + across, steps, once, where, False, TILE)
    codes_of = (firsts, inverses)
    _store_codes(row_ptr, where, residual_at, batch, words, page, codes_of, keep, TILE)


@triton.jit
def _load_and_encode_groups(row_ptr, where, residual_at, batch, page, keep, TILE: tl.constexpr):
    words = _load_tile(row_ptr, where, batch, TILE)
    groups = group_range(words, TILE)
    _encode_groups(row_ptr, where, residual_at, batch, words, groups, page, keep, TILE)


@triton.jit
def _encode_page(row_ptr, block, residual_at, is_raw, KNOWN: tl.constexpr, TILE: tl.constexpr):
    """All streams of a program's channels of a page, but flags and raw.

    Returns whether these channels have the page stored as it is; ``KNOWN``: ``is_raw`` says it.
    """
    UNIT: tl.constexpr = TILE.unit
    where = find_page(row_ptr, block, TILE)
    page_index, _, _, lane, _, across = where
    words = _load_tile(row_ptr, where, 0, TILE)
    groups = group_range(words, TILE)
    ranges = split_range(_page_range(row_ptr, where, groups, TILE), TILE)

    low_bits, scale_bits, minimums, reciprocals = (), (), (), ()
    beyond = tl.zeros(lane.shape, tl.int32)
    for c in tl.static_range(2 * UNIT):
        low, high = limits(ranges, c, TILE)
        channel = page_scale(low, high, TILE.fast)
        low_bits, scale_bits = low_bits + (low,), scale_bits + (channel[0],)
        minimums, reciprocals = minimums + (channel[1],), reciprocals + (channel[2],)
        beyond |= channel[3].to(tl.int32)
    if not KNOWN:
        is_raw = tl.max(beyond)
    # a page that is stored as it is has zeros everywhere else
    keep = (is_raw - 1).to(tl.uint32)
    kept_low, kept_scale = (), ()
    for c in tl.static_range(2 * UNIT):
        kept_low = kept_low + (low_bits[c] & keep,)
        kept_scale = kept_scale + (scale_bits[c] & keep,)
    once = first_of_group(TILE) & (tile_group(0, TILE) == 0)
    at = page_index.to(tl.int64) * (2 * across)
    pages_ptr = payload_ptr(row_ptr, 7, True, TILE)
    _store_channels(pages_ptr, at, kept_low, once, where, True, TILE)
    _store_channels(pages_ptr, at + across, kept_scale, once, where, True, TILE)

    page = (minimums, reciprocals)
    if TILE.batches == 1:
        _encode_groups(row_ptr, where, residual_at, 0, words, groups, page, keep, TILE)
    else:
        batch = 0
        while batch < TILE.batches:
            _load_and_encode_groups(row_ptr, where, residual_at, batch, page, keep, TILE)
            batch += 1
    return is_raw


@triton.jit
def encode_kernel(chunks_ptr, program_chunk_ptr, sizes_ptr, TILE: tl.constexpr):
    """A program encodes ``slab`` lower channels of a page, and the upper ones that go with them.

    ``sizes[program]`` becomes 1 if these have the page stored as it is, else 0.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(program_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    block = (program - load_field(row_ptr, 6)).to(tl.int32)
    residual_at = align_residual(load_field(row_ptr, 11))
    is_raw = _encode_page(row_ptr, block, residual_at, 0, False, TILE)
    tl.store(sizes_ptr + program, is_raw)


@triton.jit
def _store_raw(row_ptr, block, to, TILE: tl.constexpr):
    """The elements of a page to address ``to``."""
    where = find_page(row_ptr, block, TILE)
    _, _, first, lane, length, across = where
    raw_ptr = to.to(tl.pointer_type(TILE.bits_type))
    half = (across + 1) // 2
    batch = 0
    while batch < TILE.batches:
        words = _load_tile(row_ptr, where, batch, TILE)
        position, own = tile_positions(batch, first, length, TILE)
        own &= lane < half
        at = (position - first) * across + lane
        tl.store(raw_ptr + at, words[0], mask=own)
        tl.store(raw_ptr + (at + half), words[1], mask=own & (lane + half < across))
        batch += 1


@triton.jit
def raw_kernel(chunks_ptr, num_programs_ptr, sizes_ptr, totals_ptr, TILE: tl.constexpr):
    """Encode chunks that have pages stored as they are once more: there the residuals come later.

    Programs ``[chunk, i]`` share the chunk's pages.
    """
    chunk = tl.program_id(0).to(tl.int64)
    total = tl.load(totals_ptr + chunk)
    if total > 0:
        row_ptr = chunks_ptr + chunk * NUM_FIELDS
        num_blocks = tl.load(num_programs_ptr + chunk)
        payload = load_field(row_ptr, 4)
        flags_ptr = (payload + load_field(row_ptr, 9)).to(tl.pointer_type(tl.uint8))
        raw_at = load_field(row_ptr, 11)
        residual_at = align_residual(raw_at + 2 * total.to(tl.int64))
        axes = find_axes(row_ptr, TILE)
        block = tl.program_id(1)
        while block < num_blocks:
            page = block // axes[2]
            is_raw = tl.load(flags_ptr + page).to(tl.int32)
            _encode_page(row_ptr, block, residual_at, is_raw, True, TILE)
            if is_raw != 0:
                place = load_field(row_ptr, 6) + page.to(tl.int64) * axes[2]
                start = tl.load(sizes_ptr + place).to(tl.int64)
                _store_raw(row_ptr, block, payload + raw_at + 2 * start, TILE)
            block += tl.num_programs(1)
