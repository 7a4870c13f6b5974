"""Least and greatest values of Lynx's groups and pages in Triton, and the scales made of them.

Ranges are tensors joined along additional axes: ``fast``: BF16 pairs in uint32, four for the least
values of a lane's lower and upper channels, four for the greatest ones, negated. Else: elements as
integers in the order of their values, ``2 * unit`` for the least ones, as many for the greatest
ones, inverted. So the least of everything is wanted, and one reduction finds it.
"""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton has no unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import (
    LARGEST,
    element,
    least_pair,
    order_bits,
    split4,
    to_float,
)

#: Magnitudes from 2**126 on.
_BEYOND = tl.constexpr(253 << 7)
#: BF16 bits of 2**-96.
_MIN_SCALE_BITS = tl.constexpr((127 - 96) << 7)
_SIGNS = tl.constexpr(0x80008000)


@triton.jit
def _greatest(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _join4(a, b, c, d):
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _join_elements(words, TILE: tl.constexpr):
    """Along new axes: BF16 pairs, or elements in order, of the lower and the upper channels."""
    UNIT: tl.constexpr = TILE.unit
    lower, upper = words
    if TILE.fast:
        first, last = lower.to(tl.uint32), (lower >> 32).to(tl.uint32)
        return _join4(first, last, upper.to(tl.uint32), (upper >> 32).to(tl.uint32))
    elif UNIT == 1:
        return tl.join(order_bits(element(lower, 0, 1)), order_bits(element(upper, 0, 1)))
    else:
        parts = ()
        for side in tl.static_range(2):
            for k in tl.static_range(UNIT):
                parts = parts + (order_bits(element(words[side], k, UNIT)),)
        joined = _join4(parts[0], parts[1], parts[2], parts[3])
        return tl.join(joined, _join4(parts[4], parts[5], parts[6], parts[7]))


@triton.jit
def group_range(words, TILE: tl.constexpr):
    """For each group ``[1, groups, 1, lanes, ...]``: least and greatest values, joined."""
    joined = _join_elements(words, TILE)
    if TILE.fast:
        least = tl.reduce(joined, 2, least_pair, keep_dims=True)
        greatest = tl.reduce(joined, 2, _greatest, keep_dims=True)
        return tl.reduce(tl.join(least, greatest ^ _SIGNS), 0, least_pair, keep_dims=True)
    else:
        least = tl.min(joined, axis=2, keep_dims=True)
        greatest = tl.max(joined, axis=2, keep_dims=True)
        return tl.min(tl.join(least, ~greatest), axis=0, keep_dims=True)


@triton.jit
def page_range(groups, TILE: tl.constexpr):
    """The range ``[1, 1, 1, lanes, ...]`` of all ``groups``."""
    if TILE.fast:
        return tl.reduce(groups, 1, least_pair, keep_dims=True)
    else:
        return tl.min(groups, axis=1, keep_dims=True)


@triton.jit
def merge_ranges(a, b, TILE: tl.constexpr):
    return least_pair(a, b) if TILE.fast else tl.minimum(a, b)


@triton.jit
def split_range(joined, TILE: tl.constexpr):
    """The least values, those of lower channels first, and then the greatest ones."""
    least, greatest = tl.split(joined)
    if TILE.fast:
        return split4(least) + split4(greatest)
    elif TILE.unit == 1:
        return tl.split(least) + tl.split(greatest)
    else:
        low, high = tl.split(least), tl.split(greatest)
        return split4(low[0]) + split4(low[1]) + split4(high[0]) + split4(high[1])


@triton.jit
def limits(ranges, c: tl.constexpr, TILE: tl.constexpr):
    """Bits (uint32) of the least and the greatest value of a lane's channel ``c``."""
    if TILE.fast:
        low, high = ranges[c // 2], ranges[4 + c // 2] ^ _SIGNS
        return (low >> 16 * (c % 2)) & 0xFFFF, (high >> 16 * (c % 2)) & 0xFFFF
    else:
        low, high = ranges[c], ~ranges[2 * TILE.unit + c]
        low = tl.where(low < 0, LARGEST - low, low)
        return low.to(tl.uint32), tl.where(high < 0, LARGEST - high, high).to(tl.uint32)


@triton.jit
def _reciprocal(value, FAST: tl.constexpr):
    """``1 / value``, rounded to nearest even, and 0 of 0."""
    if FAST:
        inverse = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = tl.div_rn(1.0, value)
    return tl.where(value == 0, 0.0, inverse)


@triton.jit
def page_scale(low, high, FAST: tl.constexpr):
    """Bits of the scale, the minimum, the reciprocal of a unit, and whether a page that holds such
    a channel must be stored as it is."""
    minimum = to_float(low)
    spread = (to_float(high) - minimum) * (65536 / 65025)
    scale = (spread.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    reciprocal = _reciprocal(to_float(scale) * (1 / 65536), FAST)
    beyond = tl.maximum(low & LARGEST, high & LARGEST) >= _BEYOND
    beyond |= (scale != 0) & (scale < _MIN_SCALE_BITS)
    return scale, minimum, reciprocal, beyond


@triton.jit
def linear_group(low, high, FAST: tl.constexpr):
    """Offset, step, 256 times the offset, and the step's reciprocal, all float32.

    ``low``, ``high``: the least and the greatest value in units.
    """
    offset = tl.floor(low * (1 / 256))
    first = offset * 256.0
    rest = high - first
    # the reference divides by 255, and rounds, before it rounds up. A quotient is rounded to at
    # most the integer k > 0 just if rest <= 255 k: the floats after 255 k are further from it than
    # half of what separates those after k, times 255. To 0 it is rounded up to 127 * 2**-149.
    step = tl.floor(rest * (1 / 255))
    more = (step * 255.0 < rest) & (rest.to(tl.int32, bitcast=True) > 127)
    step += tl.where(more, 1.0, 0.0)
    step = tl.minimum(step, 255.0)
    return offset, step, first, _reciprocal(step, FAST)


@triton.jit
def companded_group(low, high, total, count, FAST: tl.constexpr):
    """The same; the reciprocal is that of 256 steps. ``total``: ``count`` values' whole parts."""
    offset = tl.minimum((2 * total + 256 * count) // (512 * count), 255).to(tl.float32)
    first = offset * 256.0
    farthest = tl.maximum(tl.abs(low - first), tl.abs(high - first))
    step = tl.minimum(tl.ceil(farthest * (1 / 256)), 255.0)
    return offset, step, first, _reciprocal(step, FAST) * (1 / 256)
