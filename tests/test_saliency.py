"""Masks of PN-Mix: which pairs are salient, and what a capture must say for that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pnmix_oracle as oracle
import pytest
import sample_capture
from numpy.typing import NDArray

import kvz
from kvz.capture_metadata import LayerRecord, encode_metadata, pack_layers
from kvz.codecs import codec_from_options
from kvz.codecs.pnmix import PnmixCodec
from kvz.formats.errors import ConfigError
from kvz.safetensors_io import MemorySource, SafetensorsFile
from kvz.saliency import select

Tensors = dict[str, tuple[str, NDArray[Any]]]
KEY = "layers.0.key"


def f32(values: Any) -> tuple[str, NDArray[Any]]:
    return "F32", np.asarray(values, np.float32).view(np.uint32)


def bf16(values: Any) -> tuple[str, NDArray[Any]]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return "BF16", bits.astype(np.uint16)


def metadata(pairing: Any = "half", rotary_dim: Any = 4, num_layers: int = 1) -> dict[str, str]:
    layers = [LayerRecord("full", num_tokens=8, cumulative_length=8)] * num_layers
    return encode_metadata(
        {
            "identity": {},
            "layers": pack_layers(layers),
            "shard": {},
            "tokens": {},
            "rope": {"pairing": pairing, "rotary_dim": rotary_dim, "parameters": {}},
        }
    )


def salient(
    tensors: Tensors, about: Mapping[str, str] | None = None, name: str = KEY, **options: Any
) -> NDArray[np.bool_]:
    """The mask of a key, bool[outer, pairs]."""
    bound = bind(tensors, about, name, **options)
    array = tensors[name][1]
    outer, inner = array.shape[0] * array.shape[1], array.shape[3]
    section = np.frombuffer(bound.calibrate(array, 0), np.uint8).reshape(outer, -1)
    bits = np.unpackbits(section, axis=1, bitorder="little").astype(bool)
    num_pairs = inner - bound.config.rotary_dim // 2
    assert not bits[:, num_pairs:].any()
    return bits[:, :num_pairs]


def bind(
    tensors: Tensors, about: Mapping[str, str] | None, name: str = KEY, **options: Any
) -> PnmixCodec:
    texts = {"criterion": "qk_norm"} | {key: str(value) for key, value in options.items()}
    source = MemorySource(tensors, metadata() if about is None else about)
    array = tensors[name][1]
    shape = (array.shape[0] * array.shape[1], array.shape[2], array.shape[3])
    bound = codec_from_options("pnmix", texts).for_source(source).for_tensor(name, "BF16", shape, 2)
    assert isinstance(bound, PnmixCodec)
    return bound


def cache(batch: int = 1, heads: int = 2, tokens: int = 8, inner: int = 6) -> Tensors:
    rng = np.random.default_rng(inner)
    return {KEY: bf16(rng.normal(size=(batch, heads, tokens, inner)))}


# -- selection


def test_largest_pairs_are_chosen_and_of_equal_ones_the_first() -> None:
    importance = np.array([[1, 5, 5, 5, 2], [0, 0, 0, 0, 0]], np.float32)
    assert select(importance, 0.4).tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert not select(importance, 0.0).any()
    assert select(importance, 1.0).all()


@pytest.mark.parametrize(("ratio", "count"), [(0.09, 0), (0.1, 1), (0.5, 3), (0.7, 4), (0.9, 5)])
def test_number_of_pairs_is_rounded_with_halves_up(ratio: float, count: int) -> None:
    """Of 5 pairs: 0.45, 0.5, 2.5, 3.5, 4.5."""
    assert select(np.arange(5, dtype=np.float32)[None], ratio).sum() == count


# -- criteria


def test_qk_norm_is_the_product_worked_out_by_hand() -> None:
    """Two kv heads, two query heads each; 3 pairs: (0, 2), (1, 3) and the two channels 4, 5."""
    tensors = {
        **cache(),
        "layers.0.query_pair_norm": f32([[1, 4, 1, 2], [3, 0, 1, 2], [0, 0, 9, 1], [0, 1, 0, 1]]),
        "layers.0.key_pair_norm": f32([[3, 4, 1, 1], [5, 5, 1, 4]]),
    }
    # means of the query heads: 2 2 1 2 and 0 .5 4.5 1; products: 6 8 1 2 and 0 2.5 4.5 4
    assert salient(tensors, salient=0.5).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert salient(tensors, salient=0.25).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]


def test_masks_of_a_real_layer_are_those_of_the_oracle() -> None:
    with SafetensorsFile(sample_capture.PATH) as source:
        codec = codec_from_options("pnmix", {"preset": "paper", "salient": "0.3"}).for_source(
            source
        )
        for layer in (0, 11, 29):
            name = f"layers.{layer}"
            bound = codec.for_tensor(f"{name}.key", "BF16", (3, 40, 64), 2)
            assert bound is not None
            section = np.frombuffer(bound.calibrate(np.empty(0), 0), np.uint8).reshape(3, 4)
            norms = [
                source.read_tensor(f"{name}.{part}_pair_norm").view(np.float32)
                for part in ("query", "key")
            ]
            expected = oracle.mask(norms[0], norms[1], 0.3)
            found = np.unpackbits(section, axis=1, bitorder="little").astype(bool)
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_key_norms_come_from_the_keys_where_the_capture_has_none(pairing: str) -> None:
    tensors = cache(batch=2, heads=2, tokens=9, inner=7)
    keys = (tensors[KEY][1].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    found = salient(tensors, metadata(pairing, 4), criterion="k_norm", salient=0.4)
    pairs = oracle.pair_channels(pairing, 4, 7)
    norms = [np.sqrt((keys[..., c] ** 2).sum(axis=-1)).mean(axis=(0, 2)) for c in pairs]
    expected = oracle.mask(np.ones((2, 5)), np.stack(norms, axis=1), 0.4)
    assert np.array_equal(found, np.concatenate([expected, expected]))


def test_query_variance_weighs_what_varies_within_a_group() -> None:
    """Pairs of one. Channel 0 is large, but constant in groups of 2; channel 1 is not."""
    keys = np.zeros((1, 1, 8, 3))
    keys[..., 0] = [9, 9, -9, -9, 5, 5, 0, 0]
    keys[..., 1] = [1, -1, 1, -1, 1, -1, 1, -1]
    keys[..., 2] = [0.5, -0.5] * 4
    tensors = {KEY: bf16(keys), "layers.0.query_pair_norm": f32([[1, 1, 1]])}
    options = {"criterion": "query_variance", "group_tokens": 2, "sink_tokens": 0, "salient": 0.34}
    about = metadata("none", 0)
    assert salient(tensors, about, **options).tolist() == [[0, 1, 0]]
    # variances 1 and 0.25: from a ratio of 2 of the norms on, the other one
    tensors["layers.0.query_pair_norm"] = f32([[1, 1, 2.1]])
    assert salient(tensors, about, **options).tolist() == [[0, 0, 1]]


def test_magnitude_and_range_choose_single_channels_and_need_no_pairs() -> None:
    keys = np.zeros((1, 1, 4, 4))
    keys[..., 0], keys[..., 1], keys[0, 0, :, 3] = 2, 1.5, [4, -2, 0, 0]
    tensors = {KEY: bf16(keys)}
    for criterion, expected in (("k_magnitude", [1, 0, 0, 0]), ("k_range", [0, 0, 0, 1])):
        found = salient(tensors, {}, criterion=criterion, salient=0.25)
        assert found.tolist() == [expected]


def test_random_masks_depend_on_seed_and_layer_alone() -> None:
    tensors = {**cache(inner=64), "layers.1.key": cache(inner=64)[KEY]}
    about = metadata(num_layers=2)
    options = {"criterion": "random:1"}
    first = salient(tensors, about, **options)
    assert first.sum(axis=1).tolist() == [31, 31]
    assert np.array_equal(first, salient(tensors, about, **options))
    assert not np.array_equal(first, salient(tensors, about, criterion="random:2"))
    assert not np.array_equal(first, salient(tensors, about, "layers.1.key", **options))


def test_none_and_all_need_neither_pairs_nor_queries() -> None:
    assert not salient(cache(), {}, salient=0).any()
    assert salient(cache(), {}, salient=1).all()


def test_each_layer_has_the_pairs_that_the_capture_gives_it() -> None:
    tensors = {**cache(), "layers.1.key": cache()[KEY], "layers.2.key": cache()[KEY]}
    about = metadata(["half", "none", "interleaved"], [4, 0, 2], num_layers=3)
    configs = [bind(tensors, about, f"layers.{i}.key", criterion="k_norm").config for i in range(3)]
    found = [(config.pairing, config.rotary_dim) for config in configs]
    assert found == [("half", 4), ("none", 0), ("interleaved", 2)]


# -- parts of the prompt, padding, damage


def test_prefill_takes_the_statistics_of_the_first_blocks() -> None:
    norms = np.array([[[1, 2, 3, 4]], [[9, 9, 1, 1]], [[5, 5, 90, 80]]], np.float64)
    tensors = {
        KEY: bf16(np.ones((1, 1, 2500, 6))),
        "layers.0.query_pair_norm": f32(np.ones((3, 1, 4))),
        "layers.0.key_pair_norm": f32(norms),
        "attention_mask": ("I64", np.ones((1, 2500), np.uint64)),
    }
    for tokens, expected in ((1024, [0, 0, 1, 1]), (2048, [1, 1, 0, 0])):
        assert salient(tensors, prefill_tokens=tokens).tolist() == [expected]
    # 1024 * (1 2 3 4) + 1024 * (9 9 1 1) + 452 * (5 5 90 80)
    for options in ({}, {"prefill_tokens": 5000}):
        assert salient(tensors, **options).tolist() == [[0, 0, 1, 1]]
    with pytest.raises(ConfigError, match="prefill_tokens must be a multiple of 1024"):
        salient(tensors, prefill_tokens=1500)


def test_blocks_count_by_their_tokens_and_padding_does_not() -> None:
    mask = np.ones((1, 1030), np.uint64)
    mask[:, :1023] = 0
    tensors = {
        KEY: bf16(np.ones((1, 1, 1030, 2))),
        "layers.0.query_pair_norm": f32(np.ones((2, 1, 2))),
        # one token and six: 1/7 (6 0) + 6/7 (0 1.1)
        "layers.0.key_pair_norm": f32([[[6, 0]], [[0, 1.1]]]),
        "attention_mask": ("I64", mask),
    }
    assert salient(tensors, metadata("none", 0)).tolist() == [[0, 1]]


def test_padding_and_values_that_are_not_finite_are_left_out() -> None:
    keys = np.ones((1, 1, 6, 2))
    keys[0, 0, :, 1] = 2
    keys[0, 0, 0] = [1000, 0]
    keys[0, 0, 3] = [np.inf, 2]
    keys[0, 0, 4] = [np.nan, 2]
    mask = np.array([[0, 1, 1, 1, 1, 1]], np.uint64)
    tensors = {KEY: bf16(keys), "attention_mask": ("I64", mask)}
    for criterion in ("k_norm", "k_magnitude"):
        assert salient(tensors, metadata("none", 0), criterion=criterion).tolist() == [[0, 1]]
    keys[0, 0, 5] = [1.5, -1]
    tensors[KEY] = bf16(keys)
    assert salient(tensors, metadata("none", 0), criterion="k_range").tolist() == [[0, 1]]


def test_pair_whose_statistics_are_not_finite_is_not_salient() -> None:
    tensors = {
        **cache(heads=1),
        "layers.0.query_pair_norm": f32([[np.nan, np.inf, 1, 2]]),
        "layers.0.key_pair_norm": f32([[1, 1, 1, 1]]),
    }
    assert salient(tensors).tolist() == [[0, 0, 1, 1]]


def test_queries_of_the_file_stand_in_for_their_norms() -> None:
    tensors = {**cache(heads=1), "layers.0.query": bf16([[[[3, 0, 4, 1, 2, 0]] * 3] * 2])}
    tensors["layers.0.key_pair_norm"] = f32([[1, 1, 1, 1]])
    # norms 5, 1, 2, 0
    assert salient(tensors).tolist() == [[1, 0, 1, 0]]


# -- errors


def test_capture_without_queries_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"queries of layers\.0\.key .*kvz capture .*=k_norm"):
        salient(cache())
    assert salient(cache(), criterion="k_norm").sum() == 4


@pytest.mark.parametrize("about", [{}, metadata("unknown", 0)])
def test_capture_that_does_not_say_its_pairs_is_refused(about: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"nothing says how layers\.0\.key was rotated.*rope="):
        salient(cache(), about, criterion="k_norm")
    given = bind(cache(), about, criterion="k_norm", rope="interleaved").config
    assert (given.pairing, given.rotary_dim) == ("interleaved", 6)
    given = bind(cache(), about, criterion="k_norm", rope="half", rotary_dim=2).config
    assert (given.pairing, given.rotary_dim) == ("half", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope": "interleaved"}, "rope=interleaved with rotary_dim 4 contradicts the capture"),
        ({"rope": "half", "rotary_dim": 6}, "rotary_dim 6 contradicts the capture"),
    ],
)
def test_option_that_contradicts_the_capture_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        salient(cache(), criterion="k_norm", **options)
    assert salient(cache(), criterion="k_norm", rope="half", rotary_dim=4).any()


def test_rotation_of_more_channels_than_a_head_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads of 6 channels, of which 8 cannot be pairs"):
        salient(cache(), metadata("half", 8), criterion="k_norm")
    with pytest.raises(ConfigError, match="heads of 7 channels, of which 7 cannot be pairs"):
        salient(cache(inner=7), {}, criterion="k_norm", rope="half")


def test_keys_with_heads_after_tokens_are_refused() -> None:
    keys = bf16(np.ones((1, 9, 2, 6)))
    source = MemorySource({KEY: keys}, {})
    codec = codec_from_options("pnmix", {"criterion": "k_norm", "rope": "half"})
    with pytest.raises(ConfigError, match=r"is \[1, 9, 2, 6\]: pairs of channels need axes batch"):
        codec.for_source(source).for_tensor(KEY, "BF16", (1, 9, 12), 1)


def test_statistics_of_other_heads_are_refused() -> None:
    tensors = {
        **cache(heads=2),
        "layers.0.query_pair_norm": f32(np.ones((6, 4))),
        "layers.0.key_pair_norm": f32(np.ones((3, 4))),
    }
    with pytest.raises(ConfigError, match="of 3 heads with 4 pairs, the tensor has 2 with 4"):
        salient(tensors)


def test_statistics_of_the_whole_prompt_know_no_prefill() -> None:
    tensors = {
        **cache(heads=1),
        "layers.0.query_pair_norm": f32(np.ones((1, 4))),
        "layers.0.key_pair_norm": f32(np.ones((1, 4))),
    }
    with pytest.raises(ConfigError, match="capture it again with kvz capture"):
        salient(tensors, prefill_tokens=1024)


def test_calibration_of_masks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="masks are made while a capture is compressed"):
        kvz.calibrate([sample_capture.PATH], tmp_path / "b.json", "pnmix")
