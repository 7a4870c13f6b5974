"""Codebooks from exponent counts, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WINDOW_BITS = (2, 3, 4)


def exponent_histogram(chunk: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Count the BF16 exponents of ``chunk`` (uint16[outer, tokens, inner]) per channel.

    Returns uint32[outer, inner, 256].
    """
    outer, _, inner = chunk.shape
    channel = np.arange(outer)[:, None, None] * inner + np.arange(inner)
    exponents = (chunk >> 7).astype(np.int64) & 0xFF
    counts = np.bincount((channel * 256 + exponents).ravel(), minlength=outer * inner * 256)
    return counts.reshape(outer, inner, 256).astype(np.uint32)


def window_bases(counts: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """First exponent of the window of 4, 8 and 16 that covers most counts; ties: the lowest.

    ``counts`` uint32[..., 256]; returns uint8[3, ...].
    """
    zero = np.zeros((*counts.shape[:-1], 1), np.int64)
    sums = np.concatenate([zero, np.cumsum(counts, axis=-1, dtype=np.int64)], axis=-1)
    sizes = [1 << bits for bits in WINDOW_BITS]
    covered = [sums[..., size:] - sums[..., :-size] for size in sizes]
    return np.stack([c.argmax(axis=-1) for c in covered]).astype(np.uint8)


#: A run of exponents is taken instead of the most frequent ones if it leaves at most this share of
#: the elements uncovered in addition: its codes are one subtraction away, which is several times
#: faster, and this many escapes more cost 0.2 % of the size. Keys of real captures miss about 4e-4
#: (zeros), which a sample must not mistake for too much.
RUN_TOLERANCE = 1e-3


def frequent_exponents(counts: NDArray[np.integer], size: int) -> NDArray[np.uint8]:
    """The ``size`` most frequent exponents of ``counts`` (int[256]), ascending.

    Ties go to the lower exponent. Where a run of consecutive exponents covers as much, within
    :data:`RUN_TOLERANCE`, it is the run (the lowest of the best).
    """
    total = counts.astype(np.int64)
    order = np.argsort(-total, kind="stable")
    best = np.sort(order[:size])
    covered = np.convolve(total, np.ones(size, np.int64), "valid")
    first = int(covered.argmax())
    if total[best].sum() - covered[first] <= RUN_TOLERANCE * total.sum():
        best = np.arange(first, first + size)
    return best.astype(np.uint8)
