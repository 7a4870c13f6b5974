"""Blocks of a group of PN-Mix's keys in Triton: how a program holds one, and its exact sums."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from kvz.kernels.gpu.elements import to_float
from kvz.kernels.gpu.pnmix_levels import ROUND
from kvz.kernels.gpu.pnmix_tiles import Tile
from kvz.kernels.reference.pnmix_fit import MAX_BITS, first_levels

#: Elements of a block: those of a program of four warps, 128 a thread.
MAX_BLOCK = 1 << 14
#: Bits of ROUND.
BIAS = tl.constexpr(0x4B400000)
#: Low bits of a number to which ROUND was added.
_LOW_BITS = tl.constexpr(0x3FFF)


@dataclass(frozen=True, slots=True)
class Block:
    """What a program fits at a time, known when the kernel is compiled.

    Tensors are ``[rows, parts, steps, width]``: token ``row * steps + step``, channel
    ``part * width + number``. As Triton places them, where ``rows`` times lanes are 32, a warp has
    all tokens of ``width`` channels, and a thread all steps. Sizes are powers of two.

    ``low_bits``, ``high_bits``: of a code, but not more than are fitted.
    """

    rows: int
    parts: int
    steps: int
    width: int
    low_bits: int
    high_bits: int

    @classmethod
    def of(cls, tile: Tile) -> Block:
        tokens = triton.next_power_of_2(tile.group)
        channels = min(triton.next_power_of_2(tile.inner), MAX_BLOCK // tokens)
        width = min(channels, 4 * tile.unit)
        rows = min(tokens, 32 * tile.unit // width)
        low_bits, high_bits = min(tile.low_bits, MAX_BITS), min(tile.high_bits, MAX_BITS)
        return cls(rows, channels // width, tokens // rows, width, low_bits, high_bits)

    @property
    def tokens(self) -> int:
        return self.rows * self.steps

    @property
    def channels(self) -> int:
        return self.parts * self.width

    @property
    def low_last(self) -> int:
        """The greatest code."""
        return (1 << self.low_bits) - 1

    @property
    def high_last(self) -> int:
        return (1 << self.high_bits) - 1

    @property
    def low_first(self) -> tuple[float, float]:
        """Start and step from which the fit starts."""
        return _first(self.low_bits)

    @property
    def high_first(self) -> tuple[float, float]:
        return _first(self.high_bits)


def _first(bits: int) -> tuple[float, float]:
    start, step = first_levels(np.array(bits))
    return float(start), float(step)


@triton.jit
def add_round(x):
    """To an integer, to nearest even, in the low bits: :func:`rounded_float`, :func:`rounded_int`.

    The bits of the result are those of ROUND and the integer. Sums of them, and of their products,
    are right modulo 2**32 when that of ROUND, of which the square is 0, is taken away: cheaper than
    to have the integers themselves.
    """
    return x + ROUND


@triton.jit
def rounded_float(rounded):
    return rounded - ROUND


@triton.jit
def biased(rounded):
    """Uint32: the integer and ``BIAS``."""
    return rounded.to(tl.uint32, bitcast=True)


@triton.jit
def rounded_int(rounded):
    """Uint32 of an integer from 0 to 2**14."""
    return biased(rounded) & _LOW_BITS


@triton.jit
def _spread(x):
    """The same numbers, in another layout: of channels or tokens, each thread has its own, as few
    as possible. Else every thread would compute for all its elements what its neighbours do.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), axis=0)


@triton.jit
def along_channels(x, BLOCK: tl.constexpr):
    """Channels as a block's axes."""
    return tl.reshape(_spread(x), (BLOCK.parts, BLOCK.width))[None, :, None, :]


@triton.jit
def along_tokens(x, BLOCK: tl.constexpr):
    return tl.reshape(_spread(x), (BLOCK.rows, BLOCK.steps))[:, None, :, None]


@triton.jit
def sum_tokens(x, BLOCK: tl.constexpr):
    return _spread(tl.reshape(tl.sum(tl.sum(x, axis=2), axis=0), (BLOCK.channels,)))


@triton.jit
def sum_channels(x, BLOCK: tl.constexpr):
    return _spread(tl.reshape(tl.sum(tl.sum(x, axis=3), axis=1), (BLOCK.tokens,)))


@triton.jit
def channel_ends(x, BLOCK: tl.constexpr):
    """Least and greatest elements of channels; zeros have no sign."""
    low, high = tl.min(tl.min(x, axis=2), axis=0), tl.max(tl.max(x, axis=2), axis=0)
    low, high = tl.reshape(low, (BLOCK.channels,)), tl.reshape(high, (BLOCK.channels,))
    return _spread(low) + 0.0, _spread(high) + 0.0


@triton.jit
def wrap(x):
    """Modulo 2**32."""
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def load_block(data_ptr, token, channel, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Elements; channels that do not exist are zeros."""
    WIDTH: tl.constexpr = BLOCK.width
    channel = along_channels(channel, BLOCK)
    ptr = data_ptr + (along_tokens(token, BLOCK) * TILE.inner + channel)
    if TILE.unit == 4:
        ptr = tl.max_contiguous(tl.multiple_of(ptr, (1, 1, 1, 8)), (1, 1, 1, WIDTH))
    elif BLOCK.channels > 1:
        ptr = tl.max_contiguous(ptr, (1, 1, 1, WIDTH))
    if TILE.inner % BLOCK.channels == 0:
        return to_float(tl.load(ptr))
    else:
        return to_float(tl.load(ptr, mask=channel < TILE.inner, other=0))
