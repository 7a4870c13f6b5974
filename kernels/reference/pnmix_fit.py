"""Levels of PN-Mix's keys: least squares, in which the tokens that attention looks for count most.

A few tokens are far from the others in many salient channels at once. Queries single them out, so
an error there costs more than one elsewhere. Each token of a group gets a weight from how far it
is, and start and step of each channel minimise the weighted squared error for the codes that the
elements have, twice in turn. Sums are of integers, so that their order does not matter; all other
arithmetic is float32, every operation rounded to nearest even by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[Any]
I64: TypeAlias = NDArray[np.int64]
Bits: TypeAlias = NDArray[Any]

#: Elements count from the least one of their group and channel, in this part of its range.
UNITS = 4095
#: A smaller range is a constant.
MIN_WIDTH = np.float32(2.0**-64)
#: A start is not less: FP16 ends here, and a fitted line can leave the range of the elements.
MIN_START = np.float32(-65504)
#: Codes of more bits are not fitted: their levels are close enough to any element.
MAX_BITS = 4
#: By bits, how far from its ends the first and last level lie at first, as a part of the range.
FIRST_INSETS = {1: 1 / 4, 2: 1 / 8, 3: 1 / 32, 4: 1 / 64}
#: How often levels are fitted to codes; with equal weights, 1-bit codes once (their levels are
#: then the means of the elements up to the middle of the range and above), others not at all.
ROUNDS = 2
#: Distances and weights are integers after multiplication with this.
SCALE = np.float32(16)
#: Tokens further away than this, relative to the mean, get no more weight.
MAX_DISTANCE = np.float32(8)


class Fit(NamedTuple):
    """Of a group: float32[channels]."""

    start: F32
    step: F32


def is_fitted(bits: Bits, any_salient: Any) -> NDArray[np.bool_]:
    """Where levels "best" are fitted: ``any_salient`` of an outer index, to broadcast."""
    found: NDArray[np.bool_] = (bits == 1) | (any_salient & (bits <= MAX_BITS))
    return found


def fit(elements: F32, low: F32, high: F32, bits: Bits, salient: NDArray[np.bool_]) -> Fit:
    """Start and step of each channel of float32[tokens, channels], not yet rounded to be stored.

    ``low``, ``high``: least and greatest element of each channel · ``bits``: 1 to
    :data:`MAX_BITS`, those of other channels are ignored, as is their result · ``salient``: bool.
    """
    width = high - low
    usable = width >= MIN_WIDTH
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        units = np.where(usable, np.rint((elements - low) * (np.float32(UNITS) / width)), 0)
    positions = units.astype(np.int64)
    weights = token_weights(positions, salient)
    bits = np.minimum(bits, MAX_BITS)
    start, step = first_levels(bits)
    rounds = np.where(salient.any(), ROUNDS, bits == 1)
    for i in range(ROUNDS):
        better = fitted(positions, weights, codes(positions, start, step, bits))
        start, step = (
            np.where((i < rounds) & (better.step > 0), new, old)
            for new, old in zip(better, (start, step), strict=True)
        )
    unit = width / np.float32(UNITS)
    return Fit(
        np.where(usable, np.maximum(low + start * unit, MIN_START), low),
        np.where(usable, step * unit, np.float32(0)),
    )


def first_levels(bits: Bits) -> Fit:
    """Start and step in units, from which the fit starts."""
    inset = np.array([0, *FIRST_INSETS.values()], np.float32)[bits]
    last = ((1 << bits) - 1).astype(np.float32)
    whole = np.float32(UNITS)
    return Fit(whole * inset, whole * (np.float32(1) - np.float32(2) * inset) / last)


def token_weights(positions: I64, salient: NDArray[np.bool_]) -> I64:
    """Of each token of int64[tokens, channels]; 1 if no channel is salient.

    The distance of a token is the mean over salient channels of the squared difference from the
    channel's mean, relative to the channel's variance; the weight is its cube.
    """
    tokens, count = len(positions), int(salient.sum())
    if not count:
        return np.ones(tokens, np.int64)
    total = positions.sum(axis=0)
    variance = tokens * (positions * positions).sum(axis=0) - total * total
    counts = salient & (variance > 0)
    factor = np.where(counts, SCALE / np.maximum(variance, 1).astype(np.float32), np.float32(0))
    difference = (tokens * positions - total).astype(np.float32)
    distances = np.rint(difference * difference * factor).astype(np.int64).sum(axis=1)
    distance = distances.astype(np.float32) / (SCALE * np.float32(count))
    distance = np.minimum(distance, MAX_DISTANCE)
    weights: I64 = np.rint(distance * distance * distance * SCALE).astype(np.int64)
    return weights.clip(min=1)


def codes(positions: I64, start: F32, step: F32, bits: Bits) -> I64:
    """Nearest levels."""
    last = ((1 << bits) - 1).astype(np.float32)
    nearest: F32 = np.rint((positions.astype(np.float32) - start) * (np.float32(1) / step))
    found: I64 = nearest.clip(0, last).astype(np.int64)
    return found


def fitted(positions: I64, weights: I64, codes: I64) -> Fit:
    """The weighted regression of positions on codes; a step of 0 where it has none above 0."""
    w = weights[:, None]
    sum_w, sum_q, sum_u = w.sum(axis=0), (w * codes).sum(axis=0), (w * positions).sum(axis=0)
    sum_qq, sum_uq = (w * codes * codes).sum(axis=0), (w * codes * positions).sum(axis=0)
    determinant = sum_w * sum_qq - sum_q * sum_q
    covariance = sum_w * sum_uq - sum_u * sum_q
    exists = (determinant > 0) & (covariance > 0)
    step = covariance.astype(np.float32) / np.maximum(determinant, 1).astype(np.float32)
    step = np.where(exists, step, np.float32(0))
    mean_q, mean_u = (x.astype(np.float32) / sum_w.astype(np.float32) for x in (sum_q, sum_u))
    return Fit(mean_u - step * mean_q, step)
