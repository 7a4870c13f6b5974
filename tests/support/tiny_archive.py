"""A small archive with a tensor for every codec, and the readers that must reject its ruins."""

from __future__ import annotations

import copy
import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from archive_builder import CODEBOOK, ENCODED, RAW, Archive, Section, head_of, tensor

import kvz
from kvz.formats.errors import KvzError

GAAC: dict[str, Any] = {"name": "gaac", "windows": [2, 3, 4], "axis": "token"}
CODECS: list[dict[str, Any]] = [
    GAAC,
    {"name": "splitzip"},
    {"name": "zstd", "level": 3},
    {"name": "raw"},
]
GAAC_CODEBOOK = bytes.fromhex("02 7C 7C 7A 7A 70 70")


def streams(*parts: bytes) -> bytes:
    """Streams, each at a multiple of 16."""
    payload = b""
    for part in parts:
        payload += bytes(-len(payload) % 16) + part
    return payload


GAAC_STREAMS = [
    bytes(4) + b"\x80" + bytes(11),
    bytes.fromhex("1B FF 59 55"),
    b"",
    b"\x02\x00",
    bytes(4),
    b"\xff",
]
SPLITZIP_STREAMS = [b"\x00\x80\x00", b"\x0f\x0e", struct.pack("<2I", 0, 1), b"\1\0", b"\x80"]
ZSTD_PAYLOAD = bytes.fromhex("02 00 00 80  02 00 00 80  7F 7F  00 01")
#: What the tensors hold, from the worked examples of the codec pages.
VALUES = {
    "layers.0.key": struct.pack(
        "<16H", 0x3F80, 0x3F80, 0x3F00, 0x4000, 0xBE80, 0x3F80, 0x3E00, 0x3F80, *[0x3F80] * 8
    ),
    "s": struct.pack("<3H", 0x3F80, 0xC000, 0x3F00),
    "z": struct.pack("<2H", 0x3F80, 0xBF80),
    "r": b"\1\2\3\4\5",
    "empty": b"",
}


def tiny() -> Archive:
    """The archive, ready to be broken; chunk 0 and 1 of ``r`` are sections 5 and 6."""
    tensors = [
        tensor("layers.0.key", "BF16", [1, 8, 2], token_axis=1),
        tensor("s", "BF16", [3], codec=1),
        tensor("z", "BF16", [2], codec=2),
        tensor("empty", "F32", [0, 3], codec=2),
        tensor("r", "U8", [5], chunk_tokens=3, codec=3),
    ]
    sections = [
        Section(CODEBOOK, 0, 0, GAAC_CODEBOOK),
        Section(ENCODED, 0, 0, streams(*GAAC_STREAMS)),
        Section(CODEBOOK, 1, 0, bytes(range(0x70, 0x80))),
        Section(ENCODED, 1, 0, streams(*SPLITZIP_STREAMS)),
        Section(ENCODED, 2, 0, ZSTD_PAYLOAD),
        Section(RAW, 4, 0, b"\1\2\3"),
        Section(RAW, 4, 1, b"\4\5"),
    ]
    return Archive(head_of(copy.deepcopy(CODECS), tensors), sections)


def read_at_random(path: Path) -> dict[str, bytes]:
    """Every tensor through the index."""
    with kvz.open(path) as archive:
        return {name: archive.read_tensor(name).tobytes() for name in archive.tensor_names}


def read_from_pipe(path: Path) -> None:
    """The whole file from standard input to a safetensors file beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(path.read_bytes())))
        kvz.decompress("-", path.with_suffix(".out"), threads=1, overwrite=True)


def verify(path: Path) -> None:
    kvz.verify(path, threads=1)


SEQUENTIAL: list[Callable[[Path], object]] = [verify, read_from_pipe]
ALL_READERS: list[Callable[[Path], object]] = [read_at_random, *SEQUENTIAL]


def assert_rejected(
    path: Path,
    archive: Archive | bytes,
    error: type[KvzError],
    message: str,
    readers: list[Callable[[Path], object]] = ALL_READERS,
) -> None:
    """Each reader raises exactly ``error``, names the file, and leaves no output behind."""
    path.write_bytes(archive if isinstance(archive, bytes) else archive.to_bytes())
    for read in readers:
        name = "<stdin>" if read is read_from_pipe else str(path)
        with pytest.raises(error) as caught:
            read(path)
        assert type(caught.value) is error, read.__name__
        assert message in str(caught.value), read.__name__
        assert str(caught.value).startswith(f"{name}: "), read.__name__
        assert [p.name for p in path.parent.iterdir()] == [path.name], read.__name__
