"""Chunks inside larger tensors, as the compiled loops see them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def flatten(chunk: NDArray[np.uint16]) -> tuple[NDArray[np.uint16], int]:
    """The memory that ``chunk`` ``[outer, tokens, inner]`` spans, and elements per outer index.

    A token range of a tensor is not contiguous, but each of its outer indices is; the result is a
    flat view from its first element to its last, without a copy.
    """
    outer, tokens, inner = chunk.shape
    if chunk.flags.c_contiguous:
        return chunk.reshape(-1), tokens * inner
    stride = chunk.strides[0] // chunk.itemsize
    length = (outer - 1) * stride + tokens * inner
    flat = np.lib.stride_tricks.as_strided(chunk, (length,), (chunk.itemsize,))
    return flat, stride
