"""Uniform quantisers and codecs as schemes: decoded values and bits, worked out here."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import bf16, small_cache, write_cache
from numpy.typing import NDArray

import kvz
from kvz.capture_metadata import LayerRecord, encode_metadata, pack_layers
from kvz.formats.errors import ConfigError
from kvz.formats.ids import CODEC_NAMES
from kvz.quality import schemes as schemes_module
from kvz.quality.cache_file import CacheFile
from kvz.quality.schemes import (
    DEFAULT_SCHEMES,
    PRESETS,
    UniformScheme,
    parse_scheme,
    register_scheme,
    scheme_names,
)
from kvz.quality.tensor_error import TensorError
from kvz.quality.uniform import UniformConfig, decode

TOKENS = 70


def oracle(x: NDArray[np.float32], config: UniformConfig) -> NDArray[np.float32]:
    """Group by group, element by element; not yet rounded to BF16."""
    outer, tokens, inner = x.shape
    exact = min(config.exact_tokens, tokens)
    groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for o, t, c in itertools.product(range(outer), range(exact, tokens), range(inner)):
        place = {
            "channel": (o, c, (t - exact) // config.group),
            "token": (o, t, c // config.group),
            "tensor": (),
        }[config.axis]
        groups.setdefault(place, []).append((o, t, c))
    out = x.copy()
    kept = np.float16 if config.scales == "float16" else bfloat16
    for members in groups.values():
        values = np.array([x[m] for m in members])
        low = np.float32(kept(values.min()))
        step = np.float32(kept((values.max() - low) / np.float32(2**config.bits - 1)))
        for member, value in zip(members, values, strict=True):
            code = 0 if step == 0 else np.clip(np.rint((value - low) / step), 0, 2**config.bits - 1)
            out[member] = low + step * np.float32(code)
    return out


def bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to the nearest BF16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return rounded.astype(np.uint32).view(np.float32)


def as_tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("scales", ["float16", "bfloat16"])
@pytest.mark.parametrize("exact_tokens", [0, 3])
@pytest.mark.parametrize(("axis", "group"), [("channel", 16), ("token", 8), ("tensor", 1)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantiser_agrees_with_the_formulae(
    bits: int, axis: str, group: int, exact_tokens: int, scales: str
) -> None:
    config = UniformConfig(bits, axis, group, exact_tokens, scales)
    x = as_tensor(bf16((2, 37, 20), seed=bits))
    got = decode(x, config)
    assert got.dtype == torch.bfloat16
    expected = bfloat16(oracle(x.float().numpy(), config))
    np.testing.assert_array_equal(got.float().numpy(), expected)
    assert torch.equal(got[:, :exact_tokens], x[:, :exact_tokens])


def test_bits_count_codes_scales_and_exact_tokens() -> None:
    # channel: 3 groups of 32, 32 and 2 of 66 coded tokens for each of 2 x 5 channels
    config = UniformConfig(3, "channel", 32, 4)
    nbytes = -(-2 * 66 * 5 * 3 // 8) + 2 * 5 * 3 * 4 + 2 * 4 * 5 * 2
    assert config.stored_nbytes((2, TOKENS, 5), 2) == nbytes
    # token: 5 channels are a group of 4 and one of 1
    config = UniformConfig(4, "token", 4)
    assert config.stored_nbytes((2, TOKENS, 5), 2) == 2 * TOKENS * 5 // 2 + 2 * TOKENS * 2 * 4
    assert UniformConfig(8, "tensor").stored_nbytes((2, TOKENS, 5), 2) == 2 * TOKENS * 5 + 4
    assert UniformConfig(8, "tensor", exact_tokens=99).stored_nbytes((2, 3, 5), 2) == 2 * 3 * 5 * 2


def test_constant_groups_come_back_exactly_and_empty_tensors_stay_empty() -> None:
    x = torch.full((1, 40, 3), 1.375, dtype=torch.bfloat16)
    assert torch.equal(decode(x, UniformConfig(4, "channel")), x)
    for axis in ("channel", "token", "tensor"):
        assert decode(x[:, :0], UniformConfig(4, axis)).shape == (1, 0, 3)
        assert torch.equal(decode(x, UniformConfig(4, axis, exact_tokens=50)), x)


def test_range_beyond_the_scales_is_refused() -> None:
    x = torch.tensor([[[1e5], [0.0]]], dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="scales=bfloat16"):
        decode(-x, UniformConfig(4, "channel"))
    assert torch.isfinite(decode(-x, UniformConfig(4, "channel", scales="bfloat16"))).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "is none of bf16, uniform, polar, int8-channel"),
        ("uniform:bits=4", "needs bits and axis"),
        ("uniform:bits=4,axis=channel,size=3", "no option 'size'"),
        ("uniform:bits=4,axis=row", "axis must be channel, token, tensor"),
        ("uniform:bits=9,axis=token", "bits must be 1 to 8"),
        ("uniform:bits=x,axis=token", "invalid literal"),
        ("int4-token:group=0", "group >= 1"),
        ("int4-token:scales=float8", "scales must be"),
        ("int4-token:values=5", "values must be same, exact, 2, 4, 8"),
        ("int4-token:group", "must be KEY=VALUE"),
        ("int4-token:group=8,group=16", "each key once"),
        ("bf16:bits=16", "takes no options"),
        ("polar:angle=4", "no option 'angle'"),
        ("polar:angle_bits=0", "bits must be 1 to 8"),
        ("polar:group=x", "invalid literal"),
        ("gaac:detail=anchor", "progressive codec"),
        ("lynx:detail=half", "detail must be one of full, anchor"),
        ("lynx:nothing=1", "has no option 'nothing'"),
    ],
)
def test_schemes_without_sense_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scheme(spec)


def test_options_replace_those_of_a_preset() -> None:
    scheme = parse_scheme("kivi-2:group=64")
    assert isinstance(scheme, UniformScheme)
    assert scheme.key == UniformConfig(2, "channel", 64, 32)
    assert scheme.value == UniformConfig(2, "token", 64, 32)
    exact_values = parse_scheme("kivi-2:values=exact")
    assert isinstance(exact_values, UniformScheme)
    assert exact_values.value is None
    same = parse_scheme("int4-channel:exact_tokens=4")
    assert isinstance(same, UniformScheme)
    assert same.key == same.value == UniformConfig(4, "channel", 32, 4)


def test_every_name_makes_a_scheme_that_carries_it() -> None:
    for spec in (*DEFAULT_SCHEMES, *PRESETS, *CODEC_NAMES):
        assert parse_scheme(spec).name == spec
    assert {spec.partition(":")[0] for spec in DEFAULT_SCHEMES} <= set(scheme_names())


def test_another_kind_of_scheme_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes_module, "_FACTORIES", dict(schemes_module._FACTORIES))
    register_scheme("mine", lambda name, options: UniformScheme(name, None, None))
    assert parse_scheme("mine:a=b").name == "mine:a=b"
    for taken in ("mine", "bf16", "kivi-2", "gaac"):
        with pytest.raises(ConfigError, match="exists already"):
            register_scheme(taken, lambda name, options: UniformScheme(name, None, None))


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Keys and values of three layers, and tensors that do not count."""
    tensors = small_cache(num_tokens=600)
    tensors["next_token_logits"] = ("BF16", bf16((1, 5000), seed=9))
    tensors["layers.0.query"] = ("BF16", bf16((1, 4, 300, 16), seed=8))
    return write_cache(tmp_path / "c.safetensors", tensors, {"kvz": "{}"})


