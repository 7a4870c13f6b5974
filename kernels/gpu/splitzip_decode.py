"""SplitZip's decoder in Triton: the kernel alone. Layout and names: kernels/reference/splitzip.py.

A program handles one block of one chunk in steps of ``STEP`` lanes, as one warp. Masked-off lanes
load zero and store nothing; addresses are 64-bit. Lanes may be of eight elements here, decoded as
two words of four and stored as 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.splitzip_blocks import find_chunk, place_block, skip_runs
from kvz.kernels.gpu.words import join_bf16, load_field, permute


@triton.jit
def _lookup(code, codebook_ptr, UNIT: tl.constexpr, PERMUTE: tl.constexpr):
    """The exponents of a lane's codes (four bits an element)."""
    if PERMUTE:
        # the low three bits of the codes select from each half of the codebook, the fourth bits
        # between the two results
        words_ptr = codebook_ptr.to(tl.pointer_type(tl.uint32))
        index = code & 0x7777
        below8 = permute(tl.load(words_ptr), tl.load(words_ptr + 1), index)
        from8 = permute(tl.load(words_ptr + 2), tl.load(words_ptr + 3), index)
        return permute(below8, from8, ((code >> 1) & 0x4444) + 0x3210)
    else:
        exponent = tl.load(codebook_ptr + (code & 15)).to(tl.uint32)
        for k in tl.static_range(1, UNIT):
            exponent |= tl.load(codebook_ptr + ((code >> 4 * k) & 15)).to(tl.uint32) << 8 * k
        return exponent


@triton.jit
def _decode_word(packed, code, codebook_ptr, UNIT: tl.constexpr, PERMUTE: tl.constexpr):
    """BF16 elements of lanes of up to four."""
    exponent = _lookup(code, codebook_ptr, UNIT, PERMUTE)
    return join_bf16(packed.to(tl.uint32), exponent, UNIT, PERMUTE)


