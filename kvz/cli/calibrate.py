"""``kvz calibrate``."""

from __future__ import annotations

from dataclasses import asdict

import click

from kvz.cli import options
from kvz.cli.progress import meter
from kvz.cli.text import count, emit, emit_json, format_nbytes, printable


@click.command()
@click.argument("caches", metavar="CACHE...", nargs=-1, required=True, type=options.PATH)
@options.output_option(required=True, help="Codebook file to write, - for standard output.")
@click.option("--codec", type=click.Choice(["gaac", "splitzip"]), default="gaac", show_default=True)
@options.codec_options_option
@options.layout_options
@options.overwrite_option
@options.json_option
def command(
    caches: tuple[str, ...],
    destination: str,
    codec: str,
    codec_options: dict[str, str],
    axes: str | None,
    pattern: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make a codebook from one or several caches.

    The caches are safetensors files of one model; they may differ in their tokens. The codebook
    serves kvz compress --codebook, which otherwise calibrates on the file itself.

    \b
    Example:
      kvz calibrate cache.safetensors -o model.codebook.json
    """
    import kvz

    with meter("calibrating", unit="tensors") as progress:
        report = kvz.calibrate(
            caches,
            destination,
            codec,
            codec_options=codec_options,
            layout=kvz.Layout(axes, pattern),
            overwrite=overwrite,
            progress=progress.update,
        )
    to_stderr = destination == options.STANDARD_STREAM
    if as_json:
        emit_json(asdict(report), to_stderr=to_stderr)
        return
    name = "<stdout>" if to_stderr else destination
    emit(
        f"{printable(name)}: codebooks of {codec} for {count(report.num_tensors, 'tensor')}, "
        f"{format_nbytes(report.codebook_nbytes)}, from {count(len(caches), 'capture')}",
        to_stderr=to_stderr,
    )
