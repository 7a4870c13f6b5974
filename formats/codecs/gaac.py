"""GAAC on disk: configuration, streams, codebook (spec/gaac.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs.spans import Span, check_fits, place
from kvz.formats.errors import InvalidField

ROWS = 8
WINDOW_SETS = ((3, 4), (2, 3, 4))
AXES = ("token", "channel")
#: Elements of one escape block: one offset is stored for each.
BLOCK_ELEMENTS = 4096
#: Escape bytes of a raw group when the 2-bit window is allowed: planes 2-7.
MAX_ESCAPES_PER_GROUP = 6

#: First byte of a codebook: its bases are shared by all channels of a head, or there is one per
#: channel.
_PER_HEAD, _PER_CHANNEL = 1, 2

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class GaacConfig:
    """``windows``: widths in bits besides raw · ``axis``: what runs along a group of 8."""

    windows: tuple[int, ...] = (2, 3, 4)
    axis: str = "token"

    def __post_init__(self) -> None:
        if self.windows not in WINDOW_SETS:
            raise ValueError(f"windows must be one of {WINDOW_SETS}, got {self.windows}")
        if self.axis not in AXES:
            raise ValueError(f"axis must be one of {AXES}, got {self.axis!r}")

    @property
    def narrow(self) -> bool:
        """The 2-bit window is allowed."""
        return 2 in self.windows

    @property
    def channel_axis(self) -> bool:
        return self.axis == "channel"

    def to_dict(self) -> dict[str, Any]:
        return {"windows": list(self.windows), "axis": self.axis}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> GaacConfig:
        """Raises InvalidField."""
        if fields.keys() != {"windows", "axis"} or not isinstance(fields["windows"], list):
            raise InvalidField(f"gaac config needs windows and axis, got {dict(fields)}")
        # 2.0 equals 2 but cannot shift
        if not all(type(width) is int for width in fields["windows"]):
            raise InvalidField(f"gaac windows must be integers, got {fields['windows']}")
        try:
            return cls(tuple(fields["windows"]), fields["axis"])
        except (ValueError, TypeError) as error:
            raise InvalidField(f"gaac config: {error}") from None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Counts that follow from the shape of a chunk."""

    tiles: int
    columns: int

    @classmethod
    def of(cls, shape: Shape, config: GaacConfig) -> Geometry:
        outer, tokens, inner = shape
        if config.channel_axis:
            return cls(outer * tokens, -(-inner // ROWS))
        return cls(outer * -(-tokens // ROWS), inner)

    @property
    def block_tiles(self) -> int:
        return max(1, BLOCK_ELEMENTS // (ROWS * self.columns))

    @property
    def num_groups(self) -> int:
        return self.tiles * self.columns

    @property
    def num_blocks(self) -> int:
        return -(-self.tiles // self.block_tiles)


@lru_cache(maxsize=256)
def fixed_streams(shape: Shape, config: GaacConfig) -> tuple[Span, ...]:
    """The streams before the escapes; their sizes follow from the shape."""
    geometry = Geometry.of(shape, config)
    return place(
        (
            ("sign_mantissa", shape[0] * shape[1] * shape[2]),
            ("low", 2 * geometry.num_groups),
            ("plane2", 0 if config.narrow else geometry.num_groups),
            ("tags", geometry.tiles * 2 * -(-geometry.columns // 8)),
            ("offsets", 4 * geometry.num_blocks),
        )
    )


def streams(shape: Shape, config: GaacConfig, payload_nbytes: int) -> list[Span]:
    """All streams of an encoded section. Raises InvalidField when it is too short."""
    spans = fixed_streams(shape, config)
    spans += place([("escapes", 0)], spans[-1].end)
    check_fits(spans, payload_nbytes)
    return [*spans[:-1], Span("escapes", spans[-1].offset, payload_nbytes - spans[-1].offset)]


def max_payload_nbytes(shape: Shape, config: GaacConfig) -> int:
    """Size of the largest possible encoded section."""
    fixed_end = streams(shape, config, 1 << 62)[-1].offset
    return fixed_end + MAX_ESCAPES_PER_GROUP * Geometry.of(shape, config).num_groups


def build_codebook(bases: NDArray[np.uint8], config: GaacConfig) -> bytes:
    """``bases`` uint8[3, outer, inner], or uint8[3, outer, 1] for one base per head."""
    kind = _PER_HEAD if bases.shape[2] == 1 else _PER_CHANNEL
    return bytes([kind]) + bases[3 - len(config.windows) :].tobytes()


def parse_codebook(payload: bytes, config: GaacConfig, outer: int, inner: int) -> NDArray[np.uint8]:
    """Window bases uint8[3, outer, inner] (base 0 for an absent window). Raises InvalidField."""
    kind = payload[0] if payload else 0
    if kind not in (_PER_HEAD, _PER_CHANNEL):
        raise InvalidField(f"gaac codebook of kind {kind}, must be {_PER_HEAD} or {_PER_CHANNEL}")
    num_windows = len(config.windows)
    channels = 1 if kind == _PER_HEAD else inner
    expected = 1 + num_windows * outer * channels
    if len(payload) != expected:
        raise InvalidField(f"gaac codebook has {len(payload)} bytes, must have {expected}")
    stored = np.frombuffer(payload, np.uint8, offset=1).reshape(num_windows, outer, channels)
    limits = 256 - (1 << np.array(config.windows))
    if (stored > limits[:, None, None]).any():
        raise InvalidField("gaac codebook holds a window that reaches beyond exponent 255")
    bases = np.zeros((3, outer, inner), np.uint8)
    bases[3 - num_windows :] = stored
    return bases
