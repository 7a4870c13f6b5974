"""Lynx: kernels give the reference's bits, errors stay in bounds, hostile payloads do no harm."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
from cases import U8, U16
from guarded import guarded, guarded_empty
from hypothesis import given, settings
from hypothesis import strategies as st

from kvz.codecs import codec_from_head, codec_from_options
from kvz.codecs.lynx import LynxCodec
from kvz.formats.codecs import lynx as layout
from kvz.formats.codecs.spans import residual_offset
from kvz.formats.errors import ConfigError, DamagedFile, InvalidField
from kvz.kernels.cpu import lynx as kernels
from kvz.kernels.reference import lynx as reference

Shape = tuple[int, int, int]

LINEAR: dict[str, Any] = {}
PAPER: dict[str, Any] = {"preset": "paper"}
OPTIONS = {
    "linear": LINEAR,
    "paper": PAPER,
    "linear by token": {"grouping": "token"},
    "paper by token, alpha 255": {"preset": "paper", "alpha": 255.0, "grouping": "token"},
    "short pages": {"page_tokens": 12, "group_tokens": 4, "exact_tokens": 0},
    "more exact tokens than a page": {"page_tokens": 24, "group_tokens": 8, "exact_tokens": 30},
}
TOKENS = [1, 3, 4, 5, 31, 32, 33, 255, 256, 257, 511]

each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@pytest.fixture(params=["plain", "vector"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernels, "USE_VECTORS", request.param == "vector")
    return str(request.param)


def bf16_bits(values: Any) -> U16:
    """Values as BF16, towards zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16)


def like_a_cache(shape: Shape, seed: int = 0) -> U16:
    rng = np.random.default_rng(seed)
    outer, _, inner = shape
    level, spread = rng.normal(size=(2, outer, 1, inner))
    return bf16_bits(level + np.exp(spread) * rng.normal(size=shape))


def num_exact(codec: LynxCodec, chunk: U16, start: int) -> int:
    return 0 if start else min(codec.config.exact_tokens, chunk.shape[1])


def reference_streams(codec: LynxCodec, chunk: U16, start: int) -> reference.Streams:
    config = codec.config
    coded, exact = chunk.copy(), num_exact(codec, chunk, start)
    if exact:
        coded[:, :exact] = coded[:, min(exact, chunk.shape[1] - 1), None]
    if config.by_token:
        coded = coded.swapaxes(1, 2)
    thresholds = None if config.companding is None else config.companding.thresholds()
    return reference.encode(
        coded,
        page_tokens=config.page_tokens,
        group_tokens=config.group_tokens,
        thresholds=thresholds,
    )


def reference_anchor(codec: LynxCodec, chunk: U16, start: int, streams: reference.Streams) -> bytes:
    section = b""
    exact = chunk[:, : num_exact(codec, chunk, start)]
    parts = (streams.pages, streams.groups, streams.flags, streams.anchors, streams.raw)
    for part in (exact, *parts):
        section += bytes(-len(section) % 16) + np.ascontiguousarray(part).tobytes()
    return section


def reference_decode(
    codec: LynxCodec, streams: reference.Streams, exact: U16, *, full: bool = True
) -> U16:
    config = codec.config
    out = reference.decode(
        streams,
        config.table if full else config.anchor_table,
        page_tokens=config.page_tokens,
        group_tokens=config.group_tokens,
    )
    if config.by_token:
        out = out.swapaxes(1, 2).copy()
    out[:, : exact.shape[1]] = exact
    return out


def encode(codec: LynxCodec, chunk: U16, start: int = 0, poison: int = 0xA5) -> tuple[U8, int]:
    """Anchor, padding and residual; the length of the anchor."""
    buffer = np.full(codec.buffer_nbytes(chunk.shape, 2), poison, np.uint8)
    nbytes = codec.encode(chunk, None, buffer, start)
    return buffer[: residual_offset(nbytes) + codec.residual_nbytes(chunk.shape)], nbytes


