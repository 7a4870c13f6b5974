"""SplitZip in numba; byte for byte what kernels/reference/splitzip.py does."""

from __future__ import annotations

import numpy as np
from numba import njit, uint8, uint16, uint32
from numpy.typing import NDArray

from kvz.kernels.cpu.simd import HAVE_SIMD
from kvz.kernels.cpu.splitzip_simd import decode_run, encode_run

__all__ = ["DECODE_OK", "STATUS_TEXT", "decode", "encode"]

DECODE_OK = 0
OFFSET_WRONG, POSITION_WRONG = 1, 2
#: What the other results of ``decode`` mean.
STATUS_TEXT = {
    OFFSET_WRONG: "an escape offset does not follow the one before",
    POSITION_WRONG: "an escape lies outside its block or does not follow the one before",
}

_UNKNOWN = 255


@njit(nogil=True, cache=True)
def _encode(
    chunk, lowest, code_of, block_len, vector, sign_mantissa, codes, offsets, positions, exponents
):  # fmt: skip
    escapes = 0
    for start in range(0, chunk.size, block_len):
        end = min(start + block_len, chunk.size)
        offsets[start // block_len] = uint32(escapes)
        at = start
        if vector:
            while at + 32 <= end:
                unknown = encode_run(chunk, sign_mantissa, codes, at, lowest)
                i = at
                while unknown:
                    if unknown & 1:
                        positions[escapes] = uint16(i - start)
                        exponents[escapes] = uint8((chunk[i] >> 7) & 0xFF)
                        escapes += 1
                    unknown >>= uint32(1)
                    i += 1
                at += 32
        for i in range(at, end):
            bits = chunk[i]
            sign_mantissa[i] = uint8(((bits >> 8) & 0x80) | (bits & 0x7F))
            exponent = (bits >> 7) & 0xFF
            code = code_of[exponent]
            if code == _UNKNOWN:
                code = uint8(0)
                positions[escapes] = uint16(i - start)
                exponents[escapes] = uint8(exponent)
                escapes += 1
            if i & 1:
                codes[i >> 1] |= uint8(code << 4)
            else:
                codes[i >> 1] = code
    offsets[offsets.size - 1] = uint32(escapes)
    return escapes


@njit(nogil=True, cache=True)
def _decode(
    sign_mantissa, codes, offsets, positions, exponents, codebook, lowest, block_len, vector, out
):  # fmt: skip
    previous_end = 0
    for start in range(0, out.size, block_len):
        end = min(start + block_len, out.size)
        block = start // block_len
        first = np.int64(offsets[block])
        last = np.int64(offsets[block + 1])
        if first != previous_end or last < first or last > positions.size:
            return OFFSET_WRONG
        previous_end = last
        at = start
        if vector:
            while at + 32 <= end:
                decode_run(sign_mantissa, codes, at, lowest, out)
                at += 32
        for i in range(at, end):
            packed = uint32(sign_mantissa[i])
            code = (codes[i >> 1] >> (4 * (i & 1))) & 15
            out[i] = uint16(
                ((packed & uint32(0x80)) << uint32(8))
                | (packed & uint32(0x7F))
                | (uint32(codebook[code]) << uint32(7))
            )
        previous = -1
        for i in range(first, last):
            position = np.int64(positions[i])
            if position <= previous or start + position >= end:
                return POSITION_WRONG
            previous = position
            kept = uint32(out[start + position]) & uint32(0x807F)
            out[start + position] = uint16(kept | (uint32(exponents[i]) << uint32(7)))
    return DECODE_OK if previous_end == positions.size else OFFSET_WRONG


def _vector_plan(codebook: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], bool]:
    """The lowest exponent, and whether the codebook is a run that the vector path can take."""
    is_run = codebook.size == 16 and bool((np.diff(codebook.astype(np.int64)) == 1).all())
    return codebook[:1].astype(np.uint16), HAVE_SIMD and is_run


def encode(
    chunk: NDArray[np.uint16],
    codebook: NDArray[np.uint8],
    *,
    block_len: int,
    sign_mantissa: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    offsets: NDArray[np.uint32],
    positions: NDArray[np.uint16],
    exponents: NDArray[np.uint8],
) -> int:
    """Encode ``chunk`` (uint16[n]) into the given stream arrays; returns the number of escapes.

    ``positions`` and ``exponents`` must hold the worst case, one entry an element. ``block_len`` is
    even and at most 65,536.
    """
    lowest, vector = _vector_plan(codebook)
    code_of = np.full(256, _UNKNOWN, np.uint8)
    code_of[codebook] = np.arange(codebook.size, dtype=np.uint8)
    return int(
        _encode(
            chunk, lowest, code_of, block_len, vector,
            sign_mantissa, codes, offsets, positions, exponents,
        )
    )  # fmt: skip


def decode(
    sign_mantissa: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    offsets: NDArray[np.uint32],
    positions: NDArray[np.uint16],
    exponents: NDArray[np.uint8],
    codebook: NDArray[np.uint8],
    out: NDArray[np.uint16],
    *,
    block_len: int,
) -> int:
    """Decode into ``out`` (uint16[n]); returns a status.

    Stream lengths must fit ``out``; offsets and positions need not be trustworthy: the result is
    :data:`DECODE_OK` or says what is wrong with them.
    """
    lowest, vector = _vector_plan(codebook)
    return int(
        _decode(
            sign_mantissa, codes, offsets, positions, exponents, codebook, lowest, block_len,
            vector, out,
        )
    )  # fmt: skip
