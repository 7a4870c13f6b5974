"""Binding of the codec ``pnmix`` for values."""

from __future__ import annotations

import numpy as np

from kvz.codecs.base import Chunk, ForAllSources, Shape
from kvz.codecs.pnmix_chunks import Arrays, PnmixChunks, Prepared
from kvz.formats.codecs import pnmix as layout
from kvz.formats.codecs.pnmix import Geometry, ValueConfig
from kvz.formats.codecs.spans import Span

# kernels are imported where they run: configuration and sizes do without numba


class PnmixValueCodec(PnmixChunks[ValueConfig], ForAllSources):
    """Uniform codes for each token and group of channels; lossy."""

    needs_codebook = False

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        return b""

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> Prepared:
        return Prepared(shape[1])

    def _fixed(self, geometry: Geometry, num_high: int) -> tuple[Span, ...]:
        return layout.value_streams(geometry, self.config)

    def _shape(self, arrays: Arrays, geometry: Geometry) -> None:
        outer, _, inner = geometry.shape
        groups = self.config.channel_groups(inner)
        scales = arrays["scales"].view(np.uint16)
        arrays["scales"] = scales.reshape(outer, geometry.coded, 2, groups)
        shape = (outer, geometry.octets, self.config.bits, inner)
        arrays["codes"] = arrays["codes"].reshape(shape)

    def _encode(self, chunk: Chunk, prepared: Prepared, arrays: Arrays) -> int:
        from kvz.kernels.cpu import pnmix_values as kernels

        config = self.config
        return kernels.encode_values(
            chunk,
            group_tokens=config.group_tokens,
            group_channels=config.group_channels,
            rule=config.levels,
            **arrays,
        )

    def _decode(self, arrays: Arrays, prepared: Prepared, out: Chunk) -> None:
        from kvz.kernels.cpu import pnmix_values as kernels

        config = self.config
        kernels.decode_values(
            **arrays,
            out=out,
            group_tokens=config.group_tokens,
            group_channels=config.group_channels,
        )
