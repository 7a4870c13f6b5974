"""PN-Mix: kernels give the reference's bits, the oracle's values, and survive hostile payloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import pnmix_oracle as oracle
import pytest
import sample_capture
from cases import U8, U16
from guarded import guarded, guarded_empty
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pnmix_reference import start_below_fp16

import kvz
from kvz.archive import Archive
from kvz.codecs import codec_from_head, codec_from_options
from kvz.codecs.gaac import GaacCodec
from kvz.codecs.pnmix import PnmixCodec
from kvz.codecs.pnmix_chunks import Prepared
from kvz.codecs.pnmix_values import PnmixValueCodec
from kvz.formats.codecs import pnmix as layout
from kvz.formats.codecs.pnmix import KeyConfig, ValueConfig
from kvz.formats.errors import ConfigError, DamagedFile, InvalidField
from kvz.kernels.cpu import pnmix as kernels
from kvz.kernels.cpu import pnmix_values as value_kernels
from kvz.kernels.reference import pnmix as reference
from kvz.kernels.reference import pnmix_fit as fitting

Shape = tuple[int, int, int]
Mask = NDArray[np.bool_]
OPEN = {"sink_tokens": 0, "tail": "coded"}
KEYS: dict[str, KeyConfig] = {
    "H3L1": KeyConfig(pairing="none"),
    "H3L1 by pages": KeyConfig(pairing="none", group_tokens=64, page_tokens=128),
    "H4L2": KeyConfig(pairing="none", high_bits=4, low_bits=2, group_tokens=32, sink_tokens=4),
    "uniform 2 bits": KeyConfig(pairing="none", high_bits=2, low_bits=2, group_tokens=32, **OPEN),
    "min and max": KeyConfig(pairing="none", levels="minmax", group_tokens=16, **OPEN),
    "H8L1 by pages, odd groups": KeyConfig(
        pairing="none", high_bits=8, group_tokens=13, page_tokens=39, sink_tokens=5
    ),
    "8 bits": KeyConfig(pairing="none", high_bits=8, low_bits=8, group_tokens=16, sink_tokens=40),
    "groups of one token": KeyConfig(pairing="none", high_bits=2, group_tokens=1, **OPEN),
}
VALUES: dict[str, ValueConfig] = {
    "2 bits": ValueConfig(),
    "4 bits": ValueConfig(bits=4, group_channels=7, group_tokens=16, **OPEN),
    "8 bits": ValueConfig(bits=8, group_channels=200, group_tokens=13, sink_tokens=3),
    "min and max": ValueConfig(levels="minmax", group_channels=1, group_tokens=8),
}
TOKENS = [1, 7, 8, 9, 31, 128, 129, 300]

each_key_config = pytest.mark.parametrize("config", KEYS.values(), ids=KEYS.keys())
each_value_config = pytest.mark.parametrize("config", VALUES.values(), ids=VALUES.keys())


@pytest.fixture(params=["plain", "vector"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (kernels, value_kernels):
        monkeypatch.setattr(module, "USE_VECTORS", request.param == "vector")
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


def some_salient(shape: Shape, seed: int) -> Mask:
    """None, all, or some of the channels, another number in each head."""
    outer, _, inner = shape
    share = [[0.5], [0.0], [1.0], [0.2]][seed % 4]
    return np.random.default_rng(seed).random((outer, inner)) < share


def exact_ends(
    config: KeyConfig | ValueConfig, start: int, stop: int, tokens: int
) -> tuple[int, int]:
    """The tokens of a chunk before which, and from which on, all are exact."""
    is_exact = np.arange(tokens) < config.sink_tokens
    tail = max(tokens - config.sink_tokens, 0) % config.group_tokens
    if config.tail == "exact" and tail:
        is_exact[-tail:] = True
    coded = np.flatnonzero(~is_exact[start:stop])
    return (int(coded[0]), int(coded[-1]) + 1) if coded.size else (stop - start, stop - start)


def laid_out(*streams: Any) -> bytes:
    payload = b""
    for stream in streams:
        payload += bytes(-len(payload) % 16) + np.ascontiguousarray(stream).tobytes()
    return payload


def encode(codec: Any, chunk: U16, prepared: Prepared, start: int, poison: int = 0xA5) -> U8:
    buffer = np.full(codec.buffer_nbytes(chunk.shape, 2), poison, np.uint8)
    return buffer[: codec.encode(chunk, prepared, buffer, start)]


def decode(codec: Any, payload: U8, prepared: Prepared, shape: Shape, start: int) -> U16:
    out = guarded_empty(shape, np.uint16)
    codec.decode(guarded(payload), prepared, out, start)
    return out


def check_keys(config: KeyConfig, chunk: U16, salient: Mask, start: int = 0, after: int = 0) -> U16:
    """Payload and values are the reference's; ``after`` tokens follow the chunk in its tensor."""
    codec = PnmixCodec(config)
    stop = start + chunk.shape[1]
    prepared = Prepared(stop + after, salient)
    first, last = exact_ends(config, start, stop, stop + after)
    widths = reference.Widths(config.high_bits, config.low_bits)
    sizes = {"group_tokens": config.group_tokens, "page_groups": config.page_groups}
    streams = reference.encode_keys(
        chunk[:, first:last], salient, widths, rule=config.levels, **sizes
    )
    exact = np.concatenate([chunk[:, :first], chunk[:, last:]], axis=1)
    payload = encode(codec, chunk, prepared, start)
    assert payload.tobytes() == laid_out(exact, *streams)
    expected = chunk.copy()
    expected[:, first:last] = reference.decode_keys(streams, salient, widths, last - first, **sizes)
    decoded = decode(codec, payload, prepared, chunk.shape, start)
    assert np.array_equal(decoded, expected)
    if np.isfinite(reference.to_float(chunk)).all():
        assert np.isfinite(reference.to_float(decoded)).all()
    return decoded


