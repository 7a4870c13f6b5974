"""Values of PN-Mix in numba; bit for bit what kernels/reference/pnmix.py does."""

from __future__ import annotations

import numpy as np
from numba import int16, njit
from numpy.typing import NDArray

from kvz.kernels.cpu import pnmix_loops as loops
from kvz.kernels.cpu.flat import flatten
from kvz.kernels.cpu.floats import order_bf16
from kvz.kernels.cpu.pnmix_loops import (
    OCTET,
    Scratch,
    ends_of_ordered,
    flat,
    pack_octet,
    unpack_octet,
)
from kvz.kernels.cpu.pnmix_simd import BLOCK, USE_VECTORS, decode_row_block
from kvz.kernels.reference import pnmix as reference
from kvz.kernels.reference import pnmix_levels as scaling

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
_NO_CHANNELS = np.zeros(1, np.uint32)


@njit(nogil=True, cache=True)
def _ranges(data, stride, outer, tokens, channels, group_channels, low, high):
    at = 0
    for head in range(outer):
        for token in range(tokens):
            row = head * stride + token * channels
            for first in range(0, channels, group_channels):
                least, most = int16(0x7FFF), int16(-0x8000)
                for c in range(row + first, row + min(first + group_channels, channels)):
                    ordered = order_bf16(data[c])
                    least, most = min(least, ordered), max(most, ordered)
                low[at], high[at] = least, most
                at += 1


