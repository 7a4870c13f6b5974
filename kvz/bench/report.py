"""A benchmark's results as text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from kvz.bench.machine import Machine
from kvz.bench.results import BenchReport, CaptureResult, ContestantResult, Speed

_WIDTH = 100
_NAME_WIDTH = 22
_AXES = {4: "batch, kv_heads, tokens, head_dim", 3: "kv_heads, tokens, head_dim"}

_NOTES = (
    "ratio: bytes of all tensors / every byte of the archive (baselines: compressed bytes "
    "alone). GB/s: 10^9 uncompressed bytes per second, median and slowest-fastest over the "
    "rounds; in memory, tensor to sections and back, no files, no checksums (those in frames of "
    "the codec zstd excepted), calibration included. /memcpy and /zstd-3: median over the rounds "
    "of the speed divided by that of memcpy and of zstd-3 in the same direction in the same "
    "round. Every decoded element of every round was compared with the input; of a lossy codec, "
    "with the first round."
)


def render(report: BenchReport) -> str:
    """The whole report; ends with a newline."""
    lines = [*_machine_lines(report)]
    for capture in report.captures:
        lines += ["", *_capture_lines(capture)]
        for position, threads in enumerate(report.thread_counts):
            lines += ["", *_table(capture, position, threads)]
    lines += ["", *textwrap.wrap(_NOTES, _WIDTH)]
    return "\n".join(lines) + "\n"


def _machine_lines(report: BenchReport) -> Iterator[str]:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield f"kvz bench, {report.date}, {report.rounds} rounds"
    yield from textwrap.wrap(_machine(machine), _WIDTH)
    yield from textwrap.wrap(versions, _WIDTH)


def _machine(machine: Machine) -> str:
    cores = f"{machine.num_cores} core{'s' if machine.num_cores > 1 else ''}"
    cache = f"last-level cache {machine.cache_nbytes / (1 << 20):g} MiB"
    if not machine.cache_nbytes_known:
        cache += " (assumed)"
    simd = "vector kernels (AVX-512 VBMI2)" if machine.simd else "plain kernels"
    return f"{machine.cpu}, {cores} usable, {cache}, {simd}, {machine.system}"


def _capture_lines(capture: CaptureResult) -> Iterator[str]:
    yield f"capture: {capture.source}"
    yield f"  origin: {capture.origin or 'not stated in the file'}"
    yield f"  {capture.num_tensors} tensors, {capture.original_nbytes / 1e6:.1f} MB"
    yield f"  timed: {capture.num_timed_tensors} BF16 tensors, {capture.timed_nbytes / 1e6:.1f} MB"
    for group in capture.shapes:
        axes = f"({_AXES[len(group.shape)]})" if _is_standard(group.shape, group.num_tokens) else ""
        yield f"    {group.count} x {list(group.shape)} {axes}".rstrip()
    for warning in capture.warnings:
        yield from textwrap.wrap(
            f"warning: {warning}", _WIDTH, initial_indent="  ", subsequent_indent="    "
        )


def _is_standard(shape: tuple[int, ...], num_tokens: int) -> bool:
    return len(shape) in _AXES and shape[-2] == num_tokens


def _table(capture: CaptureResult, position: int, threads: int) -> Iterator[str]:
    title = f"{threads} thread{'s' if threads > 1 else ''}"
    columns = f"{'GB/s':>6} {'spread':>11} {'/memcpy':>7} {'/zstd-3':>7}"
    yield f"{title:<{_NAME_WIDTH + 8}}{'encode':<{len(columns) + 2}}decode"
    yield f"{'':<{_NAME_WIDTH}} {'ratio':>6} {columns}  {columns}"
    for baselines in (False, True):
        for result in capture.contestants:
            if result.is_baseline == baselines:
                yield from _row(result, position)
        if not baselines:
            yield "  baselines"
    for result in capture.contestants:
        calibration = result.timings[position].calibration
        if calibration is not None:
            yield (
                f"calibration of {result.name}: {calibration.median_ms:.2f} ms, "
                f"{100 * calibration.share:.1f} % of encoding"
            )


def _row(result: ContestantResult, position: int) -> Iterator[str]:
    timing = result.timings[position]
    ratio = "-" if result.ratio is None else f"{result.ratio:.4f}"
    name = result.name
    if len(name) > _NAME_WIDTH:
        yield name
        name = ""
    figures = f"{_speed(timing.encode)}  {_speed(timing.decode)}"
    yield f"{name:<{_NAME_WIDTH}} {ratio:>6} {figures}"


def _speed(speed: Speed) -> str:
    spread = f"{_digits(speed.slowest)}-{_digits(speed.fastest)}"
    return (
        f"{_digits(speed.median):>6} {spread:>11} "
        f"{_digits(speed.to_memcpy):>7} {_digits(speed.to_zstd3):>7}"
    )


def _digits(value: float) -> str:
    """Three significant digits, as far as four characters allow."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.{1 if value >= 9.995 else 2}f}"
