"""The loop that decodes Lynx: pages, groups, and what decodes which columns."""

from __future__ import annotations

from numba import njit, uint16

from kvz.kernels.cpu.lynx_plain import decode_bytes, next_block
from kvz.kernels.cpu.lynx_simd_decode import (
    decode_by_table,
    decode_by_table_anchor,
    decode_linear,
    decode_linear_anchor,
)

_NOT_FINITE = 0x7F80


@njit(nogil=True, cache=True)
def _all_finite(pages, page_at, channels):
    largest = uint16(0)
    for c in range(2 * channels):
        largest = max(largest, uint16(pages[page_at + c] & uint16(0x7FFF)))
    return largest < _NOT_FINITE


@njit(nogil=True, cache=True)
def _decode_block(
    start, end, channels, half, block, pages, page_at, groups, group_at, anchors, residuals,
    packed_at, full, linear, table, data, data_at,
):  # fmt: skip
    if full:
        if linear:
            decode_linear(
                start, end, channels, half, block, pages, page_at, groups, group_at, anchors,
                residuals, packed_at, table, data, data_at,
            )  # fmt: skip
        else:
            decode_by_table(
                start, end, channels, half, block, pages, page_at, groups, group_at, anchors,
                residuals, packed_at, table, data, data_at,
            )  # fmt: skip
    elif linear:
        decode_linear_anchor(
            start, end, channels, half, block, pages, page_at, groups, group_at, anchors,
            residuals, packed_at, table, data, data_at,
        )  # fmt: skip
    else:
        decode_by_table_anchor(
            start, end, channels, half, block, pages, page_at, groups, group_at, anchors,
            residuals, packed_at, table, data, data_at,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def decode_chunk(
    pages, groups, flags, anchors, residuals, raw, full, table, data, stride, outer, length,
    channels, page_tokens, group_tokens, vector, linear,
):  # fmt: skip
    half = (channels + 1) >> 1
    num_groups = -(-length // group_tokens)
    position, page = 0, 0
    for head in range(outer):
        for page_start in range(0, length, page_tokens):
            page_end = min(page_start + page_tokens, length)
            page_at = page * 2 * channels
            row_at = head * stride + page_start * channels
            page += 1
            if flags[page - 1]:
                for _ in range((page_end - page_start) * channels):
                    data[row_at] = raw[position]
                    row_at, position = row_at + 1, position + 1
                continue
            in_blocks = vector and channels - half >= 32 and _all_finite(pages, page_at, channels)
            for start in range(page_start, page_end, group_tokens):
                end = min(start + group_tokens, page_end)
                group_at = (head * num_groups + start // group_tokens) * 2 * channels
                packed_at = (head * length + start) * half
                first = 0
                while in_blocks and first < channels - half:
                    block = next_block(first, channels - half)
                    _decode_block(
                        start, end, channels, half, block, pages, page_at, groups, group_at,
                        anchors, residuals, packed_at, full, linear, table, data, head * stride,
                    )  # fmt: skip
                    first = block + 32
                if first < half:
                    decode_bytes(
                        pages, page_at, groups, group_at, anchors, residuals, packed_at,
                        end - start, channels, first, full, table, data,
                        head * stride + start * channels,
                    )  # fmt: skip