def decode(codec: LynxCodec, payload: U8, shape: Shape, start: int = 0) -> U16:
    out = guarded_empty(shape, np.uint16)
    codec.decode(guarded(payload), None, out, start)
    return out


def decode_anchor(codec: LynxCodec, anchor: U8, shape: Shape, start: int = 0) -> U16:
    out = guarded_empty(shape, np.uint16)
    codec.decode_anchor(guarded(anchor), None, out, start)
    return out


def check_parity(codec: LynxCodec, chunk: U16, start: int = 0) -> tuple[reference.Streams, U16]:
    """Payload and both decodings are the reference's; its streams and the 8-bit values."""
    streams = reference_streams(codec, chunk, start)
    exact = chunk[:, : num_exact(codec, chunk, start)]
    anchor = reference_anchor(codec, chunk, start, streams)
    padding = bytes(residual_offset(len(anchor)) - len(anchor))
    payload, nbytes = encode(codec, chunk, start)
    assert nbytes == len(anchor)
    assert payload.tobytes() == anchor + padding + streams.residuals.tobytes()
    decoded = decode(codec, payload, chunk.shape, start)
    assert np.array_equal(decoded, reference_decode(codec, streams, exact))
    draft = decode_anchor(codec, payload[:nbytes], chunk.shape, start)
    assert np.array_equal(draft, reference_decode(codec, streams, exact, full=False))
    return streams, decoded


# -- parity with the reference


@each_option
@pytest.mark.parametrize("tokens", TOKENS)
def test_streams_and_values_of_every_shape_are_those_of_the_reference(
    options: dict[str, Any], tokens: int, path: str
) -> None:
    codec = LynxCodec.from_options(**options)
    for i, inner in enumerate([1, 3, 63, 64, 65, 80, 128, 130]):
        shape = (1 + (i + tokens) % 3, tokens, inner)
        for start in (0, 256):
            check_parity(codec, like_a_cache(shape, tokens + i), start)


@each_option
@pytest.mark.parametrize("name", cases.awkward_chunks())
def test_awkward_chunk_is_coded_as_the_reference_does(
    options: dict[str, Any], name: str, path: str
) -> None:
    check_parity(LynxCodec.from_options(**options), cases.awkward_chunks()[name])


def hard_chunks() -> dict[str, U16]:
    """Chunks of one page of 256 tokens and 66 channels, or a little more."""
    rng = np.random.default_rng(7)
    shape = (2, 260, 66)
    normal = rng.normal(size=shape).astype(np.float32)
    outlier = normal.copy()
    outlier[1, 100, 40] = 1e4
    infinite, nan = bf16_bits(normal), bf16_bits(normal)
    infinite[0, 17, 3] = 0xFF80
    nan[1, 259, 65] = 0x7FFF
    subnormal = rng.integers(0, 128, shape).astype(np.uint16)
    near = np.where(rng.random(shape) < 0.5, 0xFE7F, 0x7E7F).astype(np.uint16)
    tiny = bf16_bits(normal * np.float32(2.0**-100))
    mixed = normal.copy()
    mixed[:, :, 0] *= np.float32(2.0**-99)
    scales = np.exp2(rng.integers(-94, 125, (2, 1, 66))).astype(np.float32)
    return {
        "constant channels": np.broadcast_to(like_a_cache((2, 1, 66)), shape).copy(),
        "zeros of both signs": np.where(rng.random(shape) < 0.5, 0, 0x8000).astype(np.uint16),
        "one outlier of 1e4": bf16_bits(outlier),
        "an infinity": infinite,
        "a NaN in the last page": nan,
        "subnormals": subnormal,
        "subnormals of both signs and zeros": subnormal | rng.integers(0, 2, shape) << 15,
        "subnormals beside ones": np.where(rng.random(shape) < 0.1, 0x3F80, subnormal),
        "as large as can be coded": near,
        "at 2^126": np.where(rng.random(shape) < 1e-4, 0x7E80, near),
        "range beyond float32": np.where(rng.random(shape) < 0.5, 0xFF7F, 0x7F7F),
        "scales below 2^-96": tiny,
        "one scale below 2^-96": bf16_bits(mixed),
        "every scale": bf16_bits(rng.uniform(0.5, 1, shape) * scales),
    }


