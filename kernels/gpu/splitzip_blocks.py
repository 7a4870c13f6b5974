"""What SplitZip's encoder and decoder share: where blocks are in a tensor. Lanes: words.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.words import NUM_FIELDS, load_field


@triton.jit
def place_block(row_ptr, start):
    """Where element ``start`` of a chunk is in its tensor.

    A chunk is a sequence of runs of contiguous elements. Returns the element's offset from the
    chunk's first one, its offset in its run, the length of a run, and the elements between runs.
    """
    run = load_field(row_ptr, 2)
    between = load_field(row_ptr, 1) - run
    outer = start // run
    return start + outer * between, start - outer * run, run, between


@triton.jit
def skip_runs(lane, in_run, run, between, UNIT: tl.constexpr):
    """``lane`` (int32, from the block's start) as an offset in the tensor, in lanes."""
    after = (lane + in_run // UNIT).to(tl.uint32) // (run // UNIT).to(tl.uint32)
    return lane + after.to(tl.int64) * (between // UNIT)


@triton.jit
def find_chunk(chunks_ptr, block_chunk_ptr, program):
    """Number of the program's chunk, its row, and the number of the program's block in it."""
    chunk = tl.load(block_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    return chunk, row_ptr, program - load_field(row_ptr, 6)
