"""Damaged and hostile files: a typed error, never a crash, a huge allocation or a success."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_archive
import zstandard
from archive_builder import CODEBOOK, ENCODED, RAW, Archive, Section, dump, head_of, tensor
from tiny_archive import (
    ALL_READERS,
    GAAC_STREAMS,
    SEQUENTIAL,
    SPLITZIP_STREAMS,
    VALUES,
    assert_rejected,
    read_at_random,
    read_from_pipe,
    streams,
    tiny,
    verify,
)

from kvz.formats.errors import DamagedFile, InvalidField, KvzError, LimitExceeded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.kvz"


def with_payload(number: int, payload: bytes) -> Archive:
    archive = tiny()
    archive.sections[number].payload = payload
    return archive


# -- what the codec pages say a decoder rejects; the worked examples, one field changed


def replaced(parts: list[bytes], index: int, part: bytes) -> bytes:
    return streams(*parts[:index], part, *parts[index + 1 :])


GAAC_RULES = [
    ("spare bit of the low tags", replaced(GAAC_STREAMS, 3, b"\x06\x00"), "tag has a value"),
    ("spare bit of the high tags", replaced(GAAC_STREAMS, 3, b"\x02\x80"), "tag has a value"),
    ("offset", replaced(GAAC_STREAMS, 4, b"\1\0\0\0"), "escape offset"),
    ("no escapes", replaced(GAAC_STREAMS, 5, b""), "more escapes than there are"),
    ("one escape more", replaced(GAAC_STREAMS, 5, b"\xff\0"), "number of escapes"),
    ("tag 2 needs one more", replaced(GAAC_STREAMS, 3, b"\x00\x02"), "more escapes than there are"),
    (
        "tag 3 needs five more",
        replaced(GAAC_STREAMS, 3, b"\x02\x02"),
        "more escapes than there are",
    ),
    ("end in the padding", streams(*GAAC_STREAMS)[:60], "stream escapes needs"),
    ("end in the offsets", streams(*GAAC_STREAMS)[:50], "needs bytes"),
    ("end in the first stream", b"\0", "needs bytes"),
    ("nothing", b"", "needs bytes"),
]


@pytest.mark.parametrize(
    ("name", "payload", "message"), GAAC_RULES, ids=[rule[0] for rule in GAAC_RULES]
)
def test_rule_of_a_gaac_payload(path: Path, name: str, payload: bytes, message: str) -> None:
    message_of_chunk = "chunk 0 of layers.0.key: "
    assert_rejected(path, with_payload(1, payload), InvalidField, message_of_chunk)
    assert_rejected(path, with_payload(1, payload), InvalidField, message)


def test_gaac_tag_0_without_a_two_bit_window_is_rejected(path: Path) -> None:
    archive = with_payload(
        1, streams(*GAAC_STREAMS[:2], b"\0\0", b"\x02\x00", GAAC_STREAMS[4], b"")
    )
    archive.head["codecs"][0]["windows"] = [3, 4]
    archive.sections[0].payload = bytes.fromhex("02 7A 7A 70 70")
    assert_rejected(path, archive, InvalidField, "a value that this window set does not use")
    archive.sections[1].payload = streams(
        *GAAC_STREAMS[:2], b"\0\0", b"\x03\x00", GAAC_STREAMS[4], b""
    )
    path.write_bytes(archive.to_bytes())
    verify(path)


GAAC_BOOKS = [
    (b"", "kind 0"),
    (b"\0" + bytes(6), "kind 0"),
    (b"\3" + bytes(6), "kind 3"),
    (b"\2" + bytes(5), "has 6 bytes, must have 7"),
    (b"\2" + bytes(7), "has 8 bytes, must have 7"),
    (b"\1" + bytes(6), "has 7 bytes, must have 4"),
    (b"\1\xfd\0\0", "beyond exponent 255"),
    (b"\1\0\xf9\0", "beyond exponent 255"),
    (b"\1\0\0\xf1", "beyond exponent 255"),
]


@pytest.mark.parametrize(("book", "message"), GAAC_BOOKS)
def test_rule_of_a_gaac_codebook(path: Path, book: bytes, message: str) -> None:
    assert_rejected(path, with_payload(0, book), InvalidField, message)


@pytest.mark.parametrize("book", [b"\1\xfc\0\0", b"\1\0\xf8\0", b"\1\0\0\xf0"])
def test_gaac_window_that_ends_at_exponent_255_is_read(path: Path, book: bytes) -> None:
    path.write_bytes(with_payload(0, book).to_bytes())
    verify(path)


SPLITZIP_RULES = [
    ("first offset", replaced(SPLITZIP_STREAMS, 2, struct.pack("<2I", 1, 1)), "offset"),
    ("fewer", replaced(SPLITZIP_STREAMS, 2, bytes(8)), "section with 0 escapes must have 48"),
    ("more", replaced(SPLITZIP_STREAMS, 2, struct.pack("<2I", 0, 2)), "needs bytes 64..66"),
    ("huge", replaced(SPLITZIP_STREAMS, 2, struct.pack("<2I", 0, 2**32 - 1)), "needs bytes"),
    ("position", replaced(SPLITZIP_STREAMS, 3, b"\3\0"), "outside its block"),
    ("longer", streams(*SPLITZIP_STREAMS) + b"\0", "must have 65 bytes, has 66"),
    ("shorter", streams(*SPLITZIP_STREAMS)[:-1], "needs bytes 64..65"),
    ("no offsets", streams(*SPLITZIP_STREAMS)[:32], "stream offsets needs"),
    ("nothing", b"", "needs bytes"),
]


@pytest.mark.parametrize(
    ("name", "payload", "message"), SPLITZIP_RULES, ids=[rule[0] for rule in SPLITZIP_RULES]
)
def test_rule_of_a_splitzip_payload(path: Path, name: str, payload: bytes, message: str) -> None:
    assert_rejected(path, with_payload(3, payload), InvalidField, message)


@pytest.mark.parametrize(
    "book",
    [b"", bytes(range(15)), bytes(range(17)), bytes([0, *range(15)]), bytes(range(16, 0, -1))],
)
def test_splitzip_codebook_must_be_16_ascending_exponents(path: Path, book: bytes) -> None:
    assert_rejected(path, with_payload(2, book), InvalidField, "must be 16 ascending exponents")


def plane(data: bytes, *, with_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=with_size).compress(data)


def zstd_payload(first: bytes, second: bytes, *, stored: int = 0) -> bytes:
    words = [len(first) | (stored & 1) << 31, len(second) | (stored >> 1) << 31]
    return struct.pack("<2I", *words) + first + second


FRAME = plane(b"\x7f\x7f")
ZSTD_RULES = [
    ("long stored plane", zstd_payload(b"\1\2\3", b"\0\1", stored=3), "stored plane has 3 bytes"),
    ("short stored plane", zstd_payload(b"\1", b"\0\1", stored=3), "stored plane has 1 bytes"),
    ("no size", zstd_payload(plane(b"\1\1", with_size=False), FRAME), "does not declare"),
    ("wrong size", zstd_payload(plane(b"\1\1\1"), FRAME), "does not declare"),
    ("bytes after", zstd_payload(FRAME, b"\0\1", stored=2) + b"\0", "planes end at"),
    ("cut", zstd_payload(FRAME, b"\0\1", stored=2)[:-1], "planes end at"),
    ("words only", bytes(8), ""),
    ("no words", bytes(7), "2 planes need 8"),
    ("nothing", b"", "2 planes need 8"),
]


@pytest.mark.parametrize(
    ("name", "payload", "message"), ZSTD_RULES, ids=[rule[0] for rule in ZSTD_RULES]
)
def test_rule_of_a_zstd_payload(path: Path, name: str, payload: bytes, message: str) -> None:
    archive = with_payload(4, payload)
    path.write_bytes(archive.to_bytes())
    for read in ALL_READERS:
        with pytest.raises(DamagedFile, match="chunk 0 of z: ") as caught:
            read(path)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\0",
        FRAME[:-1],
        FRAME + b"\0",
        FRAME + FRAME,
        FRAME[:5] + bytes([FRAME[5] ^ 0xFF]) + FRAME[6:],
        struct.pack("<II", 0x184D2A50, 4) + b"skip",
        struct.pack("<II", 0x184D2A50, 4) + b"skip" + FRAME,
    ],
)
def test_zstd_plane_that_is_not_one_frame_is_rejected(path: Path, frame: bytes) -> None:
    path.write_bytes(with_payload(4, zstd_payload(frame, b"\0\1", stored=2)).to_bytes())
    for read in ALL_READERS:
        with pytest.raises(DamagedFile, match="chunk 0 of z: "):
            read(path)


def test_zstd_plane_that_is_one_frame_is_read(path: Path) -> None:
    path.write_bytes(with_payload(4, zstd_payload(FRAME, b"\0\1", stored=2)).to_bytes())
    assert read_at_random(path) == VALUES


# -- every truncation and every flipped bit


def test_file_that_ends_early_is_rejected_at_every_byte(path: Path) -> None:
    data = tiny().to_bytes()
    for nbytes in range(len(data)):
        path.write_bytes(data[:nbytes])
        for read in ALL_READERS:
            with pytest.raises(KvzError):
                read(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_every_flipped_bit_is_found(path: Path) -> None:
    data = tiny().to_bytes()
    assert len(data) < 2000
    missed = []
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            verify(path)
        except KvzError:
            continue
        missed.append(bit)
    assert not missed


def test_flipped_bit_is_never_decoded_to_other_values(path: Path) -> None:
    data = tiny().to_bytes()
    rng = np.random.default_rng(0)
    for bit in rng.choice(8 * len(data), 1500, replace=False).tolist():
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        # frames and padding are not looked at by a reader that goes through the index
        with contextlib.suppress(KvzError):
            assert read_at_random(path) == VALUES


# -- damage with correct checksums


def damage(rng: np.random.Generator, data: bytes) -> bytes:
    """One to four bytes changed, or a piece removed or repeated."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        if not out:
            break
        at, kind = int(rng.integers(len(out))), rng.integers(8)
        if kind == 0:
            del out[at : at + int(rng.integers(1, 17))]
        elif kind == 1:
            out[at:at] = out[at : at + int(rng.integers(1, 17))]
        else:
            out[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF, int(rng.integers(256))]))
    return bytes(out)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_payload_with_correct_checksums_gives_only_typed_errors(
    path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(200):
        archive = tiny()
        section = archive.sections[rng.integers(len(archive.sections))]
        section.payload = damage(rng, section.payload)
        path.write_bytes(archive.to_bytes())
        for read in ALL_READERS:
            try:
                read(path)
            except KvzError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("seed", range(5))
def test_damaged_head_with_correct_checksums_gives_only_typed_errors(path: Path, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    refused = 0
    for _ in range(200):
        archive = tiny()
        archive.head_bytes = damage(rng, dump(archive.head))
        path.write_bytes(archive.to_bytes())
        for read in ALL_READERS:
            try:
                read(path)
            except KvzError:
                refused += 1
    assert refused > 100


ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 8, 9, 1 << 31, 1 << 48, 1 << 64, 10**400, 0.5, 1e400, "", "x",
    [], [0], [1 << 48], [1, 1 << 47, 0], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("key", ["name", "dtype", "shape", "token_axis", "chunk_tokens", "codec"])
def test_odd_values_in_a_tensor_give_only_typed_errors(path: Path, key: str) -> None:
    for number in range(5):
        for value in ODD_VALUES:
            archive = tiny()
            archive.head["tensors"][number][key] = value
            path.write_bytes(archive.to_bytes())
            for read in ALL_READERS:
                with contextlib.suppress(KvzError):
                    read(path)


@pytest.mark.parametrize("position", range(6))
def test_odd_numbers_in_the_index_give_only_typed_errors(path: Path, position: int) -> None:
    top = {0: 64, 1: 64, 2: 32, 3: 32, 4: 32, 5: 16}[position]
    for number in range(7):
        for value in {0, 1, 2, 64, 1 << top - 1, (1 << top) - 1, (1 << top) - 64}:

            def edit(entries: list[list[int]], number: int = number, value: int = value) -> None:
                entries[number][position] = value

            archive = tiny()
            unchanged: list[list[int]] = []
            archive.edit_index = unchanged.extend
            plain = archive.to_bytes()
            archive.edit_index = edit
            if archive.to_bytes() == plain:
                continue
            path.write_bytes(archive.to_bytes())
            for read in ALL_READERS:
                with pytest.raises(KvzError):
                    read(path)


# -- counts that would be expensive to believe


def test_chunk_counts_that_wrap_64_bits_are_rejected(path: Path) -> None:
    # 65,536 tensors of 2^48 chunks: 2^64 chunks, none in the file
    tensors = [tensor(f"t{i}", "U8", [1 << 48], chunk_tokens=1) for i in range(1 << 16)]
    archive = Archive(head_of([{"name": "raw"}], tensors), [])
    assert_rejected(path, archive, InvalidField, f"the head needs {1 << 64}")


def test_more_tensors_than_the_limit_are_rejected(path: Path) -> None:
    head = b'{"codecs":[],"metadata":{},"writer":"","tensors":[' + b"0," * (1 << 20) + b"0]}"
    assert_rejected(path, Archive({}, [], head), LimitExceeded, "1048577 tensors exceed 1048576")


def huge_claims() -> dict[str, bytes]:
    """Small files whose numbers ask for a lot of memory."""
    claims: dict[str, Archive] = {}
    for name, fields in {"head": {"head_length": 64 << 20}}.items():
        claims[name] = tiny()
        claims[name].prelude = fields
    for number, length in [(0, 64 << 20), (1, 256 << 20), (5, 256 << 20)]:
        claims[f"section {number}"] = tiny()
        claims[f"section {number}"].sections[number].frame = {"length": length}
    claims["index"] = tiny()
    claims["index"].index_section.frame = {"length": 512 << 20}
    empty = tensor("e", "BF16", [1, 0, 1 << 46], token_axis=1)
    claims["codebook of an empty tensor"] = Archive(
        head_of([tiny_archive.GAAC], [empty]), [Section(CODEBOOK, 0, 0, b"\1\0\0\0")]
    )
    claims["shape"] = Archive(
        head_of([{"name": "raw"}], [tensor("t", "U8", [1 << 48], chunk_tokens=1 << 27)]),
        [Section(RAW, 0, 0, b"")],
    )
    return {name: archive.to_bytes() for name, archive in claims.items()}


MEASURE = """
import resource, sys
sys.path.insert(0, {support!r})
from pathlib import Path
from tiny_archive import ALL_READERS, read_at_random, tiny
from kvz.formats.errors import KvzError
folder = Path({folder!r})
(folder / "whole.kvz").write_bytes(tiny().to_bytes())
for read in ALL_READERS:
    read(folder / "whole.kvz")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(folder.glob("claim*.kvz")):
    for read in ALL_READERS:
        try:
            read(path)
        except KvzError:
            continue
        # who goes through the index never sees a frame
        if read is not read_at_random:
            raise SystemExit(f"{{read.__name__}} accepted {{path.name}}")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_huge_claims_of_a_small_file_cost_no_memory(tmp_path: Path) -> None:
    # in a process of its own, because a peak cannot be reset
    for i, data in enumerate(huge_claims().values()):
        (tmp_path / f"claim{i}.kvz").write_bytes(data)
    support = str(Path(__file__).parent / "support")
    script = MEASURE.format(support=support, folder=str(tmp_path))
    root = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert int(result.stdout) < 16 << 10  # KiB


def test_small_section_for_a_huge_chunk_is_rejected(path: Path) -> None:
    claims = [
        (tiny_archive.GAAC, b"\1\0\0\0", [1, 128, 1 << 20], 1),
        ({"name": "splitzip"}, bytes(range(16)), [1 << 27], None),
    ]
    for codec, book, shape, axis in claims:
        entry = tensor("t", "BF16", shape, token_axis=axis, chunk_tokens=1 << 27)
        sections = [Section(CODEBOOK, 0, 0, book), Section(ENCODED, 0, 0, bytes(100))]
        archive = Archive(head_of([codec], [entry]), sections)
        assert_rejected(path, archive, InvalidField, "needs bytes", [read_at_random, *SEQUENTIAL])


def test_error_of_a_pipe_leaves_no_output(path: Path) -> None:
    data = tiny().to_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(KvzError):
        read_from_pipe(path)
    assert not path.with_suffix(".out").exists()
