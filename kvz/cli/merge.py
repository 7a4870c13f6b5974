"""``kvz merge``."""

from __future__ import annotations

from pathlib import Path

import click

from kvz.cli import options
from kvz.cli.text import count, emit, emit_json, printable
from kvz.formats.errors import SourceError
from kvz.remote.urls import is_remote, local_path


@click.command()
@click.argument("files", metavar="SHARD...", nargs=-1, required=True, type=options.PATH)
@options.output_option(required=True, help="Safetensors file to write.")
@options.overwrite_option
@options.json_option
def command(files: tuple[str, ...], destination: str, overwrite: bool, as_json: bool) -> None:
    """Merge the shards of a cache into one file.

    Shards are archives or .safetensors captures, in any order. They must be of one model and the
    same tokens and hold each kv head exactly once.

    \b
    Example:
      kvz merge cache-0-of-2.safetensors cache-1-of-2.safetensors -o cache.safetensors
    """
    if not destination.endswith(".safetensors"):
        raise click.UsageError(f"{destination} must end in .safetensors")
    from kvz.files import same_file

    for file in files:
        if not is_remote(file) and not Path(local_path(file)).is_file():
            raise SourceError(f"{file}: no such file")
        if same_file(file, destination):
            raise click.UsageError(f"{file} is both a shard and the output")
    options.check_writable_later(destination, overwrite)
    from kvz.sharding import merge

    num_heads = merge(files, destination, overwrite=overwrite)
    if as_json:
        emit_json({"destination": destination, "kv_heads": num_heads, "shards": list(files)})
    else:
        emit(f"{printable(destination)}: {count(num_heads, 'kv head')} of {len(files)} shards")
