"""``kvz capture`` and ``kvz generate`` with a tiny randomly initialised model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import assert_refused, kvz, names, read_cache

from kvz.cli import errors, main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

WORDS = [f"w{i}" for i in range(128)]
PROMPT = " ".join(WORDS[i * 37 % 128] for i in range(3, 43))


def save_model(folder: Path, seed: int) -> Any:
    """A model and a tokenizer with one token for each word; returns the model."""
    from tiny_models import tiny_llama
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    # float32: the comparison with transformers' own generate must not hang on a rounding
    model = tiny_llama(seed, torch.float32)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with ``model``, ``other`` and the archive ``c.kvz`` of a prompt; the model."""
    folder = tmp_path_factory.mktemp("models")
    model = save_model(folder / "model", 0)
    save_model(folder / "other", 1)
    (folder / "prompt.txt").write_text(PROMPT)
    captured = kvz(
        *("capture", "model", "--prompt-file", "prompt.txt", "-o", "c.safetensors"),
        *("--dtype", "float32", "--max-tokens", "32", "--queries", "8"),
        cwd=folder,
    )
    assert (captured.returncode, captured.stderr) == (0, b"")
    # 32 tokens; key, value, query and two norms of 3 layers, and five tensors besides
    assert captured.stdout.startswith(b"c.safetensors: 32 tokens, 20 tensors, ")
    assert kvz("compress", "c.safetensors", cwd=folder).returncode == 0
    return folder, model


Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def run(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command in this process, where torch is loaded already: code, stdout, stderr."""
    monkeypatch.chdir(made[0])
    monkeypatch.setattr(errors, "clean_up_on_termination", lambda: None)

    def call(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return (ended.value.code, *capsys.readouterr())

    return call


def test_a_capture_holds_the_first_tokens_of_the_prompt(made: tuple[Path, Any]) -> None:
    tensors = read_cache((made[0] / "c.safetensors").read_bytes())
    expected = torch.tensor([[i * 37 % 128 for i in range(3, 35)]])
    assert tensors["input_ids"] == ("I64", [1, 32], expected.numpy().tobytes())
    assert tensors["layers.2.query"][1] == [1, 4, 8, 16]


def test_generate_says_what_the_model_would_have_said(made: tuple[Path, Any]) -> None:
    folder, model = made
    prompt = torch.tensor([[i * 37 % 128 for i in range(3, 35)]])
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, 32:].tolist()
    result = kvz(
        *("generate", "c.kvz", "--model", "model", "--dtype", "float32"),
        *("--max-new-tokens", "12", "--json"),
        cwd=folder,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    document = json.loads(result.stdout)
    assert document["token_ids"] == expected
    assert document["text"].split() == [WORDS[i] for i in expected]


def test_generate_goes_on_after_a_prompt(made: tuple[Path, Any], run: Run) -> None:
    prompt = torch.tensor([[i * 37 % 128 for i in range(3, 35)] + [5, 9]])
    expected = made[1].generate(prompt, max_new_tokens=6, do_sample=False)[0, 34:].tolist()
    code, stdout, stderr = run(
        *("generate", "c.kvz", "--model", "model", "--dtype", "float32"),
        *("--prompt", "w5 w9", "--max-new-tokens", "6"),
    )
    assert (code, stderr) == (0, "")
    assert stdout.split() == [WORDS[i] for i in expected]


def test_a_cache_of_another_model_is_5(run: Run) -> None:
    given = ("generate", "c.kvz", "--model", "other", "--dtype", "float32")
    code, stdout, stderr = run(*given)
    assert (code, stdout) == (5, "")
    assert stderr.startswith("kvz: error: c.kvz: cache belongs to another model: weights:")
    assert stderr.count("\n") == 1
    code, stdout, stderr = run(*given, "--force", "--max-new-tokens", "3")
    assert (code, len(stdout.split())) == (0, 3)


def test_an_empty_prompt_is_2(run: Run) -> None:
    result = run("capture", "model", "-o", "d.safetensors", "--prompt", " ")
    assert result == (2, "", "kvz: error: the prompt has no tokens\n")


def test_what_cannot_end_well_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "c.safetensors").write_bytes(b"precious")
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    before = names(tmp_path)
    assert_refused(
        kvz("generate", "gone.kvz", "--model", "model", cwd=tmp_path),
        6,
        "gone.kvz: No such file or directory",
    )
    assert_refused(
        kvz("capture", "model", "-o", "c.safetensors", "--prompt", "w1", cwd=tmp_path),
        6,
        "c.safetensors: exists already; use -f to overwrite it",
    )
    assert_refused(
        kvz("capture", "model", "-o", "no/c.safetensors", "--prompt", "w1", cwd=tmp_path),
        6,
        "no/c.safetensors: no such folder: no",
    )
    assert_refused(
        kvz("capture", "m", "-o", "d.safetensors", "--prompt-file", "latin1", cwd=tmp_path),
        6,
        "latin1: is not UTF-8 text (byte 3)",
    )
    assert_refused(
        kvz("capture", "m", "-o", "d.safetensors", "--prompt-file", "gone", cwd=tmp_path),
        6,
        "gone: No such file or directory",
    )
    assert names(tmp_path) == before
