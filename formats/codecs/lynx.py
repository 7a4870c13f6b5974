"""Lynx on disk: configuration, level tables, streams (spec/lynx.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs.spans import Span, check_fits, place, residual_offset
from kvz.formats.errors import InvalidField

GROUPINGS = ("channel", "token")
#: Pages of more tokens gain nothing; it keeps every count of a page inside 16 bits.
MAX_PAGE_TOKENS = 1 << 15
MAX_EXACT_TOKENS = 1 << 10
#: One unit of the codes' integer arithmetic is this part of a page's scale.
UNIT = 2.0**-24
#: A level of the companded code in these units when its magnitude is that of the group's scale.
LEVEL_ONE = 1 << 16

NUM_MAGNITUDES = 121
_NUM_ANCHOR_MAGNITUDES = 8
_ANCHOR_MIDPOINTS = (2, 24, 40, 56, 72, 88, 104, 120, 135, 151, 167, 183, 199, 215, 231, 253)

Shape = tuple[int, int, int]
Table = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Companding:
    """Levels of the companded code, Lynx (arXiv 2607.01831), section 3.

    ``full``: for each magnitude 0..120 its level, in units of :data:`LEVEL_ONE` · ``anchor``: the
    level of each of the 8 magnitudes of an anchor · ``alpha``: where they come from; decoding does
    not use it.
    """

    alpha: float
    full: tuple[int, ...]
    anchor: tuple[int, ...]

    @classmethod
    def of(cls, alpha: float) -> Companding:
        """Raises ValueError unless ``alpha`` is positive and finite."""
        if not (0 < alpha < 1e6):
            raise ValueError(f"alpha must be between 0 and 1e6, got {alpha}")
        levels = np.expm1(np.log1p(alpha) * np.arange(NUM_MAGNITUDES) / 120) / alpha
        full = tuple(int(v) for v in np.rint(levels * LEVEL_ONE))
        return cls(float(alpha), full, full[::16])

    def thresholds(self) -> NDArray[np.float32]:
        """Smallest magnitude ``|z|`` that is coded as 1, 2, ..., 120: float32[120]."""
        middles = np.arange(NUM_MAGNITUDES - 1) + 0.5
        bounds = np.expm1(np.log1p(self.alpha) * middles / 120) / self.alpha
        rounded: NDArray[np.float32] = bounds.astype(np.float32)
        return rounded

    def check(self) -> None:
        """Raises InvalidField."""
        lengths = (len(self.full), len(self.anchor))
        if lengths != (NUM_MAGNITUDES, _NUM_ANCHOR_MAGNITUDES):
            raise InvalidField(f"lynx levels: {lengths[0]} and {lengths[1]}, must be 121 and 8")
        if not all(type(v) is int and 0 <= v <= LEVEL_ONE for v in (*self.full, *self.anchor)):
            raise InvalidField(f"lynx levels must be integers from 0 to {LEVEL_ONE}")
        if type(self.alpha) not in (int, float) or not 0 < self.alpha < 1e6:
            raise InvalidField(f"lynx alpha must be a number between 0 and 1e6, got {self.alpha!r}")


@dataclass(frozen=True)
class LynxConfig:
    """What the head records.

    ``page_tokens``: tokens that share a minimum and a scale · ``group_tokens``: tokens of a page
    that share an offset and a step · ``exact_tokens``: first tokens of the tensor that are stored
    as they are · ``grouping``: what a page runs along · ``companding``: None for the linear code.
    """

    page_tokens: int = 256
    group_tokens: int = 32
    exact_tokens: int = 4
    grouping: str = "channel"
    companding: Companding | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.group_tokens <= self.page_tokens <= MAX_PAGE_TOKENS:
            raise ValueError(
                f"1 <= group_tokens <= page_tokens <= {MAX_PAGE_TOKENS} must hold, got "
                f"{self.group_tokens} and {self.page_tokens}"
            )
        if self.page_tokens % self.group_tokens:
            raise ValueError(
                f"page_tokens {self.page_tokens} is no multiple of group_tokens {self.group_tokens}"
            )
        if not 0 <= self.exact_tokens <= MAX_EXACT_TOKENS:
            raise ValueError(
                f"exact_tokens must be 0 to {MAX_EXACT_TOKENS}, got {self.exact_tokens}"
            )
        if self.grouping not in GROUPINGS:
            raise ValueError(f"grouping must be one of {GROUPINGS}, got {self.grouping!r}")

    @property
    def by_token(self) -> bool:
        """Pages run along the channels of a token instead of along the tokens of a channel."""
        return self.grouping == "token"

    def coded_shape(self, shape: Shape) -> Shape:
        """A chunk's shape with the axis along which pages run in the middle."""
        outer, tokens, inner = shape
        return (outer, inner, tokens) if self.by_token else shape

    @cached_property
    def table(self) -> Table:
        """int32[256]: by code (anchor << 4 | residual), how many steps it adds to the offset."""
        if self.companding is None:
            return np.arange(256, dtype=np.int32) * 256
        anchor, residual = np.divmod(np.arange(256), 16)
        negative = anchor >= 8
        magnitude = 16 * np.where(negative, 15 - anchor, anchor) + residual - 7
        levels = np.array(self.companding.full, np.int32)[magnitude.clip(0, NUM_MAGNITUDES - 1)]
        signed: Table = np.where(negative, -levels, levels).astype(np.int32)
        return signed

    @cached_property
    def anchor_table(self) -> Table:
        """int32[16]: the same when only the anchor is known."""
        if self.companding is None:
            return np.array(_ANCHOR_MIDPOINTS, np.int32) * 256
        levels = np.array(self.companding.anchor, np.int32)
        return np.concatenate([levels, -levels[::-1]])

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "page_tokens": self.page_tokens,
            "group_tokens": self.group_tokens,
            "exact_tokens": self.exact_tokens,
            "grouping": self.grouping,
            "companding": None,
        }
        if self.companding is not None:
            fields["companding"] = {
                "alpha": self.companding.alpha,
                "full": list(self.companding.full),
                "anchor": list(self.companding.anchor),
            }
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LynxConfig:
        """Raises InvalidField."""
        names = ("page_tokens", "group_tokens", "exact_tokens", "grouping", "companding")
        if fields.keys() != set(names):
            raise InvalidField(f"lynx config needs {', '.join(names)}, got {', '.join(fields)}")
        numbers = [fields[name] for name in names[:3]]
        if not all(type(number) is int for number in numbers):
            raise InvalidField(f"lynx config: {', '.join(names[:3])} must be integers")
        stored = fields["companding"]
        companding = None
        if stored is not None:
            if not isinstance(stored, dict) or stored.keys() != {"alpha", "full", "anchor"}:
                raise InvalidField("lynx config: companding needs alpha, full and anchor")
            if not isinstance(stored["full"], list) or not isinstance(stored["anchor"], list):
                raise InvalidField("lynx config: levels must be lists")
            companding = Companding(stored["alpha"], tuple(stored["full"]), tuple(stored["anchor"]))
            companding.check()
        try:
            page_tokens, group_tokens, exact_tokens = numbers
            return cls(page_tokens, group_tokens, exact_tokens, fields["grouping"], companding)
        except (ValueError, TypeError) as error:
            raise InvalidField(f"lynx config: {error}") from None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Counts that follow from a chunk's shape and its place.

    ``shape``: outer, positions along a page's axis, channels across it · ``pages``, ``groups``: of
    one outer index · ``half``: bytes of a position's 4-bit codes · ``exact``: uncoded first tokens.
    """

    shape: Shape
    pages: int
    groups: int
    half: int
    exact: int

    @classmethod
    def of(cls, shape: Shape, config: LynxConfig, *, is_first: bool) -> Geometry:
        """``is_first``: the chunk starts at token 0 of its tensor."""
        coded = config.coded_shape(shape)
        pages = -(-coded[1] // config.page_tokens)
        groups = -(-coded[1] // config.group_tokens)
        exact = min(config.exact_tokens, shape[1]) if is_first else 0
        return cls(coded, pages, groups, -(-coded[2] // 2), exact)


@lru_cache(maxsize=256)
def fixed_streams(shape: Shape, config: LynxConfig, *, is_first: bool) -> tuple[Span, ...]:
    """The streams of an ANCHOR section whose sizes follow from the chunk's shape and place."""
    geometry = Geometry.of(shape, config, is_first=is_first)
    outer, length, channels = geometry.shape
    return place(
        (
            ("exact", 2 * shape[0] * geometry.exact * shape[2]),
            ("pages", 4 * outer * geometry.pages * channels),
            ("groups", 2 * outer * geometry.groups * channels),
            ("flags", outer * geometry.pages),
            ("anchors", outer * length * geometry.half),
        )
    )


