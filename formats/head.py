"""The head: what is known before the first byte is encoded (spec/container.md, "Head").

JSON, so that a person can read it; every value is checked before anything is computed from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvz.formats.errors import InvalidField, LimitExceeded, UnknownCodec
from kvz.formats.ids import (
    CODEC_NAMES,
    CODEC_VERSIONS,
    DTYPE_NBYTES,
    FIRST_VERSION,
    METADATA_KEY,
    PROGRESSIVE_CODECS,
)
from kvz.formats.limits import (
    MAX_CHUNK_NBYTES,
    MAX_NAME_LEN,
    MAX_RANK,
    MAX_TENSOR_NBYTES,
    MAX_TENSORS,
)


@dataclass(frozen=True, slots=True)
class CodecEntry:
    """A codec and its configuration, shared by the tensors that name its position."""

    name: str
    config: Mapping[str, Any]


def view_shape(shape: tuple[int, ...], token_axis: int | None) -> tuple[int, int, int]:
    """``(outer, tokens, inner)``; without a token axis, one run of elements."""
    if token_axis is None:
        return 1, math.prod(shape), 1
    before, after = shape[:token_axis], shape[token_axis + 1 :]
    return math.prod(before), shape[token_axis], math.prod(after)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the archive.

    ``token_axis`` splits the shape into ``(outer, tokens, inner)``; None: the tensor is one run of
    elements. A chunk holds ``chunk_tokens`` tokens (the last one fewer) of all outer indices.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    token_axis: int | None
    chunk_tokens: int
    codec: int

    @property
    def itemsize(self) -> int:
        return DTYPE_NBYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def view_shape(self) -> tuple[int, int, int]:
        """``(outer, tokens, inner)``."""
        return view_shape(self.shape, self.token_axis)

    @property
    def num_chunks(self) -> int:
        if self.num_elements == 0:
            return 0
        return -(-self.view_shape[1] // self.chunk_tokens)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First token of a chunk and the one after its last."""
        start = chunk * self.chunk_tokens
        return start, min(start + self.chunk_tokens, self.view_shape[1])

    def chunk_shape(self, chunk: int) -> tuple[int, int, int]:
        outer, _, inner = self.view_shape
        start, end = self.chunk_range(chunk)
        return outer, end - start, inner

    def check(self, num_codecs: int) -> None:
        """Raises InvalidField or LimitExceeded."""
        what = f"tensor {self.name!r}"
        if self.name == METADATA_KEY:
            raise InvalidField(f"{what}: safetensors keeps this name for the metadata")
        if len(self.name) > MAX_NAME_LEN or len(self.shape) > MAX_RANK:
            raise LimitExceeded(f"{what}: name or rank exceeds {MAX_NAME_LEN} / {MAX_RANK}")
        if self.dtype not in DTYPE_NBYTES:
            raise InvalidField(f"{what}: dtype {self.dtype!r} is not known")
        if any(dim < 0 or dim > MAX_TENSOR_NBYTES for dim in self.shape):
            raise InvalidField(f"{what}: shape {list(self.shape)} is out of range")
        # without its zeros: the sizes of an empty tensor are multiplied as well
        nbytes = math.prod(dim for dim in self.shape if dim) * self.itemsize
        if nbytes > MAX_TENSOR_NBYTES:
            raise LimitExceeded(f"{what}: {nbytes} bytes exceed {MAX_TENSOR_NBYTES}")
        if self.token_axis is not None and not 0 <= self.token_axis < len(self.shape):
            raise InvalidField(f"{what}: token axis {self.token_axis} of rank {len(self.shape)}")
        if not 0 <= self.codec < num_codecs:
            raise InvalidField(f"{what}: codec {self.codec} of {num_codecs}")
        if not 1 <= self.chunk_tokens <= MAX_CHUNK_NBYTES:
            raise InvalidField(f"{what}: chunk of {self.chunk_tokens} tokens")
        if self.num_elements:
            outer, tokens, inner = self.view_shape
            nbytes = outer * inner * self.itemsize * min(tokens, self.chunk_tokens)
            if nbytes > MAX_CHUNK_NBYTES:
                raise LimitExceeded(f"{what}: chunks of {nbytes} bytes exceed {MAX_CHUNK_NBYTES}")


