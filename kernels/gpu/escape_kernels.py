"""Where blocks' escapes start, and moving them from the encoders' scratch to their place."""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.words import NUM_FIELDS, load_field


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
    offsets_ptr = (load_field(row_ptr, 4) + load_field(row_ptr, FIELD)).to(
        tl.pointer_type(tl.uint32)
    )
    first = load_field(row_ptr, 6)
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
def _move_words(from_ptr, to, size, at):
    """Words ``at`` of each row's move of ``size`` bytes to address ``to``.

    Words are counted from the multiple of 4 at or below ``to``; ``from_ptr`` is one. A word that
    holds bytes of others, too, is stored bytewise.
    """
    skew = (to & 3).to(tl.int32)
    words_ptr = (to - skew).to(tl.pointer_type(tl.uint32))
    last = (size - 1) >> 2
    before = tl.load(from_ptr + (at - 1), mask=(at > 0) & (at - 1 <= last), other=0)
    word = tl.load(from_ptr + at, mask=at <= last, other=0)
    bits = (8 * skew).to(tl.uint64)
    both = before.to(tl.uint64) | word.to(tl.uint64) << 32
    word = ((both << bits) >> 32).to(tl.uint32)
    first_byte = 4 * at - skew
    whole = (first_byte >= 0) & (first_byte + 4 <= size)
    tl.store(words_ptr + at, word, mask=whole)
    bytes_ptr = to.to(tl.pointer_type(tl.uint8)) + first_byte
    for k in tl.static_range(4):
        inside = (whole == 0) & (first_byte + k >= 0) & (first_byte + k < size)
        ptr = tl.max_contiguous(bytes_ptr + k, (1, 8))
        tl.store(ptr, (word >> 8 * k).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def compact_kernel(
    chunks_ptr,
    block_chunk_ptr,
    scratch_ptr,
    sizes_ptr,
    num_blocks,
    SCRATCH: tl.constexpr,
    ROWS: tl.constexpr,
    COPY: tl.constexpr,
):
    """Move the escapes of ``ROWS`` GAAC blocks, ``COPY`` words of each at a time."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = block < num_blocks
    size = tl.load(sizes_ptr + block, mask=valid, other=0)
    chunk = tl.load(block_chunk_ptr + block, mask=valid, other=0).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    payload = tl.load(row_ptr + 4)
    offsets_ptr = (payload + tl.load(row_ptr + 10)).to(tl.pointer_type(tl.uint32))
    start = tl.load(offsets_ptr + (block - tl.load(row_ptr + 6)), mask=valid, other=0)
    to = payload + tl.load(row_ptr + 11) + start.to(tl.int64)
    # the pointer as a number: an alignment that the compiler knows would have it spread the words
    # over the threads in another way for loads than for stores
    from_ptr = (scratch_ptr.to(tl.int64) + block * SCRATCH).to(tl.pointer_type(tl.uint32))
    longest = tl.max(size, axis=0)
    done = 0
    while 4 * done < longest + 4:
        at = done + tl.arange(0, COPY)[None, :]
        _move_words(from_ptr[:, None], to[:, None], size[:, None], at)
        done += COPY
