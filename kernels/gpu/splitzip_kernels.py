"""SplitZip in Triton: the kernels alone. Layout and names: kernels/reference/splitzip.py.

A program handles one block of ``BLOCK`` elements of one chunk in steps of ``STEP`` lanes. A *lane* is
``UNIT`` neighbouring elements: two where the addresses allow it (the low and high half of a 32-bit
word), else one. Masked-off lanes load zero and store nothing. Addresses as in gaac_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.gaac_kernels import NUM_FIELDS, _field, _spread_bytes


@triton.jit
def _data_offsets(lane, start, end, run, extra):
    """Where lanes lie in the tensor: one outer index follows the other at a distance.

    ``run`` lanes are contiguous; each further outer index adds ``extra``. Most blocks lie within one
    run, where no lane has to divide.
    """
    first = start // run
    outer = tl.zeros_like(lane) + first
    if first != (end - 1) // run:
        outer = lane // run
    return lane + outer.to(tl.int64) * extra


@triton.jit
def _exponent_pairs(code, codebook_ptr, RUN: tl.constexpr, UNIT: tl.constexpr):
    """The exponents of a lane's codes (bits 0-3 and 4-7), one a half."""
    even, odd = code & 15, code >> 4
    if RUN:
        # consecutive exponents: the codebook is its first entry
        lowest = tl.load(codebook_ptr).to(tl.uint32)
        word = even + lowest
        if UNIT == 2:
            word |= (odd + lowest) << 16
    else:
        word = tl.load(codebook_ptr + even).to(tl.uint32)
        if UNIT == 2:
            word |= tl.load(codebook_ptr + odd).to(tl.uint32) << 16
    return word


