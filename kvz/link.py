"""A stream that delivers its bytes when a link of given speed would have: for measurements."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, BinaryIO

from kvz.formats.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Bytes come in blocks of what the link carries in this time, so that a reader sees the first of
# them soon; not much less, since a sleep takes tens of microseconds longer than asked.
_BLOCK_S = 1e-3
_MIN_BLOCK_NBYTES = 1 << 10
_MAX_BLOCK_NBYTES = 1 << 24


class _Link(io.RawIOBase):
    """Byte i arrives `latency_s` + 8 (i + 1) / `bits_per_second` after the first read began."""

    def __init__(self, stream: BinaryIO, bits_per_second: float, latency_s: float) -> None:
        self._stream = stream
        self._latency_s = latency_s
        self._seconds_per_byte = 8 / bits_per_second
        self._block_nbytes = max(
            _MIN_BLOCK_NBYTES, int(min(_BLOCK_S * bits_per_second / 8, _MAX_BLOCK_NBYTES))
        )
        self._nbytes = 0
        self._started_at: float | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self._started_at is None:
            self._started_at = time.monotonic()
        view = memoryview(buffer).cast("B")[: self._block_nbytes]
        count: int = self._stream.readinto(view)  # type: ignore[attr-defined]
        self._nbytes += count
        arrival = self._started_at + self._latency_s + self._nbytes * self._seconds_per_byte
        # by the clock, not block by block: what one sleep is late the next makes up for
        delay = arrival - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        return count

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def over_link(stream: BinaryIO, bits_per_second: float, latency_s: float = 0.0) -> BinaryIO:
    """`stream` as a reader at the end of a link would see it.

    The link starts at the first read and never waits for the reader: what a slow reader has not
    asked for yet lies ready when it does. Closing it closes `stream`. bits_per_second: of
    payload; math.inf for no limit. Raises ConfigError for a speed or latency without sense.
    """
    if not bits_per_second > 0 or not latency_s >= 0:
        raise ConfigError(f"no link has {bits_per_second} bit/s and a latency of {latency_s} s")
    return io.BufferedReader(_Link(stream, bits_per_second, latency_s), _MIN_BLOCK_NBYTES)
