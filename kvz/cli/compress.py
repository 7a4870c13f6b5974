"""``kvz compress``."""

from __future__ import annotations

from typing import Any

import click

from kvz.cli import compress_batch, compress_text, options
from kvz.cli.progress import file_nbytes, meter
from kvz.cli.text import emit, emit_json, format_stages


@click.command()
@click.argument("sources", metavar="SRC...", nargs=-1, required=True, type=options.PATH_OR_DASH)
@options.output_option(help="Archive to write, - for standard output; default SRC with .kvz.")
@click.option(
    "--out-dir",
    metavar="DIR|URL",
    type=options.PATH,
    help="Write one archive for each of several SRC, folders and prefixes included.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"With --out-dir: files at one time; default {compress_batch.DEFAULT_JOBS}.",
)
@options.codec_option("gaac")
@options.codec_options_option
@click.option("--codebook", metavar="FILE", type=options.PATH, help="Made by kvz calibrate.")
@options.layout_options
@options.device_option
@options.threads_option
@options.timings_option
@options.overwrite_option
@options.json_option
def command(
    sources: tuple[str, ...],
    destination: str | None,
    out_dir: str | None,
    jobs: int | None,
    codec: str,
    codec_options: dict[str, str],
    codebook: str | None,
    axes: str | None,
    pattern: str | None,
    device: str,
    threads: int | None,
    timings: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Compress a cache into an archive.

    SRC is a safetensors file, its URL, or - for standard input; the archive may go to a URL. BF16
    tensors of the cache go through the codec, everything else is stored by zstd; all of it comes
    back exactly, unless the codec is lossy (lynx, pnmix): then keys and values come back close to
    what they were.

    With --out-dir SRC may also be a folder, a URL prefix ending in / (all .safetensors files below
    them), or a pattern in quotes; --json prints one document a line. A run that was interrupted is
    taken up: an archive that is there is kept if it is whole, its tensors, metadata and codec are
    those of its source (values are not compared), and -f is not given. All files are tried; the
    exit code is the highest of theirs.

    \b
    Example:
      kvz compress cache.safetensors -o cache.kvz
    """
    options.check_timings(timings, device)
    settings: dict[str, Any] = {
        "codec": codec,
        "codec_options": codec_options,
        "codebook": codebook,
        "device": device,
        "threads": threads,
    }
    if out_dir is not None:
        if destination is not None or timings or options.STANDARD_STREAM in sources:
            raise click.UsageError("--out-dir takes files, and neither -o nor --timings")
        return compress_batch.run(
            sources, out_dir, jobs, (axes, pattern), settings, overwrite=overwrite, as_json=as_json
        )
    if len(sources) > 1 or jobs is not None:
        raise click.UsageError("several SRC, and --jobs, need --out-dir")
    _compress_one(sources[0], destination, (axes, pattern), settings, timings, overwrite, as_json)
    return 0


def _compress_one(
    source: str,
    destination: str | None,
    layout: tuple[str | None, str | None],
    settings: dict[str, Any],
    timings: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    target = options.default_destination(source, destination, ".kvz")
    options.check_streams(source, target)
    import kvz

    with meter("compressing", file_nbytes(source)) as progress:
        report = kvz.compress(
            source,
            target,
            **settings,
            layout=kvz.Layout(*layout),
            overwrite=overwrite,
            progress=progress.advance,
        )
    compress_text.note_guess(report)
    to_stderr = target == options.STANDARD_STREAM
    if as_json:
        emit_json(compress_text.document(report), to_stderr=to_stderr)
    else:
        emit(compress_text.line(report), to_stderr=to_stderr)
        if timings and report.stages is not None:
            emit(format_stages(report.stages, report.original_nbytes), to_stderr=to_stderr)