def check_values(config: ValueConfig, chunk: U16, start: int = 0, after: int = 0) -> U16:
    codec = PnmixValueCodec(config)
    stop = start + chunk.shape[1]
    prepared = Prepared(stop + after)
    first, last = exact_ends(config, start, stop, stop + after)
    sizes = {"group_tokens": config.group_tokens, "group_channels": config.group_channels}
    streams = reference.encode_values(
        chunk[:, first:last], config.bits, rule=config.levels, **sizes
    )
    exact = np.concatenate([chunk[:, :first], chunk[:, last:]], axis=1)
    payload = encode(codec, chunk, prepared, start)
    assert payload.tobytes() == laid_out(exact, *streams)
    expected = chunk.copy()
    expected[:, first:last] = reference.decode_values(streams, last - first, **sizes)
    decoded = decode(codec, payload, prepared, chunk.shape, start)
    assert np.array_equal(decoded, expected)
    return decoded


# -- parity with the reference


@each_key_config
@pytest.mark.parametrize("tokens", TOKENS)
def test_keys_of_every_shape_are_coded_as_the_reference_does(
    config: KeyConfig, tokens: int, path: str
) -> None:
    for i, inner in enumerate([1, 5, 31, 32, 64, 66, 130]):
        shape = (1 + (i + tokens) % 3, tokens, inner)
        salient = some_salient(shape, i + tokens)
        for start, after in ((0, 0), (0, 70), (config.group_tokens, 20)):
            check_keys(config, like_a_cache(shape, tokens + i), salient, start, after)


@each_value_config
@pytest.mark.parametrize("tokens", TOKENS)
def test_values_of_every_shape_are_coded_as_the_reference_does(
    config: ValueConfig, tokens: int, path: str
) -> None:
    for i, inner in enumerate([1, 5, 64, 66, 100, 130]):
        shape = (1 + (i + tokens) % 3, tokens, inner)
        for start, after in ((0, 0), (0, 70), (config.group_tokens, 20)):
            check_values(config, like_a_cache(shape, tokens + i), start, after)


def hard_chunks() -> dict[str, U16]:
    rng = np.random.default_rng(7)
    shape = (2, 150, 66)
    normal = rng.normal(size=shape).astype(np.float32)
    infinite, nan, large = (bf16_bits(normal) for _ in range(3))
    infinite[0, 17, 3], nan[1, 149, 65], large[1, 60, 1] = 0xFF80, 0x7FFF, 0x4700
    subnormal = rng.integers(0, 128, shape).astype(np.uint16)
    scales = np.exp2(rng.integers(-140, 14, (2, 1, 66)))
    return {
        "constant channels": np.broadcast_to(like_a_cache((2, 1, 66)), shape).copy(),
        "two values": np.where(rng.random(shape) < 0.3, 0x3F80, 0xC040),
        "zeros of both signs": np.where(rng.random(shape) < 0.5, 0, 0x8000),
        "an infinity": infinite,
        "a NaN in the last group": nan,
        "an element of 2^15": large,
        "all too large": np.full(shape, 0x7F7F),
        "nearly 2^15, of both signs": np.where(rng.random(shape) < 0.5, 0x46FF, 0xC6FF),
        "subnormals": subnormal,
        "subnormals of both signs": subnormal | rng.integers(0, 2, shape) << 15,
        "subnormals beside ones": np.where(rng.random(shape) < 0.1, 0x3F80, subnormal),
        "near the least of FP16": bf16_bits(normal * 2.0**-19),
        "every scale": bf16_bits(rng.uniform(-1, 1, shape) * scales),
        "halves of codes": bf16_bits(rng.integers(0, 15, shape) / 2),
    }


@each_key_config
@pytest.mark.parametrize("name", [*hard_chunks(), *cases.awkward_chunks()])
def test_hard_keys_are_coded_as_the_reference_does(config: KeyConfig, name: str, path: str) -> None:
    chunk = {**hard_chunks(), **cases.awkward_chunks()}[name].astype(np.uint16)
    for seed in range(3):
        check_keys(config, chunk, some_salient(chunk.shape, seed))


def test_start_that_a_fit_puts_below_fp16_is_limited(path: str) -> None:
    config = KeyConfig(pairing="none", group_tokens=16, **OPEN)
    chunk, salient = start_below_fp16(), np.ones((1, 20), bool)
    elements = reference.to_float(chunk)[0]
    streams = reference.encode_keys(chunk, salient, reference.Widths(3, 1), group_tokens=16)
    assert streams.scales[0, 0, 0, 0] == 0xFBFF  # -65504
    decoded = reference.to_float(check_keys(config, chunk, salient))[0]
    assert np.abs(decoded - elements).max() <= np.ptp(elements[:, 0]) / 2


