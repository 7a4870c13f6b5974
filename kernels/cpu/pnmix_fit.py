"""Fitted levels of PN-Mix's keys; bit for bit what kernels/reference/pnmix_fit.py does.

Loops run along channels, and sums are as narrow as they can be, for as many lanes to a vector: a
group has at most 1024 tokens, a position is at most 4095, a weight at most 8 * 8 * 8 * 16 = 8192, a
code at most 15. Arithmetic of small unsigned integers is cast back, as numba widens it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, uint16, uint32, uint64
from numpy.typing import NDArray

from kvz.kernels.cpu.floats import bf16_to_float
from kvz.kernels.cpu.pnmix_loops import fill
from kvz.kernels.reference import pnmix_fit as reference
from kvz.kernels.reference.pnmix_fit import (
    MAX_DISTANCE,
    MIN_START,
    MIN_WIDTH,
    ROUNDS,
    SCALE,
    UNITS,
)
from kvz.kernels.reference.pnmix_levels import Wanted

F32 = NDArray[np.float32]

_UNITS = np.float32(UNITS)
#: Tokens whose squared positions add up to less than 2^32.
_SQUARES = 256
#: Tokens whose products of weight, code and position do.
_PRODUCTS = 8
#: Channels whose distances (each less than 16 * 1024) do.
_DISTANCES = 1 << 16


@njit(nogil=True, cache=True)
def _add(part, sums, channels):
    """Narrow sums to wide ones."""
    for c in range(uint64(channels)):
        sums[c] += int64(part[c])


@njit(nogil=True, cache=True, error_model="numpy")
def _place(data, data_at, tokens, channels, low, high, positions, total, squares, part, factor):
    """Positions of a group's elements, their sums and those of their squares."""
    count, row, to = uint64(channels), uint64(data_at), uint64(0)
    for c in range(count):
        width = high[c] - low[c]
        factor[c] = _UNITS / width if width >= MIN_WIDTH else float32(0)
    fill(total, 0, channels)
    fill(squares, 0, channels)
    for start in range(0, tokens, _SQUARES):
        fill(part, 0, channels)
        for _ in range(start, min(start + _SQUARES, tokens)):
            for c in range(count):
                value = bf16_to_float(data[row + c])
                position = uint32(int32(np.rint((value - low[c]) * factor[c])))
                positions[to + c] = uint16(position)
                total[c] += position
                part[c] += uint32(position * position)
            row, to = row + count, to + count
        _add(part, squares, channels)


@njit(nogil=True, cache=True, error_model="numpy")
def _weigh(positions, tokens, channels, total, squares, salient, num_salient, factor, weights):
    """Weights of a group's tokens."""
    count, row = uint64(channels), uint64(0)
    for c in range(count):
        variance = tokens * squares[c] - int64(total[c]) * int64(total[c])
        counts = salient[c] and variance > 0
        factor[c] = SCALE / float32(max(variance, 1)) if counts else float32(0)
    scale = SCALE * float32(num_salient)
    for t in range(tokens):
        distances = int64(0)
        for first in range(0, channels, _DISTANCES):
            part = int32(0)
            for c in range(uint64(first), uint64(min(first + _DISTANCES, channels))):
                # both products and their difference are below 2^24: exact
                position = float32(int32(positions[row + c]))
                difference = float32(tokens) * position - float32(int32(total[c]))
                part = int32(part + int32(np.rint(difference * difference * factor[c])))
            distances += part
        distance = min(float32(distances) / scale, MAX_DISTANCE)
        weights[t] = max(uint32(int32(np.rint(distance * distance * distance * SCALE))), uint32(1))
        row += count


@njit(nogil=True, cache=True)
def _add_positions(positions, weights, tokens, channels, sum_u, part):
    """Weighted sums of positions."""
    count, row = uint64(channels), uint64(0)
    fill(sum_u, 0, channels)
    for start in range(0, tokens, _PRODUCTS):
        fill(part, 0, channels)
        for t in range(start, min(start + _PRODUCTS, tokens)):
            for c in range(count):
                part[c] += uint32(weights[t] * uint32(positions[row + c]))
            row += count
        _add(part, sum_u, channels)


@njit(nogil=True, cache=True)
def _add_codes(
    positions, weights, tokens, channels, start, inverse, last, sum_q, sum_qq, sum_uq, part
):
    """Weighted sums of codes (below 2^27), their squares (below 2^31), and with positions."""
    count, row = uint64(channels), uint64(0)
    fill(sum_q, 0, channels)
    fill(sum_qq, 0, channels)
    fill(sum_uq, 0, channels)
    for first in range(0, tokens, _PRODUCTS):
        fill(part, 0, channels)
        for t in range(first, min(first + _PRODUCTS, tokens)):
            weight = weights[t]
            for c in range(count):
                position = uint32(positions[row + c])
                nearest = np.rint((float32(int32(position)) - start[c]) * inverse[c])
                code = uint32(int32(min(max(nearest, float32(0)), last[c])))
                weighted = uint32(weight * code)
                sum_q[c] += weighted
                sum_qq[c] += uint32(weighted * code)
                part[c] += uint32(weighted * position)
            row += count
        _add(part, sum_uq, channels)


