"""Mechanics of the benchmark on tiny captures made here: nothing below says anything of speed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from kvz.bench import run as run_module
from kvz.bench.baselines import _Planes
from kvz.bench.contestants import Jobs
from kvz.bench.machine import Machine, cpu_model, last_cache_nbytes
from kvz.bench.measure import Turn, Workers, measure
from kvz.bench.report import render
from kvz.bench.results import BenchReport, summarise
from kvz.bench.run import DEFAULT_CODECS, parse_codec, run_bench
from kvz.bench.workload import Workload, timed_entries
from kvz.codecs.lynx import LynxCodec
from kvz.codecs.splitzip import SplitzipCodec
from kvz.compressing import compress
from kvz.formats.errors import ConfigError, ContentMismatch, UnknownCodec
from kvz.formats.safetensors import build_header
from kvz.layout import Layout
from kvz.safetensors_io import SafetensorsFile

BASELINES = ["zstd-1, whole tensors", "zstd-3, whole tensors", "zstd-1, exponents", "memcpy"]
ORIGIN = "made by tests/test_bench.py"

Tensors = Mapping[str, tuple[str, NDArray[Any]]]


def bf16(shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_capture(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> Path:
    prefix, _ = build_header([(n, d, a.shape) for n, (d, a) in tensors.items()], metadata)
    path.write_bytes(prefix + b"".join(array.tobytes() for _, array in tensors.values()))
    return path


@pytest.fixture
def tensors() -> Tensors:
    """Several heads, one head, bits that no codec makes smaller, and what no codec times."""
    noise = np.random.default_rng(9).integers(0, 1 << 16, (1, 2, 130, 16), np.uint16)
    return {
        "input_ids": ("I64", np.arange(200)[None]),
        "layers.0.key": ("BF16", bf16((1, 3, 200, 16), 1)),
        "layers.0.value": ("BF16", bf16((1, 3, 200, 16), 2)),
        "layers.1.key": ("BF16", bf16((1, 1, 77, 24), 3)),
        "layers.1.value": ("BF16", noise),
        "next_token_logits": ("BF16", bf16((1, 50), 4)),
    }


@pytest.fixture
def capture(tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> Path:
    # chunks of 64 tokens, so that the larger tensors have several
    monkeypatch.setattr("kvz.layout.TARGET_CHUNK_NBYTES", 4096)
    metadata = {"kvz": json.dumps({"origin": ORIGIN})}
    return write_capture(tmp_path / "tiny.safetensors", tensors, metadata)


@pytest.fixture
def report(capture: Path) -> BenchReport:
    return run_bench([capture], rounds=2, threads=2)


def test_every_codec_and_baseline_has_figures_for_one_and_for_all_threads(
    report: BenchReport,
) -> None:
    (result,) = report.captures
    position = DEFAULT_CODECS.index("lynx") + 1
    codecs = [*DEFAULT_CODECS[:position], "lynx, anchors", *DEFAULT_CODECS[position:]]
    assert [c.name for c in result.contestants] == [*codecs, *BASELINES]
    assert [c.is_baseline for c in result.contestants] == [False] * 7 + [True] * 4
    assert report.thread_counts == (1, 2)
    for contestant in result.contestants:
        assert [t.threads for t in contestant.timings] == [1, 2]
        for timing in contestant.timings:
            assert len(timing.encode.seconds) == len(timing.decode.seconds) == 2
            calibrates = contestant.name.startswith(("gaac", "splitzip"))
            assert (timing.calibration is not None) == calibrates


def test_capture_is_described(report: BenchReport) -> None:
    (result,) = report.captures
    assert (result.num_tensors, result.num_timed_tensors) == (6, 4)
    assert result.timed_nbytes == 2 * (2 * 3 * 200 * 16 + 77 * 24 + 2 * 130 * 16)
    assert result.original_nbytes == result.timed_nbytes + 200 * 8 + 50 * 2
    assert result.origin == ORIGIN
    largest = result.shapes[0]
    assert (largest.count, largest.shape) == (2, (1, 3, 200, 16))
    assert (largest.num_tokens, largest.num_heads, largest.head_dim) == (200, 3, 16)


@pytest.mark.parametrize("metadata", ["{", "[]", '{"origin": 3}', "{}"])
def test_capture_without_readable_origin_says_none(
    tmp_path: Path, tensors: Tensors, metadata: str
) -> None:
    path = write_capture(tmp_path / "x.safetensors", tensors, {"kvz": metadata})
    report = run_bench([path], codecs=["raw"], rounds=1, threads=1)
    assert report.captures[0].origin is None


def test_ratio_counts_every_byte_of_the_archive(
    capture: Path, report: BenchReport, tmp_path: Path
) -> None:
    options = {"gaac:windows=2/3/4": {"windows": "2/3/4"}, "gaac:windows=3/4": {"windows": "3/4"}}
    for contestant in report.captures[0].contestants[:7]:
        archive = tmp_path / "archive.kvz"
        codec = contestant.name.partition(":")[0].removesuffix(", anchors")
        done = compress(
            capture,
            archive,
            codec,
            codec_options=options.get(contestant.name, {}),
            overwrite=True,
        )
        nbytes = archive.stat().st_size
        if contestant.name == "lynx, anchors":
            assert done.anchor_nbytes is not None
            assert done.anchor_nbytes < nbytes
            nbytes = done.anchor_nbytes
        assert contestant.stored_nbytes == nbytes
        assert contestant.ratio == report.captures[0].original_nbytes / nbytes


def test_baselines_count_compressed_bytes_alone(report: BenchReport, tensors: Tensors) -> None:
    def packed(level: int, data: bytes) -> int:
        return len(zstandard.ZstdCompressor(level=level).compress(data))

    stored = {c.name: c.stored_nbytes for c in report.captures[0].contestants}
    for level in (1, 3):
        total = sum(packed(level, array.tobytes()) for _, array in tensors.values())
        assert stored[f"zstd-{level}, whole tensors"] == total
    total = packed(1, tensors["input_ids"][1].tobytes())
    for dtype, array in tensors.values():
        if dtype == "BF16":
            exponents = bytes(int(bits) // 128 % 256 for bits in array.reshape(-1))
            total += array.size + packed(1, exponents)
    assert stored["zstd-1, exponents"] == total
    assert stored["memcpy"] is None


def test_report_round_trips_through_json(report: BenchReport) -> None:
    document = report.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    first = report.captures[0].contestants[0]
    assert document["captures"][0]["contestants"][0]["stored_nbytes"] == first.stored_nbytes
    assert document["captures"][0]["shapes"][0]["shape"] == [1, 3, 200, 16]
    timing = document["captures"][0]["contestants"][0]["timings"][1]
    assert timing["threads"] == 2
    assert timing["decode"]["seconds"] == list(first.timings[1].decode.seconds)


@pytest.mark.parametrize("threads", [1, 2])
def test_decoder_that_forgets_one_element_is_caught(
    capture: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    decode = SplitzipCodec.decode

    def forgetful(self: SplitzipCodec, payload: Any, codebook: Any, out: Any, start: int) -> None:
        kept = out[-1, -1, -1]
        decode(self, payload, codebook, out, start)
        out[-1, -1, -1] = kept

    monkeypatch.setattr(SplitzipCodec, "decode", forgetful)
    # layers.1.key is one head: its chunks are decoded in place, onto the poison
    with pytest.raises(ContentMismatch, match=r"tiny\.safetensors: splitzip does not restore"):
        run_bench([capture], codecs=["splitzip"], rounds=1, threads=threads)


class Recorder:
    """A contestant that copies ``good_turns`` times, and writes down when it is its turn."""

    is_baseline = True
    calibrates = False

    def __init__(self, name: str, log: list[str], good_turns: int = 100) -> None:
        self.name = name
        self.config: dict[str, Any] = {}
        self._log = log
        self._good_turns = good_turns

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> None:
        return None

    def first_difference(self, work: Workload) -> str | None:
        return work.first_difference()

    def prepare(self, work: Workload, num_workers: int) -> Jobs:
        def encode(worker: int) -> None:
            self._log.append(self.name)

        def decode(worker: int) -> None:
            for tensor, output in zip(work.tensors, work.outputs, strict=True):
                output[...] = tensor
            if self._log.count(self.name) > self._good_turns:
                work.outputs[-1][0, 0, 0] ^= 1

        return Jobs([], [encode], [decode])


@pytest.mark.parametrize("wrong_from", [1, 3])
def test_lossy_decoder_that_forgets_an_element_is_caught(
    capture: Path, monkeypatch: pytest.MonkeyPatch, wrong_from: int
) -> None:
    # once from the first round on, when there is nothing to compare with but the input
    decode, calls = LynxCodec.decode, []

    def forgetful(self: LynxCodec, payload: Any, prepared: Any, out: Any, start: int) -> None:
        calls.append(start)
        decode(self, payload, prepared, out, start)
        if calls.count(0) >= wrong_from * 3 - 2:
            out[...] ^= 0x7F80

    monkeypatch.setattr(LynxCodec, "decode", forgetful)
    with pytest.raises(ContentMismatch, match=r"tiny\.safetensors: lynx does not restore"):
        run_bench([capture], codecs=["lynx"], rounds=4, threads=1)


def test_decoder_that_fails_in_the_last_round_is_caught(capture: Path) -> None:
    with SafetensorsFile(capture) as source:
        work = Workload(source, timed_entries(source, Layout(), 1 << 30)[0], [])
    # a warm-up and two rounds are good
    measure(work, [Recorder("late", [], good_turns=3)], threads=1, rounds=2)
    with pytest.raises(ContentMismatch, match=r"late does not restore layers\.1\.value"):
        measure(work, [Recorder("late", [], good_turns=3)], threads=1, rounds=3)


def test_order_rotates_from_round_to_round(capture: Path) -> None:
    log: list[str] = []
    done: list[int] = []
    with SafetensorsFile(capture) as source:
        entries, _ = timed_entries(source, Layout(), 1 << 30)
        work = Workload(source, entries, [])
        turns = measure(
            work, [Recorder(n, log) for n in "abc"], threads=1, rounds=3, round_done=done.append
        )
    assert "".join(log) == "abc" + "bca" + "cab" + "abc"  # warm-up, then three rounds
    assert done == [1, 2, 3, 4]
    assert {name: len(taken) for name, taken in turns.items()} == {"a": 3, "b": 3, "c": 3}


def test_poison_leaves_no_output_element_right(capture: Path) -> None:
    with SafetensorsFile(capture) as source:
        work = Workload(source, timed_entries(source, Layout(), 1 << 30)[0], [])
    work.poison_outputs()
    for tensor, output in zip(work.tensors, work.outputs, strict=True):
        assert not (tensor == output).any()
        output[...] = tensor
    assert work.first_difference() is None
    work.outputs[1][2, 7, 5] ^= 0x8000
    assert "layers.0.value [0, 2, 7, 5]" in str(work.first_difference())


def test_chunks_cover_every_tensor_and_slots_do_not_overlap(capture: Path) -> None:
    codec = SplitzipCodec()
    with SafetensorsFile(capture) as source:
        work = Workload(source, timed_entries(source, Layout(), 1 << 30)[0], [codec])
    for number, chunk in enumerate(work.chunks):
        chunk.target[...] = chunk.source
        chunk.slot[:] = number
        assert chunk.slot.size >= codec.buffer_nbytes(chunk.source.shape, 2)
    assert work.first_difference() is None
    assert all((chunk.slot == number).all() for number, chunk in enumerate(work.chunks))
    assert [chunk.source.shape[1] for chunk in work.chunks[:4]] == [64, 64, 64, 8]


def test_timed_data_is_capped_to_whole_tensors_in_file_order(capture: Path) -> None:
    first = 2 * 3 * 200 * 16
    with SafetensorsFile(capture) as source:
        kept = {
            limit: [e.name for e in timed_entries(source, Layout(), limit)[0]]
            for limit in (1, first, 2 * first - 1, 2 * first)
        }
        total = timed_entries(source, Layout(), 1)[1]
    assert kept[1] == kept[first] == kept[2 * first - 1] == ["layers.0.key"]
    assert kept[2 * first] == ["layers.0.key", "layers.0.value"]
    assert total == 2 * first + 2 * (77 * 24 + 2 * 130 * 16)


def test_capped_capture_says_so_and_keeps_the_ratio_of_the_whole_file(
    capture: Path, report: BenchReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "MAX_TIMED_NBYTES", 20_000)
    monkeypatch.setattr(run_module, "describe_machine", partial(machine, cache_nbytes=1000))
    capped = run_bench([capture], rounds=1, threads=1).captures[0]
    assert (capped.num_timed_tensors, capped.timed_nbytes) == (1, 19_200)
    assert [w for w in capped.warnings if "0.0 of 0.1 MB" in w] == list(capped.warnings)
    whole = report.captures[0]
    assert [c.ratio for c in capped.contestants] == [c.ratio for c in whole.contestants]


def machine(cache_nbytes: int) -> Machine:
    return Machine("test", 2, cache_nbytes, True, False, "test", {})


@pytest.mark.parametrize(("cache_nbytes", "num_warnings"), [(12_604, 0), (12_605, 1)])
def test_data_that_fits_in_four_caches_is_warned_about(
    capture: Path, monkeypatch: pytest.MonkeyPatch, cache_nbytes: int, num_warnings: int
) -> None:
    # the timed data of the capture has 50,416 bytes
    monkeypatch.setattr(run_module, "describe_machine", partial(machine, cache_nbytes=cache_nbytes))
    report = run_bench([capture], codecs=["raw"], rounds=1, threads=1)
    warnings = report.captures[0].warnings
    assert len(warnings) == num_warnings
    assert all("last-level cache" in warning for warning in warnings)
    assert ("warning:" in render(report)) == (num_warnings > 0)


def test_speeds_are_medians_and_comparisons_are_made_within_rounds() -> None:
    turns = [Turn(0.5, 2.0, 1.0), Turn(1.0, 4.0, 2.0), Turn(4.0, 8.0, 8.0)]
    memcpy = [Turn(0.0, 1.0, 1.0), Turn(0.0, 1.0, 2.0), Turn(0.0, 1.0, 1.0)]
    zstd3 = [Turn(0.0, 20.0, 4.0), Turn(0.0, 4.0, 4.0), Turn(0.0, 80.0, 80.0)]
    timing = summarise(turns, memcpy, zstd3, threads=3, nbytes=8_000_000_000, calibrates=True)
    assert timing.threads == 3
    encode, decode = timing.encode, timing.decode
    assert (encode.median, encode.slowest, encode.fastest) == (2.0, 1.0, 4.0)
    assert (encode.to_memcpy, encode.to_zstd3) == (0.25, 10.0)
    assert (decode.median, decode.slowest, decode.fastest) == (4.0, 1.0, 8.0)
    # by medians of times it would be 0.5 and 2
    assert (decode.to_memcpy, decode.to_zstd3) == (1.0, 4.0)
    assert timing.calibration is not None
    assert (timing.calibration.median_ms, timing.calibration.share) == (1000.0, 0.25)


def test_two_workers_work_at_the_same_time() -> None:
    barrier = threading.Barrier(2, timeout=60)
    seen: list[int] = []

    def job(worker: int) -> None:
        barrier.wait()  # breaks unless another thread gets here, too
        seen.append(worker)

    with Workers(2) as workers:
        workers.run([job, job])
    assert sorted(seen) == [0, 1]


@pytest.mark.parametrize("count", [1, 3])
def test_every_job_is_done_once_and_errors_come_through(count: int) -> None:
    done: list[int] = []

    def job(number: int, worker: int) -> None:
        assert 0 <= worker < count
        done.append(number)

    def broken(worker: int) -> None:
        raise ContentMismatch("broken")

    with Workers(count) as workers:
        workers.run([partial(job, number) for number in range(100)])
        with pytest.raises(ContentMismatch, match="broken"):
            workers.run([broken])
    assert sorted(done) == list(range(100))


def test_planes_hold_every_bf16_pattern() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    planes = _Planes(1 << 16)
    sign_mantissa = np.empty(1 << 16, np.uint8)
    exponents = planes.split(patterns, sign_mantissa)
    for bits in (0x0000, 0x8000, 0x3F80, 0x7FFF, 0xFF81, 0x0080):
        assert exponents[bits] == bits % 0x8000 // 128
        assert sign_mantissa[bits] == bits // 0x8000 * 128 + bits % 128
    restored = ~patterns
    planes.join(sign_mantissa, restored)
    assert np.array_equal(restored, patterns)


def _fake_cache(folder: Path, number: int, level: str, size: str) -> None:
    (folder / f"index{number}").mkdir()
    (folder / f"index{number}" / "level").write_text(f"{level}\n")
    (folder / f"index{number}" / "size").write_text(f"{size}\n")


def test_last_cache_is_the_one_of_the_highest_level(tmp_path: Path) -> None:
    assert last_cache_nbytes(tmp_path) is None
    _fake_cache(tmp_path, 0, "3", "32768K")
    _fake_cache(tmp_path, 1, "2", "64M")
    _fake_cache(tmp_path, 2, "not a number", "1K")
    assert last_cache_nbytes(tmp_path) == 32 << 20
    _fake_cache(tmp_path, 3, "4", "2G")
    assert last_cache_nbytes(tmp_path) == 2 << 30


def test_cpu_model_is_read_from_the_system(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_model(cpuinfo)  # without the file: the architecture
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3: GHz\n")
    assert cpu_model(cpuinfo) == "Fast CPU @ 3: GHz"


def test_codec_is_given_with_its_options() -> None:
    contestant = parse_codec("gaac:windows=3/4,axis=channel")
    assert contestant.name == "gaac:windows=3/4,axis=channel"
    assert contestant.config == {"windows": [3, 4], "axis": "channel"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (partial(run_bench, []), ConfigError, "at least one capture"),
        (partial(run_bench, ["x"], rounds=0), ConfigError, "rounds must be at least 1, got 0"),
        (partial(run_bench, ["x"], threads=-1), ConfigError, "threads must be at least 1, got -1"),
        (partial(run_bench, ["x"], codecs=["raw", "raw"]), ConfigError, "'raw' is listed twice"),
        (partial(parse_codec, "lz4"), UnknownCodec, "codec 'lz4' is not known"),
        (partial(parse_codec, "zstd:level"), ConfigError, "'level' must be KEY=VALUE"),
        (partial(parse_codec, "zstd:level=99"), ConfigError, "level must be 1..22, got 99"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_capture_without_cache_tensors_is_refused(tmp_path: Path) -> None:
    tensors: Tensors = {
        "input_ids": ("I64", np.arange(4)[None]),
        "empty.key": ("BF16", bf16((1, 0, 4), 0)),
    }
    path = write_capture(tmp_path / "ids.safetensors", tensors, {})
    with pytest.raises(ConfigError, match=r"ids\.safetensors: nothing to time"):
        run_bench([path], rounds=1, threads=1)


def test_layout_names_the_token_axis_of_other_captures(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.safetensors", {"w": ("BF16", bf16((5, 90, 8), 0))}, {})
    report = run_bench([path], codecs=["gaac"], rounds=1, threads=1, layout=Layout("HTD"))
    (group,) = report.captures[0].shapes
    assert (group.num_tokens, group.num_heads, group.head_dim) == (90, 5, 8)


def test_report_fits_in_100_columns_and_shows_every_figure(capture: Path) -> None:
    codecs = ["gaac:windows=2/3/4,axis=channel", "splitzip"]
    text = render(run_bench([capture], codecs=codecs, rounds=1, threads=2))
    lines = [line for line in text.splitlines() if not line.startswith("capture: ")]
    assert max(len(line) for line in lines) <= 100
    for heading in ("1 thread ", "2 threads "):
        (start,) = (i for i, line in enumerate(lines) if line.startswith(heading))
        table = lines[start + 2 : start + 11]
        assert table[0] == codecs[0]
        # ratio, then GB/s, spread, /memcpy and /zstd-3 for encoding and for decoding
        assert [len(line.split()) for line in table[1:3]] == [9, 10]
        assert table[3] == "  baselines"
        assert [line.rsplit(maxsplit=9)[0] for line in table[4:8]] == BASELINES
        assert table[8].startswith(f"calibration of {codecs[0]}: ")
    assert f"origin: {ORIGIN}" in text


def test_progress_counts_up_to_its_end(capture: Path) -> None:
    steps: list[tuple[int, int]] = []
    run_bench(
        [capture],
        codecs=["raw"],
        rounds=1,
        threads=1,
        progress=lambda what, done, total: steps.append((done, total)),
    )
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    # five ratios, a warm-up and one round
    assert steps[-1] == (7, 7)
