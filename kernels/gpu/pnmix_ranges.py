"""Least and greatest elements of PN-Mix's groups and tokens in Triton.

Ranges are tuples of tensors. ``fast``: BF16 pairs in uint32, for the least elements, and as many
for the greatest ones, negated. Else: elements as integers in the order of their values, for the
least ones, and as many for the greatest ones, inverted. So the least of everything is wanted.
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

_SIGNS = tl.constexpr(0x80008000)
#: Positive infinity, twice.
_NOTHING = tl.constexpr(0x7F807F80)
#: BF16 bits of 2**15, from which on elements are not coded.
_BEYOND = tl.constexpr(142 << 7)


@triton.jit
def _bits(ordered):
    return tl.where(ordered < 0, LARGEST - ordered, ordered).to(tl.uint32)


@triton.jit
def range_of(word, TILE: tl.constexpr):
    """Of each token and lane."""
    UNIT: tl.constexpr = TILE.unit
    least, greatest = (), ()
    if TILE.fast:
        for pair in tl.static_range(2):
            value = (word >> 32 * pair).to(tl.uint32)
            least, greatest = least + (value,), greatest + (value ^ _SIGNS,)
    else:
        for k in tl.static_range(UNIT):
            value = order_bits(element(word, k, UNIT))
            least, greatest = least + (value,), greatest + (~value,)
    return least + greatest


@triton.jit
def merge(a, b, TILE: tl.constexpr):
    COUNT: tl.constexpr = 4 if TILE.fast else 2 * TILE.unit
    merged = ()
    for i in tl.static_range(COUNT):
        least = least_pair(a[i], b[i]) if TILE.fast else tl.minimum(a[i], b[i])
        merged = merged + (least,)
    return merged


@triton.jit
def merge_unless(a, b, excluded, TILE: tl.constexpr):
    """``a``, with ``b`` merged unless the scalar ``excluded`` is not 0."""
    COUNT: tl.constexpr = 4 if TILE.fast else 2 * TILE.unit
    both, merged = merge(a, b, TILE), ()
    for i in tl.static_range(COUNT):
        merged = merged + (tl.where(excluded != 0, a[i], both[i]),)
    return merged


@triton.jit
def no_range(lane, TILE: tl.constexpr):
    """Of no element of ``lane``."""
    COUNT: tl.constexpr = 4 if TILE.fast else 2 * TILE.unit
    zero = tl.zeros_like(lane)
    nothing = (zero + _NOTHING).to(tl.uint32) if TILE.fast else zero + LARGEST
    ranges = ()
    for _ in tl.static_range(COUNT):
        ranges = ranges + (nothing,)
    return ranges


@triton.jit
def group_range(words, TILE: tl.constexpr):
    """Of all tokens of ``words``, ``[1, parts, 1, 1, lanes]``."""
    ranges = range_of(words, TILE)
    if TILE.fast:
        joined = tl.join(tl.join(ranges[0], ranges[1]), tl.join(ranges[2], ranges[3]))
        joined = tl.reduce(joined, 3, least_pair, keep_dims=True)
        joined = tl.reduce(joined, 2, least_pair, keep_dims=True)
        return split4(tl.reduce(joined, 0, least_pair, keep_dims=True))
    else:
        COUNT: tl.constexpr = 2 * TILE.unit
        reduced = ()
        for i in tl.static_range(COUNT):
            least = tl.min(tl.min(ranges[i], axis=3, keep_dims=True), axis=2, keep_dims=True)
            reduced = reduced + (tl.min(least, axis=0, keep_dims=True),)
        return reduced


@triton.jit
def limits(ranges, k: tl.constexpr, TILE: tl.constexpr):
    """Bits (uint32) of the least and the greatest element ``k`` of lanes."""
    if TILE.fast:
        low, high = ranges[k // 2], ranges[2 + k // 2] ^ _SIGNS
        return (low >> 16 * (k % 2)) & 0xFFFF, (high >> 16 * (k % 2)) & 0xFFFF
    else:
        return _bits(ranges[k]), _bits(~ranges[TILE.unit + k])


@triton.jit
def token_limits(words, TILE: tl.constexpr):
    """Bits (uint32) of the least and the greatest element of tokens, ``[rows, 1, steps, 8, 1]``."""
    ranges = range_of(words, TILE)
    if TILE.fast:
        joined = tl.join(least_pair(ranges[0], ranges[1]), least_pair(ranges[2], ranges[3]))
        joined = tl.reduce(joined, 4, least_pair, keep_dims=True)
        least, greatest = tl.split(tl.reduce(joined, 1, least_pair, keep_dims=True))
        least, greatest = least_pair(least, least >> 16), least_pair(greatest, greatest >> 16)
        return least & 0xFFFF, (greatest ^ _SIGNS) & 0xFFFF
    else:
        UNIT: tl.constexpr = TILE.unit
        least, greatest = ranges[0], ranges[UNIT]
        for k in tl.static_range(1, UNIT):
            least = tl.minimum(least, ranges[k])
            greatest = tl.minimum(greatest, ranges[UNIT + k])
        least = tl.min(tl.min(least, axis=4, keep_dims=True), axis=1, keep_dims=True)
        greatest = tl.min(tl.min(greatest, axis=4, keep_dims=True), axis=1, keep_dims=True)
        return _bits(least), _bits(~greatest)


@triton.jit
def is_beyond(low, high):
    """Whether a range (bits) reaches beyond what is coded, int32."""
    return (tl.maximum(low & LARGEST, high & LARGEST) >= _BEYOND).to(tl.int32)


@triton.jit
def limit_float(bits):
    """Float32 of BF16 bits; a zero has no sign."""
    return to_float(bits) + 0.0
