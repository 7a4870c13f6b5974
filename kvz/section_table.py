"""Where each section of an archive stands in its index, and what must hold of them all."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvz.formats.container import Index
from kvz.formats.errors import InvalidField
from kvz.formats.head import Head
from kvz.formats.ids import SectionKind


def section_name(head: Head, kind: int, tensor: int, chunk: int) -> str:
    """How error messages call a section."""
    name = head.tensors[tensor].name if tensor < len(head.tensors) else f"tensor {tensor}"
    if kind == SectionKind.CODEBOOK:
        return f"codebook of {name}"
    if kind == SectionKind.RESIDUAL:
        return f"residual of chunk {chunk} of {name}"
    return f"chunk {chunk} of {name}"


def check_kind(head: Head, kind: int, tensor: int, chunk: int) -> None:
    """A section's kind is one that its tensor's codec makes. Raises InvalidField."""
    progressive = head.is_progressive(head.tensors[tensor])
    kinds = (SectionKind.ANCHOR, SectionKind.RESIDUAL) if progressive else (SectionKind.ENCODED,)
    if kind not in (SectionKind.CODEBOOK, SectionKind.RAW, *kinds):
        codec = head.codec_of(head.tensors[tensor]).name
        name = section_name(head, kind, tensor, chunk)
        raise InvalidField(f"{name}: codec {codec} makes no {SectionKind(kind).name} section")


class SectionTable:
    """Rows of the index by tensor and chunk.

    Every chunk of every tensor is there exactly once, in order, after at most one codebook of the
    tensor; then the residual of every anchor, in the same order. Raises InvalidField if not.
    """

    def __init__(self, head: Head, index: Index) -> None:
        if (index["tensor"] >= len(head.tensors)).any():
            raise InvalidField(
                f"the index names a tensor beyond the {len(head.tensors)} in the head"
            )
        self._head = head
        self._index = index
        residual = index["kind"] == SectionKind.RESIDUAL
        self.num_first = int(index.size - residual.sum())
        if residual[: self.num_first].any():
            raise InvalidField("the index lists a residual before the last chunk")
        first = index[: self.num_first]
        codebook = first["kind"] == SectionKind.CODEBOOK
        self._check_chunks(first[~codebook])
        self._check_codebooks(first, codebook)
        rows = np.flatnonzero(codebook)
        self._codebooks = dict(zip(first["tensor"][rows].tolist(), rows.tolist(), strict=True))
        self._chunks = np.flatnonzero(~codebook)
        self._residuals = self._match_residuals(first, index[self.num_first :])

    def codebook_row(self, tensor: int) -> int | None:
        """Row of a tensor's codebook; None when it has none."""
        return self._codebooks.get(tensor)

    def chunk_row(self, tensor: int, chunk: int) -> int:
        """Row of a chunk: RAW, ENCODED or ANCHOR."""
        return int(self._chunks[self._starts[tensor] + chunk])

    def residual_row(self, row: int) -> int | None:
        """Row of the residual that belongs to the anchor in ``row``; None: that is no anchor."""
        return self._residuals.get(row)

    def chunk_rows(self, tensor: int) -> NDArray[np.int64]:
        """Rows of a tensor's chunks, int64[num_chunks]."""
        start = int(self._starts[tensor])
        return self._chunks[start : start + self._head.tensors[tensor].num_chunks]

    def ranges(
        self, places: Iterable[tuple[int, int]], without: Container[int], *, anchor_only: bool
    ) -> Iterator[tuple[int, int]]:
        """Offset and length of all sections that decoding ``(tensor, chunk)`` after another needs.

        ``without``: tensors whose codebook is at hand.
        """
        offsets, lengths = self._index["offset"], self._index["length"]
        last = None
        for tensor, chunk in places:
            row = self.chunk_row(tensor, chunk)
            codebook = self.codebook_row(tensor) if tensor not in without else None
            rows = [codebook if tensor != last else None, row]
            rows.append(None if anchor_only else self.residual_row(row))
            yield from ((int(offsets[r]), int(lengths[r])) for r in rows if r is not None)
            last = tensor

    def _check_chunks(self, chunks: Index) -> None:
        head = self._head
        counts = np.array([tensor.num_chunks for tensor in head.tensors], np.int64)
        self._starts = np.cumsum(counts) - counts
        num_chunks = sum(counts.tolist())  # int64 could wrap to what the index holds
        if chunks.size != num_chunks:
            raise InvalidField(f"the index lists {chunks.size} chunks, the head needs {num_chunks}")
        tensor_of = np.repeat(np.arange(counts.size), counts)
        chunk_of = np.arange(chunks.size) - np.repeat(self._starts, counts)
        wrong = np.flatnonzero((chunks["tensor"] != tensor_of) | (chunks["chunk"] != chunk_of))
        if wrong.size:
            i = int(wrong[0])
            name = section_name(head, SectionKind.ENCODED, int(tensor_of[i]), int(chunk_of[i]))
            raise InvalidField(f"the index lists {name} twice or out of order")
        progressive = np.array([head.is_progressive(tensor) for tensor in head.tensors], bool)
        own = np.where(progressive, SectionKind.ANCHOR, SectionKind.ENCODED)[tensor_of]
        foreign = np.flatnonzero((chunks["kind"] != own) & (chunks["kind"] != SectionKind.RAW))
        for i in foreign[:1].tolist():
            check_kind(head, int(chunks["kind"][i]), int(tensor_of[i]), int(chunk_of[i]))

    def _check_codebooks(self, first: Index, codebook: NDArray[np.bool_]) -> None:
        """A codebook stands directly before the chunks of its tensor."""
        tensors = first["tensor"].astype(np.int64)
        in_place = (np.diff(tensors, prepend=-1) > 0) & (np.diff(tensors, append=-1) == 0)
        wrong = np.flatnonzero(codebook & ~(in_place & (first["chunk"] == 0)))
        if wrong.size:
            tensor = int(first["tensor"][wrong[0]])
            name = section_name(self._head, SectionKind.CODEBOOK, tensor, 0)
            raise InvalidField(f"{name} does not stand once, before the tensor's chunks")

    def _match_residuals(self, first: Index, residuals: Index) -> dict[int, int]:
        rows = np.flatnonzero(first["kind"] == SectionKind.ANCHOR)
        if rows.size != residuals.size:
            raise InvalidField(f"the index lists {rows.size} anchors, {residuals.size} residuals")
        anchors = first[rows]
        wrong = np.flatnonzero(
            (anchors["tensor"] != residuals["tensor"]) | (anchors["chunk"] != residuals["chunk"])
        )
        if wrong.size:
            anchor = anchors[wrong[0]]
            kind = int(SectionKind.RESIDUAL)
            name = section_name(self._head, kind, int(anchor["tensor"]), int(anchor["chunk"]))
            raise InvalidField(f"the index does not list the {name} in its place")
        return {int(row): self.num_first + i for i, row in enumerate(rows.tolist())}
