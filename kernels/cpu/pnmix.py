"""PN-Mix in numba; bit for bit what kernels/reference/pnmix.py does.

Scales are few: they are found and rounded by the reference's own functions, on whole arrays. The
loops over elements, before and after that, are compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvz.kernels.cpu import pnmix_loops as loops
from kvz.kernels.cpu.flat import flatten
from kvz.kernels.cpu.pnmix_fit import fit
from kvz.kernels.cpu.pnmix_loops import (
    OCTET,
    Scratch,
    ends_of_ordered,
    flat,
    pack_octet,
    unpack_octet,
)
from kvz.kernels.cpu.pnmix_simd import BLOCK, USE_VECTORS, decode_block
from kvz.kernels.reference import pnmix as reference
from kvz.kernels.reference import pnmix_levels as scaling

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]


@njit(nogil=True, cache=True)
def _ranges(data, stride, outer, tokens, channels, group_tokens, low, high):
    at = 0
    for head in range(outer):
        for first in range(0, tokens, group_tokens):
            count = min(group_tokens, tokens - first)
            data_at = head * stride + first * channels
            loops.group_range(data, data_at, count, channels, low, high, at)
            at += channels


@njit(nogil=True, cache=True)
def _encode_keys(
    data, stride, outer, tokens, channels, group_tokens, low_bits, high_bits, flags, start,
    inverse, last, chosen, num_chosen, words, codes, plane, plane_bytes, width, low, high, raw,
):  # fmt: skip
    group, low_at, high_at, raw_at = 0, 0, 0, 0
    for head in range(outer):
        count = num_chosen[head]
        for first in range(0, tokens, group_tokens):
            group_end = min(first + group_tokens, tokens)
            if flags[group]:
                size = (group_end - first) * channels
                loops.copy(data, head * stride + first * channels, raw, raw_at, size)
                raw_at += size
            for token in range(first, group_end, OCTET):
                end = min(token + OCTET, group_end)
                low_size, high_size = low_bits * channels, (high_bits - low_bits) * count
                if flags[group]:
                    loops.fill(low, low_at, low_size)
                    loops.fill(high, high_at, high_size)
                else:
                    for t in range(token, end):
                        loops.quantize(
                            data, head * stride + t * channels, channels, start, inverse,
                            last[head], group * channels, codes, (t - token) * width,
                        )  # fmt: skip
                    pack_octet(
                        words, plane, plane_bytes, width, end - token, channels, low_bits,
                        high_bits, chosen[head], count, low, low_at, high, high_at,
                    )  # fmt: skip
                low_at, high_at = low_at + low_size, high_at + high_size
            group += 1
    return raw_at


@njit(nogil=True, cache=True)
def _decode_octet(
    low, low_at, high, high_at, spread, chosen, num_chosen, start, step, scale_at, data, data_at,
    channels, low_bits, high_bits,
):  # fmt: skip
    """The same for 8 tokens, 32 channels at a time. ``spread`` holds zeros in other channels."""
    for bit in range(high_bits - low_bits):
        loops.scatter(
            high, high_at + bit * num_chosen, chosen, num_chosen, spread, bit * channels
        )  # fmt: skip
    done = 0
    while done < channels:
        # the last block may overlap the one before
        column = min(done, channels - BLOCK)
        decode_block(
            low, low_at, low_bits, spread, high_bits, column, start, step, scale_at, data, data_at,
            channels,
        )  # fmt: skip
        done = column + BLOCK


@njit(nogil=True, cache=True)
def _decode_keys(
    low, high, flags, raw, start, step, chosen, num_chosen, words, codes, plane, plane_bytes,
    width, spread, data, stride, outer, tokens, channels, group_tokens, low_bits, high_bits,
    vector,
):  # fmt: skip
    group, low_at, high_at, raw_at = 0, 0, 0, 0
    in_blocks = vector and channels >= BLOCK
    for head in range(outer):
        count = num_chosen[head]
        loops.fill(spread, 0, spread.size)
        for first in range(0, tokens, group_tokens):
            group_end = min(first + group_tokens, tokens)
            if flags[group]:
                size = (group_end - first) * channels
                loops.copy(raw, raw_at, data, head * stride + first * channels, size)
                raw_at += size
            for token in range(first, group_end, OCTET):
                end = min(token + OCTET, group_end)
                if in_blocks and end - token == OCTET and not flags[group]:
                    _decode_octet(
                        low, low_at, high, high_at, spread, chosen[head], count, start, step,
                        group * channels, data, head * stride + token * channels, channels,
                        low_bits, high_bits,
                    )  # fmt: skip
                elif not flags[group]:
                    unpack_octet(
                        words, plane, plane_bytes, width, channels, low_bits, high_bits,
                        chosen[head], count, low, low_at, high, high_at,
                    )  # fmt: skip
                    for t in range(token, end):
                        loops.dequantize(
                            codes, (t - token) * width, channels, start, step, group * channels,
                            data, head * stride + t * channels,
                        )  # fmt: skip
                low_at += low_bits * channels
                high_at += (high_bits - low_bits) * count
            group += 1


def _chosen(salient: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Numbers of the salient channels of each outer index, and how many they are."""
    order = np.argsort(~salient, axis=1, kind="stable")
    return order.astype(np.uint32), salient.sum(axis=1, dtype=np.int64)


