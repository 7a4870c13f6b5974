"""Capture in this process, compress, restore in another: what follows is the same to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
import zoo_run

import kvz
from kvz import hf
from kvz.capturing import capture
from kvz.formats.errors import UnsupportedCache
from kvz.layers.containers import read_cache
from kvz.restoring import continue_from, greedy, restore

CODECS = ("gaac", "splitzip", "zstd", "raw")
# padding and codec have nothing to do with each other
VARIANTS = [("plain", codec) for codec in CODECS] + [("padded", "gaac")]
NAMES = zoo.available()
# Releases without one table of layer classes kept recurrent states in caches of the models' own.
OLDER = not hasattr(transformers.cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING")


def _captured(name: str, variant: str, folder: Path, expected: dict[str, Any]) -> set[str]:
    model = zoo.build(name)
    ids, mask = zoo_run.prompt(padded=variant == "padded")
    captured = capture(model, ids, attention_mask=mask, chunk_tokens=16)
    path = folder / f"{name}.{variant}.safetensors"
    captured.save(path)
    for _, codec in (pair for pair in VARIANTS if pair[0] == variant):
        archive = folder / f"{name}.{variant}.{codec}.kvz"
        kvz.compress(path, archive, codec=codec)
        expected[archive.name] = None
    result = zoo_run.go_on(model, captured.cache, mask, captured.tensors["next_token_logits"])
    for archive_name in expected:
        if archive_name.startswith(f"{name}.{variant}."):
            expected[archive_name] = result
    document = json.loads(captured.metadata["kvz"])
    return {kind["kind"] for kind in document["layers"]["kinds"]}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, set[str]]]:
    """What follows each cache live, and restored in another process; the kinds of its layers."""
    folder = tmp_path_factory.mktemp("zoo")
    expected: dict[str, Any] = {}
    kinds: dict[str, set[str]] = {}
    for name in NAMES:
        try:
            kinds[name] = _captured(name, "plain", folder, expected)
            _captured(name, "padded", folder, expected)
        except (UnsupportedCache, ValueError) as error:
            if not OLDER:
                raise
            expected[name] = str(error)
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, zoo_run.__file__, str(folder)],
        env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return expected, json.loads((folder / "results.json").read_text()), kinds


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("variant", "codec"), VARIANTS)
def test_what_follows_a_restored_cache_is_the_same(
    runs: tuple[dict[str, Any], dict[str, Any], dict[str, set[str]]],
    name: str,
    variant: str,
    codec: str,
) -> None:
    expected, restored, _ = runs
    archive = f"{name}.{variant}.{codec}.kvz"
    if name in expected:
        pytest.skip(f"refused: {expected[name]}")
    assert len(expected[archive]["tokens"][0]) == zoo_run.NUM_NEW
    assert restored[archive] == expected[archive]


@pytest.mark.skipif(OLDER, reason="older releases give some architectures other layers")
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_has_the_layers_that_the_architecture_is_here_for(
    runs: tuple[dict[str, Any], dict[str, Any], dict[str, set[str]]], name: str
) -> None:
    assert runs[2][name] == zoo.ZOO[name].kinds


ONE_PASS = ["mamba", "mamba2", "lfm2", "qwen3_next", "falcon_h1", "inkling"]


@pytest.mark.skipif(OLDER, reason="older releases have no recurrent layers in a DynamicCache")
@pytest.mark.parametrize("name", ONE_PASS)
def test_recurrent_models_take_the_prompt_in_one_pass(name: str) -> None:
    model = zoo.build(name)
    ids, mask = zoo_run.prompt(padded=False)
    pieces = capture(model, ids, chunk_tokens=7)
    whole = capture(model, ids, chunk_tokens=1000)
    kept = {part: tensor.clone() for part, tensor in pieces.tensors.items()}
    assert kept.keys() == whole.tensors.keys()
    assert all(torch.equal(kept[part], whole.tensors[part]) for part in kept)
    # the next pass writes over the states of the live cache, not over what was captured
    zoo_run.go_on(model, pieces.cache, mask, pieces.tensors["next_token_logits"])
    assert all(torch.equal(kept[part], pieces.tensors[part]) for part in kept)


@pytest.mark.skipif(OLDER, reason="older releases have no recurrent layers in a DynamicCache")
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "mamba"])
def test_a_prompt_on_top_of_recurrent_states_is_fed_token_by_token(name: str) -> None:
    model = zoo.build(name)
    ids, mask = zoo_run.prompt(padded=False)
    captured = capture(model, ids)
    more = [5, 9, 77]
    restored = restore(captured, model)
    found = continue_from(restored, model, 6, more)
    for i, token in enumerate(more):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        step = torch.tensor([[token]])
        logits = hf.feed(model, captured.cache, step, mask, zoo_run.NUM_TOKENS + i)
    live = greedy(model, captured.cache, logits, 6, attention_mask=mask)
    assert found == live[0].tolist()
    ours, theirs = (read_cache(c, model.dtype) for c in (restored.cache, captured.cache))
    assert ours.layers == theirs.layers
    for held, expected in zip(ours.tensors, theirs.tensors, strict=True):
        assert all(torch.equal(held[part], expected[part]) for part in expected)


def test_state_outside_the_cache_is_refused_before_the_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        lru_width=32,
        attention_window_size=16,
    )
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    monkeypatch.setattr(hf, "feed", lambda *_: pytest.fail("prefill began"))
    named = r" keeps \w+ in Recurrent|\.forward takes none of past_key_values, cache)"
    with pytest.raises(UnsupportedCache, match="RecurrentGemmaForCausalLM(" + named):
        capture(model, torch.ones((1, 5), dtype=torch.long))
