"""Codebooks from exponent counts, in numba; the results of kernels/reference/calibration.py."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvz.kernels.reference.calibration import frequent_exponents

__all__ = ["exponent_histogram", "frequent_exponents", "window_bases"]


_CHANNELS_AT_ONCE = 16


@njit(nogil=True, cache=True)
def _count(chunk, counts):
    outer, tokens, inner = chunk.shape
    for o in range(outer):
        # a few channels at a time: their counters stay in the first-level cache
        for first in range(0, inner, _CHANNELS_AT_ONCE):
            last = min(first + _CHANNELS_AT_ONCE, inner)
            for t in range(tokens):
                for c in range(first, last):
                    counts[o, c, (chunk[o, t, c] >> 7) & 0xFF] += np.uint32(1)


@njit(nogil=True, cache=True)
def _cover(counts, bases):
    for channel in range(counts.shape[0]):
        for window in range(3):
            size = 4 << window
            covered = np.int64(0)
            for e in range(size):
                covered += counts[channel, e]
            best, best_base = covered, 0
            for base in range(1, 257 - size):
                covered += np.int64(counts[channel, base + size - 1])
                covered -= np.int64(counts[channel, base - 1])
                if covered > best:
                    best, best_base = covered, base
            bases[window, channel] = best_base


def exponent_histogram(chunk: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Count the BF16 exponents of ``chunk`` (uint16[outer, tokens, inner]) per channel.

    Returns uint32[outer, inner, 256].
    """
    counts = np.zeros((chunk.shape[0], chunk.shape[2], 256), np.uint32)
    _count(chunk, counts)
    return counts


def window_bases(counts: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """First exponent of the window of 4, 8 and 16 that covers most counts; ties: the lowest.

    ``counts`` uint32[..., 256]; returns uint8[3, ...].
    """
    bases = np.empty((3, *counts.shape[:-1]), np.uint8)
    _cover(counts.reshape(-1, 256), bases.reshape(3, -1))
    return bases
