"""Scales of PN-Mix in Triton: the operations of kernels/reference/pnmix_levels.py, one by one."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import half_float
from kvz.kernels.gpu.pnmix_tiles import CLASS_MEANS

_CLASS_MEANS = tl.constexpr(CLASS_MEANS)
#: 1.5 * 2**23: adding it rounds to an integer, to even, and leaves that in the low bits.
ROUND = tl.constexpr(12582912.0)
#: Added to an element, leaves its multiple of 2**-7 in the low bits; to the rest, that of 2**-28.
_COARSE = tl.constexpr(1.5 * 2.0**16)
_FINE = tl.constexpr(1.5 * 2.0**-5)
_COARSE_BITS = tl.constexpr(0x47C00000)
_FINE_BITS = tl.constexpr(0x3D400000)
_MEAN_UNIT = tl.constexpr(2.0**-28)
_MIN_PAGE_SCALE = tl.constexpr(2.0**-64)
_DOWN, _NEAREST, _UP = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)


@triton.jit
def middle(low, high):
    """Where the two classes of a 1-bit code meet."""
    return (low + high) * 0.5


@triton.jit
def _parts(x):
    """An element as uint32 whose low bits are its multiple of 2**-7, and that of 2**-28 of the
    rest; both have a bias. Elements are below 2**15."""
    coarse = x + _COARSE
    fine = (x - (coarse - _COARSE)) + _FINE
    return coarse.to(tl.uint32, bitcast=True), fine.to(tl.uint32, bitcast=True)


@triton.jit
def _join_parts(coarse, fine, count):
    """Units (int64) that sums, modulo 2**32, of ``count`` (at most 256) parts mean."""
    coarse = (coarse - (count * _COARSE_BITS & 0xFFFFFFFF)).to(tl.int32, bitcast=True)
    fine = (fine - (count * _FINE_BITS & 0xFFFFFFFF)).to(tl.int32, bitcast=True)
    return coarse.to(tl.int64) * (1 << 21) + fine


@triton.jit
def whole_units(x):
    """Elements in units of 2**-28, rounded to nearest even, int64."""
    coarse, fine = _parts(x)
    return _join_parts(coarse, fine, 1)


@triton.jit
def _sum_tokens(values):
    return tl.sum(tl.sum(values, axis=3, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def sum_classes(x, above, COUNT: tl.constexpr):
    """Sums of whole units of elements ``[rows, parts, steps, 8, lanes]``, of those ``above``, and
    the number of the latter. ``COUNT``: steps times 8."""
    coarse, fine = _parts(x)
    count = _sum_tokens(above.to(tl.uint32))
    total = _join_parts(_sum_tokens(coarse), _sum_tokens(fine), COUNT)
    coarse, fine = tl.where(above, coarse, 0), tl.where(above, fine, 0)
    high = _join_parts(_sum_tokens(coarse), _sum_tokens(fine), count)
    total, high = tl.sum(total, axis=0, keep_dims=True), tl.sum(high, axis=0, keep_dims=True)
    return total, high, tl.sum(count.to(tl.int32), axis=0, keep_dims=True)


@triton.jit
def mean(total, count):
    """Of ``count`` elements whose sum is ``total`` (int64) units."""
    exact = total.to(tl.float64) / tl.maximum(count, 1).to(tl.float64) * _MEAN_UNIT
    return exact.to(tl.float32)


@triton.jit
def _reciprocal(value, FAST: tl.constexpr):
    """``1 / value``, rounded to nearest even, and 0 of 0."""
    if FAST:
        inverse = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = tl.div_rn(1.0, tl.where(value == 0, 1.0, value))
    return tl.where(value == 0, 0.0, inverse)


@triton.jit
def page_scale(low, high):
    """BF16 bits of a page's scale."""
    spread = tl.div_rn(high - low, 255.0)
    bits = (spread.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    return tl.where(spread < _MIN_PAGE_SCALE, 0, bits)


@triton.jit
def _round_half(value, DIRECTION: tl.constexpr):
    """FP16 bits (int32), and what they stand for. Rounded up is nothing below 0."""
    bits = value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    nearest = half_float(bits)
    if DIRECTION == _DOWN:
        bits += tl.where(nearest > value, tl.where(bits >= 0x8000, 1, -1), 0)
    elif DIRECTION == _UP:
        bits += (nearest < value).to(tl.int32)
    return bits, half_float(bits)


@triton.jit
def _round_units(value, unit, DIRECTION: tl.constexpr):
    """A byte (int32) and its float32: how many units, 0 where these are 0."""
    number = tl.where(unit == 0, 0.0, tl.div_rn(value, tl.where(unit == 0, 1.0, unit)))
    number = tl.minimum(tl.maximum(number, 0.0), 255.0)
    if DIRECTION == _DOWN:
        number = tl.floor(number)
    elif DIRECTION == _UP:
        number = tl.ceil(number)
    else:
        number = (number + ROUND) - ROUND
    return number.to(tl.int32), number


@triton.jit
def _start(low, high, low_mean, page, INSET: tl.constexpr, PAGED: tl.constexpr):
    """Stored start and its value."""
    if INSET == _CLASS_MEANS:
        wanted = low_mean
    elif INSET == 0:
        wanted = low
    else:
        wanted = low + (high - low) * INSET
    DIRECTION: tl.constexpr = _DOWN if INSET == 0 else _NEAREST
    if PAGED:
        minimum, scale = page
        stored, number = _round_units(wanted - minimum, scale, DIRECTION)
        return stored, minimum + scale * number
    else:
        return _round_half(wanted, DIRECTION)


@triton.jit
def _step(
    low, high, high_mean, start, page, BITS: tl.constexpr, INSET: tl.constexpr, PAGED: tl.constexpr
):
    """Stored step and its value."""
    LAST: tl.constexpr = float((1 << BITS) - 1)
    if INSET == _CLASS_MEANS:
        wanted = tl.where(high == low, 0.0, high_mean - start)
    elif INSET == 0:
        wanted = tl.div_rn(high - start, LAST)
    else:
        wanted = tl.div_rn((high - low) - (high - low) * INSET * 2.0, LAST)
    wanted = tl.maximum(wanted, 0.0)
    DIRECTION: tl.constexpr = _UP if INSET == 0 else _NEAREST
    if PAGED:
        unit = page[1] * (2.0 ** (1 - BITS))
        stored, number = _round_units(wanted, unit, DIRECTION)
        return stored, unit * number
    else:
        return _round_half(wanted, DIRECTION)


@triton.jit
def levels(low, high, means, salient, page, TILE: tl.constexpr):
    """Stored start and step (int32), the start, and the reciprocal of the step.

    ``means``: of the lower and of the upper class, if there are 1-bit codes by these. ``page``:
    minimum and scale, if scales are bytes.
    """
    PAGED: tl.constexpr = TILE.page_groups > 0
    LOW: tl.constexpr = TILE.low_bits
    HIGH: tl.constexpr = TILE.high_bits
    stored_start, start = _start(low, high, means[0], page, TILE.low_inset, PAGED)
    if TILE.high_inset != TILE.low_inset:
        other, other_start = _start(low, high, means[0], page, TILE.high_inset, PAGED)
        stored_start = tl.where(salient, other, stored_start)
        start = tl.where(salient, other_start, start)
    stored_step, step = _step(low, high, means[1], start, page, LOW, TILE.low_inset, PAGED)
    if HIGH != LOW:
        other, other_step = _step(low, high, means[1], start, page, HIGH, TILE.high_inset, PAGED)
        stored_step = tl.where(salient, other, stored_step)
        step = tl.where(salient, other_step, step)
    return stored_start, stored_step, start, _reciprocal(step, TILE.fast)
