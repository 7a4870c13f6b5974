"""Codecs on the device: what their launchers need, from a chunk's shape and codebook.

The counterpart of :mod:`kvz.codecs` for chunks in device memory. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from kvz.codecs.base import U8, Shape
from kvz.formats.codecs import gaac as gaac_layout
from kvz.formats.codecs import pnmix as pnmix_layout
from kvz.formats.codecs import splitzip as splitzip_layout
from kvz.formats.codecs.gaac import GaacConfig, Geometry
from kvz.formats.codecs.lynx import LynxConfig
from kvz.formats.codecs.spans import check_fits
from kvz.formats.codecs.splitzip import SplitzipConfig
from kvz.formats.errors import ConfigError
from kvz.formats.head import Head
from kvz.kernels.gpu import gaac, splitzip
from kvz.kernels.gpu.chunks import Batch, ChunkPlace
from kvz.kernels.gpu.payload_ends import payload_ends

#: GAAC's kernels hold all channels of a tile in one program.
MAX_GAAC_INNER = 1023
#: A chunk's elements are counted in 32 bits.
MAX_CHUNK_ELEMENTS = (1 << 31) - 1
_FIRST_STREAM_FIELD = 7


class Detail(Enum):
    """What a payload is, and what of it is decoded. Codecs without anchors know but ``FULL``."""

    #: All of it; of a progressive codec anchor, padding and residual.
    FULL = "full"
    #: Of anchor, padding and residual the anchor; the residual need not be there yet.
    DRAFT = "draft"
    #: An anchor alone.
    ANCHOR = "anchor"


class ChunkMemory(NamedTuple):
    """Addresses of a chunk ``[outer, tokens, inner]`` in device memory.

    ``outer_stride``: elements from one outer index to the next. ``codebook``: of what
    :meth:`DeviceBinding.codebook` gave for ``prepared``. ``payload_nbytes`` is read by decoders
    only. ``start``: the chunk's first token.
    """

    shape: Shape
    data: int
    outer_stride: int
    payload: int
    codebook: int
    payload_nbytes: int = 0
    start: int = 0
    prepared: Any = None


class Workspace(NamedTuple):
    """What encoding needs besides its in- and outputs.

    ``scratch`` uint8[scratch_nbytes], ``sizes`` int32[programs], ``totals`` int32[chunks].
    """

    scratch: torch.Tensor
    sizes: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def empty(cls, batch: Batch, scratch_nbytes: int, device: torch.device) -> Workspace:
        return cls(
            torch.empty(scratch_nbytes, dtype=torch.uint8, device=device),
            torch.empty(batch.total_programs, dtype=torch.int32, device=device),
            torch.empty(batch.chunks.shape[0], dtype=torch.int32, device=device),
        )


class DeviceBinding(Protocol):
    """One codec configuration. All chunks of a launch have the same ``inner`` size."""

    @property
    def last_nbytes_field(self) -> int:
        """Column of a chunk's row in which decoders find a length that is not fixed."""
        ...

    def check_shape(self, shape: Shape) -> None:
        """Raises ConfigError for chunks that the kernels cannot take."""
        ...

    def codebook(self, prepared: Any) -> U8:
        """What the kernels need of a prepared codebook."""
        ...

    def max_payload_nbytes(self, shape: Shape) -> int: ...

    def fixed_nbytes(self, shape: Shape) -> int:
        """Bytes before what ``last_nbytes_field`` counts."""
        ...

    def place(self, memory: ChunkMemory) -> ChunkPlace: ...

    def scratch_nbytes(self, batch: Batch, inner: int) -> int: ...

    def encode(self, batch: Batch, work: Workspace, lengths: torch.Tensor, group: Any) -> None:
        """Payloads, and their lengths to int64[chunks]. Gaps between streams are not touched."""
        ...

    def check_payload(self, shape: Shape, payload_nbytes: int, detail: Detail) -> None:
        """Raises InvalidField when a payload is shorter than its shape requires."""
        ...

    def decode(self, batch: Batch, status: torch.Tensor, inner: int, detail: Detail) -> None:
        """``status`` int32[chunks], zero before, becomes 1 where a payload contradicts itself."""
        ...


class GaacBinding:
    """Groups along tokens."""

    #: Streams before it: low, plane2, tags, offsets, escapes.
    last_nbytes_field = _FIRST_STREAM_FIELD + 5

    def __init__(self, config: GaacConfig) -> None:
        if config.channel_axis:
            raise ConfigError("codec gaac with axis=channel has no GPU kernels; use device cpu")
        self._config = config

    def check_shape(self, shape: Shape) -> None:
        check_len(shape)
        if shape[2] > MAX_GAAC_INNER:
            raise ConfigError(
                f"codec gaac: the GPU kernels take up to {MAX_GAAC_INNER} channels, "
                f"not {shape[2]}; use device cpu"
            )

    def codebook(self, prepared: U8) -> U8:
        return prepared

    def max_payload_nbytes(self, shape: Shape) -> int:
        return gaac_layout.max_payload_nbytes(shape, self._config)

    def fixed_nbytes(self, shape: Shape) -> int:
        return self._streams(shape)[-1]

    def place(self, memory: ChunkMemory) -> ChunkPlace:
        outer, tokens, _ = memory.shape
        streams = self._streams(memory.shape)
        return ChunkPlace(
            data=memory.data,
            outer_stride=memory.outer_stride,
            tokens=tokens,
            outer=outer,
            payload=memory.payload,
            codebook=memory.codebook,
            num_programs=Geometry.of(memory.shape, self._config).num_blocks,
            streams=streams,
            last_nbytes=memory.payload_nbytes - streams[-1],
        )

    def _streams(self, shape: Shape) -> list[int]:
        spans = gaac_layout.streams(shape, self._config, self.max_payload_nbytes(shape))
        return [span.offset for span in spans[1:]]

    def _options(self, inner: int) -> dict[str, Any]:
        block_tiles = Geometry.of((1, 1, inner), self._config).block_tiles
        return {"inner": inner, "block_tiles": block_tiles}

    def scratch_nbytes(self, batch: Batch, inner: int) -> int:
        return gaac.scratch_nbytes(batch, **self._options(inner))

    def encode(self, batch: Batch, work: Workspace, lengths: torch.Tensor, inner: int) -> None:
        gaac.encode(batch, *work, narrow=self._config.narrow, **self._options(inner))
        last_field = self.last_nbytes_field - 1
        payload_ends(batch, work.totals, lengths, last_field=last_field, paired=False)

    def check_payload(self, shape: Shape, payload_nbytes: int, detail: Detail) -> None:
        gaac_layout.streams(shape, self._config, payload_nbytes)

    def decode(self, batch: Batch, status: torch.Tensor, inner: int, detail: Detail) -> None:
        gaac.decode(batch, status, narrow=self._config.narrow, **self._options(inner))


