"""Lynx in NumPy: 8-bit codes whose upper and lower halves are stored apart.

Source: Lynx, arXiv 2607.01831; the linear code and the exact tokens are kvz's own. A chunk is a
``uint16[outer, length, channels]`` array of BF16 bit patterns; pages and groups run along
``length``. All float arithmetic is float32, every operation rounded to nearest even by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# NumPy's stubs lose the width of unsigned integers in arithmetic; the names keep it for readers
U8: TypeAlias = NDArray[Any]
U16: TypeAlias = NDArray[Any]
F32: TypeAlias = NDArray[Any]

#: From this magnitude on (and for infinities and NaN) a page is stored as it is.
MAX_EXPONENT = 253
#: A page with a smaller scale (above 0) is stored as it is: its reciprocal could overflow.
MIN_SCALE = np.float32(2.0**-96)
#: A page's range is at most this many units, so that offset and step fit one byte each.
_MAX_UNITS = 65025
_WIDEN = np.float32(65536 / _MAX_UNITS)


class Streams(NamedTuple):
    """The arrays that hold one encoded chunk.

    ``pages`` uint16[outer, pages, 2, channels]: BF16 minimum and scale · ``groups``
    uint8[outer, groups, 2, channels]: offset and step · ``flags`` uint8[outer, pages]: 1 where the
    page is stored as it is · ``anchors``, ``residuals`` uint8[outer, length, ceil(channels / 2)]:
    two 4-bit codes a byte, channel j below channel j + ceil(channels / 2) · ``raw`` uint16[...]:
    the elements of the marked pages.
    """

    pages: U16
    groups: U8
    flags: U8
    anchors: U8
    residuals: U8
    raw: U16


def encode(
    chunk: U16, *, page_tokens: int, group_tokens: int, thresholds: F32 | None = None
) -> Streams:
    """Encode ``chunk``; ``thresholds`` (float32[120]) selects the companded code."""
    outer, length, channels = chunk.shape
    num_pages, num_groups = -(-length // page_tokens), -(-length // group_tokens)
    pages = np.zeros((outer, num_pages, 2, channels), np.uint16)
    groups = np.zeros((outer, num_groups, 2, channels), np.uint8)
    flags = np.zeros((outer, num_pages), np.uint8)
    codes = np.zeros(chunk.shape, np.uint8)
    raw = []
    for head in range(outer):
        for page in range(num_pages):
            start = page * page_tokens
            elements = chunk[head, start : start + page_tokens]
            minimum, scale, usable = page_range(elements)
            if not usable:
                flags[head, page] = 1
                raw.append(elements.reshape(-1))
                continue
            pages[head, page] = minimum, scale
            units = to_units(elements, minimum, scale)
            for first in range(0, len(elements), group_tokens):
                group = (start + first) // group_tokens
                part = units[first : first + group_tokens]
                code = _linear if thresholds is None else _companded
                offset, step, coded = code(part, thresholds)
                groups[head, group] = offset, step
                codes[head, start + first : start + first + len(part)] = coded
    return Streams(
        pages,
        groups,
        flags,
        pack(codes >> 4),
        pack(codes & 15),
        np.concatenate(raw) if raw else np.empty(0, np.uint16),
    )


def page_range(elements: U16) -> tuple[U16, U16, bool]:
    """BF16 minimum and scale of each channel (0: constant), and whether the page can be coded."""
    if ((elements >> 7 & 0xFF) >= MAX_EXPONENT).any():
        return elements[0], elements[0], False
    ordered = np.where(elements >> 15, 0x7FFF - elements.astype(np.int32), elements)
    low, high = ordered.min(axis=0), ordered.max(axis=0)
    minimum, maximum = (np.where(v < 0, 0x7FFF - v, v).astype(np.uint16) for v in (low, high))
    spread = (to_float(maximum) - to_float(minimum)) * _WIDEN
    # bits of a positive float, rounded up to BF16
    scale = ((spread.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    usable = bool(((scale == 0) | (to_float(scale) >= MIN_SCALE)).all())
    return minimum, scale, usable


def to_units(elements: U16, minimum: U16, scale: U16) -> F32:
    """Elements as parts of 65536 of their channel's scale, from 0 to about 65025."""
    with np.errstate(divide="ignore"):
        reciprocal = np.float32(65536) / to_float(scale)
    reciprocal = np.where(scale == 0, np.float32(0), reciprocal)
    return (to_float(elements) - to_float(minimum)) * reciprocal