@pytest.mark.parametrize("spec", ["lynx", "lynx:detail=anchor", "lynx:preset=paper", "gaac", "raw"])
def test_codecs_decode_as_their_archive_does_and_bits_are_its_bytes(
    capture: Path, tmp_path: Path, spec: str
) -> None:
    name, _, option = spec.partition(":")
    anchor = option == "detail=anchor"
    options = dict([option.split("=")]) if option and not anchor else {}
    # the same keys and values, and nothing else, in an archive of their own
    alone = write_cache(tmp_path / "kv.safetensors", _keys_and_values(), {"kvz": "{}"})
    kvz.compress(alone, tmp_path / "kv.kvz", name, codec_options=options)
    num_elements = 6 * 2 * 600 * 16
    with CacheFile(capture) as cache, parse_scheme(spec).store(cache, tmp_path) as stored:
        with kvz.open(tmp_path / "kv.kvz") as archive:
            view = archive.anchor() if anchor else archive
            for tensor in cache.tensors:
                got = stored.read(tensor.name)
                assert (got.dtype, tuple(got.shape)) == (torch.bfloat16, (1, 2, 600, 16))
                bits = got.view(torch.int16).numpy().view(np.uint16)
                np.testing.assert_array_equal(bits, view.read_tensor(tensor.name))
        measured = stored.bits
    nbytes = os.path.getsize(tmp_path / "kv.kvz")
    if anchor:
        # 4 of 8 bits are in residual sections, each with a frame and padding
        assert measured.total == pytest.approx(8 * nbytes / num_elements - 4, abs=0.2)
        assert measured.total < 8 * nbytes / num_elements - 4
    else:
        # at most one alignment gap at the end differs, and the other codec's entry in the head
        assert 8 * nbytes / num_elements == pytest.approx(
            measured.total, abs=8 * 200 / num_elements
        )
    assert measured.key == pytest.approx(measured.value, rel=0.02)
    assert max(measured.key, measured.value) < measured.total


def _keys_and_values() -> dict[str, tuple[str, NDArray[np.uint16]]]:
    tensors = small_cache(num_tokens=600)
    del tensors["input_ids"]
    return tensors


def test_exact_scheme_has_sixteen_bits(capture: Path, tmp_path: Path) -> None:
    with CacheFile(capture) as cache, parse_scheme("bf16").store(cache, tmp_path) as stored:
        assert (stored.bits.key, stored.bits.value, stored.bits.total) == (16, 16, 16)
        assert [tensor.name for tensor in cache.tensors] == [
            f"layers.{i}.{part}" for i in range(3) for part in ("key", "value")
        ]


