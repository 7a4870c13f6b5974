"""Progressive archives: one put together by hand, one compressed, and what they decode to.

Expected values come from formats/spec/lynx.md by hand, or from the NumPy reference.
"""

from __future__ import annotations

import copy
import io
import re
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from archive_builder import CODEBOOK, ENCODED, RAW, Archive, Section, head_of, tensor
from cli_support import names
from numpy.typing import NDArray
from safetensors_file import Listing, read_tensors
from tiny_archive import GAAC, GAAC_CODEBOOK, GAAC_STREAMS, VALUES, streams

import kvz
from kvz.kernels.reference import lynx as reference
from kvz.progressive import ProgressiveReader

ANCHOR, RESIDUAL = 4, 5
KEY, VALUE = "layers.0.key", "layers.0.value"
U16 = NDArray[np.uint16]
Read = Callable[[Path], Any]
LYNX: dict[str, Any] = {
    "name": "lynx",
    "page_tokens": 2,
    "group_tokens": 2,
    "exact_tokens": 0,
    "grouping": "channel",
    "companding": None,
}

# -- by hand: g = 0, S = 1, offset 64, step 128, so code q stands for 0.25 + q / 512; an anchor a
# stands for 0.25 + A[a] / 512 with A[0] = 2, A[4] = 72, A[8] = 135, A[12] = 199


def anchor(*codes: int) -> bytes:
    """The ANCHOR payload of one page of one channel."""
    return streams(b"", b"\0\0\x80\x3f", b"\x40\x80", b"\0", bytes(codes), b"")


FULL_VALUES = {
    # codes 80 00, as they are, C0 4F
    "layers.0.key": struct.pack("<6H", 0x3F00, 0x3E80, 0x1234, 0xFFFF, 0x3F20, 0x3ECF),
    "g": VALUES["layers.0.key"],
    "r": VALUES["r"],
    "layers.0.value": struct.pack("<2H", 0x3E80, 0x3F00),
}
ANCHOR_VALUES = {
    **FULL_VALUES,
    "layers.0.key": struct.pack("<6H", 0x3F04, 0x3E82, 0x1234, 0xFFFF, 0x3F24, 0x3EC8),
    "layers.0.value": struct.pack("<2H", 0x3E82, 0x3F04),
}


def tiny_lynx() -> Archive:
    """Sections 0 to 6 are chunks and a codebook (3), 7 to 9 the residuals."""
    tensors = [
        tensor("layers.0.key", "BF16", [1, 6, 1], token_axis=1, chunk_tokens=2),
        tensor("g", "BF16", [1, 8, 2], token_axis=1, codec=1),
        tensor("r", "U8", [5], codec=2),
        tensor("layers.0.value", "BF16", [1, 2, 1], token_axis=1, chunk_tokens=2),
    ]
    sections = [
        Section(ANCHOR, 0, 0, anchor(8, 0)),
        Section(RAW, 0, 1, b"\x34\x12\xff\xff"),
        Section(ANCHOR, 0, 2, anchor(12, 4)),
        Section(CODEBOOK, 1, 0, GAAC_CODEBOOK),
        Section(ENCODED, 1, 0, streams(*GAAC_STREAMS)),
        Section(RAW, 2, 0, b"\1\2\3\4\5"),
        Section(ANCHOR, 3, 0, anchor(0, 8)),
        Section(RESIDUAL, 0, 0, b"\0\0"),
        Section(RESIDUAL, 0, 2, b"\x00\x0f"),
        Section(RESIDUAL, 3, 0, b"\0\0"),
    ]
    version = {"version": (0, 2), "reader_version": (0, 2)}
    head = head_of([copy.deepcopy(LYNX), GAAC, {"name": "raw"}], tensors)
    return Archive(head, sections, prelude=version)


# -- compressed: chunks of 64 tokens; the last of the keys and the second of the values are RAW

OPTIONS = {"page_tokens": "64", "group_tokens": "16"}
TABLE = np.arange(256) * 256
ANCHOR_TABLE = 256 * np.array(
    [2, 24, 40, 56, 72, 88, 104, 120, 135, 151, 167, 183, 199, 215, 231, 253]
)
METADATA = {"given": "ü"}
_CHUNK = 64


