"""Safetensors files as sources and destinations of tensors, in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from kvz.codecs.base import Chunk, is_chunk
from kvz.files import atomic_output, integer_view, naming, read_exactly
from kvz.formats.errors import ConfigError, NotSafetensorsFile, SourceError, TruncatedFile
from kvz.formats.ids import DTYPE_NBYTES
from kvz.formats.safetensors import (
    LENGTH_NBYTES,
    Header,
    StoredTensor,
    build_header,
    header_nbytes,
    parse_header,
)
from kvz.locations import RandomFile, open_file

Shape = tuple[int, int, int]
#: What is read of a remote tensor at a time; requests can take several.
_PIECE_NBYTES = 4 << 20


class TensorReader(Protocol):
    """One tensor, seen as ``[outer, tokens, inner]`` of unsigned integers."""

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Tokens ``start ...`` into contiguous ``out [outer, n, inner]``."""
        ...

    def view(self, start: int, stop: int) -> Chunk | None:
        """Tokens ``start:stop`` without a copy, where that is possible."""
        ...


class ArrayReader:
    """A tensor in memory: any strides."""

    def __init__(self, array: NDArray[Any], view_shape: Shape) -> None:
        self._array = integer_view(array).reshape(view_shape)

    def read(self, start: int, out: NDArray[Any]) -> None:
        np.copyto(out, self._array[:, start : start + out.shape[1]])

    def view(self, start: int, stop: int) -> Chunk | None:
        tokens = self._array[:, start:stop]
        return tokens if is_chunk(tokens) else None


class FileReader:
    """A tensor in a safetensors file."""

    def __init__(self, file: RandomFile, tensor: StoredTensor, view_shape: Shape) -> None:
        self._file = file
        self._offset = tensor.offset
        self._outer, self._tokens, inner = view_shape
        self._token_nbytes = inner * DTYPE_NBYTES[tensor.dtype]

    def read(self, start: int, out: NDArray[Any]) -> None:
        for o in range(self._outer):
            position = self._offset + (o * self._tokens + start) * self._token_nbytes
            self._file.read_into(position, out[o].reshape(-1).view(np.uint8))

    def view(self, start: int, stop: int) -> Chunk | None:
        return None


class TensorSource(Protocol):
    """Where :func:`kvz.compress` takes tensors from, in order."""

    name: str
    header: Header

    @property
    def metadata(self) -> Mapping[str, str]: ...

    def find(self, name: str) -> tuple[str, NDArray[Any]] | None:
        """Safetensors dtype and integer view of a tensor; None: not, or no longer, at hand."""
        ...

    def reader(self, tensor: StoredTensor, view_shape: Shape) -> TensorReader: ...


class SafetensorsFile:
    """An open safetensors file (a :class:`kvz.source_protocol.CacheSource`)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_file(path)
        self.name = self._file.name
        with naming(self.name):
            nbytes = header_nbytes(self._file.read(0, LENGTH_NBYTES))
            data = self._file.read(LENGTH_NBYTES, nbytes)
            if len(data) < nbytes:
                raise NotSafetensorsFile("not a safetensors file: the header is cut off")
            self.header = parse_header(data)
            if self.header.file_nbytes != self._file.nbytes:
                raise TruncatedFile(
                    f"header describes {self.header.file_nbytes} bytes, "
                    f"the file has {self._file.nbytes}"
                )
        self._by_name = {tensor.name: tensor for tensor in self.header.tensors}

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.header.metadata

    @property
    def tensor_names(self) -> Sequence[str]:
        return list(self._by_name)

    def dtype(self, name: str) -> str:
        return self._by_name[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._by_name[name].shape

    def read_tensor(self, name: str) -> NDArray[Any]:
        """The tensor as its integer view, in its shape."""
        tensor = self._by_name[name]
        out = np.empty(tensor.shape, f"u{DTYPE_NBYTES[tensor.dtype]}")
        with naming(self.name):
            self._file.read_into(tensor.offset, out.reshape(-1).view(np.uint8))
        return out

    def find(self, name: str) -> tuple[str, NDArray[Any]] | None:
        return (self.dtype(name), self.read_tensor(name)) if name in self._by_name else None

    def reader(self, tensor: StoredTensor, view_shape: Shape) -> TensorReader:
        return FileReader(self._file, tensor, view_shape)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteCapture(SafetensorsFile):
    """A safetensors file in object storage, read once from front to back, a little ahead.

    Each tensor is held in memory while it is encoded.
    """

    def reader(self, tensor: StoredTensor, view_shape: Shape) -> TensorReader:
        """Must be called for the tensors in file order."""
        following = self.header.tensors[self.header.tensors.index(tensor) :]
        self._file.prefetch(piece for each in following for piece in _pieces(each))
        data = np.empty(tensor.nbytes, np.uint8)
        for offset, nbytes in _pieces(tensor):
            start = offset - tensor.offset
            self._file.read_into(offset, data[start : start + nbytes])
        return ArrayReader(data.view(f"u{DTYPE_NBYTES[tensor.dtype]}"), view_shape)


def _pieces(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Offset and length of the parts in which a remote tensor is read."""
    for start in range(0, tensor.nbytes, _PIECE_NBYTES):
        yield tensor.offset + start, min(_PIECE_NBYTES, tensor.nbytes - start)


