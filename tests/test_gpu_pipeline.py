"""The order of batches, without a GPU: no kernels run here."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from kvz.gpu.device import Device  # noqa: E402
from kvz.gpu.pipeline import BATCH_NBYTES, Batch, DevicePiece, Pipeline, SlotPool  # noqa: E402
from kvz.gpu.slots import Slot  # noqa: E402


class Result(NamedTuple):
    number: int
    release: Callable[[], None]


def test_batches_get_slots_in_order() -> None:
    pool = SlotPool(Device(torch.device("cpu")))
    slots = [pool.take(i) for i in range(3)]
    assert None not in slots
    taken: list[int] = []

    def wait(number: int) -> None:
        if pool.take(number) is not None:
            taken.append(number)

    # the later batch waits first, and must not get what the earlier one is owed
    later = threading.Thread(target=wait, args=(4,))
    later.start()
    pool.give(slots[0])
    time.sleep(0.05)
    assert taken == []
    earlier = threading.Thread(target=wait, args=(3,))
    earlier.start()
    earlier.join(10)
    assert taken == [3]
    pool.give(slots[1])
    later.join(10)
    assert taken == [3, 4]


def test_many_batches_come_out_in_order() -> None:
    pool = SlotPool(Device(torch.device("cpu")))
    jitter = random.Random(0)

    def run_batch(slot: Slot, batch: Batch[int, Result], workers: ThreadPoolExecutor) -> None:
        time.sleep(jitter.random() * 1e-3)

        def release() -> None:
            pool.give(slot)

        batch.finish([Result(number, release) for number in batch.pieces])

    def work() -> Iterator[DevicePiece[int]]:
        for number in range(300):
            yield DevicePiece(number, BATCH_NBYTES)

    pipeline: Pipeline[int, Result] = Pipeline(pool, run_batch, threads=4)
    seen = []
    for result in pipeline.run(work()):
        seen.append(result.number)
        result.release()
    assert seen == list(range(300))