@triton.jit
def _decode_words(
    packed_ptr, codes_ptr, lane, valid, codebook_ptr, UNIT: tl.constexpr, PERMUTE: tl.constexpr
):
    """A word for each lane, or two where lanes are of eight elements."""
    packed = tl.load(packed_ptr + lane, mask=valid, other=0)
    if UNIT == 8:
        code = tl.load(codes_ptr + lane, mask=valid, other=0)
        low = _decode_word(packed, code & 0xFFFF, codebook_ptr, 4, PERMUTE)
        high = _decode_word(packed >> 32, code >> 16, codebook_ptr, 4, PERMUTE)
        return tl.reshape(tl.join(low, high), (2 * lane.shape[0],))
    elif UNIT == 4:
        code = tl.load(codes_ptr + lane, mask=valid, other=0).to(tl.uint32)
        return _decode_word(packed, code, codebook_ptr, 4, PERMUTE)
    else:
        code = tl.load(codes_ptr + lane // 2, mask=valid, other=0).to(tl.uint32)
        code = (code >> (4 * (lane % 2)).to(tl.uint32)) & 15
        return _decode_word(packed, code, codebook_ptr, 1, PERMUTE)


@triton.jit
def _read_escapes(positions_ptr, exponents_ptr, sign_mantissa, i, count, here):
    """Positions and values of escapes ``i``, and which are not where one can be."""
    some = i < count
    position = tl.load(positions_ptr + i, mask=some, other=0).to(tl.int32)
    before = tl.load(positions_ptr + i - 1, mask=some & (i > 0), other=0).to(tl.int32)
    wrong = some & ((position >= here) | ((i > 0) & (position <= before)))
    exponent = tl.load(exponents_ptr + i, mask=some, other=0).to(tl.uint32)
    byte_ptr = sign_mantissa.to(tl.pointer_type(tl.uint8)) + position
    byte = tl.load(byte_ptr, mask=some & (position < here), other=0).to(tl.uint32)
    return position, join_bf16(byte, exponent, 1, False).to(tl.uint16), wrong


@triton.jit
def _store_escapes(element_ptr, position, value, wrong, i, count, in_run, run, between):
    at = skip_runs(position, in_run, run, between, 1)
    tl.store(element_ptr + at, value, mask=(i < count) & (wrong == 0))


@triton.jit
def decode_kernel(
    chunks_ptr,
    block_chunk_ptr,
    status_ptr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ESCAPES: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    """Writes 1 to a chunk's status where offsets or positions are not what they must be.

    Fields of the chunks' rows: kernels/gpu/splitzip.py.
    """
    LANES: tl.constexpr = BLOCK // UNIT
    WORDS: tl.constexpr = 2 if UNIT == 8 else 1
    bits_type: tl.constexpr = tl.uint16 if UNIT == 1 else tl.uint64
    bytes_type: tl.constexpr = tl.uint8 if UNIT == 1 else tl.uint32 if UNIT == 4 else tl.uint64
    codes_type: tl.constexpr = tl.uint8 if UNIT == 1 else tl.uint16 if UNIT == 4 else tl.uint32
    program = tl.program_id(0).to(tl.int64)
    chunk, row_ptr, block = find_chunk(chunks_ptr, block_chunk_ptr, program)
    payload = load_field(row_ptr, 4)
    codebook_ptr = load_field(row_ptr, 5).to(tl.pointer_type(tl.uint8))
    codes = payload + load_field(row_ptr, 7)
    offsets_ptr = (payload + load_field(row_ptr, 8)).to(tl.pointer_type(tl.uint32))
    positions_at = load_field(row_ptr, 9)
    payload_nbytes = load_field(row_ptr, 10)
    start = block * BLOCK
    data_at, in_run, run, between = place_block(row_ptr, start)
    data = load_field(row_ptr, 0) + 2 * data_at
    length = run * load_field(row_ptr, 3)
    here = tl.minimum(length - start, BLOCK).to(tl.int32)
    straight = in_run + here <= run
    if UNIT == 8:
        straight &= data % 16 == 0

    num_blocks = (length + BLOCK - 1) // BLOCK
    total = tl.load(offsets_ptr + num_blocks).to(tl.int64)
    first = tl.load(offsets_ptr + block).to(tl.int64)
    last = tl.load(offsets_ptr + block + 1).to(tl.int64)

    exponents_at = (positions_at + 2 * total + 15) // 16 * 16
    bad = (first > last) | (last > total) | (exponents_at + total != payload_nbytes)
    bad |= (last - first > here) | ((block == 0) & (first != 0))
    if bad:
        tl.store(status_ptr + chunk, 1)
    count = tl.where(bad, 0, last - first).to(tl.int32)
    first = tl.where(bad, 0, first)
    positions_ptr = (payload + positions_at).to(tl.pointer_type(tl.uint16)) + first
    exponents_ptr = (payload + tl.where(bad, 0, exponents_at)).to(tl.pointer_type(tl.uint8)) + first
    # read ahead: their latency passes while the block is decoded
    i = tl.arange(0, ESCAPES)
    position, value, wrong = _read_escapes(
        positions_ptr, exponents_ptr, payload + start, i, count, here
    )

    packed_ptr = (payload + start).to(tl.pointer_type(bytes_type))
    codes_ptr = (codes + start // 2).to(tl.pointer_type(codes_type))
    out_ptr = data.to(tl.pointer_type(bits_type))
    straight_ptr = data.to(tl.pointer_type(bits_type))
    if UNIT == 8:
        # what the compiler has to know to store 16 bytes at once
        straight_ptr = tl.multiple_of(straight_ptr, 16)
    for step in range(0, LANES, STEP):
        lane = step + tl.arange(0, STEP)
        words = _decode_words(
            packed_ptr, codes_ptr, lane, lane < here // UNIT, codebook_ptr, UNIT, PERMUTE
        ).to(bits_type)
        at = WORDS * step + tl.arange(0, WORDS * STEP)
        # likewise: both words of a lane are valid or neither is
        valid = at // WORDS < here // UNIT
        if straight:
            tl.store(straight_ptr + at, words, mask=valid)
        else:
            skipped = skip_runs(at, in_run, run, between, UNIT // WORDS)
            tl.store(out_ptr + skipped, words, mask=valid)

    if count > 0:
        # escapes overwrite what other threads of this program wrote above
        tl.debug_barrier()
        element_ptr = data.to(tl.pointer_type(tl.uint16))
        _store_escapes(element_ptr, position, value, wrong, i, count, in_run, run, between)
        any_wrong = tl.max(wrong.to(tl.int32), axis=0)
        done = ESCAPES
        while done < count:
            position, value, wrong = _read_escapes(
                positions_ptr, exponents_ptr, payload + start, done + i, count, here
            )
            _store_escapes(
                element_ptr, position, value, wrong, done + i, count, in_run, run, between
            )
            any_wrong |= tl.max(wrong.to(tl.int32), axis=0)
            done += ESCAPES
        if any_wrong != 0:
            tl.store(status_ptr + chunk, 1)
