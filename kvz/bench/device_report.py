"""The results of a benchmark on a GPU as text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from kvz.bench.device_results import (
    DeviceBenchReport,
    DeviceCaptureResult,
    DeviceCase,
    DeviceContestantResult,
    DeviceSpeed,
)

_WIDTH = 100
_NAME_WIDTH = 30

_NOTES = (
    "Tensors are copies of the capture's (short ones repeated along tokens), one after the other "
    "in device memory. ratio: bytes of the tensors / bytes of their payloads ('anchors': of the "
    "anchors, which alone are decoded). GB/s: 10^9 "
    "uncompressed bytes per second, median and slowest-fastest over the rounds, by CUDA events "
    "around the replay of a CUDA graph ('no graph': around the launches), with the cache emptied "
    "before. /roof: median / (copy / (1 + 1 / ratio)), the speed at which each byte is read or "
    "written once. nvCOMP's ANS gets the exponents alone: its GB/s count these, splitting and "
    "joining are not timed, its ratio is that of the whole. Every decoded element of every round "
    "was compared with the input; of a lossy codec, with the first round, and that with the input."
)


def render(report: DeviceBenchReport) -> str:
    """The whole report; ends with a newline."""
    lines = [*_machine_lines(report)]
    for capture in report.captures:
        lines += ["", *_capture_lines(capture)]
        for case in capture.cases:
            lines += ["", *_table(case)]
    lines += ["", *textwrap.wrap(_NOTES, _WIDTH)]
    for note in report.notes:
        lines += textwrap.wrap(note, _WIDTH)
    return "\n".join(lines) + "\n"


def _machine_lines(report: DeviceBenchReport) -> Iterator[str]:
    machine = report.machine
    yield f"kvz bench on a GPU, {report.date}, {report.rounds} rounds"
    readings = ", ".join(f"{name} {value}" for name, value in machine.readings.items())
    card = (
        f"{machine.gpu}, {machine.num_multiprocessors} multiprocessors, "
        f"{machine.memory_nbytes / (1 << 30):.0f} GiB, {readings or 'no readings'}, "
        f"{machine.system}"
    )
    yield from textwrap.wrap(card, _WIDTH)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield from textwrap.wrap(versions, _WIDTH)
    copy = report.copy
    yield (
        f"copy within device memory, {copy.nbytes / (1 << 30):g} GiB: {copy.gb_per_s:.0f} GB/s "
        "read and written"
    )
    if machine.interpreted:
        yield "warning: interpreted on the CPU: no figure says anything of speed"


def _capture_lines(capture: DeviceCaptureResult) -> Iterator[str]:
    yield f"capture: {capture.source}"
    yield f"  origin: {capture.origin or 'not stated in the file'}"
    same = capture.calibrated_on == capture.source
    yield f"  codebooks: {'on the same data' if same else f'on {capture.calibrated_on}'}"
    yield f"  {capture.base_nbytes / 1e6:.1f} MB, repeated up to the sizes below"
    for group in capture.shapes:
        yield f"    {group.count} x {list(group.shape)}"
    for warning in capture.warnings:
        yield from textwrap.wrap(
            f"warning: {warning}", _WIDTH, initial_indent="  ", subsequent_indent="    "
        )


def _table(case: DeviceCase) -> Iterator[str]:
    columns = f"{'GB/s':>6} {'spread':>11} {'/roof':>5}"
    title = f"{case.name}: {case.num_tensors} tensors, {case.nbytes / 1e6:.1f} MB"
    yield title
    yield f"{'':<{_NAME_WIDTH + 8}}{'encode':<{len(columns) + 2}}decode"
    yield f"{'':<{_NAME_WIDTH}} {'ratio':>6} {columns}  {columns}"
    for baselines in (False, True):
        rows = [r for r in case.contestants if r.is_baseline == baselines]
        if baselines and rows:
            yield "  baselines"
        for result in rows:
            yield _row(result)


def _row(result: DeviceContestantResult) -> str:
    figures = f"{_speed(result.encode)}  {_speed(result.decode)}"
    return f"{result.name:<{_NAME_WIDTH}} {result.ratio:>6.4f} {figures}"


def _speed(speed: DeviceSpeed) -> str:
    spread = f"{_digits(speed.slowest)}-{_digits(speed.fastest)}"
    return f"{_digits(speed.median):>6} {spread:>11} {speed.to_roofline:>5.3f}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.{1 if value >= 9.995 else 2}f}"
