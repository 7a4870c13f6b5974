"""Scales of PN-Mix in Triton: the operations of kernels/reference/pnmix_levels.py, one by one."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import half_float
from kvz.kernels.gpu.pnmix_tiles import ALWAYS, SOMETIMES

_ALWAYS, _SOMETIMES = tl.constexpr(ALWAYS), tl.constexpr(SOMETIMES)
#: 1.5 * 2**23: adding it rounds to an integer, to even, and leaves that in the low bits.
ROUND = tl.constexpr(12582912.0)
_MIN_PAGE_SCALE = tl.constexpr(2.0**-64)
_DOWN, _NEAREST, _UP = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)


@triton.jit
def reciprocal(value, FAST: tl.constexpr):
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
def _store_start(wanted, page, DIRECTION: tl.constexpr, PAGED: tl.constexpr):
    """Stored start and its value."""
    if PAGED:
        minimum, scale = page
        stored, number = _round_units(wanted - minimum, scale, DIRECTION)
        return stored, minimum + scale * number
    else:
        return _round_half(wanted, DIRECTION)


@triton.jit
def _store_step(wanted, page, DIRECTION: tl.constexpr, BITS: tl.constexpr, PAGED: tl.constexpr):
    """Stored step and its value."""
    wanted = tl.maximum(wanted, 0.0)
    if PAGED:
        unit = page[1] * (2.0 ** (1 - BITS))
        stored, number = _round_units(wanted, unit, DIRECTION)
        return stored, unit * number
    else:
        return _round_half(wanted, DIRECTION)


@triton.jit
def _start(low, high, fit, page, FITTING: tl.constexpr, INSET: tl.constexpr, PAGED: tl.constexpr):
    is_fitted, fitted, _ = fit
    if FITTING == _ALWAYS:
        return _store_start(fitted, page, _NEAREST, PAGED)
    elif INSET != 0:
        wanted = low + (high - low) * INSET
        if FITTING == _SOMETIMES:
            wanted = tl.where(is_fitted, fitted, wanted)
        return _store_start(wanted, page, _NEAREST, PAGED)
    else:
        stored, start = _store_start(low, page, _DOWN, PAGED)
        if FITTING == _SOMETIMES:
            other, other_start = _store_start(fitted, page, _NEAREST, PAGED)
            stored = tl.where(is_fitted, other, stored)
            start = tl.where(is_fitted, other_start, start)
        return stored, start


@triton.jit
def _step(
    low, high, start, fit, page,
    BITS: tl.constexpr, FITTING: tl.constexpr, INSET: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    LAST: tl.constexpr = float((1 << BITS) - 1)
    is_fitted, _, fitted = fit
    if FITTING == _ALWAYS:
        return _store_step(fitted, page, _NEAREST, BITS, PAGED)
    elif INSET != 0:
        wanted = tl.div_rn((high - low) - (high - low) * INSET * 2.0, LAST)
        if FITTING == _SOMETIMES:
            wanted = tl.where(is_fitted, fitted, wanted)
        return _store_step(wanted, page, _NEAREST, BITS, PAGED)
    else:
        stored, step = _store_step(tl.div_rn(high - start, LAST), page, _UP, BITS, PAGED)
        if FITTING == _SOMETIMES:
            other, other_step = _store_step(fitted, page, _NEAREST, BITS, PAGED)
            stored = tl.where(is_fitted, other, stored)
            step = tl.where(is_fitted, other_step, step)
        return stored, step


@triton.jit
def levels(low, high, fit, salient, page, TILE: tl.constexpr):
    """Stored start and step (int32), the start, and the reciprocal of the step.

    ``fit``: whether the outer index has a salient channel, and fitted start and step, if levels
    are. ``page``: minimum and scale, if scales are bytes.
    """
    PAGED: tl.constexpr = TILE.page_groups > 0
    LOW: tl.constexpr = TILE.low_bits
    HIGH: tl.constexpr = TILE.high_bits
    FIT_LOW: tl.constexpr = TILE.low_fitting
    FIT_HIGH: tl.constexpr = TILE.high_fitting
    IN_LOW: tl.constexpr = TILE.low_inset
    IN_HIGH: tl.constexpr = TILE.high_inset
    stored_start, start = _start(low, high, fit, page, FIT_LOW, IN_LOW, PAGED)
    if HIGH != LOW:
        other, other_start = _start(low, high, fit, page, FIT_HIGH, IN_HIGH, PAGED)
        stored_start = tl.where(salient, other, stored_start)
        start = tl.where(salient, other_start, start)
    stored_step, step = _step(low, high, start, fit, page, LOW, FIT_LOW, IN_LOW, PAGED)
    if HIGH != LOW:
        other, other_step = _step(low, high, start, fit, page, HIGH, FIT_HIGH, IN_HIGH, PAGED)
        stored_step = tl.where(salient, other, stored_step)
        step = tl.where(salient, other_step, step)
    return stored_start, stored_step, start, reciprocal(step, TILE.fast)
