"""The data of a benchmark: cache tensors in memory, their chunks, and buffers for the results."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.capture_metadata import METADATA_KEY
from kvz.codecs.base import Codec
from kvz.codecs.raw import RawCodec
from kvz.formats.errors import ConfigError
from kvz.formats.head import TensorEntry
from kvz.layout import Layout
from kvz.planning import fallback_codec, plan
from kvz.safetensors_io import SafetensorsFile

#: The only dtype whose speed is measured: the one that the fast codecs take.
TIMED_DTYPE = "BF16"
_SLOT_ALIGNMENT = 64

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class ShapeGroup:
    """``count`` tensors of one shape; ``num_heads`` counts batch and heads together."""

    count: int
    shape: tuple[int, ...]
    num_tokens: int
    num_heads: int
    head_dim: int


def group_shapes(entries: Sequence[TensorEntry]) -> list[ShapeGroup]:
    """The shapes of tensors, the most frequent first."""
    views = {entry.shape: entry.view_shape for entry in entries}
    counts = Counter(entry.shape for entry in entries)
    groups = []
    for shape, count in counts.most_common():
        outer, tokens, inner = views[shape]
        groups.append(ShapeGroup(count, shape, tokens, outer, inner))
    return groups


def origin_of(metadata: Mapping[str, str]) -> str | None:
    """What a capture says of where it comes from; captures of other programs say nothing."""
    try:
        origin = json.loads(metadata[METADATA_KEY])["origin"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return origin if isinstance(origin, str) else None


class WorkChunk(NamedTuple):
    """One chunk: views of input and output uint16[outer, n, inner], and room for its section.

    ``start``: its first token.
    """

    tensor: int
    start: int
    source: U16
    target: U16
    slot: U8


def timed_entries(
    source: SafetensorsFile, layout: Layout, limit_nbytes: int
) -> tuple[list[TensorEntry], int]:
    """The tensors to time, whole and in file order up to ``limit_nbytes`` (at least one).

    Also returns the bytes of all that could be timed. Raises ConfigError when none can.
    """
    entries = [
        entry
        for entry in plan(source, RawCodec(), layout).head.tensors
        if entry.dtype == TIMED_DTYPE and entry.token_axis is not None and entry.num_elements
    ]
    if not entries:
        raise ConfigError(
            f"{source.name}: nothing to time: no {TIMED_DTYPE} tensor with a known token axis"
        )
    totals = np.cumsum([entry.nbytes for entry in entries])
    kept = max(1, int(np.searchsorted(totals, limit_nbytes, side="right")))
    return entries[:kept], int(totals[-1])


class Workload:
    """Tensors in their own layout, outputs of the same shapes, and one slot per chunk.

    All contestants share ``outputs`` and slots, one after the other.
    """

    def __init__(
        self, source: SafetensorsFile, entries: Sequence[TensorEntry], codecs: Sequence[Codec]
    ) -> None:
        self.name = source.name
        self.entries = list(entries)
        self._source = source
        self.tensors: list[U16] = [
            source.read_tensor(entry.name).reshape(entry.view_shape) for entry in entries
        ]
        self.outputs: list[U16] = [np.empty_like(tensor) for tensor in self.tensors]
        self.chunks = self._chunks(codecs)

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes: what every speed is counted in."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def codecs(self, codec: Codec) -> list[Codec]:
        """The codec of each tensor where ``codec`` stores the capture."""
        bound = codec.for_source(self._source)
        chosen = (
            bound.for_tensor(entry.name, entry.dtype, entry.view_shape, entry.token_axis)
            for entry in self.entries
        )
        return [own or fallback_codec() for own in chosen]

    def _chunks(self, codecs: Sequence[Codec]) -> list[WorkChunk]:
        numbers = [(t, c) for t, e in enumerate(self.entries) for c in range(e.num_chunks)]
        by_tensor = list(zip(*(self.codecs(codec) for codec in codecs), strict=True))
        sizes = [
            _slot_nbytes(self.entries[t].chunk_shape(c), by_tensor[t] if codecs else ())
            for t, c in numbers
        ]
        ends = np.cumsum(sizes)
        # one allocation, so that large pages back it; only what is written becomes resident
        arena = np.empty(int(ends[-1]) + _SLOT_ALIGNMENT, np.uint8)
        first = -arena.ctypes.data % _SLOT_ALIGNMENT
        chunks = []
        for (tensor, chunk), end, size in zip(numbers, ends.tolist(), sizes, strict=True):
            start, stop = self.entries[tensor].chunk_range(chunk)
            slot = arena[first + end - size : first + end]
            source, target = self.tensors[tensor], self.outputs[tensor]
            chunks.append(
                WorkChunk(tensor, start, source[:, start:stop], target[:, start:stop], slot)
            )
        return chunks

    def shapes(self) -> list[ShapeGroup]:
        """The shapes of the timed tensors, the most frequent first."""
        return group_shapes(self.entries)

    def poison_outputs(self) -> None:
        """Make every output element wrong: an element that a decoder forgets cannot pass."""
        for tensor, output in zip(self.tensors, self.outputs, strict=True):
            np.invert(tensor, out=output)

    def first_difference(self) -> str | None:
        """Where the outputs differ from the tensors first, or None when they are equal."""
        for entry, tensor, output in zip(self.entries, self.tensors, self.outputs, strict=True):
            if not np.array_equal(tensor, output):
                position = int(np.flatnonzero(tensor.reshape(-1) != output.reshape(-1))[0])
                index = [int(i) for i in np.unravel_index(position, entry.shape)]
                got, expected = int(output.flat[position]), int(tensor.flat[position])
                return f"{entry.name} {index}: {got:#06x} instead of {expected:#06x}"
        return None

    def output_digest(self) -> int:
        """CRC-32 of all outputs."""
        digest = 0
        for output in self.outputs:
            digest = zlib.crc32(output.reshape(-1).view(np.uint8), digest)
        return digest

    def relative_error(self) -> float:
        """Squared error of an output as a part of its tensor's squares: that of the worst."""
        pairs = zip(self.tensors, self.outputs, strict=True)
        return max(_relative_error(tensor, output) for tensor, output in pairs)


def _relative_error(tensor: U16, output: U16) -> float:
    exact, found = (_to_float(values) for values in (tensor, output))
    changed = tensor != output
    error = float(np.square(found[changed] - exact[changed]).sum())
    total = float(np.square(exact[np.isfinite(exact)]).sum())
    # a NaN that came out is infinitely wrong
    return float("inf") if np.isnan(error) else error / total if total else error


def _to_float(values: U16) -> NDArray[np.float64]:
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _slot_nbytes(shape: tuple[int, int, int], codecs: Sequence[Codec]) -> int:
    """Room for the section of a chunk whichever codec encodes it, or its bytes as they are."""
    nbytes = 2 * math.prod(shape)
    largest = max([nbytes, *(codec.buffer_nbytes(shape, 2) for codec in codecs)])
    return -(-largest // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
