"""Mechanics of the benchmark on a GPU, on tiny captures: nothing below says anything of speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import bf16, write_cache
from gpu_support import MARKS

import kvz
from kvz.formats.errors import ConfigError, ContentMismatch

pytest.importorskip("torch")
pytestmark = MARKS


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvz.bench.device_run.NUM_LAYERS", 1)
    monkeypatch.setattr("kvz.bench.device_run.SMALL_TENSOR_NBYTES", 1024)
    monkeypatch.setattr("kvz.bench.device_workload.MIN_TENSOR_NBYTES", 1)
    monkeypatch.setattr("kvz.bench.device_run.COPY_NBYTES", 1 << 16)


def write(path: Path, seed: int, head_dim: int = 64) -> Path:
    tensors = {
        f"layers.0.{part}": ("BF16", bf16((1, 1, 16, head_dim), seed + i))
        for i, part in enumerate(("key", "value"))
    }
    return write_cache(path, {**tensors, "other": ("F32", bf16((3, 2)).view("<f2").astype("<f4"))})


def test_every_codec_has_figures_at_every_size(tmp_path: Path) -> None:
    from kvz.bench.device_report import render
    from kvz.bench.device_run import run_device_bench

    capture, other = write(tmp_path / "a.safetensors", 1), write(tmp_path / "b.safetensors", 7)
    report = run_device_bench(
        [capture], codecs=["splitzip"], sizes=[4096, 5000], calibrate_on=other, rounds=2
    )
    (result,) = report.captures
    assert result.calibrated_on == str(other)
    # two tensors of 2,048 bytes: both fit 4,096, and no third one fits 5,000
    assert [(case.num_tensors, case.nbytes) for case in result.cases[:2]] == [(2, 4096)] * 2
    small = result.cases[2]
    assert (small.num_tensors, small.nbytes) == (2, 2 * 1024)
    assert [r.name for r in small.contestants] == ["splitzip", "splitzip, no graph"]
    for case in result.cases:
        (kvz_result, *_) = case.contestants
        assert len(kvz_result.encode.seconds) == len(kvz_result.decode.seconds) == 2
        assert kvz_result.ratio > 1
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    text = render(report)
    assert max(map(len, text.splitlines())) <= 100
    assert f"codebooks: on {other}" in text.replace("\n    ", " ")


def test_the_ratio_is_that_of_the_sections_of_an_archive(tmp_path: Path) -> None:
    from kvz.bench.device_run import run_device_bench

    capture, archive = write(tmp_path / "a.safetensors", 1), tmp_path / "a.kvz"
    kvz.compress(capture, archive, "splitzip")
    with kvz.open(archive) as opened:
        rows = opened.index[opened.index["kind"] == 3]
    assert len(rows) == 2
    report = run_device_bench([capture], codecs=["splitzip"], sizes=[4096], rounds=1)
    result = report.captures[0].cases[0].contestants[0]
    assert result.ratio == 4096 / int(rows["length"].sum())


def test_codebooks_of_another_shape_are_refused(tmp_path: Path) -> None:
    from kvz.bench.device_run import run_device_bench

    capture = write(tmp_path / "a.safetensors", 1)
    other = write(tmp_path / "b.safetensors", 1, head_dim=32)
    with pytest.raises(ContentMismatch, match=r"b.safetensors: tensor 'layers.0.key' is \[1, 16"):
        run_device_bench([capture], codecs=["splitzip"], sizes=[4096], calibrate_on=other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codecs": ["zstd"]}, "codec zstd has no GPU kernels"),
        ({"rounds": 0}, "at least one capture, one round"),
        ({"sizes": []}, "one size above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    from kvz.bench.device_run import run_device_bench

    capture = write(tmp_path / "a.safetensors", 1)
    with pytest.raises(ConfigError, match=message):
        run_device_bench([capture], **settings)  # type: ignore[arg-type]


def test_fraction_of_the_roofline_counts_every_byte_once() -> None:
    from kvz.bench.device_results import DeviceSpeed

    # 3 GB become 1 GB: 4 GB to move, at 4 GB/s in one second; it took two
    speed = DeviceSpeed.of([2.0, 1.0, 4.0], 3 * 10**9, 10**9, 4.0)
    assert speed.to_roofline == pytest.approx(0.5)
    assert (speed.median, speed.slowest, speed.fastest) == (1.5, 0.75, 3.0)