@dataclass(frozen=True, slots=True)
class Head:
    """Tensors in file order, the codecs they use, the capture's metadata, and the writer."""

    codecs: tuple[CodecEntry, ...]
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    writer: str = ""

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def codec_of(self, tensor: TensorEntry) -> CodecEntry:
        return self.codecs[tensor.codec]

    def is_progressive(self, tensor: TensorEntry) -> bool:
        """Whether the tensor's chunks are anchors, with residuals later in the file."""
        return self.codec_of(tensor).name in PROGRESSIVE_CODECS

    @property
    def version(self) -> tuple[int, int]:
        """The format's version that a reader of this file must know."""
        needed = [CODEC_VERSIONS.get(codec.name, FIRST_VERSION) for codec in self.codecs]
        return max(needed, default=FIRST_VERSION)

    def to_bytes(self) -> bytes:
        document = {
            "writer": self.writer,
            "metadata": dict(self.metadata),
            "codecs": [{"name": c.name, **c.config} for c in self.codecs],
            "tensors": [
                {
                    "name": t.name,
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "token_axis": t.token_axis,
                    "chunk_tokens": t.chunk_tokens,
                    "codec": t.codec,
                }
                for t in self.tensors
            ],
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Head:
        """Raises InvalidField, LimitExceeded or UnknownCodec."""
        try:
            document = json.loads(data.decode())
            # an escaped half of a surrogate pair is JSON, but no text
            json.dumps(document, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise InvalidField(f"the head is not UTF-8 JSON: {error}") from None
        fields = _Fields(document, "head")
        codecs = tuple(_codec(_Fields(item, "codec")) for item in fields.items("codecs"))
        items = fields.items("tensors")
        if len(items) > MAX_TENSORS:
            raise LimitExceeded(f"{len(items)} tensors exceed {MAX_TENSORS}")
        tensors = tuple(_tensor(_Fields(item, "tensor"), len(codecs)) for item in items)
        names = [t.name for t in tensors]
        if len(set(names)) != len(names):
            raise InvalidField("two tensors in the head have the same name")
        metadata = fields.get("metadata", dict)
        if not all(isinstance(value, str) for value in metadata.values()):
            raise InvalidField("metadata in the head must map strings to strings")
        return cls(codecs, tensors, metadata, fields.get("writer", str))


class _Fields:
    """A JSON object whose fields are fetched with their type checked."""

    def __init__(self, value: Any, what: str):
        if not isinstance(value, dict):
            raise InvalidField(f"{what} in the head must be an object")
        self._value = value
        self._what = what

    def get(self, key: str, kind: type) -> Any:
        value = self._value.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidField(f"{self._what} in the head: field {key!r} must be {kind.__name__}")
        return value

    def items(self, key: str) -> list[Any]:
        value: list[Any] = self.get(key, list)
        return value

    def optional_int(self, key: str) -> int | None:
        value: int | None = None if self._value.get(key) is None else self.get(key, int)
        return value

    def rest(self, *without: str) -> dict[str, Any]:
        return {key: value for key, value in self._value.items() if key not in without}


def _codec(fields: _Fields) -> CodecEntry:
    name = fields.get("name", str)
    if name not in CODEC_NAMES:
        raise UnknownCodec(f"codec {name!r} is not known to this version of kvz: update kvz")
    return CodecEntry(name, fields.rest("name"))


def _tensor(fields: _Fields, num_codecs: int) -> TensorEntry:
    shape = fields.items("shape")
    if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in shape):
        raise InvalidField("a tensor's shape in the head must be a list of integers")
    entry = TensorEntry(
        name=fields.get("name", str),
        dtype=fields.get("dtype", str),
        shape=tuple(shape),
        token_axis=fields.optional_int("token_axis"),
        chunk_tokens=fields.get("chunk_tokens", int),
        codec=fields.get("codec", int),
    )
    entry.check(num_codecs)
    return entry
