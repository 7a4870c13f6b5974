"""Lynx on the device: what its launchers need, from a chunk's shape and place."""

from __future__ import annotations

import numpy as np
import torch

from kvz.codecs.base import U8, Shape
from kvz.formats.codecs import lynx as layout
from kvz.formats.codecs.lynx import Geometry, LynxConfig
from kvz.formats.codecs.spans import check_fits, place, residual_offset
from kvz.formats.errors import ConfigError
from kvz.gpu.bindings import ChunkMemory, Detail, Workspace, check_len
from kvz.kernels.gpu import lynx
from kvz.kernels.gpu.chunks import Batch, ChunkPlace
from kvz.kernels.gpu.lynx import Coding

_LAST_NBYTES_FIELD = 13


class LynxBinding:
    """Anchor, padding and residual are one payload."""

    last_nbytes_field = _LAST_NBYTES_FIELD

    def __init__(self, config: LynxConfig) -> None:
        """Raises ConfigError."""
        if config.group_tokens > lynx.MAX_GROUP_TOKENS:
            raise ConfigError(
                f"codec lynx: the GPU kernels take group_tokens up to {lynx.MAX_GROUP_TOKENS}, "
                f"not {config.group_tokens}; use device cpu"
            )
        self._config = config
        companding = config.companding
        self._tables = np.zeros(0, np.uint8)
        if companding is not None:
            thresholds = companding.thresholds()
            self._tables = lynx.tables(thresholds, config.table, config.anchor_table)

    def check_shape(self, shape: Shape) -> None:
        check_len(shape)

    def codebook(self, prepared: None) -> U8:
        """The tables of the companded code."""
        return self._tables

    def max_payload_nbytes(self, shape: Shape) -> int:
        return layout.max_payload_nbytes(shape, self._config)

    def fixed_nbytes(self, shape: Shape) -> int:
        return 0

    def place(self, memory: ChunkMemory) -> ChunkPlace:
        shape, config = memory.shape, self._config
        geometry = Geometry.of(shape, config, is_first=memory.start == 0)
        fixed = layout.fixed_streams(shape, config, is_first=memory.start == 0)
        (raw,) = place([("raw", 0)], fixed[-1].end)
        return ChunkPlace(
            data=memory.data,
            outer_stride=memory.outer_stride,
            tokens=shape[1],
            outer=shape[0],
            payload=memory.payload,
            codebook=memory.codebook,
            num_programs=lynx.num_programs(*geometry.shape, config.page_tokens),
            streams=[*(span.offset for span in fixed[1:]), raw.offset, geometry.exact],
            last_nbytes=memory.payload_nbytes,
        )

    def _coding(self, inner: int) -> Coding:
        config = self._config
        return Coding(
            inner=inner,
            page_tokens=config.page_tokens,
            group_tokens=config.group_tokens,
            by_token=config.by_token,
            companded=config.companding is not None,
        )

    def scratch_nbytes(self, batch: Batch, inner: int) -> int:
        return 0

    def encode(self, batch: Batch, work: Workspace, lengths: torch.Tensor, inner: int) -> None:
        lynx.encode(batch, work.sizes, work.totals, lengths, self._coding(inner))

    def check_payload(self, shape: Shape, payload_nbytes: int, detail: Detail) -> None:
        fixed = layout.fixed_streams(shape, self._config, is_first=False)
        if detail is not Detail.ANCHOR:
            size = layout.residual_nbytes(shape, self._config)
            fixed += place([("residual", size)], residual_offset(fixed[-1].end))
        check_fits(fixed, payload_nbytes)

    def decode(self, batch: Batch, status: torch.Tensor, inner: int, detail: Detail) -> None:
        lynx.decode(
            batch,
            status,
            self._coding(inner),
            has_residual=detail is not Detail.ANCHOR,
            full=detail is Detail.FULL,
        )
