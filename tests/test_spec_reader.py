"""formats/spec/ is enough to write a decoder: spec_reader.py was, and reads what kvz writes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_capture
import spec_reader
from archive_builder import ENCODED, RAW, Archive, Section, head_of, tensor
from safetensors_file import read_tensors
from spec_reader import ANCHOR, CODEBOOK, RESIDUAL
from tiny_archive import ALL_READERS

import kvz
from kvz.formats.errors import InvalidField

CODECS = [
    ("gaac", {}),
    ("gaac", {"axis": "channel"}),
    ("gaac", {"windows": "3/4"}),
    ("gaac", {"windows": "3/4", "axis": "channel"}),
    ("splitzip", {}),
    ("zstd", {}),
    ("raw", {}),
]

LYNX_OPTIONS = {
    "default": {},
    "paper": {"preset": "paper"},
    "by token": {"grouping": "token"},
    "paper by token, another alpha": {"preset": "paper", "alpha": "255", "grouping": "token"},
    "short pages": {"page_tokens": "12", "group_tokens": "4", "exact_tokens": "0"},
    "exact beyond a group": {"page_tokens": "20", "group_tokens": "10", "exact_tokens": "11"},
}

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


@pytest.mark.parametrize("anchor_only", [False, True], ids=["whole", "anchors"])
@pytest.mark.parametrize("options", LYNX_OPTIONS.values(), ids=LYNX_OPTIONS.keys())
def test_second_reader_decodes_lynx_to_the_same_bits(
    tmp_path: Path, options: dict[str, str], anchor_only: bool
) -> None:
    kvz.compress(sample_capture.PATH, tmp_path / "c.kvz", "lynx", codec_options=options, threads=1)
    kvz.decompress(tmp_path / "c.kvz", tmp_path / "out", anchor_only=anchor_only, threads=1)
    data = (tmp_path / "c.kvz").read_bytes()
    sections = spec_reader.read_sections(data, spec_reader.read_head(data)[1])
    assert {ANCHOR, RESIDUAL} <= {section.kind for section in sections}
    _, decoded = spec_reader.decode_file(data, anchor_only=anchor_only)
    assert list(decoded.items()) == list(read_tensors(tmp_path / "out")[1].items())


FORMAT_0_2 = {"version": (0, 2), "reader_version": (0, 2)}
LEVELS = {
    "alpha": 1.0,
    "full": [540 * m for m in range(121)],
    "anchor": [8640 * a for a in range(8)],
}


def lynx(page: int, group: int, exact: int, grouping: str, companding: Any) -> dict[str, Any]:
    return {
        "name": "lynx",
        "page_tokens": page,
        "group_tokens": group,
        "exact_tokens": exact,
        "grouping": grouping,
        "companding": companding,
    }


def any_bf16(rng: np.random.Generator, count: int) -> bytes:
    """Every kind of number: +-0, subnormal, huge, infinite, NaN with a payload, and common ones."""
    special = [0, 0x8000, 1, 0x807F, 0x7F7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80]
    bits = np.where(
        rng.random(count) < 0.5, rng.choice(special, count), rng.integers(1 << 16, size=count)
    )
    return bits.astype("<u2").tobytes()


def any_lynx_chunk(
    rng: np.random.Generator, codec: dict[str, Any], outer: int, n: int, inner: int, exact: int
) -> tuple[bytes, bytes]:
    """Payloads of the right lengths with any contents: lynx.md, "Streams of an ANCHOR section"."""
    page, group = codec["page_tokens"], codec["group_tokens"]
    length, channels = (inner, n) if codec["grouping"] == "token" else (n, inner)
    pages, groups, half = -(-length // page), -(-length // group), -(-channels // 2)
    flags = [int(i % 3 == 1) for i in range(outer * pages)]
    stored = sum(
        min(page, length - page * (i % pages)) * channels for i, flag in enumerate(flags) if flag
    )
    parts = [
        any_bf16(rng, outer * exact * inner),
        any_bf16(rng, outer * pages * 2 * channels),
        rng.bytes(outer * groups * 2 * channels),
        bytes(flags),
        rng.bytes(outer * length * half),
        any_bf16(rng, stored),
    ]
    return streams(*(part.hex() for part in parts)), rng.bytes(outer * length * half)


def any_lynx_archive(codec: dict[str, Any]) -> Archive:
    """Tensor `t` [3, 70, 21] in chunks of 40 and 30 tokens: two ANCHOR, two RESIDUAL sections."""
    rng = np.random.default_rng(0)
    first = any_lynx_chunk(rng, codec, 3, 40, 21, codec["exact_tokens"])
    second = any_lynx_chunk(rng, codec, 3, 30, 21, 0)
    sections = [
        *(Section(ANCHOR, 0, c, anchor) for c, (anchor, _) in enumerate((first, second))),
        *(Section(RESIDUAL, 0, c, residual) for c, (_, residual) in enumerate((first, second))),
    ]
    entry = tensor("t", "BF16", [3, 70, 21], token_axis=1, chunk_tokens=40)
    return Archive(head_of([codec], [entry]), sections, prelude=FORMAT_0_2)


@pytest.mark.parametrize("anchor_only", [False, True], ids=["whole", "anchors"])
@pytest.mark.parametrize("companding", [None, LEVELS], ids=["linear", "companded"])
@pytest.mark.parametrize("grouping", ["channel", "token"])
def test_readers_agree_on_lynx_sections_that_no_encoder_writes(
    tmp_path: Path, grouping: str, companding: Any, anchor_only: bool
) -> None:
    path = tmp_path / "any.kvz"
    path.write_bytes(any_lynx_archive(lynx(16, 8, 17, grouping, companding)).to_bytes())
    _, decoded = spec_reader.decode_file(path.read_bytes(), anchor_only=anchor_only)
    ours = np.frombuffer(decoded["t"][2], "<u2").reshape(decoded["t"][1])
    with kvz.open(path) as archive:
        theirs = archive.read_tensor("t", anchor_only=anchor_only)
    np.testing.assert_array_equal(theirs.view(np.uint16), ours)


def _swap_anchors(sections: list[Section]) -> None:
    sections[0], sections[1] = sections[1], sections[0]


def _swap_residuals(sections: list[Section]) -> None:
    sections[2], sections[3] = sections[3], sections[2]


def _residual_before_last_anchor(sections: list[Section]) -> None:
    sections[1], sections[2] = sections[2], sections[1]


def _no_second_residual(sections: list[Section]) -> None:
    del sections[3]


def _residual_twice(sections: list[Section]) -> None:
    sections.append(sections[3])


def _residual_of_a_raw_chunk(sections: list[Section]) -> None:
    sections[1] = Section(RAW, 0, 1, bytes(3 * 30 * 21 * 2))


def _encoded_for_anchor(sections: list[Section]) -> None:
    sections[0].kind = ENCODED


def _codebook(sections: list[Section]) -> None:
    sections.insert(0, Section(CODEBOOK, 0, 0, b"\1"))


def _residual_short(sections: list[Section]) -> None:
    sections[3].payload = sections[3].payload[:-1]


def _anchor_long(sections: list[Section]) -> None:
    sections[0].payload += bytes(2)


def _flag_of_two(sections: list[Section]) -> None:
    payload = bytearray(sections[0].payload)
    # exact [3, 17, 21] u16 (2144), pages [3, 3, 2, 21] u16 (768), groups [3, 5, 2, 21] u8 (640)
    payload[2144 + 768 + 640] = 2
    sections[0].payload = bytes(payload)


@pytest.mark.parametrize(
    "change",
    [
        _swap_anchors,
        _swap_residuals,
        _residual_before_last_anchor,
        _no_second_residual,
        _residual_twice,
        _residual_of_a_raw_chunk,
        _encoded_for_anchor,
        _codebook,
        _residual_short,
        _anchor_long,
        _flag_of_two,
    ],
)
def test_readers_reject_the_same_progressive_archives(
    tmp_path: Path, change: Callable[[list[Section]], None]
) -> None:
    archive = any_lynx_archive(lynx(16, 8, 17, "channel", None))
    spec_reader.decode_file(archive.to_bytes())
    change(archive.sections)
    with pytest.raises(spec_reader.SpecViolation):
        spec_reader.decode_file(archive.to_bytes())
    (tmp_path / "bad.kvz").write_bytes(archive.to_bytes())
    for read in ALL_READERS:
        with pytest.raises(InvalidField):
            read(tmp_path / "bad.kvz")


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


# [1, 3, 3], pages of two tokens, groups of one. Token 0 is exact, token 2 a raw page; token 1:
#   channel 0   g 0, S 1, offset 64, step 128, codes below
#   channel 1   g 1, S 0, whatever offset, step and codes are
#   channel 2   g -2, S 4, offset 128, step 0: -2 + 4 * 128 / 256 = 0
def lynx_example(anchor_code: str, residual_code: str) -> list[Section]:
    anchor = streams(
        "80 3F FF FF 00 80",
        "00 00 80 3F 00 C0  80 3F 00 00 80 40" + 12 * "00",
        6 * "00" + "40 05 80  80 07 00" + 6 * "00",
        "00 01",
        f"00 00  F{anchor_code} 03  00 00",
        "C1 7F 01 00 80 BF",
    )
    residual = bytes.fromhex(f"00 00  A{residual_code} 05  00 00")
    return [Section(ANCHOR, 0, 0, anchor), Section(RESIDUAL, 0, 0, residual)]


def lynx_values(first: int) -> bytes:
    exact, coded = (0x3F80, 0xFFFF, 0x8000), (first, 0x3F80, 0)
    return struct.pack("<9H", *exact, *coded, 0x7FC1, 1, 0xBF80)


@pytest.mark.parametrize(
    ("companding", "codes", "whole", "coarse"),
    [
        # code 128: (64 + 128 * 128 / 256) / 256 = 0.5
        # anchor 8: (64 + 128 * 135 / 256) / 256 = 0.513671875, half way from 3F03 to 3F04
        (None, "80", 0x3F00, 0x3F04),
        # code 14 is magnitude 1, negative; m = 16 + 9 - 7 = 18
        # (64 - 128 * 9720 / 65536) / 256 = 0.175842, next to 3E34 = 0.175781
        # (64 - 128 * 8640 / 65536) / 256 = 0.184082, half way from 3E3C to 3E3D
        (LEVELS, "E9", 0x3E34, 0x3E3C),
    ],
    ids=["linear", "companded"],
)
def test_lynx_example_worked_by_hand(
    tmp_path: Path, companding: Any, codes: str, whole: int, coarse: int
) -> None:
    entry = tensor("t", "BF16", [1, 3, 3], token_axis=1)
    head = head_of([lynx(2, 1, 1, "channel", companding)], [entry])
    archive = Archive(head, lynx_example(*codes), prelude=FORMAT_0_2)
    path = tmp_path / "example.kvz"
    path.write_bytes(archive.to_bytes())
    for anchor_only, first in ((False, whole), (True, coarse)):
        _, decoded = spec_reader.decode_file(path.read_bytes(), anchor_only=anchor_only)
        assert decoded["t"][2] == lynx_values(first)
        with kvz.open(path) as opened:
            theirs = opened.read_tensor("t", anchor_only=anchor_only)
        assert theirs.tobytes() == lynx_values(first)
