"""Elements to byte planes and back.

Floats are first rotated left by one bit, so that the sign joins the low mantissa bits and the top
plane of BF16 and FP32 is the exponent alone. Planes run from the most significant byte down.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def split(elements: NDArray[Any], rotate: bool) -> list[NDArray[np.uint8]]:
    """Contiguous ``uint{8,16,32,64}[n]`` to its byte planes, each uint8[n]."""
    bits = 8 * elements.itemsize
    if rotate:
        one, top = elements.dtype.type(1), elements.dtype.type(bits - 1)
        elements = (elements << one) | (elements >> top)
    matrix = elements.view(np.uint8).reshape(-1, bits // 8)
    return [np.ascontiguousarray(matrix[:, plane]) for plane in reversed(range(bits // 8))]


def join(planes: list[NDArray[np.uint8]], out: NDArray[Any], rotate: bool) -> None:
    """Inverse of :func:`split`, into contiguous ``out``."""
    matrix = out.view(np.uint8).reshape(-1, out.itemsize)
    for plane, values in zip(reversed(range(out.itemsize)), planes, strict=True):
        matrix[:, plane] = values
    if rotate:
        one, top = out.dtype.type(1), out.dtype.type(8 * out.itemsize - 1)
        np.bitwise_or(out >> one, out << top, out=out)
