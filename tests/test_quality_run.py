"""The whole quality measurement on tiny models and captures, and its command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import assert_refused, small_cache, write_cache
from cli_support import kvz as kvz_command
from tiny_models import WINDOW, prompt_ids, save_model, tiny_gemma, tiny_llama

import kvz
from kvz.formats.errors import ConfigError, IdentityMismatch
from kvz.quality.next_token import NextTokenSums, cut_windows, next_token_quality
from kvz.quality.report import render
from kvz.quality.results import AttentionQuality, LayerQuality
from kvz.quality.run import run_quality
from kvz.quality.uniform import UniformConfig, decode
from kvz.quality.window_run import ModelLevel

SCHEMES = ["bf16", "int8-channel", "int4-channel:group=8", "lynx:detail=anchor", "lynx"]


@pytest.fixture(scope="module")
def llama_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "llama.safetensors"
    kvz.capture(tiny_llama(), prompt_ids(1, 120), queries=32).save(path)
    return path


@pytest.fixture(scope="module")
def gemma_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / "gemma.safetensors"
    kvz.capture(tiny_gemma(), prompt_ids(2, 60), queries=32).save(path)
    return path


def test_schemes_are_ordered_as_their_precision_is(llama_capture: Path) -> None:
    report = run_quality([llama_capture], schemes=SCHEMES)
    (capture,) = report.captures
    assert (capture.num_layers, capture.num_tokens, capture.num_queries) == (3, 120, 32)
    exact, int8, int4, anchor, full = capture.schemes
    assert [result.name for result in capture.schemes] == SCHEMES
    assert exact.attention is not None
    assert (exact.key.nmse, exact.value.max_error) == (0, 0)
    assert (exact.attention.kl, exact.attention.output_error) == (0, 0)
    for fine, coarse in ((int8, int4), (full, anchor)):
        assert fine.attention is not None
        assert coarse.attention is not None
        assert 0 < fine.key.nmse < coarse.key.nmse < 1
        assert 0 < fine.attention.kl < coarse.attention.kl
        assert 0 < fine.attention.output_error < coarse.attention.output_error < 1
        assert fine.bits.total > coarse.bits.total
        assert fine.attention.full_kl is None


def test_tensor_errors_are_those_of_the_decoded_tensors(llama_capture: Path) -> None:
    report = run_quality([llama_capture], schemes=["int4-channel:group=8"])
    (result,) = report.captures[0].schemes
    captured = kvz.capture(tiny_llama(), prompt_ids(1, 120))
    for part, quality in (("key", result.key), ("value", result.value)):
        exact = np.stack([captured.tensors[f"layers.{i}.{part}"][0].double() for i in range(3)])
        config = UniformConfig(4, "channel", 8)
        decoded = np.stack(
            [decode(captured.tensors[f"layers.{i}.{part}"][0], config).double() for i in range(3)]
        )
        assert quality.nmse == pytest.approx(((decoded - exact) ** 2).sum() / (exact**2).sum())
        assert quality.max_error == np.abs(decoded - exact).max()


def test_windowed_layers_are_reported_apart(gemma_capture: Path) -> None:
    report = run_quality([gemma_capture], schemes=["int4-channel:group=8"])
    attention = report.captures[0].schemes[0].attention
    assert attention is not None
    assert [layer.window for layer in attention.layers] == [WINDOW, WINDOW, None, WINDOW]
    # two sequences; of a window of 16 the last 8 queries have half of their keys
    assert [layer.num_queries for layer in attention.layers] == [16, 16, 64, 16]
    assert attention.kl == pytest.approx(sum(layer.kl for layer in attention.layers) / 4)
    assert attention.full_kl == attention.layers[2].kl
    assert "full KL" in render(report)


def test_means_are_over_layers() -> None:
    layers = [LayerQuality(0, None, 5, 0.1, 0.2), LayerQuality(1, 8, 3, 0.3, 0.6)]
    attention = AttentionQuality.of(layers)
    assert attention.kl == pytest.approx(0.2)
    assert attention.output_error == pytest.approx(0.4)
    assert (attention.full_kl, attention.full_output_error) == (0.1, 0.2)
    assert AttentionQuality.of(layers[1:]).full_kl is None


def test_other_programs_captures_need_no_queries_without_attention(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "c.safetensors", small_cache())
    with pytest.raises(ConfigError, match="holds no queries"):
        run_quality([path], schemes=["bf16"])
    report = run_quality([path], schemes=["int8-token"], queries=0)
    result = report.captures[0].schemes[0]
    assert result.attention is None
    assert 0 < result.key.nmse < 1e-4
    assert "attn KL" not in render(report)


def test_every_line_of_the_report_fits(gemma_capture: Path, llama_capture: Path) -> None:
    text = render(run_quality([gemma_capture, llama_capture], schemes=SCHEMES))
    assert max(map(len, text.splitlines())) <= 100
    for scheme in SCHEMES:
        assert text.count(f"\n{scheme} ") == 2


@pytest.mark.parametrize(
    "arguments",
    [{"schemes": []}, {"schemes": ["bf16", "bf16"]}, {"queries": -1}, {"schemes": ["x"]}],
)
def test_arguments_without_sense_are_refused(
    llama_capture: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        run_quality([llama_capture], **arguments)


# -- next token


def test_next_token_sums_agree_with_the_formulae() -> None:
    generator = np.random.default_rng(4)
    p, q = generator.normal(size=(2, 70, 11)) * 3
    q[::2] = p[::2] + 0.01 * q[::2]
    targets = generator.integers(0, 11, 70)
    sums = NextTokenSums()
    sums.add(*(torch.from_numpy(x[:50]) for x in (p, q, targets)))
    sums.add(*(torch.from_numpy(x[50:]) for x in (p, q, targets)))
    result = sums.result()
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p, q))
    assert result.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-9)
    assert result.agreement == (p.argmax(-1) == q.argmax(-1)).mean()
    assert 0 < result.agreement < 1
    loss = -np.log(q[np.arange(70), targets]).mean()
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-9)
    assert result.num_positions == 70


def test_impossible_tokens_do_not_spoil_the_kl() -> None:
    sums = NextTokenSums()
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    sums.add(logits, logits.clone(), torch.tensor([1]))
    assert sums.result().kl == 0


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_next_token_quality_is_that_of_one_plain_forward(make: Any) -> None:
    model, ids = make(dtype=torch.float32), prompt_ids(1, 200)
    prefill = 50

    def halve_values(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype == torch.bfloat16
        return tensor * 0.5 if name.endswith(".value") else tensor

    result = next_token_quality(model, [ids], prefill, halve_values)
    exact, halved = (plain_logits(model, ids, prefill, factor) for factor in (1.0, 0.5))
    sums = NextTokenSums()
    sums.add(exact, halved, ids[0, prefill + 1 :])
    expected = sums.result()
    assert result.num_positions == expected.num_positions == 149
    assert expected.kl > 1e-5
    assert result.kl == pytest.approx(expected.kl, rel=1e-3)
    assert result.agreement == pytest.approx(expected.agreement, abs=0.01)
    assert result.perplexity == pytest.approx(expected.perplexity, rel=1e-5)


def plain_logits(model: Any, ids: torch.Tensor, prefill: int, factor: float) -> torch.Tensor:
    """Logits after each token that follows the prefill but the last, `[n, vocab]`."""
    with torch.no_grad():
        cache = model(input_ids=ids[:, :prefill], use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys = layer.keys.bfloat16().float()
            layer.values = (layer.values.bfloat16() * factor).float()
        logits: torch.Tensor = model(input_ids=ids[:, prefill:-1], past_key_values=cache).logits
    return logits[0]


def test_unchanged_cache_has_no_kl_and_agrees_everywhere() -> None:
    model = tiny_llama(dtype=torch.float32)
    result = next_token_quality(model, [prompt_ids(1, 60)], 40, lambda name, tensor: tensor)
    assert (result.kl, result.agreement, result.num_positions) == (0, 1, 19)


def test_windows_lie_side_by_side_in_each_text() -> None:
    texts = [torch.arange(25), torch.arange(100, 107), torch.arange(200, 210)]
    windows = cut_windows(texts, 10, 8)
    assert [window[0, 0].item() for window in windows] == [0, 10, 200]
    assert all(window.shape == (1, 10) for window in windows)
    assert len(cut_windows(texts, 10, 2)) == 2
    with pytest.raises(ConfigError, match="needs 26 tokens, the text has 25"):
        cut_windows(texts, 26, 1)


def test_schemes_are_measured_on_windows_of_the_capture(llama_capture: Path) -> None:
    level = ModelLevel("tiny", tiny_llama(dtype=torch.float32), prefill=40, positions=15)
    report = run_quality([llama_capture], schemes=SCHEMES, model_level=level)
    (capture,) = report.captures
    assert capture.windows is not None
    # 120 tokens hold two windows of 40 + 15 and the token that follows
    assert (capture.windows.num_windows, capture.windows.dtype) == (2, "float32")
    exact, int8, int4, anchor, full = (r.next_token for r in capture.schemes)
    assert exact is not None
    assert (exact.kl, exact.agreement, exact.num_positions) == (0, 1, 30)
    assert exact.perplexity == capture.windows.exact_perplexity
    for fine, coarse in ((int8, int4), (full, anchor)):
        assert fine is not None
        assert coarse is not None
        assert 0 < fine.kl < coarse.kl
    assert "2 windows of 40 + 15 tokens" in render(report)


def test_text_of_another_models_capture_is_refused(llama_capture: Path) -> None:
    level = ModelLevel("tiny", tiny_llama(dtype=torch.float32, rope_theta=500.0))
    with pytest.raises(IdentityMismatch, match="rope"):
        run_quality([llama_capture], schemes=["bf16"], model_level=level)


# -- command line


def test_command_prints_a_table_and_writes_the_same_as_json(
    llama_capture: Path, tmp_path: Path
) -> None:
    model = save_model(tiny_llama(), tmp_path / "model")
    (tmp_path / "text").write_text(" ".join(f"w{i % 99}" for i in range(70)))
    arguments = ["bench", llama_capture, "--quality", "--scheme", "int4-channel", "--codec"]
    arguments += ["lynx", "--model", model, "--text", "text", "--prefill", "30", "--positions"]
    result = kvz_command(*arguments, "30", "--json", "r.json", cwd=tmp_path)
    assert result.stderr == b""
    document = json.loads((tmp_path / "r.json").read_text())
    (capture,) = document["captures"]
    assert [scheme["name"] for scheme in capture["schemes"]] == ["int4-channel", "lynx"]
    assert capture["windows"]["num_windows"] == 1
    text = result.stdout.decode()
    for scheme in capture["schemes"]:
        bits = scheme["bits"]["total"]
        assert f"{bits:.3f}" in text
        assert 0 < scheme["next_token"]["kl"] < 1
        assert len(scheme["attention"]["layers"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "lynx"], "--scheme needs --quality"),
        (["--queries", "9"], "--queries needs --quality"),
        (["--quality", "--windows", "2"], "--windows needs --model"),
        (["--quality", "--gguf-file", "x"], "--gguf-file needs --model"),
        (["--quality", "--size", "1M"], "--size and --calibrate-on measure speed, not --quality"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    write_cache(tmp_path / "c.safetensors", small_cache())
    result = kvz_command("bench", "c.safetensors", *arguments, cwd=tmp_path)
    assert_refused(result, 2, f"{message} (see kvz bench --help)")


def test_capture_without_queries_is_one_clear_line(tmp_path: Path) -> None:
    write_cache(tmp_path / "c.safetensors", small_cache())
    result = kvz_command("bench", "c.safetensors", "--quality", cwd=tmp_path)
    line = (
        "c.safetensors: holds no queries, without which attention cannot be compared: capture it "
        "with kvz capture --queries 512, or leave attention out with --queries 0"
    )
    assert_refused(result, 2, line)


def test_unknown_scheme_and_gpu_are_one_clear_line(tmp_path: Path) -> None:
    write_cache(tmp_path / "c.safetensors", small_cache())
    arguments = ["bench", "c.safetensors", "--quality", "--queries", "0"]
    result = kvz_command(*arguments, "--scheme", "int5", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(b"kvz: error: scheme 'int5' is none of bf16, uniform, ")
    if not torch.cuda.is_available():
        result = kvz_command(*arguments, "--device", "cuda", cwd=tmp_path)
        assert_refused(result, 2, "device cuda: torch finds no GPU")