@pytest.mark.parametrize("num_far", [1, 60, 102, 512])
def test_sums_over_the_largest_group_with_the_largest_weights_are_exact(num_far: int) -> None:
    """Consecutive tokens far from the others in all channels: weight, code and position are high
    in all of them, as no sums of 32 bits could hold."""
    keys = np.random.default_rng(num_far).normal(size=(1, 1024, 16))
    keys[:, 300 : 300 + num_far] += 100
    config = KeyConfig(pairing="none", high_bits=4, low_bits=4, group_tokens=1024, **OPEN)
    check_keys(config, bf16_bits(keys), np.ones((1, 16), bool))
    check_keys(config, bf16_bits(-keys), np.ones((1, 16), bool))


@each_value_config
@pytest.mark.parametrize("name", [*hard_chunks(), *cases.awkward_chunks()])
def test_hard_values_are_coded_as_the_reference_does(
    config: ValueConfig, name: str, path: str
) -> None:
    check_values(config, {**hard_chunks(), **cases.awkward_chunks()}[name].astype(np.uint16))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_bits_and_configuration_are_coded_as_the_reference_does(data: st.DataObject) -> None:
    group = data.draw(st.integers(1, 20), "group")
    high = data.draw(st.integers(1, 8), "high bits")
    config = KeyConfig(
        pairing="none",
        high_bits=high,
        low_bits=data.draw(st.integers(1, high), "low bits"),
        group_tokens=group,
        sink_tokens=data.draw(st.integers(0, 12), "sinks"),
        tail=data.draw(st.sampled_from(layout.TAILS)),
        levels=data.draw(st.sampled_from(layout.LEVEL_RULES)),
        page_tokens=data.draw(st.none() | st.integers(1, 4).map(lambda n: n * group)),
    )
    shape = tuple(data.draw(st.integers(1, top), "size") for top in (3, 50, 70))
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    rng = np.random.default_rng(seed)
    chunk = like_a_cache(shape, seed)
    if data.draw(st.booleans(), "random bits"):
        lowest, highest = sorted(data.draw(st.integers(0, 255), "exponent") for _ in range(2))
        exponents = rng.integers(lowest, highest + 1, shape)
        chunk = cases.bf16(exponents, rng.integers(0, 256, shape))
    start = group * data.draw(st.integers(0, 2), "start")
    after = data.draw(st.integers(0, 30), "after")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "USE_VECTORS", data.draw(st.booleans(), "vectors"))
        check_keys(config, chunk, some_salient(shape, seed), start, after)


@each_key_config
def test_token_range_of_a_tensor_is_coded_like_its_copy(config: KeyConfig, path: str) -> None:
    codec, tensor = PnmixCodec(config), guarded(like_a_cache((3, 300, 66)))
    prepared = Prepared(300, some_salient(tensor.shape, 4))
    for start, stop in [(0, 13 * 16), (13 * 16, 300), (0, 1)]:
        part, copy = tensor[:, start:stop], tensor[:, start:stop].copy()
        payload = encode(codec, part, prepared, start)
        assert np.array_equal(payload, encode(codec, copy, prepared, start, poison=0))
        assert np.array_equal(part, copy)
        out = guarded_empty(tensor.shape, np.uint16)
        expected = out.copy()
        expected[:, start:stop] = decode(codec, payload, prepared, copy.shape, start)
        codec.decode(payload, prepared, out[:, start:stop], start)
        assert np.array_equal(out, expected)


# -- right values, worked out independently


def test_known_group_gives_the_bytes_worked_out_by_hand(path: str) -> None:
    """Four tokens; channel 0 is salient and has 3 bits, channel 1 has one.

    Channel 0: 0, 1, 2.5, 3.5: positions 0, 1170, 2925, 4095; their sum U is 8190, V 39,698,100,
    n u - U -8190, -3510, 3510, 8190, so distances 27/16, 5/16, 5/16, 27/16: weights 77, 1, 1, 77.
    First start 127.97, step 548.4: codes 0, 2, 5, 7. S(1) 156, S(q) 546, S(qq) 3802, S(u) 319,410,
    S(uq) 2,224,170: det 294,996, cov 172,572,660, step 585, start 2047.5 - 585 * 3.5 = 0. The codes
    stay; 585 * 3.5/4095 = 0.5.
    Channel 1: -2, -1, 3, 4: positions 0, 682, 3412, 4095 (halves to even), codes 0, 0, 1, 1. S(q) =
    S(qq) = 78, S(u) 319,409, S(uq) 318,727: det 6,084, cov 24,807,510, step 4077.5, start 8.7436;
    that is 5.97436 and -1.98719, in FP16 5.97265625 = 45F9 and -1.9873046875 = BFF3.
    Plane 0 of channel 0: bits 0, 0, 1, 1 = 0C; plane 1: 0, 1, 0, 1 = 0A; plane 2: 0, 0, 1, 1 = 0C.
    """
    config = KeyConfig(pairing="none", group_tokens=4, **OPEN)
    codec, prepared = PnmixCodec(config), Prepared(4, np.array([[True, False]]))
    chunk = bf16_bits([[[0, -2], [1, -1], [2.5, 3], [3.5, 4]]])
    payload = encode(codec, chunk, prepared, 0)
    expected = (
        "00" "000000000000000000000000000000"  # flags
        "0000 f3bf 0038 f945" "0000000000000000"  # starts, steps
        "0c 0c" "0000000000000000000000000000"  # low planes of both channels
        "0a 0c" "0000000000000000000000000000"  # high planes of channel 0
    )  # fmt: skip
    assert payload.tobytes() == bytes.fromhex(expected)
    decoded = decode(codec, payload, prepared, chunk.shape, 0)
    assert np.array_equal(decoded[0, :, 0], bf16_bits([0, 1, 2.5, 3.5]))
    assert np.array_equal(decoded[0, :, 1], bf16_bits([-1.984375, -1.984375, 3.984375, 3.984375]))


