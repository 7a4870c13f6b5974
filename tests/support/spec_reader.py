"""A second decoder of `.kvz` files, written from formats/spec/*.md alone.

Pure Python (spec_lynx.py and spec_pnmix.py NumPy), one obvious loop per rule, no import from kvz:
when it and kvz disagree, either kvz or a page of the specification is wrong.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import spec_lynx
import spec_pnmix
import zstandard

MAGIC = b"\x89KVZ\r\n\x1a\n"
END_MAGIC = b"KVZ-END\n"
READER_VERSION = (0, 2)
CODEBOOK, RAW, ENCODED, ANCHOR, RESIDUAL, INDEX = 1, 2, 3, 4, 5, 65535
WITH_CODEBOOK, PROGRESSIVE = ("gaac", "splitzip"), ("lynx",)
ITEM_NBYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 1),
    **dict.fromkeys(["F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}


class SpecViolation(Exception):
    """The file breaks a rule of the specification."""


def require(condition: bool, rule: str) -> None:
    """Raise SpecViolation(rule) unless the condition holds."""
    if not condition:
        raise SpecViolation(rule)


def align(value: int, step: int) -> int:
    """The next multiple of step."""
    return -(-value // step) * step


@dataclass(frozen=True)
class Section:
    """One section: where it was said to be, and its payload."""

    kind: int
    tensor: int
    chunk: int
    payload_offset: int
    payload: bytes


@dataclass(frozen=True)
class ChunkSections:
    """RAW, ENCODED or ANCHOR section of a chunk, and what is needed with it."""

    main: Section
    book: Section | None
    residual: Section | None


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in the head, seen as [outer, tokens, inner]."""

    name: str
    dtype: str
    shape: list[int]
    outer: int
    tokens: int
    inner: int
    chunk_tokens: int
    codec: dict[str, Any]

    @property
    def num_chunks(self) -> int:
        """Chunks that the file must hold."""
        if self.outer * self.tokens * self.inner == 0:
            return 0
        return -(-self.tokens // self.chunk_tokens)


def decode_file(
    data: bytes, *, anchor_only: bool = False
) -> tuple[dict[str, str], dict[str, tuple[str, list[int], bytes]]]:
    """Metadata and {name: (dtype, shape, bytes in C order)}, in the order of the head.

    anchor_only: as one would who stopped before the first RESIDUAL section.
    """
    head, sections_offset = read_head(data)
    tensors = [parse_tensor(entry, head["codecs"]) for entry in head["tensors"]]
    sections = arrange(tensors, read_sections(data, sections_offset))
    decoded = {}
    for number, tensor in enumerate(tensors):
        chunks = [
            decode_chunk(tensor, c, sections[number, c], anchor_only)
            for c in range(tensor.num_chunks)
        ]
        decoded[tensor.name] = (tensor.dtype, tensor.shape, join_chunks(tensor, chunks))
    return head["metadata"], decoded


def arrange(tensors: list[Tensor], sections: list[Section]) -> dict[tuple[int, int], ChunkSections]:
    """The sections of every chunk, which must be in order; container.md, "Section kinds"."""
    rest = [*sections]

    def take(kinds: tuple[int, ...], tensor: int, chunk: int) -> Section | None:
        found = rest and rest[0].kind in kinds and (rest[0].tensor, rest[0].chunk)
        return rest.pop(0) if found == (tensor, chunk) else None

    chunks = {}
    for number, tensor in enumerate(tensors):
        name = tensor.codec["name"]
        book = None
        if tensor.num_chunks and has_codebook(tensor.codec):
            book = take((CODEBOOK,), number, 0)
        encoded = ANCHOR if name in PROGRESSIVE else ENCODED
        for c in range(tensor.num_chunks):
            section = take((RAW, encoded), number, c)
            require(section is not None, f"chunk {c} of tensor {number} in its place")
            assert section is not None
            chunks[number, c] = ChunkSections(section, book, None)
    for (number, c), of_chunk in chunks.items():
        if of_chunk.main.kind == ANCHOR:
            residual = take((RESIDUAL,), number, c)
            require(residual is not None, f"residual {c} of tensor {number} in its place")
            chunks[number, c] = ChunkSections(of_chunk.main, None, residual)
    require(not rest, "no section but those of the tensors")
    return chunks


def has_codebook(codec: dict[str, Any]) -> bool:
    """Whether a tensor of this codec may have a CODEBOOK section."""
    if codec["name"] == "pnmix":
        return spec_pnmix.has_codebook(codec)
    return codec["name"] in WITH_CODEBOOK


def safetensors_bytes(
    metadata: dict[str, str], tensors: dict[str, tuple[str, list[int], bytes]]
) -> bytes:
    """The safetensors file that container.md ("Head") says comes back."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape, raw) in tensors.items():
        end = offset + len(raw)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(align(len(text), 8))
    return struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values())


def read_head(data: bytes) -> tuple[dict[str, Any], int]:
    """The head as JSON and where it ends; container.md, "Prelude"."""
    require(data[:8] == MAGIC, "magic")
    _, _, major, minor, features, head_length, head_crc = struct.unpack_from("<4HQQI", data, 8)
    require(data[36:60] == bytes(24), "reserved bytes of the prelude")
    require(struct.unpack_from("<I", data, 60)[0] == zlib.crc32(data[:60]), "CRC of the prelude")
    require((major, minor) <= READER_VERSION, "lowest reader version")
    require(features == 0, "no feature bit is defined")
    raw = data[64 : 64 + head_length]
    require(len(raw) == head_length and zlib.crc32(raw) == head_crc, "CRC of the head")
    head: dict[str, Any] = json.loads(raw.decode("utf-8"))
    return head, 64 + head_length


def read_sections(data: bytes, position: int) -> list[Section]:
    """All sections but the index, which must agree with them and with the trailer."""
    sections = [read_section(data, position)]
    while sections[-1].kind != INDEX:
        last = sections[-1]
        sections.append(read_section(data, last.payload_offset + len(last.payload)))
    index = sections.pop()
    entries = b"".join(
        struct.pack(
            "<QQIIIHH",
            s.payload_offset,
            len(s.payload),
            zlib.crc32(s.payload),
            s.tensor,
            s.chunk,
            s.kind,
            0,
        )
        for s in sections
    )
    require(index.payload == entries, "index lists the sections")
    require((index.tensor, index.chunk) == (0, 0), "tensor and chunk number of the index")
    end = index.payload_offset + len(entries)
    trailer_offset = align(end, 64)
    require(not any(data[end:trailer_offset]), "zeros before the trailer")
    head_crc = struct.unpack_from("<I", data, 32)[0]
    fields = (index.payload_offset, len(entries), zlib.crc32(entries), len(sections))
    trailer = struct.pack("<QQIIQI", *fields, trailer_offset + 64, head_crc)
    trailer += bytes(16) + END_MAGIC
    trailer += struct.pack("<I", zlib.crc32(trailer))
    require(data[trailer_offset:] == trailer, "trailer")
    return sections


def read_section(data: bytes, position: int) -> Section:
    """The section that follows after `position` bytes."""
    payload_offset = align(position + 32, 64)
    require(not any(data[position : payload_offset - 32]), "zeros before the frame")
    frame = data[payload_offset - 32 : payload_offset]
    kind, reserved, tensor, chunk, length, crc, frame_crc, mark = struct.unpack("<HHIIQII4s", frame)
    require(mark == b"SECT" and reserved == 0, "frame")
    require(zlib.crc32(frame[:24]) == frame_crc, "CRC of the frame")
    payload = data[payload_offset : payload_offset + length]
    require(len(payload) == length and zlib.crc32(payload) == crc, "CRC of the payload")
    known = (CODEBOOK, RAW, ENCODED, ANCHOR, RESIDUAL, INDEX)
    require(kind in known, "kind of section")
    return Section(kind, tensor, chunk, payload_offset, payload)


def parse_tensor(entry: dict[str, Any], codecs: list[dict[str, Any]]) -> Tensor:
    """The [outer, tokens, inner] view of a tensor of the head."""
    shape, axis = entry["shape"], entry["token_axis"]
    if axis is None:
        outer, tokens, inner = 1, math.prod(shape), 1
    else:
        outer, tokens, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    codec = codecs[entry["codec"]]
    if codec["name"] in ("lynx", "pnmix"):
        require(entry["dtype"] == "BF16" and axis is not None, "BF16 with a token axis")
    return Tensor(
        entry["name"], entry["dtype"], shape, outer, tokens, inner, entry["chunk_tokens"], codec
    )


def decode_chunk(tensor: Tensor, chunk: int, of_chunk: ChunkSections, anchor_only: bool) -> bytes:
    """The chunk's elements as bytes, [outer, n, inner] in C order."""
    first = chunk * tensor.chunk_tokens
    n = min(first + tensor.chunk_tokens, tensor.tokens) - first
    itemsize = ITEM_NBYTES[tensor.dtype]
    num_elements = tensor.outer * n * tensor.inner
    section, book, residual = of_chunk.main, of_chunk.book, of_chunk.residual
    if section.kind == RAW:
        require(len(section.payload) == num_elements * itemsize, "length of a RAW payload")
        return section.payload
    name = tensor.codec["name"]
    if name == "zstd":
        return decode_zstd(section.payload, num_elements, itemsize, tensor.dtype)
    if name == "lynx":
        assert residual is not None
        second = None if anchor_only else residual.payload
        return spec_lynx.decode_lynx(section.payload, second, tensor, chunk, n)
    if name == "pnmix":
        of_keys = None if book is None else book.payload
        return spec_pnmix.decode_pnmix(section.payload, of_keys, tensor, chunk, n)
    require(book is not None, "an encoded chunk has a codebook")
    assert book is not None
    if name == "splitzip":
        return decode_splitzip(section.payload, book.payload, num_elements)
    require(name == "gaac", f"codec {name}")
    shape = (tensor.outer, n, tensor.inner)
    return decode_gaac(section.payload, book.payload, shape, tensor.codec)


def join_chunks(tensor: Tensor, chunks: list[bytes]) -> bytes:
    """The tensor's bytes from those of its chunks."""
    itemsize = ITEM_NBYTES[tensor.dtype]
    parts = []
    for o in range(tensor.outer):
        for chunk in chunks:
            part = len(chunk) // tensor.outer
            parts.append(chunk[o * part : (o + 1) * part])
    joined = b"".join(parts)
    require(len(joined) == math.prod(tensor.shape) * itemsize, "bytes of the tensor")
    return joined


def split_streams(payload: bytes, lengths: list[int]) -> list[bytes]:
    """Streams of these lengths and, last, the rest; container.md, "Streams inside a payload"."""
    streams, position = [], 0
    for length in lengths:
        start = align(position, 16)
        require(not any(payload[position:start]), "zeros between streams")
        position = start + length
        require(position <= len(payload), "stream inside the payload")
        streams.append(payload[start:position])
    start = align(position, 16)
    require(start <= len(payload) and not any(payload[position:start]), "zeros between streams")
    return [*streams, payload[start:]]


def bf16_bytes(sign_mantissa: bytes, exponents: list[int]) -> bytes:
    """BF16 elements from sign-and-mantissa bytes and exponents."""
    values = [
        (sm >> 7) << 15 | exponent << 7 | (sm & 127)
        for sm, exponent in zip(sign_mantissa, exponents, strict=True)
    ]
    return struct.pack(f"<{len(values)}H", *values)


def decode_zstd(payload: bytes, n: int, itemsize: int, dtype: str) -> bytes:
    """zstd.md."""
    words = struct.unpack_from(f"<{itemsize}I", payload)
    planes, position = [], 4 * itemsize
    for word in words:
        stored = payload[position : position + (word & 0x7FFFFFFF)]
        position += word & 0x7FFFFFFF
        if word >> 31:
            planes.append(stored)
        else:
            require(zstandard.frame_content_size(stored) == n, "content size of a plane")
            planes.append(zstandard.ZstdDecompressor().decompress(stored))
        require(len(planes[-1]) == n, "size of a plane")
    require(position == len(payload), "payload ends with the last plane")
    bits = 8 * itemsize
    elements = []
    for column in zip(*planes, strict=True):
        element = int.from_bytes(column, "big")
        if dtype in ("F16", "BF16", "F32", "F64"):
            element = element >> 1 | (element & 1) << (bits - 1)
        elements.append(element.to_bytes(itemsize, "little"))
    return b"".join(elements)


def decode_splitzip(payload: bytes, codebook: bytes, n: int) -> bytes:
    """splitzip.md."""
    require(len(codebook) == 16 and sorted(set(codebook)) == list(codebook), "codebook")
    blocks = -(-n // 8192)
    sign_mantissa, codes, rest = split_streams(payload, [n, -(-n // 2)])
    offsets = struct.unpack_from(f"<{blocks + 1}I", rest)
    num_escapes = offsets[-1]
    lengths = [n, -(-n // 2), 4 * (blocks + 1), 2 * num_escapes]
    positions_raw, escape_exponents = split_streams(payload, lengths)[3:]
    require(len(escape_exponents) == num_escapes, "length of the payload")
    positions = struct.unpack(f"<{num_escapes}H", positions_raw)
    exponents = [codebook[codes[i // 2] >> 4 * (i % 2) & 15] for i in range(n)]
    require(offsets[0] == 0 and list(offsets) == sorted(offsets), "offsets")
    for block in range(blocks):
        previous = -1
        for e in range(offsets[block], offsets[block + 1]):
            require(previous < positions[e], "positions ascend")
            require(positions[e] < min(8192, n - 8192 * block), "position inside its block")
            previous = positions[e]
            exponents[8192 * block + positions[e]] = escape_exponents[e]
    return bf16_bytes(sign_mantissa, exponents)


def decode_gaac(
    payload: bytes, codebook: bytes, shape: tuple[int, int, int], config: dict[str, Any]
) -> bytes:
    """gaac.md."""
    outer, n, inner = shape
    windows, by_token = config["windows"], config["axis"] == "token"
    bases = parse_bases(codebook, windows, outer, inner)
    columns = inner if by_token else -(-inner // 8)
    tiles = outer * (-(-n // 8) if by_token else n)
    groups, tag_nbytes = tiles * columns, -(-columns // 8)
    block_tiles = max(1, 4096 // (8 * columns))
    lengths = [outer * n * inner, 2 * groups, 0 if 2 in windows else groups]
    lengths += [tiles * 2 * tag_nbytes, 4 * -(-tiles // block_tiles)]
    sign_mantissa, low, plane2, tags, offsets, escapes = split_streams(payload, lengths)
    exponents = [0] * (outer * n * inner)
    position = 0
    for tile in range(tiles):
        if tile % block_tiles == 0:
            offset = struct.unpack_from("<I", offsets, 4 * (tile // block_tiles))[0]
            require(offset == position, "offset is the sum of the sizes before it")
        tile_tags = parse_tags(tags[2 * tag_nbytes * tile :], columns, tag_nbytes)
        require(2 in windows or 0 not in tile_tags, "tag 0 without a 2-bit window")
        planes = [[0] * 8 for _ in range(columns)]
        if 2 not in windows:
            for column in range(columns):
                planes[column][2] = plane2[tile * columns + column]
        for column, p in escape_order(tile_tags, 2 in windows):
            require(position < len(escapes), "escapes shorter than the tags say")
            planes[column][p] = escapes[position]
            position += 1
        for column in range(columns):
            low_word = struct.unpack_from("<H", low, 2 * (tile * columns + column))[0]
            for row in range(8):
                if by_token:
                    o, k = divmod(tile, -(-n // 8))
                    token, channel = 8 * k + row, column
                else:
                    o, token = divmod(tile, n)
                    channel = row * columns + column
                if token >= n or channel >= inner:
                    continue
                code = low_word >> 2 * row & 3
                for p in range(2, 8):
                    code |= (planes[column][p] >> row & 1) << p
                tag = tile_tags[column]
                base = 0 if tag == 3 else bases[tag + 2][o][channel]
                exponents[(o * n + token) * inner + channel] = base + code
    require(position == len(escapes), "escapes longer than the tags say")
    return bf16_bytes(sign_mantissa, exponents)


def parse_bases(
    codebook: bytes, windows: list[int], outer: int, inner: int
) -> dict[int, list[list[int]]]:
    """{width: [outer][channel] base}; gaac.md, "Codebook"."""
    require(codebook[0] in (1, 2), "kind of codebook")
    channels = 1 if codebook[0] == 1 else inner
    require(len(codebook) == 1 + len(windows) * outer * channels, "length of the codebook")
    rest = iter(codebook[1:])
    bases = {}
    for width in windows:
        rows = [[next(rest) for _ in range(channels)] for _ in range(outer)]
        require(all(max(row) <= 256 - 2**width for row in rows), "base at most 256 - 2^width")
        bases[width] = rows if channels == inner else [row * inner for row in rows]
    return bases


def parse_tags(tags: bytes, columns: int, tag_nbytes: int) -> list[int]:
    """The tags of the first tile of `tags`."""
    low = int.from_bytes(tags[:tag_nbytes], "little")
    high = int.from_bytes(tags[tag_nbytes : 2 * tag_nbytes], "little")
    require(low >> columns == 0 and high >> columns == 0, "spare bits of the tags")
    return [low >> c & 1 | (high >> c & 1) << 1 for c in range(columns)]


def escape_order(tags: list[int], has_two_bit_window: bool) -> list[tuple[int, int]]:
    """(column, plane) of every escape byte of a tile, in stored order."""
    order = []
    if has_two_bit_window:
        order += [(column, 2) for column, tag in enumerate(tags) if tag >= 1]
    order += [(column, 3) for column, tag in enumerate(tags) if tag >= 2]
    order += [(column, p) for column, tag in enumerate(tags) if tag == 3 for p in (4, 5, 6, 7)]
    return order