def test_bits_of_different_keys_and_values_are_told_apart(capture: Path, tmp_path: Path) -> None:
    with CacheFile(capture) as cache:
        stored = parse_scheme("kivi-4:exact_tokens=0,values=2").store(cache, tmp_path)
        # keys: 4 bits and 5 groups of 4 bytes for 600 tokens; values: 2 bits, 4 bytes for 16
        assert stored.bits.key == pytest.approx(4 + 32 * 5 / 600)
        assert stored.bits.value == pytest.approx(2 + 32 / 16)
        assert stored.bits.total == pytest.approx((stored.bits.key + stored.bits.value) / 2)


def rotated_capture(path: Path, key: NDArray[np.float32], pairing: str, rotary_dim: int) -> Path:
    """One layer; values are the keys."""
    rope = {"pairing": pairing, "rotary_dim": rotary_dim, "parameters": {}}
    layers = pack_layers(
        [LayerRecord("full", num_tokens=key.shape[2], cumulative_length=key.shape[2])]
    )
    document = {"identity": {}, "layers": layers, "shard": {}, "tokens": {}, "rope": rope}
    stored = ("BF16", (key.view(np.uint32) >> 16).astype(np.uint16))
    tensors = {"layers.0.key": stored, "layers.0.value": stored}
    return write_cache(path, tensors, encode_metadata(document))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_polar_keys_are_the_ones_worked_out_by_hand(tmp_path: Path, pairing: str) -> None:
    """Angles 0, 90, 180 and 180 degrees have levels 0, 60, 120, 180; radii 2, 4, 2, 8 are 2 to 8
    in steps of 2. The second pair is always (3, 0)."""
    x = np.float32([[2, 3, 0, 0], [0, 3, 4, 0], [-2, 3, 0, 0], [-8, 3, 0, 0]])
    # 90 degrees are halfway, to the even level 2
    expected = np.float32([[2, 3, 0, 0], [-2, 3, 12**0.5, 0], [-2, 3, 0, 0], [-8, 3, 0, 0]])
    # after an exact token whose radius and angle are other than those of the group
    x, expected = (np.vstack([np.float32([[100, -100, 7, 1]]), part]) for part in (x, expected))
    order = [0, 1, 2, 3] if pairing == "half" else [0, 2, 1, 3]
    path = rotated_capture(tmp_path / "c", x[None, None][..., order].copy(), pairing, 4)
    with CacheFile(path) as cache:
        stored = parse_scheme("polar:exact_tokens=1,group=4").store(cache, tmp_path)
        key = stored.read("layers.0.key")
        assert key.dtype == torch.bfloat16
        decoded = key.float().numpy()[0, 0]
        np.testing.assert_allclose(decoded, expected[:, order], atol=0.02)
        assert (decoded[0] == x[0, order]).all()
        assert torch.equal(stored.read("layers.0.value"), cache.read("layers.0.value"))
        # two codes of 2 bits for two channels; two scales of 32 bits for 4 tokens of a pair
        assert stored.bits.key == pytest.approx((4 * (2 + 8) + 16) / 5)
        assert stored.bits.value == 16


@pytest.mark.parametrize(("pairing", "rotary_dim"), [("none", 0), ("half", 2), ("unknown", 0)])
def test_polar_needs_to_know_all_pairs(tmp_path: Path, pairing: str, rotary_dim: int) -> None:
    path = rotated_capture(tmp_path / "c", np.ones((1, 1, 5, 4), np.float32), pairing, rotary_dim)
    with CacheFile(path) as cache, pytest.raises(ConfigError, match=r"polar: needs .* all 4 chan"):
        parse_scheme("polar").store(cache, tmp_path)


def test_file_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "x.safetensors", {"weight": ("BF16", bf16((1, 2, 3, 4)))})
    with pytest.raises(ConfigError, match="no key or value tensor"):
        CacheFile(path)


def test_tensor_error_is_relative_to_all_tensors_together() -> None:
    error = TensorError()
    error.add(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]]))
    error.add(torch.tensor([[0.0, 5.0]]), torch.tensor([[-1.0, 5.0]]))
    assert error.nmse == pytest.approx(1.25 / 50)
    assert error.max_error == 1.0


@pytest.mark.parametrize(
    ("exact", "decoded", "nmse", "largest"),
    [
        ([float("nan"), 2.0], [float("nan"), 1.0], 0.25, 1.0),
        ([float("inf"), 2.0], [float("inf"), 2.0], 0.0, 0.0),
        ([float("inf"), 2.0], [9.0, 2.0], float("inf"), float("inf")),
        ([1.0, 2.0], [float("nan"), 2.0], float("inf"), float("inf")),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([0.0, 0.0], [0.0, 1.0], float("inf"), 1.0),
    ],
)
def test_elements_that_are_not_finite_must_come_back(
    exact: list[float], decoded: list[float], nmse: float, largest: float
) -> None:
    error = TensorError()
    error.add(torch.tensor([exact]), torch.tensor([decoded]))
    assert (error.nmse, error.max_error) == (nmse, largest)
