"""Binding of the codec ``gaac``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvz.codecs.base import U8, Chunk, Shape, WholeChunks
from kvz.formats.codecs import gaac as layout
from kvz.formats.codecs.gaac import GaacConfig, Geometry
from kvz.formats.codecs.spans import Span, clear_gaps
from kvz.formats.errors import InvalidField

# kernels are imported where they run: configuration and codebooks do without numba


def _parse_windows(text: str) -> tuple[int, ...]:
    """``3/4`` or ``2/3/4``; a final ``/raw`` is allowed."""
    sets = {"/".join(map(str, windows)): windows for windows in layout.WINDOW_SETS}
    windows = sets.get(text.removesuffix("/raw"))
    if windows is None:
        raise ValueError(f"windows must be {' or '.join(sets)}, got {text!r}")
    return windows


class GaacCodec(WholeChunks):
    """Group-adaptive exponent codes for BF16."""

    name = "gaac"
    needs_codebook = True
    OPTIONS: ClassVar[dict[str, Any]] = {"windows": _parse_windows, "axis": str}
    #: Up to this many tokens a codebook per channel can cost more than it saves: both kinds are
    #: tried. Beyond, it costs less than 1.4 % and saves more on every capture that was measured.
    SMALL_TENSOR_TOKENS = 160

    def __init__(self, config: GaacConfig | None = None) -> None:
        self.config = config or GaacConfig()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> GaacCodec:
        return cls(GaacConfig.from_dict(fields))

    @classmethod
    def from_options(cls, **options: Any) -> GaacCodec:
        return cls(GaacConfig(**options))

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        return dtype == "BF16" and token_axis is not None

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        from kvz.kernels.cpu import calibration

        counts = calibration.exponent_histogram(sample)
        per_channel = self._codebook(counts)
        if num_tokens > self.SMALL_TENSOR_TOKENS or not sample.size:
            return per_channel
        per_head = self._codebook(counts.sum(axis=1, keepdims=True, dtype=np.uint32))
        candidates = (per_head, per_channel)
        return min(candidates, key=lambda book: len(book) + self._encoded_nbytes(sample, book))

    def _codebook(self, counts: NDArray[np.uint32]) -> bytes:
        from kvz.kernels.cpu import calibration

        return layout.build_codebook(calibration.window_bases(counts), self.config)

    def _encoded_nbytes(self, sample: Chunk, codebook: bytes) -> int:
        bases = layout.parse_codebook(codebook, self.config, sample.shape[0], sample.shape[2])
        buffer = np.empty(self.buffer_nbytes(sample.shape, 2), np.uint8)
        return self.encode(sample, bases, buffer)

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> U8:
        return layout.parse_codebook(codebook, self.config, shape[0], shape[2])

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        from kvz.kernels.cpu import gaac as kernels

        return layout.max_payload_nbytes(shape, self.config) + kernels.STORE_SLACK

    def encode(self, chunk: Chunk, bases: U8, buffer: U8, start: int = 0) -> int:
        from kvz.kernels.cpu import gaac as kernels

        spans = layout.streams(chunk.shape, self.config, buffer.size)
        arrays = self._arrays(buffer, spans)
        num_escapes = kernels.encode(
            chunk,
            bases,
            narrow=self.config.narrow,
            channel_axis=self.config.channel_axis,
            block_tiles=Geometry.of(chunk.shape, self.config).block_tiles,
            **arrays,
        )
        clear_gaps(buffer, spans)
        return spans[-1].offset + num_escapes

    def decode(self, payload: U8, bases: U8, out: Chunk, start: int = 0) -> None:
        from kvz.kernels.cpu import gaac as kernels

        arrays = self._arrays(payload, layout.streams(out.shape, self.config, payload.size))
        status = kernels.decode(
            **arrays,
            bases=bases,
            out=out,
            narrow=self.config.narrow,
            channel_axis=self.config.channel_axis,
            block_tiles=Geometry.of(out.shape, self.config).block_tiles,
        )
        if status != kernels.DECODE_OK:
            raise InvalidField(f"gaac: {kernels.STATUS_TEXT[status]}")

    @staticmethod
    def _arrays(payload: U8, spans: Sequence[Span]) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {s.name: payload[s.offset : s.end] for s in spans}
        arrays["low"] = arrays["low"].view(np.uint16)
        arrays["offsets"] = arrays["offsets"].view(np.uint32)
        return arrays
