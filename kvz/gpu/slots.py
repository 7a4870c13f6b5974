"""The memory of one batch on its way through the device, used again for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvz.gpu.device import Device, align

#: Memory grows in steps of this: batches differ a little in size.
_GRAIN = 2 << 20


class Memory:
    """Bytes in host memory that the device copies at full speed, or on the device; they grow."""

    def __init__(self, device: Device, *, on_host: bool) -> None:
        self._allocate = device.staging if on_host else device.empty
        self._data = self._allocate(0)

    def reserve(self, nbytes: int) -> None:
        """At least ``nbytes``; what was there before is lost when it has to grow."""
        if self._data.numel() < nbytes:
            self._data = self._allocate(0)  # the old ones first: both need not fit
            self._data = self._allocate(-(-nbytes // _GRAIN) * _GRAIN)

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._data[offset : offset + nbytes]

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The same as an array; host memory only."""
        return self.part(offset, nbytes).numpy()

    @property
    def address(self) -> int:
        return self._data.data_ptr()


class Slot:
    """One batch's memory and stream.

    ``upload`` is copied to ``sources`` as it is; kernels go from there to ``results``; ``download``
    takes what goes back.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: Any = device.stream()
        self.upload = Memory(device, on_host=True)
        self.sources = Memory(device, on_host=False)
        self.results = Memory(device, on_host=False)
        self.download = Memory(device, on_host=True)

    def send(self, nbytes: int) -> None:
        """Copy the first ``nbytes`` of ``upload`` to the device, in the current stream."""
        self.sources.part(0, nbytes).copy_(self.upload.part(0, nbytes), non_blocking=True)

    def fetch(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy ``(offset in results, offset in download, nbytes)`` back, in the current stream."""
        for source, target, nbytes in moves:
            part = self.results.part(source, nbytes)
            self.download.part(target, nbytes).copy_(part, non_blocking=True)


class Places:
    """Offsets of parts that follow each other, each at a multiple of 64."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += align(nbytes)
        return offset
