"""Ordered work on several threads with a bound on what is in flight, and reusable buffers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def thread_count(threads: int | None) -> int:
    """``threads``, or one per processor that this process may use."""
    return threads if threads else len(os.sched_getaffinity(0))


class BufferPool:
    """Byte buffers that are used again: a fresh one costs more in page faults than a kernel."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.size < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        return buffer

    def give(self, buffer: NDArray[np.uint8]) -> None:
        with self._lock:
            self._free.append(buffer)


def run_ordered(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Results of ``jobs`` in order, at most ``2 * threads + 2`` of them unfinished or unread."""
    if threads == 1:
        for job in jobs:
            yield job()
        return
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvz") as pool:
        try:
            for job in jobs:
                pending.append(pool.submit(job))
                while len(pending) > 2 * threads + 2:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            # newest first: a chunk must not start after the calibration it waits for was cancelled
            for future in reversed(pending):
                future.cancel()
