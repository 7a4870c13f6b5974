"""Ranges of one object: of one version, every length checked, resumed where a body was cut."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.files import naming
from kvz.formats.errors import ContentMismatch, KvzError, SourceError
from kvz.remote.store import (
    as_source_error,
    is_missing,
    is_transient,
    num_retries,
    object_path,
    open_store,
    require_obstore,
    status_of,
)
from kvz.remote.urls import ObjectUrl

#: Pieces in which a body is taken; what a cut body loses is less than this.
_PIECE_NBYTES = 64 << 10
#: A request that brought this much before it failed starts a new count of failures.
_PROGRESS_NBYTES = 256 << 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_RANGE_NOT_SATISFIABLE = 416


class _BrokenBody(Exception):
    """An answer that is not what was asked for."""


class Fetcher:
    """Reads ranges of an object, from any thread.

    The first request, :meth:`open_tail` or :meth:`open_front`, also brings the size and the etag;
    later ones ask for that version only. Raises ContentMismatch when the object was replaced
    meanwhile, SourceError when it cannot be read; failures that may pass are retried.
    """

    def __init__(self, url: ObjectUrl) -> None:
        self.url = url
        self.name = str(url)
        with naming(self.name):
            self._obstore = require_obstore()
            self._store = open_store(url)
            self._retries = num_retries()
        self.nbytes = 0
        self._etag: str | None = None
        self._modified: Any = None
        #: Requests that were made, and bytes of bodies that arrived.
        self.num_requests = 0
        self.nbytes_read = 0
        self._lock = threading.Lock()
        self._closed = False

    def open_tail(self, nbytes: int) -> NDArray[np.uint8]:
        """The last ``nbytes`` of the object, or all of it when it is shorter."""
        with naming(self.name):
            return self._open({"suffix": nbytes}, nbytes)

    def open_front(self, nbytes: int) -> NDArray[np.uint8]:
        """The first ``nbytes`` of the object, or all of it when it is shorter."""
        with naming(self.name):
            return self._open((0, nbytes), nbytes)

    def fetch(self, start: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the bytes from ``start``, all of which must exist."""
        with naming(self.name):
            self._fill(start, memoryview(out))

    def close(self) -> None:
        """Requests under way end at their next piece."""
        self._closed = True

    # -- opening

    def _open(self, wanted: Any, nbytes: int) -> NDArray[np.uint8]:
        result = self._first_answer(wanted)
        if result is None:
            return np.empty(0, np.uint8)
        self._pin(result.meta)
        start, stop = result.range
        expected = min(nbytes, self.nbytes)
        begin = 0 if isinstance(wanted, tuple) else self.nbytes - expected
        if (start, stop) != (begin, begin + expected):
            raise SourceError(f"the server answered bytes {start}:{stop}, not what was asked for")
        out = np.empty(expected, np.uint8)
        done = 0
        try:
            for piece in self._pieces(result, expected):
                memoryview(out)[done : done + len(piece)] = piece
                done += len(piece)
        except Exception as error:
            self._pause_or_raise(error, 1)
        if done < expected:
            self._fill(begin + done, memoryview(out)[done:])
        return out

    def _first_answer(self, wanted: Any) -> Any:
        """The answer to the first request; None: the object is empty."""
        failures, asks_size = 0, False
        while True:
            try:
                if not asks_size:
                    return self._get(wanted)
                meta = self._head()
                size = int(meta["size"])
                if size == 0:
                    self._pin(meta)
                    return None
                first = isinstance(wanted, tuple)
                return self._get(wanted if first else (max(0, size - wanted["suffix"]), size))
            except Exception as error:
                if not asks_size and self._needs_size(error, wanted):
                    asks_size = True
                    continue
                failures += 1
                self._pause_or_raise(error, failures)

    def _needs_size(self, error: Exception, wanted: Any) -> bool:
        """Of an empty object no range exists; Azure cannot be asked for the last bytes."""
        unsupported = isinstance(error, self._obstore.exceptions.NotSupportedError)
        no_suffix = unsupported and not isinstance(wanted, tuple)
        return no_suffix or status_of(error) == _RANGE_NOT_SATISFIABLE

    def _head(self) -> Any:
        self._count_request()
        return self._obstore.head(self._store, object_path(self.url))

    def _pin(self, meta: Any) -> None:
        self.nbytes = int(meta["size"])
        self._etag, self._modified = meta["e_tag"], meta["last_modified"]

    # -- ranges

    def _fill(self, start: int, view: memoryview) -> None:
        end = start + len(view)
        position, failures = start, 0
        while position < end:
            before = position
            try:
                result = self._get((position, end))
                self._check_version(result.meta)
                start_at, stop_at = result.range
                if start_at != position or stop_at > end:
                    raise _BrokenBody(f"the server answered other bytes, from {start_at}")
                for piece in self._pieces(result, end - position):
                    view[position - start : position - start + len(piece)] = piece
                    position += len(piece)
                if position < end:
                    raise _BrokenBody(f"a body ended {end - position} bytes early")
            except Exception as error:
                failures = 1 if position - before >= _PROGRESS_NBYTES else failures + 1
                self._pause_or_raise(error, failures)

    def _get(self, wanted: Any) -> Any:
        if self._etag is None and self._modified is not None and self._modified.timestamp() <= 0:
            # obstore gives 1970 for a date that is not there
            raise SourceError(
                "the server tells neither ETag nor Last-Modified, so that a file replaced while it "
                "is read could not be told: download it first"
            )
        options: dict[str, Any] = {"range": wanted}
        # a weak etag never matches by the rules of HTTP: it is compared in the answer only
        if self._etag is not None and not self._etag.startswith("W/"):
            options["if_match"] = self._etag
        self._count_request()
        return self._obstore.get(self._store, object_path(self.url), options=options)

    def _pieces(self, result: Any, expected: int) -> Iterator[memoryview]:
        received = 0
        for piece in result.stream(min_chunk_size=_PIECE_NBYTES):
            if self._closed:
                raise SourceError("was closed while it was read")
            received += len(piece)
            if received > expected:
                raise _BrokenBody(f"a body has more than the {expected} bytes asked for")
            with self._lock:
                self.nbytes_read += len(piece)
            yield memoryview(piece)

    def _count_request(self) -> None:
        if self._closed:
            raise SourceError("was closed while it was read")
        with self._lock:
            self.num_requests += 1

    def _check_version(self, meta: Any) -> None:
        same = meta["e_tag"] == self._etag and int(meta["size"]) == self.nbytes
        if not same or (self._etag is None and meta["last_modified"] != self._modified):
            raise ContentMismatch("was replaced while it was read")

    def _pause_or_raise(self, error: Exception, failures: int) -> None:
        """Wait before the next attempt; raises what the error means if there is to be none."""
        opened = self._modified is not None
        if isinstance(error, self._obstore.exceptions.PreconditionError):
            raise ContentMismatch("was replaced while it was read") from None
        if is_missing(error) and opened:
            raise SourceError("was deleted while it was read") from None
        if isinstance(error, self._obstore.exceptions.NotSupportedError):
            raise SourceError("the server does not answer requests for a range of bytes") from None
        if not _may_pass(error):
            raise (error if isinstance(error, KvzError) else as_source_error(error)) from None
        if failures > self._retries:
            reason = str(error) if isinstance(error, _BrokenBody) else str(as_source_error(error))
            tried = f" (tried {failures} times)" if failures > 1 else ""
            raise SourceError(reason + tried) from None
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1))
        # spread, so that requests that failed together do not come back together
        time.sleep(longest * random.uniform(0.5, 1))


def _may_pass(error: Exception) -> bool:
    return isinstance(error, _BrokenBody) or is_transient(error)
