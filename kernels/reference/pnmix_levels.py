"""Scales of PN-Mix: what start and step a group gets, and how they are rounded to be stored.

The element of code q is ``start + step * q``. All arithmetic is float32, every operation rounded to
nearest even by itself; arrays may have any shape, one entry for each group and channel.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

# NumPy's stubs lose the width of unsigned integers in arithmetic; the names keep it for readers
U16: TypeAlias = NDArray[Any]
F32: TypeAlias = NDArray[Any]
Bits: TypeAlias = NDArray[Any]

#: From this magnitude on (and for infinities and NaN) a group is stored as it is: the range of all
#: smaller ones fits FP16. (So do fitted levels: pnmix_fit.MIN_START.)
MAX_EXPONENT = 142
#: A page of a smaller range has no scale: the reciprocal of its steps could overflow.
MIN_PAGE_SCALE = np.float32(2.0**-64)
#: By bits of a code that is not fitted, how far from its ends the first and last level lie, as a
#: part of the range: measured by attention KL. Levels in the middles of equal cells (half a cell)
#: are best for 2 bits; with more bits what counts are the few elements at the ends.
INSETS = {2: 1 / 8, 3: 1 / 32}


class Grid(Protocol):
    """Scales that can be stored. Both functions return what is stored, and its float32 value."""

    def start(self, value: F32, down: Bits) -> tuple[NDArray[Any], F32]:
        """The nearest start, or where ``down`` the next one that is not above."""
        ...

    def step(self, value: F32, up: Bits) -> tuple[NDArray[Any], F32]:
        """The nearest step, or where ``up`` the next one that is not below."""
        ...


class Levels(NamedTuple):
    """Stored scales and their values."""

    stored_start: NDArray[Any]
    stored_step: NDArray[Any]
    start: F32
    step: F32


class Wanted(NamedTuple):
    """Start and step where levels have been fitted (``chosen``)."""

    start: F32
    step: F32
    chosen: NDArray[np.bool_]


def inverse(step: F32) -> F32:
    """What differences are multiplied by to become codes; 0 where all codes are 0."""
    return _divide(np.float32(1), step)


def levels(
    low: F32, high: F32, bits: Bits, rule: str, grid: Grid, fitted: Wanted | None = None
) -> Levels:
    """Scales for codes of ``bits`` (integers, to broadcast). ``rule``: "best" or "minmax".

    ``low``, ``high``: least and greatest element of each group and channel, float32. With "best",
    levels are those ``fitted``, or the first and last code of 2 and 3 bits stand for what lies
    :data:`INSETS` of the range within its ends. Otherwise they stand for the ends.
    """
    bits = np.broadcast_to(bits, low.shape)
    inset = np.select([bits == n for n in INSETS], [*INSETS.values()])
    inset = np.where(rule == "best", inset, 0)
    width = high - low
    margin = width * inset.astype(np.float32)
    last = ((1 << bits) - 1).astype(np.float32)
    chosen: Any = np.bool_(False) if fitted is None else fitted.chosen
    by_ends = (inset == 0) & ~chosen
    wanted = low + margin if fitted is None else np.where(chosen, fitted.start, low + margin)
    stored_start, start = grid.start(wanted, by_ends)
    span = np.where(by_ends, high - start, width - margin * np.float32(2))
    wanted = span / last if fitted is None else np.where(chosen, fitted.step, span / last)
    stored_step, step = grid.step(np.maximum(wanted, np.float32(0)), by_ends)
    return Levels(stored_start, stored_step, start, step)


class HalfGrid:
    """FP16."""

    def start(self, value: F32, down: Bits) -> tuple[NDArray[Any], F32]:
        nearest = value.astype(np.float16)
        # what lies below the least number is not wanted
        with np.errstate(over="ignore"):
            lower = np.nextafter(nearest, np.float16(-np.inf))
        return self._stored(np.where(down & (nearest > value), lower, nearest))

    def step(self, value: F32, up: Bits) -> tuple[NDArray[Any], F32]:
        nearest = value.astype(np.float16)
        higher = np.nextafter(nearest, np.float16(np.inf))
        return self._stored(np.where(up & (nearest < value), higher, nearest))

    @staticmethod
    def _stored(value: NDArray[Any]) -> tuple[NDArray[Any], F32]:
        return value.view(np.uint16), value.astype(np.float32)


class PageGrid:
    """Bytes within the range of a page.

    ``minimum``, ``scale``: of the page, float32, to broadcast over its groups. A start is
    ``minimum + scale * byte``, a step ``scale * byte / 2^(bits - 1)``.
    """

    def __init__(self, minimum: F32, scale: F32, bits: Bits) -> None:
        self._minimum = minimum
        self._scale = scale
        self._unit = scale * part(bits)

    def start(self, value: F32, down: Bits) -> tuple[NDArray[Any], F32]:
        units = _divide(value - self._minimum, self._scale)
        stored = np.where(down, np.floor(units), np.rint(units)).clip(0, 255)
        return stored.astype(np.uint8), page_start(self._minimum, self._scale, stored)

    def step(self, value: F32, up: Bits) -> tuple[NDArray[Any], F32]:
        units = _divide(value, self._unit)
        stored = np.where(up, np.ceil(units), np.rint(units)).clip(0, 255)
        return stored.astype(np.uint8), self._unit * stored.astype(np.float32)


def part(bits: Bits) -> F32:
    """What part of its page's scale is the unit of a step: 2^(1 - bits)."""
    power: F32 = np.ldexp(np.float32(1), 1 - bits)
    return power


def page_start(minimum: F32, scale: F32, stored: NDArray[Any]) -> F32:
    """A start from its byte."""
    start: F32 = minimum + scale * stored.astype(np.float32)
    return start


def page_scale(low: F32, high: F32) -> U16:
    """BF16 scale of a page from its range: a part of 255, rounded up; 0 for ranges near 0."""
    spread = (high - low) / np.float32(255)
    rounded = ((spread.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    return np.where(spread < MIN_PAGE_SCALE, np.uint16(0), rounded)


def _divide(value: Any, by: F32) -> F32:
    """The quotient; 0 where the divisor is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(by == 0, np.float32(0), value / by)
