"""GAAC's decoder in Triton: the kernel alone. Layout and names: kernels/reference/gaac.py.

A program handles one escape block of one chunk in steps of ``STEP`` tiles and is meant to run as
one warp, so that no sum crosses warps. Masked-off lanes load zero and store nothing; addresses are
64-bit.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.gaac_tiles import (
    load_bases,
    load_rows,
    place_escapes,
    place_tiles,
    select_base,
)
from kvz.kernels.gpu.words import (
    NUM_FIELDS,
    bits_to_flags,
    deinterleave,
    join_bf16,
    load_field,
    shift,
)


@triton.jit
def _load_tags(tags_ptr, in_step, lane, valid, INNER: tl.constexpr, UNIT: tl.constexpr):
    """The bytes that hold the tags of a lane."""
    TAG_LENGTH: tl.constexpr = (INNER + 7) // 8
    ptr = tags_ptr + (in_step * (2 * TAG_LENGTH) + (lane * UNIT) // 8)
    low = tl.load(tl.max_contiguous(ptr, (1, 8)), mask=valid, other=0)
    high = tl.load(tl.max_contiguous(ptr + TAG_LENGTH, (1, 8)), mask=valid, other=0)
    return low, high


@triton.jit
def _unpack_tags(packed, lane, UNIT: tl.constexpr):
    bits = packed.to(tl.uint32) >> ((lane * UNIT) % 8).to(tl.uint32)
    return bits_to_flags(bits & ((1 << UNIT) - 1))


@triton.jit
def _escape_range(offsets_ptr, block, num_blocks, length):
    """Start and length of a block's escapes; nothing, and 1, where the offsets contradict it."""
    start = tl.load(offsets_ptr + block).to(tl.int64)
    is_last = block + 1 == num_blocks
    end = tl.load(offsets_ptr + block + 1, mask=~is_last, other=0).to(tl.int64)
    end = tl.where(is_last, length, end)
    bad = (start > end) | (end > length) | ((block == 0) & (start != 0))
    # no block of a chunk has 2**30 bytes of escapes
    room = tl.where(bad, 0, tl.minimum(end - start, 1 << 30)).to(tl.int32)
    return tl.where(bad, 0, start), room, bad.to(tl.int32)


@triton.jit
def _load_escapes(escapes_ptr, place, wanted, STRIDE: tl.constexpr, UNIT: tl.constexpr):
    """One byte for each element whose flag is set, zero for the others.

    ``place`` of the first one, the next ones ``STRIDE`` bytes apart.
    """
    ptr = tl.max_contiguous(escapes_ptr + place, (1, 8))
    packed = tl.load(ptr, mask=(wanted & 1) != 0, other=0).to(tl.uint32)
    for k in tl.static_range(1, UNIT):
        place += ((wanted >> (8 * k - 8)) & 1).to(tl.int32) * STRIDE
        ptr = tl.max_contiguous(escapes_ptr + place, (1, 8))
        byte = tl.load(ptr, mask=((wanted >> 8 * k) & 1) != 0, other=0)
        packed += byte.to(tl.uint32) * (1 << 8 * k)
    return packed


@triton.jit
def _add_codes(base, first_rows, last_rows, plane2, plane3):
    """Exponents of the eight rows from planes 0-1 of rows 0-3 and of rows 4-7, plane 2, plane 3."""
    exponents = ()
    for t in tl.static_range(8):
        code = (first_rows >> 2 * t) if t < 4 else (last_rows >> (2 * t - 8))
        code = (code & 0x03030303) | (shift(plane2, 2 - t) & 0x04040404)
        code |= shift(plane3, 3 - t) & 0x08080808
        exponents = exponents + (base + code,)  # noqa: RUF005  (Triton has no unpacking)
    return exponents


@triton.jit
def _add_raw(escapes_ptr, place, raw, exponents, UNIT: tl.constexpr):
    """Planes 4-7 of raw groups."""
    plane4 = _load_escapes(escapes_ptr, place, raw, 4, UNIT)
    plane5 = _load_escapes(escapes_ptr, place + 1, raw, 4, UNIT)
    plane6 = _load_escapes(escapes_ptr, place + 2, raw, 4, UNIT)
    plane7 = _load_escapes(escapes_ptr, place + 3, raw, 4, UNIT)
    full = ()
    for t in tl.static_range(8):
        high = (shift(plane4, 4 - t) & 0x10101010) | (shift(plane5, 5 - t) & 0x20202020)
        high |= (shift(plane6, 6 - t) & 0x40404040) | (shift(plane7, 7 - t) & 0x80808080)
        full = full + (exponents[t] | high,)  # noqa: RUF005
    return full


