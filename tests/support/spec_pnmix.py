"""The pnmix part of spec_reader.py, written from formats/spec/pnmix.md alone.

NumPy, but one statement per rule of the page. No import from kvz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import spec_lynx
import spec_reader
from numpy.typing import NDArray

Array = NDArray[Any]
KEYS = {"name", "role", "group_tokens", "sink_tokens", "tail", "levels"}
KEYS_OF_ROLE = {
    "key": {
        *("high_bits", "low_bits", "page_tokens", "pairing", "rotary_dim"),
        *("salient", "criterion", "prefill_tokens"),
    },
    "value": {"bits", "group_channels"},
}


@dataclass(frozen=True)
class Span:
    """Tokens of a chunk; pnmix.md, "Exact and coded tokens"."""

    first: int  # f
    coded: int  # c
    last: int  # l
    groups: int
    octets: int
    group_of: Array  # of coded tokens, [c]
    octet_of: Array
    bit_of: Array  # place in the octet


def has_codebook(codec: dict[str, Any]) -> bool:
    """Whether tensors of this codec have a CODEBOOK section."""
    return codec.get("role") == "key"


def check_config(codec: dict[str, Any], inner: int) -> None:
    """Raises SpecViolation; pnmix.md, "Configuration"."""
    require = spec_reader.require
    require(codec.get("role") in KEYS_OF_ROLE, "role")
    require(set(codec) == KEYS | KEYS_OF_ROLE[codec["role"]], "keys of the configuration")
    integers = {"group_tokens", "sink_tokens", "high_bits", "low_bits", "page_tokens"}
    integers |= {"rotary_dim", "prefill_tokens", "bits", "group_channels"}
    for key in integers & set(codec):
        may_be_null = key in ("page_tokens", "prefill_tokens")
        is_null = may_be_null and codec[key] is None
        require(is_null or type(codec[key]) is int, f"{key} is an integer")
    group = codec["group_tokens"]
    require(1 <= group <= 1024, "group_tokens")
    require(0 <= codec["sink_tokens"] <= 1024, "sink_tokens")
    require(codec["tail"] in ("exact", "coded"), "tail")
    require(codec["levels"] in ("best", "minmax"), "levels")
    if codec["role"] == "value":
        require(codec["bits"] in (2, 4, 8), "bits")
        require(codec["group_channels"] >= 1, "group_channels")
        return
    require(1 <= codec["low_bits"] <= codec["high_bits"] <= 8, "high_bits and low_bits")
    page, rotary_dim = codec["page_tokens"], codec["rotary_dim"]
    if page is not None:
        require(group <= page <= 32768 and page % group == 0, "page_tokens")
    require(codec["pairing"] in ("half", "interleaved", "none"), "pairing")
    require(0 <= rotary_dim <= inner and rotary_dim % 2 == 0, "rotary_dim")
    require((rotary_dim == 0) == (codec["pairing"] == "none"), "0 exactly if pairing is none")
    require(type(codec["salient"]) in (int, float), "salient is a number")
    require(0 <= codec["salient"] <= 1, "salient")
    require(isinstance(codec["criterion"], str), "criterion")
    prefill = codec["prefill_tokens"]
    require(prefill is None or prefill >= 1, "prefill_tokens")


def span_of(codec: dict[str, Any], start: int, n: int, tokens: int) -> Span:
    """What is exact and what is coded of the n tokens from token `start` on."""
    sinks, group = codec["sink_tokens"], codec["group_tokens"]
    tail = max(tokens - sinks, 0) % group if codec["tail"] == "exact" else 0
    first = min(max(sinks - start, 0), n)
    last = min(max(start + n - (tokens - tail), 0), n - first)
    coded = n - first - last
    full, rest = divmod(coded, group)
    group_of, place = np.divmod(np.arange(coded), group)
    return Span(
        first,
        coded,
        last,
        groups=-(-coded // group),
        octets=full * -(-group // 8) + -(-rest // 8),
        group_of=group_of,
        octet_of=group_of * -(-group // 8) + place // 8,
        bit_of=place % 8,
    )


def salient_channels(book: bytes, codec: dict[str, Any], outer: int, inner: int) -> Array:
    """bool [outer, inner]; pnmix.md, "Pairs and mask"."""
    half = codec["rotary_dim"] // 2
    pairs = inner - half
    spec_reader.require(len(book) == outer * -(-pairs // 8), "length of the codebook")
    packed = np.frombuffer(book, "u1").reshape(outer, -1)
    bits = np.unpackbits(packed, axis=1, bitorder="little").astype(bool)
    spec_reader.require(not bits[:, pairs:].any(), "bits beyond the last pair are 0")
    salient = np.zeros((outer, inner), bool)
    for pair in range(pairs):
        if pair >= half:
            channels = [pair + half]
        elif codec["pairing"] == "half":
            channels = [pair, pair + half]
        else:
            channels = [2 * pair, 2 * pair + 1]
        for channel in channels:
            salient[:, channel] = bits[:, pair]
    return salient


def unpack_codes(planes: Array, span: Span) -> Array:
    """Codes [c, channels] from bit planes [octets, bits, channels]."""
    codes = np.zeros((span.coded, planes.shape[2]), np.int64)
    for bit in range(planes.shape[1]):
        of_octet = planes[span.octet_of, bit]
        codes |= (of_octet >> span.bit_of[:, None] & 1).astype(np.int64) << bit
    return codes


def dequantize(z: Array, s: Array, q: Array) -> Array:
    """BF16 bits from start, step (float32) and code."""
    with np.errstate(all="ignore"):
        product = s * q.astype(np.float32)
        x = z + product
    return spec_lynx.float32_to_bf16(x)


def decode_pnmix(
    payload: bytes, book: bytes | None, tensor: spec_reader.Tensor, chunk: int, n: int
) -> bytes:
    """The chunk's elements as bytes; `book` of keys only. Raises SpecViolation."""
    codec = tensor.codec
    check_config(codec, tensor.inner)
    span = span_of(codec, chunk * tensor.chunk_tokens, n, tensor.tokens)
    if codec["role"] == "key":
        spec_reader.require(book is not None, "an encoded chunk has a codebook")
        assert book is not None
        salient = salient_channels(book, codec, tensor.outer, tensor.inner)
        exact, flags, coded, raw = decode_keys(payload, codec, span, salient)
    else:
        exact, flags, coded, raw = decode_values(payload, tensor, span)
    spec_reader.require(max(flags, default=0) <= 1, "flag is 0 or 1")
    of_groups = np.frombuffer(flags, "u1").reshape(tensor.outer, span.groups)
    spec_lynx.put_raw_pages(coded, of_groups, codec["group_tokens"], raw)
    first, last = np.split(
        np.frombuffer(exact, "<u2").reshape(tensor.outer, -1, tensor.inner), [span.first], axis=1
    )
    return np.concatenate([first, coded, last], axis=1).astype("<u2").tobytes()