def test_known_page_gives_the_bytes_worked_out_by_hand(path: str) -> None:
    """Two groups of two tokens in one page, 2 bits: 0, 255 and 51, 85.

    Page: minimum 0, scale 255/255 = 1. Group 0: width 255, start 31.875 -> 32, step 63.75 in units
    of a half -> 127.5 -> 128 (to even), which is 64; codes rne(-0.5) = 0 and rne(223/64) = 3.
    Group 1: width 34, start 55.25 -> 55, step 8.5 -> 17 halves; codes 0 and 4 -> 3.
    """
    config = KeyConfig(
        pairing="none", high_bits=2, low_bits=2, group_tokens=2, page_tokens=4, **OPEN
    )
    codec, prepared = PnmixCodec(config), Prepared(4, np.zeros((1, 1), bool))
    chunk = bf16_bits([[[0], [255], [51], [85]]])
    payload = encode(codec, chunk, prepared, 0)
    expected = (
        "00 00" "0000000000000000000000000000"
        "0000 803f" "000000000000000000000000"  # minimum 0, scale 1
        "20 80 37 11" "000000000000000000000000"
        "02 02 02 02" "000000000000000000000000"  # code 3 of the second token, twice
    )  # fmt: skip
    assert payload.tobytes() == bytes.fromhex(expected)
    decoded = decode(codec, payload, prepared, chunk.shape, 0)
    # 55 + 8.5 * 3 = 80.5
    assert np.array_equal(decoded[0, :, 0], bf16_bits([32, 224, 55, 80.5]))


def test_bytes_between_least_and_greatest_element_are_rounded_outwards(path: str) -> None:
    """51.75 and 84.5, levels minmax: start 51.75 -> 51, step 33.5/3 -> 22.3 -> 23 halves."""
    config = KeyConfig(
        pairing="none",
        high_bits=2,
        low_bits=2,
        group_tokens=2,
        page_tokens=4,
        levels="minmax",
        **OPEN,
    )
    codec, prepared = PnmixCodec(config), Prepared(4, np.zeros((1, 1), bool))
    chunk = bf16_bits([[[0], [255], [51.75], [84.5]]])
    payload = encode(codec, chunk, prepared, 0)
    # of group 0: 0 and 85 = 170 halves
    assert payload[32:36].tolist() == [0, 170, 51, 23]
    decoded = decode(codec, payload, prepared, chunk.shape, 0)
    assert np.array_equal(decoded[0, :, 0], bf16_bits([0, 255, 51, 85.5]))


ORACLE_OPTIONS: list[dict[str, Any]] = [
    {"high_bits": 3, "low_bits": 1, "group_tokens": 16},
    {"high_bits": 4, "low_bits": 2, "group_tokens": 8},
    {"high_bits": 2, "low_bits": 1, "group_tokens": 12, "levels": "minmax"},
]


