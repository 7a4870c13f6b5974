"""Streams inside an encoded section: one after the other, each at a multiple of 16 bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.formats.errors import InvalidField

STREAM_ALIGNMENT = 16
#: Where a residual starts in memory that holds an anchor before it.
RESIDUAL_ALIGNMENT = 64


class Span(NamedTuple):
    """Where a stream lies in a section's payload, in bytes."""

    name: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def place(sizes: Sequence[tuple[str, int]], start: int = 0) -> tuple[Span, ...]:
    """Lay streams out in order from ``start``; the bytes between them are zero."""
    spans = []
    position = start
    for name, nbytes in sizes:
        position = -(-position // STREAM_ALIGNMENT) * STREAM_ALIGNMENT
        spans.append(Span(name, position, nbytes))
        position += nbytes
    return tuple(spans)


def residual_offset(anchor_nbytes: int) -> int:
    """Where the residual starts in a payload that holds both."""
    return -(-anchor_nbytes // RESIDUAL_ALIGNMENT) * RESIDUAL_ALIGNMENT


def check_fits(spans: Sequence[Span], payload_nbytes: int) -> None:
    """Raises InvalidField when the fixed streams alone are longer than the payload."""
    if spans and spans[-1].end > payload_nbytes:
        last = spans[-1]
        raise InvalidField(
            f"stream {last.name} needs bytes {last.offset}..{last.end}, "
            f"the section has {payload_nbytes}"
        )


def clear_gaps(payload: NDArray[np.uint8], spans: Sequence[Span]) -> None:
    """Zero the bytes between streams, so that the same input always gives the same payload."""
    for span, follower in itertools.pairwise(spans):
        payload[span.end : follower.offset] = 0
