"""Opens what a path or URL names: a local file, or an object in a store."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvz.files import LocalFile, naming
from kvz.remote.urls import is_remote, local_path


class RandomFile(Protocol):
    """A file opened for reading at any offset, from any thread."""

    name: str
    nbytes: int

    @property
    def nbytes_read(self) -> int:
        """Bytes that were read, or transferred, so far."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests that were made so far; 0 for a local file."""
        ...

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` from ``offset``. Raises TruncatedFile beyond the end, or SourceError."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """At most ``nbytes`` from ``offset``, less where the file ends."""
        ...

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ``(offset, nbytes)`` that will be read, about in this order."""
        ...

    def requests(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Offset and length of the requests that these ranges take; none for a local file."""
        ...

    def close(self) -> None: ...


def open_file(location: str | os.PathLike[str], tail_nbytes: int | None = None) -> RandomFile:
    """Open a path or URL for reading at any offset. Raises SourceError or ConfigError.

    ``tail_nbytes``: how much of the end of an object the first request brings.
    """
    if is_remote(location):
        from kvz.remote.remote_file import TAIL_NBYTES, RemoteFile

        return RemoteFile(location, tail_nbytes or TAIL_NBYTES)
    return LocalFile(local_path(location))


def open_stream(location: str | os.PathLike[str]) -> BinaryIO:
    """Open a path or URL for reading from front to back. Raises SourceError or ConfigError."""
    if is_remote(location):
        from kvz.remote.sequential import RemoteStream

        return cast(BinaryIO, RemoteStream(location))
    with naming(shown_name(location)):
        return open(local_path(location), "rb")


def shown_name(location: str | os.PathLike[str]) -> str:
    """How messages call a path or URL: without credentials."""
    if is_remote(location):
        from kvz.remote.urls import parse

        return str(parse(location))
    return local_path(location)
