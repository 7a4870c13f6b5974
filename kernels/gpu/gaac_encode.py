"""GAAC's encoder in Triton: the kernel alone. Layout and names: kernels/reference/gaac.py.

A program handles one escape block of one chunk, as the decoder's (gaac_decode.py) does; a step's rows
are loaded once and kept in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.gaac_tiles import load_bases, place_escapes, place_tiles, select_base
from kvz.kernels.gpu.words import (
    NUM_FIELDS,
    gather_bytes,
    gather_flags,
    gather_sign_mantissa,
    load_field,
    shift,
    spread_bytes,
)


@triton.jit
def _store_tags(
    tags_ptr, in_step, tile_valid, flags, INNER: tl.constexpr, UNIT: tl.constexpr
):
    """Pack the lanes' flags ``[STEP, LANES]`` to bytes and store one half of the tags."""
    TAG_LENGTH: tl.constexpr = (INNER + 7) // 8
    STEP: tl.constexpr = flags.shape[0]
    PER_BYTE: tl.constexpr = 8 // UNIT
    NUM_BYTES: tl.constexpr = flags.shape[1] // PER_BYTE
    bits = (tl.arange(0, PER_BYTE) * UNIT)[None, None, :]
    packed = tl.sum(tl.reshape(flags, (STEP, NUM_BYTES, PER_BYTE)) << bits, axis=2)
    byte = tl.arange(0, NUM_BYTES)[None, :]
    at = in_step * (2 * TAG_LENGTH) + byte
    tl.store(tags_ptr + at, packed.to(tl.uint8), mask=tile_valid & (byte < TAG_LENGTH))


@triton.jit
def _store_escapes(scratch_ptr, place, word, stored, STRIDE: tl.constexpr, UNIT: tl.constexpr):
    """The low byte of each field whose flag is set, to ``place`` and on, ``STRIDE`` apart."""
    ptr = tl.max_contiguous(scratch_ptr + place, (1, 8))
    tl.store(ptr, word.to(tl.uint8), mask=(stored & 1) != 0)
    for k in tl.static_range(1, UNIT):
        place += ((stored >> (k - 1)) & 1).to(tl.int32) * STRIDE
        byte = (word >> (16 * k)).to(tl.uint8)
        tl.store(tl.max_contiguous(scratch_ptr + place, (1, 8)), byte, mask=((stored >> k) & 1) != 0)


@triton.jit
def _choose_tags(exponents, b2, b3, b4, valid, NARROW: tl.constexpr, UNIT: tl.constexpr):
    """The lowest tag that fits all eight rows, as flags of its low and its high bit."""
    ONES: tl.constexpr = 0x0001000100010001 if UNIT == 4 else 1
    FLAGS: tl.constexpr = (1 << UNIT) - 1
    wide2, wide3, wide4 = spread_bytes(b2, UNIT), spread_bytes(b3, UNIT), spread_bytes(b4, UNIT)
    span2, span3, span4 = tl.zeros_like(wide2), tl.zeros_like(wide3), tl.zeros_like(wide4)
    for t in tl.static_range(8):
        # bit 8 of a field lends to differences below zero and is set again where one borrowed
        exponent = exponents[t] | (0x100 * ONES)
        span2 |= (exponent - wide2) ^ (0x100 * ONES)
        span3 |= (exponent - wide3) ^ (0x100 * ONES)
        span4 |= (exponent - wide4) ^ (0x100 * ONES)
    inside = tl.where(valid, tl.full(valid.shape, FLAGS, tl.uint32), 0)
    beyond2 = inside
    if NARROW:
        beyond2 = gather_flags(span2 & (0x1FC * ONES), UNIT) & inside
    beyond3 = gather_flags(span3 & (0x1F8 * ONES), UNIT)
    beyond4 = gather_flags(span4 & (0x1F0 * ONES), UNIT)
    tag_high = beyond2 & beyond3
    return (beyond2 & ~beyond3) | (tag_high & beyond4), tag_high