@each_option
@pytest.mark.parametrize("name", hard_chunks())
def test_hard_chunk_is_coded_as_the_reference_does(
    options: dict[str, Any], name: str, path: str
) -> None:
    check_parity(LynxCodec.from_options(**options), hard_chunks()[name].astype(np.uint16))


@pytest.mark.parametrize("options", [LINEAR, PAPER], ids=["linear", "paper"])
def test_every_pattern_of_bf16_is_coded_as_the_reference_does(
    options: dict[str, Any], path: str
) -> None:
    """256 pages, each of the patterns that share their upper byte; channels in other orders."""
    codec = LynxCodec.from_options(**options)
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256, 1)
    orders = np.random.default_rng(3).permuted(np.tile(np.arange(256), (66, 1)), axis=1).T
    chunk = np.ascontiguousarray(
        np.take_along_axis(np.repeat(patterns, 66, axis=2), orders[None], axis=1)
    )
    streams, decoded = check_parity(codec, chunk, start=256)
    raw = streams.flags[:, 0].astype(bool)
    # exponents from 253 on: 0x7E80 and 0xFE80, in the upper half of their pages, and above; and
    # ranges below 2^-96
    assert raw[[0x7E, 0x7F, 0xFE, 0xFF, 0x00, 0x80]].all()
    assert not raw[0x10:0x7E].any()
    assert np.array_equal(decoded[raw], chunk[raw])


@each_option
def test_token_range_of_a_tensor_is_coded_like_its_copy(options: dict[str, Any], path: str) -> None:
    codec = LynxCodec.from_options(**options)
    tensor = guarded(like_a_cache((3, 300, 66)))
    for start, stop in [(0, 256), (256, 300), (0, 1)]:
        part, copy = tensor[:, start:stop], tensor[:, start:stop].copy()
        payload, nbytes = encode(codec, part, start)
        assert np.array_equal(payload, encode(codec, copy, start)[0])
        assert np.array_equal(part, copy)
        out = guarded_empty(tensor.shape, np.uint16)
        expected = out.copy()
        expected[:, start:stop] = decode(codec, payload, copy.shape, start)
        codec.decode(payload, None, out[:, start:stop], start)
        assert np.array_equal(out, expected)
        expected[:, start:stop] = decode_anchor(codec, payload[:nbytes], copy.shape, start)
        codec.decode_anchor(payload[:nbytes], None, out[:, start:stop], start)
        assert np.array_equal(out, expected)


@each_option
def test_encoding_changes_nothing_in_the_chunk(options: dict[str, Any]) -> None:
    codec = LynxCodec.from_options(**options)
    for shape in [(1, 9, 66), (2, 9, 1), (2, 1, 9)]:
        chunk = like_a_cache(shape)
        before = chunk.copy()
        encode(codec, chunk)
        assert np.array_equal(chunk, before)


@each_option
@pytest.mark.parametrize("name", ["an infinity", "one outlier of 1e4"])
def test_payload_does_not_depend_on_what_was_in_the_buffer(
    options: dict[str, Any], name: str, path: str
) -> None:
    codec, chunk = LynxCodec.from_options(**options), hard_chunks()[name]
    first, second = (encode(codec, chunk, poison=poison)[0] for poison in (0, 255))
    assert np.array_equal(first, second)