@njit(nogil=True, cache=True, error_model="numpy")
def _regress(channels, sum_w, sum_u, sum_q, sum_qq, sum_uq, start, step, inverse):
    """Start and step of each channel, where there is a step above 0."""
    for c in range(uint64(channels)):
        q, qq = int64(sum_q[c]), int64(sum_qq[c])
        determinant = sum_w * qq - q * q
        covariance = sum_w * sum_uq[c] - sum_u[c] * q
        better = float32(covariance) / float32(max(determinant, 1))
        mean_q, mean_u = float32(q) / float32(sum_w), float32(sum_u[c]) / float32(sum_w)
        exists = determinant > 0 and covariance > 0
        start[c] = mean_u - better * mean_q if exists else start[c]
        step[c] = better if exists else step[c]
        inverse[c] = float32(1) / step[c]


@njit(nogil=True, cache=True, error_model="numpy")
def _to_values(channels, low, high, start, step, fit_start, fit_step):
    """Start and step from those in units of positions."""
    for c in range(uint64(channels)):
        width = high[c] - low[c]
        unit = width / _UNITS
        usable = width >= MIN_WIDTH
        fit_start[c] = max(low[c] + start[c] * unit, MIN_START) if usable else low[c]
        fit_step[c] = step[c] * unit if usable else float32(0)


@njit(nogil=True, cache=True)
def _fit(
    data, stride, outer, tokens, channels, group_tokens, flags, low, high, salient, fits, first,
    last, fit_start, fit_step,
):  # fmt: skip
    """``first``: starts, steps and their inverses to begin with · ``last``: last codes."""
    positions = np.empty(min(group_tokens, tokens) * channels, np.uint16)
    weights = np.empty(min(group_tokens, tokens), np.uint32)
    total, part = np.empty(channels, np.uint32), np.empty(channels, np.uint32)
    sum_q, sum_qq = np.empty(channels, np.uint32), np.empty(channels, np.uint32)
    squares = np.empty(channels, np.int64)
    sum_u, sum_uq = np.empty(channels, np.int64), np.empty(channels, np.int64)
    factor, inverse = np.empty(channels, np.float32), np.empty(channels, np.float32)
    start, step = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for head in range(outer):
        if not fits[head]:
            continue
        num_salient = np.sum(salient[head])
        for group in range(flags.shape[1]):
            if flags[head, group]:
                continue
            at = group * group_tokens
            count = min(group_tokens, tokens - at)
            least, most = low[head, group], high[head, group]
            _place(
                data, head * stride + at * channels, count, channels, least, most, positions,
                total, squares, part, factor,
            )  # fmt: skip
            if num_salient:
                _weigh(
                    positions, count, channels, total, squares, salient[head], num_salient,
                    factor, weights,
                )  # fmt: skip
            else:
                weights[:count] = 1
            sum_w = int64(np.sum(weights[:count]))
            _add_positions(positions, weights, count, channels, sum_u, part)
            start[:] = first[0, head]
            step[:] = first[1, head]
            inverse[:] = first[2, head]
            # where no channel is salient only 1-bit codes are fitted, once
            for _ in range(ROUNDS if num_salient else 1):
                _add_codes(
                    positions, weights, count, channels, start, inverse, last[head], sum_q,
                    sum_qq, sum_uq, part,
                )  # fmt: skip
                _regress(
                    channels, sum_w, sum_u, sum_q, sum_qq, sum_uq, start, step, inverse
                )  # fmt: skip
            _to_values(
                channels, least, most, start, step, fit_start[head, group], fit_step[head, group]
            )  # fmt: skip


def fit(
    where: tuple[Any, ...],
    flags: NDArray[np.uint8],
    low: F32,
    high: F32,
    bits: NDArray[Any],
    salient: NDArray[np.bool_],
) -> Wanted:
    """Start and step of each group and channel, float32[outer, groups, channels].

    ``where``: flat data, elements per outer index, outer indices, tokens, channels, and tokens of
    a group (at most 1024) · ``flags`` uint8[outer, groups]: groups to leave out · ``low``,
    ``high``: least and greatest elements, like the result · ``bits``, ``salient``:
    [outer, channels].
    """
    start, step = np.zeros((2, *low.shape), np.float32)
    chosen = reference.is_fitted(bits, salient.any(axis=1, keepdims=True))
    bits = np.minimum(bits, reference.MAX_BITS)
    begin = reference.first_levels(bits)
    first = np.stack([*begin, np.float32(1) / begin.step])
    last = ((1 << bits) - 1).astype(np.float32)
    _fit(*where, flags, low, high, salient, chosen.any(axis=1), first, last, start, step)
    return Wanted(start, step, chosen[:, None])
