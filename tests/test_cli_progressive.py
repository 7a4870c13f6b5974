"""``kvz generate --progressive`` and sampling, with a tiny randomly initialised model."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import assert_refused, kvz

from kvz.cli import errors, main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

GENERATE = ("--model", "model", "--dtype", "float32", "--force", "--json")
# the archive holds a bfloat16 cache; float32 weights are others
WARNING = "kvz: warning: c.kvz: overridden: dtype: file BF16, model F32\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, the capture ``c.safetensors`` and the lynx archive ``c.kvz``."""
    from tiny_models import prompt_ids, save_model, tiny_gemma

    from kvz.capturing import capture

    path = tmp_path_factory.mktemp("progressive")
    model = tiny_gemma(dtype=torch.bfloat16, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight *= 40
    save_model(model, path / "model")
    capture(model, prompt_ids(1, 200), queries=0).save(path / "c.safetensors")
    assert kvz("compress", "c.safetensors", "--codec", "lynx", cwd=path).returncode == 0
    return path


Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, where torch is loaded already: code, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(errors, "clean_up_on_termination", lambda: None)

    def call(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return (ended.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def plain(run: Run) -> dict[str, Any]:
    """What ``kvz generate`` says without drafts."""
    code, stdout, stderr = run("generate", "c.kvz", *GENERATE, "--max-new-tokens", "30")
    assert (code, stderr) == (0, WARNING)
    document: dict[str, Any] = json.loads(stdout)
    assert len(document["token_ids"]) == 30
    return document


@pytest.mark.parametrize("max_drafts", [1, 8, 64])
def test_the_verified_text_is_that_of_the_whole_archive(
    run: Run, plain: dict[str, Any], max_drafts: int
) -> None:
    code, stdout, stderr = run(
        *("generate", "c.kvz", "--progressive", *GENERATE, "--max-new-tokens", "30"),
        *("--max-drafts", str(max_drafts)),
    )
    assert (code, stderr) == (0, WARNING)
    document = json.loads(stdout)
    speculation = document.pop("speculation")
    assert document == plain
    assert len(speculation["draft_ids"]) == speculation["num_drafted"] <= min(max_drafts, 15)
    accepted = speculation["num_accepted"]
    assert speculation["draft_ids"][:accepted] == plain["token_ids"][:accepted]


def test_on_a_terminal_drafts_are_shown_apart_from_the_text(
    run: Run, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvz.cli.generate.is_terminal", lambda stream: True)
    monkeypatch.setattr("kvz.progressive.ProgressiveReader.is_complete", lambda self: False)
    code, stdout, stderr = run(
        *("generate", "c.kvz", "--progressive", *GENERATE[:-1]),
        *("--max-new-tokens", "30", "--max-drafts", "6"),
    )
    assert (code, stdout) == (0, plain["text"] + "\n")
    draft, verdict, warning = stderr.splitlines()
    assert draft.startswith("kvz: draft: ")
    drafted = draft.removeprefix("kvz: draft: ").split()
    assert len(drafted) == 6
    accepted = int(verdict.removeprefix("kvz: ").partition(" of 6 drafted tokens verified")[0])
    assert drafted[:accepted] == plain["text"].split()[:accepted]
    assert warning + "\n" == WARNING


class Gate(io.RawIOBase):
    """A stream that stops before a byte until it is opened."""

    def __init__(self, data: bytes, stop: int) -> None:
        self._data = memoryview(data)
        self._stop = stop
        self._position = 0
        self.opened = threading.Event()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), len(self._data))
        if self._position >= self._stop:
            assert self.opened.wait(60)
        elif not self.opened.is_set():
            end = min(end, self._stop)
        part = self._data[self._position : end]
        buffer[: len(part)] = part
        self._position = end
        return len(part)


@pytest.mark.parametrize("num_before", [1, 6, 15])
def test_drafts_are_made_while_the_residuals_are_on_their_way(
    folder: Path, run: Run, plain: dict[str, Any], num_before: int
) -> None:
    from kvz.hf import load_model
    from kvz.progressive import ProgressiveReader
    from kvz.speculation import speculate

    anchor_nbytes = json.loads(run("inspect", "c.kvz", "--json")[1])["anchor_nbytes"]
    gate = Gate((folder / "c.kvz").read_bytes(), anchor_nbytes)
    model, _ = load_model(str(folder / "model"), dtype="float32")
    drafted: list[int] = []

    def on_draft(token_id: int) -> None:
        drafted.append(token_id)
        if len(drafted) == num_before:
            gate.opened.set()
            reader.full()

    with ProgressiveReader(gate) as reader:
        anchor = reader.anchor()
        assert not reader.is_complete()
        report = speculate(
            anchor, reader.full, model, 30, ready=reader.is_complete, on_draft=on_draft, force=True
        )
    assert list(report.draft_ids) == drafted
    assert len(drafted) == num_before
    assert list(report.token_ids) == plain["token_ids"]


def test_an_archive_comes_through_a_pipe(folder: Path, plain: dict[str, Any]) -> None:
    result = kvz(
        *("generate", "-", "--progressive", *GENERATE, "--max-new-tokens", "30"),
        cwd=folder,
        data=(folder / "c.kvz").read_bytes(),
    )
    assert (result.returncode, result.stderr.decode()) == (0, WARNING.replace("c.kvz", "<stdin>"))
    assert json.loads(result.stdout)["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_a_file_cut_in_its_anchors_or_residuals_prints_no_text(
    folder: Path, tmp_path: Path, kept: float
) -> None:
    data = (folder / "c.kvz").read_bytes()
    (tmp_path / "cut.kvz").write_bytes(data[: int(kept * len(data))])
    os.symlink(folder / "model", tmp_path / "model")
    result = kvz("generate", "cut.kvz", "--progressive", *GENERATE, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (4, b"")
    assert result.stderr.startswith(b"kvz: error: cut.kvz: ")
    assert b"incomplete" in result.stderr
    assert result.stderr.count(b"\n") == 1


def test_samples_are_those_of_the_seed(run: Run) -> None:
    sampled = (*GENERATE, "--temperature", "3", "--top-k", "50", "--top-p", "0.99")
    for way in ((), ("--progressive",)):
        first, again, other = (
            json.loads(run("generate", "c.kvz", *way, *sampled, "--seed", seed)[1])["token_ids"]
            for seed in ("1", "1", "2")
        )
        assert first == again != other


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["c.kvz", "--max-drafts", "3"], "--max-drafts needs --progressive"),
        (["c.kvz", "--seed", "3"], "--top-k, --top-p and --seed need --temperature"),
        (["-"], "reading from standard input needs --progressive"),
    ],
)
def test_options_that_need_others_say_so(given: list[str], line: str, tmp_path: Path) -> None:
    result = kvz("generate", *given, "--model", "model", cwd=tmp_path)
    assert_refused(result, 2, f"{line} (see kvz generate --help)")


def test_an_archive_without_anchors_is_refused_before_the_model_is_loaded(folder: Path) -> None:
    result = kvz("compress", "c.safetensors", "-o", "gaac.kvz", "-f", cwd=folder)
    assert result.returncode == 0
    result = kvz("generate", "gaac.kvz", "--progressive", "--model", "no/such/model", cwd=folder)
    assert_refused(
        result,
        2,
        "gaac.kvz: has no anchors: only codec lynx makes them, this archive is of gaac, zstd",
    )