@njit(nogil=True, cache=True)
def _encode_values(
    data, stride, outer, tokens, channels, group_tokens, group_channels, bits, last, flags, start,
    inverse, words, codes, plane, plane_bytes, width, no_channels, packed, raw,
):  # fmt: skip
    columns = -(-channels // group_channels)
    group, at, packed_at, raw_at = 0, 0, 0, 0
    for head in range(outer):
        for first in range(0, tokens, group_tokens):
            group_end = min(first + group_tokens, tokens)
            marked = flags[group]
            group += 1
            if marked:
                size = (group_end - first) * channels
                loops.copy(data, head * stride + first * channels, raw, raw_at, size)
                raw_at += size
            for token in range(first, group_end, OCTET):
                end = min(token + OCTET, group_end)
                if marked:
                    loops.fill(packed, packed_at, bits * channels)
                else:
                    for t in range(token, end):
                        row = head * stride + t * channels
                        for j in range(columns):
                            c = j * group_channels
                            loops.quantize_row(
                                data, row + c, min(group_channels, channels - c), start[at + j],
                                inverse[at + j], last, codes, (t - token) * width + c,
                            )  # fmt: skip
                        at += columns
                    pack_octet(
                        words, plane, plane_bytes, width, end - token, channels, bits, bits,
                        no_channels, 0, packed, packed_at, packed, 0,
                    )  # fmt: skip
                packed_at += bits * channels
            if marked:
                at += (group_end - first) * columns
    return raw_at


@njit(nogil=True, cache=True)
def _decode_octet(
    packed, packed_at, bits, start, step, at, columns, group_channels, data, data_at, channels
):
    """8 tokens, 32 channels at a time; no group of channels may be shorter."""
    for j in range(columns):
        first, end = j * group_channels, min((j + 1) * group_channels, channels)
        while first < end:
            # the last block may overlap the one before
            column = min(first, end - BLOCK)
            decode_row_block(
                packed, packed_at, bits, column, start, step, at + j, columns, data, data_at,
                channels,
            )  # fmt: skip
            first = column + BLOCK


@njit(nogil=True, cache=True)
def _decode_values(
    packed, bits, flags, raw, start, step, words, codes, plane, plane_bytes, width, no_channels,
    data, stride, outer, tokens, channels, group_tokens, group_channels, vector,
):  # fmt: skip
    columns = -(-channels // group_channels)
    shortest = min(group_channels, channels - (columns - 1) * group_channels)
    in_blocks = vector and shortest >= BLOCK
    group, at, packed_at, raw_at = 0, 0, 0, 0
    for head in range(outer):
        for first in range(0, tokens, group_tokens):
            group_end = min(first + group_tokens, tokens)
            marked = flags[group]
            group += 1
            if marked:
                size = (group_end - first) * channels
                loops.copy(raw, raw_at, data, head * stride + first * channels, size)
                raw_at += size
                at += (group_end - first) * columns
            for token in range(first, group_end, OCTET):
                if in_blocks and not marked and group_end - token >= OCTET:
                    _decode_octet(
                        packed, packed_at, bits, start, step, at, columns, group_channels, data,
                        head * stride + token * channels, channels,
                    )  # fmt: skip
                    at += OCTET * columns
                elif not marked:
                    unpack_octet(
                        words, plane, plane_bytes, width, channels, bits, bits, no_channels, 0,
                        packed, packed_at, packed, 0,
                    )  # fmt: skip
                    for t in range(token, min(token + OCTET, group_end)):
                        row = head * stride + t * channels
                        for j in range(columns):
                            c = j * group_channels
                            loops.dequantize_row(
                                codes, (t - token) * width + c, min(group_channels, channels - c),
                                start[at + j], step[at + j], data, row + c,
                            )  # fmt: skip
                        at += columns
                packed_at += bits * channels


def encode_values(
    chunk: U16,
    *,
    group_tokens: int,
    group_channels: int,
    rule: str,
    flags: U8,
    scales: U16,
    codes: U8,
    raw: U16,
) -> int:
    """Encode ``chunk`` (uint16[outer, tokens, channels]) into the given contiguous arrays.

    Their shapes are those of kernels.reference.pnmix.ValueStreams; ``raw`` must hold the worst
    case, one entry an element. Returns how many of its entries were written. Each outer index of
    ``chunk`` must be contiguous.
    """
    outer, tokens, channels = chunk.shape
    data, stride = flatten(chunk)
    columns, bits = scales.shape[3], codes.shape[2]
    ordered = np.empty((2, outer, tokens, columns), np.int16)
    _ranges(
        data, stride, outer, tokens, channels, group_channels,
        ordered[0].reshape(-1), ordered[1].reshape(-1),
    )  # fmt: skip
    low, high, marked = ends_of_ordered(ordered)
    starts = np.arange(0, tokens, group_tokens)
    flags[...] = np.logical_or.reduceat(marked.any(axis=2), starts, axis=1)
    token_flags = flags[:, np.arange(tokens) // group_tokens, None].astype(bool)
    low, high = (np.where(token_flags, np.float32(0), ends) for ends in (low, high))
    levels = scaling.levels(low, high, np.array(bits), rule, scaling.HalfGrid())
    scales[:, :, 0] = levels.stored_start
    scales[:, :, 1] = levels.stored_step
    scales[np.broadcast_to(token_flags[..., None], scales.shape)] = 0
    return int(
        _encode_values(
            data, stride, outer, tokens, channels, group_tokens, group_channels, bits,
            np.float32((1 << bits) - 1), flags.reshape(-1), levels.start.reshape(-1),
            scaling.inverse(levels.step).reshape(-1), *Scratch(channels).arrays(), _NO_CHANNELS,
            codes.reshape(-1), raw,
        )
    )  # fmt: skip


def decode_values(
    flags: U8,
    scales: U16,
    codes: U8,
    raw: U16,
    out: U16,
    *,
    group_tokens: int,
    group_channels: int,
) -> None:
    """Decode into ``out`` (uint16[outer, tokens, channels]).

    Each outer index of ``out`` must be contiguous. The arrays must have the shapes of
    kernels.reference.pnmix.ValueStreams, ``raw`` as many entries as ``flags`` say; what stands in
    them need not be trustworthy.
    """
    outer, tokens, channels = out.shape
    data, stride = flatten(out)
    start, step = reference.half_scales(scales)
    vector = USE_VECTORS and bool(np.isfinite(start).all() and np.isfinite(step).all())
    _decode_values(
        codes.reshape(-1), codes.shape[2], flags.reshape(-1), raw, flat(start),
        flat(step), *Scratch(channels).arrays(), _NO_CHANNELS, data, stride, outer, tokens,
        channels, group_tokens, group_channels, vector,
    )  # fmt: skip
