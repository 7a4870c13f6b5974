"""``kvz decompress`` and ``kvz verify`` on a GPU: an archive's chunks, decoded, in order."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvz.chunk_decoding import ChunkJobs, Consume
from kvz.formats.errors import InvalidField, KvzError
from kvz.formats.head import Head, TensorEntry
from kvz.formats.ids import SectionKind
from kvz.gpu.bindings import ChunkMemory, Detail, DeviceBinding, find_bindings, make_batch
from kvz.gpu.device import open_device
from kvz.gpu.pipeline import Batch, DevicePiece, HostJob, Pipeline, SlotPool
from kvz.gpu.slots import Places, Slot
from kvz.gpu.stages import StageClock
from kvz.kernels.gpu.chunks import Batch as Tables
from kvz.sections import EncodedChunk

T = TypeVar("T")
_ITEMSIZE = 2


class _Placed(NamedTuple):
    """A chunk and where it lies: ``payload`` and ``codebook`` in the slot's sources, ``raw`` in its
    results and its download (offsets)."""

    encoded: EncodedChunk
    entry: TensorEntry
    shape: tuple[int, int, int]
    payload: int
    codebook: int
    raw: int
    prepared: Any
    book: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return _ITEMSIZE * math.prod(self.shape)

    @property
    def detail(self) -> Detail:
        return Detail.ANCHOR if self.encoded.kind is SectionKind.ANCHOR else Detail.FULL

    @property
    def name(self) -> str:
        return f"chunk {self.encoded.chunk} of {self.entry.name}"


class GpuDecoder:
    """Decodes what has GPU kernels; other codecs, and chunks stored raw, go through the CPU."""

    def __init__(self, device: str, head: Head) -> None:
        """Raises ConfigError: no such device, or codecs or shapes without GPU kernels."""
        self._device = open_device(device)
        self._head = head
        self._bindings = find_bindings(head)
        self.name = device
        self.stages = StageClock()
        self._slots = SlotPool(self._device)

    def run(
        self, chunks: Iterable[EncodedChunk], host: ChunkJobs[T], consume: Consume[T], threads: int
    ) -> Iterator[T]:
        """What ``consume`` returned for each chunk, in order; ``host`` takes those of the CPU.

        Raises DamagedFile or what ``consume`` raises, for the first chunk that it concerns.
        """
        start = time.perf_counter()
        pipeline: Pipeline[EncodedChunk, T] = Pipeline(
            self._slots, partial(self._run_batch, consume), threads=threads
        )
        yield from pipeline.run(self._work(chunks, host))
        self.stages.add("whole", time.perf_counter() - start)

    def _work(
        self, chunks: Iterable[EncodedChunk], host: ChunkJobs[T]
    ) -> Iterator[HostJob[T] | DevicePiece[EncodedChunk]]:
        for encoded in chunks:
            entry = self._head.tensors[encoded.tensor]
            nbytes = entry.itemsize * math.prod(entry.chunk_shape(encoded.chunk))
            if entry.codec in self._bindings and encoded.kind is not SectionKind.RAW:
                # a section may not be longer than the chunk; a hostile one is not trusted with it
                yield DevicePiece(encoded, max(nbytes, encoded.payload_nbytes))
            else:
                yield HostJob(partial(host.run, encoded), nbytes)

    def _run_batch(
        self,
        consume: Consume[T],
        slot: Slot,
        batch: Batch[EncodedChunk, T],
        workers: ThreadPoolExecutor,
    ) -> None:
        placed = self._place(slot, batch.pieces)
        self._read(slot, placed, workers)
        for chunk in placed:
            self._check_payload(chunk)
        status = self._decode(slot, placed)
        for chunk, bad in zip(placed, status, strict=True):
            if bad:
                raise _explain(chunk)
        with self.stages.timing("write"):
            jobs = [workers.submit(_hand_over, slot, chunk, consume) for chunk in placed]
            batch.finish([job.result() for job in jobs])
        self._slots.give(slot)

    def _binding(self, chunk: _Placed) -> DeviceBinding:
        return self._bindings[chunk.entry.codec]

    def _place(self, slot: Slot, pieces: list[EncodedChunk]) -> list[_Placed]:
        sources, results = Places(), Places()
        codebooks: dict[int, int] = {}
        placed = []
        for encoded in pieces:
            entry = self._head.tensors[encoded.tensor]
            shape = entry.chunk_shape(encoded.chunk)
            prepared = encoded.prepared()
            book = self._bindings[entry.codec].codebook(prepared)
            payload = sources.take(encoded.payload_nbytes)
            if encoded.tensor not in codebooks:
                codebooks[encoded.tensor] = sources.take(book.size)
            raw = results.take(_ITEMSIZE * math.prod(shape))
            codebook = codebooks[encoded.tensor]
            where = (payload, codebook, raw)
            placed.append(_Placed(encoded, entry, shape, *where, prepared, book))
        slot.upload.reserve(sources.nbytes)
        slot.sources.reserve(sources.nbytes)
        slot.results.reserve(results.nbytes)
        slot.download.reserve(results.nbytes)
        for chunk in placed:
            book = slot.upload.array(chunk.codebook, chunk.book.size)
            np.copyto(book, chunk.book.reshape(-1))
        return placed

    def _read(self, slot: Slot, placed: list[_Placed], workers: ThreadPoolExecutor) -> None:
        payloads = [slot.upload.array(c.payload, c.encoded.payload_nbytes) for c in placed]
        with self.stages.timing("read"):
            _wait(workers.submit(c.encoded.read, p) for c, p in zip(placed, payloads, strict=True))
        with self.stages.timing("checksum"):
            _wait(workers.submit(c.encoded.check, p) for c, p in zip(placed, payloads, strict=True))

    def _check_payload(self, chunk: _Placed) -> None:
        try:
            nbytes = chunk.encoded.payload_nbytes
            self._binding(chunk).check_payload(chunk.shape, nbytes, chunk.detail)
        except KvzError as error:
            raise type(error)(f"{chunk.name}: {error}") from None

    def _decode(self, slot: Slot, placed: list[_Placed]) -> list[int]:
        """Decoded chunks in the slot's download; returns the kernels' status of each."""
        device = slot.device
        start, sent, begun, decoded, fetched = (device.marker() for _ in range(5))
        status = torch.zeros(len(placed), dtype=torch.int32, device=device.torch_device)
        groups: dict[tuple[int, int, Detail], list[int]] = {}
        for i, chunk in enumerate(placed):
            key = (chunk.entry.codec, chunk.shape[2], chunk.detail)
            groups.setdefault(key, []).append(i)
        launches = [
            (key, self._tables(slot, [placed[i] for i in rows]), rows)
            for key, rows in groups.items()
        ]
        last = placed[-1]
        ends = [last.payload + last.encoded.payload_nbytes]
        ends += [chunk.codebook + chunk.book.size for chunk in placed]
        start.record()
        slot.send(max(ends))
        sent.record()
        with device.launching:
            begun.record()
            position = 0
            for (codec, inner, detail), tables, rows in launches:
                part = status[position : position + len(rows)]
                self._bindings[codec].decode(tables, part, inner, detail)
                position += len(rows)
            decoded.record()
        slot.fetch([(0, 0, last.raw + last.nbytes)])
        fetched.record()
        found = status.tolist()
        self.stages.add("copy_in", sent.seconds_since(start))
        self.stages.add("codec", decoded.seconds_since(begun))
        self.stages.add("copy_out", fetched.seconds_since(decoded))
        in_order = [0] * len(placed)
        for bad, row in zip(found, (r for *_, rows in launches for r in rows), strict=True):
            in_order[row] = bad
        return in_order

    def _tables(self, slot: Slot, placed: list[_Placed]) -> Tables:
        memories = [
            ChunkMemory(
                shape=chunk.shape,
                data=slot.results.address + chunk.raw,
                outer_stride=chunk.shape[1] * chunk.shape[2],
                payload=slot.sources.address + chunk.payload,
                codebook=slot.sources.address + chunk.codebook,
                payload_nbytes=chunk.encoded.payload_nbytes,
                start=chunk.entry.chunk_range(chunk.encoded.chunk)[0],
                prepared=chunk.prepared,
            )
            for chunk in placed
        ]
        return make_batch(self._binding(placed[0]), memories, slot.device.torch_device)


def _wait(jobs: Iterable[Any]) -> None:
    """Wait for all jobs; the first error in their order is raised."""
    for job in list(jobs):
        job.result()


def _hand_over(slot: Slot, chunk: _Placed, consume: Consume[T]) -> T:
    decoded = slot.download.array(chunk.raw, chunk.nbytes).view(np.uint16).reshape(chunk.shape)
    return consume(chunk.encoded, decoded)


def _explain(chunk: _Placed) -> KvzError:
    """What is wrong with a payload that the kernels refused: the CPU says it exactly."""
    try:
        chunk.encoded.decode(np.empty(chunk.shape, np.uint16))
    except KvzError as error:
        return error
    return InvalidField(f"{chunk.name}: the GPU finds streams that contradict each other")
