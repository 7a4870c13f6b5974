"""Launchers of the PN-Mix kernels; byte for byte what kernels/reference/pnmix.py does.

Fields of a chunk's row: 0 data address, 1 outer stride, 2 tokens, 3 outer, 4 payload address,
5 address of :func:`table` (keys only), 6 first program, offsets in the payload of 7 flags, 8 pages,
9 scales, 10 low planes (of values: codes), 11 high planes, 12 raw, then 13 exact tokens before the
coded ones, 14 coded tokens, 15 the length of the payload (decoding only). Exact tokens come first
in the payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from kvz.kernels.gpu.chunks import Batch, compiles
from kvz.kernels.gpu.pnmix_blocks import Block
from kvz.kernels.gpu.pnmix_decode import decode_kernel
from kvz.kernels.gpu.pnmix_encode import encode_kernel
from kvz.kernels.gpu.pnmix_finish import finish_kernel, raw_kernel
from kvz.kernels.gpu.pnmix_fit import fit_kernel
from kvz.kernels.gpu.pnmix_tiles import EXACT_LEN, NEVER, Tile

#: Channels of keys that a program takes.
_KEY_SLAB = 128
_MAX_THREADS = 512
#: Octets of a thread, and lanes of a warp.
_DECODE_STEPS, _DECODE_LANES = 2, 32
_ENCODE_STEPS, _ENCODE_LANES = 4, 8
#: Octets of a thread, of values.
_VALUE_STEPS = 2
_FINISH_BLOCK = 1024
#: Elements of a warp that fits levels, and registers of a thread; of the largest blocks four warps
#: have more of both.
_FIT_WARP_ELEMENTS, _MAX_FIT_WARPS, _FIT_REGISTERS = 2048, 4, 168
#: Programs that look for groups stored as they are, at least.
_RAW_PROGRAMS = 256


@dataclass(frozen=True, slots=True)
class Coding:
    """What all chunks of a launch share.

    ``inner``: channels of a token · ``low_bits``, ``high_bits``: of a code, of values the same ·
    ``group_tokens`` · ``page_groups``: groups of a page, None with FP16 scales ·
    ``group_channels``: channels that share a token's scales, of keys None · ``rule``: "best" or
    "minmax".
    """

    inner: int
    low_bits: int
    high_bits: int
    group_tokens: int
    page_groups: int | None
    group_channels: int | None
    rule: str

    @property
    def slab(self) -> int:
        """Channels of a program."""
        return min(self.group_channels or _KEY_SLAB, self.inner)

    def num_programs(self, outer: int, groups: int, exact: int) -> int:
        """Programs of a chunk with so many groups and exact tokens for each outer index."""
        return outer * (groups * -(-self.inner // self.slab) + -(-exact * self.inner // EXACT_LEN))


def table(salient: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """What rows of keys point to, from bool[outer, channels]; its address: a multiple of 4.

    int32[outer + 1]: salient channels before each outer index; then int32[outer, channels / 4]: of
    four channels, which are salient (low four bits) and how many are before them.
    """
    outer, channels = salient.shape
    padded = np.zeros((outer, -(-channels // 4) * 4), np.int32)
    padded[:, :channels] = salient
    starts = np.concatenate([[0], padded.sum(axis=1).cumsum()]).astype(np.int32)
    before = (padded.cumsum(axis=1, dtype=np.int32) - padded)[:, ::4]
    selectors = before << 4 | (padded.reshape(outer, -1, 4) << np.arange(4)).sum(axis=2)
    return np.concatenate([starts, selectors.astype(np.int32).reshape(-1)]).view(np.uint8)


def _tile(batch: Batch, coding: Coding, max_steps: int, max_lanes: int) -> Tile:
    inner, slab = coding.inner, coding.slab
    unit = 4 if batch.unit == 4 and inner % 4 == 0 and slab % 4 == 0 else 1
    width = triton.next_power_of_2(slab // unit)
    by_token = coding.group_channels is not None
    # a token's channels stay in one warp, as far as they can
    lanes = width if by_token else min(width, max_lanes)
    max_steps = min(max_steps, _VALUE_STEPS) if by_token else max_steps
    octets = triton.next_power_of_2(-(-coding.group_tokens // 8))
    rows = -(-octets // max_steps)
    if rows * width < 32:
        # whole warps, as far as the group has octets
        rows = min(-(-32 // width), octets)
    rows = max(1, min(rows, _MAX_THREADS // width))
    return Tile(
        inner=inner,
        by_token=by_token,
        low_bits=coding.low_bits,
        high_bits=coding.high_bits,
        group=coding.group_tokens,
        page_groups=coding.page_groups or 0,
        best=coding.rule == "best",
        slab=slab,
        unit=unit,
        rows=rows,
        parts=width // lanes,
        lanes=lanes,
        steps=octets // rows,
        fast=unit == 4 and compiles(decode_kernel),
    )


def _options(tile: Tile) -> dict[str, Any]:
    num_warps = min(16, max(1, tile.rows * tile.parts * tile.lanes // 32))
    # every operation on floats is rounded by itself
    return {"TILE": tile, "num_warps": num_warps, "enable_fp_fusion": False}


def scratch_nbytes(batch: Batch, coding: Coding) -> int:
    """Bytes that :func:`encode` needs: for fitted levels."""
    if _tile(batch, coding, _ENCODE_STEPS, _ENCODE_LANES).low_fitting == NEVER:
        return 0
    return batch.total_programs * coding.slab * 2 * 4


def fit_options(block: Block) -> dict[str, Any]:
    """How ``fit_kernel`` is launched."""
    elements = block.tokens * block.channels
    num_warps = max(1, min(_MAX_FIT_WARPS, elements // _FIT_WARP_ELEMENTS))
    registers = _FIT_REGISTERS if elements <= num_warps * _FIT_WARP_ELEMENTS else None
    return {"num_warps": num_warps, "maxnreg": registers, "enable_fp_fusion": False}


def _fit(batch: Batch, scratch: torch.Tensor, tile: Tile) -> None:
    """Levels of all groups, to float32[programs, 2, slab]."""
    block = Block.of(tile)
    fit_kernel[(batch.total_programs,)](
        batch.chunks, batch.program_chunk, scratch, BLOCK=block, TILE=tile, **fit_options(block)
    )


def encode(
    batch: Batch,
    scratch: torch.Tensor,
    sizes: torch.Tensor,
    totals: torch.Tensor,
    lengths: torch.Tensor,
    coding: Coding,
) -> None:
    """Encode all chunks of ``batch`` into their payloads. Gaps between streams are not touched.

    Nothing is read back. ``scratch`` uint8[scratch_nbytes], ``sizes`` int32[programs] and
    ``totals`` int32[chunks] are scratch, ``lengths`` int64[chunks] receives the length of each
    payload.
    """
    tile = _tile(batch, coding, _ENCODE_STEPS, _ENCODE_LANES)
    options = _options(tile)
    num_chunks = batch.chunks.shape[0]
    fits = scratch.view(torch.float32)
    if tile.low_fitting != NEVER:
        _fit(batch, fits, tile)
    encode_kernel[(batch.total_programs,)](
        batch.chunks, batch.program_chunk, fits, sizes, **options
    )
    finish_kernel[(num_chunks,)](
        batch.chunks, sizes, totals, lengths, BLOCK=_FINISH_BLOCK, TILE=tile, num_warps=4
    )
    raw_kernel[(num_chunks, -(-_RAW_PROGRAMS // num_chunks))](
        batch.chunks, fits, sizes, totals, **options
    )


def decode(batch: Batch, status: torch.Tensor, coding: Coding) -> None:
    """Decode all chunks of ``batch``; ``status`` int32[chunks] becomes 1 where streams disagree.

    ``status`` must be zero before. No byte of a payload need be trustworthy.
    """
    options = _options(_tile(batch, coding, _DECODE_STEPS, _DECODE_LANES))
    decode_kernel[(batch.total_programs,)](batch.chunks, batch.program_chunk, status, **options)
