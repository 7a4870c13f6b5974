"""The loops of PN-Mix, over all channels at a time so that they become vectors.

Positions in flat arrays end in ``_at``. Arrays of codes hold one byte for each token of an octet
and channel, and are read as 64-bit words, too: ``width`` bytes a token, a multiple of 8.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int32, njit, uint8, uint64

from kvz.kernels.cpu.floats import bf16_to_float, float_to_bf16, order_bf16

OCTET = 8
_LOWEST_BITS = uint64(0x0101010101010101)


@njit(nogil=True, cache=True)
def group_range(data, data_at, tokens, channels, low, high, at):
    """Ordered least and greatest element of each channel."""
    for c in range(channels):
        low[at + c] = 0x7FFF
        high[at + c] = -0x8000
    for _ in range(tokens):
        for c in range(channels):
            ordered = order_bf16(data[data_at + c])
            low[at + c] = min(low[at + c], ordered)
            high[at + c] = max(high[at + c], ordered)
        data_at += channels


@njit(nogil=True, cache=True)
def class_sums(data, data_at, tokens, channels, unit, middle, total, above, count, at):
    """Sums in parts of ``unit`` of all elements and of those above ``middle``, whose number is
    ``count``."""
    for c in range(at, at + channels):
        total[c], above[c], count[c] = 0.0, 0.0, 0
    for _ in range(tokens):
        for c in range(channels):
            value = bf16_to_float(data[data_at + c])
            units = float64(np.rint(value * unit))
            is_above = value > middle[at + c]
            total[at + c] += units
            above[at + c] += units if is_above else 0.0
            count[at + c] += is_above
        data_at += channels


@njit(nogil=True, cache=True)
def quantize(data, data_at, channels, start, inverse, last, middle, by_middle, at, codes, codes_at):
    """Codes of one token; scales of each channel."""
    for c in range(channels):
        value = bf16_to_float(data[data_at + c])
        nearest = np.rint((value - start[at + c]) * inverse[at + c])
        nearest = min(max(nearest, float32(0)), last[c])
        is_above = float32(value > middle[at + c])
        codes[codes_at + c] = uint8(int32(is_above if by_middle[c] else nearest))


@njit(nogil=True, cache=True)
def quantize_row(data, data_at, channels, start, inverse, last, codes, codes_at):
    """Codes of some channels of one token that share their scales."""
    for c in range(channels):
        value = bf16_to_float(data[data_at + c])
        nearest = np.rint((value - start) * inverse)
        codes[codes_at + c] = uint8(int32(min(max(nearest, float32(0)), last)))


@njit(nogil=True, cache=True)
def dequantize(codes, codes_at, channels, start, step, at, data, data_at):
    """Values of one token; scales of each channel."""
    for c in range(channels):
        value = start[at + c] + step[at + c] * float32(codes[codes_at + c])
        data[data_at + c] = float_to_bf16(value)


@njit(nogil=True, cache=True)
def dequantize_row(codes, codes_at, channels, start, step, data, data_at):
    """Values of some channels of one token that share their scales."""
    for c in range(channels):
        value = start + step * float32(codes[codes_at + c])
        data[data_at + c] = float_to_bf16(value)


@njit(nogil=True, cache=True)
def gather_plane(codes, width, tokens, bit, plane):
    """Bit ``bit`` of the codes of an octet: bit t of a byte belongs to token t."""
    words = width >> 3
    for w in range(words):
        plane[w] = uint64(0)
    for t in range(tokens):
        for w in range(words):
            bits = (codes[t * words + w] >> uint64(bit)) & _LOWEST_BITS
            plane[w] |= bits << uint64(t)


@njit(nogil=True, cache=True)
def spread_plane(plane, width, bit, codes):
    """Inverse of :func:`gather_plane`: sets a bit of 8 tokens' codes, and if it is the first one
    clears the others."""
    words = width >> 3
    for t in range(OCTET):
        for w in range(words):
            bits = ((plane[w] >> uint64(t)) & _LOWEST_BITS) << uint64(bit)
            before = codes[t * words + w] if bit else uint64(0)
            codes[t * words + w] = before | bits


@njit(nogil=True, cache=True)
def copy(source, source_at, target, target_at, count):
    for i in range(count):
        target[target_at + i] = source[source_at + i]


@njit(nogil=True, cache=True)
def fill(target, target_at, count):
    for i in range(count):
        target[target_at + i] = 0
