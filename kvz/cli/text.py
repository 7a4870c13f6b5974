"""Plain text for terminals and pipes alike: sizes, aligned tables, names made safe to print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

_UNITS = ("kB", "MB", "GB", "TB")


def printable(text: str) -> str:
    """``text`` on one line; control characters, which a file may hold, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, length: int) -> str:
    """:func:`printable` text of at most ``length`` characters."""
    shown = printable(text[: length + 1])
    return shown if len(shown) <= length else shown[: length - 3] + "..."


def format_nbytes(nbytes: int) -> str:
    """A size in decimal units."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in _UNITS:
        size /= 1000
        if size < 999.95 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_stages(stages: Mapping[str, float], nbytes: int) -> str:
    """Seconds of each stage, and raw GB/s of those that took measurable time."""
    parts = []
    for name, seconds in stages.items():
        speed = f" ({nbytes / seconds / 1e9:.2f} GB/s)" if seconds >= 1e-4 else ""
        parts.append(f"{name.replace('_', ' ')} {seconds:.4f} s{speed}")
    return "stages (batches overlap): " + ", ".join(parts)


def aligned(rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Rows as lines; ``alignment`` has ``<`` or ``>`` for each column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(alignment))] if rows else []
    return [
        "  ".join(
            f"{cell:{a}{w}}" for cell, a, w in zip(row, alignment, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def emit(line: str, *, to_stderr: bool = False) -> None:
    """Print one line."""
    click.echo(line, err=to_stderr)


def emit_json(document: Any, *, to_stderr: bool = False) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(document, indent=2, default=str), err=to_stderr)


def emit_json_line(document: Any) -> None:
    """Print one JSON document on one line."""
    click.echo(json.dumps(document, default=str))


def is_terminal(stream: Any) -> bool:
    return stream is not None and bool(stream.isatty())