@triton.jit
def encode_kernel(
    chunks_ptr,
    block_chunk_ptr,
    scratch_ptr,
    sizes_ptr,
    INNER: tl.constexpr,
    UNIT: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    SCRATCH: tl.constexpr,
):
    """Groups along tokens. All streams but offsets and escapes; a block's escapes go to
    ``scratch[program * SCRATCH ...]``, their number to ``sizes[program]``.

    Fields of the chunks' rows: kernels/gpu/gaac.py.
    """
    ONES: tl.constexpr = 0x0001000100010001 if UNIT == 4 else 1
    LANE_COLUMNS: tl.constexpr = INNER // UNIT
    TAG_LENGTH: tl.constexpr = (INNER + 7) // 8
    bits_type: tl.constexpr = tl.uint64 if UNIT == 4 else tl.uint16
    bytes_type: tl.constexpr = tl.uint32 if UNIT == 4 else tl.uint8
    word_type: tl.constexpr = tl.uint64 if UNIT == 4 else tl.uint32
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(block_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    in_ptr = load_field(row_ptr, 0).to(tl.pointer_type(bits_type))
    outer_stride = load_field(row_ptr, 1) // UNIT
    tokens = load_field(row_ptr, 2).to(tl.int32)
    num_outer = load_field(row_ptr, 3).to(tl.int32)
    payload = load_field(row_ptr, 4)
    bases_ptr = load_field(row_ptr, 5).to(tl.pointer_type(bytes_type))
    block = (program - load_field(row_ptr, 6)).to(tl.int32)
    low_ptr = (payload + load_field(row_ptr, 7)).to(tl.pointer_type(bits_type))
    plane2_ptr = (payload + load_field(row_ptr, 8)).to(tl.pointer_type(bytes_type))
    tags_ptr = (payload + load_field(row_ptr, 9)).to(tl.pointer_type(tl.uint8))
    packed_ptr = payload.to(tl.pointer_type(bytes_type))
    own_scratch_ptr = scratch_ptr + program * SCRATCH

    tiles_per_outer = (tokens + 7) // 8
    num_tiles = tiles_per_outer * num_outer
    lane = tl.arange(0, LANES)[None, :]
    in_step = tl.arange(0, STEP)[:, None]
    used = tl.zeros((), tl.int32)
    for step in range(0, BLOCK_TILES, STEP):
        first_tile = block * BLOCK_TILES + step
        tile_valid = (step + in_step < BLOCK_TILES) & (first_tile + in_step < num_tiles)
        valid = tile_valid & (lane < LANE_COLUMNS)
        outer, token = place_tiles(first_tile, in_step, tiles_per_outer, STEP)
        rows_left = tl.where(valid, tokens - token, 0)
        row_in_ptr = in_ptr + outer.to(tl.int64) * outer_stride + token * LANE_COLUMNS + lane
        b2, b3, b4 = load_bases(bases_ptr, outer, num_outer, lane, valid, INNER, UNIT)
        rows = ()
        for t in tl.static_range(8):
            word = tl.load(row_in_ptr + t * LANE_COLUMNS, mask=rows_left > t, other=0)
            rows = rows + (word.to(word_type),)  # noqa: RUF005  (Triton has no unpacking)

        row_packed_ptr = packed_ptr + (outer.to(tl.int64) * tokens + token) * LANE_COLUMNS + lane
        exponents = ()
        for t in tl.static_range(8):
            packed = gather_sign_mantissa(rows[t], UNIT)
            tl.store(row_packed_ptr + t * LANE_COLUMNS, packed, mask=rows_left > t)
            # an absent row repeats the first one: it fits where the others fit
            word = tl.where(rows_left > t, rows[t], rows[0])
            exponents = exponents + ((word >> 7) & (0xFF * ONES),)  # noqa: RUF005
        tag_low, tag_high = _choose_tags(exponents, b2, b3, b4, valid, NARROW, UNIT)
        base = spread_bytes(select_base(tag_low, tag_high, b2, b3, b4), UNIT)

        low = tl.zeros([STEP, LANES], word_type)
        plane2 = tl.zeros([STEP, LANES], word_type)
        plane3 = tl.zeros([STEP, LANES], word_type)
        for t in tl.static_range(8):
            code = exponents[t] - base
            low |= (code & (3 * ONES)) << (2 * t)
            plane2 |= shift(code & (4 * ONES), t - 2)
            plane3 |= shift(code & (8 * ONES), t - 3)
        present = (1 << tl.minimum(rows_left, 8)) - 1
        present_pairs = (1 << 2 * tl.minimum(rows_left, 8)) - 1
        low &= present_pairs.to(word_type) * ONES
        plane2 &= present.to(word_type) * ONES
        plane3 &= present.to(word_type) * ONES

        group = first_tile.to(tl.int64) * LANE_COLUMNS
        in_group = in_step * LANE_COLUMNS + lane
        tl.store(low_ptr + group + in_group, low.to(bits_type), mask=valid)
        step_tags_ptr = tags_ptr + first_tile.to(tl.int64) * (2 * TAG_LENGTH)
        _store_tags(step_tags_ptr, in_step, tile_valid, tag_low, INNER, UNIT)
        _store_tags(step_tags_ptr + TAG_LENGTH, in_step, tile_valid, tag_high, INNER, UNIT)
        places = place_escapes(tag_low, tag_high, NARROW, UNIT)
        place2, place3, place4, size, num_raw = places
        if NARROW:
            stored2 = tag_low | tag_high
            _store_escapes(own_scratch_ptr, used + place2, plane2, stored2, 1, UNIT)
        else:
            tl.store(plane2_ptr + group + in_group, gather_bytes(plane2, UNIT), mask=valid)
        _store_escapes(own_scratch_ptr, used + place3, plane3, tag_high, 1, UNIT)
        if num_raw > 0:
            for plane in tl.static_range(4):
                bits = tl.zeros([STEP, LANES], word_type)
                for t in tl.static_range(8):
                    bits |= shift(exponents[t] & ((0x10 << plane) * ONES), t - 4 - plane)
                bits &= present.to(word_type) * ONES
                place = used + place4 + plane
                _store_escapes(own_scratch_ptr, place, bits, tag_low & tag_high, 4, UNIT)
        used += size
    tl.store(sizes_ptr + program, used)