class SafetensorsStream:
    """Safetensors arriving on a pipe: each tensor is held in memory while it is encoded."""

    def __init__(self, stream: BinaryIO, name: str = "<stdin>") -> None:
        self.name = name
        self._stream = stream
        nbytes = header_nbytes(read_exactly(stream, LENGTH_NBYTES).tobytes())
        self.header = parse_header(read_exactly(stream, nbytes).tobytes())
        self._unread = len(self.header.tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.header.metadata

    def find(self, name: str) -> None:
        """Nothing: a stream has no tensors but the next one."""

    def reader(self, tensor: StoredTensor, view_shape: Shape) -> TensorReader:
        """Must be called once for every tensor, in file order.

        Raises TruncatedFile, or NotSafetensorsFile when the stream goes on after the last one.
        """
        data = read_exactly(self._stream, tensor.nbytes)
        self._unread -= 1
        if not self._unread and self._stream.read(1):
            raise NotSafetensorsFile("bytes follow the last tensor that the header describes")
        return ArrayReader(data.view(f"u{DTYPE_NBYTES[tensor.dtype]}"), view_shape)


class MemorySource:
    """Tensors in memory: ``{name: (safetensors dtype, array)}``; arrays may be strided views.

    Raises ConfigError when the metadata is not text.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[str, NDArray[Any]]], metadata: Mapping[str, str]
    ) -> None:
        if not all(isinstance(text, str) for text in [*metadata, *metadata.values()]):
            raise ConfigError("metadata must map strings to strings")
        self.name = "<memory>"
        described = [(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
        self.header = build_header(described, metadata)[1]
        self._tensors = dict(tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.header.metadata

    def find(self, name: str) -> tuple[str, NDArray[Any]] | None:
        return self._tensors.get(name)

    def reader(self, tensor: StoredTensor, view_shape: Shape) -> TensorReader:
        return ArrayReader(self._tensors[tensor.name][1], view_shape)


_NUMPY_NAMES = {"b": "BOOL", "i": "I", "u": "U", "f": "F"}


def describe_array(array: Any) -> tuple[str, NDArray[Any]]:
    """Safetensors dtype and integer view of a NumPy array or torch tensor, without a copy.

    Raises SourceError for a dtype that safetensors does not have.
    """
    if isinstance(array, np.ndarray):
        prefix = _NUMPY_NAMES.get(array.dtype.kind)
        name = prefix if prefix == "BOOL" else f"{prefix}{8 * array.dtype.itemsize}"
        if prefix is None or name not in DTYPE_NBYTES:
            raise SourceError(f"dtype {array.dtype} has no safetensors name")
        # files are little endian, as is every machine that kvz runs on
        return name, integer_view(array.astype(array.dtype.newbyteorder("<"), copy=False))
    from kvz.torch_dtypes import describe_tensor

    return describe_tensor(array)


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Write NumPy arrays or torch tensors, in the order given; the file appears when it is whole.

    Raises SourceError when ``path`` exists and ``overwrite`` is false.
    """
    described = {name: describe_array(tensor) for name, tensor in tensors.items()}
    listing = [(name, dtype, array.shape) for name, (dtype, array) in described.items()]
    prefix, _ = build_header(listing, metadata)
    with atomic_output(path, overwrite=overwrite) as stream:
        stream.write(prefix)
        for _, array in described.values():
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
