"""Archives made and read on a GPU: the CPU's bytes, the CPU's errors, nothing left running."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
from cli_support import bf16, read_cache, write_cache
from gpu_support import INTERPRETED, MARKS

import kvz
from kvz.formats import container
from kvz.formats.errors import (
    ChecksumMismatch,
    ConfigError,
    ContentMismatch,
    DamagedFile,
    SourceError,
)
from kvz.safetensors_io import FileReader

pytest.importorskip("torch")
pytestmark = MARKS

CODECS = [("gaac", {"windows": "2/3/4"}), ("gaac", {"windows": "3/4"}), ("splitzip", {})]
each_codec = pytest.mark.parametrize(
    ("name", "options"), CODECS, ids=["gaac-234", "gaac-34", "splitzip"]
)
STAGES = ["calibrate", "read", "copy_in", "codec", "copy_out", "checksum", "write", "whole"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks to a tensor, several batches to a file."""
    monkeypatch.setattr("kvz.layout.TARGET_CHUNK_NBYTES", 4096)
    monkeypatch.setattr("kvz.gpu.pipeline.BATCH_NBYTES", 12_000)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Keys and values with other tensors between them, two head dims, one that is stored raw."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, (1, 1, 70, 32), np.uint16)
    tensors: dict[str, tuple[str, Any]] = {
        "input_ids": ("I64", np.arange(70)[None]),
        "layers.0.key": ("BF16", bf16((1, 1, 70, 64), 1)),
        "layers.0.norm": ("F32", np.linspace(0, 1, 99, dtype=np.float32)),
        "layers.0.value": ("BF16", bf16((1, 2, 40, 32), 2)),
        "layers.1.key": ("BF16", noise),
        "layers.1.value": ("BF16", np.zeros((1, 2, 0, 64), np.uint16)),
        "layers.2.key": ("BF16", bf16((2, 1, 9, 64), 3)),
    }
    return write_cache(tmp_path / "cache.safetensors", tensors, {"a": "b"})


@pytest.fixture
def archive(cache: Path) -> Path:
    path = cache.with_name("cpu.kvz")
    kvz.compress(cache, path, "splitzip")
    return path


def no_threads_left() -> bool:
    return not any(thread.name.startswith("kvz") for thread in threading.enumerate())


@each_codec
def test_archives_are_those_of_the_cpu_and_come_back(
    name: str, options: dict[str, str], cache: Path
) -> None:
    cpu, gpu, back = (cache.with_name(n) for n in ("cpu.kvz", "gpu.kvz", "back.safetensors"))
    kvz.compress(cache, cpu, name, codec_options=options)
    report = kvz.compress(cache, gpu, name, codec_options=options, device="cuda", threads=2)
    assert gpu.read_bytes() == cpu.read_bytes()
    assert report.device == "cuda"
    assert report.stages is not None
    assert list(report.stages) == STAGES
    assert report.stages["whole"] >= report.stages["write"] > 0
    restored = kvz.decompress(cpu, back, device="cuda", threads=2)
    assert read_cache(back.read_bytes()) == read_cache(cache.read_bytes())
    assert restored.stages is not None
    assert restored.stages["codec"] > 0
    assert no_threads_left()


def test_a_mapping_with_strides_is_compressed_as_on_the_cpu(tmp_path: Path) -> None:
    arrays = {"layers.0.key": bf16((1, 80, 2, 64), 4).swapaxes(1, 2)}
    torch = pytest.importorskip("torch")
    tensors = {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        for name, array in arrays.items()
    }
    kvz.compress(tensors, tmp_path / "cpu.kvz", "splitzip")
    kvz.compress(tensors, tmp_path / "gpu.kvz", "splitzip", device="cuda:0")
    assert (tmp_path / "gpu.kvz").read_bytes() == (tmp_path / "cpu.kvz").read_bytes()


