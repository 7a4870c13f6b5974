"""Random access to an archive: :func:`kvz.open`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.files import LocalFile, naming
from kvz.formats import container
from kvz.formats.container import Index, Prelude, Trailer
from kvz.formats.errors import ChecksumMismatch, ConfigError
from kvz.formats.head import Head, TensorEntry
from kvz.formats.ids import SectionKind
from kvz.layout import is_key_or_value, layer_index, part_name
from kvz.sections import Decoder, EncodedChunk, Wanted, check_complete, section_name

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

    Raises NotKvzFile, UnsupportedVersion, UnsupportedFeature, UnknownCodec, TruncatedFile,
    ChecksumMismatch, InvalidField, LimitExceeded or SourceError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = LocalFile(path)
        self.name = self._file.name
        with naming(self.name):
            self._open()
        self._by_name = {entry.name: i for i, entry in enumerate(self.head.tensors)}
        self._prepared: dict[int, Any] = {}
        self._lock = threading.Lock()

    def _open(self) -> None:
        file = self._file
        self.prelude = Prelude.from_bytes(file.read(0, container.PRELUDE_NBYTES))
        tail_start = max(0, file.nbytes - _TAIL_NBYTES)
        tail = file.read(tail_start, _TAIL_NBYTES)
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
        check_complete(self.head, self.index)
        self.decoder = Decoder(self.head)

    # -- what restore and compare need (kvz.source_protocol.CacheSource)

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

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

    def dtype(self, name: str) -> str:
        return self.entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def read_tensor(self, name: str, tokens: slice | None = None) -> NDArray[Any]:
        """A tensor as its integer view; only the chunks that hold ``tokens`` are read.

        ``tokens`` has step 1 and applies to the token axis. Raises ConfigError and DamagedFile.
        """
        index = self._number(name)
        entry = self.head.tensors[index]
        outer, _, inner = entry.view_shape
        start, stop = token_range(tokens, entry)
        out = np.empty((outer, stop - start, inner), f"u{entry.itemsize}")
        first = start // entry.chunk_tokens
        for chunk in range(first, first if stop == start else -(-stop // entry.chunk_tokens)):
            begin, end = entry.chunk_range(chunk)
            if start <= begin and end <= stop:
                self.read_chunk(index, chunk, out[:, begin - start : end - start])
                continue
            decoded = np.empty(entry.chunk_shape(chunk), out.dtype)
            self.read_chunk(index, chunk, decoded)
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

    @cached_property
    def _codebook_rows(self) -> dict[int, int]:
        rows = np.flatnonzero(self.index["kind"] == SectionKind.CODEBOOK)
        return {int(self.index["tensor"][row]): int(row) for row in rows}

    @cached_property
    def _first_chunk_rows(self) -> NDArray[np.int64]:
        """Row of chunk 0 of each tensor, counted among the rows that are not codebooks."""
        counts = np.array([entry.num_chunks for entry in self.head.tensors], np.int64)
        return np.cumsum(counts) - counts

    @cached_property
    def _chunk_rows(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.index["kind"] != SectionKind.CODEBOOK)

    def read_payload(self, row: int) -> NDArray[np.uint8]:
        """The payload of a section, its checksum verified. Raises ChecksumMismatch."""
        payload = np.empty(int(self.index["length"][row]), np.uint8)
        self._read_into(row, payload)
        self._check_payload(row, payload)
        return payload

    def _read_into(self, row: int, out: NDArray[np.uint8]) -> None:
        self._file.read_into(int(self.index["offset"][row]), out)

    def _check_payload(self, row: int, payload: NDArray[np.uint8]) -> None:
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
                row = self._codebook_rows.get(tensor)
                codebook = None if row is None else self.read_payload(row).tobytes()
                entry = self.head.tensors[tensor]
                self._prepared[tensor] = self.decoder.prepare(entry, codebook)
            return self._prepared[tensor]

    def read_chunk(self, tensor: int, chunk: int, out: NDArray[Any]) -> None:
        """Decode one chunk into ``out [outer, n, inner]``. Raises DamagedFile."""
        with naming(self.name):
            row = self._chunk_row(tensor, chunk)
            kind = SectionKind(int(self.index["kind"][row]))
            prepared = None if kind is SectionKind.RAW else self.prepared(tensor)
            entry = self.head.tensors[tensor]
            self.decoder.decode(kind, entry, chunk, self.read_payload(row), prepared, out)

    def _chunk_row(self, tensor: int, chunk: int) -> int:
        return int(self._chunk_rows[self._first_chunk_rows[tensor] + chunk])

    def chunks(self, wanted: Wanted) -> Iterator[EncodedChunk]:
        """The wanted chunks in file order; each is read when it is decoded."""
        for index, entry in enumerate(self.head.tensors):
            for chunk in range(entry.num_chunks):
                if wanted(index, chunk):
                    yield self._encoded_chunk(index, chunk)

    def _encoded_chunk(self, tensor: int, chunk: int) -> EncodedChunk:
        row = self._chunk_row(tensor, chunk)
        return EncodedChunk(
            tensor=tensor,
            chunk=chunk,
            kind=SectionKind(int(self.index["kind"][row])),
            payload_nbytes=int(self.index["length"][row]),
            decode=partial(self.read_chunk, tensor, chunk),
            read=partial(self._read_into, row),
            check=partial(self._check_payload, row),
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
