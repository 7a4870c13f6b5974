"""What an archive will hold: its head, and the jobs that make its sections, in their order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.codebooks import CodebookFile, read_sample
from kvz.codecs.base import Codec, is_progressive
from kvz.codecs.raw import RawCodec
from kvz.formats import container
from kvz.formats.codecs.spans import residual_offset
from kvz.formats.head import CodecEntry, Head, TensorEntry, view_shape
from kvz.formats.ids import LOSSY_CODECS, SectionKind
from kvz.layout import Layout, chunk_tokens, is_key_or_value, part_name
from kvz.safetensors_io import TensorReader, TensorSource
from kvz.version import __version__
from kvz.workers import BufferPool

_RAW = RawCodec()


def _keep() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Section:
    """A section ready to be written. ``release`` is called then: the payload's memory is free.

    ``residual``: of an anchor, the payload that follows when all chunks are written.
    """

    kind: SectionKind
    tensor: int
    chunk: int
    payload: NDArray[np.uint8]
    checksum: int
    raw_nbytes: int
    release: Callable[[], None] = _keep
    residual: NDArray[np.uint8] | None = None


def fallback_codec() -> Codec:
    """The codec of a tensor that the wanted one does not take."""
    from kvz.codecs.zstd import ZstdCodec

    return ZstdCodec()


@dataclass(frozen=True, slots=True)
class Plan:
    """The head of the archive, and the codec of each tensor.

    ``num_fallback_tensors``: tensors that the wanted codec does not take and ``zstd`` stores.
    """

    head: Head
    codecs: tuple[Codec, ...]
    num_fallback_tensors: int


def plan(source: TensorSource, codec: Codec, layout: Layout) -> Plan:
    """Which tensor is stored by which codec in which chunks. Raises ConfigError."""
    codec = codec.for_source(source)
    numbers = {_key(codec): 0}
    stored = [CodecEntry(codec.name, codec.config_dict())]
    tensors, codecs, num_fallback_tensors = [], [], 0
    for given in source.header.tensors:
        axis = layout.token_axis(given)
        chosen = None
        if _may_lose(codec, given.name, layout):
            shape = view_shape(given.shape, axis)
            chosen = codec.for_tensor(given.name, given.dtype, shape, axis)
        if chosen is None:
            chosen, axis = fallback_codec(), None
            num_fallback_tensors += 1
        number = numbers.setdefault(_key(chosen), len(numbers))
        if number == len(stored):
            stored.append(CodecEntry(chosen.name, chosen.config_dict()))
        step = chunk_tokens(given, axis, chosen.chunk_step)
        tensors.append(TensorEntry(given.name, given.dtype, given.shape, axis, step, number))
        codecs.append(chosen)
    if any(entry.name == codec.name for entry in stored[1:]) and all(t.codec for t in tensors):
        # each tensor got a codec of its own making: the one that made them stores nothing
        stored, tensors = stored[1:], [replace(t, codec=t.codec - 1) for t in tensors]
    for tensor in tensors:
        tensor.check(len(stored))
    head = Head(tuple(stored), tuple(tensors), source.header.metadata, f"kvz {__version__}")
    return Plan(head, tuple(codecs), num_fallback_tensors)


def _key(codec: Codec) -> str:
    return json.dumps([codec.name, codec.config_dict()], sort_keys=True)


def _may_lose(codec: Codec, name: str, layout: Layout) -> bool:
    """A lossy codec takes the keys and values of layers, or what a pattern names, only."""
    if codec.name not in LOSSY_CODECS or layout.pattern is not None:
        return True
    return is_key_or_value(name) and part_name(name) in ("key", "value")


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

    def __init__(self, source: TensorSource, planned: Plan, book: CodebookFile | None):
        self.head = planned.head
        self._source = source
        self._codecs = planned.codecs
        self._book = book
        self._buffers = BufferPool()

    def work(self) -> Iterator[SectionJob | ChunkToEncode]:
        """For each tensor a job that makes its codebook, then its chunks."""
        for index, entry in enumerate(self.head.tensors):
            reader = self._source.reader(self._source.header.tensors[index], entry.view_shape)
            codec = self._codecs[index]
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
            try:
                if self._book is not None and entry.codec == 0:
                    payload = self._book.find(codec, entry)
                elif codec.needs_codebook:
                    payload = codec.calibrate(read_sample(reader, entry), entry.view_shape[1])
                else:
                    payload = b""
                done.set_result(codec.prepare(payload, entry.dtype, entry.view_shape))
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
        length = codec.encode(elements, item.prepared.result(), buffer, start)
        kind, residual = SectionKind.ENCODED, None
        if is_progressive(codec):
            kind = SectionKind.ANCHOR
            begin = residual_offset(length)
            residual = buffer[begin : begin + codec.residual_nbytes(shape)]
        if length + (0 if residual is None else residual.size) >= nbytes:
            kind, residual = SectionKind.RAW, None
            length = _RAW.encode(elements, None, buffer)
        if raw is not None:
            self._buffers.give(raw)
        payload = buffer[:length]
        total = container.checksum(payload)
        release = partial(self._buffers.give, buffer)
        return Section(kind, item.tensor, item.chunk, payload, total, nbytes, release, residual)
