"""``kvz bench``: ratio and speed of codecs on one's own captures, against what else there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from kvz.bench.baselines import ExponentPlaneContestant, ZstdContestant
from kvz.bench.contestants import (
    CodecContestant,
    Contestant,
    MemcpyContestant,
    parse_codec,
    with_anchors,
)
from kvz.bench.machine import describe_machine
from kvz.bench.measure import Turn, measure
from kvz.bench.results import BenchReport, CaptureResult, ContestantResult, Timing, summarise
from kvz.bench.workload import Workload, origin_of, timed_entries
from kvz.formats.errors import ConfigError
from kvz.layout import Layout
from kvz.safetensors_io import SafetensorsFile
from kvz.workers import thread_count

#: Measured when nothing is chosen: the default codec first.
DEFAULT_CODECS = ("gaac:windows=2/3/4", "gaac:windows=3/4", "splitzip", "lynx", "zstd", "raw")
#: Data of fewer caches than this is read from a cache, not from memory.
CACHES_TO_EXCEED = 4
#: Of larger captures only the first tensors are timed, but always enough to exceed the caches.
MAX_TIMED_NBYTES = 512 << 20

#: Called with what is going on, steps done, and steps in all.
BenchProgress = Callable[[str, int, int], None]


def _check(
    paths: Sequence[str | os.PathLike[str]],
    codecs: Sequence[str],
    rounds: int,
    threads: int | None,
) -> None:
    if not paths:
        raise ConfigError("bench needs at least one capture")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    for spec in codecs:
        if codecs.count(spec) > 1:
            raise ConfigError(f"codec {spec!r} is listed twice")


def _warnings(timed_nbytes: int, timeable_nbytes: int, cache_nbytes: int) -> tuple[str, ...]:
    warnings = []
    needed = CACHES_TO_EXCEED * cache_nbytes
    if timed_nbytes < needed:
        warnings.append(
            f"the timed data ({timed_nbytes / 1e6:.1f} MB) is smaller than {CACHES_TO_EXCEED} "
            f"times the last-level cache ({needed / 1e6:.1f} MB): speeds are not those of memory"
        )
    if timed_nbytes < timeable_nbytes:
        warnings.append(
            f"only the first tensors are timed: {timed_nbytes / 1e6:.1f} of "
            f"{timeable_nbytes / 1e6:.1f} MB"
        )
    return tuple(warnings)


def _report_round(
    progress: BenchProgress, what: str, before: int, steps: int, rounds_done: int
) -> None:
    progress(what, before + rounds_done, steps)


class _CaptureBench:
    """The measurements on one capture."""

    def __init__(
        self,
        source: SafetensorsFile,
        codecs: Sequence[CodecContestant],
        layout: Layout,
        cache_nbytes: int,
    ) -> None:
        limit = max(MAX_TIMED_NBYTES, CACHES_TO_EXCEED * cache_nbytes)
        entries, self._timeable_nbytes = timed_entries(source, layout, limit)
        self._source = source
        self._layout = layout
        self._cache_nbytes = cache_nbytes
        self._work = Workload(source, entries, [contestant.codec for contestant in codecs])
        self._memcpy, self._zstd3 = MemcpyContestant(), ZstdContestant(3)
        self._contestants: list[Contestant] = [
            *codecs,
            ZstdContestant(1),
            self._zstd3,
            ExponentPlaneContestant(1),
            self._memcpy,
        ]

    def run(
        self, rounds: int, thread_counts: Sequence[int], progress: BenchProgress
    ) -> CaptureResult:
        steps = len(self._contestants) + len(thread_counts) * (rounds + 1)
        stored: dict[str, int | None] = {}
        for number, contestant in enumerate(self._contestants):
            progress(f"ratio of {contestant.name}", number, steps)
            stored[contestant.name] = contestant.stored_nbytes(self._source, self._layout)
        done = len(self._contestants)
        timings: dict[str, list[Timing]] = {c.name: [] for c in self._contestants}
        for threads in thread_counts:
            what = f"speed, {threads} thread{'s' if threads > 1 else ''}"
            progress(what, done, steps)
            turns = measure(
                self._work,
                self._contestants,
                threads=threads,
                rounds=rounds,
                round_done=partial(_report_round, progress, what, done, steps),
            )
            done += rounds + 1
            self._collect(turns, threads, timings)
        return self._result(stored, timings)

    def _collect(
        self, turns: Mapping[str, Sequence[Turn]], threads: int, timings: dict[str, list[Timing]]
    ) -> None:
        for contestant in self._contestants:
            timings[contestant.name].append(
                summarise(
                    turns[contestant.name],
                    turns[self._memcpy.name],
                    turns[self._zstd3.name],
                    threads=threads,
                    nbytes=self._work.nbytes,
                    calibrates=contestant.calibrates,
                )
            )

    def _result(
        self, stored: Mapping[str, int | None], timings: Mapping[str, Sequence[Timing]]
    ) -> CaptureResult:
        tensors = self._source.header.tensors
        original_nbytes = sum(tensor.nbytes for tensor in tensors)
        results = []
        for contestant in self._contestants:
            nbytes = stored[contestant.name]
            results.append(
                ContestantResult(
                    name=contestant.name,
                    is_baseline=contestant.is_baseline,
                    config=contestant.config,
                    stored_nbytes=nbytes,
                    ratio=None if nbytes is None else original_nbytes / nbytes,
                    timings=tuple(timings[contestant.name]),
                )
            )
        return CaptureResult(
            source=self._source.name,
            origin=origin_of(self._source.metadata),
            num_tensors=len(tensors),
            original_nbytes=original_nbytes,
            num_timed_tensors=len(self._work.entries),
            timed_nbytes=self._work.nbytes,
            timeable_nbytes=self._timeable_nbytes,
            shapes=tuple(self._work.shapes()),
            warnings=_warnings(self._work.nbytes, self._timeable_nbytes, self._cache_nbytes),
            contestants=tuple(results),
        )


def run_bench(
    paths: Sequence[str | os.PathLike[str]],
    *,
    codecs: Sequence[str] | None = None,
    rounds: int = 7,
    threads: int | None = None,
    layout: Layout | None = None,
    progress: BenchProgress | None = None,
) -> BenchReport:
    """Measure codecs and baselines on captures (safetensors files), with 1 and ``threads`` threads.

    ``codecs``: see :func:`parse_codec`; default :data:`DEFAULT_CODECS`. ``threads``: default one
    per processor. ``layout``: for tensors whose names kvz does not know.

    Ratios are of the whole file and count every byte of the archive. Speeds are of BF16 tensors
    with a token axis, in memory, without files and checksums, calibration included.

    Raises ConfigError (arguments; nothing to time), UnknownCodec, what :class:`SafetensorsFile`
    raises, and ContentMismatch when a contestant does not restore its input exactly.
    """
    specs = DEFAULT_CODECS if codecs is None else tuple(codecs)
    _check(paths, specs, rounds, threads)
    contestants = [c for spec in specs for c in with_anchors(parse_codec(spec))]
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    machine = describe_machine()
    thread_counts = sorted({1, thread_count(threads)})
    captures = []
    for path in paths:
        with SafetensorsFile(path) as source:
            name = os.path.basename(source.name)

            def report(what: str, done: int, steps: int, name: str = name) -> None:
                if progress is not None:
                    progress(f"{name}: {what}", done, steps)

            bench = _CaptureBench(source, contestants, layout or Layout(), machine.cache_nbytes)
            captures.append(bench.run(rounds, thread_counts, report))
    return BenchReport(
        date=date,
        machine=machine,
        rounds=rounds,
        thread_counts=tuple(thread_counts),
        captures=tuple(captures),
    )
