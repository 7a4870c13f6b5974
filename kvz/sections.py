"""Sections of an archive, however they arrive: what must hold of them, and how they decode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.codecs import codec_from_head
from kvz.codecs.base import Codec
from kvz.formats.container import Index
from kvz.formats.errors import InvalidField, KvzError
from kvz.formats.head import Head, TensorEntry
from kvz.formats.ids import SectionKind


class EncodedChunk(NamedTuple):
    """One chunk of a tensor, not yet decoded. Its functions may be called from any thread.

    ``decode`` fills a ``uint[outer, n, inner]`` (a :data:`kvz.codecs.base.Chunk`) and raises
    DamagedFile. Who decodes the payload himself takes it with ``read`` into uint8[payload_nbytes],
    checks it with ``check`` (raises ChecksumMismatch), and asks ``prepared`` for the codebook as
    :meth:`kvz.codecs.base.Codec.prepare` gives it (raises DamagedFile).
    """

    tensor: int
    chunk: int
    kind: SectionKind
    payload_nbytes: int
    decode: Callable[[NDArray[Any]], None]
    read: Callable[[NDArray[np.uint8]], None]
    check: Callable[[NDArray[np.uint8]], None]
    prepared: Callable[[], Any]


#: Which chunks are wanted: ``(tensor, chunk) -> bool``.
Wanted = Callable[[int, int], bool]


def section_name(head: Head, kind: int, tensor: int, chunk: int) -> str:
    """How error messages call a section."""
    name = head.tensors[tensor].name if tensor < len(head.tensors) else f"tensor {tensor}"
    if kind == SectionKind.CODEBOOK:
        return f"codebook of {name}"
    return f"chunk {chunk} of {name}"


def check_complete(head: Head, index: Index) -> None:
    """Every chunk of every tensor is there exactly once, in order, after at most one codebook.

    Raises InvalidField.
    """
    if (index["tensor"] >= len(head.tensors)).any():
        raise InvalidField(f"the index names a tensor beyond the {len(head.tensors)} in the head")
    codebooks = index["kind"] == SectionKind.CODEBOOK
    counts = np.array([tensor.num_chunks for tensor in head.tensors], np.int64)
    chunks = index[~codebooks]
    num_chunks = sum(counts.tolist())  # int64 could wrap to what the index holds
    if chunks.size != num_chunks:
        raise InvalidField(f"the index lists {chunks.size} chunks, the head needs {num_chunks}")
    tensor_of = np.repeat(np.arange(counts.size), counts)
    chunk_of = np.arange(chunks.size) - np.repeat(np.cumsum(counts) - counts, counts)
    wrong = np.flatnonzero((chunks["tensor"] != tensor_of) | (chunks["chunk"] != chunk_of))
    if wrong.size:
        i = int(wrong[0])
        name = section_name(head, SectionKind.ENCODED, int(tensor_of[i]), int(chunk_of[i]))
        raise InvalidField(f"the index lists {name} twice or out of order")
    _check_codebooks(head, index, codebooks)


def _check_codebooks(head: Head, index: Index, codebooks: NDArray[np.bool_]) -> None:
    """A codebook stands directly before the chunks of its tensor. Raises InvalidField."""
    tensors = index["tensor"].astype(np.int64)
    in_place = (np.diff(tensors, prepend=-1) > 0) & (np.diff(tensors, append=-1) == 0)
    wrong = np.flatnonzero(codebooks & ~(in_place & (index["chunk"] == 0)))
    if wrong.size:
        name = section_name(head, SectionKind.CODEBOOK, int(index["tensor"][wrong[0]]), 0)
        raise InvalidField(f"{name} does not stand once, before the tensor's chunks")


class Decoder:
    """Decodes sections of one archive; safe to use from several threads."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._codecs: dict[int, Codec] = {}
        self._lock = threading.Lock()

    def codec(self, entry: TensorEntry) -> Codec:
        """The binding of a tensor's codec, made on first use (it may import numba)."""
        with self._lock:
            if entry.codec not in self._codecs:
                stored = self.head.codec_of(entry)
                self._codecs[entry.codec] = codec_from_head(stored.name, stored.config)
            return self._codecs[entry.codec]

    def prepare(self, entry: TensorEntry, codebook: bytes | None) -> Any:
        """What decoding the tensor's chunks needs. Raises InvalidField."""
        codec = self.codec(entry)
        if not codec.supports(entry.dtype, entry.token_axis):
            raise InvalidField(
                f"tensor {entry.name!r}: codec {codec.name} does not hold {entry.dtype} tensors "
                f"with token axis {entry.token_axis}"
            )
        if codec.needs_codebook and codebook is None:
            raise InvalidField(f"tensor {entry.name!r} has no codebook")
        if codebook is not None and not codec.needs_codebook:
            raise InvalidField(f"tensor {entry.name!r} has a codebook, codec {codec.name} has none")
        outer, _, inner = entry.view_shape
        try:
            return codec.prepare(codebook or b"", entry.dtype, outer, inner)
        except KvzError as error:
            raise type(error)(f"codebook of {entry.name}: {error}") from None

    def decode(
        self,
        kind: SectionKind,
        entry: TensorEntry,
        chunk: int,
        payload: NDArray[np.uint8],
        prepared: Any,
        out: NDArray[Any],
    ) -> None:
        """Decode one chunk, whose checksum was verified, into ``out``.

        Raises DamagedFile or one of its subclasses.
        """
        if kind is SectionKind.RAW:
            if payload.size != out.nbytes:
                raise InvalidField(
                    f"chunk {chunk} of {entry.name}: raw section has {payload.size} bytes, "
                    f"must have {out.nbytes}"
                )
            np.copyto(out, payload.view(out.dtype).reshape(out.shape))
            return
        try:
            self.codec(entry).decode(payload, prepared, out)
        except KvzError as error:
            raise type(error)(f"chunk {chunk} of {entry.name}: {error}") from None
