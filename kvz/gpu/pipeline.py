"""Batches of chunks through the device, several at a time, results in order, bounded memory.

Each batch in flight has a thread and a :class:`kvz.gpu.slots.Slot`; the thread waits for the
workers that read and write files and for the slot's stream. While one batch is read, another is
copied or computed, and a third written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from kvz.gpu.device import Device
from kvz.gpu.slots import Slot

#: Raw bytes of a batch: enough to keep bus and device busy, and to hide every launch. Below a power
#: of two, because that is what allocators of pinned memory round up to.
BATCH_NBYTES = 60 << 20
NUM_SLOTS = 3

Piece = TypeVar("Piece")
T = TypeVar("T")


class HostJob(NamedTuple, Generic[T]):
    """Work for a host thread that holds ``nbytes`` of memory until its result is read."""

    run: Callable[[], T]
    nbytes: int


class DevicePiece(NamedTuple, Generic[Piece]):
    """Work for the device on ``nbytes`` of raw data."""

    piece: Piece
    nbytes: int


class Batch(Generic[Piece, T]):
    """Pieces that go through the device together, and a future for the result of each."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.results: list[Future[T]] = []
        self.nbytes = 0
        self.num_unread = 0

    def add(self, piece: Piece, nbytes: int) -> Future[T]:
        result: Future[T] = Future()
        self.pieces.append(piece)
        self.results.append(result)
        self.nbytes += nbytes
        self.num_unread += 1
        return result

    def finish(self, results: Sequence[T]) -> None:
        for future, result in zip(self.results, results, strict=True):
            future.set_result(result)

    def fail(self, error: BaseException) -> None:
        for future in self.results:
            if not future.done():
                future.set_exception(error)


class SlotPool:
    """The slots that are free, given to batches in the order of their numbers.

    The order matters: a batch keeps its slot until its results are read, and they are read in
    order, so one that overtakes another could hold the last slot that the other waits for.
    """

    def __init__(self, device: Device) -> None:
        self._free = [Slot(device) for _ in range(NUM_SLOTS)]
        self._changed = threading.Condition()
        self._next_number = 0
        self._closed = False

    def take(self, number: int) -> Slot | None:
        """Wait for a slot for batch ``number``; None once the pool is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._next_number == number and bool(self._free))
            )
            if self._closed:
                return None
            self._next_number += 1
            self._changed.notify_all()
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Pipeline(Generic[Piece, T]):
    """Runs host jobs on workers and batches on the device, and gives all results in order.

    ``run_batch(slot, batch, workers)`` is called on the batch's thread; it finishes the batch and
    gives the slot back when its memory is no longer needed.
    """

    def __init__(
        self,
        slots: SlotPool,
        run_batch: Callable[[Slot, Batch[Piece, T], ThreadPoolExecutor], None],
        *,
        threads: int,
    ) -> None:
        self._slots = slots
        self._run_batch = run_batch
        self._max_jobs = 2 * threads + 2
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="kvz")
        self._drivers = ThreadPoolExecutor(NUM_SLOTS, thread_name_prefix="kvz-gpu")
        self._pending: deque[tuple[Future[T], Batch[Piece, T] | None, int]] = deque()
        self._open: Batch[Piece, T] = Batch()
        self._num_submitted = 0
        self._num_batches = 0
        self._num_jobs = 0

    def run(self, work: Iterable[HostJob[T] | DevicePiece[Piece]]) -> Iterator[T]:
        """The results of ``work``, in its order. A pipeline runs once."""
        try:
            for item in work:
                if isinstance(item, HostJob):
                    self._pending.append((self._workers.submit(item.run), None, item.nbytes))
                    self._num_jobs += item.nbytes > 0
                else:
                    self._add(item)
                while self._num_jobs > self._max_jobs or self._num_batches > NUM_SLOTS:
                    yield self._next()
            while self._pending:
                yield self._next()
        finally:
            self._slots.close()
            self._drivers.shutdown(cancel_futures=True)
            self._workers.shutdown()

    def _add(self, item: DevicePiece[Piece]) -> None:
        if self._open.pieces and self._open.nbytes + item.nbytes > BATCH_NBYTES:
            self._submit()
        result = self._open.add(item.piece, item.nbytes)
        self._pending.append((result, self._open, item.nbytes))

    def _submit(self) -> None:
        self._drivers.submit(self._drive, self._open, self._num_submitted)
        self._num_submitted += 1
        self._num_batches += 1
        self._open = Batch()

    def _drive(self, batch: Batch[Piece, T], number: int) -> None:
        slot = self._slots.take(number)
        if slot is None:
            return
        try:
            with slot.device.using(slot.stream):
                self._run_batch(slot, batch, self._workers)
        except BaseException as error:
            batch.fail(error)

    def _next(self) -> T:
        future, batch, nbytes = self._pending.popleft()
        if batch is None:
            self._num_jobs -= nbytes > 0
            return future.result()
        if batch is self._open:
            self._submit()
        result = future.result()
        batch.num_unread -= 1
        if batch.num_unread == 0:
            self._num_batches -= 1
        return result
