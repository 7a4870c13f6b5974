"""Compress a cache into an archive: plan, calibrate, encode in parallel, write in order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.archive_writer import ArchiveWriter, Sink
from kvz.codebooks import CodebookFile, read_sample
from kvz.codecs import DEFAULT_CODEC, codec_from_options
from kvz.codecs.base import Codec
from kvz.codecs.raw import RawCodec
from kvz.files import STANDARD_STREAM, atomic_output, naming, same_file
from kvz.formats import container
from kvz.formats.errors import ConfigError
from kvz.formats.head import CodecEntry, Head, TensorEntry
from kvz.formats.ids import SectionKind
from kvz.layout import Layout, chunk_tokens
from kvz.safetensors_io import (
    MemorySource,
    SafetensorsFile,
    SafetensorsStream,
    TensorReader,
    TensorSource,
    describe_array,
)
from kvz.version import __version__
from kvz.workers import BufferPool, run_ordered, thread_count

#: Called with the number of raw bytes that were dealt with since the last call.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CompressReport:
    """What :func:`compress` did. Sizes in bytes; ``ratio`` counts every byte of the archive.

    ``num_fallback_tensors``: tensors that the codec does not take and ``zstd`` stored.
    """

    source: str
    destination: str
    codec: str
    num_tensors: int
    num_fallback_tensors: int
    original_nbytes: int
    stored_nbytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.original_nbytes / self.stored_nbytes

    @property
    def gb_per_s(self) -> float:
        return self.original_nbytes / self.seconds / 1e9


_RAW = RawCodec()


@dataclass(frozen=True, slots=True)
class _Section:
    kind: SectionKind
    tensor: int
    chunk: int
    payload: NDArray[np.uint8]
    checksum: int
    raw_nbytes: int
    buffer: NDArray[np.uint8] | None = None


def plan(source: TensorSource, codec: Codec, layout: Layout) -> Head:
    """The head of the archive: which tensor is stored by which codec in which chunks."""
    from kvz.codecs.zstd import ZstdCodec

    codecs = [codec]
    tensors = []
    for tensor in source.header.tensors:
        axis = layout.token_axis(tensor)
        chosen = 0
        if not codec.supports(tensor.dtype, axis):
            if len(codecs) == 1:
                codecs.append(ZstdCodec())
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


class _Encoder:
    """Turns planned tensors into jobs, one per codebook and chunk, each giving a section."""

    def __init__(self, source: TensorSource, head: Head, codec: Codec, book: CodebookFile | None):
        from kvz.codecs.zstd import ZstdCodec

        self._source = source
        self._head = head
        self._codecs = [codec, ZstdCodec()][: len(head.codecs)]
        self._book = book
        self.buffers = BufferPool()

    def jobs(self) -> Iterator[Callable[[], _Section | None]]:
        for index, entry in enumerate(self._head.tensors):
            reader = self._source.reader(self._source.header.tensors[index], entry.view_shape)
            codec = self._codecs[entry.codec]
            if entry.num_chunks == 0:
                continue
            # chunk jobs wait for this; it was queued before them, so it never waits for a thread
            prepared: Future[Any] = Future()
            yield self._calibration(index, entry, codec, reader, prepared)
            for chunk in range(entry.num_chunks):
                yield self._chunk(index, entry, chunk, codec, reader, prepared)

    def _calibration(
        self, index: int, entry: TensorEntry, codec: Codec, reader: TensorReader, done: Future[Any]
    ) -> Callable[[], _Section | None]:
        def job() -> _Section | None:
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
            return _Section(SectionKind.CODEBOOK, index, 0, data, container.checksum(data), 0)

        return job

    def _chunk(
        self,
        index: int,
        entry: TensorEntry,
        chunk: int,
        codec: Codec,
        reader: TensorReader,
        prepared: Future[Any],
    ) -> Callable[[], _Section]:
        def job() -> _Section:
            shape = entry.chunk_shape(chunk)
            nbytes = int(np.prod(shape)) * entry.itemsize
            start, stop = entry.chunk_range(chunk)
            elements = reader.view(start, stop)
            raw = None
            if elements is None:
                raw = self.buffers.take(nbytes)
                elements = raw[:nbytes].view(f"u{entry.itemsize}").reshape(shape)
                reader.read(start, elements)
            buffer = self.buffers.take(max(nbytes, codec.buffer_nbytes(shape, entry.itemsize)))
            length = codec.encode(elements, prepared.result(), buffer)
            kind = SectionKind.ENCODED
            if length >= nbytes:
                kind = SectionKind.RAW
                length = _RAW.encode(elements, None, buffer)
            if raw is not None:
                self.buffers.give(raw)
            payload = buffer[:length]
            total = container.checksum(payload)
            return _Section(kind, index, chunk, payload, total, nbytes, buffer)

        return job


def write_archive(
    source: TensorSource,
    head: Head,
    stream: Sink,
    codec: Codec,
    *,
    codebook: CodebookFile | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the archive that ``head`` plans to ``stream``; returns its size in bytes."""
    writer = ArchiveWriter(stream, head)
    encoder = _Encoder(source, head, codec, codebook)
    for section in run_ordered(encoder.jobs(), thread_count(threads)):
        if section is None:
            continue
        writer.add(section.kind, section.tensor, section.chunk, section.payload, section.checksum)
        if section.buffer is not None:
            encoder.buffers.give(section.buffer)
        if progress is not None:
            progress(section.raw_nbytes)
    writer.finish()
    return writer.nbytes