def decode_keys(
    payload: bytes, codec: dict[str, Any], span: Span, salient: Array
) -> tuple[bytes, bytes, Array, bytes]:
    """Streams `exact` and `flags`, BF16 bits of the coded tokens [outer, c, inner], stream `raw`.

    salient: bool [outer, inner].
    """
    outer, inner = salient.shape
    high_bits, low_bits, page = codec["high_bits"], codec["low_bits"], codec["page_tokens"]
    pages = 0 if page is None else -(-span.groups // (page // codec["group_tokens"]))
    high_nbytes = [span.octets * (high_bits - low_bits) * int(row.sum()) for row in salient]
    lengths = [2 * outer * (span.first + span.last) * inner, outer * span.groups]
    lengths += [2 * outer * pages * 2 * inner]
    lengths += [outer * span.groups * 2 * inner * (2 if page is None else 1)]
    lengths += [outer * span.octets * low_bits * inner, sum(high_nbytes)]
    exact, flags, page_params, scales, low, high, raw = spec_reader.split_streams(payload, lengths)

    q = np.zeros((outer, span.coded, inner), np.int64)
    low_planes = np.frombuffer(low, "u1").reshape(outer, span.octets, low_bits, inner)
    position = 0
    for o in range(outer):
        q[o] = unpack_codes(low_planes[o], span)
        part = np.frombuffer(high[position : position + high_nbytes[o]], "u1")
        position += high_nbytes[o]
        high_planes = part.reshape(span.octets, high_bits - low_bits, int(salient[o].sum()))
        q[o][:, salient[o]] |= unpack_codes(high_planes, span) << low_bits

    shape = (outer, span.groups, 2, inner)
    if page is None:
        z, s = start_and_step_fp16(scales, shape, span.group_of)
    else:
        g_and_scale = np.frombuffer(page_params, "<u2").reshape(outer, pages, 2, inner)
        a_and_b = np.frombuffer(scales, "u1").reshape(shape)[:, span.group_of]
        of_page = g_and_scale[:, span.group_of // (page // codec["group_tokens"])]
        width = np.where(salient, high_bits, low_bits)[:, None, :]
        z, s = start_and_step_bytes(of_page, a_and_b, width)
    return exact, flags, dequantize(z, s, q), raw


def decode_values(
    payload: bytes, tensor: spec_reader.Tensor, span: Span
) -> tuple[bytes, bytes, Array, bytes]:
    """As decode_keys."""
    outer, inner = tensor.outer, tensor.inner
    bits, group_channels = tensor.codec["bits"], tensor.codec["group_channels"]
    columns = -(-inner // group_channels)
    lengths = [2 * outer * (span.first + span.last) * inner, outer * span.groups]
    lengths += [2 * outer * span.coded * 2 * columns, outer * span.octets * bits * inner]
    exact, flags, scales, codes, raw = spec_reader.split_streams(payload, lengths)
    planes = np.frombuffer(codes, "u1").reshape(outer, span.octets, bits, inner)
    q = np.stack([unpack_codes(of_outer, span) for of_outer in planes])
    shape = (outer, span.coded, 2, columns)
    z, s = start_and_step_fp16(scales, shape, np.arange(span.coded))
    column_of = np.arange(inner) // group_channels
    return exact, flags, dequantize(z[:, :, column_of], s[:, :, column_of], q), raw


def start_and_step_fp16(
    scales: bytes, shape: tuple[int, int, int, int], row_of: Array
) -> tuple[Array, Array]:
    """z and s, float32, of every token: fp16 [outer, rows, 2, columns], row_of [c]."""
    both = np.frombuffer(scales, "<f2").reshape(shape)[:, row_of].astype(np.float32)
    return both[:, :, 0], both[:, :, 1]


def start_and_step_bytes(of_page: Array, a_and_b: Array, width: Array) -> tuple[Array, Array]:
    """z and s from BF16 minimum and scale and bytes, each [outer, c, 2, inner]."""
    g, scale = (spec_lynx.bf16_to_float32(of_page[:, :, i]) for i in (0, 1))
    a, b = a_and_b[:, :, 0].astype(np.float32), a_and_b[:, :, 1].astype(np.float32)
    with np.errstate(all="ignore"):
        z = g + scale * a
        s = scale * np.ldexp(np.float32(1), 1 - width) * b
    return z, s
