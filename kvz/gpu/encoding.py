"""``kvz compress`` on a GPU: the sections of an archive, in order, as the CPU makes them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvz.codecs.base import RESIDUAL_ALIGNMENT, is_progressive
from kvz.formats import container
from kvz.formats.head import Head
from kvz.formats.ids import SectionKind
from kvz.gpu.bindings import ChunkMemory, DeviceBinding, Workspace, find_bindings, make_batch
from kvz.gpu.device import open_device
from kvz.gpu.pipeline import Batch, DevicePiece, HostJob, Pipeline, SlotPool
from kvz.gpu.slots import Places, Slot
from kvz.gpu.stages import StageClock
from kvz.kernels.gpu.chunks import Batch as Tables
from kvz.planning import ChunkToEncode, Section, SectionSource

_ITEMSIZE = 2


class _Placed(NamedTuple):
    """A chunk and where it lies: ``raw`` and ``codebook`` in the slot's sources, ``payload`` in its
    results (offsets, with the room that the payload has)."""

    item: ChunkToEncode
    shape: tuple[int, int, int]
    raw: int
    codebook: int
    payload: int
    capacity: int
    prepared: Any
    book: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return _ITEMSIZE * math.prod(self.shape)

    @property
    def start(self) -> int:
        """The chunk's first token."""
        return self.item.entry.chunk_range(self.item.chunk)[0]


class GpuEncoder:
    """Encodes the tensors whose codecs have GPU kernels; the others go through the CPU."""

    def __init__(self, device: str, head: Head) -> None:
        """Raises ConfigError: no such device, or a codec or shape without GPU kernels."""
        self._device = open_device(device)
        self._bindings = find_bindings(head)
        self.name = device
        self.stages = StageClock()
        self._slots = SlotPool(self._device)

    def sections(self, planned: SectionSource, threads: int) -> Iterator[Section | None]:
        """The sections of the archive in order. Release each: that is what frees its memory."""
        start = time.perf_counter()
        pipeline: Pipeline[ChunkToEncode, Section | None] = Pipeline(
            self._slots, self._run_batch, threads=threads
        )
        for section in pipeline.run(self._work(planned)):
            handed_over = time.perf_counter()
            yield section
            self.stages.add("write", time.perf_counter() - handed_over)
        self.stages.add("whole", time.perf_counter() - start)

    def _work(
        self, planned: SectionSource
    ) -> Iterator[HostJob[Section | None] | DevicePiece[ChunkToEncode]]:
        for item in planned.work():
            if not isinstance(item, ChunkToEncode):
                yield HostJob(item, 0)
                continue
            nbytes = item.entry.itemsize * math.prod(item.entry.chunk_shape(item.chunk))
            if item.entry.codec in self._bindings:
                yield DevicePiece(item, nbytes)
            else:
                yield HostJob(partial(planned.encode, item), nbytes)

    def _run_batch(
        self,
        slot: Slot,
        batch: Batch[ChunkToEncode, Section | None],
        workers: ThreadPoolExecutor,
    ) -> None:
        with self.stages.timing("calibrate"):
            prepared = [item.prepared.result() for item in batch.pieces]
        placed = self._place(slot, batch.pieces, prepared)
        with self.stages.timing("read"):
            for read in [workers.submit(_read, slot, chunk) for chunk in placed]:
                read.result()
        lengths = self._encode(slot, placed)
        fetched = self._fetch(slot, placed, lengths)
        release = partial(_release_last, self._slots, slot, _Countdown(len(placed)))
        with self.stages.timing("checksum"):
            jobs = [
                workers.submit(_section, slot, chunk, offset, length, release)
                for chunk, offset, length in zip(placed, fetched, lengths, strict=True)
            ]
            batch.finish([job.result() for job in jobs])

    def _place(
        self, slot: Slot, items: list[ChunkToEncode], all_prepared: list[Any]
    ) -> list[_Placed]:
        sources, results = Places(), Places()
        codebooks: dict[int, int] = {}
        placed = []
        for item, prepared in zip(items, all_prepared, strict=True):
            binding = self._bindings[item.entry.codec]
            book = binding.codebook(prepared)
            shape = item.entry.chunk_shape(item.chunk)
            raw = sources.take(_ITEMSIZE * math.prod(shape))
            if item.tensor not in codebooks:
                codebooks[item.tensor] = sources.take(book.size)
            capacity = binding.max_payload_nbytes(shape)
            payload = results.take(capacity)
            codebook = codebooks[item.tensor]
            where = (raw, codebook, payload, capacity)
            placed.append(_Placed(item, shape, *where, prepared, book))
        slot.upload.reserve(sources.nbytes)
        slot.sources.reserve(sources.nbytes)
        slot.results.reserve(results.nbytes)
        for chunk in placed:
            book = slot.upload.array(chunk.codebook, chunk.book.size)
            np.copyto(book, chunk.book.reshape(-1))
        return placed

    def _encode(self, slot: Slot, placed: list[_Placed]) -> list[int]:
        """Payloads in the slot's results; returns their lengths."""
        device = slot.device
        start, sent, begun, encoded = (device.marker() for _ in range(4))
        groups: dict[tuple[int, int], list[int]] = {}
        for i, chunk in enumerate(placed):
            groups.setdefault((chunk.item.entry.codec, chunk.shape[2]), []).append(i)
        lengths = torch.empty(len(placed), dtype=torch.int64, device=device.torch_device)
        launches = [
            (key, self._tables(slot, [placed[i] for i in rows]), rows)
            for key, rows in groups.items()
        ]
        start.record()
        slot.send(max(placed[-1].raw + placed[-1].nbytes, _codebook_end(placed)))
        sent.record()
        with device.launching:
            begun.record()
            # encoders do not touch the gaps between streams
            slot.results.part(0, placed[-1].payload + placed[-1].capacity).zero_()
            position = 0
            for (codec, inner), (tables, work), rows in launches:
                part = lengths[position : position + len(rows)]
                self._bindings[codec].encode(tables, work, part, inner)
                position += len(rows)
            encoded.record()
        found = lengths.tolist()
        self.stages.add("copy_in", sent.seconds_since(start))
        self.stages.add("codec", encoded.seconds_since(begun))
        in_order = [0] * len(placed)
        for length, row in zip(found, (r for _, _, rows in launches for r in rows), strict=True):
            in_order[row] = length
        return in_order

    def _tables(self, slot: Slot, placed: list[_Placed]) -> tuple[Tables, Workspace]:
        memories = [
            ChunkMemory(
                shape=chunk.shape,
                data=slot.sources.address + chunk.raw,
                outer_stride=chunk.shape[1] * chunk.shape[2],
                payload=slot.results.address + chunk.payload,
                codebook=slot.sources.address + chunk.codebook,
                start=chunk.start,
                prepared=chunk.prepared,
            )
            for chunk in placed
        ]
        device = slot.device.torch_device
        binding: DeviceBinding = self._bindings[placed[0].item.entry.codec]
        tables = make_batch(binding, memories, device)
        nbytes = binding.scratch_nbytes(tables, placed[0].shape[2])
        return tables, Workspace.empty(tables, nbytes, device)

    def _fetch(self, slot: Slot, placed: list[_Placed], lengths: list[int]) -> list[int]:
        """Copy the payloads to the host; returns where they lie in the slot's download."""
        places = Places()
        moves, offsets = [], []
        for chunk, length in zip(placed, lengths, strict=True):
            offsets.append(places.nbytes)
            # of a progressive codec the padding does not count
            if length < chunk.nbytes + RESIDUAL_ALIGNMENT:
                moves.append((chunk.payload, places.take(length), length))
        slot.download.reserve(places.nbytes)
        start, done = slot.device.marker(), slot.device.marker()
        start.record()
        slot.fetch(moves)
        done.record()
        slot.device.synchronize()
        self.stages.add("copy_out", done.seconds_since(start))
        return offsets


