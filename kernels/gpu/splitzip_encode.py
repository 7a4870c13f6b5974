"""SplitZip's encoder in Triton: the kernels alone. Layout and names: kernels/reference/splitzip.py.

A program handles one block of one chunk as one warp. A *segment* is 32 lanes: escapes are rare, so
the main path only finds out which segments have some, and those are looked at once more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.splitzip_blocks import find_chunk, place_block, skip_runs
from kvz.kernels.gpu.words import (
    NUM_FIELDS,
    count_flags,
    is_nonzero,
    load_field,
    split_bf16,
    subtract_bytes,
)

SEGMENT = tl.constexpr(32)
#: In a table of codes: this exponent is not in the codebook.
UNKNOWN = tl.constexpr(0x80)


@triton.jit
def tables_kernel(chunks_ptr, tables_ptr):
    """Per chunk: the code of each of the 256 exponents, ``UNKNOWN`` where it has none."""
    chunk = tl.program_id(0).to(tl.int64)
    codebook_ptr = load_field(chunks_ptr + chunk * NUM_FIELDS, 5).to(tl.pointer_type(tl.uint8))
    exponent = tl.arange(0, 256)
    code = tl.full([256], UNKNOWN, tl.int32)
    for i in tl.static_range(16):
        code = tl.where(exponent == tl.load(codebook_ptr + i).to(tl.int32), i, code)
    tl.store(tables_ptr + chunk * 256 + exponent, code.to(tl.uint8))


@triton.jit
def _look_up(table_ptr, exponent, UNIT: tl.constexpr):
    """The table's entries for a lane's exponents, one byte each."""
    packed = tl.load(table_ptr + (exponent & 0xFF)).to(tl.uint32)
    for k in tl.static_range(1, UNIT):
        packed |= tl.load(table_ptr + ((exponent >> 8 * k) & 0xFF)).to(tl.uint32) << 8 * k
    return packed


@triton.jit
def _load_words(in_ptr, lane, valid, one_run, in_run, run, between, UNIT: tl.constexpr):
    if one_run:
        word = tl.load(in_ptr + lane, mask=valid, other=0)
    else:
        word = tl.load(in_ptr + skip_runs(lane, in_run, run, between, UNIT), mask=valid, other=0)
    return word


@triton.jit
def _store_codes(codes_ptr, lane, codes, valid, UNIT: tl.constexpr):
    """``codes``, one byte an element, as half bytes; lanes are neighbours, from an even one on."""
    if UNIT == 4:
        pairs = (codes | codes >> 4) & 0x00FF00FF
        tl.store(codes_ptr + lane, (pairs | pairs >> 8).to(tl.uint16), mask=valid)
    else:
        PAIRS: tl.constexpr = codes.shape[0] // 2
        halves = tl.where(valid, codes, 0) << (4 * (lane % 2)).to(tl.uint32)
        packed = tl.sum(tl.reshape(halves, (PAIRS, 2)), axis=1)
        byte = tl.min(tl.reshape(lane, (PAIRS, 2)), axis=1) // 2
        some_valid = tl.max(tl.reshape(valid.to(tl.int32), (PAIRS, 2)), axis=1)
        tl.store(codes_ptr + byte, packed.to(tl.uint8), mask=some_valid != 0)


@triton.jit
def _emit_segment(
    codes,
    exponent,
    lane,
    here,
    codes_ptr,
    positions_ptr,
    exponents_ptr,
    at,
    limit,
    UNIT: tl.constexpr,
):
    """Codes of a segment, zero for escapes, and its escapes from ``at`` on, below ``limit``.

    ``codes``: 16 or more in each byte that is an escape · returns the number of escapes.
    """
    valid = lane < here // UNIT
    flags = is_nonzero(codes & (0xF0F0F0F0 if UNIT == 4 else 0xF0))
    flags = tl.where(valid, flags, 0)
    _store_codes(codes_ptr, lane, codes & 0x0F0F0F0F & ((flags * 0xFF) ^ 0xFFFFFFFF), valid, UNIT)
    counts = (count_flags(flags) if UNIT == 4 else flags).to(tl.int32)
    place = at + tl.cumsum(counts, axis=0) - counts
    position = lane * UNIT
    for k in tl.static_range(UNIT):
        escaped = (flags >> 8 * k) & 1
        write = (escaped != 0) & (place < limit)
        tl.store(positions_ptr + place, (position + k).to(tl.uint16), mask=write)
        tl.store(exponents_ptr + place, (exponent >> 8 * k).to(tl.uint8), mask=write)
        place += escaped.to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _pick_row(rows, ROW: tl.constexpr):
    """Row ``ROW`` of ``rows`` [rows, lanes]; rows are in different registers, so this is free."""
    row = tl.arange(0, rows.shape[0])[:, None]
    return tl.sum(tl.where(row == ROW, rows, 0), axis=0)


@triton.jit
def encode_kernel(
    chunks_ptr,
    block_chunk_ptr,
    tables_ptr,
    scratch_positions_ptr,
    scratch_exponents_ptr,
    sizes_ptr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CAPACITY: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    """Signs, mantissas and codes, ``STEP`` lanes at a time. The first ``CAPACITY`` escapes of a
    block go to the scratch, the number of all of them to ``sizes``.

    Fields of the chunks' rows: kernels/gpu/splitzip.py.
    """
    LANES: tl.constexpr = BLOCK // UNIT
    SEGMENTS: tl.constexpr = STEP // SEGMENT
    bits_type: tl.constexpr = tl.uint64 if UNIT == 4 else tl.uint16
    bytes_type: tl.constexpr = tl.uint32 if UNIT == 4 else tl.uint8
    codes_type: tl.constexpr = tl.uint16 if UNIT == 4 else tl.uint8
    program = tl.program_id(0).to(tl.int64)
    chunk, row_ptr, block = find_chunk(chunks_ptr, block_chunk_ptr, program)
    payload = load_field(row_ptr, 4)
    codebook_ptr = load_field(row_ptr, 5).to(tl.pointer_type(tl.uint8))
    start = block * BLOCK
    data_at, in_run, run, between = place_block(row_ptr, start)
    in_ptr = (load_field(row_ptr, 0) + 2 * data_at).to(tl.pointer_type(bits_type))
    here = tl.minimum(run * load_field(row_ptr, 3) - start, BLOCK).to(tl.int32)
    one_run = in_run + here <= run
    packed_ptr = (payload + start).to(tl.pointer_type(bytes_type))
    codes_ptr = (payload + load_field(row_ptr, 7) + start // 2).to(tl.pointer_type(codes_type))
    table_ptr = tables_ptr + chunk * 256
    positions_ptr = scratch_positions_ptr + program * CAPACITY
    exponents_ptr = scratch_exponents_ptr + program * CAPACITY
    lowest = tl.load(codebook_ptr).to(tl.uint32)
    consecutive = tl.load(codebook_ptr + 15).to(tl.uint32) == lowest + 15

    count = tl.zeros((), tl.int32)
    for step in range(0, LANES, STEP):
        lane = step + tl.arange(0, STEP)
        valid = lane < here // UNIT
        words = _load_words(in_ptr, lane, valid, one_run, in_run, run, between, UNIT)
        packed, exponent = split_bf16(words, UNIT, PERMUTE)
        tl.store(packed_ptr + lane, packed.to(bytes_type), mask=valid)
        if consecutive:
            codes = subtract_bytes(exponent, lowest * 0x01010101)
        else:
            codes = _look_up(table_ptr, exponent, UNIT)
        # with consecutive exponents, codes of escapes are wrong until they are written once more
        _store_codes(codes_ptr, lane, codes & (0x0F0F0F0F if UNIT == 4 else 0x0F), valid, UNIT)
        by_segment = tl.reshape(tl.where(valid, codes, 0), (SEGMENTS, SEGMENT))
        escaped = (by_segment & (0xF0F0F0F0 if UNIT == 4 else 0xF0)) != 0
        segments = tl.max(escaped.to(tl.int32), axis=1) << tl.arange(0, SEGMENTS)
        segments = tl.sum(segments, axis=0)
        if segments != 0:
            tl.debug_barrier()
            exponents = tl.reshape(exponent, (SEGMENTS, SEGMENT))
            for segment in tl.static_range(SEGMENTS):
                if (segments >> segment) & 1 != 0:
                    first = step + segment * SEGMENT
                    count += _emit_segment(
                        _pick_row(by_segment, segment),
                        _pick_row(exponents, segment),
                        first + tl.arange(0, SEGMENT),
                        here,
                        codes_ptr,
                        positions_ptr,
                        exponents_ptr,
                        count,
                        CAPACITY,
                        UNIT,
                    )
    tl.store(sizes_ptr + program, count)


@triton.jit
def _emit_block(
    row_ptr, block, table_ptr, positions_ptr, exponents_ptr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """All escapes of a block, straight to their place."""
    bits_type: tl.constexpr = tl.uint64 if UNIT == 4 else tl.uint16
    codes_type: tl.constexpr = tl.uint16 if UNIT == 4 else tl.uint8
    start = block * BLOCK
    data_at, in_run, run, between = place_block(row_ptr, start)
    in_ptr = (load_field(row_ptr, 0) + 2 * data_at).to(tl.pointer_type(bits_type))
    codes_at = load_field(row_ptr, 4) + load_field(row_ptr, 7) + start // 2
    codes_ptr = codes_at.to(tl.pointer_type(codes_type))
    here = tl.minimum(run * load_field(row_ptr, 3) - start, BLOCK).to(tl.int32)
    count = tl.zeros((), tl.int32)
    for first in range(0, BLOCK // UNIT, SEGMENT):
        lane = first + tl.arange(0, SEGMENT)
        valid = lane < here // UNIT
        words = _load_words(in_ptr, lane, valid, False, in_run, run, between, UNIT)
        _, exponent = split_bf16(words, UNIT, False)
        codes = _look_up(table_ptr, exponent, UNIT)
        count += _emit_segment(
            codes,
            exponent,
            lane,
            here,
            codes_ptr,
            positions_ptr,
            exponents_ptr,
            count,
            BLOCK,
            UNIT,
        )


@triton.jit
def _place_escapes(chunks_ptr, totals_ptr, chunk, program, valid):
    """Where the positions and the exponents of blocks' escapes go; programs may be a vector."""
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    payload = tl.load(row_ptr + 4)
    offsets_ptr = (payload + tl.load(row_ptr + 8)).to(tl.pointer_type(tl.uint32))
    block = program - tl.load(row_ptr + 6)
    first = tl.load(offsets_ptr + block, mask=valid, other=0).to(tl.int64)
    total = tl.load(totals_ptr + chunk).to(tl.int64)
    positions_at = tl.load(row_ptr + 9)
    exponents_at = (positions_at + 2 * total + 15) // 16 * 16
    positions_ptr = (payload + positions_at).to(tl.pointer_type(tl.uint16)) + first
    return positions_ptr, (payload + exponents_at).to(tl.pointer_type(tl.uint8)) + first


