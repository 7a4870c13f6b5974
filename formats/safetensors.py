"""The safetensors header, read and written.

Layout: u64 length of the header, the header (JSON, padded with spaces), the tensors' bytes. Read
here, not through the safetensors package, because kvz streams tensors in pieces and keeps their
order, and because ``kvz inspect`` must not load more than NumPy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvz.formats.errors import LimitExceeded, NotSafetensorsFile
from kvz.formats.ids import DTYPE_NBYTES, METADATA_KEY
from kvz.formats.limits import MAX_TENSOR_NBYTES

LENGTH_NBYTES = 8
#: The safetensors package has the same cap.
MAX_HEADER_NBYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file; ``offset`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors in the order of their bytes, and the metadata."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    file_nbytes: int


def header_nbytes(prefix: bytes) -> int:
    """Length of the JSON header from the first 8 bytes. Raises NotSafetensorsFile."""
    if len(prefix) < LENGTH_NBYTES:
        raise NotSafetensorsFile("not a safetensors file: it is shorter than 8 bytes")
    (nbytes,) = struct.unpack("<Q", prefix[:LENGTH_NBYTES])
    if prefix[:4] == b"\x89KVZ":
        raise NotSafetensorsFile("is a kvz archive already, where a safetensors file is needed")
    if nbytes > MAX_HEADER_NBYTES:
        raise NotSafetensorsFile("not a safetensors file: its first bytes are no header length")
    return int(nbytes)


def parse_header(data: bytes) -> Header:
    """Parse the JSON header. Raises NotSafetensorsFile or LimitExceeded."""
    try:
        document = json.loads(data.decode())
        # an escaped half of a surrogate pair is JSON, but no text
        json.dumps(document, ensure_ascii=False).encode()
        if not isinstance(document, dict):
            raise ValueError("header is not an object")
        metadata = document.pop(METADATA_KEY, {})
        start = LENGTH_NBYTES + len(data)
        spans = [_tensor(name, fields, start) for name, fields in document.items()]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise NotSafetensorsFile(f"not a safetensors file: {error}") from None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise NotSafetensorsFile("safetensors metadata must map strings to strings")
    position = start
    # empty tensors share their offset with the next one
    for tensor, end in sorted(spans, key=lambda span: (span[0].offset, span[1])):
        if tensor.offset != position:
            raise NotSafetensorsFile(
                f"tensor {tensor.name!r} starts at byte {tensor.offset}, not at {position}"
            )
        position = end
    tensors = tuple(t for t, _ in sorted(spans, key=lambda span: (span[0].offset, span[1])))
    return Header(tensors, metadata, position)


def _tensor(name: str, fields: Any, start: int) -> tuple[StoredTensor, int]:
    dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype not in DTYPE_NBYTES:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}, which is not known")
    if not all(isinstance(v, int) and 0 <= v <= MAX_TENSOR_NBYTES for v in [*shape, begin, end]):
        raise ValueError(f"tensor {name!r} has a shape or offset out of range")
    tensor = StoredTensor(name, dtype, tuple(shape), start + begin)
    if tensor.nbytes > MAX_TENSOR_NBYTES:
        raise LimitExceeded(f"tensor {name!r} has {tensor.nbytes} bytes")
    if end - begin != tensor.nbytes:
        raise ValueError(
            f"tensor {name!r} has {end - begin} bytes, its shape needs {tensor.nbytes}"
        )
    return tensor, start + end


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Header bytes (length included) for ``(name, dtype, shape)`` in the order of their data."""
    document: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    entries = []
    position = 0
    for name, dtype, shape in tensors:
        tensor = StoredTensor(name, dtype, shape, position)
        end = position + tensor.nbytes
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        entries.append(tensor)
        position = end
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = LENGTH_NBYTES + len(text)
    placed = tuple(StoredTensor(t.name, t.dtype, t.shape, start + t.offset) for t in entries)
    return struct.pack("<Q", len(text)) + text, Header(placed, metadata, start + position)
