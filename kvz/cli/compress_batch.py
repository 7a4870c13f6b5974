"""``kvz compress --out-dir``: many files, each tried, what is there already kept."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

from kvz.cli import compress_text, errors
from kvz.cli.text import count, emit, emit_json_line, format_nbytes, printable

if TYPE_CHECKING:
    from kvz.batches import BatchResult
    from kvz.finding import Found

DEFAULT_JOBS = 4
_SOURCE_SUFFIX = ".safetensors"
_COMPRESSED, _KEPT, _FAILED = "compressed", "kept", "failed"


def run(
    sources: tuple[str, ...],
    folder: str,
    jobs: int | None,
    layout: tuple[str | None, str | None],
    settings: dict[str, Any],
    *,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Compress what ``sources`` stand for; returns the highest exit code."""
    from kvz.batches import CompressSettings, compress_batch
    from kvz.layout import Layout

    start = time.perf_counter()
    report = _Report(as_json)
    found = _find(sources, report)
    jobs = min(jobs or DEFAULT_JOBS, max(1, len(found)))
    # files share the processors
    settings["threads"] = settings["threads"] or max(1, len(os.sched_getaffinity(0)) // jobs)
    given = CompressSettings(**settings, layout=Layout(*layout))
    with closing(compress_batch(found, folder, given, jobs=jobs, overwrite=overwrite)) as results:
        for result in results:
            report.add(result)
    # with --json standard output is one document a file, and nothing else
    emit(report.summary(time.perf_counter() - start), to_stderr=as_json)
    return report.exit_code


def _find(sources: tuple[str, ...], report: _Report) -> list[Found]:
    """The files, each once. What cannot be listed is reported."""
    from kvz.finding import expand

    found: dict[str, Found] = {}
    for source, those in expand(sources, _SOURCE_SUFFIX):
        if isinstance(those, Exception):
            report.add_error(source, None, those)
        else:
            found.update((one.location, one) for one in those if one.location not in found)
    return list(found.values())


class _Report:
    """Prints what became of each file, and counts."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._counts = {_COMPRESSED: 0, _KEPT: 0, _FAILED: 0}
        self._nbytes: Counter[str] = Counter()
        self.exit_code = 0

    def add(self, result: BatchResult) -> None:
        if result.error is not None:
            self.add_error(result.source, result.destination, result.error)
        elif result.report is None:
            text = f"{printable(result.destination)}: kept, it is there already"
            self._add(_KEPT, result.source, result.destination, text)
        else:
            compress_text.note_guess(result.report)
            self._nbytes["original"] += result.report.original_nbytes
            self._nbytes["stored"] += result.report.stored_nbytes
            text = compress_text.line(result.report)
            details = compress_text.document(result.report)
            self._add(_COMPRESSED, result.source, result.destination, text, details)

    def add_error(self, source: str, destination: str | None, error: Exception) -> None:
        code = errors.tell(error)
        self.exit_code = max(self.exit_code, code)
        details = {"error": errors.describe(error), "exit_code": code}
        self._add(_FAILED, source, destination, None, details)

    def _add(
        self,
        status: str,
        source: str,
        destination: str | None,
        text: str | None,
        details: dict[str, Any] | None = None,
    ) -> None:
        self._counts[status] += 1
        if self._as_json:
            document = {"source": source, "destination": destination, "status": status}
            no_error = {"error": None, "exit_code": 0}
            emit_json_line({**document, **no_error, **(details or {}), **document})
        elif text is not None:
            emit(text)

    def summary(self, seconds: float) -> str:
        counts = [f"{number} {status}" for status, number in self._counts.items() if number]
        sizes = ""
        if self._counts[_COMPRESSED]:
            original, stored = self._nbytes["original"], self._nbytes["stored"]
            sizes = f"; {format_nbytes(original)} -> {format_nbytes(stored)}"
            sizes += f", ratio {original / stored:.3f}"
        files = count(sum(self._counts.values()), "file")
        return f"{files}: {', '.join(counts)}{sizes}, {seconds:.2f} s"
