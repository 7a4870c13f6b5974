"""What one could use instead of a kvz codec: Zstandard on raw bytes or on the exponents alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvz.bench.contestants import Jobs
from kvz.bench.workload import TIMED_DTYPE, U8, U16, Workload
from kvz.formats.errors import DamagedFile
from kvz.layout import Layout
from kvz.safetensors_io import SafetensorsFile


def _bytes(array: NDArray[Any]) -> U8:
    return array.reshape(-1).view(np.uint8)


class _ZstdContexts:
    """One compressor and one decompressor per worker; frames without checksum."""

    def __init__(self, level: int, num_workers: int) -> None:
        self._compressors = [
            zstandard.ZstdCompressor(level=level, write_checksum=False) for _ in range(num_workers)
        ]
        self._decompressors = [zstandard.ZstdDecompressor() for _ in range(num_workers)]

    def compress(self, data: U8, worker: int = 0) -> bytes:
        return self._compressors[worker].compress(memoryview(data))

    def decompress_into(self, frame: bytes, out: U8, worker: int) -> None:
        with self._decompressors[worker].stream_reader(frame) as reader:
            if reader.readinto(out) != out.size:
                raise DamagedFile(f"zstd frame ends before {out.size} bytes")


class ZstdContestant:
    """Zstandard on the raw bytes of whole tensors, one frame each, as the zstd command would."""

    is_baseline = True
    calibrates = False

    def __init__(self, level: int) -> None:
        self.name = f"zstd-{level}, whole tensors"
        self.config = {"level": level}

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> int:
        contexts = _ZstdContexts(self.config["level"], 1)
        tensors = (source.read_tensor(name) for name in source.tensor_names)
        return sum(len(contexts.compress(_bytes(tensor))) for tensor in tensors)

    def first_difference(self, work: Workload) -> str | None:
        return work.first_difference()

    def prepare(self, work: Workload, num_workers: int) -> Jobs:
        contexts = _ZstdContexts(self.config["level"], num_workers)
        frames = [b""] * len(work.tensors)

        def encode(tensor: int, worker: int) -> None:
            frames[tensor] = contexts.compress(_bytes(work.tensors[tensor]), worker)

        def decode(tensor: int, worker: int) -> None:
            contexts.decompress_into(frames[tensor], _bytes(work.outputs[tensor]), worker)

        numbers = range(len(work.tensors))
        return Jobs(
            [], [partial(encode, n) for n in numbers], [partial(decode, n) for n in numbers]
        )


class ExponentPlaneContestant:
    """Exponents through Zstandard, sign and mantissa as they are, split by NumPy.

    Every :data:`BLOCK_LEN` elements are one frame, so that the planes stay in the cache.
    """

    is_baseline = True
    calibrates = False
    BLOCK_LEN = 1 << 19

    def __init__(self, level: int) -> None:
        self.name = f"zstd-{level}, exponents"
        self.config = {"level": level}

    def stored_nbytes(self, source: SafetensorsFile, layout: Layout) -> int:
        contexts = _ZstdContexts(self.config["level"], 1)
        planes = _Planes(self.BLOCK_LEN)
        total = 0
        for name in source.tensor_names:
            tensor = source.read_tensor(name).reshape(-1)
            if source.dtype(name) != TIMED_DTYPE:
                total += len(contexts.compress(_bytes(tensor)))
                continue
            sign_mantissa = np.empty(tensor.size, np.uint8)
            total += sign_mantissa.nbytes
            for block, plane in self._blocks(tensor, sign_mantissa):
                total += len(contexts.compress(planes.split(block, plane)))
        return total

    def first_difference(self, work: Workload) -> str | None:
        return work.first_difference()

    def prepare(self, work: Workload, num_workers: int) -> Jobs:
        contexts = _ZstdContexts(self.config["level"], num_workers)
        scratch = [_Planes(self.BLOCK_LEN) for _ in range(num_workers)]
        sources: list[tuple[U16, U8]] = []
        targets: list[tuple[U16, U8]] = []
        for tensor, output in zip(work.tensors, work.outputs, strict=True):
            sign_mantissa = np.empty(tensor.size, np.uint8)
            sources += self._blocks(tensor.reshape(-1), sign_mantissa)
            targets += self._blocks(output.reshape(-1), sign_mantissa)
        frames = [b""] * len(sources)

        def encode(number: int, worker: int) -> None:
            exponents = scratch[worker].split(*sources[number])
            frames[number] = contexts.compress(exponents, worker)

        def decode(number: int, worker: int) -> None:
            target, sign_mantissa = targets[number]
            exponents = scratch[worker].exponents[: target.size]
            contexts.decompress_into(frames[number], exponents, worker)
            scratch[worker].join(sign_mantissa, target)

        numbers = range(len(sources))
        return Jobs(
            [], [partial(encode, n) for n in numbers], [partial(decode, n) for n in numbers]
        )

    def _blocks(self, elements: U16, sign_mantissa: U8) -> list[tuple[U16, U8]]:
        starts = range(0, elements.size, self.BLOCK_LEN)
        return [
            (elements[i : i + self.BLOCK_LEN], sign_mantissa[i : i + self.BLOCK_LEN])
            for i in starts
        ]


class _Planes:
    """BF16 blocks to exponents and sign-mantissa bytes and back, in buffers that are kept."""

    def __init__(self, block_len: int) -> None:
        self.exponents = np.empty(block_len, np.uint8)
        self._a = np.empty(block_len, np.uint16)
        self._b = np.empty(block_len, np.uint16)

    def split(self, block: U16, sign_mantissa: U8) -> U8:
        """Fill ``sign_mantissa`` and return the exponents, valid until the next call."""
        a, b = self._a[: block.size], self._b[: block.size]
        exponents = self.exponents[: block.size]
        np.right_shift(block, 7, out=a)
        np.copyto(exponents, a, casting="unsafe")
        np.right_shift(block, 8, out=a)
        np.bitwise_and(a, 0x80, out=a)
        np.bitwise_and(block, 0x7F, out=b)
        np.bitwise_or(a, b, out=a)
        np.copyto(sign_mantissa, a, casting="unsafe")
        return exponents

    def join(self, sign_mantissa: U8, target: U16) -> None:
        """Fill ``target`` from ``exponents`` and ``sign_mantissa``."""
        a, b = self._a[: target.size], self._b[: target.size]
        np.copyto(a, sign_mantissa)
        np.bitwise_and(a, 0x80, out=b)
        np.left_shift(b, 8, out=b)
        np.bitwise_and(a, 0x7F, out=a)
        np.bitwise_or(b, a, out=b)
        np.copyto(a, self.exponents[: target.size])
        np.left_shift(a, 7, out=a)
        np.bitwise_or(a, b, out=target)