@each_option
@pytest.mark.parametrize("shape", [(1, 32, 64), (2, 33, 65), (3, 7, 31), (1, 1, 1), (1, 40, 576)])
def test_kernels_stay_inside_their_arrays(options: dict[str, Any], shape: Shape, path: str) -> None:
    codec = LynxCodec.from_options(**options)
    for chunk in (like_a_cache(shape), cases.random_bits(shape)):
        buffer = guarded_empty((codec.buffer_nbytes(shape, 2),), np.uint8)
        nbytes = codec.encode(guarded(chunk), None, buffer, 0)
        total = residual_offset(nbytes) + codec.residual_nbytes(shape)
        assert np.array_equal(buffer[:total], encode(codec, chunk)[0])


@pytest.mark.parametrize("vector", [False, True])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_bits_and_configuration_are_coded_as_the_reference_does(
    vector: bool, data: st.DataObject
) -> None:
    group = data.draw(st.integers(1, 9), "group")
    options: dict[str, Any] = {
        "group_tokens": group,
        "page_tokens": group * data.draw(st.integers(1, 4), "groups of a page"),
        "exact_tokens": data.draw(st.integers(0, 12), "exact"),
        "grouping": data.draw(st.sampled_from(layout.GROUPINGS)),
    }
    if data.draw(st.booleans(), "paper"):
        options |= {"preset": "paper", "alpha": data.draw(st.floats(1e-3, 1e5), "alpha")}
    outer, tokens, inner = (data.draw(st.integers(1, top), "size") for top in (3, 40, 140))
    shape = (outer, tokens, inner)
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    rng = np.random.default_rng(seed)
    if data.draw(st.booleans(), "random bits"):
        # exponents in a range, so that pages of every kind occur
        lowest, highest = sorted(data.draw(st.integers(0, 255), "exponent") for _ in range(2))
        exponents = rng.integers(lowest, highest + 1, shape)
        chunk = cases.bf16(exponents, rng.integers(0, 256, shape))
    else:
        chunk = like_a_cache(shape, seed)
    start = data.draw(st.sampled_from([0, 512]), "start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "USE_VECTORS", vector)
        check_parity(LynxCodec.from_options(**options), chunk, start)


# -- right values, worked out independently


def test_known_page_gives_the_values_worked_out_by_hand(path: str) -> None:
    """Channel 0: 1, 1.25, 1.5, 2. Channel 1: constant -0.

    Range 1, scale 1 * 65536/65025 = 1.00786 up to BF16: 1.015625. One unit is 1.015625/65536, so
    the elements are at 0, 16131.9, 32263.9, 64527.8 units; offset 0, step ceil(64527.8/255) = 254;
    codes 0, rne(63.51) = 64, rne(127.02) = 127, rne(254.05) = 254 = 00, 40, 7F, FE. They stand for
    1 + 1.015625/65536 * 254 * code = 1, 1.25192, 1.49991, 1.99982; the anchors 0, 4, 7, F for the
    codes 2, 72, 120, 253: 1.00787, 1.28341, 1.47236, 1.99588.
    """
    codec = LynxCodec.from_options(exact_tokens=0)
    chunk = np.array([[[0x3F80, 0x8000], [0x3FA0, 0x8000], [0x3FC0, 0x8000], [0x4000, 0x8000]]])
    chunk = chunk.astype(np.uint16)
    payload, nbytes = encode(codec, chunk)
    expected = (
        "803f0080" "823f0000" "0000000000000000"  # minima 1 and -0, scales 1.015625 and 0
        "00 00 fe 00" "000000000000000000000000"  # offsets, steps
        "00" "000000000000000000000000000000"  # page flag
        "00 04 07 0f" "000000000000000000000000"  # anchors
    )  # fmt: skip
    assert payload[:nbytes].tobytes() == bytes.fromhex(expected)
    assert payload[nbytes:].tobytes() == bytes.fromhex("00 00 0f 0e")
    decoded = decode(codec, payload, chunk.shape)
    assert np.array_equal(decoded, chunk)
    draft = decode_anchor(codec, payload[:nbytes], chunk.shape)
    # nearest multiples of 1/128: 1 + 1/128, 1 + 36/128, 1 + 60/128, 1 + 127/128
    assert draft[0, :, 0].tolist() == [0x3F81, 0x3FA4, 0x3FBC, 0x3FFF]
    assert draft[0, :, 1].tolist() == [0x8000] * 4


@pytest.mark.parametrize("exact", [0, 4])
def test_decoded_values_lie_within_half_a_step_of_the_elements(exact: int, path: str) -> None:
    codec = LynxCodec.from_options(exact_tokens=exact)
    chunk = like_a_cache((2, 600, 66), 5)
    streams, decoded = check_parity(codec, chunk)
    draft = decode_anchor(codec, encode(codec, chunk)[0][: encode(codec, chunk)[1]], chunk.shape)
    tokens = np.arange(600)
    step = streams.groups[:, tokens // 32, 1].astype(float)
    scale = reference.to_float(streams.pages[:, tokens // 256, 1]).astype(float)
    element, full, rough = (
        reference.to_float(bits).astype(float) for bits in (chunk, decoded, draft)
    )
    # codes are at most half a step off, and an anchor's middle at most 13 codes from any of its 16;
    # float32 may add a hundredth of a unit, BF16 half of its last place
    for values, codes in ((full, 0.5), (rough, 13.5)):
        bound = scale / 65536 * (codes * step + 0.01) + np.abs(values) * 2.0**-8
        assert (np.abs(values - element) <= bound)[:, exact:].all()
    assert np.array_equal(decoded[:, :exact], chunk[:, :exact])
    assert np.array_equal(draft[:, :exact], chunk[:, :exact])
    assert not np.array_equal(full, rough)


@pytest.mark.parametrize("alpha", [0.01, 1.0, 255.0])
def test_companded_values_are_the_level_whose_logarithm_is_nearest(alpha: float, path: str) -> None:
    codec = LynxCodec.from_options(preset="paper", alpha=alpha)
    chunk = like_a_cache((1, 256, 64), 6)
    streams, decoded = check_parity(codec, chunk)
    groups = streams.groups[:, np.arange(256) // 32].astype(float)
    minimum, scale = (reference.to_float(streams.pages[:, :1, i]).astype(float) for i in (0, 1))
    element, full = (reference.to_float(bits).astype(float) for bits in (chunk, decoded))
    offset, step = groups[:, :, 0], groups[:, :, 1]
    rest = (element - minimum) / scale * 256 - offset
    magnitude = np.rint(120 * np.log1p(alpha * np.abs(rest / step)) / np.log1p(alpha)).clip(0, 120)
    # from the level to the farther of the two elements that are coded as it, in the logarithm half
    # a magnitude away; levels are stored in parts of 65536, float32 may add a hundredth of a unit
    below, level, above = (
        np.expm1(np.log1p(alpha) * (magnitude + side) / 120) / alpha for side in (-0.5, 0, 0.5)
    )
    farther = np.maximum(level - below, above - level) + 1 / 65536
    bound = scale / 65536 * (256 * step * farther + 0.01) + np.abs(full) * 2.0**-8
    assert (np.abs(full - element) <= bound).all()


def test_mean_of_the_longest_group_near_its_top_is_right(path: str) -> None:
    """One 0, then 32767 ones at 65536/1.015625 = 64527.75 units: the mean of those rounded down is
    64525.03, 252.05 steps of 256; its sum passes 2^31 when it is doubled. The 0 is 252 steps below.
    """
    codec = LynxCodec.from_options(preset="paper", page_tokens=1 << 15, group_tokens=1 << 15)
    chunk = np.full((1, 1 << 15, 64), 0x3F80, np.uint16)
    chunk[0, 0] = 0
    payload, _ = encode(codec, chunk, start=1 << 15)
    span = layout.fixed_streams(chunk.shape, codec.config, is_first=False)[2]
    assert (payload[span.offset : span.end] == 252).all()


@pytest.mark.parametrize("grouping", layout.GROUPINGS)
def test_pages_that_cannot_be_coded_and_first_tokens_come_back_exactly(
    grouping: str, path: str
) -> None:
    codec = LynxCodec.from_options(grouping=grouping, page_tokens=32, group_tokens=32)
    chunk = like_a_cache((2, 128, 64), 8)
    chunk[1, 70, 5] = 0x7FC1
    chunk[0, 3, 9] = 0xFF80
    decoded = decode(codec, encode(codec, chunk)[0], chunk.shape)
    assert np.array_equal(decoded[:, :4], chunk[:, :4])
    if grouping == "channel":
        assert np.array_equal(decoded[1, 64:96], chunk[1, 64:96])
    else:
        assert np.array_equal(decoded[1, :, :32], chunk[1, :, :32])


# -- hostile payloads: memory ends right after every array, so any stray access stops the test


HOSTILE_SHAPE = (2, 70, 67)


def hostile_payload(codec: LynxCodec, seed: int, start: int) -> tuple[U8, int]:
    """Random bytes in every stream, random page flags, sizes that fit."""
    rng = np.random.default_rng(seed)
    fixed = layout.fixed_streams(HOSTILE_SHAPE, codec.config, is_first=start == 0)
    flags = rng.integers(0, 2, fixed[3].nbytes).astype(np.uint8)
    anchor = rng.integers(0, 256, -(-fixed[-1].end // 16) * 16).astype(np.uint8)
    if seed % 2:
        # scales and minima of every kind, special ones more often than chance has them
        special = np.array(
            [0, 0x8000, 1, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7F7F, 0x0080], np.uint16
        )
        pages = anchor[fixed[1].offset : fixed[1].end].view(np.uint16)
        pages[:] = np.where(rng.random(pages.size) < 0.5, rng.choice(special, pages.size), pages)
    elif seed % 4:
        # finite ones: the path that knows no NaN
        pages = anchor[fixed[1].offset : fixed[1].end].view(np.uint16)
        pages[pages & 0x7F80 == 0x7F80] = 0x8000
    anchor[fixed[3].offset : fixed[3].end] = flags
    raw = rng.integers(0, 256, layout.raw_nbytes(flags, HOSTILE_SHAPE, codec.config))
    anchor = np.concatenate([anchor, raw.astype(np.uint8)])
    rest = residual_offset(anchor.size) - anchor.size + codec.residual_nbytes(HOSTILE_SHAPE)
    return np.concatenate([anchor, rng.integers(0, 256, rest).astype(np.uint8)]), anchor.size


@each_option
@pytest.mark.parametrize("seed", range(12))
def test_random_bytes_decode_as_the_reference_does(
    options: dict[str, Any], seed: int, path: str
) -> None:
    codec, start = LynxCodec.from_options(**options), 512 * (seed % 3)
    payload, nbytes = hostile_payload(codec, seed, start)
    spans = layout.streams(payload[:nbytes], HOSTILE_SHAPE, codec.config, is_first=start == 0)
    exact, pages, groups, flags, anchors, raw = (payload[s.offset : s.end] for s in spans)
    geometry = layout.Geometry.of(HOSTILE_SHAPE, codec.config, is_first=start == 0)
    outer, length, channels = geometry.shape
    packed = (outer, length, geometry.half)
    streams = reference.Streams(
        pages.view(np.uint16).reshape(outer, geometry.pages, 2, channels),
        groups.reshape(outer, geometry.groups, 2, channels),
        flags.reshape(outer, geometry.pages),
        anchors.reshape(packed),
        payload[residual_offset(nbytes) :].reshape(packed),
        raw.view(np.uint16),
    )
    first = exact.view(np.uint16).reshape(HOSTILE_SHAPE[0], geometry.exact, HOSTILE_SHAPE[2])
    decoded = decode(codec, payload, HOSTILE_SHAPE, start)
    assert np.array_equal(decoded, reference_decode(codec, streams, first))
    draft = decode_anchor(codec, payload[:nbytes], HOSTILE_SHAPE, start)
    assert np.array_equal(draft, reference_decode(codec, streams, first, full=False))


@each_option
def test_payload_of_another_length_is_rejected(options: dict[str, Any]) -> None:
    codec = LynxCodec.from_options(**options)
    chunk = like_a_cache((2, 40, 5))
    chunk[1, 20, 3] = 0x7FC0
    payload, nbytes = encode(codec, chunk)
    assert payload.size > nbytes
    for size in [*range(payload.size), payload.size + 1, payload.size + 64]:
        with pytest.raises(DamagedFile):
            decode(codec, np.resize(payload, size), chunk.shape)
    for size in [*range(nbytes), nbytes + 1, nbytes + 16, payload.size]:
        with pytest.raises(DamagedFile):
            decode_anchor(codec, np.resize(payload, size), chunk.shape)


@pytest.mark.parametrize("flag", [2, 128, 255])
def test_page_flag_of_another_value_is_rejected(flag: int) -> None:
    codec, chunk = LynxCodec(), like_a_cache((1, 40, 5))
    payload, _ = encode(codec, chunk)
    span = layout.fixed_streams(chunk.shape, codec.config, is_first=True)[3]
    payload[span.offset] = flag
    with pytest.raises(InvalidField, match=f"page flag {flag}, must be 0 or 1"):
        decode(codec, payload, chunk.shape)


def test_page_flag_without_its_elements_is_rejected() -> None:
    codec, chunk = LynxCodec(), like_a_cache((1, 40, 5))
    payload, nbytes = encode(codec, chunk)
    span = layout.fixed_streams(chunk.shape, codec.config, is_first=True)[3]
    payload[span.offset] = 1
    with pytest.raises(InvalidField, match="raw needs bytes"):
        decode_anchor(codec, payload[:nbytes], chunk.shape)


# -- options


def test_options_give_the_configuration_that_the_head_records() -> None:
    config = codec_from_options("lynx", {}).config_dict()
    assert config == {
        "page_tokens": 256,
        "group_tokens": 32,
        "exact_tokens": 4,
        "grouping": "channel",
        "companding": None,
    }
    paper = codec_from_options("lynx", {"preset": "paper", "group_tokens": "16"}).config_dict()
    assert paper["exact_tokens"] == 0
    assert paper["group_tokens"] == 16
    # alpha 1: levels 2^(m/120) - 1, of which magnitudes 0, 60 and 120 are 0, sqrt(2) - 1 and 1
    assert [paper["companding"]["full"][m] for m in (0, 60, 120)] == [0, 27146, 65536]
    assert paper["companding"]["alpha"] == 1.0
    kept = codec_from_options("lynx", {"preset": "paper", "exact_tokens": "4"}).config_dict()
    assert kept["exact_tokens"] == 4
    for written in (config, paper):
        assert codec_from_head("lynx", written).config_dict() == written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": "2"}, "alpha needs preset=paper"),
        ({"preset": "default", "alpha": "2"}, "alpha needs preset=paper"),
        ({"preset": "fast"}, "preset must be one of"),
        ({"preset": "paper", "alpha": "0"}, "alpha must be between"),
        ({"preset": "paper", "alpha": "nan"}, "alpha must be between"),
        ({"page_tokens": "100"}, "no multiple of group_tokens"),
        ({"group_tokens": "0"}, "must hold"),
        ({"exact_tokens": "-1"}, "exact_tokens must be"),
        ({"grouping": "head"}, "grouping must be one of"),
        ({"window": "2"}, "no option 'window'"),
    ],
)
def test_option_that_makes_no_sense_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_from_options("lynx", options)


def test_only_bf16_tensors_with_tokens_are_supported() -> None:
    codec = LynxCodec()
    assert codec.supports("BF16", 2)
    assert not codec.supports("BF16", None)
    assert not codec.supports("F16", 2)
