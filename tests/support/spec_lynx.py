"""The lynx part of spec_reader.py, written from formats/spec/lynx.md alone.

NumPy, but one statement per rule of the page. No import from kvz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import spec_reader
from numpy.typing import NDArray

Array = NDArray[Any]
LINEAR_ANCHOR = [2, 24, 40, 56, 72, 88, 104, 120, 135, 151, 167, 183, 199, 215, 231, 253]
KEYS = {"name", "page_tokens", "group_tokens", "exact_tokens", "grouping", "companding"}


@dataclass(frozen=True)
class Config:
    """A lynx entry of `codecs` as tables: lynx.md, "Configuration" and "Decoding"."""

    page: int
    group: int
    exact: int
    by_token: bool
    full_table: Array  # T, by 16 a + r
    anchor_table: Array  # A, by a


def parse_config(codec: dict[str, Any]) -> Config:
    """Raises SpecViolation."""
    require = spec_reader.require
    require(set(codec) == KEYS, "keys of the configuration")
    page, group, exact = codec["page_tokens"], codec["group_tokens"], codec["exact_tokens"]
    require(1 <= page <= 32768, "page_tokens")
    require(1 <= group <= page and page % group == 0, "group_tokens")
    require(0 <= exact <= 1024, "exact_tokens")
    require(codec["grouping"] in ("channel", "token"), "grouping")
    companding = codec["companding"]
    full, anchor = linear_tables() if companding is None else companded_tables(companding)
    return Config(page, group, exact, codec["grouping"] == "token", full, anchor)


def linear_tables() -> tuple[Array, Array]:
    """T and A of the linear code."""
    return 256 * np.arange(256), 256 * np.array(LINEAR_ANCHOR)


def companded_tables(companding: dict[str, Any]) -> tuple[Array, Array]:
    """T and A of the companded code."""
    require = spec_reader.require
    require(set(companding) == {"full", "anchor", "alpha"}, "keys of companding")
    full, anchor, alpha = companding["full"], companding["anchor"], companding["alpha"]
    require(len(full) == 121 and len(anchor) == 8, "number of levels")
    require(all(0 <= level <= 65536 for level in [*full, *anchor]), "levels")
    require(0 < alpha < 10**6, "alpha")
    anchor_table, full_table = np.zeros(16, np.int64), np.zeros(256, np.int64)
    for a in range(16):
        sign, magnitude = (1, a) if a < 8 else (-1, 15 - a)
        anchor_table[a] = sign * anchor[magnitude]
        for r in range(16):
            m = min(max(16 * magnitude + r - 7, 0), 120)
            full_table[16 * a + r] = sign * full[m]
    return full_table, anchor_table


def decode_lynx(
    anchor: bytes, residual: bytes | None, tensor: spec_reader.Tensor, chunk: int, n: int
) -> bytes:
    """The chunk's elements as bytes; without a residual, what the anchor alone says.

    Raises SpecViolation.
    """
    config = parse_config(tensor.codec)
    outer, inner = tensor.outer, tensor.inner
    length, channels = (inner, n) if config.by_token else (n, inner)
    e = min(config.exact, n) if chunk == 0 else 0
    pages, groups, half = -(-length // config.page), -(-length // config.group), -(-channels // 2)
    lengths = [2 * outer * e * inner, 4 * outer * pages * channels]
    lengths += [2 * outer * groups * channels, outer * pages, outer * length * half]
    streams = spec_reader.split_streams(anchor, lengths)
    exact = np.frombuffer(streams[0], "<u2").reshape(outer, e, inner)
    page_params = np.frombuffer(streams[1], "<u2").reshape(outer, pages, 2, channels)
    group_params = np.frombuffer(streams[2], "u1").reshape(outer, groups, 2, channels)
    flags = np.frombuffer(streams[3], "u1").reshape(outer, pages)
    spec_reader.require(bool((flags <= 1).all()), "flag is 0 or 1")
    a = unpack_codes(streams[4], (outer, length, channels))
    if residual is None:
        t = config.anchor_table[a]
    else:
        t = config.full_table[16 * a + unpack_codes(residual, (outer, length, channels))]

    page_of, group_of = np.arange(length) // config.page, np.arange(length) // config.group
    g, s = page_params[:, page_of, 0], page_params[:, page_of, 1]
    mu, sigma = (group_params[:, group_of, i].astype(np.int64) for i in (0, 1))
    coded = dequantize(g, s, 65536 * mu + sigma * t)
    put_raw_pages(coded, flags, config.page, streams[5])
    result = coded.swapaxes(1, 2).copy() if config.by_token else coded
    result[:, :e] = exact
    return result.astype("<u2").tobytes()


def unpack_codes(packed: bytes, shape: tuple[int, int, int]) -> Array:
    """4-bit codes [outer, length, channels] of `anchors` or of a RESIDUAL section."""
    outer, length, channels = shape
    half = -(-channels // 2)
    spec_reader.require(len(packed) == outer * length * half, "length of the codes")
    both = np.frombuffer(packed, "u1").reshape(outer, length, half)
    return np.concatenate([both & 15, both >> 4], axis=2)[:, :, :channels].astype(np.int64)


def dequantize(g: Array, s: Array, n: Array) -> Array:
    """BF16 bits from the minimum and scale of the page (BF16 bits) and the integer n.

    "Where S is 0" is read as: where its bits are 0; a scale of -0 goes through the formula.
    """
    g32, s32 = bf16_to_float32(g), bf16_to_float32(s)
    with np.errstate(all="ignore"):
        fraction = n.astype(np.float32) * np.float32(2**-24)
        product = s32 * fraction
        x = g32 + product
    return np.where(s == 0, g, float32_to_bf16(x))


def bf16_to_float32(bits: Array) -> Array:
    """Exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(x: Array) -> Array:
    """BF16 bits, rounded to nearest even; 7FC0 for any NaN."""
    bits = x.view(np.uint32).astype(np.int64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def put_raw_pages(coded: Array, flags: Array, page: int, raw: bytes) -> None:
    """Replace the elements of each page with flag 1 by those of the stream `raw`."""
    position = 0
    for o, p in np.argwhere(flags == 1):
        part = coded[o, page * p : page * (p + 1)]
        stored = raw[position : position + 2 * part.size]
        spec_reader.require(len(stored) == 2 * part.size, "raw shorter than the flags say")
        part[...] = np.frombuffer(stored, "<u2").reshape(part.shape)
        position += len(stored)
    spec_reader.require(position == len(raw), "raw longer than the flags say")
