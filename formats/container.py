"""The container: prelude, section frames, index and trailer (spec/container.md).

Pure functions between bytes and values. Nothing here does I/O; every parser checks what it reads
and raises a typed error that names the field.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvz.formats.errors import (
    ChecksumMismatch,
    InvalidField,
    LimitExceeded,
    NotKvzFile,
    TruncatedFile,
    UnsupportedFeature,
    UnsupportedVersion,
)
from kvz.formats.ids import FIRST_VERSION, FORMAT_VERSION, KNOWN_FEATURES, SectionKind
from kvz.formats.limits import MAX_CHUNK_NBYTES, MAX_CODEBOOK_NBYTES, MAX_HEAD_NBYTES, MAX_SECTIONS

MAGIC = b"\x89KVZ\r\n\x1a\n"
END_MAGIC = b"KVZ-END\n"
ALIGNMENT = 64

_PRELUDE = struct.Struct("<8sHHHHQQI24xI")
_FRAME = struct.Struct("<HHIIQII4s")
_TRAILER = struct.Struct("<QQIIQI16x8sI")
PRELUDE_NBYTES = _PRELUDE.size
FRAME_NBYTES = _FRAME.size
TRAILER_NBYTES = _TRAILER.size
_FRAME_MARK = b"SECT"

#: One index entry; 32 bytes.
INDEX_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u8"),
        ("checksum", "<u4"),
        ("tensor", "<u4"),
        ("chunk", "<u4"),
        ("kind", "<u2"),
        ("reserved", "<u2"),
    ]
)
Index = NDArray[np.void]

#: Largest payload by kind. An encoded chunk is never larger than the raw one it stands for.
_PAYLOAD_CAPS = {
    SectionKind.CODEBOOK: MAX_CODEBOOK_NBYTES,
    SectionKind.RAW: MAX_CHUNK_NBYTES,
    SectionKind.ENCODED: MAX_CHUNK_NBYTES,
    SectionKind.ANCHOR: MAX_CHUNK_NBYTES,
    SectionKind.RESIDUAL: MAX_CHUNK_NBYTES,
    SectionKind.INDEX: MAX_SECTIONS * INDEX_DTYPE.itemsize,
}


def checksum(data: bytes | memoryview | NDArray[np.uint8]) -> int:
    """CRC-32 as in zlib, gzip and PNG."""
    return zlib.crc32(data)


def _check_sum(data: bytes | memoryview, stored: int, what: str) -> None:
    computed = checksum(data)
    if computed != stored:
        raise ChecksumMismatch(
            f"checksum of {what} does not match (stored {stored:08x}, computed {computed:08x}): "
            "the file is damaged"
        )


@dataclass(frozen=True, slots=True)
class Prelude:
    """The first 64 bytes of a file."""

    head_nbytes: int
    head_checksum: int
    version: tuple[int, int] = FIRST_VERSION
    reader_version: tuple[int, int] = FIRST_VERSION
    features: int = 0

    def to_bytes(self) -> bytes:
        fields = (*self.version, *self.reader_version, self.features, self.head_nbytes)
        body = _PRELUDE.pack(MAGIC, *fields, self.head_checksum, 0)[:-4]
        return body + struct.pack("<I", checksum(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> Prelude:
        """Raises NotKvzFile, TruncatedFile, ChecksumMismatch, UnsupportedVersion,
        UnsupportedFeature, InvalidField or LimitExceeded."""
        if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
            if data[:4] == MAGIC[:4]:
                raise NotKvzFile(
                    "the kvz magic is mangled: the file went through a text-mode transfer"
                )
            if data[8:10] == b'{"':
                raise NotKvzFile("a safetensors file, not an archive: kvz compress makes one of it")
            raise NotKvzFile("not a kvz file (the first bytes are not the kvz magic)")
        if len(data) < PRELUDE_NBYTES:
            raise TruncatedFile(f"ends after {len(data)} bytes: it is incomplete")
        _, major, minor, need_major, need_minor, features, nbytes, head_sum, own_sum = (
            _PRELUDE.unpack(data[:PRELUDE_NBYTES])
        )
        _check_sum(data[: PRELUDE_NBYTES - 4], own_sum, "the prelude")
        if (need_major, need_minor) > FORMAT_VERSION:
            raise UnsupportedVersion(
                f"file needs a reader of format {need_major}.{need_minor}, "
                f"this one reads up to {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}: update kvz"
            )
        if features & ~KNOWN_FEATURES:
            raise UnsupportedFeature(
                f"file needs features {features & ~KNOWN_FEATURES:#x}, which this version does "
                "not know: update kvz"
            )
        if data[36:60] != bytes(24):
            raise InvalidField("reserved bytes 36..60 of the prelude are not zero")
        if nbytes > MAX_HEAD_NBYTES:
            raise LimitExceeded(f"head of {nbytes} bytes exceeds {MAX_HEAD_NBYTES}")
        return cls(nbytes, head_sum, (major, minor), (need_major, need_minor), features)

    def check_head(self, head: bytes) -> None:
        if len(head) < self.head_nbytes:
            raise TruncatedFile(f"head needs {self.head_nbytes} bytes, file has {len(head)}")
        _check_sum(head, self.head_checksum, "the head")


@dataclass(frozen=True, slots=True)
class Frame:
    """The 32 bytes before a section's payload."""

    kind: SectionKind
    tensor: int
    chunk: int
    length: int
    checksum: int

    def to_bytes(self) -> bytes:
        fields = (int(self.kind), 0, self.tensor, self.chunk, self.length, self.checksum)
        body = _FRAME.pack(*fields, 0, _FRAME_MARK)
        own = checksum(body[:24])
        return _FRAME.pack(*fields, own, _FRAME_MARK)

    @classmethod
    def from_bytes(cls, data: bytes) -> Frame:
        """Raises TruncatedFile, InvalidField, ChecksumMismatch or LimitExceeded."""
        if len(data) < FRAME_NBYTES:
            raise TruncatedFile("the file ends inside a section frame: it is incomplete")
        kind, reserved, tensor, chunk, length, payload_sum, own_sum, mark = _FRAME.unpack(data)
        if mark != _FRAME_MARK:
            raise InvalidField("a section frame does not end with its mark: the file is damaged")
        _check_sum(data[:24], own_sum, "a section frame")
        if reserved:
            raise InvalidField(f"reserved field of a section frame is {reserved}, must be 0")
        section_kind = _section_kind(kind)
        if length > _PAYLOAD_CAPS[section_kind]:
            raise LimitExceeded(
                f"{section_kind.name} section of {length} bytes exceeds "
                f"{_PAYLOAD_CAPS[section_kind]}"
            )
        return cls(section_kind, tensor, chunk, length, payload_sum)

    def check_payload(self, payload: bytes | memoryview | NDArray[np.uint8], what: str) -> None:
        _check_sum(memoryview(payload), self.checksum, what)