@triton.jit(do_not_specialize=["num_blocks"])
def compact_kernel(
    chunks_ptr,
    block_chunk_ptr,
    tables_ptr,
    scratch_positions_ptr,
    scratch_exponents_ptr,
    sizes_ptr,
    totals_ptr,
    num_blocks,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    COPY: tl.constexpr,
):
    """Move the escapes of ``ROWS`` blocks from the scratch to their place, ``COPY`` of each at a
    time; a block with more than its scratch holds is read once more."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_blocks
    size = tl.load(sizes_ptr + row, mask=valid, other=0)
    longest = tl.max(size, axis=0)
    if longest > 0:
        chunk = tl.load(block_chunk_ptr + row, mask=valid, other=0).to(tl.int64)
        to_positions, to_exponents = _place_escapes(chunks_ptr, totals_ptr, chunk, row, valid)
        from_scratch = (row * CAPACITY)[:, None]
        moved = tl.where(size <= CAPACITY, size, 0)[:, None]
        first = 0
        while first < tl.minimum(longest, CAPACITY):
            i = first + tl.arange(0, COPY)[None, :]
            some = i < moved
            position = tl.load(scratch_positions_ptr + (from_scratch + i), mask=some, other=0)
            exponent = tl.load(scratch_exponents_ptr + (from_scratch + i), mask=some, other=0)
            tl.store(to_positions[:, None] + i, position, mask=some)
            tl.store(to_exponents[:, None] + i, exponent, mask=some)
            first += COPY
        if longest > CAPACITY:
            for i in range(ROWS):
                program = tl.program_id(0).to(tl.int64) * ROWS + i
                inside = program < num_blocks
                if tl.load(sizes_ptr + program, mask=inside, other=0) > CAPACITY:
                    own, row_ptr, block = find_chunk(chunks_ptr, block_chunk_ptr, program)
                    to_positions_one, to_exponents_one = _place_escapes(
                        chunks_ptr, totals_ptr, own, program, inside
                    )
                    _emit_block(
                        row_ptr,
                        block,
                        tables_ptr + own * 256,
                        to_positions_one,
                        to_exponents_one,
                        UNIT,
                        BLOCK,
                    )
