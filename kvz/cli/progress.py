"""A progress bar on standard error, for runs that take long and are watched."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvz.cli.text import is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Runs shorter than this show nothing.
_DELAY_S = 0.5


class Meter:
    """Counts what is done; draws a bar once the run takes long. ``total`` None: not known."""

    def __init__(self, label: str, total: int | None, unit: str, shown: bool) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._shown = shown
        self._done = 0
        self._start = time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None

    def advance(self, amount: int) -> None:
        """``amount`` more is done."""
        self.update(self._done + amount, self._total)

    def update(self, done: int, total: int | None, label: str | None = None) -> None:
        """``done`` of ``total`` are done; ``label``: what is being done from here on."""
        self._done, self._total = done, total
        self._label = label or self._label
        if not self._shown or time.monotonic() - self._start < _DELAY_S:
            return
        if self._bar is None:
            self._bar = self._open()
        from rich.markup import escape

        bar, task = self._bar
        bar.update(task, completed=done, total=total, description=escape(self._label))

    def _open(self) -> tuple[Progress, TaskID]:
        from rich import progress
        from rich.console import Console

        amount: progress.ProgressColumn = progress.MofNCompleteColumn()
        if self._unit == "bytes":
            amount = progress.DownloadColumn()
        columns = [
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            amount,
            progress.TimeRemainingColumn(),
        ]
        bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
        bar.start()
        return bar, bar.add_task(self._label, total=self._total)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar[0].stop()


@contextlib.contextmanager
def meter(label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Meter]:
    """A meter that draws only when standard error is a terminal."""
    opened = Meter(label, total, unit, is_terminal(sys.stderr))
    try:
        yield opened
    finally:
        opened.close()


def file_nbytes(path: str) -> int | None:
    """Size of a file as the total of a meter; None when there is none to be had."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def raw_nbytes(path: str) -> int | None:
    """Uncompressed size of an archive as the total of a meter; the command itself tells errors."""
    from kvz.archive import open_archive
    from kvz.formats.errors import KvzError

    if not is_terminal(sys.stderr) or path == "-":
        return None
    try:
        with open_archive(path) as archive:
            return archive.head.nbytes
    except KvzError:
        return None
