"""``kvz bench --device cuda``: the codecs in device memory, against a copy and against nvCOMP."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import torch

from kvz.bench import nvcomp
from kvz.bench.contestants import parse_codec
from kvz.bench.device_contestants import (
    DeviceCodecContestant,
    DeviceContestant,
    DeviceSpec,
    Timer,
    Turns,
    by_codec,
    payload_room,
)
from kvz.bench.device_machine import describe_device
from kvz.bench.device_results import (
    CopyResult,
    DeviceBenchReport,
    DeviceCaptureResult,
    DeviceCase,
    DeviceContestantResult,
    DeviceSpeed,
)
from kvz.bench.device_workload import (
    BaseTensors,
    Codebooks,
    DeviceWorkload,
    calibrate_all,
    check_alike,
    load,
    many_small,
    repeated,
)
from kvz.bench.measure import rotated
from kvz.bench.workload import origin_of
from kvz.formats.errors import ConfigError, SourceError
from kvz.gpu.device import Device, align, open_device
from kvz.layout import Layout
from kvz.safetensors_io import SafetensorsFile

DEFAULT_DEVICE_CODECS = ("gaac:windows=2/3/4", "gaac:windows=3/4", "splitzip", "lynx")
DEFAULT_SIZES = (512 << 20, 2 << 30)
#: The launch-bound case: keys and values of this many layers, this many bytes each.
NUM_LAYERS = 64
SMALL_TENSOR_NBYTES = 2 << 20
COPY_NBYTES = 2 << 30
#: Called with what is going on, steps done, and steps in all.
DeviceBenchProgress = Callable[[str, int, int], None]


class _Plan(NamedTuple):
    specs: Sequence[DeviceSpec]
    sizes: Sequence[int]
    rounds: int
    layout: Layout
    calibrate_on: str | None


def measure_copy(device: Device, timer: Timer, nbytes: int, rounds: int) -> CopyResult:
    """How fast the device copies within its memory."""
    source = torch.zeros(nbytes // 8, dtype=torch.int64, device=device.torch_device).random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    seconds = [timer.seconds(copy) for _ in range(rounds)]
    return CopyResult(nbytes, 2 * nbytes / statistics.median(seconds) / 1e9, tuple(seconds))


class _CaptureBench:
    """The cases on one capture."""

    def __init__(
        self, device: Device, timer: Timer, copy: CopyResult, plan: _Plan, base: BaseTensors
    ) -> None:
        self._device = device
        self._timer = timer
        self._copy = copy
        self._plan = plan
        self._base = base

    def cases(
        self, codebooks: Mapping[str, Codebooks], advance: Callable[[str], None]
    ) -> Iterator[DeviceCase]:
        for nbytes in self._plan.sizes:
            work = repeated(self._base, nbytes, _size(nbytes))
            baselines = [] if self._device.interpreted else nvcomp.contestants(work.bits)
            yield self._case(work, codebooks, baselines, advance)
            del work, baselines
        small = _size(SMALL_TENSOR_NBYTES)
        name = f"{NUM_LAYERS} layers of 2 tensors of {small}"
        work = many_small(self._base, 2 * NUM_LAYERS, SMALL_TENSOR_NBYTES, name)
        yield self._case(work, codebooks, [], advance, eager=True)

    def _case(
        self,
        work: DeviceWorkload,
        codebooks: Mapping[str, Codebooks],
        baselines: Sequence[DeviceContestant],
        advance: Callable[[str], None],
        *,
        eager: bool = False,
    ) -> DeviceCase:
        payloads = self._payloads(work, codebooks)
        contestants: list[DeviceContestant] = []
        for spec in self._plan.specs:
            given = (spec, work, codebooks[spec.label], payloads)
            contestants.append(DeviceCodecContestant(*given))
            if eager:
                contestants.append(DeviceCodecContestant(*given, graph=False))
            if spec.codec.is_progressive:
                contestants.append(DeviceCodecContestant(*given, anchor_only=True))
        turns = [Turns(c, self._timer, work.name) for c in [*contestants, *baselines]]
        for number in range(self._plan.rounds + 1):
            for turn in rotated(turns, number):
                turn.take()
            advance(work.name)
        results = tuple(self._result(turn) for turn in turns)
        return DeviceCase(work.name, work.nbytes, len(work.tensors), results)

    def _payloads(self, work: DeviceWorkload, codebooks: Mapping[str, Codebooks]) -> torch.Tensor:
        """Room for the payloads of any of the codecs, one after the other."""
        sizes = [
            sum(payload_room(work, *group) for group in by_codec(work, codebooks[spec.label]))
            for spec in self._plan.specs
        ]
        return self._device.empty(align(max(sizes)))

    def _result(self, turns: Turns) -> DeviceContestantResult:
        contestant = turns.contestant
        stored, counted = contestant.stored_nbytes(), contestant.counted_nbytes
        copy = self._copy.gb_per_s
        return DeviceContestantResult(
            name=contestant.name,
            is_baseline=contestant.is_baseline,
            config=contestant.config,
            ratio=contestant.ratio(),
            counted_nbytes=counted,
            graph=contestant.graph and not self._device.interpreted,
            # the first round is a warm-up
            encode=DeviceSpeed.of(turns.encode_s[1:], counted, stored, copy),
            decode=DeviceSpeed.of(turns.decode_s[1:], counted, contestant.read_nbytes(), copy),
        )


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B"


def _bench_capture(
    path: str,
    device: Device,
    timer: Timer,
    copy: CopyResult,
    plan: _Plan,
    advance: Callable[[str], None],
) -> DeviceCaptureResult:
    with SafetensorsFile(path) as source:
        base = load(source, plan.layout, device)
        name, origin = source.name, origin_of(source.metadata)
    with SafetensorsFile(plan.calibrate_on or path) as source:
        books_from = base
        if plan.calibrate_on is not None:
            books_from = load(source, plan.layout, device)
            check_alike(base, books_from, plan.calibrate_on)
        codebooks = {
            spec.label: calibrate_all(spec.codec, source, books_from) for spec in plan.specs
        }
    del books_from
    bench = _CaptureBench(device, timer, copy, plan, base)
    return DeviceCaptureResult(
        source=name,
        origin=origin,
        calibrated_on=plan.calibrate_on or name,
        base_nbytes=base.nbytes,
        shapes=tuple(base.shapes()),
        warnings=base.warnings,
        cases=tuple(bench.cases(codebooks, advance)),
    )


def run_device_bench(
    paths: Sequence[str | os.PathLike[str]],
    *,
    device: str = "cuda",
    codecs: Sequence[str] | None = None,
    sizes: Sequence[int] = DEFAULT_SIZES,
    calibrate_on: str | os.PathLike[str] | None = None,
    rounds: int = 7,
    layout: Layout | None = None,
    progress: DeviceBenchProgress | None = None,
) -> DeviceBenchReport:
    """Measure codecs in device memory on captures (safetensors files), repeated up to ``sizes``.

    ``codecs``: see :func:`kvz.bench.contestants.parse_codec`; default
    :data:`DEFAULT_DEVICE_CODECS`. ``calibrate_on``: the capture that codebooks are calibrated on,
    by default each on itself. ``sizes`` in bytes.

    Raises ConfigError (arguments, device, nothing to time), UnknownCodec, ContentMismatch (a
    ``calibrate_on`` of other shapes; an element that is not restored), SourceError (out of device
    memory), and what :class:`SafetensorsFile` raises.
    """
    if not paths or rounds < 1 or not sizes or min(sizes) < 1:
        raise ConfigError("bench needs at least one capture, one round and one size above 0")
    opened = open_device(device)
    labels = DEFAULT_DEVICE_CODECS if codecs is None else tuple(dict.fromkeys(codecs))
    plan = _Plan(
        specs=[DeviceSpec(label, parse_codec(label)) for label in labels],
        sizes=sorted(sizes),
        rounds=rounds,
        layout=layout or Layout(),
        calibrate_on=None if calibrate_on is None else os.fspath(calibrate_on),
    )
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    steps = len(paths) * (len(sizes) + 1) * (rounds + 1)
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(what, done, steps)

    try:
        with opened.using(None):
            timer = Timer(opened)
            copy_nbytes = min(COPY_NBYTES, max(sizes)) if opened.interpreted else COPY_NBYTES
            copy = measure_copy(opened, timer, copy_nbytes, rounds)
            captures = tuple(
                _bench_capture(os.fspath(path), opened, timer, copy, plan, advance)
                for path in paths
            )
            machine = describe_device(opened)
    except torch.OutOfMemoryError as error:
        raise SourceError("out of device memory; a smaller --size needs less") from error
    return DeviceBenchReport(date, machine, rounds, copy, captures, tuple(_notes(captures)))


def _notes(captures: Sequence[DeviceCaptureResult]) -> Iterator[str]:
    if not any(r.is_baseline for c in captures for case in c.cases for r in case.contestants):
        yield "nvCOMP was not measured: its package (nvidia-nvcomp-cu13) is not installed"
