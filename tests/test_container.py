"""Every rule of formats/spec/container.md that a reader enforces, broken one at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from archive_builder import CODEBOOK, ENCODED, RAW, Archive, Section, dump, head_of, tensor
from tiny_archive import (
    GAAC,
    SEQUENTIAL,
    VALUES,
    assert_rejected,
    read_at_random,
    read_from_pipe,
    tiny,
    verify,
)

import kvz
from kvz.formats.errors import (
    ChecksumMismatch,
    InvalidField,
    KvzError,
    LimitExceeded,
    NotKvzFile,
    TruncatedFile,
    UnknownCodec,
    UnsupportedFeature,
    UnsupportedVersion,
)

Break = Callable[[Archive], None]
Rule = tuple[str, Break, type[KvzError], str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.kvz"


def test_unbroken_archive_decodes_to_the_stated_values(path: Path) -> None:
    path.write_bytes(tiny().to_bytes())
    assert read_at_random(path) == VALUES
    report = kvz.verify(path, threads=1)
    assert (report.num_tensors, report.num_sections) == (5, 7)
    assert report.nbytes == path.stat().st_size


def test_pipe_gives_the_same_safetensors_file_as_random_access(path: Path) -> None:
    path.write_bytes(tiny().to_bytes())
    read_from_pipe(path)
    kvz.decompress(path, path.with_suffix(".safetensors"), threads=1)
    assert path.with_suffix(".out").read_bytes() == path.with_suffix(".safetensors").read_bytes()


def test_archive_without_tensors_is_valid(path: Path) -> None:
    path.write_bytes(Archive(head_of([], []), []).to_bytes())
    assert kvz.verify(path, threads=1).num_tensors == 0
    assert read_at_random(path) == {}


def test_newer_writer_with_an_old_reader_version_is_read(path: Path) -> None:
    archive = tiny()
    archive.prelude = {"version": (9, 9)}
    path.write_bytes(archive.to_bytes())
    assert read_at_random(path) == VALUES
    verify(path)


def test_unknown_keys_of_the_head_are_ignored(path: Path) -> None:
    archive = tiny()
    archive.head["later"] = {"a": 1}
    archive.head["tensors"][0]["later"] = [1]
    path.write_bytes(archive.to_bytes())
    assert read_at_random(path) == VALUES
    verify(path)


def prelude(**fields: Any) -> Break:
    def apply(archive: Archive) -> None:
        archive.prelude = fields

    return apply


def trailer(**fields: Any) -> Break:
    def apply(archive: Archive) -> None:
        archive.trailer = fields

    return apply


PRELUDE_RULES: list[Rule] = [
    ("magic", prelude(magic=b"PK\3\4\0\0\0\0"), NotKvzFile, "not a kvz file"),
    ("text", prelude(magic=b"\x89KVZ\n\x1a\n\0"), NotKvzFile, "text-mode transfer"),
    ("crc", prelude(crc=0), ChecksumMismatch, "the prelude"),
    ("major", prelude(reader_version=(1, 0)), UnsupportedVersion, "reader of format 1.0"),
    ("minor", prelude(reader_version=(0, 3)), UnsupportedVersion, "reads up to 0.2"),
    ("feature", prelude(features=1 << 63), UnsupportedFeature, "0x8000000000000000"),
    ("reserved", prelude(reserved=bytes(23) + b"\1"), InvalidField, "reserved bytes 36..60"),
    ("head cap", prelude(head_length=(64 << 20) + 1), LimitExceeded, "exceeds 67108864"),
    ("head crc", prelude(head_crc=1), ChecksumMismatch, "the head"),
]


@pytest.mark.parametrize(
    ("name", "break_it", "error", "message"), PRELUDE_RULES, ids=[rule[0] for rule in PRELUDE_RULES]
)
def test_rule_of_the_prelude(
    path: Path, name: str, break_it: Break, error: type[KvzError], message: str
) -> None:
    archive = tiny()
    break_it(archive)
    assert_rejected(path, archive, error, message)


def test_head_length_beyond_the_file_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.prelude = {"head_length": 1 << 20}
    assert_rejected(path, archive, TruncatedFile, "")


HEAD_BYTES: list[tuple[bytes, str]] = [
    (b"", "not UTF-8 JSON"),
    (b"{", "not UTF-8 JSON"),
    (b"\xff", "not UTF-8 JSON"),
    (b"[" * 100_000, "not UTF-8 JSON"),
    (b"[]", "head in the head must be an object"),
    (b"9" * 5000, "not UTF-8 JSON"),
    (b"{}", "'codecs' must be list"),
    (b'{"codecs":[],"tensors":{},"metadata":{},"writer":""}', "'tensors' must be list"),
    (b'{"codecs":[1],"tensors":[],"metadata":{},"writer":""}', "codec in the head must be an obj"),
    (b'{"codecs":[{}],"tensors":[],"metadata":{},"writer":""}', "'name' must be str"),
    (b'{"codecs":[],"tensors":[],"metadata":[],"writer":""}', "'metadata' must be dict"),
    (b'{"codecs":[],"tensors":[],"metadata":{"a":1},"writer":""}', "strings to strings"),
    (b'{"codecs":[],"tensors":[],"metadata":{},"writer":1}', "'writer' must be str"),
    (b'{"codecs":[],"tensors":[],"metadata":{"a":"\\ud800"},"writer":""}', "surrogate"),
]


@pytest.mark.parametrize(("head", "message"), HEAD_BYTES)
def test_head_of_the_wrong_form_is_rejected(path: Path, head: bytes, message: str) -> None:
    assert_rejected(path, Archive({}, [], head), InvalidField, message)


TENSOR_RULES: list[tuple[dict[str, Any], type[KvzError], str]] = [
    ({"name": 1}, InvalidField, "'name' must be str"),
    ({"name": "n" * 1025}, LimitExceeded, "1024"),
    ({"name": "s"}, InvalidField, "two tensors"),
    ({"name": "\ud800"}, InvalidField, "surrogate"),
    ({"name": "__metadata__"}, InvalidField, "__metadata__"),
    ({"dtype": "F4"}, InvalidField, "dtype 'F4' is not known"),
    ({"dtype": None}, InvalidField, "'dtype' must be str"),
    ({"shape": "18"}, InvalidField, "'shape' must be list"),
    ({"shape": [1, 8.0, 2]}, InvalidField, "list of integers"),
    ({"shape": [1, True, 2]}, InvalidField, "list of integers"),
    ({"shape": [1, -8, 2]}, InvalidField, "out of range"),
    ({"shape": [1] * 9}, LimitExceeded, "rank exceeds 1024 / 8"),
    ({"shape": [1 << 48, 8, 2]}, LimitExceeded, f"exceed {1 << 48}"),
    ({"shape": [0, 1 << 40, 1 << 40]}, LimitExceeded, f"exceed {1 << 48}"),
    ({"shape": [(1 << 48) + 1]}, InvalidField, "out of range"),
    ({"token_axis": 3}, InvalidField, "token axis 3 of rank 3"),
    ({"token_axis": -1}, InvalidField, "token axis -1"),
    ({"token_axis": "1"}, InvalidField, "'token_axis' must be int"),
    ({"chunk_tokens": 0}, InvalidField, "chunk of 0 tokens"),
    ({"chunk_tokens": 1 << 40}, InvalidField, "chunk of"),
    ({"chunk_tokens": None}, InvalidField, "'chunk_tokens' must be int"),
    ({"codec": 4}, InvalidField, "codec 4 of 4"),
    ({"codec": -1}, InvalidField, "codec -1 of 4"),
    ({"codec": True}, InvalidField, "'codec' must be int"),
    (
        {"shape": [1, 1 << 28, 1], "chunk_tokens": 1 << 28},
        LimitExceeded,
        f"exceed {256 << 20}",
    ),
]


@pytest.mark.parametrize(("fields", "error", "message"), TENSOR_RULES)
def test_rule_of_a_tensor_in_the_head(
    path: Path, fields: dict[str, Any], error: type[KvzError], message: str
) -> None:
    archive = tiny()
    archive.head["tensors"][0].update(fields)
    archive.head_bytes = json.dumps(archive.head).encode()
    assert_rejected(path, archive, error, message)


def test_field_missing_from_a_tensor_is_rejected(path: Path) -> None:
    for key in ("name", "dtype", "shape", "chunk_tokens", "codec"):
        archive = tiny()
        del archive.head["tensors"][0][key]
        assert_rejected(path, archive, InvalidField, f"field {key!r}")


def test_codec_that_is_not_known_is_rejected_by_name(path: Path) -> None:
    archive = tiny()
    archive.head["codecs"][0]["name"] = "brotli"
    assert_rejected(path, archive, UnknownCodec, "codec 'brotli' is not known")


CODEC_RULES: list[tuple[int, dict[str, Any], str]] = [
    (0, {"windows": [3, 2]}, "windows must be one of"),
    (0, {"windows": [2.0, 3, 4]}, "windows must be integers"),
    (0, {"windows": "2/3/4"}, "needs windows and axis"),
    (0, {"axis": "head"}, "axis must be one of"),
    (0, {"axis": ["token"]}, "axis must be one of"),
    (0, {"level": 3}, "needs windows and axis"),
    (1, {"level": 3}, "splitzip config must be empty"),
    (2, {"level": 0}, "level must be 1..22"),
    (2, {"level": "3"}, "level must be 1..22"),
    (2, {"window": 3}, "zstd config needs level"),
]


@pytest.mark.parametrize(("codec", "fields", "message"), CODEC_RULES)
def test_codec_configuration_that_its_page_does_not_know_is_rejected(
    path: Path, codec: int, fields: dict[str, Any], message: str
) -> None:
    archive = tiny()
    archive.head["codecs"][codec] = {**archive.head["codecs"][codec], **fields}
    assert_rejected(path, archive, InvalidField, message)


def test_codec_configuration_without_a_required_key_is_rejected(path: Path) -> None:
    for codec, key in [(0, "windows"), (0, "axis"), (2, "level")]:
        archive = tiny()
        fields = archive.head["codecs"][codec]
        archive.head["codecs"][codec] = {k: v for k, v in fields.items() if k != key}
        assert_rejected(path, archive, InvalidField, "config needs")


@pytest.mark.parametrize(
    ("codec", "entry"),
    [
        (GAAC, tensor("t", "U8", [1, 8, 32], token_axis=1)),
        (GAAC, tensor("t", "I64", [1, 8, 32], token_axis=1)),
        (GAAC, tensor("t", "BF16", [1, 8, 32], chunk_tokens=256)),
        ({"name": "splitzip"}, tensor("t", "U8", [1, 8, 32], token_axis=1)),
        ({"name": "splitzip"}, tensor("t", "F32", [1, 8, 32], token_axis=1)),
    ],
)
def test_codec_of_a_tensor_that_it_cannot_hold_is_rejected(
    path: Path, codec: dict[str, Any], entry: dict[str, Any]
) -> None:
    # a kernel would write 16-bit elements into whatever the dtype allocates
    book = b"\1\0\0\0" if codec is GAAC else bytes(range(16))
    sections = [Section(CODEBOOK, 0, 0, book), Section(ENCODED, 0, 0, bytes(1000))]
    archive = Archive(head_of([codec], [entry]), sections)
    assert_rejected(path, archive, InvalidField, f"does not hold {entry['dtype']}")


# -- sections: their frames are read by the sequential readers only


def frame(number: int, **fields: Any) -> Break:
    def apply(archive: Archive) -> None:
        section = archive.sections[number] if number >= 0 else archive.index_section
        section.frame = fields

    return apply


FRAME_RULES: list[Rule] = [
    ("mark", frame(0, mark=b"SECX"), InvalidField, "does not end with its mark"),
    ("crc", frame(1, crc=5), ChecksumMismatch, "a section frame"),
    ("reserved", frame(1, reserved=1), InvalidField, "reserved field"),
    ("kind", frame(1, kind=6), InvalidField, "section kind 6 is not known"),
    ("kind 0", frame(1, kind=0), InvalidField, "section kind 0 is not known"),
    ("tensor", frame(1, tensor=5), InvalidField, "tensor 5, which does not exist"),
    ("chunk", frame(1, chunk=1), InvalidField, "chunk 1 of layers.0.key, which does not"),
    ("payload crc", frame(1, payload_crc=1), ChecksumMismatch, "chunk 0 of layers.0.key"),
    ("book crc", frame(0, payload_crc=1), ChecksumMismatch, "codebook of layers.0.key"),
    ("length", frame(6, length=1 << 20), TruncatedFile, "more bytes must come"),
    ("raw cap", frame(5, length=(256 << 20) + 1), LimitExceeded, "RAW section"),
    ("encoded cap", frame(1, length=(256 << 20) + 1), LimitExceeded, "ENCODED section"),
    ("book cap", frame(0, length=(64 << 20) + 1), LimitExceeded, "CODEBOOK section"),
    ("index cap", frame(-1, length=(512 << 20) + 1), LimitExceeded, "INDEX section"),
    ("index crc", frame(-1, payload_crc=1), ChecksumMismatch, "the index"),
    ("index tensor", frame(-1, tensor=1), InvalidField, "frame of the index names"),
    ("index chunk", frame(-1, chunk=1), InvalidField, "frame of the index names"),
]


@pytest.mark.parametrize(
    ("name", "break_it", "error", "message"), FRAME_RULES, ids=[rule[0] for rule in FRAME_RULES]
)
def test_rule_of_a_frame(
    path: Path, name: str, break_it: Break, error: type[KvzError], message: str
) -> None:
    archive = tiny()
    break_it(archive)
    assert_rejected(path, archive, error, message, SEQUENTIAL)


def test_bytes_between_sections_must_be_zero(path: Path) -> None:
    whole = tiny().to_bytes()
    broken = []
    for number in range(len(tiny().sections)):
        archive = tiny()
        archive.sections[number].gap = 1
        if archive.to_bytes() == whole:  # no bytes between
            continue
        broken.append(number)
        assert_rejected(path, archive, InvalidField, "is not zero", SEQUENTIAL)
    assert len(broken) >= 4


def test_bytes_before_the_trailer_must_be_zero(path: Path) -> None:
    archive = tiny()
    archive.trailer_gap = 1
    assert_rejected(path, archive, InvalidField, "before the trailer is not zero", SEQUENTIAL)


# -- which sections there are


def test_codebook_that_is_missing_is_rejected(path: Path) -> None:
    archive = tiny()
    del archive.sections[0]
    assert_rejected(path, archive, InvalidField, "'layers.0.key' has no codebook")


def test_second_codebook_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.sections.insert(1, Section(CODEBOOK, 0, 0, archive.sections[0].payload))
    assert_rejected(path, archive, InvalidField, "codebook of layers.0.key")


def test_codebook_after_the_chunks_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.sections[0], archive.sections[1] = archive.sections[1], archive.sections[0]
    assert_rejected(path, archive, InvalidField, "codebook")


def test_codebook_of_a_tensor_that_is_not_next_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.sections[1], archive.sections[2] = archive.sections[2], archive.sections[1]
    assert_rejected(path, archive, InvalidField, "")


def test_codebook_with_a_chunk_number_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.sections[0].chunk = 1
    assert_rejected(path, archive, InvalidField, "")


@pytest.mark.parametrize(("number", "at"), [(2, 4), (4, 5)])
def test_codebook_of_a_codec_without_one_is_rejected(path: Path, number: int, at: int) -> None:
    archive = tiny()
    archive.sections.insert(at, Section(CODEBOOK, number, 0, b"\1"))
    assert_rejected(path, archive, InvalidField, "codebook", SEQUENTIAL)


def test_codebook_of_a_tensor_without_elements_is_rejected(path: Path) -> None:
    # its dimensions may be huge, and a codebook is expanded to them
    archive = tiny()
    archive.head["tensors"][3] = tensor("e", "BF16", [1, 0, 1 << 46], token_axis=1, codec=0)
    archive.sections.insert(5, Section(CODEBOOK, 3, 0, b"\1\0\0\0"))
    assert_rejected(path, archive, InvalidField, "codebook of e")


def test_chunk_of_a_tensor_without_elements_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.sections.insert(5, Section(RAW, 3, 0, b""))
    assert_rejected(path, archive, InvalidField, "")


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (1, "codebook of s comes where chunk 0 of layers.0.key must be"),
        (3, "chunk 0 of z comes where chunk 0 of s must be"),
        (4, "chunk 0 of r comes where chunk 0 of z must be"),
        (5, "chunk 1 of r comes where chunk 0 of r must be"),
        (6, "the index lists 4 chunks, the head needs 5"),
    ],
)
def test_chunk_that_is_missing_is_rejected(path: Path, number: int, found: str) -> None:
    archive = tiny()
    del archive.sections[number]
    message = "the index lists 4 chunks, the head needs 5"
    assert_rejected(path, archive, InvalidField, message, [read_at_random])
    assert_rejected(path, archive, InvalidField, found, SEQUENTIAL)


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (1, "chunk 0 of layers.0.key comes where chunk 0 of s must be"),
        (6, "chunk 1 of r comes after the last section that the head needs"),
    ],
)
def test_chunk_that_comes_twice_is_rejected(path: Path, number: int, found: str) -> None:
    archive = tiny()
    archive.sections.insert(number, archive.sections[number])
    message = "the index lists 6 chunks, the head needs 5"
    assert_rejected(path, archive, InvalidField, message, [read_at_random])
    assert_rejected(path, archive, InvalidField, found, SEQUENTIAL)


def test_chunks_out_of_order_are_rejected(path: Path) -> None:
    archive = tiny()
    archive.sections[5], archive.sections[6] = archive.sections[6], archive.sections[5]
    assert_rejected(path, archive, InvalidField, "")


def test_raw_section_of_the_wrong_length_is_rejected(path: Path) -> None:
    for payload in (b"\1\2", b"\1\2\3\4"):
        archive = tiny()
        archive.sections[5].payload = payload
        message = f"chunk 0 of r: raw section has {len(payload)} bytes, must have 3"
        assert_rejected(path, archive, InvalidField, message)


def test_encoded_section_of_the_raw_codec_is_the_elements(path: Path) -> None:
    archive = tiny()
    archive.sections[5].kind = ENCODED
    path.write_bytes(archive.to_bytes())
    assert read_at_random(path) == VALUES
    archive.sections[5].payload = b"\1\2\3\4"
    assert_rejected(path, archive, InvalidField, "raw section has 4 bytes, must have 3")


def test_raw_section_of_any_codec_is_read(path: Path) -> None:
    archive = tiny()
    for number, name in [(1, "layers.0.key"), (3, "s"), (4, "z")]:
        archive.sections[number] = Section(RAW, archive.sections[number].tensor, 0, VALUES[name])
    path.write_bytes(archive.to_bytes())
    assert read_at_random(path) == VALUES
    verify(path)


# -- index and trailer


def entry(number: int, position: int, value: int) -> Break:
    def edit(entries: list[list[int]]) -> None:
        entries[number][position] = value

    def apply(archive: Archive) -> None:
        archive.edit_index = edit

    return apply


OFFSET, LENGTH, CRC, TENSOR, CHUNK, KIND, RESERVED = range(7)
INDEX_RULES: list[Rule] = [
    ("offset", entry(2, OFFSET, 64), InvalidField, "section 2 is listed at byte 64"),
    ("offset beyond", entry(6, OFFSET, (1 << 64) - 1), InvalidField, "starts after the index"),
    ("first offset", entry(0, OFFSET, 0), InvalidField, "section 0 is listed at byte 0"),
    ("length", entry(6, LENGTH, 1 << 20), InvalidField, "is listed at"),
    ("length cap", entry(6, LENGTH, (256 << 20) + 1), LimitExceeded, "exceeds 268435456"),
    ("book cap", entry(0, LENGTH, (64 << 20) + 1), LimitExceeded, "exceeds"),
    ("length wraps", entry(6, LENGTH, (1 << 64) - 1), LimitExceeded, "exceeds 268435456"),
    ("kind", entry(1, KIND, 9), InvalidField, "unknown section kind"),
    ("index kind", entry(1, KIND, 65535), InvalidField, "unknown section kind"),
    ("reserved", entry(1, RESERVED, 1), InvalidField, "reserved bit"),
]


@pytest.mark.parametrize(
    ("name", "break_it", "error", "message"), INDEX_RULES, ids=[rule[0] for rule in INDEX_RULES]
)
def test_rule_of_an_index_entry(
    path: Path, name: str, break_it: Break, error: type[KvzError], message: str
) -> None:
    archive = tiny()
    break_it(archive)
    assert_rejected(path, archive, error, message)


def test_index_that_names_a_tensor_beyond_the_head_is_rejected(path: Path) -> None:
    archive = tiny()
    entry(6, TENSOR, 5)(archive)
    assert_rejected(path, archive, InvalidField, "beyond the 5 in the head", [read_at_random])
    assert_rejected(path, archive, InvalidField, "differs from the sections", SEQUENTIAL)


@pytest.mark.parametrize(
    ("number", "position", "value"),
    [(6, CRC, 1), (6, CHUNK, 0), (5, CHUNK, 1), (1, KIND, RAW), (4, TENSOR, 1)],
)
def test_index_that_differs_from_the_sections_is_rejected(
    path: Path, number: int, position: int, value: int
) -> None:
    archive = tiny()
    entry(number, position, value)(archive)
    path.write_bytes(archive.to_bytes())
    with pytest.raises(KvzError):
        read_at_random(path)
    assert_rejected(path, archive, InvalidField, "differs from the sections", SEQUENTIAL)


def test_index_without_its_last_entry_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.edit_index = lambda entries: entries.pop()
    assert_rejected(path, archive, InvalidField, "section 6 is listed at")


TRAILER_RULES: list[Rule] = [
    ("magic", trailer(magic=b"KVZ-END "), TruncatedFile, "no trailer"),
    ("crc", trailer(crc=7), ChecksumMismatch, "the trailer"),
    ("file length", trailer(file_length=1), TruncatedFile, "trailer says 1 bytes"),
    ("reserved", trailer(reserved=b"\1" + bytes(15)), InvalidField, "reserved bytes"),
    ("count", trailer(count=6), InvalidField, "contradicts itself"),
    ("count cap", trailer(count=(1 << 24) + 1), LimitExceeded, "exceeds 16777216"),
    ("index length", trailer(index_length=7 * 32 + 1), InvalidField, "contradicts itself"),
    ("index offset", trailer(index_offset=64), InvalidField, "does not end at the trailer"),
    ("offset off", trailer(index_offset=1 << 63), InvalidField, "does not end at the trailer"),
    ("index crc", trailer(index_crc=3), ChecksumMismatch, "the index"),
]


@pytest.mark.parametrize(
    ("name", "break_it", "error", "message"), TRAILER_RULES, ids=[rule[0] for rule in TRAILER_RULES]
)
def test_rule_of_the_trailer(
    path: Path, name: str, break_it: Break, error: type[KvzError], message: str
) -> None:
    archive = tiny()
    break_it(archive)
    assert_rejected(path, archive, error, message)


def test_trailer_of_another_head_is_rejected(path: Path) -> None:
    archive = tiny()
    archive.trailer = {"head_crc": 1}
    path.write_bytes(archive.to_bytes())
    for read in (read_at_random, verify, read_from_pipe):
        with pytest.raises((ChecksumMismatch, InvalidField)):
            read(path)


def test_bytes_after_the_trailer_are_rejected(path: Path) -> None:
    assert_rejected(path, tiny().to_bytes() + b"\0", TruncatedFile, "", SEQUENTIAL)
    assert_rejected(
        path, tiny().to_bytes() + bytes(64), TruncatedFile, "no trailer", [read_at_random]
    )


def test_two_archives_in_one_file_are_rejected(path: Path) -> None:
    path.write_bytes(2 * tiny().to_bytes())
    for read in (read_at_random, verify, read_from_pipe):
        with pytest.raises(TruncatedFile):
            read(path)


def test_frame_is_packed_as_the_page_says() -> None:
    from kvz.formats.container import Frame
    from kvz.formats.ids import SectionKind

    packed = Frame(SectionKind.RAW, 3, 4, 5, 6).to_bytes()
    assert packed[:24] == struct.pack("<HHIIQI", 2, 0, 3, 4, 5, 6)
    assert packed[28:] == b"SECT"


def test_head_of_the_builder_is_what_kvz_writes(tmp_path: Path) -> None:
    from kvz.formats.head import Head

    head = tiny().head
    assert Head.from_bytes(dump(head)).to_bytes() == dump(head)
