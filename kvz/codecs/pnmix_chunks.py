"""What the codecs of keys and of values in PN-Mix have in common: how a chunk becomes streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvz.codecs.base import U8, Chunk, Shape
from kvz.formats.codecs import pnmix as layout
from kvz.formats.codecs.pnmix import Geometry, KeyConfig, Mask, ValueConfig
from kvz.formats.codecs.spans import STREAM_ALIGNMENT, Span, clear_gaps, place

C = TypeVar("C", bound=KeyConfig | ValueConfig)
Arrays = dict[str, NDArray[Any]]
_NUM_STREAMS = 7


class Prepared(NamedTuple):
    """Of one tensor: its tokens, and of keys the channels of salient pairs, bool[outer, inner]."""

    num_tokens: int
    salient: Mask | None = None

    @property
    def num_high(self) -> int:
        return 0 if self.salient is None else int(self.salient.sum())


class PnmixChunks(Generic[C]):
    """Chunks are exact tokens, coded groups of tokens, and exact tokens again."""

    name = "pnmix"
    is_progressive = False

    def __init__(self, config: C) -> None:
        self.config: C = config

    @property
    def chunk_step(self) -> int:
        return layout.chunk_step(self.config)

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        return dtype == "BF16" and token_axis is not None

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        outer, tokens, inner = shape
        # wherever the chunk lies, its streams are no longer than if all of it were coded
        geometry = Geometry.of(shape, self.config, layout.MAX_SINK_TOKENS, tokens << 32)
        largest = self._fixed(geometry, outer * inner)[-1].end
        return largest + 2 * outer * tokens * inner + _NUM_STREAMS * STREAM_ALIGNMENT

    def encode(self, chunk: Chunk, prepared: Prepared, buffer: U8, start: int) -> int:
        """Encode ``chunk``, whose first token is token ``start`` of its tensor."""
        geometry = Geometry.of(chunk.shape, self.config, start, prepared.num_tokens)
        fixed = self._fixed(geometry, prepared.num_high)
        arrays = self._arrays(buffer, fixed, geometry)
        first, coded = geometry.first, geometry.coded
        exact = arrays.pop("exact")
        exact[:, :first] = chunk[:, :first]
        exact[:, first:] = chunk[:, first + coded :]
        num_raw = 0
        if coded:
            (raw,) = place([("raw", 2 * chunk[:, :coded].size)], fixed[-1].end)
            arrays["raw"] = buffer[raw.offset : raw.end].view(np.uint16)
            num_raw = self._encode(chunk[:, first : first + coded], prepared, arrays)
        (raw,) = place([("raw", 2 * num_raw)], fixed[-1].end)
        clear_gaps(buffer, [*fixed, raw])
        return raw.end

    def decode(self, payload: U8, prepared: Prepared, out: Chunk, start: int) -> None:
        """Raises InvalidField."""
        geometry = Geometry.of(out.shape, self.config, start, prepared.num_tokens)
        fixed = self._fixed(geometry, prepared.num_high)
        spans = layout.with_raw(payload, fixed, geometry, self.config)
        arrays = self._arrays(payload, spans, geometry)
        first, coded = geometry.first, geometry.coded
        exact = arrays.pop("exact")
        out[:, :first] = exact[:, :first]
        out[:, first + coded :] = exact[:, first:]
        if coded:
            self._decode(arrays, prepared, out[:, first : first + coded])

    def _arrays(self, payload: U8, spans: Sequence[Span], geometry: Geometry) -> Arrays:
        """The streams in their types and shapes."""
        outer, _, inner = geometry.shape
        arrays: Arrays = {span.name: payload[span.offset : span.end] for span in spans}
        exact = arrays["exact"].view(np.uint16)
        arrays["exact"] = exact.reshape(outer, geometry.first + geometry.last, inner)
        arrays["flags"] = arrays["flags"].reshape(outer, geometry.groups)
        if "raw" in arrays:
            arrays["raw"] = arrays["raw"].view(np.uint16)
        self._shape(arrays, geometry)
        return arrays

    def _fixed(self, geometry: Geometry, num_high: int) -> tuple[Span, ...]:
        """The streams whose sizes are known before decoding."""
        raise NotImplementedError

    def _shape(self, arrays: Arrays, geometry: Geometry) -> None:
        """Give the streams of this codec their types and shapes."""
        raise NotImplementedError

    def _encode(self, chunk: Chunk, prepared: Prepared, arrays: Arrays) -> int:
        """Encode tokens none of which is exact; returns how many elements are raw."""
        raise NotImplementedError

    def _decode(self, arrays: Arrays, prepared: Prepared, out: Chunk) -> None:
        raise NotImplementedError
