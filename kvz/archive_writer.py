"""Writes a container from front to back; the destination need not be seekable."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvz.formats import container
from kvz.formats.container import Frame, Prelude, Trailer
from kvz.formats.head import Head
from kvz.formats.ids import SectionKind


class Sink(Protocol):
    """Anything that takes bytes in order."""

    def write(self, data: Any, /) -> Any: ...


class ArchiveWriter:
    """``add`` sections in order, then ``finish``: without the trailer a file is incomplete."""

    def __init__(self, stream: Sink, head: Head) -> None:
        self._stream = stream
        self._position = 0
        self._entries: list[tuple[int, int, int, int, int, int, int]] = []
        data = head.to_bytes()
        self._head_checksum = container.checksum(data)
        self._write(Prelude(len(data), self._head_checksum, head.version, head.version).to_bytes())
        self._write(data)

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._position

    def _write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._position += len(data)

    def add(
        self, kind: SectionKind, tensor: int, chunk: int, payload: NDArray[np.uint8], checksum: int
    ) -> None:
        """Append a section; ``checksum`` is that of ``payload``."""
        start = container.payload_offset(self._position)
        frame = Frame(kind, tensor, chunk, payload.size, checksum)
        self._write(bytes(start - container.FRAME_NBYTES - self._position) + frame.to_bytes())
        self._write(memoryview(payload))
        if kind is not SectionKind.INDEX:
            self._entries.append((start, payload.size, checksum, tensor, chunk, int(kind), 0))

    def finish(self) -> None:
        """Write index and trailer."""
        entries = np.array(self._entries, container.INDEX_DTYPE)
        payload = entries.view(np.uint8).reshape(-1)
        index_sum = container.checksum(payload)
        self.add(SectionKind.INDEX, 0, 0, payload, index_sum)
        index_offset = self._position - payload.size
        end = container.trailer_offset(self._position)
        trailer = Trailer(
            index_offset,
            payload.size,
            index_sum,
            self._head_checksum,
            end + container.TRAILER_NBYTES,
        )
        self._write(bytes(end - self._position) + trailer.to_bytes())
