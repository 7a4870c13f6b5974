"""What is in an archive and what each of its bytes does, without decoding anything."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvz import contents
from kvz.archive import Archive
from kvz.capture_metadata import METADATA_KEY
from kvz.contents import Identity, LayerGroup, TensorGroup
from kvz.files import naming
from kvz.formats import container
from kvz.formats.codecs import PLACED_CODECS, Place, gaac, stream_nbytes
from kvz.formats.codecs.gaac import GaacConfig, Geometry
from kvz.formats.container import Index
from kvz.formats.errors import NotKvzFile
from kvz.formats.head import TensorEntry
from kvz.formats.ids import SectionKind
from kvz.locations import shown_name
from kvz.lossy import lossy_note
from kvz.remote.costs import FetchCost, fetch_costs

#: Names among the streams of a codec: codebooks, chunks stored as they are, residuals.
CODEBOOKS, RAW, RESIDUALS = "codebooks", "raw", "residuals"


@dataclass(frozen=True, slots=True)
class StreamUse:
    """One stream of a codec over the whole file; bits per element of all that the codec stores."""

    name: str
    nbytes: int
    bits_per_element: float


@dataclass(frozen=True, slots=True)
class TagShares:
    """Groups of 8 exponents in gaac sections, by the bits that each element's exponent takes."""

    num_groups: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CodecUse:
    """What one codec stores; ``stored_nbytes`` are payloads and codebooks."""

    name: str
    config: Mapping[str, Any]
    num_tensors: int
    num_elements: int
    original_nbytes: int
    stored_nbytes: int
    streams: tuple[StreamUse, ...]
    tags: TagShares | None = None

    @property
    def bits_per_element(self) -> float:
        return _bits(self.stored_nbytes, self.num_elements)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes that are no payload: prelude and head, frames with padding, index and trailer."""

    head_nbytes: int
    frames_nbytes: int
    index_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + self.frames_nbytes + self.index_nbytes


@dataclass(frozen=True, slots=True)
class Inspection:
    """An archive seen from outside. ``problem``: why its ``kvz`` metadata cannot be read.

    ``lossless``: no codec, of this file or one that the cache went through before, changed a value;
    ``lossy`` names those that did. ``ratio`` counts every byte of the file. ``anchor_nbytes``: of a
    progressive archive, the bytes before the first residual. ``metadata`` is all but what
    ``identity`` stands for. ``costs``: of a remote archive.
    """

    path: str
    lossless: bool
    lossy: str
    format_version: tuple[int, int]
    reader_version: tuple[int, int]
    writer: str
    nbytes: int
    original_nbytes: int
    ratio: float
    bits_per_element: float
    anchor_nbytes: int | None
    anchor_bits_per_element: float | None
    num_tensors: int
    num_sections: int
    identity: Identity | None
    problem: str | None
    metadata: Mapping[str, str]
    layers: tuple[LayerGroup, ...]
    others: tuple[TensorGroup, ...]
    codecs: tuple[CodecUse, ...]
    overhead: Overhead
    costs: tuple[FetchCost, ...]


@dataclass(frozen=True, slots=True)
class SectionLine:
    """One section; ``offset`` and ``length`` of its payload in bytes."""

    offset: int
    length: int
    kind: str
    tensor: str
    chunk: int
    checksum: str


def inspect(path: str | os.PathLike[str], *, tags: bool = False) -> Inspection:
    """What is in the archive at ``path``; its end, index and head are read, no payload.

    ``tags``: also count gaac's tags, for which every gaac section is read and its checksum
    verified. Raises what :class:`kvz.archive.Archive` raises.
    """
    with open_for_inspection(path) as archive, naming(archive.name):
        head = archive.head
        costs = fetch_costs(archive)
        document, problem = contents.read_document(head.metadata)
        records, layer_problem = (
            ((), None) if document is None else contents.layer_records(document)
        )
        num_elements = sum(entry.num_elements for entry in head.tensors)
        shown = {k: v for k, v in head.metadata.items() if k != METADATA_KEY or document is None}
        anchor_nbytes = _anchor_nbytes(archive)
        return Inspection(
            path=archive.name,
            lossless=not lossy_note(head),
            lossy=lossy_note(head),
            format_version=archive.prelude.version,
            reader_version=archive.prelude.reader_version,
            writer=head.writer,
            nbytes=archive.nbytes,
            original_nbytes=head.nbytes,
            ratio=head.nbytes / archive.nbytes,
            bits_per_element=_bits(archive.nbytes, num_elements),
            anchor_nbytes=anchor_nbytes,
            anchor_bits_per_element=(
                None if anchor_nbytes is None else _bits(anchor_nbytes, num_elements)
            ),
            num_tensors=len(head.tensors),
            num_sections=archive.index.size,
            identity=None if document is None else contents.identity_of(document),
            problem=problem or layer_problem,
            metadata=shown,
            layers=contents.group_layers(head, records),
            others=contents.group_others(head),
            codecs=_codec_uses(archive, tags),
            overhead=_overhead(archive),
            costs=costs,
        )


def open_for_inspection(path: str | os.PathLike[str]) -> Archive:
    """The archive at ``path``; a capture is refused with a hint. Raises as Archive does."""
    try:
        return Archive(path)
    except NotKvzFile:
        name = shown_name(path)
        if contents.is_safetensors(path):
            raise NotKvzFile(
                f"{name}: is a safetensors file, not a kvz archive; make one with: "
                f"kvz compress {name}"
            ) from None
        raise


def sections(archive: Archive) -> Iterator[SectionLine]:
    """All sections but the index, in file order."""
    tensors = archive.head.tensors
    for offset, length, checksum, tensor, chunk, kind, _ in archive.index.tolist():
        name = tensors[tensor].name
        yield SectionLine(offset, length, SectionKind(kind).name, name, chunk, f"{checksum:08x}")


def _bits(nbytes: int, num_elements: int) -> float:
    return 8 * nbytes / num_elements if num_elements else 0.0


def _overhead(archive: Archive) -> Overhead:
    head_nbytes = container.PRELUDE_NBYTES + archive.prelude.head_nbytes
    payload_nbytes = int(archive.index["length"].sum())
    frames_nbytes = archive.trailer.index_offset - head_nbytes - payload_nbytes
    return Overhead(head_nbytes, frames_nbytes, archive.nbytes - archive.trailer.index_offset)


def _anchor_nbytes(archive: Archive) -> int | None:
    """What a reader of a stream needs for the anchors; None when there are none."""
    first = archive.table.num_first
    if first == archive.index.size:
        return None
    last = archive.index[first - 1]
    return int(last["offset"] + last["length"])


def _codec_uses(archive: Archive, tags: bool) -> tuple[CodecUse, ...]:
    head = archive.head
    sizes: list[dict[str, int]] = [{} for _ in head.codecs]
    for entry, codebook_row, residual_nbytes, chunks in _by_tensor(archive):
        streams = sizes[entry.codec]
        codec = head.codec_of(entry)
        codebook = b""
        if codebook_row is not None:
            _add(streams, {CODEBOOKS: int(archive.index["length"][codebook_row])})
            if codec.name in PLACED_CODECS:
                codebook = archive.read_payload(codebook_row).tobytes()
        raw = chunks["kind"] == SectionKind.RAW
        if raw.any():
            _add(streams, {RAW: int(chunks["length"][raw].sum())})
        _add(streams, {RESIDUALS: residual_nbytes} if residual_nbytes else {})
        for part in _alike(chunks[~raw], entry, codec.name):
            first = int(part["chunk"][0])
            place = Place(entry.chunk_range(first)[0], entry.view_shape[1], codebook)
            lengths = part["length"].astype(np.int64)
            shape = entry.chunk_shape(first)
            _add(streams, stream_nbytes(codec.name, codec.config, shape, lengths, place=place))
    uses = []
    for i, (codec, streams) in enumerate(zip(head.codecs, sizes, strict=True)):
        entries = [entry for entry in head.tensors if entry.codec == i]
        num_elements = sum(entry.num_elements for entry in entries)
        use = CodecUse(
            name=codec.name,
            config=codec.config,
            num_tensors=len(entries),
            num_elements=num_elements,
            original_nbytes=sum(entry.nbytes for entry in entries),
            stored_nbytes=sum(streams.values()),
            streams=tuple(
                StreamUse(name, nbytes, _bits(nbytes, num_elements))
                for name, nbytes in streams.items()
            ),
            tags=_tag_shares(archive, i) if tags and codec.name == "gaac" else None,
        )
        uses.append(use)
    return tuple(uses)


def _alike(chunks: Index, entry: TensorEntry, codec: str) -> Iterator[Index]:
    """A tensor's chunks in parts of one shape and kind; the first chunk is one by itself."""
    if codec in PLACED_CODECS:
        yield from (chunks[i : i + 1] for i in range(chunks.size))
        return
    last = entry.num_chunks - 1
    numbers = chunks["chunk"]
    for where in (
        numbers == 0,
        (numbers > 0) & (numbers < last),
        (numbers > 0) & (numbers == last),
    ):
        if where.any():
            yield chunks[where]


