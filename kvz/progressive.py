"""A progressive archive that is still arriving: usable from its anchors, then refined."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.anchor_view import check_progressive
from kvz.archive_stream import ArchiveStream, Arrival
from kvz.files import STANDARD_STREAM, naming
from kvz.formats.errors import ConfigError
from kvz.formats.ids import SectionKind
from kvz.locations import open_stream, shown_name
from kvz.lossy import with_lossy_note
from kvz.source_protocol import CacheSource


class Event(NamedTuple):
    """``what``: "head", "anchor" or "complete", when, and the bytes that had arrived."""

    what: str
    seconds: float
    nbytes: int


class ProgressiveReader:
    """Reads an archive from front to back in the background, and keeps it in memory as stored.

    ``source``: a path, a URL, ``-`` for standard input, or a binary stream; ``name``: what
    messages call it. The head is read at once: raises what :class:`kvz.archive.Archive` raises, and
    ConfigError when the archive has no anchors. Errors of what comes later are raised by
    :meth:`anchor` and :meth:`full`.
    """

    def __init__(
        self, source: str | os.PathLike[str] | BinaryIO, *, name: str | None = None
    ) -> None:
        self._start = time.perf_counter()
        self._stream, self._owned, self.name = _open(source, name)
        #: What has arrived so far, in order.
        self.events: list[Event] = []
        self._chunks: dict[tuple[int, int], Arrival] = {}
        self._residuals: dict[tuple[int, int], Arrival] = {}
        self._changed = threading.Condition()
        self._anchored = self._completed = self._closed = False
        self._error: BaseException | None = None
        try:
            with naming(self.name):
                self._archive = ArchiveStream(self._stream, self.name)
                check_progressive(self._archive.head)
        except BaseException:
            if self._owned:
                self._stream.close()
            raise
        self._note("head")
        self._thread = threading.Thread(target=self._run, name="kvz-arrivals", daemon=True)
        self._thread.start()

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata of the whole cache."""
        return with_lossy_note(self._archive.head)

    @property
    def nbytes_read(self) -> int:
        """Bytes that were read so far."""
        return self._archive.nbytes_read

    def anchor(self) -> CacheSource:
        """The cache by its anchors; waits until the last of them has arrived.

        Raises DamagedFile or SourceError when what arrived until then is not right.
        """
        self._wait(lambda: self._anchored)
        return _ArrivedCache(self, anchor_only=True)

    def full(self) -> CacheSource:
        """The whole cache; waits until all has arrived and the trailer was checked.

        Raises DamagedFile or SourceError when it is not right.
        """
        self._wait(lambda: self._completed)
        return _ArrivedCache(self, anchor_only=False)

    def refine(self, restored: Any) -> None:
        """Give a cache restored from :meth:`anchor` the values of :meth:`full`, in place.

        ``restored``: what :func:`kvz.restore` returned; tokens that were added to its cache since
        are kept. Raises what :meth:`full` and :func:`kvz.refining.refine` raise.
        """
        from kvz.refining import refine

        refine(restored, self.full())

    def is_complete(self) -> bool:
        """Whether :meth:`full` would return, or raise, at once."""
        with self._changed:
            return self._completed or self._closed or self._error is not None

    def close(self) -> None:
        """Stop reading; whoever waits gets ConfigError. What has arrived stays usable.

        A read that waits for more bytes ends with its stream.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> ProgressiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread that reads

    def _run(self) -> None:
        try:
            with naming(self.name):
                self._read()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            # closing it elsewhere would wait for the read that is under way
            if self._owned:
                self._stream.close()

    def _read(self) -> None:
        if not any(entry.num_chunks for entry in self._archive.head.tensors):
            self._reach("anchor")
        for arrival in self._archive.arrivals():
            place = (arrival.tensor, arrival.chunk)
            if arrival.kind is SectionKind.RESIDUAL:
                self._residuals[place] = arrival
            else:
                self._chunks[place] = arrival
                if arrival.is_last_chunk:
                    self._reach("anchor")
            if self._closed:
                return
        self._reach("complete")

    def _reach(self, what: str) -> None:
        with self._changed:
            self._note(what)
            self._anchored = True
            self._completed = what == "complete"
            self._changed.notify_all()

    def _note(self, what: str) -> None:
        seconds = time.perf_counter() - self._start
        self.events.append(Event(what, seconds, self._archive.nbytes_read))

    def _wait(self, reached: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._error is not None or self._closed)
            if not reached():
                raise self._error or ConfigError(f"{self.name}: the reader was closed")


class _ArrivedCache:
    """Tensors of what has arrived: a :class:`kvz.source_protocol.CacheSource`."""

    def __init__(self, reader: ProgressiveReader, *, anchor_only: bool) -> None:
        self._reader = reader
        self._head = reader._archive.head
        self._anchor_only = anchor_only
        self._entries = {entry.name: (i, entry) for i, entry in enumerate(self._head.tensors)}

    @property
    def metadata(self) -> Mapping[str, str]:
        return with_lossy_note(self._head, anchor_only=self._anchor_only)

    @property
    def tensor_names(self) -> Sequence[str]:
        return list(self._entries)

    def dtype(self, name: str) -> str:
        return self._entries[name][1].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1].shape

    def read_tensor(self, name: str) -> NDArray[Any]:
        """The tensor as its integer view. Raises DamagedFile."""
        index, entry = self._entries[name]
        archive = self._reader._archive
        out = np.empty(entry.view_shape, f"u{entry.itemsize}")
        for chunk in range(entry.num_chunks):
            start, stop = entry.chunk_range(chunk)
            arrival = self._reader._chunks[index, chunk]
            if arrival.kind is SectionKind.ANCHOR and not self._anchor_only:
                residual = self._reader._residuals[index, chunk]
                with naming(self._reader.name):
                    arrival = archive.join(residual, arrival.payload, arrival.prepared)
            with naming(self._reader.name):
                archive.encoded_chunk(arrival).decode(out[:, start:stop])
        return out.reshape(entry.shape)


def _open(
    source: str | os.PathLike[str] | BinaryIO, name: str | None
) -> tuple[BinaryIO, bool, str]:
    """The stream, whether closing it is ours, and its name. Raises SourceError."""
    if not isinstance(source, (str, os.PathLike)):
        return source, False, name or str(getattr(source, "name", "<stream>"))
    if os.fspath(source) == STANDARD_STREAM:
        # not sys.stdin: its lock, held by a thread that waits, would stop Python from ending
        return open(os.dup(sys.stdin.fileno()), "rb", buffering=0), False, name or "<stdin>"
    return open_stream(source), True, name or shown_name(source)