def _linear(units: F32, _: F32 | None) -> tuple[U8, U8, U8]:
    offset = np.minimum(np.floor(units.min(axis=0) * np.float32(1 / 256)), np.float32(255))
    rest = units - offset * np.float32(256)
    step = np.minimum(np.ceil(rest.max(axis=0) / np.float32(255)), np.float32(255))
    codes = np.minimum(np.rint(rest * _reciprocal(step)), np.float32(255))
    return offset.astype(np.uint8), step.astype(np.uint8), codes.astype(np.uint8)


def _companded(units: F32, thresholds: F32 | None) -> tuple[U8, U8, U8]:
    count = len(units)
    total = np.floor(units).astype(np.int64).sum(axis=0)
    offset = np.minimum((2 * total + 256 * count) // (512 * count), 255)
    rest = units - (offset * 256).astype(np.float32)
    step = np.minimum(np.ceil(np.abs(rest).max(axis=0) * np.float32(1 / 256)), np.float32(255))
    scaled = np.abs(rest) * (_reciprocal(step) * np.float32(1 / 256))
    magnitude = np.searchsorted(thresholds, scaled, side="right")  # type: ignore[call-overload]
    anchor = (magnitude + 7) >> 4
    residual = magnitude - 16 * anchor + 7
    nibble = np.where(rest < 0, 15 - anchor, anchor)
    return offset.astype(np.uint8), step.astype(np.uint8), (nibble << 4 | residual).astype(np.uint8)


def _reciprocal(step: F32) -> F32:
    with np.errstate(divide="ignore"):
        return np.where(step == 0, np.float32(0), np.float32(1) / step)


def decode(streams: Streams, table: NDArray[Any], *, page_tokens: int, group_tokens: int) -> U16:
    """Values of the 8-bit codes, or of the anchors alone; ``table`` int32[256] or int32[16]."""
    channels, length = streams.pages.shape[3], streams.anchors.shape[1]
    codes = unpack(streams.anchors, channels).astype(np.int32)
    if len(table) == 256:
        codes = codes << 4 | unpack(streams.residuals, channels)
    page_of, group_of = np.arange(length) // page_tokens, np.arange(length) // group_tokens
    offset, step = (streams.groups[:, group_of, i].astype(np.int32) for i in (0, 1))
    minimum, scale = (streams.pages[:, page_of, i] for i in (0, 1))
    number = (offset << 16) + step * table[codes]
    fraction = number.astype(np.float32) * np.float32(2.0**-24)
    # scales of a damaged file may be anything
    with np.errstate(over="ignore", invalid="ignore"):
        value = to_bf16(to_float(minimum) + to_float(scale) * fraction)
    out = np.where(scale == 0, minimum, value).astype(np.uint16)
    position = 0
    for head, page in zip(*np.nonzero(streams.flags), strict=True):
        target = out[head, page * page_tokens : (page + 1) * page_tokens]
        target[:] = streams.raw[position : position + target.size].reshape(target.shape)
        position += target.size
    return out


def pack(codes: U8) -> U8:
    """4-bit codes uint8[..., channels] as uint8[..., ceil(channels / 2)]."""
    half = -(-codes.shape[-1] // 2)
    packed = codes[..., :half].copy()
    packed[..., : codes.shape[-1] - half] |= codes[..., half:] << 4
    return packed


def unpack(packed: U8, channels: int) -> U8:
    """Inverse of :func:`pack`."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)[..., :channels]


def to_float(bits: U16) -> F32:
    """BF16 bit patterns as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: F32) -> U16:
    """Float32 rounded to nearest even to BF16 bit patterns; every NaN becomes 0x7FC0."""
    bits = values.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
