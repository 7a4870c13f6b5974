"""GAAC in numba; byte for byte what kernels/reference/gaac.py does.

Geometry: a chunk is ``slabs`` runs of ``slab_len`` elements (in the tensor, outer indices may lie
``outer_stride`` elements apart). A slab is cut into tiles of ``8 * columns`` consecutive elements
(the last one may be short); row r of a tile starts at ``r * columns``. Groups along tokens: one
slab per outer index, ``columns = inner``. Groups along channels: one slab per token, one tile per
slab, ``columns = ceil(inner / 8)``; the bases of a row start ``columns`` after those of the one
before.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint8, uint32, uint64
from numpy.typing import NDArray

from kvz.kernels.cpu.flat import flatten
from kvz.kernels.cpu.gaac_plain import (
    add_raw_planes,
    decode_columns_plain,
    emit_raw,
    encode_columns_plain,
)
from kvz.kernels.cpu.gaac_simd import decode_columns_narrow, decode_columns_wide, encode_columns
from kvz.kernels.cpu.simd import (
    HAVE_SIMD,
    STORE_SLACK,
    compress_store,
    load_word,
    popcount,
    store_word,
)

__all__ = ["DECODE_OK", "STATUS_TEXT", "STORE_SLACK", "decode", "encode"]

DECODE_OK = 0
ESCAPES_TRUNCATED, OFFSET_WRONG, TAG_INVALID = 1, 2, 3
#: What the other results of ``decode`` mean.
STATUS_TEXT = {
    ESCAPES_TRUNCATED: "the tags promise more escapes than there are",
    OFFSET_WRONG: "an escape offset, or the number of escapes, does not follow from the tags",
    TAG_INVALID: "a tag has a value that this window set does not use",
}

_ROWS = 8


@njit(nogil=True, cache=True)
def _emit(plane, mask_a, mask_b, tags, columns, vector, escapes, position):
    """Append ``plane[c]`` for every column whose bit is set in either tag half."""
    first = 0
    if vector:
        while first + 32 <= columns:
            byte = first >> 3
            mask = load_word(tags, mask_a + byte) | load_word(tags, mask_b + byte)
            compress_store(plane, first, mask, escapes, position)
            position += popcount(mask)
            first += 32
    for c in range(first, columns):
        mask = tags[mask_a + (c >> 3)] | tags[mask_b + (c >> 3)]
        if (mask >> (c & 7)) & 1:
            escapes[position] = plane[c]
            position += 1
    return position


@njit(nogil=True, cache=True)
def _encode(
    data, outer_stride, num_slabs, bases, inner, slabs_per_outer, slab_len, columns, base_row,
    narrow, block_tiles, vector, sign_mantissa, low, dense_plane2, tags, offsets, escapes, plane2,
    plane3,
):  # fmt: skip
    base_stride = bases.size // 3
    tag_len = (columns + 7) >> 3
    tile_len = _ROWS * columns
    position, tile, block_left, block = 0, 0, 0, 0
    for slab in range(num_slabs):
        outer = slab // slabs_per_outer
        base_at = outer * inner
        slab_at = outer * outer_stride + (slab - outer * slabs_per_outer) * slab_len
        for start in range(0, slab_len, tile_len):
            packed_at = slab * slab_len + start
            data_at = slab_at + start
            remaining = min(slab_len - start, tile_len)
            group = tile * columns
            tag_at = tile * 2 * tag_len
            if block_left == 0:
                offsets[block] = uint32(position)
                block, block_left = block + 1, block_tiles
            block_left -= 1
            first = 0
            raw = uint64(0)
            if vector and remaining == tile_len:
                while first + 32 <= columns:
                    bits = encode_columns(
                        data, data_at + first, sign_mantissa, packed_at + first, columns, bases,
                        base_at + first, base_stride, narrow, low, group + first, plane2, plane3,
                        first,
                    )  # fmt: skip
                    store_word(uint32(bits), tags, tag_at + (first >> 3))
                    store_word(uint32(bits >> 32), tags, tag_at + tag_len + (first >> 3))
                    raw |= bits & (bits >> 32)
                    first += 32
            if first < columns:
                raw |= encode_columns_plain(
                    data, data_at, sign_mantissa, packed_at, remaining, first, columns, bases,
                    base_at, base_row, base_stride, narrow, low, group, plane2, plane3, tags,
                    tag_at, tag_len,
                )  # fmt: skip
            if narrow:
                position = _emit(
                    plane2, tag_at, tag_at + tag_len, tags, columns, vector, escapes, position
                )
            else:
                dense_plane2[group : group + columns] = plane2[:columns]
            high_at = tag_at + tag_len
            position = _emit(plane3, high_at, high_at, tags, columns, vector, escapes, position)
            if raw & uint64(0xFFFFFFFF):
                position = emit_raw(
                    data, data_at, remaining, columns, tags, tag_at, tag_len, escapes, position
                )
            tile += 1
    return position


@njit(nogil=True, cache=True)
def _count_tags(tags, tag_at, tag_len):
    """How many groups of a tile store plane 2 as (tag 1-3), plane 3 as (2-3), planes 4-7 as (3)."""
    beyond2, beyond3, raw = 0, 0, 0
    byte = 0
    while byte + 4 <= tag_len:
        low = load_word(tags, tag_at + byte)
        high = load_word(tags, tag_at + tag_len + byte)
        beyond2 += popcount(low | high)
        beyond3 += popcount(high)
        raw += popcount(low & high)
        byte += 4
    for i in range(byte, tag_len):
        low = uint32(tags[tag_at + i])
        high = uint32(tags[tag_at + tag_len + i])
        beyond2 += popcount(low | high)
        beyond3 += popcount(high)
        raw += popcount(low & high)
    return beyond2, beyond3, raw


@njit(nogil=True, cache=True)
def _decode(
    sign_mantissa, low, plane2, tags, offsets, escapes, bases, inner, slabs_per_outer, slab_len,
    columns, base_row, narrow, block_tiles, vector, data, outer_stride, num_slabs,
):  # fmt: skip
    base_stride = bases.size // 3
    tag_len = (columns + 7) >> 3
    tile_len = _ROWS * columns
    spare_bits = uint8((0xFF << (((columns - 1) & 7) + 1)) & 0xFF)
    position, tile, block_left, block = 0, 0, 0, 0
    for slab in range(num_slabs):
        outer = slab // slabs_per_outer
        base_at = outer * inner
        slab_at = outer * outer_stride + (slab - outer * slabs_per_outer) * slab_len
        for start in range(0, slab_len, tile_len):
            packed_at = slab * slab_len + start
            data_at = slab_at + start
            remaining = min(slab_len - start, tile_len)
            group = tile * columns
            tag_at = tile * 2 * tag_len
            if block_left == 0:
                if offsets[block] != position:
                    return OFFSET_WRONG
                block, block_left = block + 1, block_tiles
            block_left -= 1
            if (tags[tag_at + tag_len - 1] | tags[tag_at + 2 * tag_len - 1]) & spare_bits:
                return TAG_INVALID
            beyond2, beyond3, raw = _count_tags(tags, tag_at, tag_len)
            if not narrow:
                if beyond2 != columns:
                    return TAG_INVALID
                beyond2 = 0
            escape2, escape3 = position, position + beyond2
            raw_at = escape3 + beyond3
            position = raw_at + 4 * raw
            if position > escapes.size:
                return ESCAPES_TRUNCATED
            first = 0
            if vector and remaining == tile_len:
                while first + 32 <= columns:
                    tag_low = load_word(tags, tag_at + (first >> 3))
                    tag_high = load_word(tags, tag_at + tag_len + (first >> 3))
                    if narrow:
                        decode_columns_narrow(
                            sign_mantissa, packed_at + first, data, data_at + first, columns, low,
                            plane2, group + first,
                            escapes, escape2, escape3, tag_low, tag_high,
                            bases, base_at + first, base_stride,
                        )  # fmt: skip
                        escape2 += popcount(tag_low | tag_high)
                    else:
                        decode_columns_wide(
                            sign_mantissa, packed_at + first, data, data_at + first, columns, low,
                            plane2, group + first,
                            escapes, escape2, escape3, tag_low, tag_high,
                            bases, base_at + first, base_stride,
                        )  # fmt: skip
                    escape3 += popcount(tag_high)
                    first += 32
            if first < columns:
                decode_columns_plain(
                    sign_mantissa, packed_at, data, data_at, remaining, first, columns, low,
                    plane2, group, escapes, escape2, escape3, tags, tag_at, tag_len, bases,
                    base_at, base_row, base_stride, narrow,
                )  # fmt: skip
            if raw:
                add_raw_planes(
                    data, data_at, remaining, columns, tags, tag_at, tag_len, escapes, raw_at
                )
            tile += 1
    return DECODE_OK if position == escapes.size else OFFSET_WRONG


def _geometry(shape: tuple[int, int, int], channel_axis: bool) -> tuple[int, ...]:
    """``(slabs, inner, slabs per outer index, slab length, columns, base step per row)``."""
    outer, tokens, inner = shape
    if channel_axis:
        columns = -(-inner // _ROWS)
        return outer * tokens, inner, tokens, inner, columns, columns
    return outer, inner, 1, tokens * inner, inner, 0


def encode(
    chunk: NDArray[np.uint16],
    bases: NDArray[np.uint8],
    *,
    narrow: bool,
    channel_axis: bool,
    block_tiles: int,
    sign_mantissa: NDArray[np.uint8],
    low: NDArray[np.uint16],
    plane2: NDArray[np.uint8],
    tags: NDArray[np.uint8],
    offsets: NDArray[np.uint32],
    escapes: NDArray[np.uint8],
) -> int:
    """Encode ``chunk`` (uint16[outer, tokens, inner]) into the given stream arrays.

    Each outer index of ``chunk`` must be contiguous. Returns the length of the escapes. ``escapes``
    must hold the worst case, ``6`` bytes a group, and :data:`STORE_SLACK` bytes more.
    """
    slabs, inner, slabs_per_outer, slab_len, columns, base_row = _geometry(
        chunk.shape, channel_axis
    )
    data, outer_stride = flatten(chunk)
    scratch = np.empty((2, columns + STORE_SLACK), np.uint8)
    return int(
        _encode(
            data, outer_stride, slabs, bases.reshape(-1).astype(np.uint16), inner, slabs_per_outer,
            slab_len, columns, base_row, narrow, block_tiles, HAVE_SIMD and not channel_axis,
            sign_mantissa, low, plane2, tags, offsets, escapes, scratch[0], scratch[1],
        )
    )  # fmt: skip


def decode(
    sign_mantissa: NDArray[np.uint8],
    low: NDArray[np.uint16],
    plane2: NDArray[np.uint8],
    tags: NDArray[np.uint8],
    offsets: NDArray[np.uint32],
    escapes: NDArray[np.uint8],
    bases: NDArray[np.uint8],
    out: NDArray[np.uint16],
    *,
    narrow: bool,
    channel_axis: bool,
    block_tiles: int,
) -> int:
    """Decode into ``out`` (uint16[outer, tokens, inner]); returns a status.

    Each outer index of ``out`` must be contiguous. Stream lengths must fit ``out``; tags, offsets
    and the length of the escapes need not be trustworthy: the result is :data:`DECODE_OK` or says
    what is wrong with them.
    """
    slabs, inner, slabs_per_outer, slab_len, columns, base_row = _geometry(out.shape, channel_axis)
    data, outer_stride = flatten(out)
    return int(
        _decode(
            sign_mantissa, low, plane2, tags, offsets, escapes,
            bases.reshape(-1).astype(np.uint16), inner, slabs_per_outer, slab_len, columns,
            base_row, narrow, block_tiles, HAVE_SIMD and not channel_axis, data, outer_stride,
            slabs,
        )
    )  # fmt: skip
