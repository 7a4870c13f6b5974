"""The device that GPU work runs on: memory, streams, events.

Where Triton interprets (``TRITON_INTERPRET=1``) it is the CPU: the same code runs, slowly, without
a GPU. Streams and events are then nothing and host clocks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from kvz.devices import gpu_index
from kvz.formats.errors import ConfigError

#: Payloads and everything else that kernels take by address starts at multiples of this.
ALIGNMENT = 64


def align(position: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Marker:
    """A point in a stream (or in time, on the interpreter) between which seconds are measured."""

    def __init__(self, interpreted: bool) -> None:
        self._event: Any = None
        if not interpreted:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._time = 0.0

    def record(self) -> None:
        """Mark the current stream's end."""
        if self._event is None:
            self._time = time.perf_counter()
        else:
            self._event.record()

    def seconds_since(self, earlier: Marker) -> float:
        """Both must have been reached; synchronise first."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


class Device:
    """A CUDA device, or the CPU where Triton interprets."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.interpreted = torch_device.type == "cpu"
        #: Held while kernels are launched: compiling one, and interpreting, is for one thread.
        self.launching = threading.Lock()

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] in device memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def staging(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] in host memory that the device copies from and to at full speed."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not self.interpreted)

    def stream(self) -> Any:
        """A stream of its own for :meth:`using`."""
        if self.interpreted:
            return None
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Work of this thread goes to ``stream`` of this device."""
        if self.interpreted:
            yield
            return
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            yield

    def marker(self) -> Marker:
        return Marker(self.interpreted)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if not self.interpreted:
            torch.cuda.current_stream(self.torch_device).synchronize()


def open_device(name: str) -> Device:
    """The device for ``cuda`` or ``cuda:N``. Raises ConfigError when it cannot be used."""
    index = gpu_index(name)
    if index is None:
        raise ConfigError(f"device {name!r} is no GPU")
    if is_interpreted():
        return Device(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name}: torch {torch.__version__} finds no CUDA device")
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {name}: CUDA devices found: {torch.cuda.device_count()}")
    return Device(torch.device("cuda", index))


def device_of(tensor: torch.Tensor) -> Device:
    """The device that a tensor lies on. Raises ConfigError for one that kernels cannot reach."""
    expected = "cpu" if is_interpreted() else "cuda"
    if tensor.device.type != expected:
        raise ConfigError(f"tensor on {tensor.device}, must be on a {expected} device")
    return Device(tensor.device)
