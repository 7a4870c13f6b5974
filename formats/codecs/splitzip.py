"""SplitZip on disk: configuration, streams, codebook (spec/splitzip.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs.spans import Span, check_fits, place
from kvz.formats.errors import InvalidField

CODEBOOK_SIZE = 16
#: Elements of one block: escape positions count from its start.
BLOCK_LEN = 8192
ESCAPE_NBYTES = 3


@dataclass(frozen=True, slots=True)
class SplitzipConfig:
    """SplitZip has no options."""

    def to_dict(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SplitzipConfig:
        """Raises InvalidField."""
        if fields:
            raise InvalidField(f"splitzip config must be empty, got {dict(fields)}")
        return cls()


@lru_cache(maxsize=256)
def fixed_streams(num_elements: int) -> tuple[Span, ...]:
    """The streams whose sizes follow from the number of elements."""
    return place(
        [
            ("sign_mantissa", num_elements),
            ("codes", -(-num_elements // 2)),
            ("offsets", 4 * (-(-num_elements // BLOCK_LEN) + 1)),
        ]
    )


def escape_streams(num_elements: int, num_escapes: int) -> tuple[Span, ...]:
    sizes = [("positions", 2 * num_escapes), ("exponents", num_escapes)]
    return place(sizes, fixed_streams(num_elements)[-1].end)


def streams(num_elements: int, num_escapes: int, payload_nbytes: int) -> list[Span]:
    """All streams of an encoded section. Raises InvalidField when its length does not fit."""
    spans = [*fixed_streams(num_elements), *escape_streams(num_elements, num_escapes)]
    check_fits(spans, payload_nbytes)
    if spans[-1].end != payload_nbytes:
        raise InvalidField(
            f"section with {num_escapes} escapes must have {spans[-1].end} bytes, "
            f"has {payload_nbytes}"
        )
    return spans


def read_num_escapes(payload: NDArray[np.uint8], num_elements: int) -> int:
    """The number of escapes, as the last offset says. Raises InvalidField."""
    spans = fixed_streams(num_elements)
    check_fits(spans, payload.size)
    end = spans[-1].end
    return int.from_bytes(payload[end - 4 : end].tobytes(), "little")


def max_payload_nbytes(num_elements: int) -> int:
    return escape_streams(num_elements, num_elements)[-1].end


def parse_codebook(payload: bytes) -> NDArray[np.uint8]:
    """The 16 exponents, ascending. Raises InvalidField."""
    codebook = np.frombuffer(payload, np.uint8)
    if codebook.size != CODEBOOK_SIZE or (np.diff(codebook.astype(np.int64)) <= 0).any():
        raise InvalidField(f"splitzip codebook must be {CODEBOOK_SIZE} ascending exponents")
    return codebook
