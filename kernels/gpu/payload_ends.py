"""Lengths of encoded payloads, worked out on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvz.kernels.gpu.chunks import Batch
from kvz.kernels.gpu.words import NUM_FIELDS


@triton.jit
def payload_ends_kernel(
    chunks_ptr, totals_ptr, lengths_ptr, LAST: tl.constexpr, PAIRED: tl.constexpr
):
    """``lengths[chunk]`` from the start of the last stream and the total that encoding left.

    ``PAIRED``: the total counts escapes, two bytes each in the stream of field ``LAST`` and one in
    another that starts at the next multiple of 16; the bytes between are cleared.
    """
    chunk = tl.program_id(0).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    start = tl.load(row_ptr + LAST)
    total = tl.load(totals_ptr + chunk).to(tl.int64)
    if PAIRED:
        end = start + 2 * total
        follower = (end + 15) // 16 * 16
        payload_ptr = tl.load(row_ptr + 4).to(tl.pointer_type(tl.uint8))
        gap = end + tl.arange(0, 16)
        tl.store(payload_ptr + gap, tl.zeros((16,), tl.uint8), mask=gap < follower)
        tl.store(lengths_ptr + chunk, follower + total)
    else:
        tl.store(lengths_ptr + chunk, start + total)


def payload_ends(
    batch: Batch, totals: torch.Tensor, lengths: torch.Tensor, *, last_field: int, paired: bool
) -> None:
    """Fill ``lengths`` int64[chunks] with the payload lengths that ``totals`` int32[chunks] mean.

    ``last_field``: column of the chunks' rows that holds the offset of the last stream whose place
    follows from the shape. ``paired``: see :func:`payload_ends_kernel`.
    """
    grid = (batch.chunks.shape[0],)
    payload_ends_kernel[grid](
        batch.chunks, totals, lengths, LAST=last_field, PAIRED=paired, num_warps=1
    )