@pytest.mark.parametrize("options", ORACLE_OPTIONS)
@pytest.mark.parametrize("name", ["a layer of SmolLM2", *hard_chunks()])
def test_levels_and_codes_are_those_of_the_oracle(options: dict[str, Any], name: str) -> None:
    if name == "a layer of SmolLM2":
        with kvz_source() as source:
            found = source.find("layers.7.key")
            assert found is not None
            keys = found[1][0]
    else:
        keys = hard_chunks()[name][:, :40, :11].astype(np.uint16)
    tokens, sinks = keys.shape[1], 3
    config = KeyConfig(pairing="none", sink_tokens=sinks, **options)
    codec, salient = PnmixCodec(config), some_salient(keys.shape, 0)
    salient[0] = False
    prepared = Prepared(tokens, salient)
    payload = encode(codec, keys, prepared, 0)
    decoded = decode(codec, payload, prepared, keys.shape, 0)
    group = options["group_tokens"]
    coded = range(sinks, sinks + (tokens - sinks) // group * group)
    expected, scales = oracle.decoded_keys(keys, salient, options, exact=coded)
    assert np.array_equal(decoded, expected)
    geometry = layout.Geometry.of(keys.shape, config, 0, tokens)
    span = layout.key_streams(geometry, config, prepared.num_high)[3]
    stored = payload[span.offset : span.end].view(np.float16)
    stored = stored.reshape(keys.shape[0], geometry.groups, 2, keys.shape[2])
    for (head, number, channel), (start, step) in scales.items():
        ours = stored[head, number, :, channel].astype(np.float64)
        np.testing.assert_allclose(ours, [start, step], rtol=1e-6, atol=0)


def kvz_source() -> Any:
    from kvz.safetensors_io import SafetensorsFile

    return SafetensorsFile(sample_capture.PATH)


@pytest.mark.parametrize(("levels", "salient"), [("best", 0.0), ("minmax", 0.3), ("minmax", 1.0)])
def test_errors_are_within_half_a_step(levels: str, salient: float, path: str) -> None:
    """What lies beyond the outermost levels of 3 bits is nearer than half a step, too."""
    chunk = like_a_cache((2, 512, 64), 3)
    config = KeyConfig(
        pairing="none", high_bits=4, low_bits=3, group_tokens=64, levels=levels, **OPEN
    )
    mask = np.random.default_rng(0).random((2, 64)) < salient
    decoded = check_keys(config, chunk, mask)
    exact, got = (reference.to_float(x).reshape(2, 8, 64, 64) for x in (chunk, decoded))
    width = exact.max(axis=2) - exact.min(axis=2)
    step = width / np.where(mask, 15, 7)[:, None]
    # scales are rounded by up to 2^-10 of them, starts by 2^-11 of the element, values to BF16
    slack = 1.01 * step / 2 + np.abs(exact).max(axis=2) * (2.0**-8 + 2.0**-10)
    assert (np.abs(got - exact).max(axis=2) <= slack).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_fitted_levels_have_a_smaller_weighted_error_than_the_first_ones(bits: int) -> None:
    keys = reference.to_float(like_a_cache((1, 128, 64), 5))[0]
    salient = np.arange(64) % 2 == 0
    low, high = reference.ends(keys)
    found = fitting.fit(keys, low, high, np.full(64, bits), salient)
    unit = (high - low) / fitting.UNITS
    positions = np.rint((keys - low) / unit).astype(np.int64)
    weights = fitting.token_weights(positions, salient)

    def error(start: Any, step: Any) -> Any:
        codes = np.rint((positions - start) / step).clip(0, 2**bits - 1)
        return (weights[:, None] * (positions - start - step * codes) ** 2).sum(axis=0)

    first = error(*fitting.first_levels(np.full(64, bits)))
    last = error((found.start - low) / unit, found.step / unit)
    assert (last <= first * (1 + 1e-5)).all()
    assert last.sum() < 0.95 * first.sum()


def test_token_that_is_far_in_salient_channels_is_kept_best() -> None:
    """In each salient channel one token is at 8, half of the others near 0 and half near 1."""
    generator = np.random.default_rng(2)
    keys = generator.integers(0, 2, (128, 32)) + generator.normal(0, 0.05, (128, 32))
    keys[17] = 8
    chunk = bf16_bits(keys[None])
    config = KeyConfig(pairing="none", high_bits=2, low_bits=2, group_tokens=128, **OPEN)
    decoded = reference.to_float(check_keys(config, chunk, np.ones((1, 32), bool)))[0]
    uniform = reference.to_float(check_keys(config, chunk, np.zeros((1, 32), bool)))[0]
    assert np.abs(decoded[17] - 8).max() <= 0.05
    assert np.abs(uniform[17] - 8).min() >= 0.9


def test_first_tokens_and_unfinished_tail_are_exact() -> None:
    config = KeyConfig(pairing="none")
    chunk = like_a_cache((2, 32 + 2 * 128 + 41, 64))
    decoded = check_keys(config, chunk, some_salient(chunk.shape, 0))
    same = (decoded == chunk).all(axis=(0, 2))
    assert same[:32].all()
    assert same[-41:].all()
    assert not same[32:-41].any()


def test_groups_with_what_scales_cannot_hold_are_exact_and_the_others_are_not() -> None:
    for name, group in [
        ("an infinity", 0),
        ("a NaN in the last group", 4),
        ("an element of 2^15", 1),
    ]:
        chunk = hard_chunks()[name]
        config = KeyConfig(pairing="none", group_tokens=32, **OPEN)
        decoded = check_keys(config, chunk, np.zeros((2, 66), bool))
        head = 0 if name == "an infinity" else 1
        for other in range(5):
            own = slice(32 * other, 32 * other + 32)
            equal = np.array_equal(decoded[head, own], chunk[head, own])
            assert equal == (other == group)


# -- bits


BITS = [
    ({"salient": 0.5}, 3, 1, 0.5, 128),
    ({"high_bits": 4, "low_bits": 2, "salient": 0.125}, 4, 2, 0.125, 128),
    ({"high_bits": 4, "low_bits": 2, "salient": 0.375}, 4, 2, 0.375, 128),
    ({"high_bits": 2, "low_bits": 2, "salient": 0.0}, 2, 2, 0.0, 128),
    ({"high_bits": 3, "low_bits": 3, "salient": 0.0}, 3, 3, 0.0, 128),
    ({"high_bits": 4, "low_bits": 4, "salient": 0.0, "group_tokens": 32}, 4, 4, 0.0, 32),
    ({"scales": "page", "group_tokens": 64}, 3, 1, 0.5, 64),
]


@pytest.mark.parametrize("tail", ["exact", "coded"])
@pytest.mark.parametrize(("options", "high", "low", "ratio", "group"), BITS)
def test_sections_of_a_file_have_the_bits_that_the_formula_gives(
    tmp_path: Path,
    options: dict[str, Any],
    high: int,
    low: int,
    ratio: float,
    group: int,
    tail: str,
) -> None:
    """32 sinks, and 62 * 128 + 32 tokens more of 2 heads with 64 channels."""
    tokens, heads, inner = 8000, 2, 64
    keys = like_a_cache((heads, tokens, inner)).reshape(1, heads, tokens, inner)
    given = {"preset": "paper", "criterion": "random:1", "rope": "half", "tail": tail, **options}
    source = {"layers.0.key": ("BF16", keys)}
    path = archive_of(tmp_path, source, given)
    with Archive(path) as archive:
        stored = int(archive.index["length"].sum())
    exact = 32 + ((tokens - 32) % group if tail == "exact" else 0)
    per_head = (tokens - exact) * (ratio * high + (1 - ratio) * low) * inner + 16 * exact * inner
    scale_bits = 16 if options.get("scales") == "page" else 32
    per_head += (tokens - exact) / group * scale_bits * inner
    if scale_bits == 16:
        per_head += (tokens - exact) / 1024 * 32 * inner
    bits = per_head / (tokens * inner)
    # besides: short groups at the ends of chunks and short pages, flags, mask, alignment
    assert bits <= 8 * stored / keys.size <= bits + 0.03


def test_bits_at_8000_tokens_are_those_of_the_table(tmp_path: Path) -> None:
    keys = like_a_cache((2, 8000, 64)).reshape(1, 2, 8000, 64)
    table = [(BITS[0][0], 2.31), (BITS[1][0], 2.56), (BITS[2][0], 3.05), (BITS[3][0], 2.31)]
    for number, (options, bits) in enumerate([*table, (BITS[4][0], 3.30), (BITS[6][0], 2.34)]):
        given = {"criterion": "random:1", "rope": "half", "scales": "fp16", "group_tokens": 128}
        given |= options
        folder = tmp_path / str(number)
        folder.mkdir()
        path = archive_of(folder, {"layers.0.key": ("BF16", keys)}, given)
        with Archive(path) as archive:
            assert 8 * int(archive.index["length"].sum()) / keys.size == pytest.approx(
                bits, abs=0.011
            )


def archive_of(folder: Path, tensors: dict[str, Any], options: dict[str, Any]) -> Path:
    from cli_support import write_cache

    write_cache(folder / "c.safetensors", tensors)
    texts = {key: str(value) for key, value in options.items()}
    kvz.compress(
        folder / "c.safetensors", folder / "c.kvz", "pnmix", codec_options=texts, threads=1
    )
    return folder / "c.kvz"


# -- archives


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_archive_of_a_real_capture_is_what_the_codec_makes_of_it(
    tmp_path: Path, preset: str
) -> None:
    path = tmp_path / "c.kvz"
    options = {"preset": preset, "sink_tokens": "4", "group_tokens": "16", "values": "2"}
    kvz.compress(sample_capture.PATH, path, "pnmix", codec_options=options, threads=1)
    assert kvz.verify(path, against=sample_capture.PATH, threads=1).compared is not None
    with kvz_source() as source, Archive(path) as archive:
        codec = codec_from_options("pnmix", options).for_source(source)
        for name in ("layers.3.key", "layers.3.value"):
            bits = source.read_tensor(name)[0]
            bound = codec.for_tensor(name, "BF16", bits.shape, 2)
            assert bound is not None
            prepared = bound.prepare(bound.calibrate(bits, 40), "BF16", bits.shape)
            payload = encode(bound, bits, prepared, 0)
            decoded = decode(bound, payload, prepared, bits.shape, 0)
            assert np.array_equal(archive.read_tensor(name)[0], decoded)
            assert archive.head.codec_of(archive.entry(name)).config == bound.config_dict()
            assert not np.array_equal(decoded, bits)
        for name in source.tensor_names:
            if not name.endswith((".key", ".value")):
                assert np.array_equal(archive.read_tensor(name), source.read_tensor(name))


def test_values_are_exact_unless_asked_otherwise(tmp_path: Path) -> None:
    options = {"sink_tokens": "4", "group_tokens": "16"}
    kvz.compress(sample_capture.PATH, tmp_path / "c.kvz", "pnmix", codec_options=options, threads=1)
    with kvz_source() as source, Archive(tmp_path / "c.kvz") as archive:
        assert archive.head.codec_of(archive.entry("layers.3.value")).name == GaacCodec.name
        value, key = (archive.read_tensor(f"layers.3.{part}") for part in ("value", "key"))
        assert np.array_equal(value, source.read_tensor("layers.3.value"))
        assert not np.array_equal(key, source.read_tensor("layers.3.key"))


def test_a_range_of_tokens_reads_as_the_same_range_of_the_whole(tmp_path: Path) -> None:
    keys = like_a_cache((4, 9000, 64)).reshape(2, 2, 9000, 64)
    options = {"preset": "paper", "criterion": "random:1", "rope": "half"}
    path = archive_of(tmp_path, {"layers.0.key": ("BF16", keys)}, options)
    with Archive(path) as archive:
        assert archive.entry("layers.0.key").num_chunks > 2
        whole = archive.read_tensor("layers.0.key")
    kvz.decompress(path, tmp_path / "part.safetensors", tokens=slice(2500, 8990), threads=1)
    from kvz.safetensors_io import SafetensorsFile

    with SafetensorsFile(tmp_path / "part.safetensors") as part:
        assert np.array_equal(part.read_tensor("layers.0.key"), whole[:, :, 2500:8990])
    # the same mask in both sequences of the batch, and tokens that are exact in every chunk's place
    assert np.array_equal(whole[:, :, :32], keys[:, :, :32])
    tail = (9000 - 32) % 128
    assert np.array_equal(whole[:, :, -tail:], keys[:, :, -tail:])
    assert not np.array_equal(whole[:, :, -tail - 1], keys[:, :, -tail - 1])


# -- hostile payloads and configurations


@pytest.mark.parametrize("part", ["key", "value"])
def test_payload_of_another_length_is_rejected(part: str) -> None:
    codec, prepared, chunk = small(part)
    payload = encode(codec, chunk, prepared, 0)
    for nbytes in [*range(0, payload.size, 37), payload.size - 1]:
        with pytest.raises(DamagedFile):
            decode(codec, payload[:nbytes].copy(), prepared, chunk.shape, 0)
    for extra in (1, 15, 16, 4096):
        longer = np.concatenate([payload, np.zeros(extra, np.uint8)])
        with pytest.raises(InvalidField, match="must have"):
            decode(codec, longer, prepared, chunk.shape, 0)


def small(part: str) -> tuple[Any, Prepared, U16]:
    chunk = like_a_cache((2, 100, 66))
    if part == "key":
        config = KeyConfig(pairing="none", group_tokens=32, sink_tokens=3)
        return PnmixCodec(config), Prepared(100, some_salient(chunk.shape, 0)), chunk
    return PnmixValueCodec(ValueConfig(group_tokens=32, sink_tokens=3)), Prepared(100), chunk


@pytest.mark.parametrize("part", ["key", "value"])
def test_flag_that_is_neither_0_nor_1_is_rejected(part: str) -> None:
    codec, prepared, chunk = small(part)
    payload = encode(codec, chunk, prepared, 0)
    # 3 sinks and 97 mod 32 = 1 token of the tail, of 2 heads with 66 channels
    flags = -(-2 * 4 * 2 * 66 // 16) * 16
    assert payload[flags : flags + 6].tolist() == [0] * 6
    payload[flags + 1] = 2
    with pytest.raises(InvalidField, match="flag 2, must be 0 or 1"):
        decode(codec, payload, prepared, chunk.shape, 0)
    payload[flags + 1] = 1
    with pytest.raises(InvalidField, match="must have"):
        decode(codec, payload, prepared, chunk.shape, 0)


@each_key_config
def test_any_bytes_decode_to_what_the_reference_says(config: KeyConfig, path: str) -> None:
    """Scales may be NaN and infinite, pages anything; nothing outside the arrays is touched."""
    rng = np.random.default_rng(5)
    codec, shape = PnmixCodec(config), (2, 160, 40)
    salient = some_salient(shape, 4)
    prepared = Prepared(160, salient)
    geometry = layout.Geometry.of(shape, config, 0, 160)
    fixed = layout.key_streams(geometry, config, prepared.num_high)
    flags = rng.random((2, geometry.groups)) < 0.2
    length = layout.raw_nbytes(flags.astype(np.uint8).reshape(-1), geometry, config)
    payload = rng.integers(0, 256, -(-fixed[-1].end // 16) * 16 + length).astype(np.uint8)
    payload[fixed[1].offset : fixed[1].end] = flags.reshape(-1)
    decoded = decode(codec, payload, prepared, shape, 0)
    streams = [payload[span.offset : span.end] for span in fixed]
    kind = np.uint16 if config.page_tokens is None else np.uint8
    first, coded = geometry.first, geometry.coded
    expected = reference.decode_keys(
        reference.KeyStreams(
            flags.astype(np.uint8),
            streams[2].view(np.uint16).reshape(2, -1, 2, 40),
            streams[3].view(kind).reshape(2, geometry.groups, 2, 40),
            streams[4].reshape(2, geometry.octets, config.low_bits, 40),
            streams[5],
            payload[payload.size - length :].view(np.uint16),
        ),
        salient,
        reference.Widths(config.high_bits, config.low_bits),
        coded,
        group_tokens=config.group_tokens,
        page_groups=config.page_groups,
    )
    assert np.array_equal(decoded[:, first : first + coded], expected)


def test_mask_of_the_wrong_size_or_with_stray_bits_is_rejected() -> None:
    codec = PnmixCodec(KeyConfig(pairing="half", rotary_dim=10))
    # 12 channels: 5 pairs and 2 channels, 7 bits
    prepared = codec.prepare(bytes([0b0100001, 0b1000000]), "BF16", (2, 9, 12))
    assert np.flatnonzero(prepared.salient[0]).tolist() == [0, 5, 10]
    assert np.flatnonzero(prepared.salient[1]).tolist() == [11]
    with pytest.raises(InvalidField, match="a bit beyond the last pair"):
        codec.prepare(bytes([0, 0x80]), "BF16", (2, 9, 12))
    for section in (b"", b"\0", bytes(3)):
        with pytest.raises(InvalidField, match="mask has"):
            codec.prepare(section, "BF16", (2, 9, 12))
    with pytest.raises(InvalidField, match="rotary_dim"):
        codec.prepare(bytes(2), "BF16", (2, 9, 8))


def test_interleaved_pairs_are_neighbours() -> None:
    codec = PnmixCodec(KeyConfig(pairing="interleaved", rotary_dim=6))
    prepared = codec.prepare(bytes([0b01010]), "BF16", (1, 9, 8))
    assert np.flatnonzero(prepared.salient[0]).tolist() == [2, 3, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "query"}, "role must be key or value"),
        ({"role": None}, "role must be key or value"),
        ({"high_bits": 9}, "high_bits must be 1 to 8"),
        ({"low_bits": 4}, "low_bits must be 1 to 3"),
        ({"low_bits": True}, "low_bits must be int"),
        ({"group_tokens": 0}, "group_tokens must be 1 to 1024"),
        ({"group_tokens": 128.0}, "group_tokens must be int"),
        ({"page_tokens": 100}, "page_tokens must be 128 to 32768"),
        ({"page_tokens": 200}, "no multiple of group_tokens"),
        ({"sink_tokens": -1}, "sink_tokens must be 0 to 1024"),
        ({"tail": "lost"}, "tail must be exact, coded"),
        ({"levels": "mse"}, "levels must be best, minmax"),
        ({"pairing": "unknown"}, "pairing must be half, interleaved, none"),
        ({"pairing": "half", "rotary_dim": 0}, "does not go with"),
        ({"rotary_dim": 63}, "must be even"),
        ({"salient": 1.5}, "salient must be 0 to 1"),
        ({"salient": float("nan")}, "salient must be 0 to 1"),
        ({"criterion": 7}, "criterion must be str"),
        ({"prefill_tokens": 0}, "prefill_tokens must be at least 1"),
        ({"more": 1}, "needs group_tokens"),
    ],
)
def test_configuration_that_makes_no_sense_is_rejected(
    change: dict[str, Any], message: str
) -> None:
    fields = {**KeyConfig(pairing="half", rotary_dim=64).to_dict(), **change}
    with pytest.raises(InvalidField, match=message):
        codec_from_head("pnmix", fields)


@pytest.mark.parametrize("change", [{"bits": 3}, {"group_channels": 0}, {"rotary_dim": 4}])
def test_configuration_of_values_that_makes_no_sense_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match="pnmix config"):
        codec_from_head("pnmix", {**ValueConfig().to_dict(), **change})


