"""What every codec binding offers: it checks, allocates, chooses a kernel and makes the errors."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
#: Integer view of a chunk, uint{8,16,32,64}[outer, tokens, inner]. It may be a token range of a
#: larger tensor: each outer index is contiguous, the next one may lie further away.
Chunk = NDArray[Any]
Shape = tuple[int, int, int]


class Codec(Protocol):
    """One codec with its configuration. Safe to use from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def needs_codebook(self) -> bool: ...

    def config_dict(self) -> dict[str, Any]:
        """What the head of an archive records."""
        ...

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        """Whether the codec can encode tensors of this safetensors dtype and layout."""
        ...

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        """The codebook section for a tensor of ``num_tokens`` tokens; empty when there is none.

        ``sample`` holds some of its tokens (all of them when they are few).
        """
        ...

    def prepare(self, codebook: bytes, dtype: str, outer: int, inner: int) -> Any:
        """What encode and decode need to know of a tensor. Raises InvalidField."""
        ...

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        """Bytes that :meth:`encode` may touch; at least the largest payload."""
        ...

    def encode(self, chunk: Chunk, prepared: Any, buffer: U8) -> int:
        """Encode ``chunk`` into the front of ``buffer``; returns the length of the payload."""
        ...

    def decode(self, payload: U8, prepared: Any, out: Chunk) -> None:
        """Decode into ``out``. Raises DamagedFile when the payload is inconsistent."""
        ...


def is_chunk(array: Chunk) -> bool:
    """Whether ``array [outer, tokens, inner]`` meets what :data:`Chunk` asks for."""
    _, tokens, inner = array.shape
    if array.flags.c_contiguous:
        return True
    step, itemsize = array.strides[0], array.itemsize
    apart = step >= tokens * inner * itemsize and step % itemsize == 0
    return bool(array[0].flags.c_contiguous and apart)
