"""Compress, decompress, verify and calibrate from the command line: files, pipes, selections."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from cli_support import (
    Tensors,
    as_read,
    assert_refused,
    command_line,
    environment,
    kvz,
    names,
    read_cache,
    small_cache,
    write_cache,
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_cache(tmp_path / "cache.safetensors", small_cache(), {"from": "a test"})
    return tmp_path


def ok(result: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[bytes]:
    assert result.returncode == 0, result.stderr.decode()
    return result


def test_a_cache_comes_back_exactly_under_the_default_names(work: Path) -> None:
    ok(kvz("compress", "cache.safetensors", cwd=work))
    (work / "cache.safetensors").rename(work / "before.safetensors")
    ok(kvz("decompress", "cache.kvz", cwd=work))
    assert names(work) == {"before.safetensors", "cache.kvz", "cache.safetensors"}
    assert read_cache((work / "cache.safetensors").read_bytes()) == as_read(small_cache())
    ok(kvz("verify", "cache.kvz", "--against", "before.safetensors", cwd=work))


@pytest.mark.parametrize("codec", ["zstd", "gaac"])
def test_pipes_carry_the_same_bytes_as_files(work: Path, codec: str) -> None:
    data = (work / "cache.safetensors").read_bytes()
    ok(kvz("compress", "cache.safetensors", "-o", "a.kvz", "--codec", codec, cwd=work))
    archive = (work / "a.kvz").read_bytes()
    piped = ok(kvz("compress", "-", "-o", "-", "--codec", codec, cwd=work, data=data))
    assert piped.stdout == archive
    assert piped.stderr.startswith(b"<stdout>: 37.6 kB -> ")
    restored = ok(kvz("decompress", "-", "-o", "-", cwd=work, data=archive))
    assert read_cache(restored.stdout) == as_read(small_cache())
    checked = ok(kvz("verify", "-", cwd=work, data=archive))
    assert checked.stdout.startswith(b"<stdin>: ok, 7 tensors, ")


def test_two_commands_in_a_pipeline_work_while_the_archive_is_written(work: Path) -> None:
    first = subprocess.Popen(
        command_line("compress", "cache.safetensors", "-o", "-", "--codec", "zstd"),
        cwd=work,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    second = ok(kvz("decompress", "-", "-o", "back.safetensors", cwd=work, stdin=first.stdout))
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert second.stdout.startswith(b"back.safetensors: 7 tensors, 37.6 kB from ")
    assert read_cache((work / "back.safetensors").read_bytes()) == as_read(small_cache())


def test_a_truncated_pipe_is_4_and_leaves_no_file(work: Path) -> None:
    archive = ok(kvz("compress", "cache.safetensors", "-o", "-", "--codec", "zstd", cwd=work))
    before = names(work)
    result = kvz("decompress", "-", "-o", "out", cwd=work, data=archive.stdout[:-1])
    assert_refused(
        result,
        4,
        "<stdin>: the stream ends where at least 1 more bytes must come: it is incomplete",
    )
    assert names(work) == before


def test_layers_and_tokens_select_what_is_written(work: Path) -> None:
    ok(kvz("compress", "cache.safetensors", "--codec", "zstd", cwd=work))
    ok(
        kvz(
            *("decompress", "cache.kvz", "-o", "part.safetensors"),
            *("--layers", "2,0-0", "--tokens", "10:75"),
            cwd=work,
        )
    )
    expected: Tensors = {
        name: (dtype, np.ascontiguousarray(array[:, :, 10:75]))
        for name, (dtype, array) in small_cache().items()
        if name.startswith(("layers.0.", "layers.2."))
    }
    assert read_cache((work / "part.safetensors").read_bytes()) == as_read(expected)


def test_json_is_one_document_and_agrees_with_the_files(work: Path) -> None:
    compressed = json.loads(ok(kvz("compress", "cache.safetensors", "--json", cwd=work)).stdout)
    stored = (work / "cache.kvz").stat().st_size
    # 96 tokens of 8 bytes, 6 tensors of 2 heads, 96 tokens and 16 channels of 2 bytes
    original = 96 * 8 + 6 * 2 * 96 * 16 * 2
    assert compressed["original_nbytes"] == original
    assert compressed["stored_nbytes"] == stored
    assert compressed["ratio"] == pytest.approx(original / stored)
    assert (compressed["num_tensors"], compressed["num_fallback_tensors"]) == (7, 1)
    restored = json.loads(ok(kvz("decompress", "cache.kvz", "-fo", "o", "--json", cwd=work)).stdout)
    assert (restored["num_tensors"], restored["restored_nbytes"]) == (7, original)
    verified = json.loads(ok(kvz("verify", "cache.kvz", "--json", cwd=work)).stdout)
    assert verified["ok"] is True
    assert verified["files"][0]["nbytes"] == stored


def test_the_report_says_how_many_tensors_went_through_another_codec(work: Path) -> None:
    line = ok(kvz("compress", "cache.safetensors", cwd=work)).stdout.decode()
    assert line.startswith("cache.kvz: 37.6 kB -> ")
    assert line.endswith(" GB/s, gaac, 7 tensors, 1 by zstd\n")


def test_codec_options_reach_the_archive(work: Path) -> None:
    given = ["--codec-option", "windows=3/4", "--codec-option", "axis=channel"]
    ok(kvz("compress", "cache.safetensors", *given, cwd=work))
    found = json.loads(ok(kvz("inspect", "cache.kvz", "--json", cwd=work)).stdout)
    assert found["codecs"][0]["config"] == {"windows": [3, 4], "axis": "channel"}


def test_layout_and_pattern_make_foreign_tensors_caches(tmp_path: Path) -> None:
    array = small_cache()["layers.0.key"][1]
    write_cache(tmp_path / "c", {"blob": ("BF16", array), "other": ("BF16", array)})
    ok(kvz("compress", "c", "--pattern", "^blob$", "--layout", "BHTD", cwd=tmp_path))
    found = json.loads(ok(kvz("inspect", "c.kvz", "--json", cwd=tmp_path)).stdout)
    assert {t["name"]: t["codec"] for t in found["others"]} == {"blob": "gaac", "other": "zstd"}


def test_a_pipe_gets_no_progress_bar(work: Path) -> None:
    for command in (["compress", "cache.safetensors"], ["verify", "cache.kvz"]):
        assert ok(kvz(*command, cwd=work)).stderr == b""


@pytest.mark.parametrize(("pause_s", "drawn"), [(0.0, False), (1.0, True)])
def test_a_terminal_gets_a_progress_bar_once_a_run_takes_long(
    work: Path, pause_s: float, drawn: bool
) -> None:
    ok(kvz("compress", "cache.safetensors", "--codec", "raw", cwd=work))
    archive = (work / "cache.kvz").read_bytes()
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command_line("verify", "-", "--threads", "1"),
        cwd=work,
        env=environment(TERM="xterm"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    assert process.stdin is not None
    half = len(archive) // 2
    process.stdin.write(archive[:half])
    process.stdin.flush()
    time.sleep(pause_s)
    stdout, _ = process.communicate(archive[half:], timeout=60)
    shown = b""
    # at the end of the other side a terminal gives an error rather than nothing
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 1 << 16):
            shown += piece
    os.close(ours)
    assert (process.returncode, stdout[:12]) == (0, b"<stdin>: ok,")
    assert (b"verifying" in shown) == drawn
    assert drawn or shown == b""


# -- codebooks


def test_a_codebook_from_several_captures_serves_others(work: Path) -> None:
    write_cache(work / "longer.safetensors", small_cache(num_tokens=2100, seed=7))
    made = ok(kvz("calibrate", "cache.safetensors", "longer.safetensors", "-o", "book", cwd=work))
    assert made.stdout.startswith(b"book: codebooks of gaac for 6 tensors, ")
    assert made.stdout.endswith(b" from 2 captures\n")
    ok(kvz("compress", "cache.safetensors", "--codebook", "book", cwd=work))
    ok(kvz("verify", "cache.kvz", "--against", "cache.safetensors", cwd=work))
    document = json.loads((work / "book").read_text())
    assert document["codec"] == {"name": "gaac", "windows": [2, 3, 4], "axis": "token"}


def test_pooled_samples_weigh_every_capture(tmp_path: Path) -> None:
    # exponents 100-115 in one capture, 120-135 in the other, with more tokens for the latter:
    # of 32 candidates the 16 most frequent are those of the longer one
    def capture(name: str, num_tokens: int, first: int) -> None:
        exponents = first + np.arange(num_tokens * 16, dtype=np.uint16) % 16
        array = (exponents << 7).reshape(1, 1, num_tokens, 16)
        write_cache(tmp_path / name, {"layers.0.key": ("BF16", array)})

    capture("short", 64, 100)
    capture("long", 128, 120)
    for order in (["short", "long"], ["long", "short"]):
        ok(kvz("calibrate", *order, "-fo", "book", "--codec", "splitzip", cwd=tmp_path))
        document = json.loads((tmp_path / "book").read_text())
        # base64 of the bytes 120 ... 135
        assert document["tensors"]["layers.0.key"]["codebook"] == "eHl6e3x9fn+AgYKDhIWGhw=="


def test_captures_of_different_models_give_no_codebook(work: Path) -> None:
    before = names(work)
    wider = {n: (d, np.concatenate([a, a], axis=-1)) for n, (d, a) in small_cache().items()}
    write_cache(work / "wide", wider)
    write_cache(work / "deep", small_cache(num_layers=4))
    result = kvz("calibrate", "cache.safetensors", "wide", "-o", "book", cwd=work)
    assert_refused(
        result,
        5,
        "wide: tensor 'layers.0.key' has shape [1, 2, 96, 32] BF16, in cache.safetensors "
        "[1, 2, 96, 16] BF16: they may differ in tokens only",
    )
    result = kvz("calibrate", "cache.safetensors", "deep", "-o", "book", cwd=work)
    assert_refused(
        result, 5, "deep: tensor 'layers.3.key' is in this file, but not in cache.safetensors"
    )
    assert names(work) == before | {"wide", "deep"}


def test_a_cache_without_tensors_for_the_codec_gives_no_codebook(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", {"input_ids": ("I64", np.zeros((1, 4), np.int64))})
    result = kvz("calibrate", "c", "-o", "book", cwd=tmp_path)
    assert_refused(result, 2, "c: holds no cache tensor that codec gaac takes")


def test_a_codebook_is_not_written_over_its_capture(work: Path) -> None:
    result = kvz("calibrate", "cache.safetensors", "-fo", "cache.safetensors", cwd=work)
    assert_refused(result, 2, "cache.safetensors: input and output are the same file")


def test_bench_prints_a_table_and_writes_json(work: Path) -> None:
    result = ok(
        kvz(
            *("bench", "cache.safetensors", "--codec", "raw", "--rounds", "1"),
            *("--threads", "1", "--json", "r.json"),
            cwd=work,
        )
    )
    assert b"memcpy" in result.stdout
    document = json.loads((work / "r.json").read_text())
    assert document["rounds"] == 1
    assert_refused(
        kvz("bench", "cache.safetensors", "--json", "r.json", cwd=work),
        6,
        "r.json: exists already; use -f to overwrite it",
    )
