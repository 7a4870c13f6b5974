"""Launchers of the GAAC kernels; byte for byte what kernels/reference/gaac.py does.

Fields of a chunk's row: 0 data address, 1 outer stride, 2 tokens, 3 outer, 4 payload address,
5 bases address (uint8[3, outer, inner]), 6 first program, offsets in the payload of 7 low,
8 plane2, 9 tags, 10 offsets, 11 escapes, and 12 the length of the escapes (decoding only).
"""

from __future__ import annotations

import torch
import triton

from kvz.kernels.gpu.chunks import Batch, compiles
from kvz.kernels.gpu.escape_kernels import compact_kernel, offsets_kernel
from kvz.kernels.gpu.gaac_decode import decode_kernel
from kvz.kernels.gpu.gaac_encode import encode_kernel

ROWS = 8
#: Lanes of a step: as many tiles as fill one warp are handled at a time.
_LANES = 32
#: So many registers let 32 warps run on a multiprocessor, the most that it takes of one warp each.
_MAX_REGISTERS = 64
_OFFSETS_BLOCK = 1024
_COMPACT_ROWS = 8
_COMPACT_WORDS = 32


def scratch_nbytes(batch: Batch, inner: int, block_tiles: int) -> int:
    """Bytes of scratch that :func:`encode` needs: the worst case of every block's escapes."""
    return batch.total_programs * _scratch_stride(inner, block_tiles)


def _scratch_stride(inner: int, block_tiles: int) -> int:
    # six bytes a group, rounded up to words
    return (6 * inner * block_tiles + 3) // 4 * 4


def _shape(batch: Batch, inner: int, block_tiles: int) -> dict[str, int]:
    unit = batch.unit if inner % batch.unit == 0 else 1
    lanes = max(8, triton.next_power_of_2(inner // unit))
    step = max(1, min(_LANES // lanes, triton.next_power_of_2(block_tiles)))
    shape = {
        "INNER": inner,
        "UNIT": unit,
        "BLOCK_TILES": block_tiles,
        "STEP": step,
        "LANES": lanes,
        "SHORT": triton.cdiv(batch.fewest_tokens, ROWS) < step,
        "PERMUTE": compiles(decode_kernel),
        "num_warps": max(1, lanes // 128),
    }
    if shape["PERMUTE"] and step * lanes == _LANES:
        shape["maxnreg"] = _MAX_REGISTERS
    return shape


def encode(
    batch: Batch,
    scratch: torch.Tensor,
    sizes: torch.Tensor,
    totals: torch.Tensor,
    *,
    inner: int,
    narrow: bool,
    block_tiles: int,
) -> None:
    """Encode all chunks of ``batch`` into their payloads; nothing is read back.

    ``scratch`` uint8[scratch_nbytes], ``sizes`` int32[programs], ``totals`` int32[chunks] receives
    the length of each chunk's escapes. Inner size below 1,024.
    """
    stride = _scratch_stride(inner, block_tiles)
    encode_kernel[(batch.total_programs,)](
        batch.chunks,
        batch.program_chunk,
        scratch,
        sizes,
        NARROW=narrow,
        SCRATCH=stride,
        **_shape(batch, inner, block_tiles),
    )
    offsets_kernel[(batch.chunks.shape[0],)](
        batch.chunks,
        sizes,
        totals,
        batch.num_programs,
        FIELD=10,
        TOTAL=False,
        BLOCK=_OFFSETS_BLOCK,
        num_warps=4,
    )
    compact_kernel[(triton.cdiv(batch.total_programs, _COMPACT_ROWS),)](
        batch.chunks,
        batch.program_chunk,
        scratch,
        sizes,
        batch.total_programs,
        SCRATCH=stride,
        ROWS=_COMPACT_ROWS,
        COPY=_COMPACT_WORDS,
        num_warps=1,
    )


def decode(
    batch: Batch, status: torch.Tensor, *, inner: int, narrow: bool, block_tiles: int
) -> None:
    """Decode all chunks of ``batch``; ``status`` int32[chunks] becomes 1 where streams disagree.

    ``status`` must be zero before. Stream lengths must fit the shapes; tags, offsets and escapes
    need not be trustworthy. Inner size below 1,024.
    """
    decode_kernel[(batch.total_programs,)](
        batch.chunks,
        batch.program_chunk,
        status,
        NARROW=narrow,
        **_shape(batch, inner, block_tiles),
    )
