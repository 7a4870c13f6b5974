"""nvCOMP, where its Python package is installed: what one could use on a GPU instead."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.utils.dlpack

_PLANE_BITS = 7


class NvcompContestant:
    """One algorithm of nvCOMP on one buffer, in the current stream; it allocates the results."""

    is_baseline = True
    graph = False

    def __init__(
        self, module: Any, algorithm: str, data: torch.Tensor, original_nbytes: int, name: str
    ) -> None:
        """``data``: uint8, device; the part of ``original_nbytes`` that is encoded and timed."""
        self._module = module
        self.name = name
        self.config = {"algorithm": algorithm}
        self._data = data
        self._original_nbytes = original_nbytes
        stream = torch.cuda.current_stream(data.device).cuda_stream
        self._codec = module.Codec(
            algorithm=algorithm, cuda_stream=stream, device_id=data.device.index
        )
        self._encoded: Any = None
        self._decoded: Any = None

    @property
    def counted_nbytes(self) -> int:
        return self._data.numel()

    def encode(self) -> None:
        self._encoded = self._codec.encode(self._module.as_array(self._data))

    def decode(self) -> None:
        self._decoded = self._codec.decode(self._encoded)

    def stored_nbytes(self) -> int:
        """Bytes of the encoded buffer. Waits for the device."""
        return int(self._encoded.buffer_size)

    def ratio(self) -> float:
        return self._original_nbytes / (
            self._original_nbytes - self.counted_nbytes + self.stored_nbytes()
        )

    def poison(self) -> None:
        """Results are new buffers each time."""
        self._decoded = None

    def is_restored(self) -> bool:
        decoded = torch.utils.dlpack.from_dlpack(self._decoded).view(torch.uint8).reshape(-1)
        return torch.equal(decoded, self._data)


def contestants(bits: torch.Tensor) -> list[NvcompContestant]:
    """zstd on the bytes, ANS on the exponents alone; empty without the package.

    ``bits`` int16, device.
    """
    try:
        module = import_module("nvidia.nvcomp")
    except ImportError:
        return []
    nbytes = 2 * bits.numel()
    exponents = ((bits >> _PLANE_BITS) & 0xFF).to(torch.uint8)
    return [
        NvcompContestant(module, "ANS", exponents, nbytes, "nvCOMP ANS, exponents alone"),
        NvcompContestant(module, "Zstd", bits.view(torch.uint8), nbytes, "nvCOMP zstd"),
    ]
