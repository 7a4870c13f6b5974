"""Outputs in object storage: they appear whole, when they are complete, or not at all.

Up to 16 MiB an object is sent by one request; one that must be new is then refused by the store
itself if another exists (a conditional put). Beyond that parts are sent while the output is still
written, and the object appears when the store is told to put them together. obstore cannot make
that request conditional, so whether an object that must be new exists is asked at the start and
again when all but the last parts are sent: of two such writers that end within the time that these
take, the later one stays. Parts of two uploads are never mixed.

An upload that ends early is aborted; one that is interrupted while its last parts are put together
may still appear, whole. Parts of a process that was killed stay in the store, where
nobody sees them, until a rule of the bucket removes incomplete uploads.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from kvz.formats.errors import KvzError, SourceError
from kvz.remote import urls
from kvz.remote.pool import RequestPool
from kvz.remote.store import (
    as_source_error,
    can_write,
    is_missing,
    object_path,
    open_store,
    require_obstore,
)

if TYPE_CHECKING:
    from collections.abc import Buffer

#: S3 takes 10,000 parts of one size, except the last.
PART_NBYTES = 16 << 20
_MAX_PARTS = 10_000
_NUM_CONNECTIONS = 4
#: How long an abort may take when the server does not answer.
_ABORT_S = 15.0
_EXISTS = "exists already; use -f to overwrite it"
_MEANWHILE = "was created by another writer meanwhile"


class _Abandoned(Exception):
    """Ends an upload from inside: the store is told to forget the parts."""


class Upload:
    """A stream into an object. Nothing is visible before :meth:`finish`; else call :meth:`abort`.

    ``expected_nbytes``: at most so many will be written, as far as is known; decides the size of
    the parts. Raises SourceError when the object exists and ``overwrite`` is false, or when the
    store does not take it.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        overwrite: bool,
        expected_nbytes: int | None = None,
    ) -> None:
        self._url = urls.parse(location)
        self.name = str(self._url)
        self._obstore = require_obstore()
        if not can_write(self._url):
            raise SourceError("HTTP servers can only be read from; write to s3://, gs:// or az://")
        self._store = open_store(self._url, writing=True)
        self._path = object_path(self._url)
        self._overwrite = overwrite
        # the parts, and beside them what is asked
        self._pool = RequestPool(2)
        try:
            if not overwrite and self._exists():
                raise SourceError(_EXISTS)
        except BaseException:
            self._pool.close()
            raise
        needed = -(-(expected_nbytes or 0) // (_MAX_PARTS * 9 // 10))
        self._part_nbytes = max(PART_NBYTES, -(-needed // (1 << 20)) << 20)
        self._part = bytearray()
        # besides the part that is filled, this one, and those that obstore sends
        self._parts: queue.Queue[bytearray | _Abandoned | None] = queue.Queue(1)
        self._upload: Future[Any] | None = None

    def write(self, data: Buffer) -> int:
        """Take a copy of ``data``. Raises SourceError when the upload failed meanwhile."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            if len(self._part) == self._part_nbytes:
                self._send_part()
            piece = view[start : start + self._part_nbytes - len(self._part)]
            self._part += piece
            start += len(piece)
        return len(view)

    def flush(self) -> None:
        """Nothing: what was written becomes visible as a whole."""

    def finish(self) -> None:
        """Make the object visible. Raises SourceError; then it is not, and the upload is over."""
        if self._upload is None:
            self._put()
        else:
            self._send_part()
            if not self._overwrite and self._exists():
                raise SourceError(_MEANWHILE)
            self._hand_over(None)
            self._result(self._upload)
        self._pool.close()

    def abort(self) -> None:
        """Forget what was sent so far."""
        if self._upload is not None and not self._upload.done():
            # make room for the order to stop
            with contextlib.suppress(queue.Empty):
                self._parts.get_nowait()
            with contextlib.suppress(queue.Full):
                self._parts.put(_Abandoned(), timeout=_ABORT_S)
            wait([self._upload], timeout=_ABORT_S)
        self._pool.close()

    # -- one request

    def _put(self) -> None:
        errors = self._obstore.exceptions
        mode = "overwrite" if self._overwrite else "create"
        data = bytes(self._part)
        try:
            try:
                self._send(data, mode)
            except errors.NotSupportedError:
                if self._exists():
                    raise SourceError(_MEANWHILE) from None
                self._send(data, "overwrite")
        except errors.AlreadyExistsError:
            raise SourceError(_MEANWHILE) from None
        except Exception as error:
            raise _ours(error) from None

    def _send(self, data: bytes, mode: str) -> None:
        self._pool.run(
            self._obstore.put, self._store, self._path, data, mode=mode, use_multipart=False
        )

    def _exists(self) -> bool:
        try:
            self._pool.run(self._obstore.head, self._store, self._path)
        except Exception as error:
            # of a bucket that does not exist, HEAD says no more than that
            if is_missing(error):
                return False
            raise _ours(error) from None
        return True

    # -- many requests

    def _send_part(self) -> None:
        if self._upload is None:
            self._upload = self._pool.submit(
                self._obstore.put,
                self._store,
                self._path,
                self._take_parts(),
                use_multipart=True,
                chunk_size=self._part_nbytes,
                max_concurrency=_NUM_CONNECTIONS,
            )
        self._hand_over(self._part)
        self._part = bytearray()

    def _hand_over(self, part: bytearray | None) -> None:
        assert self._upload is not None
        while True:
            if self._upload.done():
                self._result(self._upload)
            try:
                self._parts.put(part, timeout=0.1)
                return
            except queue.Full:
                continue

    def _result(self, upload: Future[Any]) -> None:
        try:
            upload.result()
        except Exception as error:
            raise _ours(error) from None

    def _take_parts(self) -> Iterator[bytearray]:
        while True:
            part = self._parts.get()
            if isinstance(part, _Abandoned):
                raise part
            if part is None:
                return
            yield part


def _ours(error: BaseException) -> BaseException:
    return error if isinstance(error, KvzError) else as_source_error(error)
