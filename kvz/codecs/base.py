"""What every codec binding offers: it checks, allocates, chooses a kernel and makes the errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs.spans import RESIDUAL_ALIGNMENT as RESIDUAL_ALIGNMENT

U8 = NDArray[np.uint8]
#: Integer view of a chunk, uint{8,16,32,64}[outer, tokens, inner]. It may be a token range of a
#: larger tensor: each outer index is contiguous, the next one may lie further away.
Chunk = NDArray[Any]
Shape = tuple[int, int, int]


class TensorLookup(Protocol):
    """What a codec may look at besides the tensor that it encodes."""

    name: str

    @property
    def metadata(self) -> Mapping[str, str]: ...

    def find(self, name: str) -> tuple[str, NDArray[Any]] | None:
        """Safetensors dtype and integer view of a tensor; None: it is not at hand."""
        ...


class Codec(Protocol):
    """One codec with its configuration. Safe to use from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def needs_codebook(self) -> bool: ...

    @property
    def is_progressive(self) -> bool:
        """A chunk is an anchor, useful by itself, and a residual that comes later in the file."""
        ...

    @property
    def chunk_step(self) -> int:
        """Tokens of which a chunk should hold a multiple."""
        ...

    def config_dict(self) -> dict[str, Any]:
        """What the head of an archive records."""
        ...

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        """Whether the codec can encode tensors of this safetensors dtype and layout."""
        ...

    def for_source(self, source: TensorLookup) -> Codec:
        """The codec for the tensors of one capture; what it learns from others is learnt here.

        Raises ConfigError when the capture lacks what the codec needs.
        """
        ...

    def for_tensor(
        self, name: str, dtype: str, shape: Shape, token_axis: int | None
    ) -> Codec | None:
        """The codec for one tensor: usually this one. None: it is not for this codec."""
        ...

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        """The codebook section for a tensor of ``num_tokens`` tokens; empty when there is none.

        ``sample`` holds some of its tokens (all of them when they are few).
        """
        ...

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> Any:
        """What encode and decode need to know of a tensor of ``shape`` (outer, tokens, inner).

        Raises InvalidField.
        """
        ...

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        """Bytes that :meth:`encode` may touch; at least the largest payload."""
        ...

    def encode(self, chunk: Chunk, prepared: Any, buffer: U8, start: int) -> int:
        """Encode ``chunk`` into the front of ``buffer``; returns the length of the payload.

        ``start`` is the chunk's first token. Of a progressive codec the length is that of the
        anchor; the residual follows at the next multiple of :data:`RESIDUAL_ALIGNMENT`.
        """
        ...

    def decode(self, payload: U8, prepared: Any, out: Chunk, start: int) -> None:
        """Decode into ``out``. Raises DamagedFile when the payload is inconsistent.

        The payload of a progressive codec is anchor and residual, as ``encode`` leaves them.
        """
        ...


class ProgressiveCodec(Codec, Protocol):
    """A codec with anchors and residuals."""

    def residual_nbytes(self, shape: Shape) -> int:
        """Length of the residual of a chunk."""
        ...

    def anchor_nbytes(self, anchor: U8, shape: Shape, start: int) -> int:
        """Length that an anchor must have. Raises DamagedFile when it is inconsistent."""
        ...

    def decode_anchor(self, payload: U8, prepared: Any, out: Chunk, start: int) -> None:
        """Decode an anchor alone. Raises DamagedFile when it is inconsistent."""
        ...


def is_progressive(codec: Codec) -> TypeGuard[ProgressiveCodec]:
    """Whether a codec makes anchors and residuals."""
    return codec.is_progressive


class ForAllSources:
    """What codecs have in common that learn nothing from other tensors."""

    def for_source(self, source: TensorLookup) -> Self:
        return self

    def for_tensor(
        self, name: str, dtype: str, shape: Shape, token_axis: int | None
    ) -> Self | None:
        return self if self.supports(dtype, token_axis) else None

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        raise NotImplementedError


class WholeChunks(ForAllSources):
    """The same, of which chunks are one section each."""

    is_progressive = False
    chunk_step = 64


def is_chunk(array: Chunk) -> bool:
    """Whether ``array [outer, tokens, inner]`` meets what :data:`Chunk` asks for."""
    _, tokens, inner = array.shape
    if array.flags.c_contiguous:
        return True
    step, itemsize = array.strides[0], array.itemsize
    apart = step >= tokens * inner * itemsize and step % itemsize == 0
    return bool(array[0].flags.c_contiguous and apart)
