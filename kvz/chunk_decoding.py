"""Decode the chunks of an archive, on the CPU or a GPU, and hand each to whoever wants it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from numpy.typing import NDArray

from kvz.devices import require_gpu
from kvz.formats.head import Head
from kvz.sections import EncodedChunk
from kvz.workers import BufferPool, run_ordered

if TYPE_CHECKING:
    from kvz.gpu.decoding import GpuDecoder

T = TypeVar("T")
#: Called on a worker with a chunk and its decoded ``uint[outer, n, inner]``, valid only meanwhile.
Consume: TypeAlias = Callable[[EncodedChunk, NDArray[Any]], T]


class ChunkJobs(Generic[T]):
    """Decoding on the CPU, into buffers that are used again."""

    def __init__(self, head: Head, consume: Consume[T]) -> None:
        self._head = head
        self._consume = consume
        self._buffers = BufferPool()

    def run(self, encoded: EncodedChunk) -> T:
        """Decode one chunk and consume it. Raises DamagedFile and what the consumer raises."""
        entry = self._head.tensors[encoded.tensor]
        shape = entry.chunk_shape(encoded.chunk)
        nbytes = math.prod(shape) * entry.itemsize
        buffer = self._buffers.take(nbytes)
        decoded = buffer[:nbytes].view(f"u{entry.itemsize}").reshape(shape)
        encoded.decode(decoded)
        result = self._consume(encoded, decoded)
        self._buffers.give(buffer)
        return result


def gpu_decoder(device: str, head: Head) -> GpuDecoder | None:
    """Decoder on the GPU that ``device`` asks for; None: the CPU decodes. Raises ConfigError."""
    if not require_gpu(device):
        return None
    from kvz.gpu.decoding import GpuDecoder

    return GpuDecoder(device, head)


def decode_chunks(
    chunks: Iterable[EncodedChunk],
    head: Head,
    consume: Consume[T],
    *,
    threads: int,
    gpu: GpuDecoder | None,
) -> Iterator[T]:
    """What ``consume`` returned for each chunk, in their order; bounded memory.

    Raises DamagedFile or what ``consume`` raises, for the first chunk that it concerns.
    """
    jobs = ChunkJobs(head, consume)
    if gpu is not None:
        return gpu.run(chunks, jobs, consume, threads)
    return run_ordered((partial(jobs.run, chunk) for chunk in chunks), threads)
