"""Launchers of the Lynx kernels; byte for byte what kernels/reference/lynx.py does.

Fields of a chunk's row: 0 data address, 1 outer stride, 2 tokens, 3 outer, 4 payload address,
5 address of :func:`tables`, 6 first program, offsets in the payload of 7 pages, 8 groups, 9 flags,
10 anchors, 11 raw, then 12 exact tokens, and 13 the length of the payload (decoding only).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from kvz.kernels.gpu.chunks import Batch, compiles
from kvz.kernels.gpu.lynx_decode import decode_kernel
from kvz.kernels.gpu.lynx_encode import encode_kernel, raw_kernel
from kvz.kernels.gpu.lynx_finish import finish_kernel
from kvz.kernels.gpu.lynx_pages import Tile

#: A group's rows are held in registers.
MAX_GROUP_TOKENS = 256
#: Lower channels of a program.
_SLAB = 32
#: Positions that a thread holds at most, and threads of a program; the companded code takes many
#: more instructions for each.
_LINEAR_ENCODE = (16, 128)
_LINEAR_DECODE = (8, 128)
_COMPANDED = (4, 512)
_WARP = 32
_FINISH_BLOCK = 1024
#: Programs that look for pages stored as they are, at least.
_RAW_PROGRAMS = 256


@dataclass(frozen=True, slots=True)
class Coding:
    """What all chunks of a launch share.

    ``inner``: channels of a token · ``page_tokens``, ``group_tokens`` (at most
    :data:`MAX_GROUP_TOKENS`) · ``by_token``: pages run along channels · ``companded``: with the
    thresholds and levels of :func:`tables`, else linear.
    """

    inner: int
    page_tokens: int
    group_tokens: int
    by_token: bool
    companded: bool


def tables(
    thresholds: NDArray[np.float32], full: NDArray[Any], anchor: NDArray[Any]
) -> NDArray[np.uint8]:
    """What rows of companded codes point to, uint8[2112].

    ``thresholds`` float32[120], levels of codes ``full`` [256], and of anchors ``anchor`` [16].
    """
    padded = np.full(128, np.inf, np.float32)
    padded[: len(thresholds)] = thresholds
    parts = (padded, full.astype(np.int32), anchor.astype(np.int32))
    return np.concatenate([part.view(np.uint8) for part in parts])


def num_programs(outer: int, length: int, channels: int, page_tokens: int) -> int:
    """Programs of a chunk; ``length`` and ``channels`` along and across its pages."""
    half = (channels + 1) // 2
    return outer * -(-length // page_tokens) * -(-half // _SLAB)


def _tile(batch: Batch, coding: Coding, linear: tuple[int, int] = _LINEAR_ENCODE) -> Tile:
    inner, group = coding.inner, coding.group_tokens
    unit = 4 if batch.unit == 4 and inner % 8 == 0 and not coding.by_token else 1
    page, slab = coding.page_tokens, _SLAB
    if coding.by_token:
        page = min(page, -(-inner // group) * group)
    else:
        slab = min(slab, triton.next_power_of_2(-(-inner // 2)))
    most_steps, threads = _COMPANDED if coding.companded else linear
    lanes = max(1, slab // unit)
    rows = triton.next_power_of_2(-(-group // most_steps))
    groups = min(max(1, threads // (lanes * rows)), triton.next_power_of_2(page // group))
    if lanes * rows * groups < _WARP:
        rows = min(_WARP // (lanes * groups), triton.next_power_of_2(group))
    return Tile(
        inner=inner,
        by_token=coding.by_token,
        companded=coding.companded,
        page=page,
        group=group,
        slab=_SLAB,
        unit=unit,
        rows=rows,
        groups=groups,
        lanes=lanes,
        steps=triton.next_power_of_2(-(-group // rows)),
        fast=unit == 4 and compiles(encode_kernel),
    )


def _options(tile: Tile) -> dict[str, Any]:
    threads = tile.rows * tile.groups * tile.lanes
    # every operation on floats is rounded by itself
    return {"TILE": tile, "num_warps": max(1, threads // 32), "enable_fp_fusion": False}


def encode(
    batch: Batch, sizes: torch.Tensor, totals: torch.Tensor, lengths: torch.Tensor, coding: Coding
) -> None:
    """Encode all chunks of ``batch`` into their payloads: anchor, padding, residual.

    Nothing is read back. ``sizes`` int32[programs] and ``totals`` int32[chunks] are scratch,
    ``lengths`` int64[chunks] receives the length of each payload.
    """
    options = _options(_tile(batch, coding))
    num_chunks = batch.chunks.shape[0]
    encode_kernel[(batch.total_programs,)](batch.chunks, batch.program_chunk, sizes, **options)
    finish_kernel[(num_chunks,)](
        batch.chunks,
        sizes,
        totals,
        lengths,
        BLOCK=_FINISH_BLOCK,
        TILE=options["TILE"],
        num_warps=4,
    )
    raw_kernel[(num_chunks, -(-_RAW_PROGRAMS // num_chunks))](
        batch.chunks, batch.num_programs, sizes, totals, **options
    )


def decode(
    batch: Batch, status: torch.Tensor, coding: Coding, *, has_residual: bool, full: bool
) -> None:
    """Decode all chunks of ``batch``; ``status`` int32[chunks] becomes 1 where streams disagree.

    ``has_residual``: payloads are anchor, padding and residual, else anchors alone; ``full``: the
    residual is used. ``status`` must be zero before. No byte of a payload need be trustworthy.
    """
    decode_kernel[(batch.total_programs,)](
        batch.chunks,
        batch.program_chunk,
        status,
        HAS_RESIDUAL=has_residual,
        FULL=full,
        **_options(_tile(batch, coding, _LINEAR_DECODE)),
    )
