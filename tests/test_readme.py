"""The README's commands work as they stand, and it knows every command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
MARK = "<!-- executed by tests/test_readme.py -->"


def executed_blocks() -> list[tuple[str, str]]:
    return re.findall(rf"{re.escape(MARK)}\n```(\w+)\n(.*?)```", README, re.DOTALL)


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
    if language == "sh":
        preamble = f'set -euo pipefail; kvz() {{ "{sys.executable}" -m kvz "$@"; }}\n'
        command = ["bash", "-c", preamble + block]
    else:
        command = [sys.executable, "-c", block]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_is_documented() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "kvz", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"^  (\w+) ", help_text.partition("Commands:")[2], re.MULTILINE)
    assert len(commands) >= 8
    missing = [name for name in commands if f"`kvz {name}`" not in README]
    assert missing == []
