"""Launchers of the SplitZip kernels; byte for byte what kernels/reference/splitzip.py does.

Fields of a chunk's row: 0 data address, 1 elements from one outer index to the next, 2 contiguous
elements of an outer index, 3 outer, 4 payload address, 5 codebook address (uint8[16]), 6 first
program, offsets in the payload of 7 codes, 8 offsets, 9 positions, and 10 the length of the payload
(decoding only).
"""

from __future__ import annotations

import torch
import triton

from kvz.kernels.gpu.chunks import Batch, compiles
from kvz.kernels.gpu.escape_kernels import offsets_kernel
from kvz.kernels.gpu.splitzip_decode import decode_kernel
from kvz.kernels.gpu.splitzip_encode import compact_kernel, encode_kernel, tables_kernel

#: Escapes of a block that the scratch holds; real captures have about two in 8,192 elements.
_CAPACITY = 256
_TABLE_NBYTES = 256
_DECODE_LANES = 256
#: Escapes of a block that are read ahead.
_DECODE_ESCAPES = 64
_ENCODE_LANES = 256
_OFFSETS_BLOCK = 1024
_COMPACT_ROWS = 16
_COMPACT_ESCAPES = 16


def scratch_nbytes(batch: Batch) -> int:
    """Bytes of scratch that :func:`encode` needs."""
    return _TABLE_NBYTES * batch.chunks.shape[0] + 3 * _CAPACITY * batch.total_programs


def _unit(batch: Batch, inner: int, widest: int) -> int:
    """Elements of a lane, at most ``widest``."""
    if batch.unit == 1:
        return 1
    return next(unit for unit in (8, 4, 1) if unit <= widest and inner % unit == 0)


def encode(
    batch: Batch,
    scratch: torch.Tensor,
    sizes: torch.Tensor,
    totals: torch.Tensor,
    *,
    inner: int,
    block_len: int,
) -> None:
    """Encode all chunks of ``batch`` into their payloads; nothing is read back.

    ``scratch`` uint8[scratch_nbytes], ``sizes`` int32[programs], ``totals`` int32[chunks] receives
    the number of each chunk's escapes.
    """
    num_chunks = batch.chunks.shape[0]
    tables, rest = scratch.split_with_sizes(
        [_TABLE_NBYTES * num_chunks, scratch.numel() - _TABLE_NBYTES * num_chunks]
    )
    split = 2 * _CAPACITY * batch.total_programs
    positions, exponents = rest[:split].view(torch.uint16), rest[split:]
    unit = _unit(batch, inner, 4)
    addresses = (batch.chunks, batch.program_chunk, tables, positions, exponents, sizes)
    tables_kernel[(num_chunks,)](batch.chunks, tables, num_warps=1)
    encode_kernel[(batch.total_programs,)](
        *addresses,
        UNIT=unit,
        BLOCK=block_len,
        STEP=_ENCODE_LANES,
        CAPACITY=_CAPACITY,
        PERMUTE=compiles(encode_kernel),
        num_warps=1,
    )
    offsets_kernel[(num_chunks,)](
        batch.chunks,
        sizes,
        totals,
        batch.num_programs,
        FIELD=8,
        TOTAL=True,
        BLOCK=_OFFSETS_BLOCK,
        num_warps=4,
    )
    compact_kernel[(triton.cdiv(batch.total_programs, _COMPACT_ROWS),)](
        *addresses,
        totals,
        batch.total_programs,
        UNIT=unit,
        BLOCK=block_len,
        CAPACITY=_CAPACITY,
        ROWS=_COMPACT_ROWS,
        COPY=_COMPACT_ESCAPES,
        num_warps=1,
    )


def decode(batch: Batch, status: torch.Tensor, *, inner: int, block_len: int) -> None:
    """Decode all chunks of ``batch``; ``status`` int32[chunks] becomes 1 where streams disagree.

    ``status`` must be zero before. Payload lengths must cover the streams that follow from the
    shape; offsets, positions and the number of escapes need not be trustworthy.
    """
    unit = _unit(batch, inner, 8)
    decode_kernel[(batch.total_programs,)](
        batch.chunks,
        batch.program_chunk,
        status,
        UNIT=unit,
        BLOCK=block_len,
        STEP=_DECODE_LANES,
        ESCAPES=_DECODE_ESCAPES,
        PERMUTE=unit > 1 and compiles(decode_kernel),
        num_warps=1,
    )
