"""An archive arriving on a pipe or socket: sections in order, checked as they come."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvz.files import read_exactly
from kvz.formats import container
from kvz.formats.container import Frame, Prelude, Trailer
from kvz.formats.errors import InvalidField, TruncatedFile
from kvz.formats.head import Head, TensorEntry
from kvz.formats.ids import SectionKind
from kvz.sections import Decoder, EncodedChunk, Wanted, check_complete, section_name


class ArchiveStream:
    """Reads the head at once, then the sections; complete when :meth:`chunks` is exhausted.

    Raises what :class:`kvz.archive.Archive` raises, at the latest at the end of the stream.
    """

    def __init__(self, stream: BinaryIO, name: str = "<stdin>") -> None:
        self.name = name
        self._stream = stream
        self.prelude = Prelude.from_bytes(stream.read(container.PRELUDE_NBYTES))
        head = read_exactly(stream, self.prelude.head_nbytes).tobytes()
        self.prelude.check_head(head)
        self.head = Head.from_bytes(head)
        self.decoder = Decoder(self.head)
        #: Bytes and sections that were read and checked so far.
        self.nbytes = container.PRELUDE_NBYTES + len(head)
        self.num_sections = 0

    @property
    def nbytes_read(self) -> int:
        """Bytes that were read so far."""
        return self.nbytes

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        return read_exactly(self._stream, nbytes)

    def chunks(self, wanted: Wanted) -> Iterator[EncodedChunk]:
        """The wanted chunks as they arrive; everything else is read and checked as well."""
        prepared: tuple[int, Any] = (-1, None)
        for frame, payload in self._sections():
            entry = self.head.tensors[frame.tensor]
            if frame.kind is SectionKind.CODEBOOK:
                prepared = (frame.tensor, self.decoder.prepare(entry, payload.tobytes()))
            elif wanted(frame.tensor, frame.chunk):
                if frame.kind is not SectionKind.RAW and prepared[0] != frame.tensor:
                    prepared = (frame.tensor, self.decoder.prepare(entry, None))
                yield self._encoded_chunk(frame, entry, payload, prepared[1])

    def _encoded_chunk(
        self, frame: Frame, entry: TensorEntry, payload: NDArray[np.uint8], prepared: Any
    ) -> EncodedChunk:
        decode = self.decoder.decode
        return EncodedChunk(
            tensor=frame.tensor,
            chunk=frame.chunk,
            kind=frame.kind,
            payload_nbytes=payload.size,
            decode=partial(decode, frame.kind, entry, frame.chunk, payload, prepared),
            read=lambda out: np.copyto(out, payload),
            check=lambda payload: None,  # was checked as it arrived
            prepared=lambda: prepared,
        )

    def _sections(self) -> Iterator[tuple[Frame, NDArray[np.uint8]]]:
        entries = []
        while True:
            start, frame = self._next_frame()
            payload = self._take(frame.length)
            self.nbytes = start + frame.length
            if frame.kind is SectionKind.INDEX:
                frame.check_payload(payload, "the index")
                if frame.tensor or frame.chunk:
                    raise InvalidField("the frame of the index names a tensor or a chunk")
                break
            if frame.tensor >= len(self.head.tensors):
                raise InvalidField(f"a section names tensor {frame.tensor}, which does not exist")
            num_chunks = self.head.tensors[frame.tensor].num_chunks
            is_codebook = frame.kind is SectionKind.CODEBOOK
            if frame.chunk >= (min(1, num_chunks) if is_codebook else num_chunks):
                name = section_name(self.head, frame.kind, frame.tensor, frame.chunk)
                raise InvalidField(f"a section names {name}, which does not exist")
            name = section_name(self.head, frame.kind, frame.tensor, frame.chunk)
            frame.check_payload(payload, name)
            entry = (start, frame.length, frame.checksum, frame.tensor, frame.chunk, frame.kind, 0)
            entries.append(entry)
            self.num_sections += 1
            yield frame, payload
        self._finish(start, payload, np.array(entries, container.INDEX_DTYPE))

    def _next_frame(self) -> tuple[int, Frame]:
        start = container.payload_offset(self.nbytes)
        gap = start - container.FRAME_NBYTES - self.nbytes
        data = self._take(gap + container.FRAME_NBYTES)
        if data[:gap].any():
            raise InvalidField(f"padding before byte {start} is not zero")
        return start, Frame.from_bytes(data[gap:].tobytes())

    def _finish(self, start: int, payload: NDArray[np.uint8], seen: container.Index) -> None:
        end = container.trailer_offset(self.nbytes)
        gap = end - self.nbytes
        data = self._take(gap + container.TRAILER_NBYTES)
        if data[:gap].any():
            raise InvalidField("padding before the trailer is not zero")
        trailer = Trailer.from_bytes(data[gap:].tobytes(), end + container.TRAILER_NBYTES)
        trailer.check_index(payload.tobytes())
        if trailer.index_offset != start or trailer.head_checksum != self.prelude.head_checksum:
            raise InvalidField("the trailer does not belong to this stream")
        index = container.parse_index(payload.tobytes(), self.prelude, trailer)
        if not np.array_equal(index, seen):
            raise InvalidField("the index differs from the sections that came before it")
        check_complete(self.head, index)
        self.nbytes = end + container.TRAILER_NBYTES
        if self._stream.read(1):
            raise TruncatedFile("bytes follow the trailer")