@triton.jit
def decode_kernel(
    chunks_ptr,
    block_chunk_ptr,
    status_ptr,
    INNER: tl.constexpr,
    UNIT: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    """Groups along tokens. Writes 1 to a chunk's status where its escapes contradict its tags.

    Fields of the chunks' rows: kernels/gpu/gaac.py.
    """
    LANE_COLUMNS: tl.constexpr = INNER // UNIT
    TAG_LENGTH: tl.constexpr = (INNER + 7) // 8
    bits_type: tl.constexpr = tl.uint64 if UNIT == 4 else tl.uint16
    bytes_type: tl.constexpr = tl.uint32 if UNIT == 4 else tl.uint8
    chunk = tl.load(block_chunk_ptr + tl.program_id(0)).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    out_ptr = load_field(row_ptr, 0).to(tl.pointer_type(bits_type))
    outer_stride = load_field(row_ptr, 1) // UNIT
    tokens = load_field(row_ptr, 2).to(tl.int32)
    num_outer = load_field(row_ptr, 3).to(tl.int32)
    payload = load_field(row_ptr, 4)
    bases_ptr = load_field(row_ptr, 5).to(tl.pointer_type(bytes_type))
    first_block = load_field(row_ptr, 6)
    low_ptr = (payload + load_field(row_ptr, 7)).to(tl.pointer_type(bits_type))
    plane2_ptr = (payload + load_field(row_ptr, 8)).to(tl.pointer_type(bytes_type))
    tags_ptr = (payload + load_field(row_ptr, 9)).to(tl.pointer_type(tl.uint8))
    offsets_ptr = (payload + load_field(row_ptr, 10)).to(tl.pointer_type(tl.uint32))
    escapes_ptr = (payload + load_field(row_ptr, 11)).to(tl.pointer_type(tl.uint8))
    length = load_field(row_ptr, 12)
    packed_ptr = payload.to(tl.pointer_type(bytes_type))

    tiles_per_outer = (tokens + 7) // 8
    num_tiles = tiles_per_outer * num_outer
    num_blocks = (num_tiles + BLOCK_TILES - 1) // BLOCK_TILES
    block = (tl.program_id(0) - first_block).to(tl.int32)
    start, room, bad = _escape_range(offsets_ptr, block, num_blocks, length)
    escapes_ptr += start

    outer, in_outer = place_tiles(0, block * BLOCK_TILES, tiles_per_outer, True)
    lane = tl.arange(0, LANES)[None, :]
    in_step = tl.arange(0, STEP)[:, None]
    used = tl.zeros((), tl.int32)
    for step in range(0, BLOCK_TILES, STEP):
        first_tile = (block * BLOCK_TILES + step).to(tl.int64)
        tile_valid = (step + in_step < BLOCK_TILES) & (first_tile + in_step < num_tiles)
        valid = tile_valid & (lane < LANE_COLUMNS)
        tile_outer, tile = place_tiles(outer, in_outer + in_step, tiles_per_outer, SHORT)
        token = tile * 8
        rows_left = tl.where(valid, tokens - token, 0)
        outer_row = tile_outer.to(tl.int64) * tokens + token
        outer_at = tile_outer.to(tl.int64) * outer_stride
        row_packed_ptr = packed_ptr + (outer_row * LANE_COLUMNS + lane)
        row_out_ptr = out_ptr + (outer_at + token * LANE_COLUMNS + lane)
        step_tags_ptr = tags_ptr + first_tile * (2 * TAG_LENGTH)
        group = in_step * LANE_COLUMNS + lane

        low_tags, high_tags = _load_tags(step_tags_ptr, in_step, lane, valid, INNER, UNIT)
        low = tl.load(low_ptr + first_tile * LANE_COLUMNS + group, mask=valid, other=0)
        if not NARROW:
            step_plane2_ptr = plane2_ptr + first_tile * LANE_COLUMNS
            plane2 = tl.load(step_plane2_ptr + group, mask=valid, other=0).to(tl.uint32)
        b2, b3, b4 = load_bases(bases_ptr, tile_outer, num_outer, lane, valid, INNER, UNIT)
        packed = load_rows(row_packed_ptr, rows_left, LANE_COLUMNS)

        tag_low, tag_high = _unpack_tags(low_tags, lane, UNIT), _unpack_tags(high_tags, lane, UNIT)
        place2, place3, place4, size, num_raw = place_escapes(tag_low, tag_high, NARROW)
        fits = used + size <= room
        wanted3 = tl.where(fits, tag_high, 0)
        if NARROW:
            wanted2 = tl.where(fits, tag_low | tag_high, 0)
            plane2 = _load_escapes(escapes_ptr, used + place2, wanted2, 1, UNIT)
        else:
            missing = valid & ((tag_low | tag_high) != (0x01010101 if UNIT == 4 else 1))
            bad |= tl.max(tl.max(missing.to(tl.int32), axis=1), axis=0)
        plane3 = _load_escapes(escapes_ptr, used + place3, wanted3, 1, UNIT)
        base = select_base(tag_low, tag_high, b2, b3, b4)
        first_rows, last_rows = deinterleave(low, UNIT, PERMUTE)
        exponents = _add_codes(base, first_rows, last_rows, plane2, plane3)
        if num_raw > 0:
            exponents = _add_raw(escapes_ptr, used + place4, wanted3 & tag_low, exponents, UNIT)
        for t in tl.static_range(8):
            word = join_bf16(packed[t].to(tl.uint32), exponents[t], UNIT, PERMUTE)
            tl.store(row_out_ptr + t * LANE_COLUMNS, word.to(bits_type), mask=rows_left > t)
        used += size
        outer, in_outer = place_tiles(outer, in_outer + STEP, tiles_per_outer, SHORT)
    if INNER % 8:
        bad |= _spare_bits(tags_ptr, block, num_tiles, INNER, BLOCK_TILES)
    if (bad | (used != room).to(tl.int32)) != 0:
        tl.store(status_ptr + chunk, 1)


@triton.jit
def _spare_bits(tags_ptr, block, num_tiles, INNER: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """1 if a tag bit beyond the last column is set in the block."""
    TAG_LENGTH: tl.constexpr = (INNER + 7) // 8
    PADDED: tl.constexpr = triton.next_power_of_2(BLOCK_TILES)
    in_block = tl.arange(0, PADDED)
    tile = block * BLOCK_TILES + in_block
    valid = (in_block < BLOCK_TILES) & (tile < num_tiles)
    last = tile.to(tl.int64) * (2 * TAG_LENGTH) + TAG_LENGTH - 1
    low = tl.load(tags_ptr + last, mask=valid, other=0)
    high = tl.load(tags_ptr + last + TAG_LENGTH, mask=valid, other=0)
    spare = (low | high).to(tl.int32) >> (INNER % 8)
    return (tl.max(spare, axis=0) != 0).to(tl.int32)
