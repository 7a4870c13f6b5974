"""Restoring onto a GPU: every layer there is the captured one, and what follows is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zoo
import zoo_run
from tiny_models import left_padded_mask, prompt_ids, tiny_gemma, tiny_llama

import kvz

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from kvz.capturing import capture  # noqa: E402
from kvz.formats.errors import UnsupportedCache  # noqa: E402
from kvz.layers.containers import read_cache  # noqa: E402
from kvz.restoring import generate_from, greedy, restore, to_cache  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_TOKENS, NUM_NEW = 50, 24


def integers(tensor: Any) -> Any:
    """The bits of a tensor, on the CPU."""
    return tensor.cpu().contiguous().view(torch.uint8)


def assert_same_layers(ours: Any, theirs: Any, model: Any) -> None:
    """Two caches hold the same bits in the same layers, the first one where the model is."""
    found, expected = read_cache(ours, model.dtype), read_cache(theirs, model.dtype)
    assert found.layers == expected.layers
    assert any(expected.tensors)
    for held, wanted in zip(found.tensors, expected.tensors, strict=True):
        assert held.keys() == wanted.keys()
        for part, tensor in wanted.items():
            assert held[part].device == model.device
            assert held[part].dtype == tensor.dtype
            assert torch.equal(integers(held[part]), integers(tensor))


def moved(cache: Any) -> Any:
    """A live cache of keys and values, carried to the GPU by hand."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.cuda(), layer.values.cuda()
        layer.device = layer.keys.device
    return cache


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", ["gaac", "splitzip"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_capture_of_the_cpu_is_restored_on_the_gpu(
    tmp_path: Path, build: Callable[..., Any], dtype: Any, codec: str, device: str
) -> None:
    model = build(dtype=dtype)
    mask = left_padded_mask(2, NUM_TOKENS, 9)
    captured = capture(model, prompt_ids(2, NUM_TOKENS), attention_mask=mask, chunk_tokens=17)
    captured.save(tmp_path / "cache.safetensors")
    kvz.compress(tmp_path / "cache.safetensors", tmp_path / "cache.kvz", codec, device=device)
    model = model.cuda()
    restored = restore(tmp_path / "cache.kvz", model)
    assert_same_layers(restored.cache, captured.cache, model)
    logits = captured.tensors["next_token_logits"]
    assert torch.equal(integers(restored.next_token_logits), integers(logits))
    ours = greedy(model, restored.cache, logits, NUM_NEW, attention_mask=mask)
    assert ours.shape == (2, NUM_NEW)
    live = moved(captured.cache)
    assert torch.equal(greedy(model, live, logits, NUM_NEW, attention_mask=mask), ours)
    # the caches after it too: a wrong position may leave the argmax alone
    assert_same_layers(restored.cache, live, model)


@pytest.mark.parametrize("name", zoo.available())
def test_capture_of_the_gpu_goes_on_there_like_the_live_cache(tmp_path: Path, name: str) -> None:
    model = zoo.build(name).cuda()
    ids, mask = zoo_run.prompt(padded=False)
    try:
        captured = capture(model, ids, attention_mask=mask, chunk_tokens=16)
    except UnsupportedCache as error:
        # releases whose recurrent states are in caches of the models' own
        if zoo.ZOO[name].kinds != {"linear"}:
            raise
        pytest.skip(f"refused: {error}")
    captured.save(tmp_path / "cache.safetensors")
    kvz.compress(tmp_path / "cache.safetensors", tmp_path / "cache.kvz", device="cuda")
    cache = to_cache(tmp_path / "cache.kvz", model)
    assert_same_layers(cache, captured.cache, model)
    logits = captured.tensors["next_token_logits"]
    ours = greedy(model, cache, logits, NUM_NEW, attention_mask=mask)
    assert ours.shape == (1, NUM_NEW)
    live = greedy(model, captured.cache, logits, NUM_NEW, attention_mask=mask)
    assert torch.equal(ours, live)
    assert_same_layers(cache, captured.cache, model)


def test_capture_of_the_gpu_is_restored_on_the_cpu(tmp_path: Path) -> None:
    model = tiny_llama().cuda()
    captured = capture(model, prompt_ids(1, NUM_TOKENS), chunk_tokens=17)
    captured.save(tmp_path / "cache.safetensors")
    kvz.compress(tmp_path / "cache.safetensors", tmp_path / "cache.kvz", device="cuda")
    model = model.cpu()
    cache = to_cache(tmp_path / "cache.kvz", model)
    assert_same_layers(cache, captured.cache, model)
    assert len(generate_from(tmp_path / "cache.kvz", model, NUM_NEW)) == NUM_NEW
