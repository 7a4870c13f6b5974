"""Safetensors files written by hand: any dtype, any bytes, in the order given."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Listing = Iterable[tuple[str, str, list[int], bytes]]


def safetensors_bytes(tensors: Listing, metadata: Mapping[str, str] | None = None) -> bytes:
    """A file of ``(name, dtype, shape, bytes)``, its header as the safetensors package has it."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, dtype, shape, raw in tensors:
        offsets = [len(data), len(data) + len(raw)]
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    return with_header(document, data)


def with_header(document: Any, data: bytes) -> bytes:
    """A file with this header, right or wrong."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int], bytes]]]:
    """Metadata and ``{name: (dtype, shape, bytes)}``."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    document = json.loads(data[8 : 8 + length])
    metadata = document.pop("__metadata__", {})
    body = data[8 + length :]
    return metadata, {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in document.items()
    }
