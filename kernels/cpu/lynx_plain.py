"""Lynx column by column: what the vector path leaves over, and the whole work without it.

All float arithmetic is float32, every operation rounded by itself. Arguments as in
kernels/cpu/lynx.py; positions in flat arrays end in ``_at``. A *byte* is a place in a row of packed
codes: it holds channel ``byte`` and channel ``byte + half``.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64, njit, uint8, uint16, uint32

from kvz.kernels.cpu.floats import bf16_to_float, float_to_bf16, order_bf16, to_bits, to_float

#: Magnitudes are found from the upper bits of a float; those of 2 and more share the last bucket.
BUCKET_SHIFT = 16
NUM_BUCKETS = 0x4000

#: A page is stored as it is if an ordered element reaches this from either side of zero, ...
MAX_ORDERED = 253 << 7
#: ... or a scale above 0 is smaller.
MIN_SCALE = np.float32(2.0**-96)
WIDEN = np.float32(65536 / 65025)
_UNITS = np.float32(65536)
_UNIT = np.float32(2.0**-24)
_PART = np.float32(1 / 256)
_MAX_CODE = np.float32(255)
_ZERO, _ONE, _STEP = np.float32(0), np.float32(1), np.float32(256)


@njit(nogil=True, cache=True)
def next_block(first, count):
    """Start of the 32 columns after ``first`` that end by ``count``; they may overlap others."""
    return min(first, count - 32)


@njit(nogil=True, cache=True)
def group_range_plain(data, outer_at, start, end, first_coded, channels, first, low, high, at):
    """Ordered minimum and maximum of channels ``first ...`` over tokens ``start ... end - 1``."""
    for c in range(first, channels):
        low[at + c] = 0x7FFF
        high[at + c] = -0x8000
    for token in range(start, end):
        row = outer_at + max(token, first_coded) * channels
        for c in range(first, channels):
            ordered = order_bf16(data[row + c])
            low[at + c] = min(low[at + c], ordered)
            high[at + c] = max(high[at + c], ordered)


@njit(nogil=True, cache=True, error_model="numpy")
def page_parameters_plain(
    low, high, num_groups, channels, first, pages, page_at, minimum, reciprocal
):
    """Minimum and scale of channels ``first ...`` from the ranges of the page's groups.

    Returns whether they can be coded.
    """
    usable = True
    for c in range(first, channels):
        lowest, highest = low[c], high[c]
        for group in range(1, num_groups):
            lowest = min(lowest, low[group * channels + c])
            highest = max(highest, high[group * channels + c])
        # the order holds for infinities and NaN too: they lie at the ends
        usable &= (highest < MAX_ORDERED) & (lowest >= -MAX_ORDERED)
        bits = uint16(order_bf16(lowest))
        least = bf16_to_float(bits)
        spread = (bf16_to_float(uint16(order_bf16(highest))) - least) * WIDEN
        scale = uint16((to_bits(spread) + uint32(0xFFFF)) >> uint32(16))
        divisor = bf16_to_float(scale)
        usable &= (scale == 0) | (divisor >= MIN_SCALE)
        pages[page_at + c] = bits
        pages[page_at + channels + c] = scale
        minimum[c] = least
        reciprocal[c] = _ZERO if scale == 0 else _UNITS / divisor
    return usable


@njit(nogil=True, cache=True, error_model="numpy")
def _inverse(step):
    return _ZERO if step == _ZERO else _ONE / step


@njit(nogil=True, cache=True, error_model="numpy")
def linear_group(
    low, high, at, minimum, reciprocal, channels, first, groups, group_at, shift, factor
):
    """Offset and step of channels ``first ...`` of a group; as floats for the codes."""
    for c in range(first, channels):
        least = (bf16_to_float(uint16(order_bf16(low[at + c]))) - minimum[c]) * reciprocal[c]
        most = (bf16_to_float(uint16(order_bf16(high[at + c]))) - minimum[c]) * reciprocal[c]
        offset = min(np.floor(least * _PART), _MAX_CODE)
        base = offset * _STEP
        step = min(np.ceil((most - base) / _MAX_CODE), _MAX_CODE)
        groups[group_at + c] = uint8(offset)
        groups[group_at + channels + c] = uint8(step)
        shift[c] = base
        factor[c] = _inverse(step)


@njit(nogil=True, cache=True)
def linear_codes(
    data, outer_at, start, end, first_coded, channels, first, minimum, reciprocal, shift, factor,
    anchors, residuals, packed_at,
):  # fmt: skip
    """Codes of bytes ``first ...``; row ``start`` of the packed arrays is at ``packed_at``."""
    half = (channels + 1) >> 1
    for token in range(start, end):
        row = outer_at + max(token, first_coded) * channels
        packed = packed_at + (token - start) * half
        for j in range(first, half):
            units = (bf16_to_float(data[row + j]) - minimum[j]) * reciprocal[j]
            code = uint32(min(np.rint((units - shift[j]) * factor[j]), _MAX_CODE))
            anchors[packed + j] = uint8(code >> 4)
            residuals[packed + j] = uint8(code & 15)
        for j in range(first, channels - half):
            c = j + half
            units = (bf16_to_float(data[row + c]) - minimum[c]) * reciprocal[c]
            code = uint32(min(np.rint((units - shift[c]) * factor[c]), _MAX_CODE))
            anchors[packed + j] |= uint8(code & 0xF0)
            residuals[packed + j] |= uint8((code & 15) << 4)


@njit(nogil=True, cache=True)
def fill_buckets(thresholds, buckets):
    """How many thresholds (ascending, infinite at the end) the least float of a bucket reaches.

    Returns the largest number of thresholds that lie between the ends of one bucket.
    """
    magnitude, most = 0, 0
    for bucket in range(NUM_BUCKETS):
        before = magnitude
        least = to_float(uint32(bucket) << uint32(BUCKET_SHIFT))
        while thresholds[magnitude] <= least:
            magnitude += 1
        most = max(most, magnitude - before)
        buckets[bucket] = magnitude
    return max(most, thresholds.size - 1 - magnitude)


@njit(nogil=True, cache=True, error_model="numpy")
def companded_group(
    data, outer_at, start, end, first_coded, channels, first, low, high, at, minimum, reciprocal,
    groups, group_at, totals, shift, factor,
):  # fmt: skip
    """Offset (from the mean) and step of channels ``first ...``; as floats for the codes."""
    totals[first:channels] = 0
    for token in range(start, end):
        row = outer_at + max(token, first_coded) * channels
        for c in range(first, channels):
            units = (bf16_to_float(data[row + c]) - minimum[c]) * reciprocal[c]
            totals[c] += int64(int32(units))
    count = end - start
    for c in range(first, channels):
        offset = min((2 * totals[c] + 256 * count) // (512 * count), 255)
        base = float32(offset * 256)
        least = (bf16_to_float(uint16(order_bf16(low[at + c]))) - minimum[c]) * reciprocal[c]
        most = (bf16_to_float(uint16(order_bf16(high[at + c]))) - minimum[c]) * reciprocal[c]
        reach = max(abs(least - base), abs(most - base))
        step = min(np.ceil(reach * _PART), _MAX_CODE)
        groups[group_at + c] = uint8(offset)
        groups[group_at + channels + c] = uint8(step)
        shift[c] = base
        factor[c] = _inverse(step) * _PART


@njit(nogil=True, cache=True)
def _companded_code(bits, minimum, reciprocal, shift, factor, thresholds, buckets):
    rest = (bf16_to_float(bits) - minimum) * reciprocal - shift
    scaled = abs(rest) * factor
    bucket = min(to_bits(scaled) >> uint32(BUCKET_SHIFT), uint32(NUM_BUCKETS - 1))
    magnitude = int64(buckets[bucket])
    while thresholds[magnitude] <= scaled:
        magnitude += 1
    code = magnitude + 7
    # the complement of the anchor is its negative
    return code ^ 0xF0 if rest < _ZERO else code


@njit(nogil=True, cache=True)
def companded_codes(
    data, outer_at, start, end, first_coded, channels, first, minimum, reciprocal, shift, factor,
    thresholds, buckets, anchors, residuals, packed_at,
):  # fmt: skip
    half = (channels + 1) >> 1
    for token in range(start, end):
        row = outer_at + max(token, first_coded) * channels
        packed = packed_at + (token - start) * half
        for j in range(first, half):
            low = _companded_code(
                data[row + j], minimum[j], reciprocal[j], shift[j], factor[j], thresholds, buckets
            )
            high, c = 0, j + half
            if c < channels:
                high = _companded_code(
                    data[row + c], minimum[c], reciprocal[c], shift[c], factor[c], thresholds,
                    buckets,
                )  # fmt: skip
            anchors[packed + j] = uint8(low >> 4 | high & 0xF0)
            residuals[packed + j] = uint8(low & 15 | (high & 15) << 4)


@njit(nogil=True, cache=True)
def _decoded(code, table, minimum, scale, offset, step):
    if scale == 0:
        return uint16(minimum)
    number = (int32(offset) << int32(16)) + int32(step) * table[code]
    fraction = float32(int32(number)) * _UNIT
    return float_to_bf16(bf16_to_float(minimum) + bf16_to_float(scale) * fraction)


@njit(nogil=True, cache=True)
def decode_bytes(
    pages, page_at, groups, group_at, anchors, residuals, packed_at, rows, channels, first, full,
    table, data, row_at,
):  # fmt: skip
    """Channels of bytes ``first ...`` of ``rows`` tokens of one group, whatever the parameters."""
    half = (channels + 1) >> 1
    for row in range(rows):
        packed, out = packed_at + row * half, row_at + row * channels
        for c in range(channels):
            upper = c >= half
            j = c - half if upper else c
            if j < first:
                continue
            nibble = 4 * upper
            code = (int64(anchors[packed + j]) >> nibble) & 15
            if full:
                code = code << 4 | (int64(residuals[packed + j]) >> nibble) & 15
            data[out + c] = _decoded(
                code, table, pages[page_at + c], pages[page_at + channels + c],
                groups[group_at + c], groups[group_at + channels + c],
            )  # fmt: skip
