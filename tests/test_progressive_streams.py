"""Progressive archives that arrive: streams that stop after the anchors, or too early."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

import progressive_support as support
import pytest
from progressive_support import (
    ANCHOR_VALUES,
    ANCHORS_IN_ORDER,
    FULL_IN_ORDER,
    FULL_VALUES,
    KEY,
    Gate,
    assert_refused,
    tiny_lynx,
)

import kvz
from kvz.formats.errors import ConfigError, TruncatedFile
from kvz.progressive import ProgressiveReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.kvz"


@pytest.fixture(scope="module")
def data() -> bytes:
    return tiny_lynx().to_bytes()


@pytest.fixture(scope="module")
def anchor_nbytes(data: bytes) -> int:
    """End of the last chunk: its payload is followed by the frame of the first residual."""
    last = tiny_lynx().sections[6].payload
    return data.rindex(last) + len(last)


def test_stream_may_stop_after_the_last_anchor(path: Path, data: bytes, anchor_nbytes: int) -> None:
    path.write_bytes(data[:anchor_nbytes])
    for read in ANCHORS_IN_ORDER:
        assert read(path) == ANCHOR_VALUES
    path.with_suffix(".out").unlink()
    assert_refused(path, FULL_IN_ORDER, TruncatedFile, "it is incomplete")
    path.write_bytes(data[: anchor_nbytes - 1])
    assert_refused(
        path, [*FULL_IN_ORDER, *ANCHORS_IN_ORDER], TruncatedFile, "at least 1 more bytes"
    )


def test_archive_cut_anywhere_is_refused(path: Path, data: bytes, anchor_nbytes: int) -> None:
    for end in range(1, len(data), 41):
        path.write_bytes(data[:end])
        assert_refused(path, [support.piped, support.arrived], TruncatedFile, "incomplete")
        if end < anchor_nbytes:
            assert_refused(path, [support.anchors_piped], TruncatedFile, "incomplete")


@pytest.mark.parametrize("threads", [1, 2])
def test_pipe_that_would_block_after_the_last_anchor_is_left_alone(
    path: Path, data: bytes, anchor_nbytes: int, threads: int
) -> None:
    end, start = os.pipe()
    os.write(start, data[:anchor_nbytes])
    with open(end, "rb") as stream, open(start, "wb"):
        found = support.through_pipe(stream, path, anchor_only=True, threads=threads)
    assert found == ANCHOR_VALUES


def test_anchors_of_tensors_without_elements_need_no_sections(path: Path) -> None:
    archive = tiny_lynx()
    archive.head["tensors"] = [{**archive.head["tensors"][0], "shape": [1, 0, 1]}]
    archive.sections = []
    whole = archive.to_bytes()
    path.write_bytes(whole[: len(whole) - 64 - 32])
    for read in ANCHORS_IN_ORDER:
        assert read(path) == {KEY: b""}
    with pytest.raises(TruncatedFile):
        support.piped(path)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_anchors_are_usable_while_the_residuals_are_on_their_way(
    data: bytes, anchor_nbytes: int, step: int
) -> None:
    gate = Gate(data, anchor_nbytes, step=step)
    with ProgressiveReader(cast(BinaryIO, gate), name="wire") as reader:
        anchor = reader.anchor()
        assert gate.waiting.wait(60)
        assert not reader.is_complete()
        assert [(event.what, event.nbytes) for event in reader.events] == [
            ("head", 64 + len(data[64:].split(b'"codec":0}]}')[0]) + len('"codec":0}]}')),
            ("anchor", anchor_nbytes),
        ]
        assert reader.nbytes_read == anchor_nbytes
        assert support.tensor_bytes(anchor) == ANCHOR_VALUES
        gate.opened.set()
        assert support.tensor_bytes(reader.full()) == FULL_VALUES
        assert support.tensor_bytes(anchor) == ANCHOR_VALUES
        assert reader.is_complete()
    assert reader.events[-1][::2] == ("complete", len(data))
    times = [event.seconds for event in reader.events]
    assert times == sorted(times)
    assert anchor.metadata == {"kvz.lossy": "lynx (anchors only)"}
    assert reader.full().metadata == reader.metadata == {"kvz.lossy": "lynx"}
    assert (anchor.dtype(KEY), anchor.shape(KEY)) == ("BF16", (1, 6, 1))


def test_error_among_the_residuals_is_raised_by_full_alone(path: Path, data: bytes) -> None:
    path.write_bytes(data[:-1])
    with open(path, "rb") as file, ProgressiveReader(file) as reader:
        for _ in range(2):
            with pytest.raises(TruncatedFile, match=re.escape(f"{path}: ")):
                reader.full()
            assert support.tensor_bytes(reader.anchor()) == ANCHOR_VALUES
        assert reader.is_complete()
        assert [event.what for event in reader.events] == ["head", "anchor"]


@pytest.mark.parametrize("kind", ["stream", "path"])
def test_close_ends_the_wait_of_another_thread(
    tmp_path: Path, data: bytes, anchor_nbytes: int, kind: str
) -> None:
    gate = Gate(data, anchor_nbytes)
    source: Any = gate
    if kind == "path":
        source = tmp_path / "fifo"
        os.mkfifo(source)
        writer = os.open(source, os.O_RDWR)
        os.write(writer, data[:anchor_nbytes])
    reader = ProgressiveReader(source)
    anchor = reader.anchor()
    errors: list[ConfigError] = []

    def wait() -> None:
        with pytest.raises(ConfigError, match="the reader was closed") as caught:
            reader.full()
        errors.append(caught.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.05)
    reader.close()
    waiting.join(10)
    assert len(errors) == 1
    assert reader.is_complete()
    assert support.tensor_bytes(anchor) == ANCHOR_VALUES
    gate.opened.set()
    if kind == "path":
        os.close(writer)


def test_stream_that_is_no_archive_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(TruncatedFile, match="s: ends after 63 bytes"):
        ProgressiveReader(io.BytesIO(data[:63]), name="s")
    with pytest.raises(kvz.SourceError, match="nowhere"):
        ProgressiveReader("nowhere")


def test_stream_of_the_caller_stays_open(data: bytes) -> None:
    stream = io.BytesIO(data)
    with ProgressiveReader(stream) as reader:
        reader.full()
    assert not stream.closed
