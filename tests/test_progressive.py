"""Progressive archives: what a writer makes, and what of it each reader gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import progressive_support as support
import pytest
import torch
from cli_support import assert_refused, names
from cli_support import kvz as kvz_command
from progressive_support import (
    ANCHOR_VALUES,
    ANCHORS,
    FULL_VALUES,
    METADATA,
    RESIDUAL,
    Read,
    tiny_lynx,
)
from safetensors_file import read_tensors, safetensors_bytes

import kvz
from kvz.formats.errors import ConfigError, ContentMismatch
from kvz.inspection import inspect
from kvz.progressive import ProgressiveReader


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return support.mixed_tensors()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any]) -> Path:
    path = tmp_path_factory.mktemp("source") / "c.safetensors"
    path.write_bytes(safetensors_bytes(support.listing(tensors), METADATA))
    return path


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return support.compress(source, tmp_path_factory.mktemp("archive") / "c.kvz")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.kvz"


def metadata(path: Path) -> dict[str, str]:
    return read_tensors(path)[0]


# -- what a writer makes


def test_residuals_follow_all_chunks_in_the_order_of_their_anchors(archive: Path) -> None:
    with kvz.open(archive) as opened:
        rows = opened.index[["tensor", "chunk", "kind"]].tolist()
        assert [t.chunk_tokens for t in opened.head.tensors if t.codec == 0] == [64, 64]
    key = [(1, 0, 4), (1, 1, 4), (1, 2, 4), (1, 3, 2)]
    value = [(3, 0, 4), (3, 1, 2), (3, 2, 4), (3, 3, 4)]
    chunks = [(0, 0, 3), *key, (2, 0, 3), (2, 1, 3), *value, (4, 0, 3)]
    assert rows == [*chunks, *((t, c, 5) for t, c, kind in chunks if kind == 4)]


@pytest.mark.parametrize("page_tokens", [48, 64, 256])
@pytest.mark.parametrize("tokens", [100, 1000, 5000])
def test_chunks_hold_whole_pages(path: Path, page_tokens: int, tokens: int) -> None:
    cache = {"layers.0.key": torch.zeros((1, 8, tokens, 128), dtype=torch.bfloat16)}
    options = {"page_tokens": str(page_tokens), "group_tokens": "16"}
    kvz.compress(cache, path, "lynx", codec_options=options, threads=1)
    with kvz.open(path) as opened:
        (entry,) = opened.head.tensors
    assert entry.token_axis == 2
    assert entry.chunk_tokens % page_tokens == 0
    # 2 KiB a token
    assert entry.num_chunks == max(1, round(tokens / 512))


def test_inspect_says_where_the_anchors_end(archive: Path, tensors: dict[str, Any]) -> None:
    found = inspect(archive)
    with kvz.open(archive) as opened:
        before = opened.index[opened.index["kind"] != RESIDUAL][-1]
    end = int(before["offset"] + before["length"])
    num_elements = sum(array.size for array in tensors.values())
    assert found.anchor_nbytes == end
    assert found.anchor_bits_per_element == 8 * end / num_elements
    assert (found.lossless, found.lossy) == (False, "lynx")


@pytest.mark.parametrize(("codec", "minor"), [("lynx", 2), ("gaac", 1)])
def test_prelude_names_the_version_that_the_codec_needs(
    source: Path, path: Path, codec: str, minor: int
) -> None:
    kvz.compress(source, path, codec, threads=1)
    expected = bytes([0, 0, minor, 0, 0, 0, minor, 0])
    assert path.read_bytes()[8:16] == expected


def test_bytes_do_not_depend_on_threads_or_memory(
    source: Path, archive: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads, limit in ((1, 1 << 20), (2, 1 << 20), (1, 1), (2, 1000)):
        monkeypatch.setattr("kvz.spool._IN_MEMORY_NBYTES", limit)
        support.compress(source, path, threads=threads)
        assert path.read_bytes() == archive.read_bytes()
        kvz.verify(path, threads=threads)
        found = support.through_pipe(path.read_bytes(), path.with_suffix(".out"), threads=threads)
        assert found == support.at_random(path)


# -- what a reader gives


@pytest.mark.parametrize("read", [support.at_random, support.piped, support.arrived])
def test_whole_archive_decodes_as_the_reference_says(
    archive: Path, path: Path, tensors: dict[str, Any], read: Read
) -> None:
    path.write_bytes(archive.read_bytes())
    assert read(path) == support.expected(tensors, full=True)


@pytest.mark.parametrize("read", ANCHORS)
def test_anchors_decode_as_the_reference_says(
    archive: Path, path: Path, tensors: dict[str, Any], read: Read
) -> None:
    path.write_bytes(archive.read_bytes())
    assert read(path) == support.expected(tensors, full=False)


@pytest.mark.parametrize("anchor_only", [False, True])
def test_output_file_and_stream_are_the_capture_with_the_values_of_the_reference(
    archive: Path, tmp_path: Path, tensors: dict[str, Any], anchor_only: bool
) -> None:
    values = support.expected(tensors, full=not anchor_only)
    note = "lynx (anchors only)" if anchor_only else "lynx"
    entries = [(n, dtype, shape, values[n]) for n, dtype, shape, _ in support.listing(tensors)]
    whole = safetensors_bytes(entries, {**METADATA, "kvz.lossy": note})
    out = tmp_path / "out.safetensors"
    report = kvz.decompress(archive, out, anchor_only=anchor_only, threads=2)
    assert out.read_bytes() == whole
    assert report.lossy == note
    option = ["--anchor-only"] if anchor_only else []
    result = kvz_command(
        *("decompress", "-", "-o", "-", *option), cwd=tmp_path, data=archive.read_bytes()
    )
    assert result.stdout == whole


def test_values_worked_out_by_hand(path: Path) -> None:
    path.write_bytes(tiny_lynx().to_bytes())
    for read in (support.at_random, support.piped, support.arrived):
        assert read(path) == FULL_VALUES
    for read in (support.anchors_at_random, support.anchors_piped, support.anchors_arrived):
        assert read(path) == ANCHOR_VALUES


@pytest.mark.parametrize("anchor_only", [False, True])
@pytest.mark.parametrize("tokens", [(0, 1), (60, 130), (190, 197), (5, 5)])
def test_selection_is_the_part_of_the_whole(
    archive: Path,
    tmp_path: Path,
    tensors: dict[str, Any],
    tokens: tuple[int, int],
    anchor_only: bool,
) -> None:
    settings: dict[str, Any] = {
        "tokens": slice(*tokens), "layers": [0], "anchor_only": anchor_only, "threads": 1
    }  # fmt: skip
    out = tmp_path / "out"
    kvz.decompress(archive, out, **settings)
    expected = {
        name: support.lossy(tensors[name], full=not anchor_only)[:, :, slice(*tokens)].tobytes()
        for name in ("layers.0.key", "layers.0.value")
    }
    assert {n: raw for n, (_, _, raw) in read_tensors(out)[1].items()} == expected
    assert support.through_pipe(archive.read_bytes(), out, **settings) == expected


def test_anchors_are_read_without_residuals(archive: Path, tmp_path: Path) -> None:
    whole = kvz.decompress(archive, tmp_path / "a", threads=1)
    anchors = kvz.decompress(archive, tmp_path / "b", anchor_only=True, threads=1)
    with kvz.open(archive) as opened:
        residuals = opened.index["length"][opened.index["kind"] == RESIDUAL].sum()
    assert anchors.read_nbytes <= whole.read_nbytes - residuals


def test_lossy_note_outlives_a_lossless_archive(archive: Path, tmp_path: Path) -> None:
    first, again, last = (tmp_path / name for name in ("a.safetensors", "a.kvz", "b.safetensors"))
    kvz.decompress(archive, first, anchor_only=True, threads=1)
    kvz.compress(first, again, "gaac", threads=1)
    kvz.decompress(again, last, threads=1)
    assert last.read_bytes() == first.read_bytes()
    assert metadata(last) == {**METADATA, "kvz.lossy": "lynx (anchors only)"}
    assert (inspect(again).lossless, inspect(again).anchor_nbytes) == (False, None)
    support.compress(first, again)
    kvz.decompress(again, last, overwrite=True, threads=1)
    assert metadata(last)["kvz.lossy"] == "lynx (anchors only); lynx"


def test_archive_without_anchors_has_no_anchor_only(source: Path, tmp_path: Path) -> None:
    kvz.compress(source, tmp_path / "g.kvz", "gaac", threads=1)
    line = "g.kvz: has no anchors: only codec lynx makes them, this archive is of gaac, zstd"
    result = kvz_command("decompress", "g.kvz", "--anchor-only", cwd=tmp_path)
    assert_refused(result, 2, line)
    assert names(tmp_path) == {"g.kvz"}
    with kvz.open(tmp_path / "g.kvz") as opened, pytest.raises(ConfigError, match="no anchors"):
        opened.anchor()
    with pytest.raises(ConfigError, match="has no anchors"):
        ProgressiveReader(tmp_path / "g.kvz")


# -- verify


def test_verify_compares_with_what_the_codec_makes_of_a_capture(
    archive: Path, source: Path, tensors: dict[str, Any], tmp_path: Path
) -> None:
    assert kvz.verify(archive, against=source, threads=1).num_sections == 18
    other = tmp_path / "other.safetensors"
    # an exact token, a coded one, one of a chunk stored as it is, and a lossless tensor
    for name, index in (
        ("layers.0.key", (0, 1, 2, 3)),
        ("layers.0.key", (0, 0, 100, 7)),
        ("layers.0.value", (0, 1, 70, 0)),
        ("layers.0.query", (0, 1, 69, 7)),
    ):
        changed = {**tensors, name: tensors[name].copy()}
        changed[name][index] ^= 0x8000
        other.write_bytes(safetensors_bytes(support.listing(changed), METADATA))
        with pytest.raises(ContentMismatch, match=f"{name} differs at element"):
            kvz.verify(archive, against=other, threads=1)
    other.write_bytes(safetensors_bytes(support.listing(tensors), {"given": "u"}))
    with pytest.raises(ContentMismatch, match="metadata"):
        kvz.verify(archive, against=other, threads=1)
