"""What a benchmark on a GPU found: raw times of every round and what follows from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvz.bench.device_machine import DeviceMachine
from kvz.bench.workload import ShapeGroup


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Encoding or decoding over all rounds, GB/s = 10^9 uncompressed bytes per second.

    ``to_roofline``: median over what the measured copy allows, copy / (1 + 1 / ratio).
    """

    median: float
    slowest: float
    fastest: float
    to_roofline: float
    seconds: tuple[float, ...]

    @classmethod
    def of(
        cls, seconds: Sequence[float], nbytes: int, stored_nbytes: int, copy_gb_per_s: float
    ) -> DeviceSpeed:
        """``nbytes`` are counted, and with ``stored_nbytes`` they are all that has to be moved."""
        median = nbytes / statistics.median(seconds) / 1e9
        roofline = copy_gb_per_s / (1 + stored_nbytes / nbytes)
        return cls(
            median=median,
            slowest=nbytes / max(seconds) / 1e9,
            fastest=nbytes / min(seconds) / 1e9,
            to_roofline=median / roofline,
            seconds=tuple(seconds),
        )


@dataclass(frozen=True, slots=True)
class DeviceContestantResult:
    """``ratio``: bytes of the tensors / bytes decoded for them (codebooks not counted).

    ``counted_nbytes`` are those that the speeds count: all of the tensors', or those of the plane
    that a baseline is given. ``graph``: timed as the replay of a CUDA graph.
    """

    name: str
    is_baseline: bool
    config: dict[str, Any]
    ratio: float
    counted_nbytes: int
    graph: bool
    encode: DeviceSpeed
    decode: DeviceSpeed


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """One size: the capture's tensors, repeated in device memory up to ``nbytes``."""

    name: str
    nbytes: int
    num_tensors: int
    contestants: tuple[DeviceContestantResult, ...]


@dataclass(frozen=True, slots=True)
class DeviceCaptureResult:
    """One capture. ``base_nbytes`` of it are on the device; every case repeats them.

    ``calibrated_on``: the capture that the codebooks are from.
    """

    source: str
    origin: str | None
    calibrated_on: str
    base_nbytes: int
    shapes: tuple[ShapeGroup, ...]
    warnings: tuple[str, ...]
    cases: tuple[DeviceCase, ...]


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A copy within device memory: GB/s count bytes read and bytes written."""

    nbytes: int
    gb_per_s: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DeviceBenchReport:
    """A whole run of ``kvz bench --device cuda``; ``date`` is its start, ISO 8601 with offset."""

    date: str
    machine: DeviceMachine
    rounds: int
    copy: CopyResult
    captures: tuple[DeviceCaptureResult, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: objects, arrays, strings, numbers, booleans, null."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return document
