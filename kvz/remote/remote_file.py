"""An object that is read at any offset, as :class:`kvz.files.LocalFile` reads a local file."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvz.files import naming
from kvz.formats.errors import TruncatedFile
from kvz.remote import urls
from kvz.remote.fetching import Fetcher
from kvz.remote.pool import RequestPool
from kvz.remote.read_ahead import MAX_REQUEST_NBYTES, ReadAhead, merged

#: The first request brings this much of the end, where the trailer and most indices fit in.
TAIL_NBYTES = 128 << 10
#: A read near the start brings this much: prelude and most heads.
FRONT_NBYTES = 64 << 10
NUM_CONNECTIONS = 6


class RemoteFile:
    """An object opened for reading at any offset, from any thread.

    Opening takes one request, for the end of the object; what is read is of the version that this
    found. Raises SourceError, ConfigError, and ContentMismatch when the object was replaced.
    """

    def __init__(self, location: str | os.PathLike[str], tail_nbytes: int = TAIL_NBYTES) -> None:
        self._fetcher = Fetcher(urls.parse(location))
        self.name = self._fetcher.name
        self._pool = RequestPool(NUM_CONNECTIONS)
        try:
            self._tail = self._pool.run(self._fetcher.open_tail, tail_nbytes)
        except BaseException:
            self._fetcher.close()
            self._pool.close()
            raise
        self.nbytes = self._fetcher.nbytes
        self._tail_start = self.nbytes - self._tail.size
        self._front = np.empty(0, np.uint8)
        self._ahead: ReadAhead | None = None
        self._lock = threading.Lock()

    @property
    def nbytes_read(self) -> int:
        """Bytes that were transferred so far, those between wanted ranges included."""
        return self._fetcher.nbytes_read

    @property
    def num_requests(self) -> int:
        return self._fetcher.num_requests

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` from ``offset``. Raises TruncatedFile beyond the end, or as the class."""
        end = offset + out.size
        if end > self.nbytes:
            with naming(self.name):
                raise TruncatedFile(f"file ends at byte {self.nbytes}, {end} are needed")
        if offset < FRONT_NBYTES <= self._tail_start:
            self._load_front()
        # what is at hand at both ends, then the rest
        front = max(0, min(self._front.size - offset, out.size))
        out[:front] = self._front[offset : offset + front]
        tail = max(0, min(end - self._tail_start, out.size - front))
        if tail:
            begin = end - tail - self._tail_start
            out[out.size - tail :] = self._tail[begin : begin + tail]
        rest = out[front : out.size - tail]
        if rest.size:
            self._read_range(offset + front, rest)

    def read(self, offset: int, nbytes: int) -> bytes:
        """At most ``nbytes`` from ``offset``, less where the object ends."""
        out = np.empty(max(0, min(nbytes, self.nbytes - offset)), np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ``(offset, nbytes)`` that will be read, about in this order.

        They are fetched ahead with few requests. What was announced before is forgotten, unless it
        holds the first of these ranges.
        """
        clipped = self._clipped(ranges)
        first = next(clipped, None)
        with self._lock:
            ahead = self._ahead
            if first is None or (ahead is not None and ahead.covers(*first)):
                return
            if ahead is not None:
                ahead.cancel()
            blocks = merged(itertools.chain([first], clipped))
            self._ahead = ReadAhead(self._fetcher, blocks, self._pool)

    def close(self) -> None:
        self._fetcher.close()
        with self._lock:
            if self._ahead is not None:
                self._ahead.cancel()
        self._pool.close()

    def requests(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Offset and length of the requests that these ranges take, announced together."""
        blocks = merged(self._clipped(ranges))
        return [(block.start, block.stop - block.start) for block in blocks]

    def _clipped(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """What of these ranges is not at hand already."""
        for offset, nbytes in ranges:
            start = max(offset, self._front.size)
            stop = min(offset + nbytes, self._tail_start)
            if start < stop:
                yield start, stop - start

    def _load_front(self) -> None:
        with self._lock:
            if not self._front.size:
                front = np.empty(FRONT_NBYTES, np.uint8)
                self._pool.run(self._fetcher.fetch, 0, front)
                self._front = front

    def _read_range(self, offset: int, out: NDArray[np.uint8]) -> None:
        ahead = self._ahead
        if ahead is not None and ahead.read_into(offset, out):
            return
        step = MAX_REQUEST_NBYTES
        parts = [
            self._pool.submit(self._fetcher.fetch, offset + start, out[start : start + step])
            for start in range(0, out.size, step)
        ]
        for part in parts:
            part.result()