class SplitzipBinding:
    """Any codebook of 16 exponents."""

    #: Streams before it: codes, offsets, positions.
    last_nbytes_field = _FIRST_STREAM_FIELD + 3

    def check_shape(self, shape: Shape) -> None:
        check_len(shape)

    def codebook(self, prepared: U8) -> U8:
        return prepared

    def max_payload_nbytes(self, shape: Shape) -> int:
        return splitzip_layout.max_payload_nbytes(math.prod(shape))

    def fixed_nbytes(self, shape: Shape) -> int:
        return 0

    def place(self, memory: ChunkMemory) -> ChunkPlace:
        outer, tokens, inner = memory.shape
        num_elements = outer * tokens * inner
        _, codes, offsets = splitzip_layout.fixed_streams(num_elements)
        positions, _ = splitzip_layout.escape_streams(num_elements, 0)
        return ChunkPlace(
            data=memory.data,
            outer_stride=memory.outer_stride,
            tokens=tokens * inner,
            outer=outer,
            payload=memory.payload,
            codebook=memory.codebook,
            num_programs=-(-num_elements // splitzip_layout.BLOCK_LEN),
            streams=[codes.offset, offsets.offset, positions.offset],
            last_nbytes=memory.payload_nbytes,
        )

    def scratch_nbytes(self, batch: Batch, inner: int) -> int:
        return splitzip.scratch_nbytes(batch)

    def encode(self, batch: Batch, work: Workspace, lengths: torch.Tensor, inner: int) -> None:
        splitzip.encode(batch, *work, **self._options(inner))
        last_field = self.last_nbytes_field - 1
        payload_ends(batch, work.totals, lengths, last_field=last_field, paired=True)

    def check_payload(self, shape: Shape, payload_nbytes: int, detail: Detail) -> None:
        check_fits(splitzip_layout.escape_streams(math.prod(shape), 0), payload_nbytes)

    def decode(self, batch: Batch, status: torch.Tensor, inner: int, detail: Detail) -> None:
        splitzip.decode(batch, status, **self._options(inner))

    @staticmethod
    def _options(inner: int) -> dict[str, Any]:
        return {"inner": inner, "block_len": splitzip_layout.BLOCK_LEN}


def check_len(shape: Shape) -> None:
    """Raises ConfigError for a chunk of more elements than the kernels can count."""
    if math.prod(shape) > MAX_CHUNK_ELEMENTS:
        raise ConfigError(
            f"a chunk of {math.prod(shape)} elements exceeds {MAX_CHUNK_ELEMENTS}; "
            "choose smaller chunk_tokens"
        )


def find_binding(codec: str, config: Mapping[str, Any]) -> DeviceBinding | None:
    """The binding for a codec as an archive's head names it; None without GPU kernels.

    Raises ConfigError for a configuration without GPU kernels, InvalidField for one that is wrong.
    """
    if codec == "gaac":
        return GaacBinding(GaacConfig.from_dict(config))
    if codec == "splitzip":
        SplitzipConfig.from_dict(config)
        return SplitzipBinding()
    if codec == "lynx":
        from kvz.gpu.lynx_binding import LynxBinding

        return LynxBinding(LynxConfig.from_dict(config))
    if codec == "pnmix":
        from kvz.gpu.pnmix_binding import PnmixBinding

        return PnmixBinding(pnmix_layout.config_from_dict(config))
    return None


def find_bindings(head: Head) -> dict[int, DeviceBinding]:
    """The bindings of an archive's codecs, by their numbers, of those that have GPU kernels.

    Raises ConfigError: none has, or a tensor's shape or a configuration is not for them.
    """
    bindings = {
        number: binding
        for number, codec in enumerate(head.codecs)
        if (binding := find_binding(codec.name, codec.config)) is not None
    }
    if not bindings:
        names = ", ".join(codec.name for codec in head.codecs)
        raise ConfigError(f"codec {names} has no GPU kernels; use device cpu")
    for entry in head.tensors:
        if entry.codec in bindings and entry.num_chunks:
            bindings[entry.codec].check_shape(entry.chunk_shape(0))
    return bindings


def require_binding(codec: str, config: Mapping[str, Any]) -> DeviceBinding:
    """As :func:`find_binding`. Raises ConfigError."""
    binding = find_binding(codec, config)
    if binding is None:
        raise ConfigError(
            f"codec {codec} has no GPU kernels; use gaac, splitzip or lynx, or device cpu"
        )
    return binding


def make_batch(
    binding: DeviceBinding, memories: Sequence[ChunkMemory], device: torch.device
) -> Batch:
    """The tables of one launch, on the device."""
    return Batch.of([binding.place(memory) for memory in memories], device)
