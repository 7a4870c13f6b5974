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

from kvz.formats import container
from kvz.formats.head import Head
from kvz.formats.ids import SectionKind
from kvz.gpu.bindings import ChunkMemory, Workspace, make_batch, require_binding
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

    @property
    def nbytes(self) -> int:
        return _ITEMSIZE * math.prod(self.shape)


class GpuEncoder:
    """Encodes the tensors that the archive's codec takes; the others go through the CPU."""

    def __init__(self, device: str, head: Head) -> None:
        """Raises ConfigError: no such device, or a codec or shape without GPU kernels."""
        self._device = open_device(device)
        codec = head.codecs[0]
        self._binding = require_binding(codec.name, codec.config)
        for entry in head.tensors:
            if entry.codec == 0 and entry.num_chunks:
                self._binding.check_shape(entry.chunk_shape(0))
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
            if item.entry.codec == 0:
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
            shape = item.entry.chunk_shape(item.chunk)
            raw = sources.take(_ITEMSIZE * math.prod(shape))
            if item.tensor not in codebooks:
                codebooks[item.tensor] = sources.take(prepared.size)
            capacity = self._binding.max_payload_nbytes(shape)
            payload = results.take(capacity)
            codebook = codebooks[item.tensor]
            placed.append(_Placed(item, shape, raw, codebook, payload, capacity, prepared))
        slot.upload.reserve(sources.nbytes)
        slot.sources.reserve(sources.nbytes)
        slot.results.reserve(results.nbytes)
        for chunk in placed:
            book = slot.upload.array(chunk.codebook, chunk.prepared.size)
            np.copyto(book, chunk.prepared.reshape(-1))
        return placed

    def _encode(self, slot: Slot, placed: list[_Placed]) -> list[int]:
        """Payloads in the slot's results; returns their lengths."""
        device = slot.device
        start, sent, begun, encoded = (device.marker() for _ in range(4))
        groups: dict[int, list[int]] = {}
        for i, chunk in enumerate(placed):
            groups.setdefault(chunk.shape[2], []).append(i)
        lengths = torch.empty(len(placed), dtype=torch.int64, device=device.torch_device)
        launches = [
            (inner, self._tables(slot, [placed[i] for i in rows]), rows)
            for inner, rows in groups.items()
        ]
        start.record()
        slot.send(max(placed[-1].raw + placed[-1].nbytes, _codebook_end(placed)))
        sent.record()
        with device.launching:
            begun.record()
            # encoders do not touch the gaps between streams
            slot.results.part(0, placed[-1].payload + placed[-1].capacity).zero_()
            position = 0
            for inner, (tables, work), rows in launches:
                part = lengths[position : position + len(rows)]
                self._binding.encode(tables, work, part, inner)
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
            )
            for chunk in placed
        ]
        device = slot.device.torch_device
        tables = make_batch(self._binding, memories, device)
        nbytes = self._binding.scratch_nbytes(tables, placed[0].shape[2])
        return tables, Workspace.empty(tables, nbytes, device)

    def _fetch(self, slot: Slot, placed: list[_Placed], lengths: list[int]) -> list[int]:
        """Copy the payloads to the host; returns where they lie in the slot's download."""
        places = Places()
        moves, offsets = [], []
        for chunk, length in zip(placed, lengths, strict=True):
            offsets.append(places.nbytes)
            if length < chunk.nbytes:
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
    return max(chunk.codebook + int(chunk.prepared.size) for chunk in placed)


def _read(slot: Slot, chunk: _Placed) -> None:
    raw = slot.upload.array(chunk.raw, chunk.nbytes)
    start, _ = chunk.item.entry.chunk_range(chunk.item.chunk)
    chunk.item.reader.read(start, raw.view(np.uint16).reshape(chunk.shape))


def _section(
    slot: Slot, chunk: _Placed, offset: int, length: int, release: Callable[[], None]
) -> Section:
    kind, payload = SectionKind.ENCODED, slot.download.array(offset, length)
    if length >= chunk.nbytes:
        kind, payload = SectionKind.RAW, slot.upload.array(chunk.raw, chunk.nbytes)
    item = chunk.item
    total = container.checksum(payload)
    return Section(kind, item.tensor, item.chunk, payload, total, chunk.nbytes, release)


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