def _normal(tokens: int, seed: int) -> U16:
    values = np.random.default_rng(seed).standard_normal((1, 2, tokens, 8), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def mixed_tensors() -> dict[str, NDArray[Any]]:
    """Tensors in file order: lossless ones before, between and after the lossy ones."""
    value = _normal(200, 2)
    value[:, :, 64:128] |= 0x7F80  # infinities and NaN
    return {
        "input_ids": np.arange(197, dtype=np.int64)[None],
        "layers.0.key": _normal(197, 1),
        "layers.0.query": _normal(70, 3),
        "layers.0.value": value,
        "next_token_logits": np.linspace(-1, 1, 33, dtype=np.float32)[None],
    }


def listing(tensors: dict[str, NDArray[Any]]) -> Listing:
    """As :func:`safetensors_file.safetensors_bytes` takes them."""
    names = {"int64": "I64", "uint16": "BF16", "float32": "F32"}
    return [(n, names[str(a.dtype)], list(a.shape), a.tobytes()) for n, a in tensors.items()]


def compress(source: Path, path: Path, **settings: Any) -> Path:
    """A lynx archive of ``source`` in chunks of 64 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvz.layout.TARGET_CHUNK_NBYTES", 1600)
        settings = {"codec": "lynx", "codec_options": OPTIONS, "threads": 1, **settings}
        kvz.compress(source, path, overwrite=True, **settings)
    return path


def lossy(array: U16, *, full: bool) -> U16:
    """What the codec makes of keys or values ``[1, heads, tokens, channels]``."""
    parts = [array[0, :, i : i + _CHUNK] for i in range(0, array.shape[2], _CHUNK)]
    return np.concatenate(
        [_lossy_chunk(part, 4 * (i == 0), full) for i, part in enumerate(parts)], axis=1
    )[None]


def _lossy_chunk(chunk: U16, exact: int, full: bool) -> U16:
    coded = chunk.copy()
    coded[:, :exact] = coded[:, exact, None]
    sizes: dict[str, Any] = {"page_tokens": 64, "group_tokens": 16}
    parts = reference.encode(coded, **sizes)
    stored = [chunk[:, :exact], *(p for p in parts if p is not parts.residuals)]
    anchor_nbytes = len(streams(*(part.tobytes() for part in stored)))
    if anchor_nbytes + parts.residuals.nbytes >= chunk.nbytes:
        return chunk
    out = reference.decode(parts, TABLE if full else ANCHOR_TABLE, **sizes)
    out[:, :exact] = chunk[:, :exact]
    return out


def expected(tensors: dict[str, NDArray[Any]], *, full: bool) -> dict[str, bytes]:
    """Bytes of each tensor after a round trip."""
    coded = ("layers.0.key", "layers.0.value")
    return {n: (lossy(a, full=full) if n in coded else a).tobytes() for n, a in tensors.items()}


# -- readers: path -> bytes of each tensor


def tensor_bytes(source: Any) -> dict[str, bytes]:
    """Every tensor of a source."""
    return {name: source.read_tensor(name).tobytes() for name in source.tensor_names}


def at_random(path: Path) -> dict[str, bytes]:
    with kvz.open(path) as archive:
        return tensor_bytes(archive)


def anchors_at_random(path: Path) -> dict[str, bytes]:
    with kvz.open(path) as archive:
        return tensor_bytes(archive.anchor())


def verified(path: Path) -> None:
    kvz.verify(path, threads=1)


def through_pipe(data: bytes | Any, out: Path, **settings: Any) -> dict[str, bytes]:
    """Decompressed from standard input (bytes, or a stream) to ``out``."""
    with pytest.MonkeyPatch.context() as patch:
        stream = io.BytesIO(data) if isinstance(data, bytes) else data
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        kvz.decompress("-", out, **{"threads": 1, "overwrite": True, **settings})
    return {name: raw for name, (_, _, raw) in read_tensors(out)[1].items()}


def piped(path: Path) -> dict[str, bytes]:
    return through_pipe(path.read_bytes(), path.with_suffix(".out"))


def anchors_piped(path: Path) -> dict[str, bytes]:
    return through_pipe(path.read_bytes(), path.with_suffix(".out"), anchor_only=True)


def arrived(path: Path) -> dict[str, bytes]:
    with ProgressiveReader(path) as reader:
        return tensor_bytes(reader.full())


def anchors_arrived(path: Path) -> dict[str, bytes]:
    with ProgressiveReader(path) as reader:
        return tensor_bytes(reader.anchor())


FULL_IN_ORDER: list[Read] = [verified, piped, arrived]
ANCHORS_IN_ORDER: list[Read] = [anchors_piped, anchors_arrived]
FULL: list[Read] = [at_random, *FULL_IN_ORDER]
ANCHORS: list[Read] = [anchors_at_random, *ANCHORS_IN_ORDER]


def assert_refused(path: Path, readers: list[Read], error: type[Exception], message: str) -> None:
    """Each reader raises exactly ``error`` and leaves nothing behind."""
    for read in readers:
        with pytest.raises(error, match=re.escape(message)) as caught:
            read(path)
        assert type(caught.value) is error, read.__name__
        assert names(path.parent) == {path.name}, read.__name__


class Gate(io.RawIOBase):
    """A stream that stops before byte ``stop`` until it is opened, then goes on."""

    def __init__(self, data: bytes, stop: int, *, step: int = 1 << 20) -> None:
        self._data, self._stop, self._step = memoryview(data), stop, step
        self._position = 0
        self.opened, self.waiting = threading.Event(), threading.Event()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._stop and not self.opened.is_set():
            self.waiting.set()
            assert self.opened.wait(60)
        end = len(self._data) if self.opened.is_set() else self._stop
        part = self._data[self._position : min(end, self._position + len(buffer), len(self._data))]
        part = part[: self._step]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
