"""Restore the tensors of an archive to a safetensors file, whole or in part."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvz.anchor_view import check_progressive
from kvz.archive import Archive, token_range
from kvz.archive_stream import ArchiveStream
from kvz.chunk_decoding import decode_chunks, gpu_decoder
from kvz.compressing import Progress
from kvz.devices import DEFAULT_DEVICE
from kvz.files import STANDARD_STREAM, OutputFile, atomic_output, naming, same_file
from kvz.formats.errors import ConfigError
from kvz.formats.head import Head, TensorEntry
from kvz.formats.safetensors import build_header
from kvz.layout import SELECTION_KEY, is_key_or_value, layer_index
from kvz.locations import shown_name
from kvz.lossy import lossy_note, with_lossy_note
from kvz.sections import EncodedChunk
from kvz.workers import thread_count


@dataclass(frozen=True, slots=True)
class DecompressReport:
    """What :func:`decompress` did. Sizes in bytes; ``read_nbytes`` of the archive.

    ``lossy``: by which codec the values differ from the captured ones; empty when they do not.

    ``stages``: with a GPU, the seconds that each stage was busy (:mod:`kvz.gpu.stages`).
    """

    source: str
    destination: str
    num_tensors: int
    num_skipped: int
    restored_nbytes: int
    read_nbytes: int
    seconds: float
    device: str = "cpu"
    stages: dict[str, float] | None = None
    lossy: str = ""

    @property
    def gb_per_s(self) -> float:
        return self.restored_nbytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor to restore: which of its tokens, and where they go in the output."""

    index: int
    entry: TensorEntry
    start: int
    stop: int
    offset: int

    @property
    def chunks(self) -> range:
        if self.stop == self.start or self.entry.num_elements == 0:
            return range(0)
        step = self.entry.chunk_tokens
        return range(self.start // step, -(-self.stop // step))

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.entry.shape)
        if self.entry.token_axis is not None:
            shape[self.entry.token_axis] = self.stop - self.start
        return tuple(shape)


class _Output(Protocol):
    """Takes decoded chunks: ``put`` on any thread, then ``note`` for each in order on one."""

    def put(self, target: _Target, begin: int, decoded: NDArray[Any]) -> None: ...

    def note(self, target: _Target) -> None: ...


class _FileOutput:
    """A seekable file: every thread writes its own chunk where it belongs."""

    def __init__(self, stream: OutputFile) -> None:
        self._stream = stream

    def put(self, target: _Target, begin: int, decoded: NDArray[Any]) -> None:
        low, high = _overlap(target, begin, decoded.shape[1])
        tokens = target.stop - target.start
        token_nbytes = decoded.shape[2] * decoded.itemsize
        for o in range(decoded.shape[0]):
            run = decoded[o, low - begin : high - begin].reshape(-1).view(np.uint8)
            position = target.offset + (o * tokens + low - target.start) * token_nbytes
            self._stream.write_at(run, position)

    def note(self, target: _Target) -> None:
        pass


class _StreamOutput:
    """A pipe or an object: a tensor is put together in memory, and written after all before it.

    Chunks of a tensor need not come in order: of a progressive archive, those that are stored as
    they are come before those that wait for their residuals.
    """

    def __init__(self, stream: OutputFile, targets: Sequence[_Target]) -> None:
        self._stream = stream
        self._tensors: dict[int, NDArray[Any]] = {}
        self._order = deque(target.index for target in targets if target.chunks)
        self._missing = {target.index: len(target.chunks) for target in targets}

    def put(self, target: _Target, begin: int, decoded: NDArray[Any]) -> None:
        outer, _, inner = decoded.shape
        shape = (outer, target.stop - target.start, inner)
        # setdefault is atomic; a thread that loses the race throws its empty array away
        tensor = self._tensors.setdefault(target.index, np.empty(shape, decoded.dtype))
        low, high = _overlap(target, begin, decoded.shape[1])
        tensor[:, low - target.start : high - target.start] = decoded[:, low - begin : high - begin]

    def note(self, target: _Target) -> None:
        self._missing[target.index] -= 1
        while self._order and not self._missing[self._order[0]]:
            tensor = self._tensors.pop(self._order.popleft())
            self._stream.write(tensor.reshape(-1).view(np.uint8))


def _overlap(target: _Target, begin: int, length: int) -> tuple[int, int]:
    return max(begin, target.start), min(begin + length, target.stop)


def _select(head: Head, layers: Collection[int] | None, tokens: slice | None) -> list[_Target]:
    """Targets with their ranges; ``offset`` is filled in once the output's header is known."""
    if layers is None and tokens is None:
        chosen = list(enumerate(head.tensors))
    else:
        numbers = {i: layer_index(t.name) for i, t in enumerate(head.tensors)}
        cached = [i for i, t in enumerate(head.tensors) if is_key_or_value(t.name)]
        missing = sorted(set(layers or ()) - {numbers[i] for i in cached})
        if missing:
            held = sorted({n for i in cached if (n := numbers[i]) is not None})
            those = (
                f"it holds layers {held[0]} to {held[-1]}" if held else "its names give no layers"
            )
            raise ConfigError(f"no key or value of layer {missing[0]} in the archive: {those}")
        if not cached:
            raise ConfigError("the archive holds no key or value tensors to select from")
        kept = [i for i in cached if layers is None or numbers[i] in layers]
        chosen = [(i, head.tensors[i]) for i in kept]
    targets = []
    for index, entry in chosen:
        start, stop = token_range(tokens, entry)
        targets.append(_Target(index, entry, start, stop, 0))
    return targets


