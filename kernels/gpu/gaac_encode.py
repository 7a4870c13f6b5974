"""GAAC's encoder in Triton: the kernel alone. Layout and names: kernels/reference/gaac.py.

A program handles one escape block of one chunk, as the decoder's (gaac_decode.py) does; a step's
rows are loaded once and kept in registers.
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
    flags_to_bits,
    interleave,
    is_nonzero,
    load_field,
    shift,
    split_bf16,
    subtract_bytes,
)


@triton.jit
def _store_tags(tags_ptr, in_step, tile_valid, flags, INNER: tl.constexpr, UNIT: tl.constexpr):
    """Pack the lanes' flags ``[STEP, LANES]`` to bits and store one half of the tags."""
    TAG_LENGTH: tl.constexpr = (INNER + 7) // 8
    STEP: tl.constexpr = flags.shape[0]
    PER_BYTE: tl.constexpr = 8 // UNIT
    NUM_BYTES: tl.constexpr = flags.shape[1] // PER_BYTE
    bits = flags_to_bits(flags) if UNIT == 4 else flags
    shifts = (tl.arange(0, PER_BYTE) * UNIT)[None, None, :]
    packed = tl.sum(tl.reshape(bits, (STEP, NUM_BYTES, PER_BYTE)) << shifts, axis=2)
    byte = tl.arange(0, NUM_BYTES)[None, :]
    at = in_step * (2 * TAG_LENGTH) + byte
    tl.store(tags_ptr + at, packed.to(tl.uint8), mask=tile_valid & (byte < TAG_LENGTH))


@triton.jit
def _store_escapes(scratch_ptr, place, packed, stored, STRIDE: tl.constexpr, UNIT: tl.constexpr):
    """The byte of each element whose flag is set, from ``place`` on, ``STRIDE`` apart."""
    for k in tl.static_range(UNIT):
        ptr = tl.max_contiguous(scratch_ptr + place, (1, 8))
        byte = (packed >> 8 * k).to(tl.uint8)
        tl.store(ptr, byte, mask=((stored >> 8 * k) & 1) != 0)
        place += ((stored >> 8 * k) & 1).to(tl.int32) * STRIDE


@triton.jit
def _choose_tags(exponents, b2, b3, b4, inside, NARROW: tl.constexpr):
    """The two bits of the lowest tag that fits all eight rows; zero where not ``inside``."""
    # a base is at most 256 - width, so a difference that wraps around is never within the width
    span2, span3, span4 = tl.zeros_like(b2), tl.zeros_like(b3), tl.zeros_like(b4)
    for t in tl.static_range(8):
        span2 |= subtract_bytes(exponents[t], b2)
        span3 |= subtract_bytes(exponents[t], b3)
        span4 |= subtract_bytes(exponents[t], b4)
    beyond2 = inside
    if NARROW:
        beyond2 = is_nonzero(span2 & 0xFCFCFCFC) & inside
    beyond3 = is_nonzero(span3 & 0xF8F8F8F8)
    tag_high = beyond2 & beyond3
    return (beyond2 ^ tag_high) | (tag_high & is_nonzero(span4 & 0xF0F0F0F0)), tag_high


@triton.jit
def _pack_planes(exponents, base, rows_left):
    """Planes 0-1 of rows 0-3 and of rows 4-7, plane 2 and plane 3; absent rows are zero."""
    first_rows, last_rows = tl.zeros_like(base), tl.zeros_like(base)
    plane2, plane3 = tl.zeros_like(base), tl.zeros_like(base)
    for t in tl.static_range(8):
        code = exponents[t] - base
        if t < 4:
            first_rows |= (code & 0x03030303) << 2 * t
        else:
            last_rows |= (code & 0x03030303) << (2 * t - 8)
        plane2 |= shift(code & 0x04040404, t - 2)
        plane3 |= shift(code & 0x08080808, t - 3)
    present = _present_bits(rows_left, 8)
    first_rows &= _present_bits(2 * rows_left, 8)
    last_rows &= _present_bits(2 * rows_left - 8, 8)
    return first_rows, last_rows, plane2 & present, plane3 & present