def raw_nbytes(flags: NDArray[np.uint8], shape: Shape, config: LynxConfig) -> int:
    """Bytes of the pages that ``flags`` (uint8[outer * pages]) marks. Raises InvalidField."""
    if (flags > 1).any():
        raise InvalidField(f"lynx: page flag {int(flags.max())}, must be 0 or 1")
    outer, length, channels = config.coded_shape(shape)
    marked = flags.reshape(outer, -1)
    last = length - (marked.shape[1] - 1) * config.page_tokens
    positions = config.page_tokens * int(marked[:, :-1].sum()) + last * int(marked[:, -1].sum())
    return 2 * positions * channels


def streams(
    payload: NDArray[np.uint8], shape: Shape, config: LynxConfig, *, is_first: bool
) -> list[Span]:
    """All streams of an ANCHOR section at the front of ``payload``. Raises InvalidField."""
    fixed = fixed_streams(shape, config, is_first=is_first)
    check_fits(fixed, payload.size)
    flags = payload[fixed[3].offset : fixed[3].end]
    spans = [*fixed, *place([("raw", raw_nbytes(flags, shape, config))], fixed[-1].end)]
    check_fits(spans, payload.size)
    return spans


def residual_nbytes(shape: Shape, config: LynxConfig) -> int:
    """Length of a RESIDUAL section."""
    outer, length, channels = config.coded_shape(shape)
    return outer * length * -(-channels // 2)


def max_payload_nbytes(shape: Shape, config: LynxConfig) -> int:
    """The largest possible anchor, padding and residual."""
    fixed = fixed_streams(shape, config, is_first=True)
    anchor = place([("raw", 2 * shape[0] * shape[1] * shape[2])], fixed[-1].end)[-1].end
    return residual_offset(anchor) + residual_nbytes(shape, config)
