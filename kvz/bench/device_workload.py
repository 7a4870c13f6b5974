"""The data of a benchmark on a GPU: a capture's tensors, repeated in device memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvz.bench.workload import ShapeGroup, group_shapes, timed_entries
from kvz.codecs.base import Codec
from kvz.formats.errors import ConfigError, ContentMismatch
from kvz.formats.head import TensorEntry
from kvz.gpu.calibration import calibrate
from kvz.gpu.device import Device, align
from kvz.gpu.device_chunks import bind
from kvz.layout import Layout
from kvz.safetensors_io import SafetensorsFile

#: Shorter tensors are repeated along tokens: a GPU's time for tiny ones is that of their tables.
MIN_TENSOR_NBYTES = 16 << 20
#: Of a larger capture the first tensors are taken.
MAX_BASE_NBYTES = 2 << 30
_ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """Tensors of one capture on the device: int16[outer, tokens, inner] by name, one inner size."""

    entries: Sequence[TensorEntry]
    tensors: Mapping[str, torch.Tensor]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def shapes(self) -> list[ShapeGroup]:
        return group_shapes(self.entries)


def load(source: SafetensorsFile, layout: Layout, device: Device) -> BaseTensors:
    """The BF16 cache tensors of the most frequent head dimension. Raises ConfigError: none."""
    entries, total = timed_entries(source, layout, MAX_BASE_NBYTES)
    inner = Counter(entry.view_shape[2] for entry in entries).most_common(1)[0][0]
    kept = [entry for entry in entries if entry.view_shape[2] == inner]
    warnings = []
    nbytes = sum(entry.nbytes for entry in kept)
    if nbytes < total:
        warnings.append(
            f"{nbytes / 1e6:.1f} of {total / 1e6:.1f} MB of the capture are measured: the first "
            f"{MAX_BASE_NBYTES >> 30} GiB, and of these the tensors with head_dim {inner}"
        )
    tensors = {}
    for entry in kept:
        bits = source.read_tensor(entry.name).reshape(entry.view_shape).view("<i2")
        tensors[entry.name] = torch.from_numpy(bits).to(device.torch_device)
    return BaseTensors(kept, tensors, tuple(warnings))


@dataclass(frozen=True, slots=True)
class Codebooks:
    """By tensor name the codec that the wanted one chose, and the codebook."""

    codecs: Mapping[str, Codec]
    books: Mapping[str, bytes]


def calibrate_all(codec: Codec, source: SafetensorsFile, base: BaseTensors) -> Codebooks:
    """Codebooks calibrated on the device, for the tensors of ``source``. Raises ConfigError."""
    codec = codec.for_source(source)
    codecs, books = {}, {}
    for entry in base.entries:
        name = entry.name
        chosen = codec.for_tensor(name, entry.dtype, entry.view_shape, entry.token_axis)
        if chosen is None:
            raise ConfigError(f"codec {codec.name} does not take tensor {name!r}")
        codecs[name] = chosen
        (books[name],) = calibrate(chosen, bind(chosen), [base.tensors[name]])
    return Codebooks(codecs, books)


def check_alike(base: BaseTensors, other: BaseTensors, name: str) -> None:
    """Codebooks of ``other``, read from ``name``, fit ``base``. Raises ContentMismatch."""
    theirs = {entry.name: entry.view_shape for entry in other.entries}
    for entry in base.entries:
        outer, _, inner = entry.view_shape
        found = theirs.get(entry.name)
        if found is None or (found[0], found[2]) != (outer, inner):
            raise ContentMismatch(
                f"{name}: tensor {entry.name!r} is {'missing' if found is None else list(found)}, "
                f"codebooks need [{outer}, any, {inner}]"
            )


class DeviceWorkload:
    """Tensors one after the other in device memory, and outputs of the same shapes."""

    def __init__(self, name: str, sources: Sequence[tuple[str, torch.Tensor]]) -> None:
        """``sources``: names of codebooks, and what to put in (int16[outer, tokens, inner])."""
        self.name = name
        self.book_names = [book_name for book_name, _ in sources]
        offsets = [0]
        for _, bits in sources:
            offsets.append(offsets[-1] + align(_ITEMSIZE * bits.numel()) // _ITEMSIZE)
        device = sources[0][1].device
        self._input = torch.zeros(offsets[-1], dtype=torch.int16, device=device)
        self._output = torch.zeros_like(self._input)
        self.tensors: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        for (_, bits), offset in zip(sources, offsets, strict=False):
            part = slice(offset, offset + bits.numel())
            self._input[part].view(bits.shape).copy_(bits)
            for arena, views in ((self._input, self.tensors), (self._output, self.outputs)):
                views.append(arena[part].view(bits.shape).view(torch.bfloat16))

    @property
    def bits(self) -> torch.Tensor:
        """All tensors, int16, with the few zeros between them."""
        return self._input

    @property
    def nbytes(self) -> int:
        return sum(_ITEMSIZE * tensor.numel() for tensor in self.tensors)

    def poison_outputs(self) -> None:
        """Make every output element wrong."""
        torch.bitwise_not(self._input, out=self._output)

    def is_restored(self) -> bool:
        """Whether every output element equals its input. Waits for the device."""
        return self.equals(self.tensors)

    def equals(self, expected: Sequence[torch.Tensor]) -> bool:
        """Whether every output element is as ``expected``. Waits for the device."""
        return all(
            torch.equal(tensor.view(torch.int16), output.view(torch.int16))
            for tensor, output in zip(expected, self.outputs, strict=True)
        )

    def relative_error(self) -> float:
        """Squared error of an output as a part of its tensor's squares: that of the worst.

        For finite tensors. Waits for the device.
        """
        worst = 0.0
        for tensor, output in zip(self.tensors, self.outputs, strict=True):
            error = (output.float() - tensor.float()).square_().sum(dtype=torch.float64)
            total = tensor.float().square_().sum(dtype=torch.float64)
            worst = max(worst, float(error / total) if total else float(error))
        return worst


def repeated(base: BaseTensors, nbytes: int, name: str) -> DeviceWorkload:
    """The capture's tensors again and again, in order, as many as fit ``nbytes``, at least one."""
    sources: list[tuple[str, torch.Tensor]] = []
    total = 0
    while True:
        for tensor_name, tensor in base.tensors.items():
            room = min(nbytes, MIN_TENSOR_NBYTES)
            bits = tensor.repeat(1, max(1, room // (_ITEMSIZE * tensor.numel())), 1)
            size = _ITEMSIZE * bits.numel()
            if sources and total + size > nbytes:
                return DeviceWorkload(name, sources)
            sources.append((tensor_name, bits))
            total += size


def many_small(base: BaseTensors, count: int, nbytes: int, name: str) -> DeviceWorkload:
    """``count`` tensors of about ``nbytes`` each: the capture's, repeated or cut along tokens."""
    names = list(base.tensors)
    sources = []
    for i in range(count):
        bits = base.tensors[names[i % len(names)]]
        outer, tokens, inner = bits.shape
        wanted = max(1, nbytes // (_ITEMSIZE * outer * inner))
        cut = bits.repeat(1, -(-wanted // tokens), 1)[:, :wanted]
        sources.append((names[i % len(names)], cut))
    return DeviceWorkload(name, sources)