def _section_kind(value: int) -> SectionKind:
    try:
        return SectionKind(value)
    except ValueError:
        raise InvalidField(f"section kind {value} is not known") from None


def payload_offset(position: int) -> int:
    """Where the payload of the next section starts when ``position`` bytes are written.

    Its frame stands in the 32 bytes before; what remains between is zero.
    """
    return -(-(position + FRAME_NBYTES) // ALIGNMENT) * ALIGNMENT


def trailer_offset(index_end: int) -> int:
    return -(-index_end // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last 64 bytes of a complete file: its commit record."""

    index_offset: int
    index_nbytes: int
    index_checksum: int
    head_checksum: int
    file_nbytes: int

    def to_bytes(self) -> bytes:
        fields = (self.index_offset, self.index_nbytes, self.index_checksum, self.num_sections)
        body = _TRAILER.pack(*fields, self.file_nbytes, self.head_checksum, END_MAGIC, 0)[:-4]
        return body + struct.pack("<I", checksum(body))

    @property
    def num_sections(self) -> int:
        return self.index_nbytes // INDEX_DTYPE.itemsize

    @classmethod
    def from_bytes(cls, data: bytes, file_nbytes: int) -> Trailer:
        """Parse the last 64 bytes of a file of ``file_nbytes`` bytes.

        Raises TruncatedFile, ChecksumMismatch, InvalidField or LimitExceeded.
        """
        if len(data) != TRAILER_NBYTES or data[52:60] != END_MAGIC:
            raise TruncatedFile(
                "the file has no trailer: it is incomplete (a writer was interrupted, or the end "
                "was cut off)"
            )
        offset, nbytes, index_sum, count, length, head_sum, _, own_sum = _TRAILER.unpack(data)
        _check_sum(data[:-4], own_sum, "the trailer")
        if length != file_nbytes:
            raise TruncatedFile(f"trailer says {length} bytes, file has {file_nbytes}")
        if count > MAX_SECTIONS:
            raise LimitExceeded(f"section count {count} exceeds {MAX_SECTIONS}")
        if nbytes != count * INDEX_DTYPE.itemsize or data[36:52] != bytes(16):
            raise InvalidField("the trailer contradicts itself (index length, reserved bytes)")
        if offset % ALIGNMENT or trailer_offset(offset + nbytes) + TRAILER_NBYTES != file_nbytes:
            raise InvalidField(f"index at {offset}..{offset + nbytes} does not end at the trailer")
        return cls(offset, nbytes, index_sum, head_sum, length)

    def check_index(self, data: bytes | memoryview) -> None:
        if len(data) != self.index_nbytes:
            raise TruncatedFile(f"index needs {self.index_nbytes} bytes, got {len(data)}")
        _check_sum(data, self.index_checksum, "the index")


def parse_index(data: bytes | memoryview, prelude: Prelude, trailer: Trailer) -> Index:
    """The checked index entries, in file order.

    Raises InvalidField when entries overlap, leave the file or are of an unknown kind.
    """
    entries: Index = np.frombuffer(data, INDEX_DTYPE)
    kinds = np.array([k for k in SectionKind if k is not SectionKind.INDEX], np.uint16)
    if not np.isin(entries["kind"], kinds).all() or entries["reserved"].any():
        raise InvalidField("the index holds an unknown section kind or a reserved bit")
    # lengths first: below the cap, no sum of offset and length can wrap once offsets are checked
    for kind in kinds:
        cap = _PAYLOAD_CAPS[SectionKind(kind)]
        if (entries["length"][entries["kind"] == kind] > cap).any():
            raise LimitExceeded(f"a {SectionKind(kind).name} section in the index exceeds {cap}")
    if (entries["offset"] > trailer.index_offset).any():
        raise InvalidField("a section in the index starts after the index")
    expected = payload_offset(PRELUDE_NBYTES + prelude.head_nbytes)
    ends = (entries["offset"] + entries["length"]).astype(np.int64)
    starts = -(-(ends + FRAME_NBYTES) // ALIGNMENT) * ALIGNMENT
    followers = np.concatenate([[expected], starts])
    offsets = np.append(entries["offset"].astype(np.int64), trailer.index_offset)
    wrong = np.flatnonzero(followers != offsets)
    if wrong.size:
        i = int(wrong[0])
        raise InvalidField(
            f"section {i} is listed at byte {offsets[i]}, the one before puts it at {followers[i]}"
        )
    return entries
