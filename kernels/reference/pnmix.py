"""PN-Mix in NumPy: keys with more bits in some channels, values per token.

A chunk is a ``uint16[outer, tokens, channels]`` array of BF16 bit patterns; groups of keys run
along tokens. All float arithmetic is float32, every operation rounded to nearest even by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvz.kernels.reference.pnmix_fit import fit, is_fitted
from kvz.kernels.reference.pnmix_levels import (
    MAX_EXPONENT,
    Grid,
    HalfGrid,
    Levels,
    PageGrid,
    Wanted,
    inverse,
    levels,
    page_scale,
    page_start,
    part,
)

U8: TypeAlias = NDArray[Any]
U16: TypeAlias = NDArray[Any]
F32: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]

_OCTET = 8


class Widths(NamedTuple):
    """Bits of a code: in channels that are salient, and in the others."""

    high: int
    low: int


class KeyStreams(NamedTuple):
    """The arrays that hold one encoded chunk of keys.

    ``flags`` uint8[outer, groups]: 1 where the group is stored as it is · ``pages``
    uint16[outer, pages, 2, channels]: BF16 minimum and scale; no pages with FP16 scales ·
    ``scales`` [outer, groups, 2, channels]: start and step, FP16 bits (uint16) or bytes · ``low``
    uint8[outer, octets, low bits, channels]: bit t of a byte belongs to token t of the octet ·
    ``high`` uint8[...]: for each outer index [octets, high bits - low bits, its salient channels] ·
    ``raw`` uint16[...]: the elements of the marked groups.
    """

    flags: U8
    pages: U16
    scales: NDArray[Any]
    low: U8
    high: U8
    raw: U16


class ValueStreams(NamedTuple):
    """The same of values.

    ``scales`` uint16[outer, tokens, 2, channel groups]: FP16 bits · ``codes``
    uint8[outer, octets, bits, channels].
    """

    flags: U8
    scales: U16
    codes: U8
    raw: U16


def encode_keys(
    chunk: U16,
    salient: Mask,
    widths: Widths,
    *,
    group_tokens: int,
    page_groups: int | None = None,
    rule: str = "best",
) -> KeyStreams:
    """Encode ``chunk``; ``salient`` bool[outer, channels]."""
    outer, tokens, channels = chunk.shape
    groups = [slice(i, i + group_tokens) for i in range(0, tokens, group_tokens)]
    num_pages = 0 if page_groups is None else -(-len(groups) // page_groups)
    flags = np.zeros((outer, len(groups)), np.uint8)
    pages = np.zeros((outer, num_pages, 2, channels), np.uint16)
    stored = np.uint16 if page_groups is None else np.uint8
    scales = np.zeros((outer, len(groups), 2, channels), stored)
    codes = np.zeros(chunk.shape, np.uint8)
    raw = [np.empty(0, np.uint16)]
    for head in range(outer):
        bits = np.where(salient[head], widths.high, widths.low)
        flags[head] = [not can_be_coded(chunk[head, group]) for group in groups]
        for page in range(num_pages):
            assert page_groups is not None
            own = range(page * page_groups, min((page + 1) * page_groups, len(groups)))
            used = [chunk[head, groups[i]] for i in own if not flags[head, i]]
            if used:
                pages[head, page] = page_range(np.concatenate(used))
        for i, group in enumerate(groups):
            if flags[head, i]:
                raw.append(chunk[head, group].reshape(-1))
                continue
            grid: Grid = HalfGrid()
            if page_groups is not None:
                minimum, scale = to_float(pages[head, i // page_groups])
                grid = PageGrid(minimum, scale, bits)
            elements = to_float(chunk[head, group])
            found = _key_levels(elements, bits, salient[head], rule, grid)
            scales[head, i] = found.stored_start, found.stored_step
            codes[head, group] = quantize(elements, found, bits)
    return KeyStreams(
        flags,
        pages,
        scales,
        pack(codes & ((1 << widths.low) - 1), widths.low, group_tokens),
        _pack_high(codes >> widths.low, salient, widths, group_tokens),
        np.concatenate(raw),
    )


def _key_levels(
    elements: F32, bits: NDArray[Any], salient: NDArray[np.bool_], rule: str, grid: Grid
) -> Levels:
    """Of a group, float32[tokens, channels]."""
    low, high = ends(elements)
    fitted = None
    if rule == "best":
        chosen = is_fitted(bits, salient.any())
        fitted = Wanted(*fit(elements, low, high, bits, salient), chosen)
    return levels(low, high, bits, rule, grid, fitted)


def encode_values(
    chunk: U16, bits: int, *, group_tokens: int, group_channels: int, rule: str = "best"
) -> ValueStreams:
    """Encode ``chunk`` with a start and a step for each token and ``group_channels`` channels."""
    outer, tokens, channels = chunk.shape
    columns = [slice(i, i + group_channels) for i in range(0, channels, group_channels)]
    starts = range(0, tokens, group_tokens)
    flags = np.zeros((outer, len(starts)), np.uint8)
    scales = np.zeros((outer, tokens, 2, len(columns)), np.uint16)
    codes = np.zeros(chunk.shape, np.uint8)
    raw = [np.empty(0, np.uint16)]
    for head in range(outer):
        for i, start in enumerate(starts):
            group = slice(start, start + group_tokens)
            if not can_be_coded(chunk[head, group]):
                flags[head, i] = 1
                raw.append(chunk[head, group].reshape(-1))
                continue
            for j, column in enumerate(columns):
                elements = to_float(chunk[head, group, column]).T
                found = levels(*ends(elements), np.array(bits), rule, HalfGrid())
                scales[head, group, 0, j] = found.stored_start
                scales[head, group, 1, j] = found.stored_step
                codes[head, group, column] = quantize(elements, found, np.array(bits)).T
    return ValueStreams(flags, scales, pack(codes, bits, group_tokens), np.concatenate(raw))


def can_be_coded(elements: U16) -> bool:
    """Whether all elements are finite and in the range of the scales."""
    return not ((elements >> 7 & 0xFF) >= MAX_EXPONENT).any()


def ends(elements: F32) -> tuple[F32, F32]:
    """Least and greatest of float32[tokens, channels] for each channel; zeros have no sign."""
    # adding +0 makes -0 +0
    return elements.min(axis=0) + np.float32(0), elements.max(axis=0) + np.float32(0)


def page_range(elements: U16) -> tuple[U16, U16]:
    """BF16 minimum and scale of each channel of a page."""
    low, high = ends(to_float(elements))
    return (low.view(np.uint32) >> 16).astype(np.uint16), page_scale(low, high)


def quantize(elements: F32, found: Levels, bits: NDArray[Any]) -> U8:
    """Codes of float32[tokens, channels]."""
    last = ((1 << bits) - 1).astype(np.float32)
    nearest: F32 = np.rint((elements - found.start) * inverse(found.step))
    return nearest.clip(0, last).astype(np.uint8)


def decode_keys(
    streams: KeyStreams,
    salient: Mask,
    widths: Widths,
    tokens: int,
    *,
    group_tokens: int,
    page_groups: int | None = None,
) -> U16:
    """The decoded chunk uint16[outer, tokens, channels]."""
    codes = unpack(streams.low, tokens, group_tokens)
    codes |= _unpack_high(streams.high, salient, widths, tokens, group_tokens) << widths.low
    if page_groups is None:
        start, step = half_scales(streams.scales)
    else:
        bits = np.where(salient, widths.high, widths.low)[:, None]
        start, step = page_scales(streams.scales, streams.pages, bits, page_groups)
    group_of = np.arange(tokens) // group_tokens
    out = dequantize(codes, start[:, group_of], step[:, group_of])
    return _with_raw(out, streams.flags, streams.raw, group_tokens)


def decode_values(
    streams: ValueStreams, tokens: int, *, group_tokens: int, group_channels: int
) -> U16:
    """The decoded chunk uint16[outer, tokens, channels]."""
    codes = unpack(streams.codes, tokens, group_tokens)
    start, step = half_scales(streams.scales)
    column_of = np.arange(codes.shape[2]) // group_channels
    out = dequantize(codes, start[..., column_of], step[..., column_of])
    return _with_raw(out, streams.flags, streams.raw, group_tokens)


def half_scales(stored: U16) -> tuple[F32, F32]:
    """Starts and steps from FP16 bits [..., 2, n]."""
    values = stored.view(np.float16).astype(np.float32)
    return values[..., 0, :], values[..., 1, :]


def page_scales(stored: U8, pages: U16, bits: NDArray[Any], page_groups: int) -> tuple[F32, F32]:
    """Starts and steps from bytes [outer, groups, 2, channels] and the ranges of their pages."""
    page_of = np.arange(stored.shape[1]) // page_groups
    minimum, scale = (to_float(pages[:, page_of, i]) for i in (0, 1))
    # pages of a damaged file may be anything
    with np.errstate(over="ignore", invalid="ignore"):
        start = page_start(minimum, scale, stored[:, :, 0])
        return start, scale * part(bits) * stored[:, :, 1].astype(np.float32)


def dequantize(codes: U8, start: F32, step: F32) -> U16:
    # scales of a damaged file may be anything
    with np.errstate(over="ignore", invalid="ignore"):
        return to_bf16(start + step * codes.astype(np.float32))


def _with_raw(out: U16, flags: U8, raw: U16, group_tokens: int) -> U16:
    position = 0
    for head, group in zip(*np.nonzero(flags), strict=True):
        target = out[head, group * group_tokens : (group + 1) * group_tokens]
        target[:] = raw[position : position + target.size].reshape(target.shape)
        position += target.size
    return out


def pack(codes: U8, bits: int, group_tokens: int) -> U8:
    """Codes uint8[..., tokens, channels] as planes uint8[..., octets, bits, channels]."""
    tokens, octets = codes.shape[-2], []
    for start in range(0, tokens, group_tokens):
        stop = min(start + group_tokens, tokens)
        for first in range(start, stop, _OCTET):
            own = codes[..., first : min(first + _OCTET, stop), :]
            planes = [
                np.packbits(own >> bit & 1, axis=-2, bitorder="little")[..., 0, :]
                for bit in range(bits)
            ]
            octets.append(np.stack(planes, axis=-2))
    return np.stack(octets, axis=-3) if octets else _no_octets(codes, bits)


def _no_octets(codes: U8, bits: int) -> U8:
    return np.zeros((*codes.shape[:-2], 0, bits, codes.shape[-1]), np.uint8)


def unpack(planes: U8, tokens: int, group_tokens: int) -> U8:
    """Inverse of :func:`pack`."""
    weights = (1 << np.arange(planes.shape[-2], dtype=np.uint8))[:, None]
    # [..., octets, 8, bits, channels] to codes of all tokens that the octets have room for
    bits = planes[..., None, :, :] >> np.arange(_OCTET, dtype=np.uint8)[:, None, None] & 1
    codes: U8 = (bits * weights).sum(axis=-2, dtype=np.uint8)
    codes = codes.reshape(*codes.shape[:-3], -1, codes.shape[-1])
    group_octets = -(-group_tokens // _OCTET)
    group, token = np.divmod(np.arange(tokens), group_tokens)
    return np.take(codes, group * group_octets * _OCTET + token, axis=-2)


def _pack_high(codes: U8, salient: Mask, widths: Widths, group_tokens: int) -> U8:
    bits = widths.high - widths.low
    parts = [
        pack(own[:, chosen], bits, group_tokens).reshape(-1) if bits else np.empty(0, np.uint8)
        for own, chosen in zip(codes, salient, strict=True)
    ]
    return np.concatenate([np.empty(0, np.uint8), *parts])


def _unpack_high(high: U8, salient: Mask, widths: Widths, tokens: int, group_tokens: int) -> U8:
    outer, channels = salient.shape
    codes = np.zeros((outer, tokens, channels), np.uint8)
    bits = widths.high - widths.low
    whole, rest = divmod(tokens, group_tokens)
    octets = whole * -(-group_tokens // _OCTET) + -(-rest // _OCTET)
    position = 0
    for own, chosen in zip(codes, salient, strict=True):
        count = int(chosen.sum())
        nbytes = octets * bits * count
        if nbytes:
            planes = high[position : position + nbytes].reshape(octets, bits, count)
            own[:, chosen] = unpack(planes, tokens, group_tokens)
        position += nbytes
    return codes


def to_float(bits: U16) -> F32:
    """BF16 bit patterns as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: F32) -> U16:
    """Float32 rounded to nearest even to BF16 bit patterns; every NaN becomes 0x7FC0."""
    bits = values.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
