"""Timing: all contestants in turn, in every round in another order, results checked every time."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from kvz.bench.contestants import Contestant, Job, Jobs
from kvz.bench.workload import Workload
from kvz.formats.errors import ContentMismatch

T = TypeVar("T")
#: Called after every round with the number of rounds done, the warm-up among them.
RoundDone = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one contestant in one round; ``encode_s`` includes ``calibrate_s``."""

    calibrate_s: float
    encode_s: float
    decode_s: float


class Workers:
    """A fixed number of threads, started once, that share a list of jobs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="kvz-bench")

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: Sequence[Job]) -> float:
        """Do all jobs; returns the seconds that passed. One worker is the calling thread."""
        # whoever is free takes the next job: a queue per thread would end with the slowest
        shared = iter(jobs)
        start = time.perf_counter()
        if self._count == 1:
            _drain(shared, 0)
        else:
            futures = [self._pool.submit(_drain, shared, n) for n in range(self._count)]
            for future in futures:
                future.result()
        return time.perf_counter() - start


def _drain(jobs: Iterator[Job], worker: int) -> None:
    for job in jobs:
        job(worker)


def rotated(items: Sequence[T], by: int) -> list[T]:
    """``items`` starting with number ``by``, counted around."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _take_turn(work: Workload, contestant: Contestant, jobs: Jobs, workers: Workers) -> Turn:
    calibrate_s = workers.run(jobs.calibrate)
    encode_s = workers.run(jobs.encode)
    work.poison_outputs()
    decode_s = workers.run(jobs.decode)
    difference = contestant.first_difference(work)
    if difference is not None:
        raise ContentMismatch(f"{work.name}: {contestant.name} does not restore {difference}")
    return Turn(calibrate_s, calibrate_s + encode_s, decode_s)


def measure(
    work: Workload,
    contestants: Sequence[Contestant],
    *,
    threads: int,
    rounds: int,
    round_done: RoundDone | None = None,
) -> dict[str, list[Turn]]:
    """Turns by contestant, one per round, after a warm-up round that does not count.

    Raises ContentMismatch when a contestant's output is not what it must be in any round.
    """
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    with Workers(threads) as workers, _no_garbage_collection():
        jobs = {c.name: c.prepare(work, threads) for c in contestants}
        for number in range(rounds + 1):
            for contestant in rotated(contestants, number):
                turn = _take_turn(work, contestant, jobs[contestant.name], workers)
                # round 0 compiles kernels and touches buffers for the first time
                if number > 0:
                    turns[contestant.name].append(turn)
            if round_done is not None:
                round_done(number + 1)
    return turns
