"""Attention errors against plain NumPy from the formulae, and visibility against real models."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import WINDOW, left_padded_mask, prompt_ids, tiny_gemma, tiny_llama

import kvz
from kvz.capture_metadata import decode_metadata, encode_metadata
from kvz.formats.errors import ConfigError, InvalidField, UnsupportedCache
from kvz.quality import attention
from kvz.quality.attention import Queries, Softmax, attend, compare
from kvz.quality.layers import AttentionPlan, plan_attention
from kvz.safetensors_io import SafetensorsFile
from kvz.state_reader import read_tensor

SAMPLE = Path(__file__).parents[1] / "samples" / "smollm2-docs.safetensors"

F64 = NDArray[np.float64]


def oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: NDArray[np.bool_],
    scale: float,
    softcap: float | None,
) -> tuple[F64, F64]:
    """Weights `[q_heads, n, tokens]` and outputs `[q_heads, n, value_dim]`, one by one."""
    q, k, v = (x.double().numpy() for x in (query, key, value))
    group = q.shape[0] // k.shape[0]
    weights = np.zeros((q.shape[0], q.shape[1], k.shape[1]))
    outputs = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for head, i in itertools.product(range(q.shape[0]), range(q.shape[1])):
        score = scale * (k[head // group] @ q[head, i])
        if softcap is not None:
            score = softcap * np.tanh(score / softcap)
        weight = np.where(seen[i], np.exp(score - score[seen[i]].max()), 0)
        weights[head, i] = weight / weight.sum()
        outputs[head, i] = weights[head, i] @ v[head // group]
    return weights, outputs


def oracle_error(exact: tuple[F64, F64], decoded: tuple[F64, F64]) -> tuple[F64, F64, F64]:
    p, q = exact[0], decoded[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.where(p > 0, p * np.log(p / q), 0).sum(-1)
    return kl, ((exact[1] - decoded[1]) ** 2).sum(-1), (exact[1] ** 2).sum(-1)


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def queries_seeing(states: torch.Tensor, seen: NDArray[np.bool_]) -> Queries:
    """The ranges of a mask `[n, tokens]` whose rows are runs."""
    start = seen.argmax(axis=1)
    stop = start + seen.sum(axis=1)
    return Queries(states, torch.from_numpy(start), torch.from_numpy(stop))


def causal(columns: NDArray[np.int64], num_tokens: int, window: int | None) -> NDArray[np.bool_]:
    keys = np.arange(num_tokens)
    seen: NDArray[np.bool_] = keys[None] <= columns[:, None]
    return seen if window is None else seen & (keys[None] > columns[:, None] - window)


@pytest.fixture(params=[1 << 19, 1])
def block_scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """All keys in one block, and blocks of seven."""
    size: int = request.param
    monkeypatch.setitem(attention._BLOCK_SCORES, "cpu", size)
    monkeypatch.setattr(attention, "_MIN_BLOCK_LEN", 7)
    return size


@pytest.mark.usefixtures("block_scores")
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_errors_agree_with_the_formulae(
    num_kv_heads: int, window: int | None, softcap: float | None
) -> None:
    key, value = random(num_kv_heads, 40, 16, seed=1), random(num_kv_heads, 40, 12, seed=2)
    decoded_key = key + random(num_kv_heads, 40, 16, seed=3, scale=0.1)
    decoded_value = value + random(num_kv_heads, 40, 12, seed=4, scale=0.1)
    states = random(6, 9, 16, seed=5)
    seen = causal(np.arange(31, 40), 40, window)
    softmax = Softmax(0.3, softcap)
    queries = queries_seeing(states, seen)
    exact = attend(queries, key, value, softmax)
    error = compare(queries, exact, key, decoded_key, decoded_value, softmax)
    expected = oracle_error(
        oracle(states, key, value, seen, 0.3, softcap),
        oracle(states, decoded_key, decoded_value, seen, 0.3, softcap),
    )
    for got, wanted in zip(
        (error.kl, error.squared_error, error.squared_norm), expected, strict=True
    ):
        assert got.shape == (6, 9)
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5)
        assert got.mean().item() == pytest.approx(wanted.mean(), rel=1e-6)


def test_kl_worked_by_hand() -> None:
    # weights 1/2, 1/2 against 3/4, 1/4: ln 3 apart
    query = torch.ones(1, 1, 1)
    key, decoded = torch.zeros(1, 2, 1), torch.tensor([[[np.log(3.0)], [0.0]]])
    value = torch.tensor([[[1.0], [3.0]]])
    queries = Queries(query, torch.tensor([0]), torch.tensor([2]))
    exact = attend(queries, key, value, Softmax(1.0))
    error = compare(queries, exact, key, decoded.float(), value, Softmax(1.0))
    assert error.kl.item() == pytest.approx(0.5 * np.log(4 / 3), rel=1e-6)
    assert error.squared_norm.item() == pytest.approx(4.0)
    assert error.squared_error.item() == pytest.approx(0.25, rel=1e-6)


@pytest.mark.usefixtures("block_scores")
def test_exact_tensors_have_no_error_at_all() -> None:
    key, value, states = (
        random(2, 40, 8, seed=1, scale=9),
        random(2, 40, 8, seed=2),
        random(4, 6, 8, seed=3, scale=9),
    )
    queries = queries_seeing(states, causal(np.arange(34, 40), 40, None))
    exact = attend(queries, key, value, Softmax(1.0))
    error = compare(queries, exact, key, key.clone(), value.clone(), Softmax(1.0))
    assert not error.kl.any()
    assert not error.squared_error.any()


def test_tiny_errors_keep_their_digits() -> None:
    # scores in the hundreds, keys off by their last bit: float32 differences would be noise
    key = random(1, 64, 64, seed=1, scale=4)
    decoded = (key.view(torch.int16) ^ 1).view(torch.bfloat16)
    value, states = random(1, 64, 8, seed=2), random(1, 8, 64, seed=3, scale=0.2)
    seen = causal(np.arange(56, 64), 64, None)
    queries, softmax = queries_seeing(states, seen), Softmax(1.0)
    error = compare(queries, attend(queries, key, value, softmax), key, decoded, value, softmax)
    expected = oracle_error(
        oracle(states, key, value, seen, 1.0, None), oracle(states, decoded, value, seen, 1.0, None)
    )[0]
    assert expected.mean() < 1e-2
    np.testing.assert_allclose(error.kl.numpy(), expected, rtol=1e-5)


def test_query_that_sees_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must see a key"):
        Queries(torch.zeros(1, 1, 4), torch.tensor([3]), torch.tensor([3]))


def test_a_real_layer_agrees_with_the_formulae() -> None:
    with SafetensorsFile(SAMPLE) as source:
        plan = plan_attention(source, 512)
        assert len(plan.columns) == 4
        layer = plan.layers[7]
        query, key, value = (
            read_tensor(source, f"layers.7.{part}")[0] for part in ("query", "key", "value")
        )
    decoded_key = (key * 8).round() / 8
    decoded_value = (value * 16).round() / 16
    queries = plan.queries(layer, query, 0)
    seen = causal(np.arange(36, 40), 40, None)
    exact = attend(queries, key, value, layer.softmax)
    error = compare(queries, exact, key, decoded_key, decoded_value, layer.softmax)
    expected = oracle_error(
        oracle(query, key, value, seen, 0.125, None),
        oracle(query, decoded_key, decoded_value, seen, 0.125, None),
    )
    for got, wanted in zip(
        (error.kl, error.squared_error, error.squared_norm), expected, strict=True
    ):
        assert got.mean().item() == pytest.approx(wanted.mean(), rel=1e-6)
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5)


def outputs_of(model: Any, token_ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """What each layer's attention gives to its output projection, `[batch, tokens, width]`."""
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, inputs: outputs.append(inputs[0].detach().clone())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        model(input_ids=token_ids, attention_mask=mask, position_ids=positions)
    for hook in hooks:
        hook.remove()
    return outputs


