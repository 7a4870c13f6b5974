"""``kvz decompress``."""

from __future__ import annotations

from dataclasses import asdict

import click

from kvz.cli import options
from kvz.cli.progress import meter, raw_nbytes
from kvz.cli.text import count, emit, emit_json, format_nbytes, format_stages, printable


@click.command()
@click.argument("source", metavar="SRC", type=options.PATH_OR_DASH)
@options.output_option(
    help="Safetensors file to write, - for standard output; default SRC with .safetensors."
)
@click.option(
    "--layers",
    metavar="A-B,C",
    callback=options.parse_layers,
    help="Only these layers, ends included.",
)
@click.option(
    "--tokens",
    metavar="A:B",
    callback=options.parse_tokens,
    help="Only the stored tokens A to B-1.",
)
@click.option(
    "--anchor-only",
    is_flag=True,
    help="Only the anchors of a lynx archive: 4-bit values, half of what keys and values take.",
)
@options.device_option
@options.threads_option
@options.timings_option
@options.overwrite_option
@options.json_option
def command(
    source: str,
    destination: str | None,
    layers: frozenset[int] | None,
    tokens: slice | None,
    anchor_only: bool,
    device: str,
    threads: int | None,
    timings: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Restore the tensors of an archive, exactly if its codec is lossless.

    SRC is an archive, its URL, or - for standard input. With --layers or --tokens only the keys and
    values of these are read and written. What a lossy codec stored is marked so in the metadata and
    here.

    \b
    Example:
      kvz decompress cache.kvz -o cache.safetensors
    """
    target = options.default_destination(source, destination, ".safetensors")
    options.check_streams(source, target)
    options.check_timings(timings, device)
    import kvz

    total = raw_nbytes(source) if layers is None and tokens is None else None
    with meter("decompressing", total) as progress:
        report = kvz.decompress(
            source,
            target,
            layers=layers,
            tokens=tokens,
            anchor_only=anchor_only,
            device=device,
            threads=threads,
            overwrite=overwrite,
            progress=progress.advance,
        )
    to_stderr = target == options.STANDARD_STREAM
    if as_json:
        emit_json({**asdict(report), "gb_per_s": report.gb_per_s}, to_stderr=to_stderr)
        return
    skipped = f", {report.num_skipped} left out" if report.num_skipped else ""
    destination = "<stdout>" if to_stderr else report.destination
    emit(
        f"{printable(destination)}: {count(report.num_tensors, 'tensor')}{skipped}, "
        f"{format_nbytes(report.restored_nbytes)} from {format_nbytes(report.read_nbytes)}, "
        f"{report.seconds:.2f} s, {report.gb_per_s:.2f} GB/s"
        f"{f'; lossy: {report.lossy}' if report.lossy else ''}",
        to_stderr=to_stderr,
    )
    if timings and report.stages is not None:
        emit(format_stages(report.stages, report.restored_nbytes), to_stderr=to_stderr)
