"""Binding of the codec ``splitzip``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvz.codecs.base import U8, Chunk, Shape, WholeChunks
from kvz.formats.codecs import splitzip as layout
from kvz.formats.codecs.spans import clear_gaps
from kvz.formats.codecs.splitzip import SplitzipConfig
from kvz.formats.errors import InvalidField

# kernels are imported where they run: configuration and codebooks do without numba


class SplitzipCodec(WholeChunks):
    """Top-16 exponent codebook for BF16 (arXiv 2605.01708)."""

    name = "splitzip"
    needs_codebook = True
    OPTIONS: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: SplitzipConfig | None = None) -> None:
        self.config = config or SplitzipConfig()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SplitzipCodec:
        return cls(SplitzipConfig.from_dict(fields))

    @classmethod
    def from_options(cls) -> SplitzipCodec:
        return cls()

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        return dtype == "BF16"

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        from kvz.kernels.cpu import calibration

        counts = calibration.exponent_histogram(sample).sum(axis=(0, 1), dtype=np.int64)
        return calibration.frequent_exponents(counts, layout.CODEBOOK_SIZE).tobytes()

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> U8:
        return layout.parse_codebook(codebook)

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        return layout.max_payload_nbytes(int(np.prod(shape)))

    def encode(self, chunk: Chunk, codebook: U8, buffer: U8, start: int = 0) -> int:
        from kvz.kernels.cpu import splitzip as kernels

        # escapes go where they lie if every element is one, then move up to their real place
        positions, exponents = (
            buffer[span.offset : span.end] for span in layout.escape_streams(chunk.size, chunk.size)
        )
        fixed = layout.fixed_streams(chunk.size)
        sign_mantissa, codes, offsets = (buffer[span.offset : span.end] for span in fixed)
        num_escapes = kernels.encode(
            chunk,
            codebook,
            block_len=layout.BLOCK_LEN,
            sign_mantissa=sign_mantissa,
            codes=codes,
            offsets=offsets.view(np.uint32),
            positions=positions.view(np.uint16),
            exponents=exponents,
        )
        final = layout.escape_streams(chunk.size, num_escapes)
        buffer[final[1].offset : final[1].end] = exponents[:num_escapes].copy()
        clear_gaps(buffer, [*fixed, *final])
        return final[-1].end

    def decode(self, payload: U8, codebook: U8, out: Chunk, start: int = 0) -> None:
        from kvz.kernels.cpu import splitzip as kernels

        num_escapes = layout.read_num_escapes(payload, out.size)
        spans = layout.streams(out.size, num_escapes, payload.size)
        streams: list[NDArray[Any]] = [payload[span.offset : span.end] for span in spans]
        sign_mantissa, codes, offsets, positions, exponents = streams
        status = kernels.decode(
            sign_mantissa,
            codes,
            offsets.view(np.uint32),
            positions.view(np.uint16),
            exponents,
            codebook,
            out,
            block_len=layout.BLOCK_LEN,
        )
        if status != kernels.DECODE_OK:
            raise InvalidField(f"splitzip: {kernels.STATUS_TEXT[status]}")
