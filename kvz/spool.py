"""Payloads that are needed later, in their order, without holding all of them in memory."""

from __future__ import annotations

import tempfile
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvz.files import naming

_IN_MEMORY_NBYTES = 128 << 20


class PayloadSpool:
    """First in, first out; beyond 128 MiB in a temporary file that nobody else sees."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_NBYTES)  # noqa: SIM115 - see close
        self._places: deque[tuple[int, int]] = deque()
        self._end = 0

    def __len__(self) -> int:
        return len(self._places)

    def put(self, payload: NDArray[np.uint8]) -> None:
        """Keep a copy of ``payload``. Raises SourceError about the folder of temporary files."""
        with naming(tempfile.gettempdir()):
            self._file.seek(self._end)
            self._file.write(memoryview(payload))
        self._places.append((self._end, payload.size))
        self._end += payload.size

    def get(self) -> NDArray[np.uint8]:
        """The oldest payload."""
        offset, nbytes = self._places.popleft()
        self._file.seek(offset)
        return np.frombuffer(self._file.read(nbytes), np.uint8)

    def close(self) -> None:
        self._file.close()
