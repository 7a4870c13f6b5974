"""GAAC in NumPy: group-adaptive exponent codes, the slow obvious version.

A chunk is a ``uint16[outer, tokens, inner]`` array of BF16 bit patterns. It is cut into *tiles* of
8 rows and ``columns`` columns; a *group* is one column of a tile: 8 exponents that share a tag.
With groups along tokens, a tile holds 8 tokens and ``columns = inner``. With groups along channels,
a tile holds one token, ``columns = ceil(inner / 8)`` and row ``r`` holds the channels
``r * columns ... (r + 1) * columns - 1``. Cells beyond the tensor are absent: they fit every window
and their bits are zero.

A group stores ``exponent - base`` as bit planes; its tag says how many. Tag 0: planes 0-1, tag 1:
planes 0-2, tag 2: planes 0-3, each with the base of that window; tag 3: all eight planes, base 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

ROWS = 8
WINDOW_BITS = (2, 3, 4)
RAW_TAG = 3

# NumPy's stubs lose the width of unsigned integers in arithmetic; the names keep it for readers
U8: TypeAlias = NDArray[Any]
U16: TypeAlias = NDArray[Any]
U32: TypeAlias = NDArray[Any]


class Streams(NamedTuple):
    """The arrays that hold one encoded chunk.

    ``sign_mantissa`` uint8[outer * tokens * inner] in element order · ``low`` uint16[tiles *
    columns]: planes 0-1, bits 2r and 2r+1 belong to row r · ``plane2`` uint8[tiles * columns] with
    a dense third plane, else uint8[0] · ``tags`` uint8[tiles * 2 * ceil(columns / 8)]: per tile the
    low bits of all tags, then the high bits · ``offsets`` uint32[blocks]: where the escapes of each
    block of tiles start · ``escapes`` uint8[...].
    """

    sign_mantissa: U8
    low: U16
    plane2: U8
    tags: U8
    offsets: U32
    escapes: U8


def _to_tiles(chunk: NDArray[Any], channel_axis: bool) -> NDArray[Any]:
    """``[outer, tokens, inner]`` to ``[tiles, 8, columns]``; absent cells are zero."""
    outer, tokens, inner = chunk.shape
    if channel_axis:
        columns = -(-inner // ROWS)
        padded = np.zeros((outer, tokens, ROWS * columns), chunk.dtype)
        padded[:, :, :inner] = chunk
        return padded.reshape(outer * tokens, ROWS, columns)
    groups = -(-tokens // ROWS)
    padded = np.zeros((outer, groups * ROWS, inner), chunk.dtype)
    padded[:, :tokens] = chunk
    return padded.reshape(outer * groups, ROWS, inner)


def _from_tiles(
    tiles: NDArray[Any], shape: tuple[int, int, int], channel_axis: bool
) -> NDArray[Any]:
    outer, tokens, inner = shape
    if channel_axis:
        return tiles.reshape(outer, tokens, tiles.shape[1] * tiles.shape[2])[:, :, :inner]
    groups = -(-tokens // ROWS)
    return tiles.reshape(outer, groups * ROWS, inner)[:, :tokens]


def _tiled_bases(bases: U8, shape: tuple[int, int, int], channel_axis: bool) -> NDArray[Any]:
    """Window bases ``uint8[3, outer, inner]`` as ``int16[3, tiles, 8, columns]``."""
    outer, tokens, inner = shape
    wide = np.broadcast_to(bases[:, :, None, :], (len(WINDOW_BITS), outer, tokens, inner))
    return np.stack([_to_tiles(wide[w], channel_axis) for w in range(len(WINDOW_BITS))]).astype(
        np.int16
    )


def _pack_plane(codes: NDArray[Any], plane: int) -> U8:
    """One bit plane of ``codes [tiles, 8, columns]``: bit r of a byte belongs to row r."""
    rows = np.arange(ROWS, dtype=np.int16)[:, None]
    packed: U8 = (((codes >> plane) & 1) << rows).sum(axis=1).astype(np.uint8)
    return packed


def _escape_matrix_mask(tags: U8, narrow: bool) -> NDArray[Any]:
    """Which cells of ``[tiles, planes 2 | planes 3 | 4 bytes of every raw group]`` are stored."""
    plane2 = (tags >= 1) if narrow else np.zeros(tags.shape, bool)
    return np.concatenate([plane2, tags >= 2, np.repeat(tags == RAW_TAG, 4, axis=1)], axis=1)


def _pack_tags(tags: U8) -> U8:
    halves = [np.packbits((tags >> bit) & 1, axis=1, bitorder="little") for bit in (0, 1)]
    return np.concatenate(halves, axis=1).reshape(-1)


def _unpack_tags(packed: U8, tiles: int, columns: int) -> U8:
    halves = packed.reshape(tiles, 2, -(-columns // 8))
    low, high = (
        np.unpackbits(halves[:, i], axis=1, count=columns, bitorder="little") for i in (0, 1)
    )
    return low | (high << 1)


def _block_offsets(mask: NDArray[Any], block_tiles: int) -> U32:
    sizes = mask.sum(axis=1, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    return starts[::block_tiles].astype(np.uint32)


def encode(chunk: U16, bases: U8, *, narrow: bool, channel_axis: bool, block_tiles: int) -> Streams:
    """Encode ``chunk`` (uint16[outer, tokens, inner]) with window bases uint8[3, outer, inner].

    ``narrow`` allows the 2-bit window (tag 0), whose third plane is then an escape like the others.
    """
    sign_mantissa = (((chunk >> 8) & 0x80) | (chunk & 0x7F)).astype(np.uint8).reshape(-1)
    exponents = _to_tiles((chunk >> 7) & 0xFF, channel_axis).astype(np.int16)
    present = _to_tiles(np.ones(chunk.shape, bool), channel_axis)
    tiled_bases = _tiled_bases(bases, chunk.shape, channel_axis)
    tiles, _, columns = exponents.shape

    tags = np.full((tiles, columns), RAW_TAG, np.uint8)
    codes = exponents.copy()
    for tag in (2, 1, 0) if narrow else (2, 1):
        shifted = exponents - tiled_bases[tag]
        fits = (((shifted >= 0) & (shifted < 1 << WINDOW_BITS[tag])) | ~present).all(axis=1)
        tags[fits] = tag
        codes = np.where(fits[:, None, :], shifted, codes)
    codes[~present] = 0

    rows = np.arange(ROWS, dtype=np.uint32)[:, None]
    low = ((codes & 3).astype(np.uint32) << (2 * rows)).sum(axis=1).astype(np.uint16)
    planes = [_pack_plane(codes, plane) for plane in range(8)]
    raw = np.stack(planes[4:], axis=2).reshape(tiles, 4 * columns)
    mask = _escape_matrix_mask(tags, narrow)
    return Streams(
        sign_mantissa=sign_mantissa,
        low=low.reshape(-1),
        plane2=np.zeros(0, np.uint8) if narrow else planes[2].reshape(-1),
        tags=_pack_tags(tags),
        offsets=_block_offsets(mask, block_tiles),
        escapes=np.concatenate([planes[2], planes[3], raw], axis=1)[mask],
    )


def decode(
    streams: Streams,
    bases: U8,
    shape: tuple[int, int, int],
    *,
    narrow: bool,
    channel_axis: bool,
) -> U16:
    """Inverse of :func:`encode`; the streams must have passed the checks of the file format."""
    tiled_bases = _tiled_bases(bases, shape, channel_axis)
    _, tiles, _, columns = tiled_bases.shape
    tags = _unpack_tags(streams.tags, tiles, columns)
    escapes = np.zeros((tiles, 6 * columns), np.uint8)
    escapes[_escape_matrix_mask(tags, narrow)] = streams.escapes
    plane2, plane3, raw = np.split(escapes, [columns, 2 * columns], axis=1)
    if not narrow:
        plane2 = streams.plane2.reshape(tiles, columns)

    rows = np.arange(ROWS)[:, None]
    codes = (streams.low.reshape(tiles, 1, columns) >> (2 * rows)) & 3
    high = np.moveaxis(raw.reshape(tiles, columns, 4), 2, 0)
    for plane, packed in enumerate([plane2, plane3, *high], start=2):
        codes = codes | ((packed[:, None, :].astype(np.int32) >> rows) & 1) << plane
    base = np.zeros_like(tiled_bases[0])
    for tag in range(RAW_TAG):
        base = np.where((tags == tag)[:, None, :], tiled_bases[tag], base)
    exponents = _from_tiles((codes + base).astype(np.uint16), shape, channel_axis)
    sign_mantissa = streams.sign_mantissa.reshape(shape).astype(np.uint16)
    return ((sign_mantissa & 0x80) << 8) | (exponents << 7) | (sign_mantissa & 0x7F)
