"""Refinement: a cache restored from anchors gets the values of the whole archive, in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import progressive_support as support
import pytest
import torch
from tiny_models import WINDOW, left_padded_mask, prompt_ids, tiny_gemma, tiny_llama

import kvz
from kvz import hf
from kvz.formats.errors import IdentityMismatch, UnsupportedCache
from kvz.progressive import ProgressiveReader
from kvz.refining import refine
from kvz.replaying import verify_model
from kvz.restoring import Restored, restore

NUM_TOKENS = 40
MODELS: dict[str, Callable[[], Any]] = {"full": tiny_llama, "sliding": tiny_gemma}


def write(folder: Path, model: Any, ids: torch.Tensor, **settings: Any) -> Path:
    """A lynx archive of what the model holds after ``ids``."""
    kvz.capture(model, ids, **settings).save(folder / "c.safetensors")
    return support.compress(folder / "c.safetensors", folder / "c.kvz")


@pytest.fixture(scope="module", params=MODELS)
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model and an archive of its cache, with padding."""
    model = MODELS[request.param]()
    mask = left_padded_mask(2, NUM_TOKENS, 3)
    folder = tmp_path_factory.mktemp(request.param)
    return model, write(folder, model, prompt_ids(2, NUM_TOKENS), attention_mask=mask)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = tiny_llama()
    return model, write(tmp_path_factory.mktemp("llama"), model, prompt_ids(1, 20))


def from_anchors(path: Path, model: Any) -> Restored:
    with kvz.open(path) as opened:
        return restore(opened.anchor(), model)


def states(restored: Restored) -> list[torch.Tensor]:
    """Bits of the keys and values of each layer."""
    layers = restored.cache.layers
    return [t.view(torch.int16).clone() for layer in layers for t in (layer.keys, layer.values)]


def feed(model: Any, restored: Restored, num_new: int) -> None:
    for step in range(num_new):
        length = NUM_TOKENS + step
        mask = torch.cat([restored.attention_mask, torch.ones(2, step + 1, dtype=torch.long)], 1)
        hf.feed(model, restored.cache, prompt_ids(2, 1, seed=step), mask, length)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("num_new", [0, 3, WINDOW - 2, WINDOW - 1, WINDOW + 5])
def test_prompt_gets_the_whole_values_and_new_tokens_stay(
    archive: tuple[Any, Path], num_new: int, mode: Any
) -> None:
    model, path = archive
    whole = states(restore(path, model))
    restored = from_anchors(path, model)
    with mode():
        feed(model, restored, num_new)
    before = states(restored)
    with ProgressiveReader(path) as reader:
        reader.refine(restored)
    after = states(restored)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for old, new, full in zip(before, after, whole, strict=True):
        kept = max(0, new.shape[2] - num_new)
        assert torch.equal(new[:, :, :kept], full[:, :, full.shape[2] - kept :])
        assert torch.equal(new[:, :, kept:], old[:, :, kept:])
    lengths = {layer.get_seq_length() for layer in restored.cache.layers}
    assert lengths == {NUM_TOKENS + num_new}


def test_refined_cache_goes_on_as_the_whole_one(llama: tuple[Any, Path]) -> None:
    model, path = llama
    restored, whole = from_anchors(path, model), restore(path, model)
    refine(restored, path)
    ids = prompt_ids(1, 5, seed=9)
    mask = torch.ones(1, 25, dtype=torch.long)
    logits = [hf.feed(model, r.cache, ids, mask, 20) for r in (restored, whole)]
    assert torch.equal(*logits)


def assert_refused(restored: Restored, source: Path, error: type[Exception], message: str) -> None:
    """Nothing of the cache is changed."""
    before = states(restored)
    with pytest.raises(error, match=message):
        refine(restored, source)
    for old, new in zip(before, states(restored), strict=True):
        assert torch.equal(old, new)


def test_cache_of_another_prompt_is_refused(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = llama
    other = write(tmp_path, model, prompt_ids(1, 20, seed=2))
    assert_refused(from_anchors(path, model), other, IdentityMismatch, "other tokens")


def test_cache_of_another_padding_is_refused(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = llama
    mask = left_padded_mask(1, 20, 4)
    other = write(tmp_path, model, prompt_ids(1, 20), attention_mask=mask)
    assert_refused(from_anchors(path, model), other, IdentityMismatch, "other padding")


def test_part_of_a_cache_is_refused(llama: tuple[Any, Path]) -> None:
    model, path = llama
    with kvz.open(path) as opened:
        prefix = restore(opened.anchor(), model, num_tokens=10)
    assert_refused(prefix, path, IdentityMismatch, "other tokens")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: file 2, model 3"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads: file 4, model 2"),
    ],
)
def test_cache_of_another_shape_is_refused(
    llama: tuple[Any, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model, path = llama
    other = write(tmp_path, tiny_llama(**changes), prompt_ids(1, 20))
    assert_refused(from_anchors(path, model), other, IdentityMismatch, message)


def test_cache_that_lost_tokens_of_the_prompt_is_refused(llama: tuple[Any, Path]) -> None:
    model, path = llama
    restored = from_anchors(path, model)
    restored.cache.crop(-1)
    message = "layer 0 has lost 1 of the prompt's 20 tokens"
    assert_refused(restored, path, IdentityMismatch, message)


def test_layers_of_other_kinds_are_refused(llama: tuple[Any, Path]) -> None:
    from transformers.cache_utils import StaticLayer

    model, path = llama
    restored = from_anchors(path, model)
    last = restored.cache.layers[2]
    static = StaticLayer(max_cache_len=32)
    static.update(last.keys, last.values)
    restored.cache.layers[2] = static
    assert_refused(restored, path, UnsupportedCache, "layer 2 of kind 'static' cannot be refined")


def test_cache_of_another_model_is_refused_and_changes_nothing(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, path = llama
    with kvz.open(path) as archive:
        restored = restore(archive.anchor(), model)
    before = restored.cache.layers[0].keys.clone()
    other = tiny_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.25)
    captured = kvz.capture(other, restored.input_ids)
    kvz.compress(captured, tmp_path / "other.kvz", "lynx")
    with pytest.raises(IdentityMismatch, match="weights"):
        refine(restored, tmp_path / "other.kvz")
    assert torch.equal(restored.cache.layers[0].keys, before)


@pytest.mark.parametrize("codec", ["lynx", "pnmix"])
def test_replay_of_a_lossy_cache_allows_what_its_codec_changes(
    llama: tuple[Any, Path], tmp_path: Path, codec: str
) -> None:
    model, _ = llama
    captured = kvz.capture(model, prompt_ids(1, 90))
    kvz.compress(captured, tmp_path / "lossy.kvz", codec)
    report = verify_model(tmp_path / "lossy.kvz", model, replay=90)
    assert report is not None
    assert report.lossy == codec
    assert 0 < report.largest_difference < report.bound == 0.6
