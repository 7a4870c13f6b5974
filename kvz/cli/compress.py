"""``kvz compress``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvz.cli import options
from kvz.cli.progress import file_nbytes, meter
from kvz.cli.text import count, emit, emit_json, format_nbytes, format_stages, printable
from kvz.formats.ids import LOSSY_CODECS

if TYPE_CHECKING:
    from kvz.compressing import CompressReport


@click.command()
@click.argument("source", metavar="SRC", type=options.PATH_OR_DASH)
@options.output_option(help="Archive to write, - for standard output; default SRC with .kvz.")
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
    source: str,
    destination: str | None,
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
) -> None:
    """Compress a cache into an archive.

    SRC is a safetensors file, its URL, or - for standard input; the archive may go to a URL. BF16
    tensors of the cache go through the codec, everything else is stored by zstd; all of it comes
    back exactly, unless the codec is lossy (lynx): then keys and values come back close to what
    they were.

    \b
    Example:
      kvz compress cache.safetensors -o cache.kvz
    """
    target = options.default_destination(source, destination, ".kvz")
    options.check_streams(source, target)
    options.check_timings(timings, device)
    import kvz

    with meter("compressing", file_nbytes(source)) as progress:
        report = kvz.compress(
            source,
            target,
            codec,
            codec_options=codec_options,
            codebook=codebook,
            layout=kvz.Layout(axes, pattern),
            device=device,
            threads=threads,
            overwrite=overwrite,
            progress=progress.advance,
        )
    if report.guessed_axis is not None:
        note = f"took {report.guessed_axis} for the tokens; --layout says it better"
        emit(f"kvz: note: {printable(note)}", to_stderr=True)
    to_stderr = target == options.STANDARD_STREAM
    if as_json:
        emit_json(_document(report), to_stderr=to_stderr)
    else:
        emit(_line(report), to_stderr=to_stderr)
        if timings and report.stages is not None:
            emit(format_stages(report.stages, report.original_nbytes), to_stderr=to_stderr)


def _document(report: CompressReport) -> dict[str, Any]:
    return {**asdict(report), "ratio": report.ratio, "gb_per_s": report.gb_per_s}


def _line(report: CompressReport) -> str:
    sizes = f"{format_nbytes(report.original_nbytes)} -> {format_nbytes(report.stored_nbytes)}"
    others, anchors = report.num_fallback_tensors, report.anchor_nbytes
    destination = "<stdout>" if report.destination == "-" else report.destination
    return (
        f"{printable(destination)}: {sizes}, ratio {report.ratio:.3f}, "
        f"{report.seconds:.2f} s, {report.gb_per_s:.2f} GB/s, {report.codec}, "
        f"{count(report.num_tensors, 'tensor')}{f', {others} by zstd' if others else ''}"
        f"{'; lossy' if report.codec in LOSSY_CODECS else ''}"
        f"{f', anchors in {format_nbytes(anchors)}' if anchors else ''}"
    )