@pytest.mark.parametrize("config", [KEYS["H3L1 by pages"], VALUES["4 bits"]])
def test_head_records_the_configuration(config: KeyConfig | ValueConfig) -> None:
    assert codec_from_head("pnmix", config.to_dict()).config_dict() == config.to_dict()


def test_presets_are_the_best_measured_and_that_of_the_paper() -> None:
    common = {"role": "key", "high_bits": 3, "low_bits": 1, "salient": 0.5, "sink_tokens": 32}
    best = {"group_tokens": 64, "page_tokens": 1024, "tail": "coded", "criterion": "query_variance"}
    paper = {"group_tokens": 128, "page_tokens": None, "tail": "exact", "criterion": "qk_norm"}
    assert codec_from_options("pnmix", {}).config_dict().items() >= (common | best).items()
    codec = codec_from_options("pnmix", {"preset": "paper"})
    assert codec.config_dict().items() >= (common | paper).items()
    for group, page in (("100", 1000), ("1024", 1024), ("48", 1008)):
        assert (
            codec_from_options("pnmix", {"group_tokens": group}).config_dict()["page_tokens"]
            == page
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "kivi"}, "preset must be default or paper"),
        ({"scales": "bf16"}, "scales must be fp16 or page"),
        ({"scales": "fp16", "page_tokens": "1024"}, "page_tokens needs scales=page"),
        ({"values": "3"}, "values must be exact, 2, 4, 8"),
        ({"criterion": "entropy"}, "criterion must be qk_norm"),
        ({"criterion": "random:x"}, "criterion must be qk_norm"),
        ({"rope": "quarter"}, "rope must be half or interleaved"),
        ({"rotary_dim": "64"}, "rotary_dim needs rope"),
        ({"low_bits": "5"}, "low_bits must be 1 to 3"),
        ({"bits": "2"}, "no option 'bits'"),
    ],
)
def test_option_that_makes_no_sense_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_from_options("pnmix", options)
