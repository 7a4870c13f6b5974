"""How long each stage of a GPU pipeline was busy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

#: Stages of a batch. Batches overlap, so the sum exceeds ``whole``; the largest says what limits.
#: ``copy_in``, ``codec`` and ``copy_out`` are the device's own times, the others those of the host.
#: ``calibrate``: waiting for codebooks. ``write``: writing, or comparing when verifying; of a
#: decoder it is the workers' share, on several threads at once, as are ``read`` and ``checksum``.
STAGES = ("calibrate", "read", "copy_in", "codec", "copy_out", "checksum", "write", "whole")


class StageClock:
    """Adds up seconds by stage, from any thread."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._lock = threading.Lock()

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds

    @contextlib.contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        start = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - start)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage."""
        with self._lock:
            return dict(self._seconds)
