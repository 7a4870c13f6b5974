"""formats/spec/ is enough to write a decoder: spec_reader.py was, and reads what kvz writes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import sample_capture
import spec_reader
from archive_builder import ENCODED, Archive, Section, head_of, tensor

import kvz

CODECS = [
    ("gaac", {}),
    ("gaac", {"axis": "channel"}),
    ("gaac", {"windows": "3/4"}),
    ("gaac", {"windows": "3/4", "axis": "channel"}),
    ("splitzip", {}),
    ("zstd", {}),
    ("raw", {}),
]

CONTAINER_HEAD = (
    b'{"writer":"kvz 0.1.0.dev0","metadata":{},"codecs":[{"name":"raw"}],"tensors":[{"name":"t",'
    b'"dtype":"U8","shape":[5],"token_axis":null,"chunk_tokens":1048576,"codec":0}]}'
)
# container.md, "Worked example"
CONTAINER_EXAMPLE = (
    bytes.fromhex(
        "89 4B 56 5A 0D 0A 1A 0A  00 00 01 00  00 00 01 00  00 00 00 00 00 00 00 00"
        "A8 00 00 00 00 00 00 00  09 06 CD 65" + 24 * "00" + "83 71 31 AB"
    )
    + CONTAINER_HEAD
    + bytes(56)
    + bytes.fromhex(
        "02 00  00 00  00 00 00 00  00 00 00 00  05 00 00 00 00 00 00 00"
        "F4 99 0B 47  48 7E D3 12  53 45 43 54"
        "01 02 03 04 05"
        + 27
        * "00"
        + "FF FF  00 00  00 00 00 00  00 00 00 00  20 00 00 00 00 00 00 00"
        "C4 F3 59 84  79 FB F5 06  53 45 43 54"
        "40 01 00 00 00 00 00 00  05 00 00 00 00 00 00 00  F4 99 0B 47"
        "00 00 00 00  00 00 00 00  02 00  00 00" + 32 * "00" + "80 01 00 00 00 00 00 00"
        "20 00 00 00 00 00 00 00  C4 F3 59 84  01 00 00 00"
        "00 02 00 00 00 00 00 00  09 06 CD 65" + 16 * "00" + "4B 56 5A 2D 45 4E 44 0A  4D B8 13 2C"
    )
)


def streams(*parts: str) -> bytes:
    """Streams given in hex, each at a multiple of 16."""
    payload = b""
    for part in parts:
        payload += bytes(-len(payload) % 16) + bytes.fromhex(part)
    return payload


# gaac.md, splitzip.md and zstd.md, "Worked example"
GAAC_CODEBOOK = bytes.fromhex("02 7C 7C 7A 7A 70 70")
GAAC_PAYLOAD = streams(
    "00 00 00 00 80 00 00 00 00 00 00 00 00 00 00 00",
    "1B FF 59 55",
    "",
    "02 00",
    "00 00 00 00",
    "FF",
)
GAAC_VALUES = struct.pack(
    "<16H", 0x3F80, 0x3F80, 0x3F00, 0x4000, 0xBE80, 0x3F80, 0x3E00, 0x3F80, *[0x3F80] * 8
)
SPLITZIP_CODEBOOK = bytes(range(0x70, 0x80))
SPLITZIP_PAYLOAD = streams("00 80 00", "0F 0E", "00 00 00 00 01 00 00 00", "01 00", "80")
SPLITZIP_VALUES = struct.pack("<3H", 0x3F80, 0xC000, 0x3F00)
ZSTD_PAYLOAD = bytes.fromhex("02 00 00 80  02 00 00 80  7F 7F  00 01")
ZSTD_VALUES = struct.pack("<2H", 0x3F80, 0xBF80)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "slice.safetensors"
    return sample_capture.cut(path, layers=2, tokens=19)


@pytest.mark.parametrize(("codec", "options"), CODECS)
def test_second_reader_restores_the_source_bytes(
    capture: Path, tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    kvz.compress(capture, tmp_path / "c.kvz", codec, codec_options=options, threads=1)
    decoded = spec_reader.decode_file((tmp_path / "c.kvz").read_bytes())
    assert spec_reader.safetensors_bytes(*decoded) == capture.read_bytes()


@pytest.mark.parametrize(("codec", "options"), CODECS)
def test_real_slice_is_stored_encoded_unless_the_codec_is_raw(
    capture: Path, tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    kvz.compress(capture, tmp_path / "c.kvz", codec, codec_options=options, threads=1)
    data = (tmp_path / "c.kvz").read_bytes()
    sections = spec_reader.read_sections(data, spec_reader.read_head(data)[1])
    kinds = {section.kind for section in sections} - {spec_reader.CODEBOOK}
    assert kinds == {spec_reader.RAW if codec == "raw" else spec_reader.ENCODED}


def test_container_example_is_complete() -> None:
    assert len(CONTAINER_EXAMPLE) == 512
    assert spec_reader.decode_file(CONTAINER_EXAMPLE) == ({}, {"t": ("U8", [5], b"\1\2\3\4\5")})


def test_container_example_is_what_kvz_reads(tmp_path: Path) -> None:
    path = tmp_path / "example.kvz"
    path.write_bytes(CONTAINER_EXAMPLE)
    kvz.verify(path, threads=1)
    with kvz.open(path) as archive:
        assert archive.read_tensor("t").tolist() == [1, 2, 3, 4, 5]


def test_builder_of_the_tests_gives_the_container_example() -> None:
    archive = Archive({}, [Section(2, 0, 0, b"\1\2\3\4\5")], CONTAINER_HEAD)
    assert archive.to_bytes() == CONTAINER_EXAMPLE


EXAMPLES = [
    (
        {"name": "gaac", "windows": [2, 3, 4], "axis": "token"},
        tensor("t", "BF16", [1, 8, 2], token_axis=1),
        GAAC_CODEBOOK,
        GAAC_PAYLOAD,
        GAAC_VALUES,
    ),
    (
        {"name": "splitzip"},
        tensor("t", "BF16", [3]),
        SPLITZIP_CODEBOOK,
        SPLITZIP_PAYLOAD,
        SPLITZIP_VALUES,
    ),
    ({"name": "zstd", "level": 3}, tensor("t", "BF16", [2]), b"", ZSTD_PAYLOAD, ZSTD_VALUES),
]


@pytest.mark.parametrize(("codec", "entry", "codebook", "payload", "values"), EXAMPLES)
def test_codec_examples_decode_as_the_pages_say(
    tmp_path: Path,
    codec: dict[str, Any],
    entry: dict[str, Any],
    codebook: bytes,
    payload: bytes,
    values: bytes,
) -> None:
    sections = [Section(1, 0, 0, codebook)] if codebook else []
    archive = Archive(head_of([codec], [entry]), [*sections, Section(ENCODED, 0, 0, payload)])
    path = tmp_path / "example.kvz"
    path.write_bytes(archive.to_bytes())
    assert spec_reader.decode_file(path.read_bytes())[1]["t"][2] == values
    kvz.verify(path, threads=1)
    with kvz.open(path) as opened:
        assert opened.read_tensor("t").tobytes() == values


def test_example_payloads_have_the_lengths_that_the_pages_give() -> None:
    assert (len(GAAC_PAYLOAD), len(SPLITZIP_PAYLOAD), len(ZSTD_PAYLOAD)) == (65, 65, 12)
