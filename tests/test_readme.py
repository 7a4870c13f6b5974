"""The README's commands work as they stand, and it knows every command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from s3_server import S3Server, s3_server

__all__ = ["s3_server"]

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
MARK = "<!-- executed by tests/test_readme.py -->"
SERVER_MARK = "<!-- executed by tests/test_readme.py with a model and a server -->"


def executed_blocks(mark: str = MARK) -> list[tuple[str, str]]:
    return re.findall(rf"{re.escape(mark)}\n```(\w+)\n(.*?)```", README, re.DOTALL)


def run_block(
    language: str, block: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a block as it stands; it must end well."""
    if language == "sh":
        preamble = f'set -euo pipefail; kvz() {{ "{sys.executable}" -m kvz "$@"; }}\n'
        command = ["bash", "-c", preamble + block]
    else:
        command = [sys.executable, "-c", block]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder that looks like the checkout to the commands, and takes what they write."""
    (tmp_path / "samples").mkdir()
    sample = "samples/smollm2-docs.safetensors"
    shutil.copy(ROOT / sample, tmp_path / sample)
    return tmp_path


def test_there_is_something_to_execute() -> None:
    assert [language for language, _ in executed_blocks()] == ["sh", "python"]


@pytest.mark.parametrize(("language", "block"), executed_blocks(), ids=lambda value: value[:6])
def test_block_runs(language: str, block: str, workplace: Path) -> None:
    run_block(language, block, workplace)


def test_the_archiving_pipeline_runs_from_one_machine_to_another(
    s3_server: S3Server, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from tiny_models import WORDS, save_model, tiny_llama

    here, there = tmp_path / "here", tmp_path / "there"
    save_model(tiny_llama(), here / "model")
    shutil.copytree(here / "model", there / "model")
    (here / "prompt.txt").write_text(" ".join(WORDS[5:45]))
    s3_server.make_bucket("caches")
    (_, first), (_, second) = executed_blocks(SERVER_MARK)
    settings = {**s3_server.environment(), "OMP_NUM_THREADS": "1"}

    archived = run_block("sh", first, here, **settings)
    listed = archived.stdout.splitlines()[-1].split()
    assert (listed[0], listed[-4:]) == ("prompt.kvz", ["gaac", "llama", "40", "lossless"])
    (entry,) = (json.loads(line) for line in (here / "run-7.jsonl").read_text().splitlines())
    assert entry["destination"] == "s3://caches/run-7/prompt.kvz"

    restored = run_block("sh", second, there, **settings)
    local = "kvz compress captures/prompt.safetensors -o p.kvz >&2\n"
    local += "kvz generate p.kvz --model ./model --max-new-tokens 16"
    expected = run_block("sh", local, here, **settings).stdout
    assert len(expected.split()) == 16
    assert restored.stdout.endswith(expected)


def test_every_command_is_documented() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "kvz", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"^  (\w+) ", help_text.partition("Commands:")[2], re.MULTILINE)
    assert len(commands) >= 8
    missing = [name for name in commands if f"`kvz {name}`" not in README]
    assert missing == []
