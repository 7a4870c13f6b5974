"""Check an archive: every checksum, every chunk decoded, and, if asked, against a capture."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.archive_stream import ArchiveStream
from kvz.chunk_decoding import decode_chunks, gpu_decoder
from kvz.compressing import Progress
from kvz.devices import DEFAULT_DEVICE
from kvz.files import STANDARD_STREAM, naming
from kvz.formats.errors import ContentMismatch
from kvz.formats.head import Head, TensorEntry
from kvz.safetensors_io import SafetensorsFile, TensorReader
from kvz.sections import EncodedChunk
from kvz.workers import thread_count


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :func:`verify` found right. ``compared`` names the capture, if there was one.

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
    entry: TensorEntry, chunk: int, decoded: NDArray[Any], reader: TensorReader | None
) -> None:
    if reader is None:
        return
    begin = entry.chunk_range(chunk)[0]
    expected = np.empty_like(decoded)
    reader.read(begin, expected)
    if not np.array_equal(decoded, expected):
        outer, token, inner = (int(i[0]) for i in np.nonzero(decoded != expected))
        raise ContentMismatch(
            f"{entry.name} differs at element [{outer}, {begin + token}, {inner}] "
            f"(archive {decoded[outer, token, inner]:#x}, "
            f"capture {expected[outer, token, inner]:#x})"
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


def _check_chunk(
    head: Head, readers: dict[int, TensorReader], encoded: EncodedChunk, decoded: NDArray[Any]
) -> int:
    """Compare one chunk, if there is something to compare it with; returns its raw bytes."""
    _compare(head.tensors[encoded.tensor], encoded.chunk, decoded, readers.get(encoded.tensor))
    return decoded.nbytes


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    device: str = DEFAULT_DEVICE,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read a whole archive (path, or ``-``): structure, checksums, and that every chunk decodes.

    With ``against``, also compare every element and the metadata with a safetensors capture.
    ``device``: ``cuda`` or ``cuda:N`` decodes on a GPU; ``auto`` and ``cpu`` do not.
    Raises DamagedFile, FormatError, SourceError, ConfigError (device), or ContentMismatch naming
    the first difference.
    """
    start = time.perf_counter()
    piped = os.fspath(path) == STANDARD_STREAM
    name = "<stdin>" if piped else os.fspath(path)
    with contextlib.ExitStack() as stack:
        capture = None if against is None else stack.enter_context(SafetensorsFile(against))
        stack.enter_context(naming(name))
        stream = sys.stdin.buffer if piped else stack.enter_context(open(path, "rb"))
        archive = ArchiveStream(stream, name)
        gpu = gpu_decoder(device, archive.head)
        checked = decode_chunks(
            archive.chunks(lambda tensor, chunk: True),
            archive.head,
            partial(_check_chunk, archive.head, _readers(archive.head, capture)),
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
        compared=None if against is None else os.fspath(against),
        seconds=time.perf_counter() - start,
        device="cpu" if gpu is None else gpu.name,
        stages=None if gpu is None else gpu.stages.seconds(),
    )
