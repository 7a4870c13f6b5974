"""What a benchmark found: raw times of every round and what follows from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvz.bench.machine import Machine
from kvz.bench.measure import Turn
from kvz.bench.workload import ShapeGroup


@dataclass(frozen=True, slots=True)
class Speed:
    """Encoding or decoding over all rounds, GB/s = 10^9 uncompressed bytes per second.

    ``to_memcpy`` and ``to_zstd3`` are medians of the ratios within each round (above 1: faster).
    """

    median: float
    slowest: float
    fastest: float
    to_memcpy: float
    to_zstd3: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The part of encoding that chooses codebooks: median milliseconds and share of the time."""

    median_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Speeds with one number of threads; ``calibration`` is None for who does not calibrate."""

    threads: int
    encode: Speed
    decode: Speed
    calibration: Calibration | None


@dataclass(frozen=True, slots=True)
class ContestantResult:
    """``stored_nbytes`` of the whole capture and its ``ratio``; None for memcpy."""

    name: str
    is_baseline: bool
    config: dict[str, Any]
    stored_nbytes: int | None
    ratio: float | None
    timings: tuple[Timing, ...]


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """One capture. ``timed_nbytes`` of ``timeable_nbytes`` were timed, ``original_nbytes`` stored.

    ``origin`` is what the capture's metadata says of where it comes from, None if nothing.
    """

    source: str
    origin: str | None
    num_tensors: int
    original_nbytes: int
    num_timed_tensors: int
    timed_nbytes: int
    timeable_nbytes: int
    shapes: tuple[ShapeGroup, ...]
    warnings: tuple[str, ...]
    contestants: tuple[ContestantResult, ...]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole run of ``kvz bench``; ``date`` is its start, ISO 8601 with offset."""

    date: str
    machine: Machine
    rounds: int
    thread_counts: tuple[int, ...]
    captures: tuple[CaptureResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: objects, arrays, strings, numbers, booleans, null."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return document


def _speed(
    seconds: Sequence[float], memcpy_s: Sequence[float], zstd3_s: Sequence[float], nbytes: int
) -> Speed:
    def to(reference: Sequence[float]) -> float:
        return statistics.median(r / s for r, s in zip(reference, seconds, strict=True))

    return Speed(
        median=nbytes / statistics.median(seconds) / 1e9,
        slowest=nbytes / max(seconds) / 1e9,
        fastest=nbytes / min(seconds) / 1e9,
        to_memcpy=to(memcpy_s),
        to_zstd3=to(zstd3_s),
        seconds=tuple(seconds),
    )


def summarise(
    turns: Sequence[Turn],
    memcpy: Sequence[Turn],
    zstd3: Sequence[Turn],
    *,
    threads: int,
    nbytes: int,
    calibrates: bool,
) -> Timing:
    """Speeds from the turns of a contestant and of the two it is compared with, round by round."""
    calibration = None
    if calibrates:
        calibration = Calibration(
            median_ms=1e3 * statistics.median(t.calibrate_s for t in turns),
            share=statistics.median(t.calibrate_s / t.encode_s for t in turns),
        )
    return Timing(
        threads=threads,
        encode=_speed(
            [t.encode_s for t in turns],
            [t.encode_s for t in memcpy],
            [t.encode_s for t in zstd3],
            nbytes,
        ),
        decode=_speed(
            [t.decode_s for t in turns],
            [t.decode_s for t in memcpy],
            [t.decode_s for t in zstd3],
            nbytes,
        ),
        calibration=calibration,
    )
