"""Byte planes + Zstandard on disk: configuration and streams (spec/zstd.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs.spans import Span
from kvz.formats.errors import InvalidField

#: Set in a plane's length word when the plane is stored as it is.
STORED_FLAG = 0x8000_0000
LENGTH_NBYTES = 4


@dataclass(frozen=True, slots=True)
class ZstdConfig:
    """``level`` steers the encoder only; a decoder does not need it.

    Level 1 is the default because higher ones find matches that are not there: on the exponents of
    real captures it is both the smallest and the fastest up to level 9.
    """

    level: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.level, int) or not 1 <= self.level <= 22:
            raise ValueError(f"level must be 1..22, got {self.level!r}")

    def to_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ZstdConfig:
        """Raises InvalidField."""
        if fields.keys() != {"level"}:
            raise InvalidField(f"zstd config needs level, got {dict(fields)}")
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise InvalidField(f"zstd config: {error}") from None


def streams(payload: NDArray[np.uint8], num_planes: int) -> list[tuple[Span, bool]]:
    """Each plane's bytes and whether they are stored as they are. Raises InvalidField."""
    position = LENGTH_NBYTES * num_planes
    if payload.size < position:
        raise InvalidField(f"section has {payload.size} bytes, {num_planes} planes need {position}")
    words = payload[:position].view("<u4")
    planes = []
    for plane, word in enumerate(words.tolist()):
        nbytes = word & ~STORED_FLAG
        planes.append((Span(f"plane{plane}", position, nbytes), bool(word & STORED_FLAG)))
        position += nbytes
    if position != payload.size:
        raise InvalidField(f"planes end at byte {position}, the section at {payload.size}")
    return planes
