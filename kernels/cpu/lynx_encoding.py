"""The loop that encodes Lynx: pages, groups, and what codes which columns."""

from __future__ import annotations

from numba import njit

from kvz.kernels.cpu.lynx_plain import (
    companded_codes,
    companded_group,
    fill_buckets,
    group_range_plain,
    linear_codes,
    linear_group,
    next_block,
    page_parameters_plain,
)
from kvz.kernels.cpu.lynx_simd_encode import (
    encode_companded,
    encode_linear,
    group_range,
    page_parameters,
)


@njit(nogil=True, cache=True)
def _ranges(data, outer_at, start, end, first_coded, channels, vector, low, high, at):
    first = 0
    if vector and channels >= 32:
        while first < channels:
            block = next_block(first, channels)
            group_range(
                data, outer_at + block, start, end, first_coded, channels, low, high, at + block
            )
            first = block + 32
    group_range_plain(data, outer_at, start, end, first_coded, channels, first, low, high, at)


@njit(nogil=True, cache=True)
def _page_parameters(low, high, num_groups, channels, vector, pages, page_at, minimum, reciprocal):
    first, usable = 0, True
    if vector and channels >= 32:
        while first < channels:
            block = next_block(first, channels)
            usable &= page_parameters(
                low, high, num_groups, channels, block, pages, page_at, minimum, reciprocal
            )
            first = block + 32
    usable &= page_parameters_plain(
        low, high, num_groups, channels, first, pages, page_at, minimum, reciprocal
    )
    return usable


@njit(nogil=True, cache=True)
def _copy_page(data, outer_at, start, end, first_coded, channels, raw, position):
    for token in range(start, end):
        row = outer_at + max(token, first_coded) * channels
        for c in range(channels):
            raw[position + c] = data[row + c]
        position += channels
    return position


@njit(nogil=True, cache=True)
def _encode_block(
    data, outer_at, start, end, first_coded, channels, half, block, low, high, range_at, minimum,
    reciprocal, thresholds, buckets, groups, group_at, anchors, residuals, packed_at,
):  # fmt: skip
    if thresholds.size:
        encode_companded(
            data, outer_at, start, end, first_coded, channels, half, block, low, high, range_at,
            minimum, reciprocal, thresholds, buckets, groups, group_at, anchors, residuals,
            packed_at,
        )  # fmt: skip
    else:
        encode_linear(
            data, outer_at, start, end, first_coded, channels, half, block, low, high, range_at,
            minimum, reciprocal, thresholds, buckets, groups, group_at, anchors, residuals,
            packed_at,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _encode_columns(
    data, outer_at, start, end, first_coded, channels, first, low, high, range_at, minimum,
    reciprocal, thresholds, buckets, totals, shift, factor, groups, group_at, anchors, residuals,
    packed_at,
):  # fmt: skip
    if thresholds.size:
        companded_group(
            data, outer_at, start, end, first_coded, channels, first, low, high, range_at, minimum,
            reciprocal, groups, group_at, totals, shift, factor,
        )  # fmt: skip
        companded_codes(
            data, outer_at, start, end, first_coded, channels, first, minimum, reciprocal, shift,
            factor, thresholds, buckets, anchors, residuals, packed_at,
        )  # fmt: skip
    else:
        linear_group(
            low, high, range_at, minimum, reciprocal, channels, first, groups, group_at, shift,
            factor,
        )  # fmt: skip
        linear_codes(
            data, outer_at, start, end, first_coded, channels, first, minimum, reciprocal, shift,
            factor, anchors, residuals, packed_at,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def encode_chunk(
    data, stride, outer, length, channels, page_tokens, group_tokens, first_coded, thresholds,
    pages, groups, flags, anchors, residuals, raw, ordered, floats, totals, buckets, vector,
):  # fmt: skip
    half = (channels + 1) >> 1
    num_groups = -(-length // group_tokens)
    low, high = ordered[0], ordered[1]
    minimum, reciprocal, shift, factor = floats[0], floats[1], floats[2], floats[3]
    in_blocks = vector and channels - half >= 32
    if thresholds.size and fill_buckets(thresholds, buckets) > 1:
        in_blocks = False
    position, page = 0, 0
    for head in range(outer):
        outer_at = head * stride
        for page_start in range(0, length, page_tokens):
            page_end = min(page_start + page_tokens, length)
            page_groups = -(-(page_end - page_start) // group_tokens)
            page_at = page * 2 * channels
            for group in range(page_groups):
                start = page_start + group * group_tokens
                end = min(start + group_tokens, page_end)
                _ranges(
                    data, outer_at, start, end, first_coded, channels, vector, low, high,
                    group * channels,
                )  # fmt: skip
            usable = _page_parameters(
                low, high, page_groups, channels, vector, pages, page_at, minimum, reciprocal
            )
            flags[page] = not usable
            page += 1
            first_group = head * num_groups + page_start // group_tokens
            if not usable:
                position = _copy_page(
                    data, outer_at, page_start, page_end, first_coded, channels, raw, position
                )
                pages[page_at : page_at + 2 * channels] = 0
                groups[first_group * 2 * channels : (first_group + page_groups) * 2 * channels] = 0
                packed_at = (head * length + page_start) * half
                packed_end = (head * length + page_end) * half
                anchors[packed_at:packed_end] = 0
                residuals[packed_at:packed_end] = 0
                continue
            for group in range(page_groups):
                start = page_start + group * group_tokens
                end = min(start + group_tokens, page_end)
                range_at = group * channels
                group_at = (first_group + group) * 2 * channels
                packed_at = (head * length + start) * half
                first = 0
                while in_blocks and first < channels - half:
                    block = next_block(first, channels - half)
                    _encode_block(
                        data, outer_at, start, end, first_coded, channels, half, block, low, high,
                        range_at, minimum, reciprocal, thresholds, buckets, groups, group_at,
                        anchors, residuals, packed_at,
                    )  # fmt: skip
                    first = block + 32
                if first < half:
                    _encode_columns(
                        data, outer_at, start, end, first_coded, channels, first, low, high,
                        range_at, minimum, reciprocal, thresholds, buckets, totals, shift, factor,
                        groups, group_at, anchors, residuals, packed_at,
                    )  # fmt: skip
    return position
