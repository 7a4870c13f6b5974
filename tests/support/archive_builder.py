"""Builds `.kvz` files field by field, so that a test can break exactly one rule.

Written from formats/spec/container.md, without kvz: every checksum is worked out from the fields as
they were changed, so the check under test is the one that fires.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CODEBOOK, RAW, ENCODED, INDEX = 1, 2, 3, 65535
Fields = Mapping[str, Any]


@dataclass
class Section:
    """A section; ``frame`` overrides fields of its frame, ``gap`` fills the bytes before it."""

    kind: int
    tensor: int
    chunk: int
    payload: bytes
    frame: Fields = field(default_factory=dict)
    gap: int = 0


@dataclass
class Archive:
    """A file to be built. ``head_bytes`` stand in place of ``head`` where JSON itself is broken.

    ``prelude`` and ``trailer`` override fields by name; ``edit_index`` changes the list of index
    entries ``[offset, length, crc, tensor, chunk, kind, reserved]`` in place.
    """

    head: dict[str, Any]
    sections: list[Section]
    head_bytes: bytes | None = None
    prelude: Fields = field(default_factory=dict)
    trailer: Fields = field(default_factory=dict)
    edit_index: Callable[[list[list[int]]], object] | None = None
    index_section: Section = field(default_factory=lambda: Section(INDEX, 0, 0, b""))
    trailer_gap: int = 0

    def to_bytes(self) -> bytes:
        head = dump(self.head) if self.head_bytes is None else self.head_bytes
        data = _prelude(head, self.prelude) + head
        entries = []
        for section in self.sections:
            data = _append(data, section)
            offset, length = len(data) - len(section.payload), len(section.payload)
            numbers = (section.tensor, section.chunk, section.kind)
            entries.append([offset, length, zlib.crc32(section.payload), *numbers, 0])
        if self.edit_index is not None:
            self.edit_index(entries)
        self.index_section.payload = b"".join(struct.pack("<QQIIIHH", *e) for e in entries)
        data = _append(data, self.index_section)
        index_offset = len(data) - len(self.index_section.payload)
        data += bytes([self.trailer_gap]) * (-len(data) % 64)
        return data + _trailer(data, index_offset, self.index_section.payload, head, self.trailer)


def dump(head: dict[str, Any]) -> bytes:
    """A head as kvz writes it: JSON without spaces."""
    return json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()


def tensor(
    name: str,
    dtype: str,
    shape: Sequence[int],
    *,
    token_axis: int | None = None,
    chunk_tokens: int = 64,
    codec: int = 0,
) -> dict[str, Any]:
    """A tensor's entry in the head."""
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(shape),
        "token_axis": token_axis,
        "chunk_tokens": chunk_tokens,
        "codec": codec,
    }


def head_of(codecs: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """A head with these codecs and tensors."""
    return {"writer": "test", "metadata": {}, "codecs": codecs, "tensors": tensors}


def _sealed(body: bytes, fields: Fields) -> bytes:
    return body + struct.pack("<I", fields.get("crc", zlib.crc32(body)))


def _prelude(head: bytes, overrides: Fields) -> bytes:
    f = {
        "magic": b"\x89KVZ\r\n\x1a\n",
        "version": (0, 1),
        "reader_version": (0, 1),
        "features": 0,
        "head_length": len(head),
        "head_crc": zlib.crc32(head),
        "reserved": bytes(24),
        **overrides,
    }
    body = f["magic"] + struct.pack("<4H", *f["version"], *f["reader_version"])
    body += struct.pack("<QQI", f["features"], f["head_length"], f["head_crc"]) + f["reserved"]
    return _sealed(body, overrides)


def _append(data: bytes, section: Section) -> bytes:
    f = {
        "kind": section.kind,
        "reserved": 0,
        "tensor": section.tensor,
        "chunk": section.chunk,
        "length": len(section.payload),
        "payload_crc": zlib.crc32(section.payload),
        "mark": b"SECT",
        **section.frame,
    }
    fields = ("kind", "reserved", "tensor", "chunk", "length", "payload_crc")
    body = struct.pack("<HHIIQI", *(f[name] for name in fields))
    frame: bytes = _sealed(body, section.frame) + f["mark"]
    gap = bytes([section.gap]) * (-(len(data) + 32) % 64)
    return data + gap + frame + section.payload


def _trailer(data: bytes, index_offset: int, index: bytes, head: bytes, overrides: Fields) -> bytes:
    f = {
        "index_offset": index_offset,
        "index_length": len(index),
        "index_crc": zlib.crc32(index),
        "count": len(index) // 32,
        "file_length": len(data) + 64,
        "head_crc": zlib.crc32(head),
        "reserved": bytes(16),
        "magic": b"KVZ-END\n",
        **overrides,
    }
    fields = ("index_offset", "index_length", "index_crc", "count", "file_length", "head_crc")
    body = struct.pack("<QQIIQI", *(f[name] for name in fields)) + f["reserved"] + f["magic"]
    return _sealed(body, overrides)