def encode_keys(
    chunk: U16,
    salient: NDArray[np.bool_],
    *,
    high_bits: int,
    low_bits: int,
    group_tokens: int,
    page_groups: int | None,
    rule: str,
    flags: U8,
    pages: U16,
    scales: NDArray[Any],
    low: U8,
    high: U8,
    raw: U16,
) -> int:
    """Encode ``chunk`` (uint16[outer, tokens, channels]) into the given contiguous arrays.

    Their shapes are those of kernels.reference.pnmix.KeyStreams; ``raw`` must hold the worst case,
    one entry an element. Returns how many of its entries were written. Each outer index of
    ``chunk`` must be contiguous. ``salient``: bool[outer, channels]. ``group_tokens``: at most
    1024.
    """
    outer, tokens, channels = chunk.shape
    data, stride = flatten(chunk)
    where = (data, stride, outer, tokens, channels, group_tokens)
    bits = np.where(salient, high_bits, low_bits)
    least, most = _ends(where, flags)
    grid: scaling.Grid = scaling.HalfGrid()
    if page_groups is not None:
        _find_pages(least, most, flags, page_groups, pages)
        page_of = np.arange(flags.shape[1]) // page_groups
        minimum, scale = (reference.to_float(pages[:, page_of, i]) for i in (0, 1))
        grid = scaling.PageGrid(minimum, scale, bits[:, None])
    fitted = fit(where, flags, least, most, bits, salient) if rule == "best" else None
    levels = scaling.levels(least, most, bits[:, None], rule, grid, fitted)
    usable = flags[:, :, None] == 0
    scales[:, :, 0] = np.where(usable, levels.stored_start, 0)
    scales[:, :, 1] = np.where(usable, levels.stored_step, 0)
    chosen, num_chosen = _chosen(salient)
    return int(
        _encode_keys(
            *where, low_bits, high_bits, flags.reshape(-1), levels.start.reshape(-1),
            scaling.inverse(levels.step).reshape(-1), ((1 << bits) - 1).astype(np.float32),
            chosen, num_chosen, *Scratch(channels).arrays(), low.reshape(-1), high, raw,
        )
    )  # fmt: skip


def _ends(where: tuple[Any, ...], flags: U8) -> tuple[F32, F32]:
    """Least and greatest elements. Fills ``flags``; of marked groups all is zero."""
    ordered = np.empty((2, *flags.shape, where[4]), np.int16)
    _ranges(*where, ordered[0].reshape(-1), ordered[1].reshape(-1))
    low, high, marked = ends_of_ordered(ordered)
    flags[...] = marked.any(axis=2)
    low, high = (np.where(flags[:, :, None], np.float32(0), ends) for ends in (low, high))
    return low, high


def _find_pages(low: F32, high: F32, flags: U8, page_groups: int, pages: U16) -> None:
    starts = np.arange(0, flags.shape[1], page_groups)
    unmarked = flags[:, :, None] == 0
    low = np.minimum.reduceat(np.where(unmarked, low, np.inf), starts, axis=1)
    high = np.maximum.reduceat(np.where(unmarked, high, -np.inf), starts, axis=1)
    used = low <= high
    low, high = (np.where(used, x, 0).astype(np.float32) for x in (low, high))
    pages[:, :, 0] = low.view(np.uint32) >> 16
    pages[:, :, 1] = scaling.page_scale(low, high)


def decode_keys(
    flags: U8,
    pages: U16,
    scales: NDArray[Any],
    low: U8,
    high: U8,
    raw: U16,
    salient: NDArray[np.bool_],
    out: U16,
    *,
    high_bits: int,
    low_bits: int,
    group_tokens: int,
    page_groups: int | None,
) -> None:
    """Decode into ``out`` (uint16[outer, tokens, channels]).

    Each outer index of ``out`` must be contiguous. The arrays must have the shapes of
    kernels.reference.pnmix.KeyStreams, ``raw`` as many entries as ``flags`` say; what stands in
    them need not be trustworthy.
    """
    outer, tokens, channels = out.shape
    data, stride = flatten(out)
    if page_groups is None:
        start, step = reference.half_scales(scales)
    else:
        bits = np.where(salient, high_bits, low_bits)[:, None]
        start, step = reference.page_scales(scales, pages, bits, page_groups)
    chosen, num_chosen = _chosen(salient)
    spread = np.empty((high_bits - low_bits) * channels, np.uint8)
    vector = USE_VECTORS and bool(np.isfinite(start).all() and np.isfinite(step).all())
    _decode_keys(
        low.reshape(-1), high, flags.reshape(-1), raw, flat(start), flat(step), chosen,
        num_chosen, *Scratch(channels).arrays(), spread, data, stride, outer, tokens, channels,
        group_tokens, low_bits, high_bits, vector,
    )  # fmt: skip
