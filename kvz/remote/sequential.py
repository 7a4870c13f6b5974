"""An object as a stream: large consecutive ranges, fetched ahead."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import numpy as np

from kvz.formats.errors import SourceError
from kvz.remote import urls
from kvz.remote.fetching import Fetcher
from kvz.remote.pool import RequestPool
from kvz.remote.read_ahead import ReadAhead, consecutive

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: The first request also tells the size, so it is for what every reader needs: a head.
_FIRST_NBYTES = 256 << 10
# Requests under way share the link: what is fetched ahead delays what is needed next.
_LARGEST_NBYTES = 2 << 20
_WINDOW = 5
_NUM_CONNECTIONS = 3


class RemoteStream(io.RawIOBase):
    """Reads an object from front to back, in bounded memory; all of one version of it.

    Raises what :class:`kvz.remote.fetching.Fetcher` raises.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._fetcher = Fetcher(urls.parse(location))
        self.name = self._fetcher.name
        self._pool = RequestPool(_NUM_CONNECTIONS)
        try:
            self._front = self._pool.run(self._fetcher.open_front, _FIRST_NBYTES)
        except BaseException:
            self._fetcher.close()
            self._pool.close()
            raise
        self.nbytes = self._fetcher.nbytes
        self._position = 0
        self._blocks = consecutive(self._front.size, self.nbytes, _FIRST_NBYTES, _LARGEST_NBYTES)
        self._ends = iter([block.stop for block in self._blocks])
        self._block_end = self._front.size
        self._ahead = ReadAhead(self._fetcher, self._blocks, self._pool, _WINDOW)

    @property
    def nbytes_read(self) -> int:
        """Bytes that were transferred so far; more than were read from the stream."""
        return self._fetcher.nbytes_read

    @property
    def num_requests(self) -> int:
        return self._fetcher.num_requests

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        out = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        if self._position == self._block_end:
            self._block_end = next(self._ends, self._block_end)
        out = out[: self._block_end - self._position]
        if self._position < self._front.size:
            out[:] = self._front[self._position : self._position + out.size]
        elif out.size and not self._ahead.read_into(self._position, out):
            raise SourceError("was closed while it was read")
        self._position += out.size
        return int(out.size)

    def close(self) -> None:
        if not self.closed:
            self._fetcher.close()
            self._ahead.cancel()
            self._pool.close()
        super().close()
