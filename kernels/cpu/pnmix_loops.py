"""The loops of PN-Mix, over all channels at a time.

Indices are unsigned, without which the compiler would make no vectors of them.
Positions in flat arrays end in ``_at``. Arrays of codes hold one byte for each token of an octet
and channel, and are read as 64-bit words, too: ``width`` bytes a token, a multiple of 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, njit, uint8, uint64
from numpy.typing import NDArray

from kvz.kernels.cpu.floats import bf16_to_float, float_to_bf16, order_bf16
from kvz.kernels.reference import pnmix as reference
from kvz.kernels.reference.pnmix_levels import MAX_EXPONENT

OCTET = 8
_MAX_ORDERED = MAX_EXPONENT << 7
_LOWEST_BITS = uint64(0x0101010101010101)


@njit(nogil=True, cache=True)
def group_range(data, data_at, tokens, channels, low, high, at):
    """Ordered least and greatest element of each channel."""
    count, first, row = uint64(channels), uint64(at), uint64(data_at)
    for c in range(count):
        low[first + c] = 0x7FFF
        high[first + c] = -0x8000
    for _ in range(tokens):
        for c in range(count):
            ordered = order_bf16(data[row + c])
            low[first + c] = min(low[first + c], ordered)
            high[first + c] = max(high[first + c], ordered)
        row += count


@njit(nogil=True, cache=True)
def quantize(data, data_at, channels, start, inverse, last, at, codes, codes_at):
    """Codes of one token; scales of each channel."""
    first, row, target = uint64(at), uint64(data_at), uint64(codes_at)
    for c in range(uint64(channels)):
        value = bf16_to_float(data[row + c])
        nearest = np.rint((value - start[first + c]) * inverse[first + c])
        codes[target + c] = uint8(int32(min(max(nearest, float32(0)), last[c])))


@njit(nogil=True, cache=True)
def quantize_row(data, data_at, channels, start, inverse, last, codes, codes_at):
    """Codes of some channels of one token that share their scales."""
    row, target = uint64(data_at), uint64(codes_at)
    for c in range(uint64(channels)):
        value = bf16_to_float(data[row + c])
        nearest = np.rint((value - start) * inverse)
        codes[target + c] = uint8(int32(min(max(nearest, float32(0)), last)))


@njit(nogil=True, cache=True)
def dequantize(codes, codes_at, channels, start, step, at, data, data_at):
    """Values of one token; scales of each channel."""
    first, row, source = uint64(at), uint64(data_at), uint64(codes_at)
    for c in range(uint64(channels)):
        value = start[first + c] + step[first + c] * float32(int32(codes[source + c]))
        data[row + c] = float_to_bf16(value)


@njit(nogil=True, cache=True)
def dequantize_row(codes, codes_at, channels, start, step, data, data_at):
    """Values of some channels of one token that share their scales."""
    row, source = uint64(data_at), uint64(codes_at)
    for c in range(uint64(channels)):
        value = start + step * float32(int32(codes[source + c]))
        data[row + c] = float_to_bf16(value)


@njit(nogil=True, cache=True)
def gather_plane(codes, width, tokens, bit, plane):
    """Bit ``bit`` of the codes of an octet: bit t of a byte belongs to token t."""
    words = uint64(width) >> uint64(3)
    for w in range(words):
        plane[w] = uint64(0)
    for t in range(uint64(tokens)):
        for w in range(words):
            bits = (codes[t * words + w] >> uint64(bit)) & _LOWEST_BITS
            plane[w] |= bits << t


@njit(nogil=True, cache=True)
def spread_plane(plane, width, bit, codes):
    """Inverse of :func:`gather_plane`: sets a bit of 8 tokens' codes, and if it is the first one
    clears the others."""
    words = uint64(width) >> uint64(3)
    for t in range(uint64(OCTET)):
        for w in range(words):
            bits = ((plane[w] >> t) & _LOWEST_BITS) << uint64(bit)
            before = codes[t * words + w] if bit else uint64(0)
            codes[t * words + w] = before | bits


@njit(nogil=True, cache=True)
def copy(source, source_at, target, target_at, count):
    first, to = uint64(source_at), uint64(target_at)
    for i in range(uint64(count)):
        target[to + i] = source[first + i]


@njit(nogil=True, cache=True)
def fill(target, target_at, count):
    """Zeros."""
    first = uint64(target_at)
    for i in range(uint64(count)):
        target[first + i] = 0


@njit(nogil=True, cache=True)
def gather(source, chosen, num_chosen, target, target_at):
    first = uint64(target_at)
    for i in range(uint64(num_chosen)):
        target[first + i] = source[uint64(chosen[i])]


@njit(nogil=True, cache=True)
def scatter(source, source_at, chosen, num_chosen, target, target_at):
    first, to = uint64(source_at), uint64(target_at)
    for i in range(uint64(num_chosen)):
        target[to + uint64(chosen[i])] = source[first + i]


@njit(nogil=True, cache=True)
def pack_octet(
    words, plane, plane_bytes, width, tokens, channels, low_bits, high_bits, chosen, num_chosen,
    low, low_at, high, high_at,
):  # fmt: skip
    """Planes of an octet's codes: low ones of all channels, high ones of the ``chosen``."""
    for bit in range(low_bits):
        gather_plane(words, width, tokens, bit, plane)
        copy(plane_bytes, 0, low, low_at + bit * channels, channels)
    for bit in range(low_bits, high_bits):
        gather_plane(words, width, tokens, bit, plane)
        gather(plane_bytes, chosen, num_chosen, high, high_at)
        high_at += num_chosen


@njit(nogil=True, cache=True)
def unpack_octet(
    words, plane, plane_bytes, width, channels, low_bits, high_bits, chosen, num_chosen, low,
    low_at, high, high_at,
):  # fmt: skip
    """Inverse of :func:`pack_octet`."""
    for bit in range(low_bits):
        copy(low, low_at + bit * channels, plane_bytes, 0, channels)
        spread_plane(plane, width, bit, words)
    if num_chosen and high_bits > low_bits:
        fill(plane_bytes, 0, channels)
    for bit in range(low_bits, high_bits if num_chosen else low_bits):
        scatter(high, high_at, chosen, num_chosen, plane_bytes, 0)
        spread_plane(plane, width, bit, words)
        high_at += num_chosen


class Scratch:
    """Codes and one plane of an octet; zero beyond the channels."""

    def __init__(self, channels: int) -> None:
        self.width = -(-channels // 8) * 8
        self.words = np.zeros(OCTET * self.width // 8, np.uint64)
        self.plane = np.zeros(self.width // 8, np.uint64)

    def arrays(self) -> tuple[Any, ...]:
        """``words``, ``codes`` (the same as bytes), ``plane``, ``plane_bytes``, ``width``."""
        words, plane = self.words, self.plane
        return words, words.view(np.uint8), plane, plane.view(np.uint8), self.width


def flat(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """One after the other in memory: explicit vectors know no strides."""
    return np.ascontiguousarray(scales).reshape(-1)


def ends_of_ordered(
    ordered: NDArray[np.int16],
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
    """Least and greatest elements from ordered ones int16[2, ...], and which cannot be coded."""
    marked = (ordered[0] < -_MAX_ORDERED) | (ordered[1] >= _MAX_ORDERED)
    bits = np.where(ordered < 0, ordered ^ 0x7FFF, ordered).view(np.uint16)
    with np.errstate(invalid="ignore"):
        # adding +0 makes -0 +0
        low, high = reference.to_float(bits) + np.float32(0)
    return low, high, marked
