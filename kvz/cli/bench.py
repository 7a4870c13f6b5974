"""``kvz bench``."""

from __future__ import annotations

import json
from typing import Any

import click

from kvz.cli import bench_quality, options
from kvz.cli.progress import meter
from kvz.cli.text import emit
from kvz.devices import require_gpu
from kvz.formats.ids import CODEC_NAMES
from kvz.layout import Layout


def _codecs(
    ctx: click.Context, param: click.Parameter, specs: tuple[str, ...]
) -> tuple[str, ...] | None:
    for spec in specs:
        if spec.partition(":")[0] not in CODEC_NAMES:
            raise click.BadParameter(f"{spec!r} is none of {', '.join(CODEC_NAMES)}")
    return specs or None


@click.command()
@click.argument("caches", metavar="CACHE...", nargs=-1, required=True, type=options.PATH)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    callback=_codecs,
    help="Codec to measure; repeat it for several. Default: all of them.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, metavar="N")
@options.threads_option
@options.device_option
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="N[K|M|G]",
    callback=options.parse_sizes,
    help="With --device cuda: repeat the cache up to this many bytes; default 512M and 2G.",
)
@click.option(
    "--calibrate-on",
    metavar="CACHE",
    type=options.PATH,
    help="With --device cuda: take the codebooks from this cache; default from the measured one.",
)
@bench_quality.quality_options
@options.layout_options
@click.option(
    "--json",
    "json_path",
    metavar="F",
    type=options.PATH,
    help="Also write the results to F as JSON; - prints them instead of the table.",
)
@options.overwrite_option
def command(
    caches: tuple[str, ...],
    codecs: tuple[str, ...] | None,
    rounds: int,
    threads: int | None,
    device: str,
    sizes: tuple[int, ...],
    calibrate_on: str | None,
    axes: str | None,
    pattern: str | None,
    json_path: str | None,
    overwrite: bool,
    quality: bool,
    **quality_options: Any,
) -> None:
    """Measure codecs and baselines on your own caches.

    Ratio, and speed in memory, of each codec, of zstd and of a plain copy, interleaved in one run;
    every decoded element is compared with the input. With --device cuda in device memory, against
    a copy there and nvCOMP. With --quality, what lossy codecs and plain quantisers lose: errors of
    keys, values and attention, and with --model of the next token; and how much a few pairs of key
    channels matter. The caches are safetensors files.

    \b
    Example:
      kvz bench cache.safetensors --codec gaac --codec splitzip --json results.json
    """
    if json_path is not None:
        options.check_writable_later(json_path, overwrite)
    chosen = bench_quality.QualityOptions.take(quality_options)
    if quality:
        if sizes or calibrate_on:
            raise click.UsageError("--size and --calibrate-on measure speed, not --quality")
        text, document = bench_quality.run(
            caches,
            chosen,
            codecs=codecs,
            device=device,
            threads=threads,
            layout=Layout(axes, pattern),
        )
    else:
        chosen.check_unused()
        text, document = _speed(
            caches,
            codecs=codecs,
            rounds=rounds,
            threads=threads,
            device=device,
            sizes=sizes,
            calibrate_on=calibrate_on,
            layout=Layout(axes, pattern),
        )
    if json_path != options.STANDARD_STREAM:
        emit(text.rstrip("\n"))
    if json_path is not None:
        _write_json(document, json_path, overwrite)


def _speed(
    caches: tuple[str, ...],
    *,
    threads: int | None,
    device: str,
    sizes: tuple[int, ...],
    calibrate_on: str | None,
    **settings: Any,
) -> tuple[str, dict[str, Any]]:
    """The report on speed as text and as JSON values."""
    on_gpu = require_gpu(device)
    if not on_gpu and (sizes or calibrate_on):
        raise click.UsageError("--size and --calibrate-on need --device cuda")
    if on_gpu and threads:
        raise click.UsageError("--threads is for the CPU, not for --device cuda")
    with meter("bench", unit="steps") as progress:

        def show(what: str, done: int, steps: int) -> None:
            progress.update(done, steps, what)

        settings["progress"] = show
        if on_gpu:
            if sizes:
                settings["sizes"] = sizes
            return _on_gpu(caches, device=device, calibrate_on=calibrate_on, **settings)
        return _on_cpu(caches, threads=threads, **settings)


def _on_cpu(caches: tuple[str, ...], **settings: Any) -> tuple[str, dict[str, Any]]:
    from kvz.bench.report import render
    from kvz.bench.run import run_bench

    report = run_bench(caches, **settings)
    return render(report), report.to_dict()


def _on_gpu(caches: tuple[str, ...], **settings: Any) -> tuple[str, dict[str, Any]]:
    from kvz.bench.device_report import render
    from kvz.bench.device_run import run_device_bench

    report = run_device_bench(caches, **settings)
    return render(report), report.to_dict()


def _write_json(document: dict[str, Any], path: str, overwrite: bool) -> None:
    from kvz.files import atomic_output

    with atomic_output(path, overwrite=overwrite) as stream:
        stream.write(json.dumps(document, indent=2).encode() + b"\n")
