"""``kvz split``."""

from __future__ import annotations

from pathlib import Path

import click

from kvz.cli import options
from kvz.cli.text import emit, emit_json, printable
from kvz.formats.errors import SourceError
from kvz.remote.urls import is_remote, local_path


@click.command()
@click.argument("file", metavar="FILE", type=options.PATH)
@click.option(
    "--shards", type=click.IntRange(min=2), required=True, metavar="N", help="How many pieces."
)
@click.option(
    "-o",
    "--output",
    "stem",
    metavar="STEM",
    help="Begin the names with STEM; default FILE without its suffix.",
)
@options.json_option
def command(file: str, shards: int, stem: str | None, as_json: bool) -> None:
    """Split a cache into shards by its kv heads.

    FILE is an archive or a .safetensors capture. Shard 0 of 2 is written to STEM-0-of-2.safetensors
    and so on; each holds an equal run of the kv heads, in all layers, and says which. A shard by
    itself is refused wherever a whole cache is needed.

    \b
    Example:
      kvz split cache.kvz --shards 2
    """
    if is_remote(stem or file):
        raise click.UsageError("shards are written to local files: begin their names with -o")
    if not is_remote(file) and not Path(local_path(file)).is_file():
        raise SourceError(f"{file}: no such file")
    from kvz.sharding import split

    begin = local_path(stem) if stem else str(Path(local_path(file)).with_suffix(""))
    paths = [f"{begin}-{i}-of-{shards}.safetensors" for i in range(shards)]
    ranges = split(file, paths)
    if as_json:
        emit_json(
            {"shards": [{"path": p, "kv_heads": h} for p, h in zip(paths, ranges, strict=True)]}
        )
        return
    for path, (first, end) in zip(paths, ranges, strict=True):
        emit(f"{printable(path)}: kv heads {first}:{end} of {ranges[-1][1]}")
