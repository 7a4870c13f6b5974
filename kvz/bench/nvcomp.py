"""nvCOMP, where its Python package is installed: what one could use on a GPU instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

_PLANE_BITS = 7


class NvcompContestant:
    """One algorithm of nvCOMP on one buffer.

    Configurations and buffers are made once, as nvCOMP's documentation advises for repeated work:
    with buffers of nvCOMP's own, each call would also be timed allocating and shrinking them.
    """

    is_baseline = True
    graph = False

    def __init__(
        self, module: Any, algorithm: str, data: torch.Tensor, original_nbytes: int, name: str
    ) -> None:
        """``data``: uint8, device; the part of ``original_nbytes`` that is encoded and timed."""
        self.name = name
        self.config = {"algorithm": algorithm}
        self._data = data
        self._original_nbytes = original_nbytes
        # a stream of its own: nvCOMP takes 0, which is torch's default stream, for none given
        self._stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        self._codec = module.Codec(
            algorithm=algorithm,
            device_id=data.device.index,
            cuda_stream=self._stream.cuda_stream,
        )
        self._input = module.as_array(data)
        room = self._codec.get_max_comp_buffer_size(self._input)
        self._room = module.as_array(torch.empty(room, dtype=torch.uint8, device=data.device))
        self._compression = self._codec.compression_config(data.numel())
        self._decompression = self._codec.decompression_config(self._compression)
        self._restored = torch.empty_like(data)
        self._output = module.as_array(self._restored)
        self._encoded: Any = None

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """After what the current stream has to do, which goes on after this."""
        current = torch.cuda.current_stream(self._data.device)
        self._stream.wait_stream(current)
        yield
        current.wait_stream(self._stream)

    @property
    def counted_nbytes(self) -> int:
        return self._data.numel()

    def encode(self) -> None:
        with self._in_turn():
            self._encoded = self._codec.encode(
                self._input, out=self._room, compression_config=self._compression
            )

    def decode(self) -> None:
        with self._in_turn():
            self._codec.decode(
                self._encoded, out=self._output, decompression_config=self._decompression
            )

    def stored_nbytes(self) -> int:
        """Bytes of the encoded buffer. Waits for the device."""
        return int(self._encoded.buffer_size)

    def read_nbytes(self) -> int:
        return self.stored_nbytes()

    def ratio(self) -> float:
        return self._original_nbytes / (
            self._original_nbytes - self.counted_nbytes + self.stored_nbytes()
        )

    def poison(self) -> None:
        """Make every output byte wrong."""
        torch.bitwise_not(self._data, out=self._restored)

    def is_restored(self) -> bool:
        return torch.equal(self._restored, self._data)


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
