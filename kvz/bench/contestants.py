"""What is measured: kvz codecs and memcpy (baselines.py: what one could use instead).

A contestant offers its work as lists of jobs, so that any number of threads can share it. A job is
called with the number of its worker, which owns one set of scratch buffers. The jobs of a list are
independent; calibration comes before encoding, encoding before decoding. None computes checksums,
except that frames of the codec ``zstd`` always carry their own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from kvz.bench.workload import U16, Workload
from kvz.codebooks import read_sample
from kvz.codecs import codec_from_options
from kvz.codecs.base import Codec
from kvz.codecs.raw import RawCodec
from kvz.compressing import write_archive
from kvz.formats.errors import ConfigError
from kvz.layout import Layout
from kvz.planning import plan
from kvz.safetensors_io import ArrayReader, SafetensorsFile

Job = Callable[[int], None]

MEMCPY = "memcpy"
_RAW = RawCodec()


class Jobs(NamedTuple):
    """The work of one contestant; ``calibrate`` is part of encoding."""

    calibrate: Sequence[Job]
    encode: Sequence[Job]
    decode: Sequence[Job]


class Contestant(Protocol):
    """One way to store the tensors of a :class:`Workload`.

    ``config`` is what an archive's head would record. Jobs write into the workload's outputs.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_baseline(self) -> bool: ...

    @property
    def calibrates(self) -> bool: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> int | None:
        """Bytes that all tensors of a capture take; None for what does not compress."""
        ...

    def prepare(self, work: Workload, num_workers: int) -> Jobs:
        """Allocate what is used again in every round, and list the work."""
        ...


class _CountingSink(io.RawIOBase):
    """Takes an archive and keeps nothing but its size."""

    nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = len(data)
        self.nbytes += count
        return count


class CodecContestant:
    """A kvz codec, chunk by chunk as :func:`kvz.compress` goes, straight from and to the tensor."""

    is_baseline = False

    def __init__(self, name: str, codec: Codec) -> None:
        self.name = name
        self.codec = codec
        self.calibrates = codec.needs_codebook
        self.config = codec.config_dict()

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> int:
        """The size of the archive, as the writer of :func:`kvz.compress` makes it."""
        sink = _CountingSink()
        write_archive(source, plan(source, self.codec, layout), sink, self.codec)
        return sink.nbytes

    def prepare(self, work: Workload, num_workers: int) -> Jobs:
        run = _CodecRun(self.codec, work)
        return Jobs(
            [partial(run.calibrate, tensor) for tensor in range(len(work.tensors))],
            [partial(run.encode, chunk) for chunk in range(len(work.chunks))],
            [partial(run.decode, chunk) for chunk in range(len(work.chunks))],
        )


def parse_codec(spec: str) -> CodecContestant:
    """The contestant for ``NAME`` or ``NAME:KEY=VALUE,...`` (options of ``kvz compress``).

    Raises UnknownCodec or ConfigError.
    """
    name, _, tail = spec.partition(":")
    options = {}
    for part in tail.split(",") if tail else []:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"codec {spec!r}: {part!r} must be KEY=VALUE")
        options[key] = value
    return CodecContestant(spec, codec_from_options(name, options))


class _CodecRun:
    """State of a codec between calibration, encoding and decoding of one workload."""

    def __init__(self, codec: Codec, work: Workload) -> None:
        self._codec = codec
        self._work = work
        self._prepared: list[Any] = [None] * len(work.tensors)
        self._lengths = [0] * len(work.chunks)

    def calibrate(self, tensor: int, worker: int) -> None:
        entry = self._work.entries[tensor]
        outer, tokens, inner = entry.view_shape
        codebook = b""
        if self._codec.needs_codebook:
            reader = ArrayReader(self._work.tensors[tensor], entry.view_shape)
            codebook = self._codec.calibrate(read_sample(reader, entry), tokens)
        self._prepared[tensor] = self._codec.prepare(codebook, entry.dtype, outer, inner)

    def encode(self, number: int, worker: int) -> None:
        chunk = self._work.chunks[number]
        length = self._codec.encode(chunk.source, self._prepared[chunk.tensor], chunk.slot)
        # the archive writer keeps such a chunk as it is, too
        if length >= chunk.source.nbytes:
            length = _RAW.encode(chunk.source, None, chunk.slot)
        self._lengths[number] = length

    def decode(self, number: int, worker: int) -> None:
        chunk = self._work.chunks[number]
        payload = chunk.slot[: self._lengths[number]]
        if payload.size == chunk.target.nbytes:
            _RAW.decode(payload, None, chunk.target)
        else:
            self._codec.decode(payload, self._prepared[chunk.tensor], chunk.target)


class MemcpyContestant:
    """Copies every chunk into its slot and back: the ceiling for anything that touches memory."""

    name = MEMCPY
    is_baseline = True
    calibrates = False
    config: ClassVar[dict[str, Any]] = {}

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> None:
        return None

    def prepare(self, work: Workload, num_workers: int) -> Jobs:
        encode: list[Job] = []
        decode: list[Job] = []
        for chunk in work.chunks:
            copy = chunk.slot[: chunk.source.nbytes].view(np.uint16).reshape(chunk.source.shape)
            encode.append(partial(_copy, copy, chunk.source))
            decode.append(partial(_copy, chunk.target, copy))
        return Jobs([], encode, decode)


def _copy(target: U16, source: U16, worker: int) -> None:
    np.copyto(target, source)