def _by_tensor(archive: Archive) -> Iterator[tuple[TensorEntry, int | None, int, Index]]:
    """Each tensor with its codebook's row, the length of its residuals, and its chunks' entries."""
    index, table = archive.index, archive.table
    residuals = np.zeros(len(archive.head.tensors), np.int64)
    later = index[table.num_first :]
    np.add.at(residuals, later["tensor"], later["length"].astype(np.int64))
    for i, entry in enumerate(archive.head.tensors):
        yield entry, table.codebook_row(i), int(residuals[i]), index[table.chunk_rows(i)]


def _add(totals: dict[str, int], sizes: Mapping[str, int]) -> None:
    for name, nbytes in sizes.items():
        totals[name] = totals.get(name, 0) + nbytes


def _tag_shares(archive: Archive, codec: int) -> TagShares:
    config = GaacConfig.from_dict(archive.head.codecs[codec].config)
    num_groups, low, high, both = 0, 0, 0, 0
    encoded = archive.index["kind"] == SectionKind.ENCODED
    for row in np.flatnonzero(encoded).tolist():
        entry = archive.head.tensors[int(archive.index["tensor"][row])]
        if entry.codec != codec:
            continue
        payload = archive.read_payload(row)
        shape = entry.chunk_shape(int(archive.index["chunk"][row]))
        span = next(s for s in gaac.streams(shape, config, payload.size) if s.name == "tags")
        geometry = Geometry.of(shape, config)
        halves = payload[span.offset : span.end].reshape(geometry.tiles, 2, -1)
        num_groups += geometry.num_groups
        low += int(np.bitwise_count(halves[:, 0]).sum())
        high += int(np.bitwise_count(halves[:, 1]).sum())
        both += int(np.bitwise_count(halves[:, 0] & halves[:, 1]).sum())
    counts = (num_groups - low - high + both, low - both, high - both, both)
    named = dict(zip(("2-bit", "3-bit", "4-bit", "raw"), counts, strict=True))
    if not config.narrow:
        del named["2-bit"]
    return TagShares(num_groups, {name: n / max(1, num_groups) for name, n in named.items()})
