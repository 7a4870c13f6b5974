"""Launchers of the SplitZip kernels; byte for byte what kernels/reference/splitzip.py does.

Fields of a chunk's row: 0 data address, 1 elements from one outer index to the next, 2 contiguous
elements of an outer index, 3 outer, 4 payload address, 5 codebook address (uint8[16]), 6 first
program, offsets in the payload of 7 codes, 8 offsets, 9 positions, and 10 the length of the payload
(decoding only).
"""

from __future__ import annotations

import torch

from kvz.kernels.gpu import splitzip_kernels as kernels
from kvz.kernels.gpu.chunks import Batch
from kvz.kernels.gpu.gaac_kernels import offsets_kernel

#: Escapes of a block that the scratch holds; real captures have about two in 8,192 elements.
_CAPACITY = 256
_DECODE_STEP = 1024
_ENCODE_STEP = 512


def scratch_nbytes(batch: Batch) -> int:
    """Bytes of scratch that :func:`encode` needs."""
    return 3 * _CAPACITY * batch.total_programs


def _unit(batch: Batch, inner: int) -> int:
    return 2 if inner % 2 == 0 and batch.aligned else 1


def encode(
    batch: Batch,
    scratch: torch.Tensor,
    sizes: torch.Tensor,
    totals: torch.Tensor,
    *,
    inner: int,
    run: bool,
    block_len: int,
) -> None:
    """Encode all chunks of ``batch`` into their payloads; nothing is read back.

    ``scratch`` uint8[scratch_nbytes], ``sizes`` int32[programs], ``totals`` int32[chunks] receives
    the number of each chunk's escapes. ``run``: every codebook is 16 consecutive exponents.
    """
    split = 2 * _CAPACITY * batch.total_programs
    positions, exponents = scratch[:split].view(torch.uint16), scratch[split:]
    shape = {
        "UNIT": _unit(batch, inner),
        "RUN": run,
        "BLOCK": block_len,
        "STEP": _ENCODE_STEP,
        "CAPACITY": _CAPACITY,
    }
    tables = (batch.chunks, batch.program_chunk, positions, exponents, sizes)
    grid = (batch.total_programs,)
    kernels.encode_kernel[grid](*tables, num_warps=1, **shape)
    offsets_kernel[(batch.chunks.shape[0],)](
        batch.chunks, sizes, totals, batch.num_programs, FIELD=8, TOTAL=True, BLOCK=1024, num_warps=4
    )
    kernels.compact_kernel[grid](*tables, totals, COPY=64, num_warps=1, **shape)


def decode(
    batch: Batch, status: torch.Tensor, *, inner: int, run: bool, block_len: int
) -> None:
    """Decode all chunks of ``batch``; ``status`` int32[chunks] becomes 1 where streams disagree.

    ``status`` must be zero before. Payload lengths must cover the streams that follow from the
    shape; offsets, positions and the number of escapes need not be trustworthy.
    """
    kernels.decode_kernel[(batch.total_programs,)](
        batch.chunks,
        batch.program_chunk,
        status,
        UNIT=_unit(batch, inner),
        RUN=run,
        BLOCK=block_len,
        STEP=_DECODE_STEP,
        ESCAPE_STEP=64,
        num_warps=4,
    )
