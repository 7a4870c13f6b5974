"""What ``kvz compress`` says of an archive that it wrote."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvz.cli.text import count, emit, format_nbytes, printable
from kvz.formats.ids import LOSSY_CODECS

if TYPE_CHECKING:
    from kvz.compressing import CompressReport


def note_guess(report: CompressReport) -> None:
    """Tell on standard error when the codec had nothing to do, or a shape alone said the axis."""
    if report.codec in LOSSY_CODECS and report.num_fallback_tensors == report.num_tensors:
        note = f"codec {report.codec} took no tensor: it is for BF16 keys and values"
        emit(f"kvz: note: {note}", to_stderr=True)
    if report.guessed_axis is not None:
        note = f"took {report.guessed_axis} for the tokens; --layout says it better"
        emit(f"kvz: note: {printable(note)}", to_stderr=True)


def document(report: CompressReport) -> dict[str, Any]:
    """The report for ``--json``."""
    return {**asdict(report), "ratio": report.ratio, "gb_per_s": report.gb_per_s}


def line(report: CompressReport) -> str:
    """The report in one line."""
    sizes = f"{format_nbytes(report.original_nbytes)} -> {format_nbytes(report.stored_nbytes)}"
    others, anchors = report.num_fallback_tensors, report.anchor_nbytes
    destination = "<stdout>" if report.destination == "-" else report.destination
    return (
        f"{printable(destination)}: {sizes}, ratio {report.ratio:.3f}, "
        f"{report.seconds:.2f} s, {report.gb_per_s:.2f} GB/s, {report.codec}, "
        f"{count(report.num_tensors, 'tensor')}{f', {others} by zstd' if others else ''}"
        f"{f'; lossy: {report.lossy}' if report.lossy else ''}"
        f"{f', anchors in {format_nbytes(anchors)}' if anchors else ''}"
    )
