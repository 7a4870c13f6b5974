"""Options, argument types and file name rules that several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvz.cli.text import is_terminal
from kvz.devices import DEFAULT_DEVICE, gpu_index
from kvz.formats.errors import ConfigError, SourceError
from kvz.formats.ids import CODEC_NAMES
from kvz.formats.limits import MAX_TENSORS
from kvz.remote.urls import is_remote, local_path, with_suffix

STANDARD_STREAM = "-"
#: Files are checked where they are opened, so that every fault of one has the same exit code.


class _Path(click.Path):
    """An empty name is none: in a script it is a variable that was never set."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(readable=False)
PATH_OR_DASH = _Path(readable=False, allow_dash=True)
F = TypeVar("F", bound=Callable[..., Any])

threads_option = click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Threads; default one per processor."
)
overwrite_option = click.option(
    "-f", "--overwrite", is_flag=True, help="Replace the output if it exists."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def output_option(**settings: Any) -> Callable[[F], F]:
    """``-o``, given to the command as ``destination``."""
    return click.option("-o", "--output", "destination", type=PATH, **settings)


def parse_layers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> frozenset[int] | None:
    """``0-3,7``: layer numbers and ranges that include both ends."""
    if value is None:
        return None
    layers: set[int] = set()
    for part in value.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise click.BadParameter(f"{value!r} must be layers or ranges of them, such as 0-3,7")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise click.BadParameter(f"range {part.strip()} ends before it begins")
        # bounds the set, not the model
        if last >= MAX_TENSORS:
            raise click.BadParameter(f"no model has a layer {last}")
        layers.update(range(first, last + 1))
    return frozenset(layers)


def parse_tokens(ctx: click.Context, param: click.Parameter, value: str | None) -> slice | None:
    """``0:512``: the stored tokens from the first number up to, not including, the second.

    A number that is left out is the first token or the end.
    """
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]*):([0-9]*)", value.strip())
    if match is None or match[0] == ":":
        raise click.BadParameter(f"{value!r} must be START:STOP, such as 0:512")
    start, stop = (int(number) if number else None for number in match.groups())
    if stop is not None and stop <= (start or 0):
        raise click.BadParameter(f"{value!r} holds no token: STOP must be greater than START")
    return slice(start, stop)


def parse_device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    try:
        gpu_index(value)
    except ConfigError:
        raise click.BadParameter(f"{value!r} must be auto, cpu, cuda or cuda:N") from None
    return value


device_option = click.option(
    "--device",
    default=DEFAULT_DEVICE,
    show_default=True,
    metavar="auto|cpu|cuda[:N]",
    callback=parse_device,
    help="Where the codec runs; auto is the CPU.",
)
timings_option = click.option(
    "--timings", is_flag=True, help="With --device cuda: also print how long each stage took."
)


def check_timings(timings: bool, device: str) -> None:
    """Only the GPU pipeline has stages."""
    if timings and gpu_index(device) is None:
        raise click.UsageError("--timings needs --device cuda")


_SIZE_UNITS = {"K": 10, "M": 20, "G": 30}


def parse_sizes(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """``512M``, ``2G``: binary units."""
    sizes = []
    for value in values:
        match = re.fullmatch(r"([1-9][0-9]{0,5})([KMG])", value.strip())
        if match is None:
            raise click.BadParameter(f"{value!r} must be a number and K, M or G, such as 512M")
        sizes.append(int(match[1]) << _SIZE_UNITS[match[2]])
    return tuple(sizes)


def codec_option(default: str) -> Callable[[F], F]:
    return click.option(
        "--codec", type=click.Choice(CODEC_NAMES), default=default, show_default=True
    )


def _key_values(_: click.Context, param: click.Parameter, items: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not key or not separator:
            raise click.BadParameter(f"{item!r} must be KEY=VALUE, such as axis=channel")
        if key in options:
            raise click.BadParameter(f"{key!r} is given twice")
        options[key] = value
    return options


codec_options_option = click.option(
    "--codec-option",
    "codec_options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_key_values,
    help="An option of the codec, such as windows=3/4 or axis=channel (gaac), level=19 (zstd).",
)


def layout_options(command: F) -> F:
    """``--layout`` and ``--pattern``."""
    pattern = click.option(
        "--pattern", metavar="REGEX", help="Names of the tensors that are caches."
    )
    axes = click.option(
        "--layout",
        "axes",
        metavar="AXES",
        help="A letter for each axis of a cache tensor, T for tokens, such as BHTD; default: by "
        "name and shape.",
    )
    return axes(pattern(command))


def default_destination(source: str, destination: str | None, suffix: str) -> str:
    """The output's path: ``source`` with another suffix unless one was given."""
    if destination is not None:
        return destination
    if source == STANDARD_STREAM:
        raise click.UsageError("name the output with -o when the input is standard input")
    if is_remote(source):
        return with_suffix(source, suffix)
    if Path(local_path(source)).is_dir():
        raise click.UsageError(f"{source} is a folder: name a file")
    return str(Path(local_path(source)).with_suffix(suffix))


def check_streams(source: str | None, destination: str | None) -> None:
    """Refuse to read or write binary data on a terminal, or on a stream that is closed."""
    for path, stream, verb in (
        (source, sys.stdin, "read from"),
        (destination, sys.stdout, "write to"),
    ):
        if path != STANDARD_STREAM:
            continue
        if stream is None:
            raise SourceError(f"cannot {verb} a closed standard stream")
        if is_terminal(stream):
            raise click.UsageError(f"refusing to {verb} a terminal: use a file or a pipe")


def check_writable_later(destination: str, overwrite: bool) -> None:
    """Refuse an output before the long work that it is for. Raises SourceError."""
    # of an object, the upload asks at its start
    if destination == STANDARD_STREAM or is_remote(destination):
        return
    path = Path(local_path(destination))
    if path.exists() and not overwrite:
        raise SourceError(f"{destination}: exists already; use -f to overwrite it")
    if not path.parent.is_dir():
        raise SourceError(f"{destination}: no such folder: {path.parent}")