def test_standard_input_is_compressed_as_on_the_cpu(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(buffer=io.BytesIO(cache.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stream)
    kvz.compress("-", archive.with_name("gpu.kvz"), "splitzip", device="cuda")
    assert archive.with_name("gpu.kvz").read_bytes() == archive.read_bytes()


def test_a_codebook_file_is_used_as_on_the_cpu(cache: Path) -> None:
    book, cpu, gpu = (cache.with_name(n) for n in ("book.json", "cpu.kvz", "gpu.kvz"))
    kvz.calibrate([cache], book, "splitzip")
    kvz.compress(cache, cpu, "splitzip", codebook=book)
    kvz.compress(cache, gpu, "splitzip", codebook=book, device="cuda")
    assert gpu.read_bytes() == cpu.read_bytes()


@pytest.mark.parametrize(
    "selection", [{"layers": [2, 0]}, {"layers": [0, 2], "tokens": slice(3, 9)}]
)
def test_a_selection_is_that_of_the_cpu(archive: Path, selection: dict[str, Any]) -> None:
    cpu, gpu = archive.with_name("cpu.safetensors"), archive.with_name("gpu.safetensors")
    kvz.decompress(archive, cpu, **selection)
    kvz.decompress(archive, gpu, device="cuda", **selection)
    assert gpu.read_bytes() == cpu.read_bytes()


def test_verify_compares_every_element(archive: Path, cache: Path) -> None:
    report = kvz.verify(archive, against=cache, device="cuda")
    assert report.num_tensors == 7
    assert report.device == "cuda"
    data = bytearray(cache.read_bytes())
    data[-1] ^= 1
    cache.write_bytes(data)
    with pytest.raises(ContentMismatch, match=r"layers.2.key differs at element \[1, 8, 63\]"):
        kvz.verify(archive, against=cache, device="cuda")
    assert no_threads_left()


def rows_of(path: Path, tensor: str) -> list[tuple[int, int]]:
    """Offset and length of the encoded sections of a tensor."""
    with kvz.open(path) as opened:
        number = [entry.name for entry in opened.head.tensors].index(tensor)
        rows = opened.index[(opened.index["tensor"] == number) & (opened.index["kind"] == 3)]
        return [(int(row["offset"]), int(row["length"])) for row in rows]


@pytest.mark.parametrize("read", ["decompress", "verify"])
def test_a_damaged_chunk_is_named(archive: Path, read: str) -> None:
    offset, _ = rows_of(archive, "layers.0.key")[1]
    data = bytearray(archive.read_bytes())
    data[offset + 20] ^= 1
    archive.write_bytes(data)
    out = archive.with_name("out.safetensors")
    run: Callable[..., Any] = partial(kvz.verify, archive)
    if read == "decompress":
        run = partial(kvz.decompress, archive, out)
    with pytest.raises(ChecksumMismatch, match=r"chunk 1 of layers\.0\.key"):
        run(device="cuda")
    assert not out.exists()
    assert no_threads_left()


def test_streams_that_contradict_each_other_are_told_as_on_the_cpu(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums do not protect from a hostile writer; here they are not looked at."""
    offset, _ = rows_of(archive, "layers.0.key")[0]
    data = bytearray(archive.read_bytes())
    fixed = 64 * 64 + 64 * 64 // 2  # where the offsets of a chunk of 64 tokens start
    data[offset + fixed] ^= 1
    archive.write_bytes(data)
    monkeypatch.setattr(container, "_check_sum", lambda *_: None)
    monkeypatch.setattr("kvz.archive.container.checksum", lambda _: 0)
    monkeypatch.setattr("kvz.archive.Archive._check_row", lambda *_: None)
    out = archive.with_name("out.safetensors")
    messages = []
    for device in ("cpu", "cuda"):
        with pytest.raises(DamagedFile) as raised:
            kvz.decompress(archive, out, device=device)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "chunk 0 of layers.0.key: splitzip" in messages[0]


def test_a_source_that_fails_leaves_no_file_and_no_thread(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def read(self: FileReader, start: int, out: cases.U16) -> None:
        calls.append(start)
        if len(calls) > 6:
            raise SourceError("the disk is gone")
        out[:] = 0

    monkeypatch.setattr(FileReader, "read", read)
    with pytest.raises(SourceError, match=r"cache\.safetensors: the disk is gone"):
        kvz.compress(cache, cache.with_name("out.kvz"), "splitzip", device="cuda")
    assert {path.name for path in cache.parent.iterdir()} == {"cache.safetensors"}
    assert no_threads_left()


@pytest.mark.parametrize(
    ("codec", "options", "message"),
    [
        ("gaac", {"axis": "channel"}, "axis=channel has no GPU kernels; use device cpu"),
        ("zstd", {}, "codec zstd has no GPU kernels"),
        ("raw", {}, "codec raw has no GPU kernels"),
    ],
)
def test_codecs_without_gpu_kernels_are_refused(
    cache: Path, codec: str, options: dict[str, str], message: str
) -> None:
    path = cache.with_name("c.kvz")
    with pytest.raises(ConfigError, match=message):
        kvz.compress(cache, path, codec, codec_options=options, device="cuda")
    assert not path.exists()
    kvz.compress(cache, path, codec, codec_options=options)
    with pytest.raises(ConfigError, match="no GPU kernels"):
        kvz.decompress(path, cache.with_name("out.safetensors"), device="cuda")
    with pytest.raises(ConfigError, match="no GPU kernels"):
        kvz.verify(path, device="cuda")


def test_heads_too_wide_for_the_kernels_are_refused(tmp_path: Path) -> None:
    cache = write_cache(
        tmp_path / "c.safetensors", {"layers.0.key": ("BF16", bf16((1, 1, 2, 1024)))}
    )
    with pytest.raises(ConfigError, match="up to 1023 channels, not 1024"):
        kvz.compress(cache, tmp_path / "c.kvz", device="cuda")


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU, not the interpreter")
def test_a_device_that_does_not_exist_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match="device cuda:99: CUDA devices found"):
        kvz.compress(cache, cache.with_name("c.kvz"), device="cuda:99")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA"])
def test_names_that_are_no_device_are_refused(cache: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:N"):
        kvz.compress(cache, cache.with_name("c.kvz"), device=device)
