"""What an archive will hold: its head, and the jobs that make its sections, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.codebooks import CodebookFile, read_sample
from kvz.codecs.base import Codec
from kvz.codecs.raw import RawCodec
from kvz.formats import container
from kvz.formats.head import CodecEntry, Head, TensorEntry
from kvz.formats.ids import SectionKind
from kvz.layout import Layout, chunk_tokens
from kvz.safetensors_io import TensorReader, TensorSource
from kvz.version import __version__
from kvz.workers import BufferPool

_RAW = RawCodec()


def _keep() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Section:
    """A section ready to be written. ``release`` is called then: the payload's memory is free."""

    kind: SectionKind
    tensor: int
    chunk: int
    payload: NDArray[np.uint8]
    checksum: int
    raw_nbytes: int
    release: Callable[[], None] = _keep


def _fallback_codec() -> Codec:
    from kvz.codecs.zstd import ZstdCodec

    return ZstdCodec()


def plan(source: TensorSource, codec: Codec, layout: Layout) -> Head:
    """The head of the archive: which tensor is stored by which codec in which chunks."""
    codecs = [codec]
    tensors = []
    for tensor in source.header.tensors:
        axis = layout.token_axis(tensor)
        chosen = 0
        if not codec.supports(tensor.dtype, axis):
            if len(codecs) == 1:
                codecs.append(_fallback_codec())
            chosen, axis = 1, None
        step = chunk_tokens(tensor, axis)
        entry = TensorEntry(tensor.name, tensor.dtype, tensor.shape, axis, step, chosen)
        entry.check(len(codecs))
        tensors.append(entry)
    return Head(
        codecs=tuple(CodecEntry(c.name, c.config_dict()) for c in codecs),
        tensors=tuple(tensors),
        metadata=source.header.metadata,
        writer=f"kvz {__version__}",
    )


class ChunkToEncode(NamedTuple):
    """One chunk of a planned tensor; ``prepared`` is set by a job that came before."""

    tensor: int
    entry: TensorEntry
    chunk: int
    codec: Codec
    reader: TensorReader
    prepared: Future[Any]


#: Gives a section; None where a tensor has no codebook.
SectionJob = Callable[[], Section | None]


class SectionSource:
    """What is to be encoded for an archive, in the order of its sections."""

    def __init__(self, source: TensorSource, head: Head, codec: Codec, book: CodebookFile | None):
        self.head = head
        self._source = source
        self._codecs = [codec] if len(head.codecs) == 1 else [codec, _fallback_codec()]
        self._book = book
        self._buffers = BufferPool()

    def work(self) -> Iterator[SectionJob | ChunkToEncode]:
        """For each tensor a job that makes its codebook, then its chunks."""
        for index, entry in enumerate(self.head.tensors):
            reader = self._source.reader(self._source.header.tensors[index], entry.view_shape)
            codec = self._codecs[entry.codec]
            if entry.num_chunks == 0:
                continue
            # chunks wait for this; it was queued before them, so it never waits for a thread
            prepared: Future[Any] = Future()
            yield self._calibration(index, entry, codec, reader, prepared)
            for chunk in range(entry.num_chunks):
                yield ChunkToEncode(index, entry, chunk, codec, reader, prepared)

    def jobs(self) -> Iterator[SectionJob]:
        """The same, all of it for the CPU."""
        for item in self.work():
            yield partial(self.encode, item) if isinstance(item, ChunkToEncode) else item

    def _calibration(
        self, index: int, entry: TensorEntry, codec: Codec, reader: TensorReader, done: Future[Any]
    ) -> SectionJob:
        def job() -> Section | None:
            outer, tokens, inner = entry.view_shape
            try:
                if self._book is not None and entry.codec == 0:
                    payload = self._book.find(codec, entry)
                elif codec.needs_codebook:
                    payload = codec.calibrate(read_sample(reader, entry), tokens)
                else:
                    payload = b""
                done.set_result(codec.prepare(payload, entry.dtype, outer, inner))
            except BaseException as error:
                done.set_exception(error)
                raise
            if not payload:
                return None
            data = np.frombuffer(payload, np.uint8)
            return Section(SectionKind.CODEBOOK, index, 0, data, container.checksum(data), 0)

        return job

    def encode(self, item: ChunkToEncode) -> Section:
        """Encode a chunk on the CPU."""
        entry, codec = item.entry, item.codec
        shape = entry.chunk_shape(item.chunk)
        nbytes = int(np.prod(shape)) * entry.itemsize
        start, stop = entry.chunk_range(item.chunk)
        elements = item.reader.view(start, stop)
        raw = None
        if elements is None:
            raw = self._buffers.take(nbytes)
            elements = raw[:nbytes].view(f"u{entry.itemsize}").reshape(shape)
            item.reader.read(start, elements)
        buffer = self._buffers.take(max(nbytes, codec.buffer_nbytes(shape, entry.itemsize)))
        length = codec.encode(elements, item.prepared.result(), buffer)
        kind = SectionKind.ENCODED
        if length >= nbytes:
            kind = SectionKind.RAW
            length = _RAW.encode(elements, None, buffer)
        if raw is not None:
            self._buffers.give(raw)
        payload = buffer[:length]
        total = container.checksum(payload)
        release = partial(self._buffers.give, buffer)
        return Section(kind, item.tensor, item.chunk, payload, total, nbytes, release)
