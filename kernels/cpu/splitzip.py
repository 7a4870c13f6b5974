"""SplitZip in numba; byte for byte what kernels/reference/splitzip.py does."""

from __future__ import annotations

import numpy as np
from numba import njit, uint8, uint16, uint32
from numpy.typing import NDArray

from kvz.kernels.cpu.flat import flatten
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
    data, stride, run, length, lowest, code_of, block_len, vector, sign_mantissa, codes, offsets,
    positions, exponents,
):  # fmt: skip
    """``run`` elements of each outer index are contiguous, ``stride`` lie from one to the next."""
    escapes = 0
    for start in range(0, length, block_len):
        end = min(start + block_len, length)
        offsets[start // block_len] = uint32(escapes)
        i = start
        while i < end:
            outer = i // run
            shift = outer * (stride - run)
            run_end = min(end, (outer + 1) * run)
            while i < run_end:
                if vector and i + 32 <= run_end and i & 1 == 0:
                    unknown = encode_run(data, i + shift, sign_mantissa, codes, i, lowest)
                    place = i
                    while unknown:
                        if unknown & 1:
                            positions[escapes] = uint16(place - start)
                            exponents[escapes] = uint8((data[place + shift] >> 7) & 0xFF)
                            escapes += 1
                        unknown >>= uint32(1)
                        place += 1
                    i += 32
                    continue
                bits = data[i + shift]
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
                i += 1
    offsets[offsets.size - 1] = uint32(escapes)
    return escapes


@njit(nogil=True, cache=True)
def _decode_block(sign_mantissa, codes, codebook, lowest, vector, start, end, data, stride, run):
    """All elements of a block as if there were no escapes."""
    i = start
    while i < end:
        outer = i // run
        shift = outer * (stride - run)
        run_end = min(end, (outer + 1) * run)
        if vector and i & 1 == 0:
            vectors = (run_end - i) >> 5
            for _ in range(vectors):
                decode_run(sign_mantissa, codes, i, lowest, data, i + shift)
                i += 32
        while i < run_end:
            packed = uint32(sign_mantissa[i])
            code = (codes[i >> 1] >> (4 * (i & 1))) & 15
            data[i + shift] = uint16(
                ((packed & uint32(0x80)) << uint32(8))
                | (packed & uint32(0x7F))
                | (uint32(codebook[code]) << uint32(7))
            )
            i += 1


@njit(nogil=True, cache=True)
def _decode(
    sign_mantissa, codes, offsets, positions, exponents, codebook, lowest, block_len, vector, data,
    stride, run, length,
):  # fmt: skip
    previous_end = 0
    for start in range(0, length, block_len):
        end = min(start + block_len, length)
        block = start // block_len
        first = np.int64(offsets[block])
        last = np.int64(offsets[block + 1])
        if first != previous_end or last < first or last > positions.size:
            return OFFSET_WRONG
        previous_end = last
        _decode_block(sign_mantissa, codes, codebook, lowest, vector, start, end, data, stride, run)
        previous = -1
        for escape in range(first, last):
            position = np.int64(positions[escape])
            if position <= previous or start + position >= end:
                return POSITION_WRONG
            previous = position
            i = start + position
            i += (i // run) * (stride - run)
            kept = uint32(data[i]) & uint32(0x807F)
            data[i] = uint16(kept | (uint32(exponents[escape]) << uint32(7)))
    return DECODE_OK if previous_end == positions.size else OFFSET_WRONG


def _vector_plan(codebook: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], bool]:
    """The lowest exponent, and whether the ascending codebook is a run (the vector path's case)."""
    # ascending and distinct, so the ends tell
    is_run = codebook.size == 16 and int(codebook[15]) - int(codebook[0]) == 15
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
    """Encode ``chunk`` (uint16[outer, tokens, inner]) into the given stream arrays.

    Each outer index of ``chunk`` must be contiguous. Returns the number of escapes; ``positions``
    and ``exponents`` must hold the worst case, one entry an element. ``block_len`` is even and at
    most 65,536.
    """
    lowest, vector = _vector_plan(codebook)
    code_of = np.full(256, _UNKNOWN, np.uint8)
    code_of[codebook] = np.arange(codebook.size, dtype=np.uint8)
    data, stride = flatten(chunk)
    run = chunk.shape[1] * chunk.shape[2]
    return int(
        _encode(
            data, stride, run, chunk.size, lowest, code_of, block_len, vector,
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
    """Decode into ``out`` (uint16[outer, tokens, inner]); returns a status.

    Each outer index of ``out`` must be contiguous. Stream lengths must fit ``out``; offsets and
    positions need not be trustworthy: the result is :data:`DECODE_OK` or says what is wrong.
    """
    lowest, vector = _vector_plan(codebook)
    data, stride = flatten(out)
    run = out.shape[1] * out.shape[2]
    return int(
        _decode(
            sign_mantissa, codes, offsets, positions, exponents, codebook, lowest, block_len,
            vector, data, stride, run, out.size,
        )
    )  # fmt: skip
