"""Every cache layer class of the installed transformers: exact, or refused by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvz.formats.errors import IdentityMismatch, InvalidField, UnsupportedCache
from kvz.layers.table import CLASS_KINDS, PARTS, layer_kind, put_layer, read_kind, read_layer

cache_utils = pytest.importorskip("transformers.cache_utils")

_WINDOW = 8
_COMPRESSION = SimpleNamespace(
    sliding_window=_WINDOW,
    compress_rates={"heavily_compressed_attention": 4, "compressed_sparse_attention": 4},
)


def _modelling_files() -> Iterator[str]:
    """Modelling files that define cache layers of their own."""
    models = Path(inspect.getfile(cache_utils)).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        if "_layer_type = " in path.read_text():
            yield f"transformers.models.{path.parent.name}.{path.stem}"


def _all_classes() -> dict[str, type]:
    """Concrete layer classes of transformers by name."""
    for module in _modelling_files():
        importlib.import_module(module)
    roots = ["CacheLayerMixin", "LinearAttentionCacheLayerMixin"]
    pending = [getattr(cache_utils, name) for name in roots if hasattr(cache_utils, name)]
    found: dict[str, type] = {}
    while pending:
        base = pending.pop()
        for subclass in base.__subclasses__():
            if subclass.__module__.startswith("transformers."):
                pending.append(subclass)
                if not inspect.isabstract(subclass):
                    found[subclass.__name__] = subclass
    return found


CLASSES = _all_classes()


def _random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).bfloat16()


def _attention_step(layer: Any, num_tokens: int, seed: int) -> list[torch.Tensor]:
    key, value = _random(seed, 2, 2, num_tokens, 16), _random(seed + 1, 2, 2, num_tokens, 16)
    return [t.clone() for t in layer.update(key, value)]


def _latent_step(layer: Any, num_tokens: int, seed: int) -> list[torch.Tensor]:
    key, value = _random(seed, 2, 1, num_tokens, 24), _random(seed + 1, 2, 1, num_tokens, 0)
    return [t.clone() for t in layer.update(key, value)]


def _linear_step(layer: Any, num_tokens: int, seed: int) -> list[torch.Tensor]:
    conv = layer.update_conv_state(_random(seed, 2, 12, 4 if seed == 0 else num_tokens))
    # bits that BF16 does not have
    state = _random(seed, 2, 3, 5, 7).float() * 1.1
    return [conv.clone(), layer.update_recurrent_state(state).clone()]


def _indexed_step(layer: Any, num_tokens: int, seed: int) -> list[torch.Tensor]:
    layer.indexer_position_ids = torch.arange(3 * num_tokens).view(3, 1, num_tokens)
    index = layer.update_indexer(_random(seed, 2, num_tokens, 6)).clone()
    return [*_attention_step(layer, num_tokens, seed), index]


def _block_step(layer: Any, num_tokens: int, seed: int) -> list[torch.Tensor]:
    index = layer.update_index(_random(seed, 2, 1, num_tokens, 6)).clone()
    return [*_attention_step(layer, num_tokens, seed), index]


def _hybrid_step(layer: Any, num_tokens: int, seed: int) -> list[torch.Tensor]:
    return _attention_step(layer, num_tokens, seed) + _linear_step(layer, num_tokens, seed)


def _compressed_step(layer: Any, num_tokens: int, seed: int) -> list[torch.Tensor]:
    key = _random(seed, 2, 1, num_tokens, 16)
    out = [t.clone() for t in layer.update(key, key)]
    for i, name in enumerate(layer.entry_count):
        kv, gate = _random(seed + i, 2, num_tokens, 8), _random(seed + i + 9, 2, num_tokens, 8)
        chunk, chunk_gate, first = layer.store_compression_weights(name, kv, gate)
        windows = chunk.view(2, -1, 4, 8)
        if hasattr(layer, "overlap_kv") and windows.shape[1]:
            gates = chunk_gate.view(2, -1, 4, 8)
            prior = layer.update_overlap_state(name, windows, gates, 4)
            out += [t.clone() for t in prior if t is not None]
        out.append(layer.update_compressor_states(name, windows.mean(dim=2)).clone())
        out.append(torch.tensor(first))
    return out


Step = Callable[[Any, int, int], list[torch.Tensor]]
# class: how to make one and how to run it on
DRIVERS: dict[str, tuple[dict[str, Any], Step]] = {
    "DynamicLayer": ({}, _attention_step),
    "DynamicSlidingWindowLayer": ({"sliding_window": _WINDOW}, _attention_step),
    "DynamicIndexedLayer": ({}, _indexed_step),
    "MiniMaxM3VLSparseCacheLayer": ({}, _block_step),
    "LinearAttentionLayer": ({}, _linear_step),
    "LinearAttentionAndFullAttentionLayer": ({}, _hybrid_step),
    "LinearAttentionAndSlidingWindowAttentionLayer": ({"sliding_window": _WINDOW}, _hybrid_step),
    "DeepseekV4HCACache": ({"config": _COMPRESSION}, _compressed_step),
    "DeepseekV4CSACache": ({"config": _COMPRESSION}, _compressed_step),
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": (
        {"sliding_window": _WINDOW},
        _attention_step,
    ),
    "StaticLayer": ({"max_cache_len": 40}, _attention_step),
    "StaticSlidingWindowLayer": (
        {"max_cache_len": 40, "sliding_window": _WINDOW},
        _attention_step,
    ),
    "StaticIndexedLayer": ({"max_cache_len": 40}, _indexed_step),
    "MiniMaxM3VLSparseStaticCacheLayer": ({"max_cache_len": 40}, _block_step),
    "LinearAttentionAndStaticFullAttentionLayer": ({"max_cache_len": 40}, _hybrid_step),
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": (
        {"max_cache_len": 40, "sliding_window": _WINDOW},
        _hybrid_step,
    ),
    "Fp8QuantizedLayer": ({}, _attention_step),
    "HQQQuantizedLayer": ({"axis_key": 1, "axis_value": 1, "q_group_size": 16}, _attention_step),
}
# Classes that hold what kvz does not take apart.
REFUSED = {
    "QuantoQuantizedLayer",
    "UnlimitedOcrStaticReferenceSlidingWindowLayer",
    # of transformers 4.56
    "SlidingWindowLayer",
    "ChunkedSlidingLayer",
}
DRIVEN = sorted(set(DRIVERS) & set(CLASSES))


def _make(name: str) -> Any:
    if name == "HQQQuantizedLayer":
        pytest.importorskip("hqq", reason="needs: pip install hqq")
    layer = CLASSES[name](**DRIVERS[name][0])
    counter = getattr(layer, "cumulative_length", None)
    if name.startswith("Static") and not isinstance(counter, torch.Tensor):
        pytest.skip("this transformers does not count the tokens of a static layer")
    return layer


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every attribute of a layer, tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield name, (value.dtype, tuple(value.shape), bytes(data.numpy().tobytes()))
    elif isinstance(value, dict):
        for key in value:
            yield from _flat(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for i, item in enumerate(value):
            yield from _flat(item, f"{name}.{i}")
    else:
        yield name, value


def _restored(name: str, layer: Any) -> Any:
    record, tensors = read_layer(layer, 0, torch.bfloat16)
    fresh = _make(name)
    put_layer(fresh, record, {part: t.clone().contiguous() for part, t in tensors.items()})
    return fresh


def test_every_layer_class_is_known_or_refused_by_name() -> None:
    assert set(CLASSES) >= {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"}
    for name, layer_class in CLASSES.items():
        layer = layer_class.__new__(layer_class)
        if name in REFUSED:
            with pytest.raises(UnsupportedCache, match=f"cache layer 3 is a {name}"):
                layer_kind(layer, 3)
        else:
            assert name in DRIVERS, f"{name} is new"
            assert layer_kind(layer, 3) == CLASS_KINDS[name]


def test_every_kind_with_parts_belongs_to_a_class() -> None:
    assert set(CLASS_KINDS.values()) | {"evicted"} == set(PARTS)
    assert set(DRIVERS) | {"DummyLayer"} == set(CLASS_KINDS)


@pytest.mark.parametrize("lengths", [(), (1,), (3, 2), (8,), (9,), (13, 1, 1), (21,)])
@pytest.mark.parametrize("name", DRIVEN)
def test_restored_layer_is_the_layer(name: str, lengths: tuple[int, ...]) -> None:
    layer, step = _make(name), DRIVERS[name][1]
    for i, num_tokens in enumerate(lengths):
        step(layer, num_tokens, 10 * i)
    restored = _restored(name, layer)
    assert dict(_flat(vars(restored))) == dict(_flat(vars(layer)))
    for seed in (50, 60, 70):
        ours, live = step(restored, 1, seed), step(layer, 1, seed)
        assert list(_flat(ours)) == list(_flat(live))
    assert dict(_flat(vars(restored))) == dict(_flat(vars(layer)))


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_latent_keys_without_values_come_back(num_tokens: int) -> None:
    layer = cache_utils.DynamicLayer()
    _latent_step(layer, num_tokens, 0)
    record, tensors = read_layer(layer, 0, torch.bfloat16)
    assert record.state == {
        "key": ["BF16", [2, 1, num_tokens, 24]],
        "value": ["BF16", [2, 1, num_tokens, 0]],
    }
    assert set(tensors) == {"key"}
    restored = _restored("DynamicLayer", layer)
    assert list(_flat(_latent_step(restored, 1, 9))) == list(_flat(_latent_step(layer, 1, 9)))


def test_keys_and_values_of_different_widths_are_standard() -> None:
    layer = cache_utils.DynamicLayer()
    layer.update(_random(0, 1, 2, 5, 24), _random(1, 1, 2, 5, 16))
    record, tensors = read_layer(layer, 0, torch.bfloat16)
    assert record.state is None
    assert tensors["key"].shape[3] == 24
    assert tensors["value"].shape[3] == 16


def test_a_dtype_that_is_not_the_models_is_described() -> None:
    layer = cache_utils.DynamicLayer()
    _attention_step(layer, 5, 0)
    record, _ = read_layer(layer, 0, torch.float32)
    assert record.state == {"key": ["BF16", [2, 2, 5, 16]], "value": ["BF16", [2, 2, 5, 16]]}


def test_an_attribute_that_kvz_does_not_know_is_not_dropped() -> None:
    layer = cache_utils.DynamicLayer()
    _attention_step(layer, 5, 0)
    layer.added_by_a_newer_release = {"here": [_random(0, 3)]}
    with pytest.raises(UnsupportedCache, match=r"layer 4 \(DynamicLayer\).* added_by_a_newer"):
        read_layer(layer, 4, torch.bfloat16)


def test_an_initialised_layer_without_tokens_is_empty_again() -> None:
    layer = cache_utils.DynamicLayer()
    _attention_step(layer, 1, 0)
    layer.keys, layer.values = torch.tensor([]), torch.tensor([])
    record, tensors = read_layer(layer, 0, torch.bfloat16)
    assert (record.num_tokens, record.state, tensors) == (0, None, {})


def test_keys_of_another_rank_are_refused() -> None:
    layer = cache_utils.DynamicLayer()
    layer.keys = layer.values = torch.zeros(2, 5, 16)
    with pytest.raises(UnsupportedCache, match=r"key has shape \[2, 5, 16\]"):
        read_layer(layer, 0, torch.float32)


@pytest.mark.skipif("Fp8QuantizedLayer" not in CLASSES, reason="this transformers has no FP8")
@pytest.mark.parametrize("missing", ["key", "key_scale", "value_scale"])
def test_fp8_without_its_scales_is_refused(missing: str) -> None:
    layer = _make("Fp8QuantizedLayer")
    _attention_step(layer, 5, 0)
    record, tensors = read_layer(layer, 0, torch.bfloat16)
    del tensors[missing]
    with pytest.raises(IdentityMismatch, match=f"{missing} is missing"):
        put_layer(_make("Fp8QuantizedLayer"), record, tensors)


def test_fewer_tokens_than_the_record_says_are_refused() -> None:
    layer = cache_utils.DynamicLayer()
    _attention_step(layer, 5, 0)
    record, tensors = read_layer(layer, 0, torch.bfloat16)
    for part in ("key", "value"):
        short = {**tensors, part: tensors[part][:, :, :4]}
        with pytest.raises(InvalidField, match=rf"{part} has shape .*metadata says 5 tokens"):
            put_layer(cache_utils.DynamicLayer(), record, short)


def test_a_tensor_without_a_place_is_refused() -> None:
    layer = cache_utils.DynamicLayer()
    _attention_step(layer, 5, 0)
    record, tensors = read_layer(layer, 0, torch.bfloat16)
    with pytest.raises(InvalidField, match="no place for conv_state"):
        put_layer(cache_utils.DynamicLayer(), record, {**tensors, "conv_state": _random(0, 1)})


@pytest.mark.parametrize("kind", ["static", "static_sliding"])
def test_static_layers_that_do_not_count_their_tokens_are_refused(kind: str) -> None:
    # as in transformers 4.56 and 5.0, where zeros stand for tokens that are not there
    buffer = torch.zeros(1, 2, 8, 4)
    layer = SimpleNamespace(max_cache_len=8, keys=buffer, values=buffer)
    with pytest.raises(UnsupportedCache, match="does not count its tokens"):
        read_kind(kind, layer, torch.float32)


def test_windows_that_record_the_past_are_refused() -> None:
    layer = cache_utils.DynamicSlidingWindowLayer(_WINDOW)
    if not hasattr(layer, "record_past"):
        pytest.skip("this transformers has no rollback")
    _attention_step(layer, 5, 0)
    layer.activate_past_recording()
    with pytest.raises(UnsupportedCache, match="rollback"):
        read_layer(layer, 0, torch.bfloat16)
