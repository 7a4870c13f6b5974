"""formats/spec/ is enough to write a decoder: spec_reader.py was, and reads what kvz writes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_capture
import spec_pnmix
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

PNMIX_OPTIONS = {
    "default": {},
    "paper": {"preset": "paper", "group_tokens": "4"},
    "values of 2 bits": {"preset": "paper", "group_tokens": "8", "values": "2"},
    "values of 4 bits, pages": {
        "values": "4", "scales": "page", "group_tokens": "12", "page_tokens": "24",
        "sink_tokens": "4", "tail": "exact",
    },
    "values of 8 bits, wide codes": {
        "values": "8", "scales": "fp16", "group_tokens": "12", "sink_tokens": "5",
        "high_bits": "8", "low_bits": "3", "tail": "exact",
    },
    "none salient": {"salient": "0", "sink_tokens": "0", "values": "exact"},
    "all salient": {"salient": "1", "high_bits": "5", "low_bits": "2", "sink_tokens": "1"},
    "as many bits": {"high_bits": "2", "low_bits": "2", "sink_tokens": "1", "tail": "coded"},
    "by the keys alone": {"criterion": "k_norm", "salient": "0.3", "sink_tokens": "3"},
    "without pairs": {"criterion": "k_range", "group_tokens": "16", "sink_tokens": "3"},
}  # fmt: skip

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


@pytest.mark.parametrize("options", PNMIX_OPTIONS.values(), ids=PNMIX_OPTIONS.keys())
def test_second_reader_decodes_pnmix_to_the_same_bits(
    tmp_path: Path, options: dict[str, str]
) -> None:
    path = tmp_path / "c.kvz"
    kvz.compress(sample_capture.PATH, path, "pnmix", codec_options=options, threads=1)
    kvz.decompress(path, tmp_path / "out", threads=1)
    data = path.read_bytes()
    kinds: dict[str, set[int]] = {"key": set(), "value": set()}
    head, position = spec_reader.read_head(data)
    for section in spec_reader.read_sections(data, position):
        codec = head["codecs"][head["tensors"][section.tensor]["codec"]]
        if codec["name"] == "pnmix":
            kinds[codec["role"]].add(section.kind)
    has_coded_values = options.get("values", "exact") != "exact"
    assert kinds == {"key": {CODEBOOK, ENCODED}, "value": {ENCODED} if has_coded_values else set()}
    _, decoded = spec_reader.decode_file(data)
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


def pnmix_key(**fields: Any) -> dict[str, Any]:
    return {
        "name": "pnmix", "role": "key", "group_tokens": 12, "sink_tokens": 5, "tail": "exact",
        "levels": "best", "high_bits": 3, "low_bits": 1, "page_tokens": None, "pairing": "half",
        "rotary_dim": 20, "salient": 0.5, "criterion": "k_norm", "prefill_tokens": None, **fields,
    }  # fmt: skip


def pnmix_value(**fields: Any) -> dict[str, Any]:
    return {
        "name": "pnmix", "role": "value", "group_tokens": 12, "sink_tokens": 5, "tail": "exact",
        "levels": "best", "bits": 2, "group_channels": 8, **fields,
    }  # fmt: skip


def any_pnmix_mask(rng: np.random.Generator, codec: dict[str, Any]) -> bytes:
    """CODEBOOK of a tensor with outer 3, inner 21: pnmix.md, "Pairs and mask"."""
    salient = rng.random((3, 21 - codec["rotary_dim"] // 2)) < 0.5
    return np.packbits(salient, axis=1, bitorder="little").tobytes()


def any_pnmix_chunk(
    rng: np.random.Generator, codec: dict[str, Any], mask: bytes, start: int, n: int, tokens: int
) -> bytes:
    """A payload [3, n, 21] of the right lengths with any contents."""
    span = spec_pnmix.span_of(codec, start, n, tokens)
    group = codec["group_tokens"]
    flags = [int(i % 3 == 1) for i in range(3 * span.groups)]
    in_raw = [
        min(group, span.coded - group * (i % span.groups)) for i, flag in enumerate(flags) if flag
    ]
    parts = [any_bf16(rng, 3 * (span.first + span.last) * 21), bytes(flags)]
    if codec["role"] == "key":
        page, high, low = codec["page_tokens"], codec["high_bits"], codec["low_bits"]
        pages = 0 if page is None else -(-span.groups // (page // group))
        num_salient = int(spec_pnmix.salient_channels(mask, codec, 3, 21).sum())
        parts.append(any_bf16(rng, 3 * pages * 2 * 21))
        parts.append(rng.bytes(3 * span.groups * 2 * 21 * (2 if page is None else 1)))
        parts.append(rng.bytes(3 * span.octets * low * 21))
        parts.append(rng.bytes(span.octets * (high - low) * num_salient))
    else:
        parts.append(rng.bytes(3 * span.coded * 2 * -(-21 // codec["group_channels"]) * 2))
        parts.append(rng.bytes(3 * span.octets * codec["bits"] * 21))
    parts.append(any_bf16(rng, sum(in_raw) * 21))
    return streams(*(part.hex() for part in parts))


def any_pnmix_archive(codec: dict[str, Any], tokens: int = 70) -> Archive:
    """Tensor `t` [3, tokens, 21] in chunks of 40 tokens, all ENCODED."""
    rng = np.random.default_rng(0)
    sections, mask = [], b""
    if codec["role"] == "key":
        mask = any_pnmix_mask(rng, codec)
        sections.append(Section(CODEBOOK, 0, 0, mask))
    for c, start in enumerate(range(0, tokens, 40)):
        payload = any_pnmix_chunk(rng, codec, mask, start, min(40, tokens - start), tokens)
        sections.append(Section(ENCODED, 0, c, payload))
    entry = tensor("t", "BF16", [3, tokens, 21], token_axis=1, chunk_tokens=40)
    return Archive(head_of([codec], [entry]), sections, prelude=FORMAT_0_2)


ANY_PNMIX = {
    "fp16": pnmix_key(),
    "pages of two groups": pnmix_key(page_tokens=24),
    "pages of a group": pnmix_key(page_tokens=8, group_tokens=8, high_bits=8, low_bits=3),
    "interleaved": pnmix_key(pairing="interleaved", rotary_dim=10, tail="coded", page_tokens=12),
    "no pairs": pnmix_key(pairing="none", rotary_dim=0, high_bits=2, low_bits=2),
    "half of a head": pnmix_key(rotary_dim=10, group_tokens=1, sink_tokens=0),
    "values of 2 bits": pnmix_value(),
    "values of 4 bits": pnmix_value(bits=4, group_channels=5, tail="coded"),
    "values of 8 bits": pnmix_value(bits=8, group_channels=64, group_tokens=7),
    "one channel a scale": pnmix_value(group_channels=1, sink_tokens=0),
    # the first chunk is exact from end to end
    "sinks beyond a chunk, keys": pnmix_key(sink_tokens=45),
    "sinks beyond a chunk, values": pnmix_value(sink_tokens=45),
    "sinks beyond the tensor": pnmix_key(sink_tokens=71, page_tokens=24),
}


# with one sink and groups of 16, 11 of 44 tokens are the tail: from token 33 of the first chunk on
@pytest.mark.parametrize(
    ("codec", "tokens"),
    [
        *((codec, 70) for codec in ANY_PNMIX.values()),
        (pnmix_key(group_tokens=16, sink_tokens=1, page_tokens=32), 44),
        (pnmix_value(group_tokens=16, sink_tokens=1), 44),
    ],
    ids=[*ANY_PNMIX, "tail of two chunks, keys", "tail of two chunks, values"],
)
def test_readers_agree_on_pnmix_sections_that_no_encoder_writes(
    tmp_path: Path, codec: dict[str, Any], tokens: int
) -> None:
    path = tmp_path / "any.kvz"
    path.write_bytes(any_pnmix_archive(codec, tokens).to_bytes())
    _, decoded = spec_reader.decode_file(path.read_bytes())
    ours = np.frombuffer(decoded["t"][2], "<u2").reshape(decoded["t"][1])
    with kvz.open(path) as archive:
        theirs = archive.read_tensor("t")
    np.testing.assert_array_equal(theirs.view(np.uint16), ours)


def _no_mask(sections: list[Section]) -> None:
    del sections[0]


def _mask_after_a_chunk(sections: list[Section]) -> None:
    sections[0], sections[1] = sections[1], sections[0]


def _mask_short(sections: list[Section]) -> None:
    sections[0].payload = sections[0].payload[:-1]


def _mask_of_a_pair_that_is_not_there(sections: list[Section]) -> None:
    # 11 pairs: bits 3 to 7 of the second byte
    mask = bytearray(sections[0].payload)
    mask[1] |= 0x08
    sections[0].payload = bytes(mask)


def _pnmix_flag_of_two(sections: list[Section]) -> None:
    # exact [3, 5, 21] u16 (630, to 640)
    payload = bytearray(sections[1].payload)
    payload[640] = 2
    sections[1].payload = bytes(payload)


def _flag_without_raw(sections: list[Section]) -> None:
    payload = bytearray(sections[1].payload)
    payload[640] = 1
    sections[1].payload = bytes(payload)


def _chunk_short(sections: list[Section]) -> None:
    sections[1].payload = sections[1].payload[:-2]


def _chunk_long(sections: list[Section]) -> None:
    sections[2].payload += bytes(2)


def _anchor_for_encoded(sections: list[Section]) -> None:
    sections[1].kind = ANCHOR


@pytest.mark.parametrize(
    "change",
    [
        _no_mask,
        _mask_after_a_chunk,
        _mask_short,
        _mask_of_a_pair_that_is_not_there,
        _pnmix_flag_of_two,
        _flag_without_raw,
        _chunk_short,
        _chunk_long,
        _anchor_for_encoded,
    ],
)
def test_readers_reject_the_same_pnmix_archives(
    tmp_path: Path, change: Callable[[list[Section]], None]
) -> None:
    archive = any_pnmix_archive(pnmix_key(page_tokens=24))
    spec_reader.decode_file(archive.to_bytes())
    change(archive.sections)
    assert_both_reject(archive, tmp_path / "bad.kvz")


def test_readers_reject_a_mask_of_pnmix_values(tmp_path: Path) -> None:
    archive = any_pnmix_archive(pnmix_value())
    archive.sections.insert(0, Section(CODEBOOK, 0, 0, b"\1\0\1\0\1\0"))
    assert_both_reject(archive, tmp_path / "bad.kvz")


@pytest.mark.parametrize(
    ("codec", "fields"),
    [
        *((pnmix_key(), {"group_tokens": value}) for value in (0, 1025, 12.0)),
        *((pnmix_key(), {"sink_tokens": value}) for value in (-1, 1025)),
        *((pnmix_key(), {"page_tokens": value}) for value in (0, 18, 32772)),
        *((pnmix_key(), {"rotary_dim": value}) for value in (0, 9, 22, -2)),
        *((pnmix_key(), {"low_bits": value}) for value in (0, 4)),
        (pnmix_key(), {"high_bits": 9}),
        (pnmix_key(), {"pairing": "none"}),
        (pnmix_key(), {"tail": None}),
        (pnmix_key(), {"levels": "mean"}),
        (pnmix_key(), {"salient": 1.5}),
        (pnmix_key(), {"criterion": None}),
        (pnmix_key(), {"prefill_tokens": 0}),
        (pnmix_key(), {"bits": 2}),
        (pnmix_key(), {"role": "query"}),
        *((pnmix_value(), {"bits": value}) for value in (1, 3, 16)),
        (pnmix_value(), {"group_channels": 0}),
        (pnmix_value(), {"page_tokens": None}),
    ],
)
def test_readers_reject_the_same_pnmix_configurations(
    tmp_path: Path, codec: dict[str, Any], fields: dict[str, Any]
) -> None:
    archive = any_pnmix_archive(codec)
    archive.head["codecs"] = [{**codec, **fields}]
    assert_both_reject(archive, tmp_path / "bad.kvz")


def assert_both_reject(archive: Archive, path: Path) -> None:
    with pytest.raises(spec_reader.SpecViolation):
        spec_reader.decode_file(archive.to_bytes())
    path.write_bytes(archive.to_bytes())
    for read in ALL_READERS:
        with pytest.raises(InvalidField):
            read(path)


# Keys [1, 6, 3], groups of two tokens, one group a page, codes of two bits and one. Pair 0, that is
# channels 0 and 1, is salient, channel 2 alone is pair 1. Token 0 is a sink, token 5 the tail, and
# group 1, tokens 3 and 4, is raw.
#   channel 0   g 0, S 1, a 1, b 1: z = 1, s = 1 / 2 * 1 = 0.5; codes 3, 0
#   channel 1   g 1, S 2, a 0, b 2: z = 1, s = 2 / 2 * 2 = 2; codes 2, 1
#   channel 2   g -2, S 4, a 3, b 1: z = 10, s = 4 * 1 = 4; codes 1, 0
PNMIX_KEYS = streams(
    "80 3F FF FF 00 80  C1 7F 01 00 80 BF",
    "00 01",
    "00 00 80 3F 00 C0  80 3F 00 40 80 40" + 12 * "7F",
    "01 00 03  01 02 01" + 6 * "FF",
    "01 02 01  FF FF FF",
    "01 01  AA AA",
    "01 00 02 00 03 00  04 00 05 00 C2 7F",
)
# 2.5 5 14, 1 3 10
PNMIX_KEYS_CODED = (0x4020, 0x40A0, 0x4160, 0x3F80, 0x4040, 0x4120)
# Values [1, 6, 3], two bits, scales of two channels and of one.
#   token 1   z 1, s 0.5, codes 3 and 2; z -1, s 0.25, code 1
#   token 2   z 0, s -1, codes 1 and 0; z NaN
PNMIX_VALUES = streams(
    "80 3F FF FF 00 80  C1 7F 01 00 80 BF",
    "00 01",
    "00 3C 00 BC 00 38 00 34  00 00 01 FC 00 BC 00 00" + 16 * "7F",
    "03 00 01  01 01 00" + 6 * "FF",
    "01 00 02 00 03 00  04 00 05 00 C2 7F",
)
# 2.5 2 -0.75, -1 0 NaN
PNMIX_VALUES_CODED = (0x4020, 0x4000, 0xBF40, 0xBF80, 0, 0x7FC0)
SMALL = {"group_tokens": 2, "sink_tokens": 1}


@pytest.mark.parametrize(
    ("codec", "mask", "payload", "coded"),
    [
        (
            pnmix_key(**SMALL, page_tokens=2, high_bits=2, rotary_dim=2),
            b"\1",
            PNMIX_KEYS,
            PNMIX_KEYS_CODED,
        ),
        (pnmix_value(**SMALL, group_channels=2), b"", PNMIX_VALUES, PNMIX_VALUES_CODED),
    ],
    ids=["keys", "values"],
)
def test_pnmix_example_worked_by_hand(
    tmp_path: Path, codec: dict[str, Any], mask: bytes, payload: bytes, coded: tuple[int, ...]
) -> None:
    first, raw, last = (0x3F80, 0xFFFF, 0x8000), (1, 2, 3, 4, 5, 0x7FC2), (0x7FC1, 1, 0xBF80)
    values = struct.pack("<18H", *first, *coded, *raw, *last)
    sections = [Section(CODEBOOK, 0, 0, mask)] if mask else []
    sections.append(Section(ENCODED, 0, 0, payload))
    head = head_of([codec], [tensor("t", "BF16", [1, 6, 3], token_axis=1)])
    path = tmp_path / "example.kvz"
    path.write_bytes(Archive(head, sections, prelude=FORMAT_0_2).to_bytes())
    assert spec_reader.decode_file(path.read_bytes())[1]["t"][2] == values
    with kvz.open(path) as opened:
        assert opened.read_tensor("t").tobytes() == values
