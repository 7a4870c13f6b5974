"""``kvz ls``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvz.cli import errors, options
from kvz.cli.text import aligned, count, emit, emit_json_line, format_nbytes, printable
from kvz.formats.errors import KvzError

if TYPE_CHECKING:
    from kvz.listing import ArchiveSummary

_COLUMNS = ("archive", "size", "ratio", "codec", "model", "tokens", "values")


@click.command()
@click.argument("location", metavar="URL|DIR", type=options.PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document for each archive.")
def command(location: str, as_json: bool) -> int:
    """List the archives in a folder or under a prefix.

    Everything whose name ends in .kvz, at any depth, or what a pattern in quotes matches (*, ?, and
    ** for folders). Only the end and the head of each archive are read, in one or two requests.
    Archives that cannot be opened are listed with the reason; the exit code is the highest of
    theirs.

    \b
    Example:
      kvz ls s3://caches/run-7/
    """
    from kvz.listing import list_archives

    listed = []
    for summary in list_archives(location):
        if summary.error is not None and summary.location == location:
            raise summary.error
        listed.append(summary)
        if as_json:
            emit_json_line(_document(summary))
    if not as_json and listed:
        for line in aligned([_COLUMNS, *map(_row, listed)], "<>><<><"):
            emit(line)
    broken = [summary.error for summary in listed if summary.error is not None]
    if broken:
        emit(
            f"kvz: error: {len(broken)} of {count(len(listed), 'archive')} cannot be used",
            to_stderr=True,
        )
    if not listed:
        emit(f"kvz: note: {printable(location)}: no archives", to_stderr=True)
    return max(map(errors.exit_code, broken), default=0)


def _document(summary: ArchiveSummary) -> dict[str, Any]:
    error = summary.error
    return {
        **asdict(summary),
        "ratio": summary.ratio,
        "error": None if error is None else errors.describe(error),
        "exit_code": 0 if error is None else errors.exit_code(error),
    }


def _row(summary: ArchiveSummary) -> tuple[str, ...]:
    name = printable(summary.relative)
    size = "-" if summary.nbytes is None else format_nbytes(summary.nbytes)
    if summary.ratio is None:
        return (name, size, "-", "-", "-", "-", _reason(summary.error))
    return (
        name,
        size,
        f"{summary.ratio:.3f}",
        summary.codec or "-",
        printable(summary.model_type or "-"),
        "-" if summary.num_tokens is None else str(summary.num_tokens),
        printable(f"lossy: {summary.lossy}") if summary.lossy else "lossless",
    )


def _reason(error: Exception | None) -> str:
    """What is wrong; the name of the file stands before it in the row."""
    if isinstance(error, KvzError) and error.file is not None:
        return printable(Exception.__str__(error))
    return "" if error is None else errors.describe(error)
