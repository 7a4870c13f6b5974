"""Random access to an archive: :func:`kvz.open`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.anchor_view import AnchorView
from kvz.files import naming
from kvz.formats import container
from kvz.formats.codecs.spans import residual_offset
from kvz.formats.container import Index, Prelude, Trailer
from kvz.formats.errors import ChecksumMismatch, ConfigError
from kvz.formats.head import Head, TensorEntry
from kvz.formats.ids import SectionKind
from kvz.layout import is_key_or_value, layer_index, part_name
from kvz.locations import open_file
from kvz.lossy import with_lossy_note
from kvz.section_table import SectionTable, section_name
from kvz.sections import Decoder, EncodedChunk, Wanted

#: One read of this size at the end of a file usually brings trailer and index.
_TAIL_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Layer:
    """Key and value of one layer: their shapes ``[batch, kv_heads, tokens, head_dim]``."""

    index: int
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


class Archive:
    """An archive opened for reading; tensors are decoded when they are asked for.

    ``path`` may be a URL. ``anchor_only``: a progressive archive is fetched without a byte of its
    residuals, for which opening it takes one more request; otherwise it takes two, or one.
    Raises NotKvzFile, UnsupportedVersion, UnsupportedFeature, UnknownCodec, TruncatedFile,
    ChecksumMismatch, InvalidField, LimitExceeded or SourceError.
    """

    def __init__(self, path: str | os.PathLike[str], *, anchor_only: bool = False) -> None:
        self._file = open_file(path, container.TRAILER_NBYTES if anchor_only else None)
        self.name = self._file.name
        with naming(self.name):
            self._open(container.TRAILER_NBYTES if anchor_only else _TAIL_NBYTES)
        self._by_name = {entry.name: i for i, entry in enumerate(self.head.tensors)}
        self._prepared: dict[int, Any] = {}
        self._lock = threading.Lock()

    def _open(self, tail_nbytes: int) -> None:
        file = self._file
        tail_start = max(0, file.nbytes - tail_nbytes)
        tail = file.read(tail_start, tail_nbytes)
        self.prelude = Prelude.from_bytes(file.read(0, container.PRELUDE_NBYTES))
        self.trailer = Trailer.from_bytes(tail[-container.TRAILER_NBYTES :], file.nbytes)
        start, nbytes = self.trailer.index_offset, self.trailer.index_nbytes
        inside = start >= tail_start
        data = tail[start - tail_start :][:nbytes] if inside else file.read(start, nbytes)
        self.trailer.check_index(data)
        head = file.read(container.PRELUDE_NBYTES, self.prelude.head_nbytes)
        self.prelude.check_head(head)
        if self.trailer.head_checksum != self.prelude.head_checksum:
            raise ChecksumMismatch("head and trailer belong to different files")
        self.head = Head.from_bytes(head)
        self.index: Index = container.parse_index(data, self.prelude, self.trailer)
        self.table = SectionTable(self.head, self.index)
        self.decoder = Decoder(self.head)

    # -- what restore and compare need (kvz.source_protocol.CacheSource)

    @property
    def metadata(self) -> Mapping[str, str]:
        """That of the capture, with a note when a codec is lossy."""
        return with_lossy_note(self.head)

    @property
    def tensor_names(self) -> Sequence[str]:
        return list(self._by_name)

    def entry(self, name: str) -> TensorEntry:
        """Raises ConfigError for a tensor that the archive does not hold."""
        return self.head.tensors[self._number(name)]

    def _number(self, name: str) -> int:
        if name not in self._by_name:
            raise ConfigError(f"{self.name}: has no tensor {name!r}")
        return self._by_name[name]

    def anchor(self) -> AnchorView:
        """The same cache by its anchors alone; see :class:`kvz.anchor_view.AnchorView`.

        Raises ConfigError when it has no anchors.
        """
        return AnchorView(self)

    def dtype(self, name: str) -> str:
        return self.entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def read_tensor(
        self, name: str, tokens: slice | None = None, *, anchor_only: bool = False
    ) -> NDArray[Any]:
        """A tensor as its integer view; only the chunks that hold ``tokens`` are read.

        ``tokens`` has step 1 and applies to the token axis. ``anchor_only``: without the residuals
        of a progressive codec. Raises ConfigError and DamagedFile.
        """
        index = self._number(name)
        entry = self.head.tensors[index]
        outer, _, inner = entry.view_shape
        start, stop = token_range(tokens, entry)
        out = np.empty((outer, stop - start, inner), f"u{entry.itemsize}")
        first = start // entry.chunk_tokens
        chunks = range(first, -(-stop // entry.chunk_tokens) if out.size else first)
        self._announce(((index, chunk) for chunk in chunks), anchor_only)
        for chunk in chunks:
            begin, end = entry.chunk_range(chunk)
            if start <= begin and end <= stop:
                self.read_chunk(
                    index, chunk, out[:, begin - start : end - start], anchor_only=anchor_only
                )
                continue
            decoded = np.empty(entry.chunk_shape(chunk), out.dtype)
            self.read_chunk(index, chunk, decoded, anchor_only=anchor_only)
            low, high = max(begin, start), min(end, stop)
            out[:, low - start : high - start] = decoded[:, low - begin : high - begin]
        shape = list(entry.shape)
        if entry.token_axis is not None:
            shape[entry.token_axis] = stop - start
        return out.reshape(shape)

    # -- layers

    @cached_property
    def layers(self) -> Sequence[Layer]:
        """The layers that have key or value tensors, by index."""
        names: dict[int, list[str]] = {}
        for name in self._by_name:
            number = layer_index(name)
            if number is not None and is_key_or_value(name):
                names.setdefault(number, []).append(name)
        return [
            Layer(i, tuple(group), self.dtype(group[0]), self.shape(group[0]))
            for i, group in sorted(names.items())
        ]

    def read(self, layer: int, tokens: slice | None = None) -> dict[str, NDArray[Any]]:
        """Key and value of a layer (those that it has), ``{"key": ..., "value": ...}``.

        Integer views, ``[batch, kv_heads, tokens, head_dim]``. Raises ConfigError for a layer that
        the archive does not hold.
        """
        for candidate in self.layers:
            if candidate.index == layer:
                if len({part_name(name) for name in candidate.names}) < len(candidate.names):
                    raise ConfigError(
                        f"{self.name}: layer {layer} has several tensors of one kind "
                        f"({', '.join(candidate.names)}): use read_tensor"
                    )
                return {part_name(name): self.read_tensor(name, tokens) for name in candidate.names}
        raise ConfigError(f"{self.name}: has no layer {layer}")

    # -- sections

    def read_payload(self, row: int) -> NDArray[np.uint8]:
        """The payload of a section, its checksum verified. Raises ChecksumMismatch."""
        payload = np.empty(int(self.index["length"][row]), np.uint8)
        self._read_row(row, payload)
        self._check_row(row, payload)
        return payload

    def _read_row(self, row: int, out: NDArray[np.uint8]) -> None:
        self._file.read_into(int(self.index["offset"][row]), out)

    def _check_row(self, row: int, payload: NDArray[np.uint8]) -> None:
        section = self.index[row]
        if container.checksum(payload) != int(section["checksum"]):
            name = section_name(
                self.head, int(section["kind"]), int(section["tensor"]), int(section["chunk"])
            )
            raise ChecksumMismatch(f"{name}: checksum does not match: the file is damaged")

    def prepared(self, tensor: int) -> Any:
        """What decoding a tensor's chunks needs; its codebook is read once."""
        with self._lock:
            if tensor not in self._prepared:
                row = self.table.codebook_row(tensor)
                codebook = None if row is None else self.read_payload(row).tobytes()
                entry = self.head.tensors[tensor]
                self._prepared[tensor] = self.decoder.prepare(entry, codebook)
            return self._prepared[tensor]

    def read_chunk(
        self, tensor: int, chunk: int, out: NDArray[Any], *, anchor_only: bool = False
    ) -> None:
        """Decode one chunk into ``out [outer, n, inner]``. Raises DamagedFile."""
        self._encoded_chunk(tensor, chunk, anchor_only=anchor_only).decode(out)

    def chunks(self, wanted: Wanted, *, anchor_only: bool = False) -> Iterator[EncodedChunk]:
        """The wanted chunks in the order of tensors; each is read when it is decoded."""
        places = self._places(wanted)
        self._announce(places, anchor_only)
        for index, chunk in places:
            yield self._encoded_chunk(index, chunk, anchor_only=anchor_only)

    def announce(self, names: Iterable[str], *, anchor_only: bool = False) -> None:
        """Say that these tensors will be read next, in this order: a remote file reads ahead."""
        numbers = [self._number(name) for name in names]
        counts = [self.head.tensors[number].num_chunks for number in numbers]
        places = ((n, i) for n, count in zip(numbers, counts, strict=True) for i in range(count))
        self._announce(places, anchor_only)

    def requests(self, wanted: Wanted, *, anchor_only: bool = False) -> list[tuple[int, int]]:
        """Offset and length of the requests that :meth:`chunks` would make; none if it is local."""
        places = self._places(wanted)
        return self._file.requests(self.table.ranges(places, (), anchor_only=anchor_only))

    def _places(self, wanted: Wanted) -> list[tuple[int, int]]:
        return [
            (index, chunk)
            for index, entry in enumerate(self.head.tensors)
            for chunk in range(entry.num_chunks)
            if wanted(index, chunk)
        ]

    def _announce(self, places: Iterable[tuple[int, int]], anchor_only: bool) -> None:
        self._file.prefetch(self.table.ranges(places, self._prepared, anchor_only=anchor_only))

    def _encoded_chunk(self, tensor: int, chunk: int, *, anchor_only: bool) -> EncodedChunk:
        row = self.table.chunk_row(tensor, chunk)
        residual_row = None if anchor_only else self.table.residual_row(row)
        kind = SectionKind(int(self.index["kind"][row]))
        parts = [(row, 0, int(self.index["length"][row]))]
        if residual_row is not None:
            kind = SectionKind.RESIDUAL
            start = residual_offset(parts[0][2])
            parts.append((residual_row, start, int(self.index["length"][residual_row])))
        nbytes = parts[-1][1] + parts[-1][2]

        def read(out: NDArray[np.uint8]) -> None:
            for row, start, length in parts:
                self._read_row(row, out[start : start + length])

        def check(payload: NDArray[np.uint8]) -> None:
            for row, start, length in parts:
                self._check_row(row, payload[start : start + length])
            if residual_row is not None:
                entry, anchor = self.head.tensors[tensor], payload[: parts[0][2]]
                self.decoder.check_parts(entry, chunk, anchor, parts[1][2])

        def decode(out: NDArray[Any]) -> None:
            with naming(self.name):
                prepared = None if kind is SectionKind.RAW else self.prepared(tensor)
                payload = np.empty(nbytes, np.uint8)
                read(payload)
                check(payload)
                entry = self.head.tensors[tensor]
                self.decoder.decode(kind, entry, chunk, payload, prepared, out)

        return EncodedChunk(
            tensor=tensor,
            chunk=chunk,
            kind=kind,
            payload_nbytes=nbytes,
            decode=decode,
            read=read,
            check=check,
            prepared=partial(self.prepared, tensor),
        )

    @property
    def nbytes(self) -> int:
        """Size of the archive."""
        return self._file.nbytes

    @property
    def nbytes_read(self) -> int:
        """Bytes that were read from it so far."""
        return self._file.nbytes_read

    @property
    def num_requests(self) -> int:
        """Requests that were made so far; 0 for a local file."""
        return self._file.num_requests

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_range(tokens: slice | None, entry: TensorEntry) -> tuple[int, int]:
    """Start and stop of a token slice of a tensor. Raises ConfigError when it is out of range."""
    num_tokens = entry.view_shape[1]
    if tokens is None:
        return 0, num_tokens
    if entry.token_axis is None:
        raise ConfigError(f"tensor {entry.name!r} has no token axis")
    if tokens.step not in (None, 1):
        raise ConfigError("tokens must be a range with step 1")
    start = 0 if tokens.start is None else tokens.start
    stop = num_tokens if tokens.stop is None else tokens.stop
    if not 0 <= start <= stop <= num_tokens:
        raise ConfigError(
            f"tokens {start}:{stop} are outside of {entry.name}, which has {num_tokens}"
        )
    return start, stop


def open_archive(path: str | os.PathLike[str]) -> Archive:
    """Open an archive: :func:`kvz.open`. See :class:`Archive`."""
    return Archive(path)