def _codebook_end(placed: list[_Placed]) -> int:
    return max(chunk.codebook + chunk.book.size for chunk in placed)


def _read(slot: Slot, chunk: _Placed) -> None:
    raw = slot.upload.array(chunk.raw, chunk.nbytes)
    chunk.item.reader.read(chunk.start, raw.view(np.uint16).reshape(chunk.shape))


def _section(
    slot: Slot, chunk: _Placed, offset: int, length: int, release: Callable[[], None]
) -> Section:
    item = chunk.item
    kind, payload, residual = SectionKind.RAW, slot.upload.array(chunk.raw, chunk.nbytes), None
    if length < chunk.nbytes + RESIDUAL_ALIGNMENT:
        encoded, encoded_residual = _split(chunk, slot.download.array(offset, length))
        stored = encoded.size + (0 if encoded_residual is None else encoded_residual.size)
        if stored < chunk.nbytes:
            kind, payload, residual = SectionKind.ENCODED, encoded, encoded_residual
            if residual is not None:
                kind = SectionKind.ANCHOR
    total = container.checksum(payload)
    return Section(kind, item.tensor, item.chunk, payload, total, chunk.nbytes, release, residual)


def _split(
    chunk: _Placed, payload: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Anchor and residual; of a codec that is not progressive the payload and None."""
    codec = chunk.item.codec
    if not is_progressive(codec):
        return payload, None
    residual = payload[payload.size - codec.residual_nbytes(chunk.shape) :]
    return payload[: codec.anchor_nbytes(payload, chunk.shape, chunk.start)], residual


class _Countdown:
    """Counts calls from any thread."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()

    def is_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


def _release_last(slots: SlotPool, slot: Slot, sections: _Countdown) -> None:
    if sections.is_last():
        slots.give(slot)