def recomputed(
    captured: Any, plan: AttentionPlan, layer_number: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns that count, and their attention outputs `[q_heads, n, head_dim]`."""
    layer = plan.layers[layer_number]
    query, key, value = (
        captured.tensors[name] for name in (layer.query_name, layer.key_name, layer.value_name)
    )
    queries = plan.queries(layer, query[batch][:, plan.query_rows], batch)
    last_held = queries.stop - 1 + plan.num_tokens - layer.num_tokens
    return last_held, attend(queries, key[batch], value[batch], layer.softmax).output


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_attention_is_that_of_the_model_where_all_its_keys_are_held(make: Any) -> None:
    # 12 tokens: the windows of 16 still hold everything
    model, ids = make(dtype=torch.float32), prompt_ids(2, 12)
    mask = left_padded_mask(2, 12, 3)
    captured = kvz.capture(model, ids, attention_mask=mask, queries=11)
    plan = plan_attention(captured, 11)
    outputs = outputs_of(model, ids, mask)
    for number, output in enumerate(outputs):
        for batch, first in ((0, 3), (1, 1)):
            columns, got = recomputed(captured, plan, number, batch)
            assert columns.tolist() == list(range(first, 12))
            wanted = output[batch, columns].unflatten(-1, (got.shape[0], -1)).transpose(0, 1)
            torch.testing.assert_close(got.float(), wanted, rtol=1e-4, atol=1e-5)


def test_windowed_layer_counts_queries_with_half_of_their_keys() -> None:
    # 40 tokens, window 16: columns 25..39 are held
    captured = kvz.capture(tiny_gemma(), prompt_ids(1, 40), queries=40)
    plan = plan_attention(captured, 20)
    sliding, full = plan.layers[0], plan.layers[2]
    assert (sliding.window, sliding.num_tokens, full.window) == (WINDOW, 15, None)
    states = captured.tensors["layers.0.query"][0][:, plan.query_rows]
    queries = plan.queries(sliding, states, 0)
    # column 32 saw 17..32 and 8 of them are held, column 39 saw 24..39
    assert queries.stop.tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert queries.start.tolist() == [0] * 8
    assert torch.equal(queries.states, states[:, 12:])
    assert plan.queries(full, states, 0).stop.tolist() == list(range(21, 41))


def with_document(captured: Any, **changes: Any) -> Any:
    """A capture whose metadata says something else."""
    document = decode_metadata(captured.metadata)
    del document["schema"]
    document.update(changes)
    return kvz.Capture(captured.tensors, encode_metadata(document), None)


def test_chunked_window_starts_at_its_run() -> None:
    captured = kvz.capture(tiny_gemma(), prompt_ids(1, 40), queries=40)
    identity = decode_metadata(captured.metadata)["identity"]
    identity["config"]["layer_types"] = [["chunked_attention", 2], ["full_attention", 2]]
    plan = plan_attention(with_document(captured, identity=identity), 40)
    states = captured.tensors["layers.0.query"][0]
    queries = plan.queries(plan.layers[0], states, 0)
    # runs 16..31 and 32..39; columns 25..39 are held: 25..31 lack 9 keys, 32..39 lack none
    assert queries.start.tolist() == [7] * 8
    assert queries.stop.tolist() == list(range(8, 16))


def test_capture_without_queries_is_told_how_to_get_them() -> None:
    captured = kvz.capture(tiny_llama(), prompt_ids(1, 8), queries=0)
    with pytest.raises(ConfigError, match=r"kvz capture --queries 64, or leave .* --queries 0"):
        plan_attention(captured, 64)


def test_fewer_queries_than_asked_for_are_all_used() -> None:
    captured = kvz.capture(tiny_llama(), prompt_ids(1, 30), queries=6)
    assert plan_attention(captured, 64).columns.tolist() == [24, 25, 26, 27, 28, 29]
    assert plan_attention(captured, 2).columns.tolist() == [28, 29]


def test_learned_sinks_are_refused() -> None:
    captured = kvz.capture(tiny_llama(), prompt_ids(1, 8), queries=2)
    identity = decode_metadata(captured.metadata)["identity"]
    identity["architecture"] = "GptOssForCausalLM"
    with pytest.raises(UnsupportedCache, match="learned sinks"):
        plan_attention(with_document(captured, identity=identity), 2)


@pytest.mark.parametrize("scale", [None, "0.1", [0.1, 0.1]])
def test_scale_that_is_no_number_for_each_layer_is_refused(scale: Any) -> None:
    captured = kvz.capture(tiny_llama(), prompt_ids(1, 8), queries=2)
    with pytest.raises(InvalidField, match="softmax_scale"):
        plan_attention(with_document(captured, softmax_scale=scale), 2)


def test_scales_of_layers_go_to_their_layers() -> None:
    captured = kvz.capture(tiny_llama(), prompt_ids(1, 8), queries=2)
    document = with_document(captured, softmax_scale=[0.1, 0.2, 0.3], softcap=[None, 5.0, None])
    softmaxes = [layer.softmax for layer in plan_attention(document, 2).layers]
    assert softmaxes == [Softmax(0.1), Softmax(0.2, 5.0), Softmax(0.3)]


def test_queries_of_other_heads_are_refused() -> None:
    captured = kvz.capture(tiny_llama(), prompt_ids(1, 8), queries=2)
    tensors = dict(captured.tensors)
    tensors["layers.1.query"] = tensors["layers.1.query"][:, :3].contiguous()
    with pytest.raises(InvalidField, match=r"layers\.1\.query \[1, 3, 2, 16\]"):
        plan_attention(kvz.Capture(tensors, captured.metadata, None), 2)
