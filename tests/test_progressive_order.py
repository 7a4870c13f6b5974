"""Progressive archives whose sections are in the wrong place, or of the wrong length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import progressive_support as support
import pytest
from archive_builder import CODEBOOK, ENCODED, Section
from progressive_support import (
    ANCHOR,
    ANCHOR_VALUES,
    ANCHORS,
    ANCHORS_IN_ORDER,
    FULL,
    FULL_IN_ORDER,
    KEY,
    RESIDUAL,
    VALUE,
    Read,
    assert_refused,
    tiny_lynx,
)
from tiny_archive import GAAC_CODEBOOK

from kvz.formats.errors import ChecksumMismatch, InvalidField

AT_RANDOM: list[Read] = [support.at_random, support.anchors_at_random]
Edit: TypeAlias = Callable[[list[Section]], None]
#: What is changed, what a reader of the index says of it, and what one of a stream says.
Rule: TypeAlias = tuple[Edit, str, str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.kvz"


def moved(source: int, target: int) -> Edit:
    return lambda sections: sections.insert(target, sections.pop(source))


def added(at: int, *section: Any) -> Edit:
    return lambda sections: sections.insert(at, Section(*section))


def without(*numbers: int) -> Edit:
    def apply(sections: list[Section]) -> None:
        for number in sorted(numbers, reverse=True):
            del sections[number]

    return apply


def of_kind(number: int, kind: int) -> Edit:
    return lambda sections: setattr(sections[number], "kind", kind)


def both(text: str) -> tuple[str, str]:
    return text, text


ONCE = "codebook of g does not stand once, before the tensor's chunks"
AMONG_CHUNKS: dict[str, Rule] = {
    "residual before the last chunk": (
        moved(7, 5),
        "the index lists a residual before the last chunk",
        f"residual of chunk 0 of {KEY} comes where chunk 0 of r must be",
    ),
    "residual instead of a chunk": (
        of_kind(0, RESIDUAL),
        "the index lists a residual before the last chunk",
        f"residual of chunk 0 of {KEY} comes where chunk 0 of {KEY} must be",
    ),
    "anchor missing": (
        without(2, 8),
        "the index lists 5 chunks, the head needs 6",
        f"codebook of g comes where chunk 2 of {KEY} must be",
    ),
    "last anchor missing": (
        without(6, 9),
        "the index lists 5 chunks, the head needs 6",
        f"residual of chunk 0 of {KEY} comes where chunk 0 of {VALUE} must be",
    ),
    "anchor twice": (
        added(3, ANCHOR, 0, 2, support.anchor(12, 4)),
        "the index lists 7 chunks, the head needs 6",
        f"chunk 2 of {KEY} comes where chunk 0 of g must be",
    ),
    "anchor and the chunk as it is": (
        added(1, ANCHOR, 0, 1, support.anchor(12, 4)),
        "the index lists 7 chunks, the head needs 6",
        f"chunk 1 of {KEY} comes where chunk 2 of {KEY} must be",
    ),
    "anchors in another order": (
        moved(0, 2),
        f"the index lists chunk 0 of {KEY} twice or out of order",
        f"chunk 1 of {KEY} comes where chunk 0 of {KEY} must be",
    ),
    "ENCODED in a progressive tensor": (
        of_kind(0, ENCODED),
        *both(f"chunk 0 of {KEY}: codec lynx makes no ENCODED section"),
    ),
    "ANCHOR in a gaac tensor": (
        of_kind(4, ANCHOR),
        *both("chunk 0 of g: codec gaac makes no ANCHOR section"),
    ),
    "ANCHOR in a raw tensor": (
        of_kind(5, ANCHOR),
        *both("chunk 0 of r: codec raw makes no ANCHOR section"),
    ),
    "codebook after its chunk": (added(5, CODEBOOK, 1, 0, GAAC_CODEBOOK), ONCE, ONCE),
    "codebook before another tensor": (
        moved(3, 0),
        ONCE,
        f"codebook of g comes where chunk 0 of {KEY} must be",
    ),
}
AMONG_RESIDUALS: dict[str, Rule] = {
    "residual missing": (
        without(8),
        "the index lists 3 anchors, 2 residuals",
        f"residual of chunk 0 of {VALUE} comes where residual of chunk 2 of {KEY} must be",
    ),
    "last residual missing": (without(9), *both("the index lists 3 anchors, 2 residuals")),
    "all residuals missing": (without(7, 8, 9), *both("the index lists 3 anchors, 0 residuals")),
    "residual twice": (
        added(10, RESIDUAL, 3, 0, b"\0\0"),
        "the index lists 3 anchors, 4 residuals",
        f"residual of chunk 0 of {VALUE} comes after the last section that the head needs",
    ),
    "residuals in another order": (
        moved(7, 8),
        f"the index does not list the residual of chunk 0 of {KEY} in its place",
        f"residual of chunk 2 of {KEY} comes where residual of chunk 0 of {KEY} must be",
    ),
    "residual of a chunk as it is": (
        added(8, RESIDUAL, 0, 1, b"\0\0"),
        "the index lists 3 anchors, 4 residuals",
        f"residual of chunk 1 of {KEY} comes where residual of chunk 2 of {KEY} must be",
    ),
    "residual of a gaac tensor": (
        added(8, RESIDUAL, 1, 0, b"\0\0"),
        "the index lists 3 anchors, 4 residuals",
        "residual of chunk 0 of g: codec gaac makes no RESIDUAL section",
    ),
    "chunk after the residuals": (
        added(10, ANCHOR, 3, 0, support.anchor(0, 8)),
        "the index lists a residual before the last chunk",
        f"chunk 0 of {VALUE} comes after the last section that the head needs",
    ),
    "codebook among the residuals": (
        added(8, CODEBOOK, 1, 0, GAAC_CODEBOOK),
        "the index lists a residual before the last chunk",
        f"codebook of g comes where residual of chunk 2 of {KEY} must be",
    ),
}


@pytest.mark.parametrize("name", AMONG_CHUNKS)
def test_order_of_chunks_is_enforced_by_every_reader(path: Path, name: str) -> None:
    edit, by_index, in_order = AMONG_CHUNKS[name]
    archive = tiny_lynx()
    edit(archive.sections)
    path.write_bytes(archive.to_bytes())
    assert_refused(path, AT_RANDOM, InvalidField, by_index)
    assert_refused(path, [*FULL_IN_ORDER, *ANCHORS_IN_ORDER], InvalidField, in_order)


@pytest.mark.parametrize("name", AMONG_RESIDUALS)
def test_order_of_residuals_is_enforced_by_whoever_reads_them(path: Path, name: str) -> None:
    edit, by_index, in_order = AMONG_RESIDUALS[name]
    archive = tiny_lynx()
    edit(archive.sections)
    path.write_bytes(archive.to_bytes())
    assert_refused(path, AT_RANDOM, InvalidField, by_index)
    assert_refused(path, FULL_IN_ORDER, InvalidField, in_order)
    for read in ANCHORS_IN_ORDER:
        assert read(path) == ANCHOR_VALUES


@pytest.mark.parametrize("payload", [b"", b"\0", b"\0\0\0", bytes(64)])
def test_residual_of_another_length_is_rejected(path: Path, payload: bytes) -> None:
    archive = tiny_lynx()
    archive.sections[8].payload = payload
    path.write_bytes(archive.to_bytes())
    message = f"residual of chunk 2 of {KEY} has {len(payload)} bytes, must have 2"
    assert_refused(path, FULL, InvalidField, message)
    assert support.anchors_at_random(path) == ANCHOR_VALUES


@pytest.mark.parametrize("nbytes", [0, 1, 33, 48, 50, 63, 65, 128])
def test_anchor_of_another_length_is_rejected(path: Path, nbytes: int) -> None:
    # beside a residual in memory, up to 63 bytes more or less make no difference
    archive = tiny_lynx()
    archive.sections[2].payload = (support.anchor(12, 4) + bytes(64))[:nbytes]
    path.write_bytes(archive.to_bytes())
    assert_refused(path, [*FULL, *ANCHORS], InvalidField, f"chunk 2 of {KEY}: ")


def test_damaged_residual_leaves_the_anchors_usable(path: Path) -> None:
    archive = tiny_lynx()
    archive.sections[8].frame = {"payload_crc": 1}
    archive.edit_index = lambda entries: entries[8].__setitem__(2, 1)
    path.write_bytes(archive.to_bytes())
    assert_refused(path, FULL, ChecksumMismatch, f"residual of chunk 2 of {KEY}")
    for read in ANCHORS:
        assert read(path) == ANCHOR_VALUES
        path.with_suffix(".out").unlink(missing_ok=True)
