"""Help, version, and how little is loaded for them."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import click
import pytest
from cli_support import kvz, python, small_cache, write_cache

from kvz.cli.group import COMMANDS, group
from kvz.version import __version__

HEAVY = ("click.testing", "numba", "rich", "torch", "transformers", "zstandard")


def loaded_by(arguments: list[str], cwd: Path) -> set[str]:
    """Top-level packages and modules of kvz that a command line imports."""
    result = python(
        "import contextlib, io, sys\n"
        "from kvz.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({arguments!r})\n"
        "print(' '.join(sys.modules))\n",
        cwd=cwd,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_one_imperative_sentence_first_and_has_a_pasteable_example(
    name: str, flag: str
) -> None:
    arguments = [name] * bool(name) + [flag]
    context = click.Context(group, info_name="kvz", **group.context_settings)
    command = group.get_command(context, name) if name else group
    assert command is not None
    assert command.help is not None
    first, *rest = command.help.splitlines()
    assert first.endswith(".")
    assert rest[0] == ""
    if name:
        assert first == COMMANDS[name]
    example = command.help.split("Example:\n")[1].strip()
    assert example.startswith(f"kvz {name}".strip())
    assert "\n" not in example
    for part in example.split(" && "):
        # as if pasted: every option exists, every value is one that it takes
        program, used, *given = shlex.split(part)
        parsed = group.get_command(context, used)
        assert (program, parsed is None) == ("kvz", False)
        assert parsed is not None
        parsed.make_context(used, given, parent=context)
    with pytest.raises(click.exceptions.Exit) as ended:
        group.invoke(group.make_context("kvz", arguments))
    assert ended.value.exit_code == 0


def test_help_and_version_go_to_stdout_and_end_with_0(tmp_path: Path) -> None:
    shown = kvz("--help", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert all(f"  {name} " in shown.stdout.decode() for name in COMMANDS)
    assert kvz("verify", "-h", cwd=tmp_path).stdout.startswith(b"Usage: kvz verify ")
    version = kvz("--version", cwd=tmp_path)
    assert (version.returncode, version.stdout.decode()) == (0, f"kvz {__version__}\n")


def test_every_module_of_a_command_is_listed_in_the_group() -> None:
    folder = Path(importlib.import_module("kvz.cli").__file__ or "").parent
    with_command = {
        path.stem for path in folder.glob("*.py") if "\ndef command(" in path.read_text()
    }
    assert with_command == set(COMMANDS)


def test_help_imports_no_command_and_nothing_heavy(tmp_path: Path) -> None:
    loaded = loaded_by(["--help"], tmp_path)
    assert "click" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert "numpy" not in loaded
    assert loaded.isdisjoint(f"kvz.cli.{name}" for name in COMMANDS)


def test_inspect_imports_nothing_heavy(tmp_path: Path) -> None:
    write_cache(tmp_path / "c.safetensors", small_cache())
    assert kvz("compress", "c.safetensors", cwd=tmp_path).returncode == 0
    loaded = loaded_by(["inspect", "c.kvz", "--sections", "--tags"], tmp_path)
    assert "kvz.inspection" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_help_of_each_command_imports_nothing_heavy(tmp_path: Path) -> None:
    for name in COMMANDS:
        assert loaded_by([name, "--help"], tmp_path).isdisjoint({*HEAVY, "numpy"})