@triton.jit
def _present_bits(count, MOST: tl.constexpr):
    """The low ``count`` bits of each byte (at least 0, at most ``MOST``)."""
    bits = (1 << tl.maximum(tl.minimum(count, MOST), 0)) - 1
    return bits.to(tl.uint32) * 0x01010101


@triton.jit
def _store_raw(scratch_ptr, place, exponents, raw, rows_left, UNIT: tl.constexpr):
    """Planes 4-7 of raw groups."""
    present = _present_bits(rows_left, 8)
    for plane in tl.static_range(4, 8):
        bits = tl.zeros_like(raw)
        for t in tl.static_range(8):
            bits |= shift(exponents[t] & (0x01010101 << plane), t - plane)
        _store_escapes(scratch_ptr, place + (plane - 4), bits & present, raw, 4, UNIT)


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
    SHORT: tl.constexpr,
    SCRATCH: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    """Groups along tokens. All streams but offsets and escapes; a block's escapes go to
    ``scratch[program * SCRATCH ...]``, their number to ``sizes[program]``.

    Fields of the chunks' rows: kernels/gpu/gaac.py.
    """
    LANE_COLUMNS: tl.constexpr = INNER // UNIT
    TAG_LENGTH: tl.constexpr = (INNER + 7) // 8
    bits_type: tl.constexpr = tl.uint64 if UNIT == 4 else tl.uint16
    bytes_type: tl.constexpr = tl.uint32 if UNIT == 4 else tl.uint8
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
        row_in_ptr = in_ptr + (outer_at + token * LANE_COLUMNS + lane)
        group = in_step * LANE_COLUMNS + lane

        b2, b3, b4 = load_bases(bases_ptr, tile_outer, num_outer, lane, valid, INNER, UNIT)
        words = load_rows(row_in_ptr, rows_left, LANE_COLUMNS)
        exponents = ()
        for t in tl.static_range(8):
            packed, exponent = split_bf16(words[t], UNIT, PERMUTE)
            packed = packed.to(bytes_type)
            tl.store(row_packed_ptr + t * LANE_COLUMNS, packed, mask=rows_left > t)
            if t > 0:
                # an absent row repeats the first one: it fits where the others fit
                exponent = tl.where(rows_left > t, exponent, exponents[0])
            exponents = exponents + (exponent,)  # noqa: RUF005  (Triton has no unpacking)

        inside = tl.where(valid, 0x01010101 if UNIT == 4 else 1, 0).to(tl.uint32)
        tag_low, tag_high = _choose_tags(exponents, b2, b3, b4, inside, NARROW)
        base = select_base(tag_low, tag_high, b2, b3, b4)
        planes = _pack_planes(exponents, base, rows_left)
        first_rows, last_rows, plane2, plane3 = planes
        low = interleave(first_rows, last_rows, UNIT, PERMUTE).to(bits_type)
        tl.store(low_ptr + first_tile * LANE_COLUMNS + group, low, mask=valid)
        step_tags_ptr = tags_ptr + first_tile * (2 * TAG_LENGTH)
        _store_tags(step_tags_ptr, in_step, tile_valid, tag_low, INNER, UNIT)
        _store_tags(step_tags_ptr + TAG_LENGTH, in_step, tile_valid, tag_high, INNER, UNIT)
        place2, place3, place4, size, num_raw = place_escapes(tag_low, tag_high, NARROW)
        if NARROW:
            _store_escapes(own_scratch_ptr, used + place2, plane2, tag_low | tag_high, 1, UNIT)
        else:
            step_plane2_ptr = plane2_ptr + first_tile * LANE_COLUMNS
            tl.store(step_plane2_ptr + group, plane2.to(bytes_type), mask=valid)
        _store_escapes(own_scratch_ptr, used + place3, plane3, tag_high, 1, UNIT)
        if num_raw > 0:
            raw = tag_low & tag_high
            _store_raw(own_scratch_ptr, used + place4, exponents, raw, rows_left, UNIT)
        used += size
        outer, in_outer = place_tiles(outer, in_outer + STEP, tiles_per_outer, SHORT)
    tl.store(sizes_ptr + program, used)
