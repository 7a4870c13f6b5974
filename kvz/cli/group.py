"""The group of commands; a command's module is imported when the command is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from click.exceptions import Exit

from kvz.cli import errors
from kvz.version import __version__

#: Each command is ``command`` in the module of its name; here with the first line of its help.
COMMANDS = {
    "capture": "Run a prompt through a model and save its KV cache.",
    "compress": "Compress a cache into an archive.",
    "decompress": "Restore the tensors of an archive, exactly if its codec is lossless.",
    "verify": "Check archives from the first byte to the last.",
    "ls": "List the archives in a folder or under a prefix.",
    "inspect": "Show what is in an archive.",
    "generate": "Go on generating from a cache, in a new process.",
    "split": "Split a cache into shards by its kv heads.",
    "merge": "Merge the shards of a cache into one file.",
    "convert": "Convert a cache dump of another program to a capture.",
    "calibrate": "Make a codebook from one or several caches.",
    "bench": "Measure codecs and baselines on your own caches.",
}

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class LazyGroup(click.Group):
    """Knows the commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"kvz.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="kvz", message="%(prog)s %(version)s")
def group() -> None:
    """Archive LLM KV caches, exact to the bit or openly lossy.

    \b
    Example:
      kvz compress cache.safetensors && kvz verify cache.kvz --against cache.safetensors
    """


def invoke(arguments: list[str]) -> int:
    """Run a command line; returns the exit code of a command that ended well, or of its usage."""
    try:
        # not group.main(): it has its own ideas of exit codes for Ctrl-C and closed pipes
        with group.make_context("kvz", arguments) as context:
            result: Any = group.invoke(context)
        return result if isinstance(result, int) else 0
    except Exit as error:
        return error.exit_code
    except click.ClickException as error:
        path = getattr(getattr(error, "ctx", None), "command_path", "kvz")
        return errors.report_usage(_message(error), path)


def _message(error: click.ClickException) -> str:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return "no command given"
    return " ".join(error.format_message().split())
