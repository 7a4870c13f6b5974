"""What is measured: kvz codecs and memcpy (baselines.py: what one could use instead).

A contestant offers its work as lists of jobs, so that any number of threads can share it. A job is
called with the number of its worker, which owns one set of scratch buffers. The jobs of a list are
independent; calibration comes before encoding, encoding before decoding. None computes checksums,
except that frames of the codec ``zstd`` always carry their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from kvz.bench.workload import U16, Workload
from kvz.codebooks import read_sample
from kvz.codecs import codec_from_options
from kvz.codecs.base import Codec, is_progressive
from kvz.codecs.raw import RawCodec
from kvz.compressing import write_archive
from kvz.formats.codecs.spans import residual_offset
from kvz.formats.errors import ConfigError
from kvz.formats.ids import LOSSY_CODECS
from kvz.layout import Layout
from kvz.planning import plan
from kvz.safetensors_io import ArrayReader, SafetensorsFile

Job = Callable[[int], None]

MEMCPY = "memcpy"
_RAW = RawCodec()
#: A lossy codec that is further from its input is broken; 4-bit codes are at 0.005.
MAX_LOSS = 0.5


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

    def first_difference(self, work: Workload) -> str | None:
        """What a round's outputs differ from, or None when they are right."""
        ...


class _Nowhere:
    """Takes an archive and keeps nothing."""

    def write(self, data: Any) -> None:
        pass


class CodecContestant:
    """A kvz codec, chunk by chunk as :func:`kvz.compress` goes, straight from and to the tensor.

    ``anchor_only``: of a progressive codec, decode the anchors alone.
    """

    is_baseline = False

    def __init__(self, name: str, codec: Codec, *, anchor_only: bool = False) -> None:
        self.name = name
        self.codec = codec
        self.calibrates = codec.needs_codebook
        self.config = codec.config_dict()
        self._anchor_only = anchor_only
        self._is_lossy = codec.name in LOSSY_CODECS
        self._digest: int | None = None

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> int:
        """The size of the archive, as the writer of :func:`kvz.compress` makes it."""
        written = write_archive(source, plan(source, self.codec, layout), _Nowhere())
        # a capture without keys and values has no anchors
        return (self._anchor_only and written.anchor_nbytes) or written.nbytes

    def prepare(self, work: Workload, num_workers: int) -> Jobs:
        self._digest = None
        run = _CodecRun(self.codec, work, anchor_only=self._anchor_only)
        return Jobs(
            [partial(run.calibrate, tensor) for tensor in range(len(work.tensors))],
            [partial(run.encode, chunk) for chunk in range(len(work.chunks))],
            [partial(run.decode, chunk) for chunk in range(len(work.chunks))],
        )

    def first_difference(self, work: Workload) -> str | None:
        """How the outputs differ from what they must be.

        A lossy codec must give what it gave in the first round, near the input.
        """
        if not self._is_lossy:
            return work.first_difference()
        digest = work.output_digest()
        if self._digest is None:
            self._digest = digest
            error = work.relative_error()
            return None if error < MAX_LOSS else f"its input: relative error {error:.2g}"
        return None if digest == self._digest else "the values of the first round"


def with_anchors(contestant: CodecContestant) -> list[CodecContestant]:
    """A contestant and, if its codec is progressive, the same by its anchors alone."""
    if not contestant.codec.is_progressive:
        return [contestant]
    name = f"{contestant.name}, anchors"
    return [contestant, CodecContestant(name, contestant.codec, anchor_only=True)]


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

    def __init__(self, codec: Codec, work: Workload, *, anchor_only: bool) -> None:
        self._codecs = work.codecs(codec)
        self._anchor_only = anchor_only
        self._work = work
        self._prepared: list[Any] = [None] * len(work.tensors)
        self._lengths = [0] * len(work.chunks)

    def calibrate(self, tensor: int, worker: int) -> None:
        entry = self._work.entries[tensor]
        codec, tokens = self._codecs[tensor], entry.view_shape[1]
        codebook = b""
        if codec.needs_codebook:
            reader = ArrayReader(self._work.tensors[tensor], entry.view_shape)
            codebook = codec.calibrate(read_sample(reader, entry), tokens)
        self._prepared[tensor] = codec.prepare(codebook, entry.dtype, entry.view_shape)

    def encode(self, number: int, worker: int) -> None:
        chunk = self._work.chunks[number]
        codec, prepared = self._codecs[chunk.tensor], self._prepared[chunk.tensor]
        length = total = codec.encode(chunk.source, prepared, chunk.slot, chunk.start)
        if is_progressive(codec):
            total = residual_offset(length) + codec.residual_nbytes(chunk.source.shape)
        # the archive writer keeps such a chunk as it is, too
        if total >= chunk.source.nbytes:
            length = total = _RAW.encode(chunk.source, None, chunk.slot)
        self._lengths[number] = length if self._anchor_only else total

    def decode(self, number: int, worker: int) -> None:
        chunk = self._work.chunks[number]
        codec = self._codecs[chunk.tensor]
        payload = chunk.slot[: self._lengths[number]]
        prepared = self._prepared[chunk.tensor]
        if payload.size == chunk.target.nbytes:
            _RAW.decode(payload, None, chunk.target)
        elif self._anchor_only and is_progressive(codec):
            codec.decode_anchor(payload, prepared, chunk.target, chunk.start)
        else:
            codec.decode(payload, prepared, chunk.target, chunk.start)


class MemcpyContestant:
    """Copies every chunk into its slot and back: the ceiling for anything that touches memory."""

    name = MEMCPY
    is_baseline = True
    calibrates = False
    config: ClassVar[dict[str, Any]] = {}

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> None:
        return None

    def first_difference(self, work: Workload) -> str | None:
        return work.first_difference()

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
