"""Fetches blocks of an object before they are asked for: a bounded number, several at once."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.remote.fetching import Fetcher
from kvz.remote.pool import RequestPool

#: Ranges this far apart are one request: the gap costs less than another round trip.
MAX_GAP_NBYTES = 64 << 10
MAX_REQUEST_NBYTES = 8 << 20
#: Blocks that are fetched or held at one time.
WINDOW = 8
#: Ranges that lie in two parts of a file take turns: anchors and residuals.
_OPEN_BLOCKS = 2


@dataclass(slots=True)
class Block:
    """Bytes ``start:stop`` of an object, of which ``wanted`` are still to be asked for.

    ``num_readers`` are waiting for ``data``.
    """

    start: int
    stop: int
    wanted: int
    num_readers: int = 0
    data: Future[NDArray[np.uint8]] | None = field(default=None, repr=False)


def merged(ranges: Iterable[tuple[int, int]]) -> list[Block]:
    """Blocks for ``(offset, nbytes)`` in the order in which they are needed first."""
    blocks: list[Block] = []
    last: list[Block] = []
    for offset, nbytes in ranges:
        if nbytes == 0:
            continue
        for block in last:
            gap = offset - block.stop
            fits = offset + nbytes - block.start <= MAX_REQUEST_NBYTES
            if 0 <= gap <= MAX_GAP_NBYTES and fits:
                block.stop = offset + nbytes
                block.wanted += nbytes
                break
        else:
            block = Block(offset, offset + nbytes, nbytes)
            blocks.append(block)
            last = [block, *last][:_OPEN_BLOCKS]
    return blocks


def consecutive(start: int, stop: int, first_nbytes: int, largest_nbytes: int) -> list[Block]:
    """Blocks for a stream: small ones first, so that the first bytes are there soon."""
    blocks = []
    size = first_nbytes
    while start < stop:
        end = min(start + size, stop)
        blocks.append(Block(start, end, end - start))
        start, size = end, min(2 * size, largest_nbytes)
    return blocks


class ReadAhead:
    """Blocks of an object, fetched in their order; a block is dropped when it was read.

    ``window``: most blocks that are fetched or held. A block that is asked for out of turn is
    fetched at once, so whoever reads in another order gets the right bytes, too, only later.
    """

    def __init__(
        self, fetcher: Fetcher, blocks: list[Block], pool: RequestPool, window: int = WINDOW
    ) -> None:
        self._fetcher = fetcher
        self._pool = pool
        self._window = window
        self._queue = blocks
        self._next = 0
        self._held = 0
        self._blocks = sorted(blocks, key=lambda block: block.start)
        self._starts = [block.start for block in self._blocks]
        self._lock = threading.Lock()
        with self._lock:
            self._advance()

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether a range is in a block that was not dropped."""
        with self._lock:
            return self._find(offset, nbytes) is not None

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> bool:
        """Fill ``out``; False: no block has that range. Raises what Fetcher.fetch raises."""
        with self._lock:
            block = self._find(offset, out.size)
            if block is None:
                return False
            if block.data is None:
                self._submit(block)
            data = block.data
            block.num_readers += 1
        assert data is not None
        begin = offset - block.start
        try:
            np.copyto(out, data.result()[begin : begin + out.size])
        except BaseException:
            self._give_back(block, data)
            raise
        with self._lock:
            block.num_readers -= 1
            block.wanted -= out.size
            if block.wanted <= 0 and block.data is not None:
                # its bytes go, its place in the list stays: a second reader finds wanted <= 0
                block.data = None
                self._held -= 1
                self._advance()
        return True

    def _give_back(self, block: Block, data: Any) -> None:
        """A block that could not be fetched: whoever asks for it again may have better luck."""
        with self._lock:
            block.num_readers -= 1
            if block.data is data:
                block.data = None
                self._held -= 1

    def cancel(self) -> None:
        """Fetch no more; what nobody waits for is thrown away."""
        with self._lock:
            self._next = len(self._queue)
            for block in self._blocks:
                if block.data is not None and not block.num_readers:
                    block.data.cancel()
                block.wanted = 0

    def _find(self, offset: int, nbytes: int) -> Block | None:
        i = bisect.bisect_right(self._starts, offset) - 1
        if i < 0:
            return None
        block = self._blocks[i]
        return block if block.wanted > 0 and offset + nbytes <= block.stop else None

    def _advance(self) -> None:
        while self._held < self._window and self._next < len(self._queue):
            block = self._queue[self._next]
            self._next += 1
            if block.data is None and block.wanted > 0:
                self._submit(block)

    def _submit(self, block: Block) -> None:
        self._held += 1
        block.data = self._pool.submit(self._load, block.start, block.stop)

    def _load(self, start: int, stop: int) -> NDArray[np.uint8]:
        data = np.empty(stop - start, np.uint8)
        self._fetcher.fetch(start, data)
        return data
