"""Compress a cache into an archive: plan, calibrate, encode in parallel, write in order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.archive_writer import ArchiveWriter, Sink
from kvz.codebooks import CodebookFile
from kvz.codecs import DEFAULT_CODEC, codec_from_options
from kvz.devices import DEFAULT_DEVICE, require_gpu
from kvz.files import STANDARD_STREAM, atomic_output, naming, same_file
from kvz.formats import container
from kvz.formats.errors import ConfigError
from kvz.formats.head import Head
from kvz.formats.ids import SectionKind
from kvz.layout import Layout
from kvz.locations import shown_name
from kvz.lossy import lossy_note
from kvz.planning import Plan, SectionSource, plan
from kvz.remote.urls import is_remote
from kvz.safetensors_io import (
    MemorySource,
    RemoteCapture,
    SafetensorsFile,
    SafetensorsStream,
    TensorSource,
    describe_array,
)
from kvz.spool import PayloadSpool
from kvz.workers import run_ordered, thread_count

if TYPE_CHECKING:
    from kvz.gpu.encoding import GpuEncoder

#: Called with the number of raw bytes that were dealt with since the last call.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CompressReport:
    """What :func:`compress` did. Sizes in bytes; ``ratio`` counts every byte of the archive.

    ``num_fallback_tensors``: tensors that the codec does not take and ``zstd`` stored.
    ``guessed_axis``: the first tensor whose token axis was taken from its shape alone. ``stages``:
    with a GPU, the seconds that each stage was busy (:mod:`kvz.gpu.stages`); they overlap.
    ``anchor_nbytes``: of a progressive codec, the bytes that suffice for the anchors. ``lossy``: by
    which codecs, this one or an earlier one, values differ from the captured ones.
    """

    source: str
    destination: str
    codec: str
    num_tensors: int
    num_fallback_tensors: int
    guessed_axis: str | None
    original_nbytes: int
    stored_nbytes: int
    seconds: float
    device: str = "cpu"
    stages: dict[str, float] | None = None
    anchor_nbytes: int | None = None
    lossy: str = ""

    @property
    def ratio(self) -> float:
        return self.original_nbytes / self.stored_nbytes

    @property
    def gb_per_s(self) -> float:
        return self.original_nbytes / self.seconds / 1e9


class WrittenArchive(NamedTuple):
    """Bytes of the file, and those before its first residual (None: it has none)."""

    nbytes: int
    anchor_nbytes: int | None


def write_archive(
    source: TensorSource,
    planned: Plan,
    stream: Sink,
    *,
    codebook: CodebookFile | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    gpu: GpuEncoder | None = None,
) -> WrittenArchive:
    """Write the planned archive to ``stream``."""
    writer = ArchiveWriter(stream, planned.head)
    work = SectionSource(source, planned, codebook)
    if gpu is None:
        sections = run_ordered(work.jobs(), thread_count(threads))
    else:
        sections = gpu.sections(work, thread_count(threads))
    residuals = _Residuals()
    for section in sections:
        if section is None:
            continue
        writer.add(section.kind, section.tensor, section.chunk, section.payload, section.checksum)
        if section.residual is not None:
            residuals.keep(section.tensor, section.chunk, section.residual)
        section.release()
        if progress is not None:
            progress(section.raw_nbytes)
    anchor_nbytes = writer.nbytes if len(residuals) else None
    residuals.write(writer)
    writer.finish()
    return WrittenArchive(writer.nbytes, anchor_nbytes)


class _Residuals:
    """Residuals wait here until every anchor is written."""

    def __init__(self) -> None:
        self._spool = PayloadSpool()
        self._chunks: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._chunks)

    def keep(self, tensor: int, chunk: int, payload: NDArray[np.uint8]) -> None:
        self._spool.put(payload)
        self._chunks.append((tensor, chunk))

    def write(self, writer: ArchiveWriter) -> None:
        for tensor, chunk in self._chunks:
            payload = self._spool.get()
            total = container.checksum(payload)
            writer.add(SectionKind.RESIDUAL, tensor, chunk, payload, total)
        self._spool.close()


def open_source(
    source: str | os.PathLike[str] | Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> TensorSource:
    """A safetensors path or URL, ``-`` for standard input, or a mapping of arrays or tensors."""
    if isinstance(source, Mapping):
        arrays = {name: describe_array(value) for name, value in source.items()}
        return MemorySource(arrays, metadata or {})
    if os.fspath(source) == STANDARD_STREAM:
        with naming("<stdin>"):
            return SafetensorsStream(sys.stdin.buffer)
    return RemoteCapture(source) if is_remote(source) else SafetensorsFile(source)


def compress(
    source: str | os.PathLike[str] | Mapping[str, Any] | Any,
    destination: str | os.PathLike[str],
    codec: str = DEFAULT_CODEC,
    *,
    codec_options: Mapping[str, str] | None = None,
    codebook: str | os.PathLike[str] | None = None,
    layout: Layout | str | None = None,
    metadata: Mapping[str, str] | None = None,
    device: str = DEFAULT_DEVICE,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CompressReport:
    """Compress a cache into the archive ``destination``.

    ``source`` is a safetensors file (path, URL, or ``-`` for standard input), a
    :class:`kvz.Capture`, or a mapping from names to NumPy arrays or torch tensors (any strides;
    BF16 as torch tensors); ``metadata`` goes with a mapping. BF16 tensors with a token axis go
    through ``codec`` (``gaac``, ``splitzip``, ``zstd``, ``raw``; the lossy ``lynx`` and ``pnmix``
    take keys and values only), all others losslessly through ``zstd``. ``codec_options`` are
    strings as on the command line. ``device``: ``cuda`` or ``cuda:N`` encodes on a GPU, with the
    same bytes as a result; ``auto`` and ``cpu`` do not. ``threads``: default one per processor.

    The file, or at a URL the object, appears when it is complete. Raises SourceError (input or
    output), NotSafetensorsFile, TruncatedFile, ConfigError (options, device),
    ContentMismatch (codebook).
    """
    start = time.perf_counter()
    if hasattr(source, "tensors") and hasattr(source, "metadata"):
        source, metadata = source.tensors, source.metadata
    binding = codec_from_options(codec, codec_options or {})
    book = None if codebook is None else CodebookFile.load(codebook)
    opened = open_source(source, metadata)
    if not isinstance(source, Mapping) and same_file(source, destination):
        raise ConfigError(f"{shown_name(destination)}: input and output are the same file")
    where = Layout(layout) if isinstance(layout, str) else layout or Layout()
    with naming(opened.name):
        planned = plan(opened, binding, where)
        _check_layout(where, opened)
    head = planned.head
    gpu = _gpu_encoder(device, head)
    original_nbytes = sum(tensor.nbytes for tensor in opened.header.tensors)
    output = atomic_output(destination, overwrite=overwrite, expected_nbytes=original_nbytes)
    source_file = closing(opened) if isinstance(opened, SafetensorsFile) else nullcontext()
    with source_file, output as stream, naming(opened.name):
        written = write_archive(
            opened,
            planned,
            stream,
            codebook=book,
            threads=threads,
            progress=progress,
            gpu=gpu,
        )
    return CompressReport(
        source=opened.name,
        destination=shown_name(destination),
        codec=codec,
        num_tensors=len(head.tensors),
        num_fallback_tensors=planned.num_fallback_tensors,
        guessed_axis=_guessed_axis(where, head),
        original_nbytes=original_nbytes,
        stored_nbytes=written.nbytes,
        anchor_nbytes=written.anchor_nbytes,
        lossy=lossy_note(head),
        seconds=time.perf_counter() - start,
        device="cpu" if gpu is None else gpu.name,
        stages=None if gpu is None else gpu.stages.seconds(),
    )


def _check_layout(layout: Layout, source: TensorSource) -> None:
    tensors = source.header.tensors
    if layout.given and tensors and all(layout.token_axis(t) is None for t in tensors):
        raise ConfigError("no tensor has the name and the axes that layout and pattern say")


def _guessed_axis(layout: Layout, head: Head) -> str | None:
    """The first tensor whose token axis follows from nothing but its shape, for people."""
    for entry in head.tensors:
        if entry.codec == 0 and entry.token_axis is not None and layout.is_guess(entry.name):
            axes = ", ".join(map(str, entry.shape))
            return f"axis {entry.token_axis} of {entry.name} [{axes}]"
    return None


def _gpu_encoder(device: str, head: Head) -> GpuEncoder | None:
    if not require_gpu(device):
        return None
    from kvz.gpu.encoding import GpuEncoder

    return GpuEncoder(device, head)