@triton.jit
def decode_kernel(
    chunks_ptr,
    block_chunk_ptr,
    status_ptr,
    UNIT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ESCAPE_STEP: tl.constexpr,
):
    """Writes 1 to a chunk's status where offsets or positions are not what they must be."""
    out_type: tl.constexpr = tl.uint32 if UNIT == 2 else tl.uint16
    packed_type: tl.constexpr = tl.uint16 if UNIT == 2 else tl.uint8
    LANES: tl.constexpr = BLOCK // UNIT
    chunk = tl.load(block_chunk_ptr + tl.program_id(0)).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    data = _field(row_ptr, 0)
    run = _field(row_ptr, 2).to(tl.int32)
    extra = _field(row_ptr, 1) - run
    length = run * _field(row_ptr, 3).to(tl.int32)
    payload = _field(row_ptr, 4)
    codebook_ptr = _field(row_ptr, 5).to(tl.pointer_type(tl.uint8))
    block = (tl.program_id(0) - _field(row_ptr, 6)).to(tl.int32)
    codes_ptr = (payload + _field(row_ptr, 7)).to(tl.pointer_type(tl.uint8))
    offsets_ptr = (payload + _field(row_ptr, 8)).to(tl.pointer_type(tl.uint32))
    positions_at = _field(row_ptr, 9)
    payload_nbytes = _field(row_ptr, 10)
    out_ptr = data.to(tl.pointer_type(out_type))
    packed_ptr = payload.to(tl.pointer_type(packed_type))

    num_lanes = length // UNIT
    run_lanes = run // UNIT
    start = block * LANES
    end = tl.minimum(start + LANES, num_lanes)
    for step in tl.static_range(0, LANES, STEP):
        lane = start + step + tl.arange(0, STEP)
        valid = lane < end
        packed = tl.load(packed_ptr + lane, mask=valid, other=0).to(tl.uint32)
        if UNIT == 2:
            code = tl.load(codes_ptr + lane, mask=valid, other=0).to(tl.uint32)
            packed = _spread_bytes(packed)
        else:
            code = tl.load(codes_ptr + lane // 2, mask=valid, other=0).to(tl.uint32)
            code = (code >> (4 * (lane % 2))) & 15
        word = (packed | packed << 8) & 0x807F807F
        word |= _exponent_pairs(code, codebook_ptr, RUN, UNIT) << 7
        at = _data_offsets(lane, start, end, run_lanes, extra // UNIT)
        tl.store(out_ptr + at, word.to(out_type), mask=valid)

    num_blocks = (length + BLOCK - 1) // BLOCK
    total = tl.load(offsets_ptr + num_blocks).to(tl.int64)
    first = tl.load(offsets_ptr + block).to(tl.int64)
    last = tl.load(offsets_ptr + block + 1).to(tl.int64)
    exponents_at = (positions_at + 2 * total + 15) // 16 * 16
    bad = (first > last) | (last > total) | (exponents_at + total != payload_nbytes)
    bad |= (block == 0) & (first != 0)
    if bad:
        tl.store(status_ptr + chunk, 1)
    elif first < last:
        # escapes overwrite what other threads of this program wrote above
        tl.debug_barrier()
        positions_ptr = (payload + positions_at).to(tl.pointer_type(tl.uint16))
        exponents_ptr = (payload + exponents_at).to(tl.pointer_type(tl.uint8))
        sign_mantissa_ptr = payload.to(tl.pointer_type(tl.uint8))
        element_ptr = data.to(tl.pointer_type(tl.uint16))
        block_start = block * BLOCK
        block_end = tl.minimum(block_start + BLOCK, length)
        escape = first
        while escape < last:
            i = escape + tl.arange(0, ESCAPE_STEP)
            some = i < last
            position = tl.load(positions_ptr + i, mask=some, other=0).to(tl.int32)
            before = tl.load(positions_ptr + i - 1, mask=some & (i > first), other=0).to(tl.int32)
            element = block_start + position
            wrong = some & ((element >= block_end) | ((i > first) & (position <= before)))
            if tl.max(wrong.to(tl.int32), axis=0) != 0:
                tl.store(status_ptr + chunk, 1)
            some = some & (element < block_end)
            exponent = tl.load(exponents_ptr + i, mask=some, other=0).to(tl.uint32)
            byte = tl.load(sign_mantissa_ptr + element, mask=some, other=0).to(tl.uint32)
            value = (byte & 0x80) << 8 | (byte & 0x7F) | exponent << 7
            place = _data_offsets(element, block_start, block_end, run, extra)
            tl.store(element_ptr + place, value.to(tl.uint16), mask=some)
            escape += ESCAPE_STEP


@triton.jit
def _classify(word, codebook_ptr, RUN: tl.constexpr, UNIT: tl.constexpr):
    """``(code byte, escape flags, exponents one a half)`` of each lane."""
    exponents = (word >> 7) & 0x00FF00FF
    even, even_known = _code(exponents & 0xFF, codebook_ptr, RUN)
    if UNIT == 2:
        odd, odd_known = _code(exponents >> 16, codebook_ptr, RUN)
        return even | odd << 4, (even_known ^ 1) | (odd_known ^ 1) << 1, exponents
    else:
        return even, even_known ^ 1, exponents


@triton.jit
def _code(exponent, codebook_ptr, RUN: tl.constexpr):
    """Code of an exponent (0 where it has none), and whether it has one."""
    if RUN:
        code = (exponent + 256 - tl.load(codebook_ptr).to(tl.uint32)) & 0xFF
        known = (code < 16).to(tl.uint32)
        return code * known, known
    else:
        code = tl.zeros_like(exponent)
        known = tl.zeros_like(exponent)
        for i in tl.static_range(16):
            equal = (exponent == tl.load(codebook_ptr + i).to(tl.uint32)).to(tl.uint32)
            code += equal * i
            known |= equal
        return code, known


@triton.jit
def _emit_escapes(
    positions_ptr, exponents_ptr, at, flags, exponents, position, limit, UNIT: tl.constexpr
):
    """Append a step's escapes from ``at`` on, below ``limit``; returns their number.

    ``position``: place of each lane's first element in the block.
    """
    even, odd = flags & 1, flags >> 1
    counts = (even + odd).to(tl.int32)
    place = at + tl.cumsum(counts, axis=0) - counts
    write = (even != 0) & (place < limit)
    tl.store(positions_ptr + place, position.to(tl.uint16), mask=write)
    tl.store(exponents_ptr + place, exponents.to(tl.uint8), mask=write)
    if UNIT == 2:
        place += even.to(tl.int32)
        write = (odd != 0) & (place < limit)
        tl.store(positions_ptr + place, (position + 1).to(tl.uint16), mask=write)
        tl.store(exponents_ptr + place, (exponents >> 16).to(tl.uint8), mask=write)
    return tl.sum(counts, axis=0)


@triton.jit
def encode_kernel(
    chunks_ptr,
    block_chunk_ptr,
    scratch_positions_ptr,
    scratch_exponents_ptr,
    sizes_ptr,
    UNIT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Signs, mantissas and codes. The first ``CAPACITY`` escapes of a block go to the scratch, the
    number of all of them to ``sizes``."""
    in_type: tl.constexpr = tl.uint32 if UNIT == 2 else tl.uint16
    packed_type: tl.constexpr = tl.uint16 if UNIT == 2 else tl.uint8
    LANES: tl.constexpr = BLOCK // UNIT
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(block_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    in_ptr = _field(row_ptr, 0).to(tl.pointer_type(in_type))
    run = _field(row_ptr, 2).to(tl.int32)
    extra = _field(row_ptr, 1) - run
    length = run * _field(row_ptr, 3).to(tl.int32)
    payload = _field(row_ptr, 4)
    codebook_ptr = _field(row_ptr, 5).to(tl.pointer_type(tl.uint8))
    block = (program - _field(row_ptr, 6)).to(tl.int32)
    codes_ptr = (payload + _field(row_ptr, 7)).to(tl.pointer_type(tl.uint8))
    packed_ptr = payload.to(tl.pointer_type(packed_type))

    start = block * LANES
    end = tl.minimum(start + LANES, (length + UNIT - 1) // UNIT)
    count = tl.zeros((), tl.int32)
    for step in range(0, LANES, STEP):
        lane = start + step + tl.arange(0, STEP)
        valid = lane < end
        at = _data_offsets(lane, start, end, run // UNIT, extra // UNIT)
        word = tl.load(in_ptr + at, mask=valid, other=0).to(tl.uint32)
        packed = (word & 0x007F007F) | ((word >> 8) & 0x00800080)
        packed |= packed >> 8
        tl.store(packed_ptr + lane, packed.to(packed_type), mask=valid)
        code, flags, exponents = _classify(word, codebook_ptr, RUN, UNIT)
        flags = tl.where(valid, flags, 0)
        if UNIT == 2:
            tl.store(codes_ptr + lane, code.to(tl.uint8), mask=valid)
        else:
            nibbles = tl.where(valid, code, 0) << (4 * (tl.arange(0, STEP) % 2))
            bytes = tl.sum(tl.reshape(nibbles, (STEP // 2, 2)), axis=1)
            byte = (start + step) // 2 + tl.arange(0, STEP // 2)
            tl.store(codes_ptr + byte, bytes.to(tl.uint8), mask=byte * 2 < end)
        if tl.max(flags, axis=0) != 0:
            count += _emit_escapes(
                scratch_positions_ptr + program * CAPACITY,
                scratch_exponents_ptr + program * CAPACITY,
                count,
                flags,
                exponents,
                (lane - start) * UNIT,
                CAPACITY,
                UNIT,
            )
    tl.store(sizes_ptr + program, count)


@triton.jit
def compact_kernel(
    chunks_ptr,
    block_chunk_ptr,
    scratch_positions_ptr,
    scratch_exponents_ptr,
    sizes_ptr,
    totals_ptr,
    UNIT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CAPACITY: tl.constexpr,
    COPY: tl.constexpr,
):
    """Move each block's escapes from the scratch to their place; a block with more than it holds is
    read once more."""
    in_type: tl.constexpr = tl.uint32 if UNIT == 2 else tl.uint16
    LANES: tl.constexpr = BLOCK // UNIT
    program = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes_ptr + program)
    if size > 0:
        chunk = tl.load(block_chunk_ptr + program).to(tl.int64)
        row_ptr = chunks_ptr + chunk * NUM_FIELDS
        payload = _field(row_ptr, 4)
        block = (program - _field(row_ptr, 6)).to(tl.int32)
        offsets_ptr = (payload + _field(row_ptr, 8)).to(tl.pointer_type(tl.uint32))
        first = tl.load(offsets_ptr + block).to(tl.int64)
        total = tl.load(totals_ptr + chunk).to(tl.int64)
        positions_at = _field(row_ptr, 9)
        exponents_at = (positions_at + 2 * total + 15) // 16 * 16
        positions_ptr = (payload + positions_at).to(tl.pointer_type(tl.uint16)) + first
        exponents_ptr = (payload + exponents_at).to(tl.pointer_type(tl.uint8)) + first
        if size <= CAPACITY:
            i = tl.arange(0, COPY)
            done = 0
            while done < size:
                some = done + i < size
                source = program * CAPACITY + done + i
                position = tl.load(scratch_positions_ptr + source, mask=some, other=0)
                exponent = tl.load(scratch_exponents_ptr + source, mask=some, other=0)
                tl.store(positions_ptr + done + i, position, mask=some)
                tl.store(exponents_ptr + done + i, exponent, mask=some)
                done += COPY
        else:
            in_ptr = _field(row_ptr, 0).to(tl.pointer_type(in_type))
            codebook_ptr = _field(row_ptr, 5).to(tl.pointer_type(tl.uint8))
            run = _field(row_ptr, 2).to(tl.int32)
            extra = _field(row_ptr, 1) - run
            length = run * _field(row_ptr, 3).to(tl.int32)
            start = block * LANES
            end = tl.minimum(start + LANES, (length + UNIT - 1) // UNIT)
            count = tl.zeros((), tl.int32)
            for step in range(0, LANES, STEP):
                lane = start + step + tl.arange(0, STEP)
                valid = lane < end
                at = _data_offsets(lane, start, end, run // UNIT, extra // UNIT)
                word = tl.load(in_ptr + at, mask=valid, other=0).to(tl.uint32)
                _, flags, exponents = _classify(word, codebook_ptr, RUN, UNIT)
                flags = tl.where(valid, flags, 0)
                position = (lane - start) * UNIT
                count += _emit_escapes(
                    positions_ptr, exponents_ptr, count, flags, exponents, position, BLOCK, UNIT
                )
