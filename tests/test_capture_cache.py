"""Caches that a model has filled already, of every class and age, kept and put back."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import left_padded_mask, prompt_ids, tiny_gemma, tiny_llama

import kvz
from kvz import hf
from kvz.capturing import Capture, capture_cache
from kvz.formats.errors import ConfigError, IdentityMismatch, UnsupportedCache
from kvz.restoring import continue_from, greedy, restore

transformers = pytest.importorskip("transformers")
NUM_TOKENS = 40
NUM_NEW = 16


def forward_parameters(model: Any) -> set[str]:
    return set(inspect.signature(inspect.unwrap(type(model).forward)).parameters)


def cache_argument(model: Any) -> str:
    return "cache" if "cache" in forward_parameters(model) else "past_key_values"


def filled(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    """Logits after the prompt; `cache` holds it."""
    arguments = {"input_ids": ids, "use_cache": True, cache_argument(model): cache}
    if mask is not None:
        arguments.update(attention_mask=mask, position_ids=hf.position_ids(mask, 0, ids.shape[1]))
    with torch.no_grad():
        return model(**arguments).logits[:, -1]


def fp8_cache(model: Any) -> Any:
    try:
        return transformers.QuantizedCache("fp8", config=model.config)
    except ValueError:
        pytest.skip("this transformers has no FP8 cache")


def hqq_cache(model: Any) -> Any:
    pytest.importorskip("hqq", reason="needs: pip install hqq")
    return transformers.QuantizedCache(
        "hqq", config=model.config, nbits=4, axis_key=1, axis_value=1, residual_length=8
    )


def static_cache(model: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    if not all(hasattr(layer, "cumulative_length") for layer in cache.layers):
        pytest.skip("this transformers does not count the tokens of a static layer")
    return cache


CACHES = {
    "dynamic": (tiny_llama, lambda model: transformers.DynamicCache(config=model.config)),
    "dynamic without a config": (tiny_gemma, lambda model: transformers.DynamicCache()),
    "static": (tiny_llama, static_cache),
    "static with windows": (tiny_gemma, static_cache),
    "fp8": (tiny_llama, fp8_cache),
    "hqq": (tiny_llama, hqq_cache),
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", list(CACHES))
def test_a_cache_of_any_class_goes_on_like_the_live_one(
    name: str, padding: int, tmp_path: Path
) -> None:
    build, make = CACHES[name]
    model = build()
    cache = make(model)
    ids, mask = prompt_ids(2, NUM_TOKENS), left_padded_mask(2, NUM_TOKENS, padding)
    logits = filled(model, cache, ids, mask if padding else None)
    # quantised caches compute with codes from the second pass on
    token = logits.argmax(dim=-1, keepdim=True)
    ids, mask = torch.cat([ids, token], dim=1), torch.cat([mask, torch.ones_like(token)], dim=1)
    logits = hf.feed(model, cache, token, mask, NUM_TOKENS)
    captured = capture_cache(model, cache, ids, attention_mask=mask, next_token_logits=logits)
    captured.save(tmp_path / "c.safetensors")
    kvz.compress(tmp_path / "c.safetensors", tmp_path / "c.kvz")
    restored = restore(tmp_path / "c.kvz", model)
    assert type(restored.cache) is type(cache)
    assert [type(layer) for layer in restored.cache.layers] == [type(x) for x in cache.layers]
    kept = {part: t.clone() for part, t in captured.tensors.items()}
    expected = greedy(model, cache, logits, NUM_NEW, attention_mask=mask)
    # static buffers are written over; what was captured is not
    assert all(torch.equal(t, kept[part]) for part, t in captured.tensors.items())
    found = greedy(model, restored.cache, restored.next_token_logits, NUM_NEW, attention_mask=mask)
    assert torch.equal(found, expected)
    live, again = (
        capture_cache(model, c, torch.cat([ids, expected[:, :-1]], dim=1))
        for c in (cache, restored.cache)
    )
    assert_same(live, again)


def assert_same(live: Capture, again: Capture) -> None:
    assert json.loads(live.metadata["kvz"]) == json.loads(again.metadata["kvz"])
    assert live.tensor_names == again.tensor_names
    for name in live.tensor_names:
        assert (live.read_tensor(name) == again.read_tensor(name)).all(), name


def states(model: Any, ids: torch.Tensor) -> tuple[list[tuple[Any, Any]], Any]:
    """Keys and values of each layer, and the logits after them."""
    cache = transformers.DynamicCache(config=model.config)
    logits = filled(model, cache, ids)
    return [(layer.keys, layer.values) for layer in cache.layers], logits


def test_tuples_and_lists_of_older_releases_are_read() -> None:
    model, ids = tiny_llama(), prompt_ids(1, NUM_TOKENS)
    pairs, logits = states(model, ids)
    old = type("DynamicCache", (), {})()
    old.key_cache, old.value_cache = [k for k, _ in pairs], [v for _, v in pairs]
    expected = None
    for cache in (tuple(pairs), old):
        captured = capture_cache(model, cache, ids, next_token_logits=logits)
        tokens = continue_from(restore(captured, model), model, NUM_NEW)
        expected = expected or tokens
        assert tokens == expected
    live = transformers.DynamicCache(config=model.config)
    assert filled(model, live, ids).equal(logits)
    mask = torch.ones_like(ids)
    assert greedy(model, live, logits, NUM_NEW, attention_mask=mask)[0].tolist() == expected


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (((torch.zeros(1), torch.zeros(1), torch.zeros(1)),), "layer 0 of the cache is not a pair"),
        (((torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)),), "layer 0 of the cache: its key"),
        (SimpleNamespace(key_cache=[], value_cache=[]), "a SimpleNamespace may hold more"),
        (SimpleNamespace(layers=[]), "cannot read a SimpleNamespace"),
    ],
)
def test_what_is_no_cache_is_refused(cache: Any, named: str) -> None:
    with pytest.raises(UnsupportedCache, match=named):
        capture_cache(tiny_llama(), cache, prompt_ids(1, 5))


@pytest.mark.parametrize("class_name", ["MtpCache", "DFlashCache"])
def test_cache_classes_with_a_logic_of_their_own_are_refused(class_name: str) -> None:
    from transformers import cache_utils

    if not hasattr(cache_utils, class_name):
        pytest.skip(f"this transformers has no {class_name}")
    model = tiny_llama()
    cache = getattr(cache_utils, class_name)(config=model.config)
    with pytest.raises(UnsupportedCache, match=f"a {class_name} holds more"):
        capture_cache(model, cache, prompt_ids(1, 5))


def test_other_numbers_of_tokens_are_refused() -> None:
    model, ids = tiny_llama(), prompt_ids(1, NUM_TOKENS)
    pairs, _ = states(model, ids)
    # what generate() returns has one token that the cache has not seen
    with pytest.raises(ConfigError, match="has seen 40 tokens, input_ids has 41"):
        capture_cache(model, pairs, prompt_ids(1, NUM_TOKENS + 1))
    with pytest.raises(ConfigError, match="has seen 40 tokens, input_ids has 39"):
        capture_cache(model, pairs, prompt_ids(1, NUM_TOKENS - 1), evicted=True)


def test_layers_that_dropped_tokens_keep_their_position() -> None:
    model, ids = tiny_llama(), prompt_ids(1, NUM_TOKENS)
    pairs, logits = states(model, ids)
    kept = [torch.tensor(i) for i in ([0, 1, *range(20, 40)], [*range(5, 40)], [*range(40)])]
    evicted = [
        (key[:, :, index], value[:, :, index])
        for (key, value), index in zip(pairs, kept, strict=True)
    ]
    with pytest.raises(ConfigError, match="evicted=True"):
        capture_cache(model, evicted, ids, next_token_logits=logits)
    captured = capture_cache(model, evicted, ids, next_token_logits=logits, evicted=True)
    document = json.loads(captured.metadata["kvz"])
    assert [kind["kind"] for kind in document["layers"]["kinds"]] == ["evicted", "evicted", "full"]
    restored = restore(captured, model)
    for layer, (key, value) in zip(restored.cache.layers, evicted, strict=True):
        assert torch.equal(layer.keys, key)
        assert torch.equal(layer.values, value)
    # by hand: the positions go on after all tokens, not after those that are left
    live = transformers.DynamicCache()
    for layer_idx, (key, value) in enumerate(evicted):
        live.update(key, value, layer_idx)
    expected, step = [], logits
    for position in range(NUM_TOKENS, NUM_TOKENS + NUM_NEW):
        expected.append(int(step.argmax()))
        arguments = {
            "input_ids": torch.tensor([[expected[-1]]]),
            "position_ids": torch.tensor([[position]]),
            cache_argument(model): live,
        }
        with torch.no_grad():
            step = model(**arguments).logits[:, -1]
    assert continue_from(restored, model, NUM_NEW) == expected
    with pytest.raises(ConfigError, match="a state of kind 'evicted'"):
        restore(captured, model, num_tokens=10)


def test_encoder_decoder_caches_come_back_with_their_cross_attention() -> None:
    config = transformers.T5Config(
        vocab_size=128,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedCache, match=r"encoder-decoder model.*capture_cache"):
        kvz.capture(model, prompt_ids(1, 5))
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=prompt_ids(1, 12))
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(config=model.config),
        transformers.DynamicCache(config=model.config),
    )
    ids = prompt_ids(1, 7, seed=3)

    def decode(cache: Any, token_ids: torch.Tensor) -> torch.Tensor:
        arguments = {"encoder_outputs": encoded, "decoder_input_ids": token_ids}
        with torch.no_grad():
            return model(**arguments, use_cache=True, **{cache_argument(model): cache}).logits

    decode(cache, ids)
    captured = capture_cache(model, cache, ids)
    assert captured.shape("layers.1.key") == (1, 4, 7, 8)
    assert captured.shape("layers.1.cross_value") == (1, 4, 12, 8)
    restored = restore(captured, model)
    # what the encoder said is in the cache: it is not looked at again
    encoded.last_hidden_state.zero_()
    for token in ([[3]], [[9]]):
        expected = decode(cache, torch.tensor(token))
        assert torch.equal(decode(restored.cache, torch.tensor(token)), expected)
    document = json.loads(captured.metadata["kvz"])
    assert document["cache"]["num_self_layers"] == 2
    part = Capture(
        {n: t for n, t in captured.tensors.items() if n != "layers.0.cross_key"},
        captured.metadata,
        None,
    )
    with pytest.raises(IdentityMismatch, match=r"layers\.0\.cross_key is missing"):
        restore(part, model)
