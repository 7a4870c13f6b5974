"""The golden files of formats/vectors/: good ones decode, bad ones are refused, for ever."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import spec_lynx
import spec_pnmix
import spec_reader
import tiny_archive
from numpy.typing import NDArray

import kvz
from kvz.formats import errors

FOLDER = Path(__file__).parents[1] / "formats" / "vectors"
MANIFEST: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "manifest.json").read_text())
GOOD, BAD = ({entry["name"]: entry for entry in MANIFEST[kind]} for kind in ("good", "bad"))
PROGRESSIVE = [name for name, entry in GOOD.items() if "anchor_sha256" in entry]
PNMIX = [name for name, entry in GOOD.items() if entry.get("codec") == "pnmix"]
#: A frame or the bytes before one are not seen by who goes through the index.
SEQUENTIAL_ONLY = {"padding", "bytes-after"}
#: Who reads from front to back meets the section before the index: the same error in other words.
SEQUENTIAL_MESSAGES = {
    "chunk-twice": "chunk 0 of r comes where chunk 1 of r must be",
    "chunks-swapped": "chunk 1 of r comes where chunk 0 of r must be",
}


def load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vectors_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    sys.modules["vectors_make"] = module
    spec.loader.exec_module(module)
    return module


make = load_make()


def good_path(name: str) -> Path:
    return FOLDER / "good" / f"{name}.kvz"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_manifest_lists_exactly_the_files_there_are() -> None:
    for kind, entries in (("good", GOOD), ("bad", BAD)):
        assert sorted(entries) == sorted(p.stem for p in (FOLDER / kind).iterdir())


@pytest.mark.parametrize("name", GOOD)
def test_good_vector_decodes_to_what_the_manifest_says(name: str) -> None:
    with kvz.open(good_path(name)) as archive:
        hashes = {n: sha256(archive.read_tensor(n).tobytes()) for n in archive.tensor_names}
    assert hashes == GOOD[name]["sha256"]
    kvz.verify(good_path(name), threads=1)


@pytest.mark.parametrize("name", PROGRESSIVE)
def test_anchors_of_a_good_vector_decode_to_what_the_manifest_says(name: str) -> None:
    with kvz.open(good_path(name)) as archive:
        decoded = {n: archive.read_tensor(n, anchor_only=True) for n in archive.tensor_names}
    assert {n: sha256(t.tobytes()) for n, t in decoded.items()} == GOOD[name]["anchor_sha256"]


@pytest.mark.parametrize("name", GOOD)
def test_second_reader_decodes_a_good_vector_alike(name: str) -> None:
    data = good_path(name).read_bytes()
    assert make.second_reader_sha256(data, anchor_only=False) == GOOD[name]["sha256"]
    # without residuals, the anchors are all there is
    coarse = GOOD[name].get("anchor_sha256", GOOD[name]["sha256"])
    assert make.second_reader_sha256(data, anchor_only=True) == coarse


def test_manifest_hashes_are_those_of_the_stated_inputs() -> None:
    stated = {
        name: {n: raw for n, _, _, raw in good.listing}
        for name, good in make.GOOD.items()
        if not good.is_lossy
    }
    stated.update(dict.fromkeys(make.hand_made(), tiny_archive.VALUES))
    assert stated.keys() == GOOD.keys() - {*PROGRESSIVE, *PNMIX}
    for name, tensors in stated.items():
        assert {n: sha256(raw) for n, raw in tensors.items()} == GOOD[name]["sha256"]


def test_stated_inputs_are_what_they_say() -> None:
    # element 1 of head 0: token 0, channel 1, exponent 100 + 7 % 11 + 1 % 3, packed 37
    raw = make.keys([1, 2, 19, 40], make.level)[0][3]
    assert len(raw) == 2 * 2 * 19 * 40
    assert int.from_bytes(raw[2:4], "little") == 108 << 7 | 37


# zstd's bytes depend on the version of its library
AS_TODAY = [n for n, good in make.GOOD.items() if good.codec != "zstd" and not good.by_earlier]


@pytest.mark.parametrize("name", AS_TODAY)
def test_encoding_the_stated_input_again_gives_the_golden_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = good_path(name).read_bytes()
    # the writer is part of the head
    version = spec_reader.read_head(golden)[0]["writer"].removeprefix("kvz ")
    monkeypatch.setattr("kvz.planning.__version__", version)
    good = make.GOOD[name]
    assert (good.codec, good.options) == (GOOD[name]["codec"], GOOD[name]["options"])
    good.compress(tmp_path / "c.kvz", threads=2)
    assert (tmp_path / "c.kvz").read_bytes() == golden


@pytest.mark.parametrize("name", ["gaac-234-token", "gaac-234-channel", "gaac-blocks"])
def test_gaac_vectors_use_every_tag(name: str) -> None:
    data = good_path(name).read_bytes()
    head, position = spec_reader.read_head(data)
    entry = spec_reader.parse_tensor(head["tensors"][0], head["codecs"])
    _, chunk = spec_reader.read_sections(data, position)
    assert chunk.kind == spec_reader.ENCODED
    assert gaac_tags(chunk.payload, entry) == {0, 1, 2, 3}


def gaac_tags(payload: bytes, entry: spec_reader.Tensor) -> set[int]:
    by_token = entry.codec["axis"] == "token"
    columns = entry.inner if by_token else -(-entry.inner // 8)
    tiles = entry.outer * (-(-entry.tokens // 8) if by_token else entry.tokens)
    tag_nbytes = -(-columns // 8)
    num_elements = entry.outer * entry.tokens * entry.inner
    lengths = [num_elements, 2 * tiles * columns, 0, 2 * tiles * tag_nbytes]
    tags = spec_reader.split_streams(payload, lengths)[3]
    return {
        tag
        for tile in range(tiles)
        for tag in spec_reader.parse_tags(tags[2 * tag_nbytes * tile :], columns, tag_nbytes)
    }


def test_zstd_vector_has_stored_and_compressed_planes() -> None:
    data = good_path("zstd-planes").read_bytes()
    head, position = spec_reader.read_head(data)
    sections = spec_reader.read_sections(data, position)
    assert {section.kind for section in sections} == {spec_reader.ENCODED}
    flags = set()
    for section, entry in zip(sections, head["tensors"], strict=True):
        itemsize = spec_reader.ITEM_NBYTES[entry["dtype"]]
        words = struct.unpack_from(f"<{itemsize}I", section.payload)
        flags |= {(itemsize > 1, word >> 31) for word in words}
    assert flags == {(False, 0), (True, 0), (True, 1)}


def test_splitzip_vectors_have_the_codebooks_that_they_are_for() -> None:
    for name, steps in (("splitzip-run", {1}), ("splitzip-gaps", {2})):
        data = good_path(name).read_bytes()
        book, chunk = spec_reader.read_sections(data, spec_reader.read_head(data)[1])
        assert chunk.kind == spec_reader.ENCODED
        assert {b - a for a, b in zip(book.payload, book.payload[1:], strict=False)} == steps


def lynx_chunks(name: str) -> tuple[list[spec_reader.ChunkSections], spec_reader.Tensor]:
    data = good_path(name).read_bytes()
    head, position = spec_reader.read_head(data)
    entry = spec_reader.parse_tensor(head["tensors"][0], head["codecs"])
    sections = spec_reader.arrange([entry], spec_reader.read_sections(data, position))
    return list(sections.values()), entry


def test_lynx_vectors_are_stored_in_the_chunks_that_they_are_for() -> None:
    shapes = {}
    for name in PROGRESSIVE:
        chunks, entry = lynx_chunks(name)
        assert {chunk.main.kind for chunk in chunks} == {spec_reader.ANCHOR}
        codec = entry.codec
        code = "linear" if codec["companding"] is None else "companded"
        shapes[name] = (len(chunks), entry.inner, codec["exact_tokens"], codec["grouping"], code)
    assert shapes == {
        "lynx-linear": (2, 9, 2, "channel", "linear"),
        "lynx-paper": (1, 16, 0, "channel", "companded"),
        "lynx-token": (1, 40, 1, "token", "linear"),
    }


def test_linear_lynx_vector_keeps_the_page_of_the_nan_as_it_is() -> None:
    (first, second), _ = lynx_chunks("lynx-linear")
    # exact [2, 2, 9] u16 in the first chunk; pages [2, 2, 2, 9] u16; groups [2, 4 or 3, 2, 9] u8
    assert spec_reader.split_streams(first.main.payload, [72, 144, 144, 4])[3] == b"\0\0\0\0"
    assert spec_reader.split_streams(second.main.payload, [0, 144, 108, 4])[3] == b"\0\0\0\1"
    # tokens 96..103 of head 1
    stated, decoded = stated_and_decoded("lynx-linear", anchor_only=True)
    page = decoded[0, 1, 96:]
    np.testing.assert_array_equal(page, stated[0, 1, 96:])
    # the NaN is element (104 + 100) * 9 + 4 = 1840, packed 37 * 1840 % 256 = 240
    assert page[4, 4] == 0xFFF0


def stated_and_decoded(
    name: str, *, anchor_only: bool
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    ((_, _, shape, raw),) = make.GOOD[name].listing
    _, tensors = spec_reader.decode_file(good_path(name).read_bytes(), anchor_only=anchor_only)
    (decoded,) = (values for _, _, values in tensors.values())
    stated = np.frombuffer(raw, "<u2").reshape(shape)
    return stated, np.frombuffer(decoded, "<u2").reshape(shape)


@pytest.mark.parametrize("name", PROGRESSIVE)
@pytest.mark.parametrize(("anchor_only", "parts"), [(False, 100), (True, 12)])
def test_lynx_vector_lies_near_the_stated_input(name: str, anchor_only: bool, parts: int) -> None:
    stated, decoded = stated_and_decoded(name, anchor_only=anchor_only)
    x, y = (spec_lynx.bf16_to_float32(bits) for bits in (stated, decoded))
    exact = np.isnan(x)
    error = np.abs(np.where(exact, 0, y) - np.where(exact, 0, x))
    axis = 3 if name == "lynx-token" else 2
    spread = np.nanmax(x, axis, keepdims=True) - np.nanmin(x, axis, keepdims=True)
    assert (error <= spread / parts).all()
    assert error.max() > 0


def pnmix_parts(name: str) -> dict[str, list[tuple[spec_pnmix.Span, NDArray[np.uint8]]]]:
    """Tensor -> per chunk, its span and its group flags [heads, groups]."""
    data = good_path(name).read_bytes()
    head, position = spec_reader.read_head(data)
    entries = [spec_reader.parse_tensor(entry, head["codecs"]) for entry in head["tensors"]]
    sections = spec_reader.arrange(entries, spec_reader.read_sections(data, position))
    parts: dict[str, list[tuple[spec_pnmix.Span, NDArray[np.uint8]]]] = {}
    for (number, c), of_chunk in sections.items():
        entry = entries[number]
        assert of_chunk.main.kind == spec_reader.ENCODED
        start = c * entry.chunk_tokens
        n = min(entry.chunk_tokens, entry.tokens - start)
        span = spec_pnmix.span_of(entry.codec, start, n, entry.tokens)
        exact_nbytes = 2 * entry.outer * (span.first + span.last) * entry.inner
        lengths = [exact_nbytes, entry.outer * span.groups]
        flags = np.frombuffer(spec_reader.split_streams(of_chunk.main.payload, lengths)[1], "u1")
        parts.setdefault(entry.name, []).append((span, flags.reshape(entry.outer, -1)))
    return parts


def test_pnmix_vectors_have_the_chunks_groups_and_flags_that_they_are_for() -> None:
    seen = {}
    for name in PNMIX:
        for tensor, parts in pnmix_parts(name).items():
            spans = [(span.first, span.coded, span.last, span.groups) for span, _ in parts]
            raw = [np.argwhere(flags).tolist() for _, flags in parts]
            seen[name, tensor.removeprefix("layers.0.")] = (spans, raw)
    # token 100 of head 1 is in group (100 - 4) // 20 of its chunk, and in (100 - 72) // 12
    assert seen == {
        ("pnmix-paper", "key"): ([(4, 100, 3, 5)], [[[1, 4]]]),
        ("pnmix-paper", "value"): ([(4, 100, 3, 5)], [[]]),
        ("pnmix-page", "key"): ([(3, 69, 0, 6), (0, 32, 0, 3)], [[], [[1, 2]]]),
        ("pnmix-page", "value"): ([(3, 57, 0, 5), (0, 44, 0, 4)], [[], []]),
        ("pnmix-fitted", "key"): ([(4, 100, 3, 5)], [[[1, 4]]]),
        ("pnmix-fitted", "value"): ([(4, 100, 3, 5)], [[]]),
        ("pnmix-fitted-page", "key"): ([(3, 69, 0, 6), (0, 32, 0, 3)], [[], [[1, 2]]]),
        ("pnmix-fitted-page", "value"): ([(3, 57, 0, 5), (0, 44, 0, 4)], [[], []]),
    }


def pnmix_widths(name: str) -> dict[str, NDArray[np.int64]]:
    """Tensor -> bits of the codes [heads, 1, channels]."""
    data = good_path(name).read_bytes()
    head, position = spec_reader.read_head(data)
    books = {
        section.tensor: section.payload
        for section in spec_reader.read_sections(data, position)
        if section.kind == spec_reader.CODEBOOK
    }
    widths = {}
    for number, fields in enumerate(head["tensors"]):
        entry = spec_reader.parse_tensor(fields, head["codecs"])
        codec, outer, inner = entry.codec, entry.outer, entry.inner
        if number in books:
            salient = spec_pnmix.salient_channels(books[number], codec, outer, inner)
            width = np.where(salient, codec["high_bits"], codec["low_bits"])
        else:
            width = np.full((outer, inner), codec["bits"])
        widths[entry.name] = width[:, None]
    return widths


@pytest.mark.parametrize("name", PNMIX)
def test_pnmix_vector_is_exact_where_it_says_and_near_elsewhere(name: str) -> None:
    widths, parts = pnmix_widths(name), pnmix_parts(name)
    group_tokens = int(make.GOOD[name].options["group_tokens"])
    _, tensors = spec_reader.decode_file(good_path(name).read_bytes())
    for tensor, _, shape, raw in make.GOOD[name].listing:
        is_exact = []
        for span, flags in parts[tensor]:
            coded = np.repeat(flags, group_tokens, axis=1)[:, : span.coded]
            is_exact.append(np.pad(coded, [(0, 0), (span.first, span.last)], constant_values=1))
        exact = np.concatenate(is_exact, axis=1).astype(bool)
        stated, decoded = (
            np.frombuffer(data, "<u2").reshape(shape[1:]) for data in (raw, tensors[tensor][2])
        )
        np.testing.assert_array_equal(decoded[exact], stated[exact])
        x, y = (spec_lynx.bf16_to_float32(bits) for bits in (stated, decoded))
        axis = 2 if tensor.endswith("value") else 1
        spread = np.nanmax(x, axis, keepdims=True) - np.nanmin(x, axis, keepdims=True)
        error = np.where(exact[..., None], 0, np.abs(y - x))
        # a step of the code; half of it, and what rounding start and step adds
        assert (error <= spread / (2 ** widths[tensor] - 1)).all()
        assert error.max() > 0


@pytest.mark.parametrize("name", BAD)
def test_bad_vector_is_refused_with_the_stated_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.kvz"
    data = (FOLDER / "bad" / path.name).read_bytes()
    error, message = getattr(errors, BAD[name]["error"]), BAD[name]["message"]
    in_sequence = SEQUENTIAL_MESSAGES.get(name, message)
    tiny_archive.assert_rejected(path, data, error, in_sequence, tiny_archive.SEQUENTIAL)
    if name not in SEQUENTIAL_ONLY:
        tiny_archive.assert_rejected(path, data, error, message, [tiny_archive.read_at_random])


@pytest.mark.parametrize("name", sorted(set(BAD) - {"flipped-bit"}))
def test_bad_vector_has_correct_checksums_elsewhere(name: str) -> None:
    # so that the stated rule is what refuses it, not a checksum
    assert BAD[name]["error"] != "ChecksumMismatch"
    made = {n: make.bad_bytes(n) for n in make.BAD}
    made.update({n: data for n, (data, _, _) in make.damaged().items()})
    assert (FOLDER / "bad" / f"{name}.kvz").read_bytes() == made[name]


def test_making_the_vectors_again_changes_nothing_and_a_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "FOLDER", tmp_path)
    monkeypatch.setattr(make, "GOOD", {"gaac-raw-chunk": make.GOOD["gaac-raw-chunk"]})
    make.main()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    make.main()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    (tmp_path / "bad" / "magic.kvz").write_bytes(b"changed")
    with pytest.raises(SystemExit, match="exists with other bytes"):
        make.main()
    assert (tmp_path / "bad" / "magic.kvz").read_bytes() == b"changed"
