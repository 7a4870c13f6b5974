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
    """One chunk of a tensor, not yet decoded.

    ``decode`` fills a contiguous ``uint[outer, n, inner]``; it may be called from any thread and
    raises DamagedFile.
    """

    tensor: int
    chunk: int
    decode: Callable[[NDArray[Any]], None]


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
    if index["chunk"][codebooks].any() or np.unique(index["tensor"][codebooks]).size != int(
        codebooks.sum()
    ):
        raise InvalidField("the index lists a tensor's codebook twice")
    chunks = index[~codebooks]
    counts = np.array([tensor.num_chunks for tensor in head.tensors], np.int64)
    if chunks.size != counts.sum():
        raise InvalidField(f"the index lists {chunks.size} chunks, the head needs {counts.sum()}")
    tensor_of = np.repeat(np.arange(counts.size), counts)
    chunk_of = np.arange(chunks.size) - np.repeat(np.cumsum(counts) - counts, counts)
    wrong = np.flatnonzero((chunks["tensor"] != tensor_of) | (chunks["chunk"] != chunk_of))
    if wrong.size:
        i = int(wrong[0])
        name = section_name(head, SectionKind.ENCODED, int(tensor_of[i]), int(chunk_of[i]))
        raise InvalidField(f"the index lists {name} twice or out of order")


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
        if codec.needs_codebook and codebook is None:
            raise InvalidField(f"tensor {entry.name!r} has no codebook")
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
        """Decode one chunk, whose checksum was verified, into contiguous ``out``.

        Raises DamagedFile or one of its subclasses.
        """
        if kind is SectionKind.RAW:
            if payload.size != out.nbytes:
                raise InvalidField(
                    f"chunk {chunk} of {entry.name}: raw section has {payload.size} bytes, "
                    f"must have {out.nbytes}"
                )
            out.reshape(-1).view(np.uint8)[:] = payload
            return
        try:
            self.codec(entry).decode(payload, prepared, out)
        except KvzError as error:
            raise type(error)(f"chunk {chunk} of {entry.name}: {error}") from None
