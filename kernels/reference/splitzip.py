"""SplitZip in NumPy: a codebook of 16 exponents, 4-bit codes, escapes for the rest.

Source: SplitZip, arXiv 2605.01708. A chunk is a flat ``uint16[n]`` array of BF16 bit patterns.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# NumPy's stubs lose the width of unsigned integers in arithmetic; the names keep it for readers
U8: TypeAlias = NDArray[Any]
U16: TypeAlias = NDArray[Any]
U32: TypeAlias = NDArray[Any]


class Streams(NamedTuple):
    """The arrays that hold one encoded chunk of n elements.

    ``sign_mantissa`` uint8[n] · ``codes`` uint8[ceil(n / 2)], the even element in the low nibble ·
    ``offsets`` uint32[blocks + 1]: index of the first escape of each block of ``block_len``
    elements, at the end their number · ``positions`` uint16[escapes] inside the block, ascending ·
    ``exponents`` uint8[escapes].
    """

    sign_mantissa: U8
    codes: U8
    offsets: U32
    positions: U16
    exponents: U8


def encode(chunk: U16, codebook: U8, *, block_len: int) -> Streams:
    """Encode ``chunk`` (uint16[n]) with ``codebook`` (16 distinct exponents)."""
    exponents = ((chunk >> 7) & 0xFF).astype(np.uint8)
    code_of = np.zeros(256, np.uint8)
    code_of[codebook] = np.arange(codebook.size, dtype=np.uint8)
    known = np.zeros(256, bool)
    known[codebook] = True

    nibbles = np.zeros(-(-chunk.size // 2) * 2, np.uint8)
    nibbles[: chunk.size] = code_of[exponents]
    escaped = np.flatnonzero(~known[exponents])
    blocks = -(-chunk.size // block_len)
    return Streams(
        sign_mantissa=(((chunk >> 8) & 0x80) | (chunk & 0x7F)).astype(np.uint8),
        codes=nibbles[::2] | (nibbles[1::2] << 4),
        offsets=np.searchsorted(escaped, np.arange(blocks + 1) * block_len).astype(np.uint32),
        positions=(escaped % block_len).astype(np.uint16),
        exponents=exponents[escaped],
    )


def decode(streams: Streams, codebook: U8, *, block_len: int) -> U16:
    """Inverse of :func:`encode`; the streams must have passed the checks of the file format."""
    length = streams.sign_mantissa.size
    nibbles = np.stack([streams.codes & 15, streams.codes >> 4], axis=1).reshape(-1)[:length]
    exponents = codebook[nibbles].astype(np.uint16)
    counts: NDArray[Any] = np.diff(streams.offsets.astype(np.int64))
    block_starts = np.repeat(np.arange(len(counts)) * block_len, counts)
    exponents[block_starts + streams.positions] = streams.exponents
    sign_mantissa = streams.sign_mantissa.astype(np.uint16)
    return ((sign_mantissa & 0x80) << 8) | (exponents << 7) | (sign_mantissa & 0x7F)
