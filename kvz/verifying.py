"""Check an archive: every checksum, every chunk decoded, and, if asked, against a capture."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.archive_stream import ArchiveStream
from kvz.chunk_decoding import decode_chunks, gpu_decoder
from kvz.codecs.base import is_progressive
from kvz.compressing import Progress
from kvz.devices import DEFAULT_DEVICE
from kvz.files import STANDARD_STREAM, naming
from kvz.formats.codecs.spans import residual_offset
from kvz.formats.errors import ContentMismatch
from kvz.formats.head import Head, TensorEntry
from kvz.formats.ids import LOSSY_CODECS, SectionKind
from kvz.locations import open_stream, shown_name
from kvz.lossy import lossy_codecs
from kvz.safetensors_io import SafetensorsFile, TensorReader
from kvz.sections import Decoder, EncodedChunk
from kvz.workers import thread_count


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :func:`verify` found right. ``compared`` names the capture, if there was one.

    ``lossy``: codecs that changed values; what they make of the capture is what was compared.
    ``stages``: with a GPU, the seconds that each stage was busy (:mod:`kvz.gpu.stages`).
    """

    path: str
    num_tensors: int
    num_sections: int
    nbytes: int
    compared: str | None
    seconds: float
    device: str = "cpu"
    stages: dict[str, float] | None = None
    lossy: str = ""


def _check_same_tensors(head: Head, capture: SafetensorsFile) -> None:
    stored = {t.name: (t.dtype, t.shape) for t in head.tensors}
    wanted = {t.name: (t.dtype, t.shape) for t in capture.header.tensors}
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise ContentMismatch(
                f"tensor {name!r}: archive has {stored.get(name, 'none')}, "
                f"{capture.name} has {wanted.get(name, 'none')}"
            )
    if dict(head.metadata) != dict(capture.metadata):
        raise ContentMismatch(f"the metadata differs from that of {capture.name}")


def _compare(
    entry: TensorEntry, chunk: int, decoded: NDArray[Any], expected: NDArray[Any], whose: str
) -> None:
    begin = entry.chunk_range(chunk)[0]
    if not np.array_equal(decoded, expected):
        outer, token, inner = (int(i[0]) for i in np.nonzero(decoded != expected))
        raise ContentMismatch(
            f"{entry.name} differs at element [{outer}, {begin + token}, {inner}] "
            f"(archive {decoded[outer, token, inner]:#x}, "
            f"{whose} {expected[outer, token, inner]:#x})"
        )


def _readers(head: Head, capture: SafetensorsFile | None) -> dict[int, TensorReader]:
    """The capture's tensors by their number in the archive; empty without a capture."""
    if capture is None:
        return {}
    _check_same_tensors(head, capture)
    stored = {tensor.name: tensor for tensor in capture.header.tensors}
    return {
        i: capture.reader(stored[entry.name], entry.view_shape)
        for i, entry in enumerate(head.tensors)
    }


class _Checker:
    """Compares decoded chunks with those of a capture, if there is one."""

    def __init__(self, head: Head, readers: dict[int, TensorReader]) -> None:
        self._head = head
        self._readers = readers
        self._decoder = Decoder(head)

    def check(self, encoded: EncodedChunk, decoded: NDArray[Any]) -> int:
        """Returns the chunk's raw bytes. Raises ContentMismatch."""
        reader = self._readers.get(encoded.tensor)
        if reader is not None:
            entry = self._head.tensors[encoded.tensor]
            expected = np.empty_like(decoded)
            reader.read(entry.chunk_range(encoded.chunk)[0], expected)
            codec = self._head.codec_of(entry).name
            whose = "capture"
            if codec in LOSSY_CODECS:
                self._code(encoded, entry, expected)
                whose = f"{codec} makes of the capture"
            _compare(entry, encoded.chunk, decoded, expected, whose)
        return decoded.nbytes

    def _code(self, encoded: EncodedChunk, entry: TensorEntry, elements: NDArray[Any]) -> None:
        """What becomes of ``elements`` in the codec of the archive."""
        if encoded.kind is SectionKind.RAW:
            return
        codec, start = self._decoder.codec(entry), entry.chunk_range(encoded.chunk)[0]
        buffer = np.empty(codec.buffer_nbytes(elements.shape, entry.itemsize), np.uint8)
        length = codec.encode(elements, encoded.prepared(), buffer, start)
        if is_progressive(codec):
            length = residual_offset(length) + codec.residual_nbytes(elements.shape)
        codec.decode(buffer[:length], encoded.prepared(), elements, start)


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    device: str = DEFAULT_DEVICE,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read a whole archive (path, URL, or ``-``): structure, checksums, every chunk decoded.

    With ``against``, also compare every element and the metadata with a safetensors capture; where
    the codec is lossy, with what it makes of the capture.
    ``device``: ``cuda`` or ``cuda:N`` decodes on a GPU; ``auto`` and ``cpu`` do not.
    Raises DamagedFile, FormatError, SourceError, ConfigError (device), or ContentMismatch naming
    the first difference.
    """
    start = time.perf_counter()
    piped = os.fspath(path) == STANDARD_STREAM
    name = "<stdin>" if piped else shown_name(path)
    with contextlib.ExitStack() as stack:
        capture = None if against is None else stack.enter_context(SafetensorsFile(against))
        stack.enter_context(naming(name))
        stream = sys.stdin.buffer if piped else stack.enter_context(open_stream(path))
        archive = ArchiveStream(stream, name)
        gpu = gpu_decoder(device, archive.head)
        checked = decode_chunks(
            archive.chunks(lambda tensor, chunk: True),
            archive.head,
            _Checker(archive.head, _readers(archive.head, capture)).check,
            threads=thread_count(threads),
            gpu=gpu,
        )
        for nbytes in checked:
            if progress is not None:
                progress(nbytes)
    return VerifyReport(
        path=name,
        num_tensors=len(archive.head.tensors),
        num_sections=archive.num_sections,
        nbytes=archive.nbytes,
        compared=None if capture is None else capture.name,
        seconds=time.perf_counter() - start,
        device="cpu" if gpu is None else gpu.name,
        stages=None if gpu is None else gpu.stages.seconds(),
        lossy=", ".join(lossy_codecs(archive.head)),
    )
