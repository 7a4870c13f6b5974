"""``kvz verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from kvz.cli import errors, options
from kvz.cli.progress import meter, raw_nbytes
from kvz.cli.text import count, emit, emit_json, format_nbytes, printable


@click.command()
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(allow_dash=True)
)
@click.option("--against", metavar="CACHE", type=click.Path(), help="Capture to compare with.")
@options.threads_option
@options.json_option
def command(files: tuple[str, ...], against: str | None, threads: int | None, as_json: bool) -> int:
    """Check archives from the first byte to the last.

    Every checksum is verified and every chunk decoded; with --against every element and the
    metadata are compared with a capture. All files are checked; the exit code is the highest of
    theirs. - is standard input.

    \b
    Example:
      kvz verify cache.kvz --against cache.safetensors
    """
    if files.count(options.STANDARD_STREAM) > 1:
        raise click.UsageError("standard input can be read only once")
    results = []
    for path in files:
        options.check_streams(path, None)
        result = _check(path, against, threads)
        results.append(result)
        if result["error"] is None and not as_json:
            emit(_line(result))
    if as_json:
        emit_json({"ok": all(r["error"] is None for r in results), "files": results})
    return max(int(result["exit_code"]) for result in results)


def _check(path: str, against: str | None, threads: int | None) -> dict[str, Any]:
    import kvz

    try:
        with meter("verifying", raw_nbytes(path)) as progress:
            report = kvz.verify(path, against=against, threads=threads, progress=progress.advance)
    except Exception as error:  # the other files are still to be checked
        code = errors.tell(error)
        return {"path": path, "error": errors.describe(error), "exit_code": code}
    return {**asdict(report), "error": None, "exit_code": 0}


def _line(result: dict[str, Any]) -> str:
    compared = f", equal to {result['compared']}" if result["compared"] is not None else ""
    return printable(
        f"{result['path']}: ok, {count(result['num_tensors'], 'tensor')}, "
        f"{count(result['num_sections'], 'section')}, {format_nbytes(result['nbytes'])}{compared}"
    )