def open_source(
    source: str | os.PathLike[str] | Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> TensorSource:
    """A safetensors path, ``-`` for standard input, or a mapping of arrays or tensors."""
    if isinstance(source, Mapping):
        arrays = {name: describe_array(value) for name, value in source.items()}
        return MemorySource(arrays, metadata or {})
    if os.fspath(source) == STANDARD_STREAM:
        with naming("<stdin>"):
            return SafetensorsStream(sys.stdin.buffer)
    return SafetensorsFile(source)


def compress(
    source: str | os.PathLike[str] | Mapping[str, Any] | Any,
    destination: str | os.PathLike[str],
    codec: str = DEFAULT_CODEC,
    *,
    codec_options: Mapping[str, str] | None = None,
    codebook: str | os.PathLike[str] | None = None,
    layout: Layout | None = None,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CompressReport:
    """Compress a cache into the archive ``destination``.

    ``source`` is a safetensors file (path, or ``-`` for standard input), a :class:`kvz.Capture`, or
    a mapping from names to NumPy arrays or torch tensors (any strides; BF16 as torch tensors);
    ``metadata`` goes with a mapping. BF16 tensors with a token axis go through ``codec`` (``gaac``,
    ``splitzip``, ``zstd``, ``raw``), all others losslessly through ``zstd``. ``codec_options`` are
    strings as on the command line. ``threads``: default one per processor.

    The file appears when it is complete. Raises SourceError (input or output), NotSafetensorsFile,
    TruncatedFile, ConfigError (options), ContentMismatch (codebook).
    """
    start = time.perf_counter()
    if hasattr(source, "tensors") and hasattr(source, "metadata"):
        source, metadata = source.tensors, source.metadata
    binding = codec_from_options(codec, codec_options or {})
    if not isinstance(source, Mapping) and same_file(source, destination):
        raise ConfigError(f"{os.fspath(destination)}: input and output are the same file")
    book = None if codebook is None else CodebookFile.load(codebook)
    opened = open_source(source, metadata)
    with atomic_output(destination, overwrite=overwrite) as stream, naming(opened.name):
        head = plan(opened, binding, layout or Layout())
        stored = write_archive(
            opened,
            head,
            stream,
            binding,
            codebook=book,
            threads=threads,
            progress=progress,
        )
    return CompressReport(
        source=opened.name,
        destination=os.fspath(destination),
        codec=codec,
        num_tensors=len(head.tensors),
        num_fallback_tensors=sum(tensor.codec != 0 for tensor in head.tensors),
        original_nbytes=sum(tensor.nbytes for tensor in opened.header.tensors),
        stored_nbytes=stored,
        seconds=time.perf_counter() - start,
    )
