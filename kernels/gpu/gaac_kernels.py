"""GAAC in Triton: the kernels alone. Layout and names: kernels/reference/gaac.py.

A program handles one escape block of one chunk, in steps of ``STEP`` tiles, and is meant to run as
one warp, so that no reduction crosses warps. A *lane* is ``UNIT`` neighbouring columns: two where
the addresses allow it (the low and high half of a 32-bit word), else one. Masked-off lanes load zero
and store nothing.

Each chunk is described by a row of int64 fields (see kernels/gpu/gaac.py, ``FIELDS``); addresses in
it are absolute. All address arithmetic is 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_FIELDS = tl.constexpr(16)


@triton.jit
def _field(row_ptr, index: tl.constexpr):
    return tl.load(row_ptr + index)


@triton.jit
def _halves(even, odd):
    """Mask words: 16 ones in the low half where ``even``, in the high half where ``odd``."""
    return even * 0xFFFF | (odd * 0xFFFF) << 16


@triton.jit
def _spread_pair(bits):
    """Two one-bit flags (bits 0 and 1) to mask words of their halves."""
    return _halves(bits & 1, (bits >> 1) & 1)


@triton.jit
def _spread_bytes(packed):
    """Byte 0 to the low half, byte 1 to the high half."""
    return (packed & 0xFF) | (packed & 0xFF00) << 8


@triton.jit
def _shift(value, left: tl.constexpr):
    if left >= 0:
        return value << left
    else:
        return value >> (-left)


@triton.jit
def _counts(tag_low, tag_high, NARROW: tl.constexpr, UNIT: tl.constexpr):
    """Per lane, packed in one word: stored planes 2 (bits 0-9), planes 3 (10-19), raw (20-29)."""
    beyond2 = (tag_low | tag_high) if NARROW else tl.zeros_like(tag_low)
    raw = tag_low & tag_high
    if UNIT == 2:
        beyond2 = (beyond2 & 1) + (beyond2 >> 1)
        tag_high = (tag_high & 1) + (tag_high >> 1)
        raw = (raw & 1) + (raw >> 1)
    return beyond2 | tag_high << 10 | raw << 20


@triton.jit
def _escape_places(counts, position):
    """Where each lane's plane 2, plane 3 and raw bytes start, and the position after the step.

    ``counts`` uint32[STEP, LANES] from ``_counts``; ``position`` of the first tile's escapes.
    """
    counts = counts.to(tl.int32)
    exclusive = tl.cumsum(counts, axis=1) - counts
    totals = tl.sum(counts, axis=1)
    total2, total3, total4 = totals & 0x3FF, (totals >> 10) & 0x3FF, totals >> 20
    sizes = total2 + total3 + 4 * total4
    starts = position + (tl.cumsum(sizes, axis=0) - sizes)
    place2 = starts[:, None] + (exclusive & 0x3FF)
    place3 = (starts + total2)[:, None] + ((exclusive >> 10) & 0x3FF)
    place4 = (starts + total2 + total3)[:, None] + 4 * (exclusive >> 20)
    return place2, place3, place4, position + tl.sum(sizes, axis=0), tl.sum(total4, axis=0)


@triton.jit
def _load_escape(escapes_ptr, places, wanted, length, UNIT: tl.constexpr):
    """One escape byte for each wanted column of a lane: the halves of a word."""
    even = wanted & 1
    first = tl.load(escapes_ptr + places, mask=(even != 0) & (places < length), other=0)
    word = first.to(tl.uint32)
    if UNIT == 2:
        odd = wanted >> 1
        after = places + even
        second = tl.load(escapes_ptr + after, mask=(odd != 0) & (after < length), other=0)
        word |= second.to(tl.uint32) << 16
    return word


@triton.jit
def _load_tags(tags_ptr, tile, lane, valid, COLUMNS: tl.constexpr, UNIT: tl.constexpr):
    TAG_LENGTH: tl.constexpr = (COLUMNS + 7) // 8
    at = tile * (2 * TAG_LENGTH) + (lane * UNIT) // 8
    shift = (lane * UNIT) % 8
    ones: tl.constexpr = 3 if UNIT == 2 else 1
    low = tl.load(tags_ptr + at, mask=valid, other=0).to(tl.uint32)
    high = tl.load(tags_ptr + at + TAG_LENGTH, mask=valid, other=0).to(tl.uint32)
    return (low >> shift) & ones, (high >> shift) & ones


@triton.jit
def _load_base_words(
    bases_ptr, outer, num_outer, lane, valid, INNER: tl.constexpr, UNIT: tl.constexpr
):
    """The three window bases of each lane, one exponent a half."""
    at = outer * INNER + lane * UNIT
    stride = num_outer * INNER
    if UNIT == 2:
        pairs_ptr = bases_ptr.to(tl.pointer_type(tl.uint16))
        b2 = _spread_bytes(tl.load(pairs_ptr + at // 2, mask=valid, other=0).to(tl.uint32))
        b3 = _spread_bytes(tl.load(pairs_ptr + (at + stride) // 2, mask=valid, other=0).to(tl.uint32))
        b4 = _spread_bytes(
            tl.load(pairs_ptr + (at + 2 * stride) // 2, mask=valid, other=0).to(tl.uint32)
        )
    else:
        b2 = tl.load(bases_ptr + at, mask=valid, other=0).to(tl.uint32)
        b3 = tl.load(bases_ptr + at + stride, mask=valid, other=0).to(tl.uint32)
        b4 = tl.load(bases_ptr + at + 2 * stride, mask=valid, other=0).to(tl.uint32)
    return b2, b3, b4


@triton.jit
def _select_base(tag_low, tag_high, b2, b3, b4):
    low, high = _spread_pair(tag_low), _spread_pair(tag_high)
    narrower = b2 ^ ((b2 ^ b3) & low)
    wider = b4 ^ (b4 & low)
    return narrower ^ ((narrower ^ wider) & high)


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
):
    """Groups along tokens. Writes 1 to a chunk's status where its escapes contradict its tags."""
    LANE_COLUMNS: tl.constexpr = INNER // UNIT
    out_type: tl.constexpr = tl.uint32 if UNIT == 2 else tl.uint16
    packed_type: tl.constexpr = tl.uint16 if UNIT == 2 else tl.uint8
    chunk = tl.load(block_chunk_ptr + tl.program_id(0)).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    out_ptr = _field(row_ptr, 0).to(tl.pointer_type(out_type))
    outer_stride = _field(row_ptr, 1)
    tokens = _field(row_ptr, 2).to(tl.int32)
    num_outer = _field(row_ptr, 3).to(tl.int32)
    payload = _field(row_ptr, 4)
    bases_ptr = _field(row_ptr, 5).to(tl.pointer_type(tl.uint8))
    first_block = _field(row_ptr, 6)
    low_ptr = (payload + _field(row_ptr, 7)).to(tl.pointer_type(out_type))
    plane2_ptr = (payload + _field(row_ptr, 8)).to(tl.pointer_type(packed_type))
    tags_ptr = (payload + _field(row_ptr, 9)).to(tl.pointer_type(tl.uint8))
    offsets_ptr = (payload + _field(row_ptr, 10)).to(tl.pointer_type(tl.uint32))
    escapes_ptr = (payload + _field(row_ptr, 11)).to(tl.pointer_type(tl.uint8))
    length = _field(row_ptr, 12)
    packed_ptr = payload.to(tl.pointer_type(packed_type))

    tiles_per_outer = (tokens + 7) // 8
    num_tiles = tiles_per_outer * num_outer
    num_blocks = (num_tiles + BLOCK_TILES - 1) // BLOCK_TILES
    block = (tl.program_id(0) - first_block).to(tl.int32)
    position = tl.load(offsets_ptr + block).to(tl.int64)
    end = tl.load(offsets_ptr + block + 1, mask=block + 1 < num_blocks, other=0).to(tl.int64)
    end = tl.where(block + 1 < num_blocks, end, length)
    # a hostile offset must not reach beyond the escapes
    bad = ((position > end) | (end > length)).to(tl.int32)
    length = length.to(tl.int32)
    position = tl.minimum(position, length).to(tl.int32)

    lane = tl.arange(0, LANES)[None, :]
    for step in range(0, BLOCK_TILES, STEP):
        in_block = step + tl.arange(0, STEP)[:, None]
        tile = block * BLOCK_TILES + in_block
        valid = (in_block < BLOCK_TILES) & (tile < num_tiles) & (lane < LANE_COLUMNS)
        outer = tile // tiles_per_outer
        token = (tile - outer * tiles_per_outer) * 8
        group = tile * LANE_COLUMNS + lane

        tag_low, tag_high = _load_tags(tags_ptr, tile, lane, valid, INNER, UNIT)
        low = tl.load(low_ptr + group, mask=valid, other=0).to(tl.uint32)
        places = _escape_places(_counts(tag_low, tag_high, NARROW, UNIT), position)
        place2, place3, place4, position, num_raw = places
        b2, b3, b4 = _load_base_words(bases_ptr, outer, num_outer, lane, valid, INNER, UNIT)
        base = _select_base(tag_low, tag_high, b2, b3, b4) << 7
        if NARROW:
            plane2 = _load_escape(escapes_ptr, place2, tag_low | tag_high, length, UNIT)
        else:
            dense = tl.load(plane2_ptr + group, mask=valid, other=0).to(tl.uint32)
            plane2 = _spread_bytes(dense) if UNIT == 2 else dense
            missing = valid & ((tag_low | tag_high) != (3 if UNIT == 2 else 1))
            bad |= tl.max(tl.max(missing.to(tl.int32), axis=1), axis=0)
        plane3 = _load_escape(escapes_ptr, place3, tag_high, length, UNIT)

        packed_at = (outer * tokens + token) * LANE_COLUMNS + lane
        out_at = outer.to(tl.int64) * (outer_stride // UNIT) + token * LANE_COLUMNS + lane
        for t in tl.static_range(8):
            present = valid & (token + t < tokens)
            packed = tl.load(packed_ptr + packed_at + t * LANE_COLUMNS, mask=present, other=0)
            packed = packed.to(tl.uint32)
            if UNIT == 2:
                packed = _spread_bytes(packed)
            word = (packed | packed << 8) & 0x807F807F
            word |= base + (
                (_shift(low, 7 - 2 * t) & 0x01800180)
                | (_shift(plane2, 9 - t) & 0x02000200)
                | (_shift(plane3, 10 - t) & 0x04000400)
            )
            tl.store(out_ptr + out_at + t * LANE_COLUMNS, word.to(out_type), mask=present)
        if num_raw > 0:
            # rare: write the words of lanes with a raw group once more, now with planes 4-7
            raw = tag_low & tag_high
            high4 = _load_raw(escapes_ptr, place4, raw, length, UNIT)
            high5 = _load_raw(escapes_ptr, place4 + 1, raw, length, UNIT)
            high6 = _load_raw(escapes_ptr, place4 + 2, raw, length, UNIT)
            high7 = _load_raw(escapes_ptr, place4 + 3, raw, length, UNIT)
            for r in range(8):
                some = valid & (token + r < tokens) & (raw != 0)
                byte_pair = tl.load(packed_ptr + packed_at + r * LANE_COLUMNS, mask=some, other=0)
                byte_pair = byte_pair.to(tl.uint32)
                if UNIT == 2:
                    byte_pair = _spread_bytes(byte_pair)
                code = (low >> (2 * r)) & 0x00030003
                code |= ((plane2 >> r) & 0x00010001) << 2
                code |= ((plane3 >> r) & 0x00010001) << 3
                code |= ((high4 >> r) & 0x00010001) << 4
                code |= ((high5 >> r) & 0x00010001) << 5
                code |= ((high6 >> r) & 0x00010001) << 6
                code |= ((high7 >> r) & 0x00010001) << 7
                full = ((byte_pair | byte_pair << 8) & 0x807F807F) | (base + (code << 7))
                tl.store(out_ptr + out_at + r * LANE_COLUMNS, full.to(out_type), mask=some)
    spare: tl.constexpr = INNER % 8
    if spare:
        bad |= _spare_bits(tags_ptr, block, num_tiles, INNER, BLOCK_TILES)
    if (bad | (position != end).to(tl.int32)) != 0:
        tl.store(status_ptr + chunk, 1)


@triton.jit
def _load_raw(escapes_ptr, places, raw, length, UNIT: tl.constexpr):
    """One byte of the four of each raw column of a lane."""
    even = raw & 1
    word = tl.load(escapes_ptr + places, mask=(even != 0) & (places < length), other=0)
    word = word.to(tl.uint32)
    if UNIT == 2:
        after = places + 4 * even
        odd = tl.load(escapes_ptr + after, mask=((raw >> 1) != 0) & (after < length), other=0)
        word |= odd.to(tl.uint32) << 16
    return word


@triton.jit
def _spare_bits(tags_ptr, block, num_tiles, COLUMNS: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """1 if a tag bit beyond the last column is set in the block."""
    TAG_LENGTH: tl.constexpr = (COLUMNS + 7) // 8
    PADDED: tl.constexpr = triton.next_power_of_2(BLOCK_TILES)
    in_block = tl.arange(0, PADDED)
    tile = block * BLOCK_TILES + in_block
    valid = (in_block < BLOCK_TILES) & (tile < num_tiles)
    last = tile * (2 * TAG_LENGTH) + TAG_LENGTH - 1
    low = tl.load(tags_ptr + last, mask=valid, other=0)
    high = tl.load(tags_ptr + last + TAG_LENGTH, mask=valid, other=0)
    spare = (low | high).to(tl.int32) >> (COLUMNS % 8)
    return (tl.max(spare, axis=0) != 0).to(tl.int32)


@triton.jit
def _exceeds(span, WINDOW: tl.constexpr):
    """Two flags, one a half: a code that was ORed into ``span`` lies outside of the window."""
    beyond = span & ((0x1FF ^ (WINDOW - 1)) * 0x00010001)
    return ((beyond & 0xFFFF) != 0).to(tl.uint32) | ((beyond >> 16) != 0).to(tl.uint32) << 1


@triton.jit
def _store_tags(
    tags_ptr, tile, valid, bits, COLUMNS: tl.constexpr, UNIT: tl.constexpr, HIGH: tl.constexpr
):
    """Pack the lanes' tag bits ``[STEP, LANES]`` to bytes and store one half of the tags."""
    TAG_LENGTH: tl.constexpr = (COLUMNS + 7) // 8
    STEP: tl.constexpr = bits.shape[0]
    PER_BYTE: tl.constexpr = 8 // UNIT
    NUM_BYTES: tl.constexpr = bits.shape[1] // PER_BYTE
    shifts = (tl.arange(0, PER_BYTE) * UNIT)[None, None, :]
    bytes = tl.sum(tl.reshape(bits, (STEP, NUM_BYTES, PER_BYTE)) << shifts, axis=2)
    byte = tl.arange(0, NUM_BYTES)[None, :]
    at = tile * (2 * TAG_LENGTH) + HIGH * TAG_LENGTH + byte
    tl.store(tags_ptr + at, bytes.to(tl.uint8), mask=valid & (byte < TAG_LENGTH))


@triton.jit
def _store_escape(scratch_ptr, places, word, wanted, UNIT: tl.constexpr):
    """The inverse of ``_load_escape``."""
    even = wanted & 1
    tl.store(scratch_ptr + places, word.to(tl.uint8), mask=even != 0)
    if UNIT == 2:
        tl.store(scratch_ptr + places + even, (word >> 16).to(tl.uint8), mask=(wanted >> 1) != 0)


@triton.jit
def _load_exponents(in_ptr, at, present):
    """Exponents of a row, one a half."""
    return (tl.load(in_ptr + at, mask=present, other=0).to(tl.uint32) >> 7) & 0x00FF00FF


@triton.jit
def _span(exponents, base, present):
    """``exponent - base`` with bit 8 set where it is negative; zero for absent cells."""
    difference = ((exponents | 0x01000100) - base) ^ 0x01000100
    return tl.where(present, difference, 0)


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
    ``scratch[program * SCRATCH ...]``, their number to ``sizes[program]``."""
    LANE_COLUMNS: tl.constexpr = INNER // UNIT
    in_type: tl.constexpr = tl.uint32 if UNIT == 2 else tl.uint16
    packed_type: tl.constexpr = tl.uint16 if UNIT == 2 else tl.uint8
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(block_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    in_ptr = _field(row_ptr, 0).to(tl.pointer_type(in_type))
    outer_stride = _field(row_ptr, 1)
    tokens = _field(row_ptr, 2).to(tl.int32)
    num_outer = _field(row_ptr, 3).to(tl.int32)
    payload = _field(row_ptr, 4)
    bases_ptr = _field(row_ptr, 5).to(tl.pointer_type(tl.uint8))
    block = (program - _field(row_ptr, 6)).to(tl.int32)
    low_ptr = (payload + _field(row_ptr, 7)).to(tl.pointer_type(in_type))
    plane2_ptr = (payload + _field(row_ptr, 8)).to(tl.pointer_type(packed_type))
    tags_ptr = (payload + _field(row_ptr, 9)).to(tl.pointer_type(tl.uint8))
    packed_ptr = payload.to(tl.pointer_type(packed_type))
    own_scratch_ptr = scratch_ptr + program * SCRATCH

    tiles_per_outer = (tokens + 7) // 8
    num_tiles = tiles_per_outer * num_outer
    ones: tl.constexpr = 3 if UNIT == 2 else 1
    lane = tl.arange(0, LANES)[None, :]
    position = tl.zeros((), tl.int32)
    for step in range(0, BLOCK_TILES, STEP):
        in_block = step + tl.arange(0, STEP)[:, None]
        tile = block * BLOCK_TILES + in_block
        tile_valid = (in_block < BLOCK_TILES) & (tile < num_tiles)
        valid = tile_valid & (lane < LANE_COLUMNS)
        outer = tile // tiles_per_outer
        token = (tile - outer * tiles_per_outer) * 8
        group = tile * LANE_COLUMNS + lane
        packed_at = (outer * tokens + token) * LANE_COLUMNS + lane
        in_at = outer.to(tl.int64) * (outer_stride // UNIT) + token * LANE_COLUMNS + lane

        b2, b3, b4 = _load_base_words(bases_ptr, outer, num_outer, lane, valid, INNER, UNIT)
        span2 = tl.zeros([STEP, LANES], tl.uint32)
        span3 = tl.zeros([STEP, LANES], tl.uint32)
        span4 = tl.zeros([STEP, LANES], tl.uint32)
        for t in tl.static_range(8):
            present = valid & (token + t < tokens)
            word = tl.load(in_ptr + in_at + t * LANE_COLUMNS, mask=present, other=0).to(tl.uint32)
            exponents = (word >> 7) & 0x00FF00FF
            if NARROW:
                span2 |= _span(exponents, b2, present)
            span3 |= _span(exponents, b3, present)
            span4 |= _span(exponents, b4, present)
            packed = (word & 0x007F007F) | ((word >> 8) & 0x00800080)
            packed |= packed >> 8
            tl.store(
                packed_ptr + packed_at + t * LANE_COLUMNS, packed.to(packed_type), mask=present
            )
        beyond2 = _exceeds(span2, 4) if NARROW else tl.full([STEP, LANES], ones, tl.uint32)
        beyond3 = _exceeds(span3, 8)
        tag_high = tl.where(valid, beyond2 & beyond3 & ones, 0)
        raw = tag_high & _exceeds(span4, 16)
        tag_low = tl.where(valid, beyond2 & (beyond3 ^ ones) & ones, 0) | raw
        base = _select_base(tag_low, tag_high, b2, b3, b4)

        low = tl.zeros([STEP, LANES], tl.uint32)
        plane2 = tl.zeros([STEP, LANES], tl.uint32)
        plane3 = tl.zeros([STEP, LANES], tl.uint32)
        for t in tl.static_range(8):
            present = valid & (token + t < tokens)
            codes = _load_exponents(in_ptr, in_at + t * LANE_COLUMNS, present) - base
            codes = tl.where(present, codes, 0)
            low |= (codes & 0x00030003) << (2 * t)
            plane2 |= _shift(codes & 0x00040004, t - 2)
            plane3 |= _shift(codes & 0x00080008, t - 3)
        tl.store(low_ptr + group, low.to(in_type), mask=valid)
        _store_tags(tags_ptr, tile, tile_valid, tag_low, INNER, UNIT, 0)
        _store_tags(tags_ptr, tile, tile_valid, tag_high, INNER, UNIT, 1)
        places = _escape_places(_counts(tag_low, tag_high, NARROW, UNIT), position)
        place2, place3, place4, position, num_raw = places
        if NARROW:
            _store_escape(own_scratch_ptr, place2, plane2, tag_low | tag_high, UNIT)
        else:
            dense = plane2 | plane2 >> 8
            tl.store(plane2_ptr + group, dense.to(packed_type), mask=valid)
        _store_escape(own_scratch_ptr, place3, plane3, tag_high, UNIT)
        if num_raw > 0:
            for plane in range(4):
                bits = tl.zeros([STEP, LANES], tl.uint32)
                for r in range(8):
                    some = valid & (token + r < tokens)
                    row = _load_exponents(in_ptr, in_at + r * LANE_COLUMNS, some)
                    bits |= ((row >> (4 + plane)) & 0x00010001) << r
                _store_raw(own_scratch_ptr, place4 + plane, bits, raw, UNIT)
    tl.store(sizes_ptr + program, position)


@triton.jit
def _store_raw(scratch_ptr, places, word, raw, UNIT: tl.constexpr):
    """The inverse of ``_load_raw``."""
    even = raw & 1
    tl.store(scratch_ptr + places, word.to(tl.uint8), mask=even != 0)
    if UNIT == 2:
        after = places + 4 * even
        tl.store(scratch_ptr + after, (word >> 16).to(tl.uint8), mask=(raw >> 1) != 0)


@triton.jit
def offsets_kernel(
    chunks_ptr,
    sizes_ptr,
    totals_ptr,
    num_blocks_ptr,
    FIELD: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per chunk: the exclusive sums of its blocks' sizes to its offsets stream, the sum to totals.

    ``FIELD``: where the chunk's row says the stream is. ``TOTAL``: the stream ends with the sum.
    """
    chunk = tl.program_id(0).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    offsets_ptr = (_field(row_ptr, 4) + _field(row_ptr, FIELD)).to(tl.pointer_type(tl.uint32))
    first = _field(row_ptr, 6)
    num_blocks = tl.load(num_blocks_ptr + chunk)
    total = tl.zeros((), tl.int32)
    # "while": Triton's interpreter cannot take a range whose end is a tensor
    start = 0
    while start < num_blocks:
        block = start + tl.arange(0, BLOCK)
        valid = block < num_blocks
        sizes = tl.load(sizes_ptr + first + block, mask=valid, other=0)
        offsets = total + tl.cumsum(sizes, axis=0) - sizes
        tl.store(offsets_ptr + block, offsets.to(tl.uint32), mask=valid)
        total += tl.sum(sizes, axis=0)
        start += BLOCK
    tl.store(totals_ptr + chunk, total)
    if TOTAL:
        tl.store(offsets_ptr + num_blocks, total.to(tl.uint32))


@triton.jit
def compact_kernel(
    chunks_ptr, block_chunk_ptr, scratch_ptr, sizes_ptr, SCRATCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Move each block's escapes from the scratch to their place."""
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(block_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    payload = _field(row_ptr, 4)
    offsets_ptr = (payload + _field(row_ptr, 10)).to(tl.pointer_type(tl.uint32))
    start = tl.load(offsets_ptr + (program - _field(row_ptr, 6))).to(tl.int64)
    escapes_ptr = (payload + _field(row_ptr, 11)).to(tl.pointer_type(tl.uint8)) + start
    size = tl.load(sizes_ptr + program)
    first = 0
    while first < size:
        at = first + tl.arange(0, BLOCK)
        byte = tl.load(scratch_ptr + program * SCRATCH + at, mask=at < size, other=0)
        tl.store(escapes_ptr + at, byte, mask=at < size)
        first += BLOCK