def _header(
    head: Head, targets: list[_Target], selection: str, *, anchor_only: bool
) -> tuple[bytes, list[_Target]]:
    metadata = dict(with_lossy_note(head, anchor_only=anchor_only))
    if selection:
        metadata[SELECTION_KEY] = selection
    listing = [(t.entry.name, t.entry.dtype, t.shape) for t in targets]
    prefix, header = build_header(listing, metadata)
    placed = [
        replace(t, offset=stored.offset) for t, stored in zip(targets, header.tensors, strict=True)
    ]
    return prefix, placed


class _Restorer:
    """Hands decoded chunks to the output."""

    def __init__(self, targets: list[_Target], output: _Output) -> None:
        self._targets = {target.index: target for target in targets}
        self._output = output

    def wants(self, tensor: int, chunk: int) -> bool:
        target = self._targets.get(tensor)
        return target is not None and chunk in target.chunks

    def put(self, encoded: EncodedChunk, decoded: NDArray[Any]) -> tuple[int, _Target]:
        """Returns the raw bytes, and the chunk's target."""
        target = self._targets[encoded.tensor]
        self._output.put(target, target.entry.chunk_range(encoded.chunk)[0], decoded)
        return decoded.nbytes, target


def decompress(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    layers: Collection[int] | None = None,
    tokens: slice | None = None,
    anchor_only: bool = False,
    device: str = DEFAULT_DEVICE,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DecompressReport:
    """Restore an archive (path, URL, or ``-`` for standard input) to a safetensors file.

    With ``layers`` or ``tokens`` (a range with step 1 over the stored tokens) only the key and
    value tensors of these layers and tokens are read and written, and the metadata of the result
    says so. ``anchor_only``: of a progressive archive, restore the anchors and leave the residuals
    unread. What went through a lossy codec says so in the metadata (``kvz.lossy``). ``device``:
    ``cuda`` or ``cuda:N`` decodes on a GPU; ``auto`` and ``cpu`` do not. The file appears when
    everything was decoded and every checksum held.

    Raises what :class:`kvz.archive.Archive` raises, and ConfigError for a selection out of range,
    anchors that the archive does not have, or a device that cannot be used.
    """
    start = time.perf_counter()
    if same_file(source, destination):
        raise ConfigError(f"{shown_name(destination)}: input and output are the same file")
    piped = os.fspath(source) == STANDARD_STREAM
    name = "<stdin>" if piped else shown_name(source)
    with naming(name):
        archive = (
            ArchiveStream(sys.stdin.buffer) if piped else Archive(source, anchor_only=anchor_only)
        )
        targets = _select(archive.head, layers, tokens)
        if anchor_only:
            check_progressive(archive.head)
    gpu = gpu_decoder(device, archive.head)
    selection = _describe(layers, tokens)
    prefix, targets = _header(archive.head, targets, selection, anchor_only=anchor_only)
    expected = len(prefix) + sum(math.prod(t.shape) * t.entry.itemsize for t in targets)
    made = atomic_output(destination, overwrite=overwrite, expected_nbytes=expected)
    opened = closing(archive) if isinstance(archive, Archive) else nullcontext()
    with opened, made as stream, naming(name):
        stream.write(prefix)
        stream.flush()
        in_place = stream.can_write_at
        output: _Output = _FileOutput(stream) if in_place else _StreamOutput(stream, targets)
        restorer = _Restorer(targets, output)
        done = decode_chunks(
            archive.chunks(restorer.wants, anchor_only=anchor_only),
            archive.head,
            restorer.put,
            threads=thread_count(threads),
            gpu=gpu,
        )
        restored = 0
        for nbytes, target in done:
            restored += nbytes
            output.note(target)
            if progress is not None:
                progress(nbytes)
    return DecompressReport(
        source=name,
        destination=shown_name(destination),
        num_tensors=len(targets),
        num_skipped=len(archive.head.tensors) - len(targets),
        restored_nbytes=restored,
        read_nbytes=archive.nbytes_read,
        seconds=time.perf_counter() - start,
        device="cpu" if gpu is None else gpu.name,
        stages=None if gpu is None else gpu.stages.seconds(),
        lossy=lossy_note(archive.head, anchor_only=anchor_only),
    )


def _describe(layers: Collection[int] | None, tokens: slice | None) -> str:
    """The selection as it stands in the metadata of a partial file; empty for everything."""
    parts = []
    if layers is not None:
        parts.append("layers " + ",".join(str(layer) for layer in sorted(layers)))
    if tokens is not None:
        low, high = (("" if v is None else v) for v in (tokens.start, tokens.stop))
        parts.append(f"tokens {low}:{high}")
    return " ".join(parts)
