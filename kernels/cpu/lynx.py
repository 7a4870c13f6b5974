"""Lynx in numba; bit for bit what kernels/reference/lynx.py does.

Every rounding step of the code is monotone, so a group's and a page's least and greatest units are
those of their least and greatest elements: one pass over a page finds the ranges, one writes codes.

Units are at most 65025 (1 + 5 * 2^-24), because a scale is rounded up and every other step errs by
at most a part in 2^24: no linear code can come out above 255.1 before it is rounded, and no linear
offset above 254, so the vector path does without their limits.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from kvz.kernels.cpu.flat import flatten
from kvz.kernels.cpu.lynx_decoding import decode_chunk
from kvz.kernels.cpu.lynx_encoding import encode_chunk
from kvz.kernels.cpu.lynx_plain import NUM_BUCKETS

__all__ = ["decode", "encode"]

#: The vector path asks for no special instruction.
USE_VECTORS = not os.environ.get("KVZ_NO_SIMD")

_LINEAR_TABLE = np.arange(256, dtype=np.int32) * 256
_LINEAR_ANCHOR_TABLE = 256 * np.array(
    [2, 24, 40, 56, 72, 88, 104, 120, 135, 151, 167, 183, 199, 215, 231, 253], np.int32
)


def encode(
    chunk: NDArray[np.uint16],
    *,
    page_tokens: int,
    group_tokens: int,
    thresholds: NDArray[np.float32] | None,
    pages: NDArray[np.uint16],
    groups: NDArray[np.uint8],
    flags: NDArray[np.uint8],
    anchors: NDArray[np.uint8],
    residuals: NDArray[np.uint8],
    raw: NDArray[np.uint16],
    first_coded: int = 0,
) -> int:
    """Encode ``chunk`` (uint16[outer, length, channels]) into the given contiguous arrays.

    Their shapes are those of kernels.reference.lynx.Streams; ``raw`` must hold the worst case, one
    entry an element. Returns how many of its entries were written. Each outer index of ``chunk``
    must be contiguous. ``thresholds`` (float32[120], ascending) selects the companded code.
    Tokens before ``first_coded`` (at most ``length - 1``) are coded as if they held its elements.
    ``group_tokens`` divides ``page_tokens`` and is at most 32,768.
    """
    outer, length, channels = chunk.shape
    data, stride = flatten(chunk)
    page_groups = page_tokens // group_tokens
    if thresholds is None:
        bounds = np.empty(0, np.float32)
    else:
        bounds = np.append(thresholds, np.float32(np.inf))
    return int(
        encode_chunk(
            data, stride, outer, length, channels, page_tokens, group_tokens, first_coded, bounds,
            pages.reshape(-1), groups.reshape(-1), flags.reshape(-1), anchors.reshape(-1),
            residuals.reshape(-1), raw, np.empty((2, page_groups * channels), np.int16),
            np.empty((4, channels), np.float32), np.empty(channels, np.int64),
            np.empty(NUM_BUCKETS, np.int32), USE_VECTORS,
        )
    )  # fmt: skip


def decode(
    pages: NDArray[np.uint16],
    groups: NDArray[np.uint8],
    flags: NDArray[np.uint8],
    anchors: NDArray[np.uint8],
    residuals: NDArray[np.uint8] | None,
    raw: NDArray[np.uint16],
    table: NDArray[np.int32],
    out: NDArray[np.uint16],
    *,
    page_tokens: int,
    group_tokens: int,
) -> None:
    """Decode into ``out`` (uint16[outer, length, channels]), from the anchors alone without
    ``residuals``.

    Each outer index of ``out`` must be contiguous. The arrays must have the shapes of
    kernels.reference.lynx.Streams, ``raw`` as many entries as ``flags`` say; what stands in them
    need not be trustworthy. ``table``: int32[256], or int32[16] for anchors alone.
    """
    outer, length, channels = out.shape
    data, stride = flatten(out)
    full = residuals is not None
    is_linear = np.array_equal(table, _LINEAR_TABLE if full else _LINEAR_ANCHOR_TABLE)
    decode_chunk(
        pages.reshape(-1), groups.reshape(-1), flags.reshape(-1), anchors.reshape(-1),
        (anchors if residuals is None else residuals).reshape(-1), raw, full, table, data, stride,
        outer, length, channels, page_tokens, group_tokens, USE_VECTORS, is_linear,
    )  # fmt: skip
