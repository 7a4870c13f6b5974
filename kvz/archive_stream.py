"""An archive arriving on a pipe or socket: sections in order, checked as they come."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.files import read_exactly, read_up_to
from kvz.formats import container
from kvz.formats.codecs.spans import residual_offset
from kvz.formats.container import Frame, Prelude, Trailer
from kvz.formats.errors import InvalidField, TruncatedFile
from kvz.formats.head import Head
from kvz.formats.ids import SectionKind
from kvz.section_table import SectionTable, check_kind, section_name
from kvz.sections import Decoder, EncodedChunk, Wanted
from kvz.spool import PayloadSpool


class Arrival(NamedTuple):
    """A chunk (RAW, ENCODED, ANCHOR) or a RESIDUAL; ``prepared`` is what its decoding needs.

    ``is_last_chunk``: all chunks are there; what comes later is residuals.
    """

    kind: SectionKind
    tensor: int
    chunk: int
    payload: NDArray[np.uint8]
    prepared: Any
    is_last_chunk: bool


class ArchiveStream:
    """Reads the head at once, then the sections; complete when :meth:`chunks` is exhausted.

    Raises what :class:`kvz.archive.Archive` raises, at the latest at the end of the stream.
    """

    def __init__(self, stream: BinaryIO, name: str = "<stdin>") -> None:
        self.name = name
        self._stream = stream
        self.prelude = Prelude.from_bytes(read_up_to(stream, container.PRELUDE_NBYTES))
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

    def arrivals(self) -> Iterator[Arrival]:
        """Chunks and residuals as they arrive: every section once, in its place, checksum verified.

        Whoever stops early knows that of what came so far; the trailer is checked at the end.
        """
        prepared: tuple[int, Any] = (-1, None)
        # one ahead, never all: a hostile head can claim any number of chunks
        chunks = (
            (tensor, chunk, False)
            for tensor, entry in enumerate(self.head.tensors)
            for chunk in range(entry.num_chunks)
        )
        due = next(chunks, None)
        residuals: deque[tuple[int, int, bool]] = deque()
        for frame, payload in self._sections():
            entry = self.head.tensors[frame.tensor]
            place = (frame.tensor, frame.chunk)
            if frame.kind is SectionKind.CODEBOOK:
                if prepared[0] == frame.tensor:
                    name = section_name(self.head, frame.kind, *place)
                    raise InvalidField(f"{name} does not stand once, before the tensor's chunks")
                if due != (*place, False):
                    raise self._misplaced(frame, due or (residuals[0] if residuals else None))
                prepared = (frame.tensor, self.decoder.prepare(entry, payload.tobytes()))
                continue
            # residuals come when all chunks are there
            if due is None and residuals:
                due = residuals.popleft()
            if (*place, frame.kind is SectionKind.RESIDUAL) != due:
                raise self._misplaced(frame, due)
            due = next(chunks, None)
            if frame.kind is SectionKind.ANCHOR:
                residuals.append((*place, True))
            if frame.kind in (SectionKind.ANCHOR, SectionKind.ENCODED) and prepared[0] != place[0]:
                prepared = (frame.tensor, self.decoder.prepare(entry, None))
            yield Arrival(frame.kind, *place, payload, prepared[1], is_last_chunk=due is None)

    def _misplaced(self, frame: Frame, expected: tuple[int, int, bool] | None) -> InvalidField:
        found = section_name(self.head, frame.kind, frame.tensor, frame.chunk)
        if expected is None:
            return InvalidField(f"{found} comes after the last section that the head needs")
        tensor, chunk, is_residual = expected
        kind = SectionKind.RESIDUAL if is_residual else SectionKind.ENCODED
        wanted = section_name(self.head, kind, tensor, chunk)
        return InvalidField(f"{found} comes where {wanted} must be")

    def chunks(self, wanted: Wanted, *, anchor_only: bool = False) -> Iterator[EncodedChunk]:
        """The wanted chunks as they become complete; everything else is read and checked as well.

        ``anchor_only``: ends with the last anchor, whatever comes later, and leaves it unread.
        """
        if anchor_only and not any(entry.num_chunks for entry in self.head.tensors):
            return
        waiting: deque[Any] = deque()
        with contextlib.closing(PayloadSpool()) as anchors:
            for arrival in self.arrivals():
                kind, tensor, chunk, payload, prepared, is_last = arrival
                if wanted(tensor, chunk):
                    if kind is SectionKind.RESIDUAL:
                        arrival = self.join(arrival, anchors.get(), waiting.popleft())
                    if kind is SectionKind.ANCHOR and not anchor_only:
                        anchors.put(payload)
                        waiting.append(prepared)
                    else:
                        yield self.encoded_chunk(arrival)
                if anchor_only and is_last:
                    return

    def join(self, residual: Arrival, anchor: NDArray[np.uint8], prepared: Any) -> Arrival:
        """A RESIDUAL whose payload is that of both. Raises InvalidField for a wrong length."""
        entry = self.head.tensors[residual.tensor]
        self.decoder.check_parts(entry, residual.chunk, anchor, residual.payload.size)
        start = residual_offset(anchor.size)
        payload = np.zeros(start + residual.payload.size, np.uint8)
        payload[: anchor.size], payload[start:] = anchor, residual.payload
        return residual._replace(payload=payload, prepared=prepared)

    def encoded_chunk(self, arrival: Arrival) -> EncodedChunk:
        """What arrived; for a RESIDUAL, its payload must be that of both."""
        kind, tensor, chunk, payload, prepared, _ = arrival
        entry = self.head.tensors[tensor]
        return EncodedChunk(
            tensor=tensor,
            chunk=chunk,
            kind=kind,
            payload_nbytes=payload.size,
            decode=partial(self.decoder.decode, kind, entry, chunk, payload, prepared),
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
            check_kind(self.head, frame.kind, frame.tensor, frame.chunk)
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
        SectionTable(self.head, index)
        self.nbytes = end + container.TRAILER_NBYTES
        if self._stream.read(1):
            raise TruncatedFile("bytes follow the trailer")
