"""Local files: bounded reads at an offset. Outputs that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from kvz.formats.errors import KvzError, SourceError, TruncatedFile
from kvz.remote.urls import is_remote, local_path, parse, same_object

if TYPE_CHECKING:
    from collections.abc import Buffer

STANDARD_STREAM = "-"


def _read_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


# once, before there are threads: it can only be read by setting it
_UMASK = _read_umask()


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors from the block are about ``name``, unless they know better; OSError: SourceError.

    A broken pipe stays what it is: whoever reads our output went away.
    """
    try:
        yield
    except KvzError as error:
        error.file = error.file or name
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        named = SourceError(error.strerror or str(error))
        named.file = name
        raise named from error


class LocalFile:
    """A regular file opened for reading at any offset, from any thread."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        with naming(self.name):
            # a pipe without a writer would let it wait for ever
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if not Path(self.name).is_file():
                os.close(self._descriptor)
                if Path(self.name).is_dir():
                    raise SourceError("is a folder")
                raise SourceError("not a regular file (use - to read from a pipe)")
            self.nbytes = os.fstat(self._descriptor).st_size
        #: Bytes read so far; partial reads are promised to be small.
        self.nbytes_read = 0
        self._lock = threading.Lock()

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` from ``offset``. Raises TruncatedFile beyond the end, or SourceError."""
        view = memoryview(out)
        done = 0
        with naming(self.name):
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise TruncatedFile(
                        f"file ends at byte {offset + done}, {offset + len(view)} are needed"
                    )
                done += count
        with self._lock:
            self.nbytes_read += done

    def read(self, offset: int, nbytes: int) -> bytes:
        out = np.empty(max(0, min(nbytes, self.nbytes - offset)), np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    @property
    def num_requests(self) -> int:
        return 0

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: the operating system reads ahead."""

    def requests(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        os.close(self._descriptor)


def read_exactly(stream: BinaryIO, nbytes: int) -> NDArray[np.uint8]:
    """The next ``nbytes`` of a stream. Raises TruncatedFile when it ends before."""
    out = np.empty(nbytes, np.uint8)
    done = _fill(stream, out)
    if done < nbytes:
        raise TruncatedFile(
            f"the stream ends where at least {nbytes - done} more bytes must come: it is incomplete"
        )
    return out


def read_up_to(stream: BinaryIO, nbytes: int) -> bytes:
    """The next ``nbytes`` of a stream, or as many as there are until its end."""
    out = np.empty(nbytes, np.uint8)
    return out[: _fill(stream, out)].tobytes()


def _fill(stream: BinaryIO, out: NDArray[np.uint8]) -> int:
    """Read until ``out`` is full or the stream ends; returns the bytes read."""
    view = memoryview(out)
    done = 0
    while done < len(view):
        # a pipe or socket gives what it has
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done


class OutputFile:
    """A binary output whose errors name it, not the input that was being read meanwhile."""

    def __init__(self, stream: BinaryIO, name: str, *, can_write_at: bool = False) -> None:
        self._stream = stream
        self.name = name
        self._can_write_at = can_write_at

    def write(self, data: Buffer) -> int:
        with naming(self.name):
            return self._stream.write(data)

    @property
    def can_write_at(self) -> bool:
        """Whether this is a regular file."""
        return self._can_write_at

    def write_at(self, data: NDArray[np.uint8], position: int) -> None:
        """Write at an offset, from any thread; only for regular files."""
        view = memoryview(data)
        with naming(self.name):
            while len(view):
                count = os.pwrite(self._stream.fileno(), view, position)
                view = view[count:]
                position += count

    def flush(self) -> None:
        with naming(self.name):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


@contextlib.contextmanager
def atomic_output(
    path: str | os.PathLike[str], *, overwrite: bool, expected_nbytes: int | None = None
) -> Iterator[OutputFile]:
    """A binary file that appears under ``path`` when the block ends well, and else not at all.

    ``-`` is standard output; a URL is an object (:mod:`kvz.remote.upload`), for which
    ``expected_nbytes``, a bound on what is written, helps. Raises SourceError when ``path`` exists
    and ``overwrite`` is false.
    """
    if os.fspath(path) == STANDARD_STREAM:
        output = OutputFile(sys.stdout.buffer, "<stdout>")
        yield output
        output.flush()
        return
    if is_remote(path):
        with _remote_output(path, overwrite, expected_nbytes) as output:
            yield output
        return
    path = local_path(path)
    # a link keeps pointing where it does, and what it points to is replaced
    target = Path(os.path.realpath(path))
    with naming(os.fspath(path)):
        if target.is_dir():
            raise SourceError("is a directory; name a file")
        if target.exists() and not target.is_file():
            raise SourceError("is not a regular file; use - and redirect standard output to it")
        if target.exists() and not overwrite:
            raise SourceError("exists already; use -f to overwrite it")
        if not target.parent.is_dir():
            raise SourceError(f"no such folder: {Path(path).parent}")
        descriptor, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        )
    try:
        with os.fdopen(descriptor, "w+b") as stream:
            output = OutputFile(stream, os.fspath(path), can_write_at=True)
            yield output
            output.flush()
            os.fchmod(stream.fileno(), _mode_of(target))
        with naming(os.fspath(path)):
            if overwrite:
                os.replace(name, target)
            else:
                _publish_new(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _remote_output(
    url: str | os.PathLike[str], overwrite: bool, expected_nbytes: int | None
) -> Iterator[OutputFile]:
    from kvz.remote.upload import Upload

    name = str(parse(url))
    with naming(name):
        upload = Upload(url, overwrite=overwrite, expected_nbytes=expected_nbytes)
    try:
        yield OutputFile(cast(BinaryIO, upload), name)
        with naming(name):
            upload.finish()
    except BaseException:
        upload.abort()
        raise


def _publish_new(name: str, target: Path) -> None:
    """Give a finished file its name, unless another writer took the name meanwhile."""
    try:
        os.link(name, target)
    except FileExistsError:
        raise SourceError("was created by another writer meanwhile") from None
    except OSError:  # a file system without hard links
        os.rename(name, target)
    else:
        os.unlink(name)


def _mode_of(target: Path) -> int:
    """Permissions of the file that is replaced, or those that the umask gives a new one."""
    if target.exists():
        return target.stat().st_mode & 0o7777
    return 0o666 & ~_UMASK


def same_file(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> bool:
    """Whether both paths are one existing file, or both URLs one object."""
    if is_remote(source) or is_remote(destination):
        return same_object(source, destination)
    try:
        return os.path.samefile(local_path(source), local_path(destination))
    except (OSError, ValueError):
        return False


def integer_view(array: NDArray[Any]) -> NDArray[Any]:
    """Any array as unsigned integers of the same width, without a copy."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
