"""PN-Mix on the device: what its launchers need, from a chunk's shape, place and mask."""

from __future__ import annotations

import numpy as np
import torch

from kvz.codecs.base import U8, Shape
from kvz.codecs.pnmix import PnmixCodec
from kvz.codecs.pnmix_chunks import Prepared
from kvz.codecs.pnmix_values import PnmixValueCodec
from kvz.formats.codecs import pnmix as layout
from kvz.formats.codecs.pnmix import Geometry, KeyConfig, ValueConfig
from kvz.formats.codecs.spans import Span, place
from kvz.formats.errors import ConfigError
from kvz.gpu.bindings import ChunkMemory, Detail, Workspace, check_len
from kvz.kernels.gpu import pnmix
from kvz.kernels.gpu.chunks import Batch, ChunkPlace
from kvz.kernels.gpu.pnmix import Coding

_LAST_NBYTES_FIELD = 15
#: Elements of a group of values that one program holds.
_MAX_GROUP_ELEMENTS = 1 << 17


class PnmixBinding:
    """Keys with their mask, or values."""

    last_nbytes_field = _LAST_NBYTES_FIELD

    def __init__(self, config: KeyConfig | ValueConfig) -> None:
        self._config = config
        self._codec = (
            PnmixCodec(config) if isinstance(config, KeyConfig) else PnmixValueCodec(config)
        )

    def check_shape(self, shape: Shape) -> None:
        check_len(shape)
        config = self._config
        if not isinstance(config, ValueConfig):
            return
        channels = min(config.group_channels, shape[2])
        if channels * config.group_tokens > _MAX_GROUP_ELEMENTS:
            raise ConfigError(
                f"codec pnmix: the GPU kernels take groups of up to {_MAX_GROUP_ELEMENTS} values, "
                f"not {config.group_tokens} tokens of {channels} channels; use device cpu"
            )

    def codebook(self, prepared: Prepared) -> U8:
        """Where the high bits of salient channels are."""
        if prepared.salient is None:
            return np.zeros(0, np.uint8)
        return pnmix.table(prepared.salient)

    def max_payload_nbytes(self, shape: Shape) -> int:
        return self._codec.buffer_nbytes(shape, 2)

    def fixed_nbytes(self, shape: Shape) -> int:
        return 0

    def place(self, memory: ChunkMemory) -> ChunkPlace:
        shape, prepared = memory.shape, memory.prepared
        geometry = Geometry.of(shape, self._config, memory.start, prepared.num_tokens)
        exact = geometry.first + geometry.last
        return ChunkPlace(
            data=memory.data,
            outer_stride=memory.outer_stride,
            tokens=shape[1],
            outer=shape[0],
            payload=memory.payload,
            codebook=memory.codebook,
            num_programs=self._coding(shape[2]).num_programs(shape[0], geometry.groups, exact),
            streams=[*self._streams(geometry, prepared), geometry.first, geometry.coded],
            last_nbytes=memory.payload_nbytes,
        )

    def _streams(self, geometry: Geometry, prepared: Prepared) -> list[int]:
        """Offsets of flags, pages, scales, low and high planes, raw; values lack two of these."""
        config = self._config
        spans: tuple[Span, ...]
        if isinstance(config, KeyConfig):
            spans = layout.key_streams(geometry, config, prepared.num_high)
            _, flags, pages, scales, low, high = (span.offset for span in spans)
        else:
            spans = layout.value_streams(geometry, config)
            _, flags, scales, low = (span.offset for span in spans)
            pages, high = scales, low
        (raw,) = place([("raw", 0)], spans[-1].end)
        return [flags, pages, scales, low, high, raw.offset]

    def _coding(self, inner: int) -> Coding:
        config = self._config
        if isinstance(config, KeyConfig):
            low_bits, high_bits = config.low_bits, config.high_bits
            page_groups, group_channels = config.page_groups, None
        else:
            low_bits = high_bits = config.bits
            page_groups, group_channels = None, config.group_channels
        return Coding(
            inner=inner,
            low_bits=low_bits,
            high_bits=high_bits,
            group_tokens=config.group_tokens,
            page_groups=page_groups,
            group_channels=group_channels,
            rule=config.levels,
        )

    def scratch_nbytes(self, batch: Batch, inner: int) -> int:
        return pnmix.scratch_nbytes(batch, self._coding(inner))

    def encode(self, batch: Batch, work: Workspace, lengths: torch.Tensor, inner: int) -> None:
        pnmix.encode(batch, *work, lengths, self._coding(inner))

    def check_payload(self, shape: Shape, payload_nbytes: int, detail: Detail) -> None:
        """The kernels compare the length with what the chunk's place in its tensor requires."""

    def decode(self, batch: Batch, status: torch.Tensor, inner: int, detail: Detail) -> None:
        pnmix.decode(batch, status, self._coding(inner))
