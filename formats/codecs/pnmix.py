"""PN-Mix on disk: configurations, mask, streams (spec/pnmix.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs.spans import Span, check_fits, place
from kvz.formats.errors import InvalidField

PAIRINGS = ("half", "interleaved", "none")
TAILS = ("exact", "coded")
LEVEL_RULES = ("best", "minmax")
VALUE_BITS = (2, 4, 8)
MAX_BITS = 8
#: Products of an encoder's weighted sums over a group fit in 64 bits.
MAX_GROUP_TOKENS = 1 << 10
MAX_PAGE_TOKENS = 1 << 15
MAX_SINK_TOKENS = 1 << 10
#: Tokens whose bits share a byte.
OCTET = 8

Shape = tuple[int, int, int]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class _Config:
    """What keys and values have in common.

    group_tokens: tokens of a group, counted from the first coded token of a chunk. sink_tokens:
    first tokens of the tensor that are stored as they are. tail: whether the tokens after the last
    whole group of the tensor are stored as they are, too. levels: how the encoder chose scales.
    """

    group_tokens: int = 128
    sink_tokens: int = 32
    tail: str = "exact"
    levels: str = "best"

    role: ClassVar[str]

    def __post_init__(self) -> None:
        _check_range("group_tokens", self.group_tokens, 1, MAX_GROUP_TOKENS)
        _check_range("sink_tokens", self.sink_tokens, 0, MAX_SINK_TOKENS)
        _check_choice("tail", self.tail, TAILS)
        _check_choice("levels", self.levels, LEVEL_RULES)

    def to_dict(self) -> dict[str, Any]:
        return {"role": self.role, **asdict(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Raises InvalidField."""
        given = {name: value for name, value in stored.items() if name != "role"}
        types = {field.name: str(field.type) for field in fields(cls)}
        if given.keys() != types.keys():
            raise InvalidField(
                f"pnmix config of a {cls.role} needs {', '.join(types)}, got {', '.join(given)}"
            )
        for name, value in given.items():
            if types[name] == "float" and type(value) is int:
                given[name] = value = float(value)  # JSON does not tell 1 from 1.0
            if type(value).__name__ not in types[name].replace("None", "NoneType").split(" | "):
                raise InvalidField(f"pnmix config: {name} must be {types[name]}, got {value!r}")
        try:
            return cls(**given)
        except ValueError as error:
            raise InvalidField(f"pnmix config: {error}") from None


@dataclass(frozen=True, kw_only=True)
class KeyConfig(_Config):
    """What the head records of keys.

    high_bits, low_bits: of a code in channels of salient pairs and in the others. page_tokens:
    tokens that share a BF16 range within which scales are bytes; None: scales are FP16. pairing,
    rotary_dim: which channels are pairs; channels from rotary_dim on are pairs of one. salient,
    criterion, prefill_tokens: how the encoder chose the mask.
    """

    high_bits: int = 3
    low_bits: int = 1
    page_tokens: int | None = None
    pairing: str = "half"
    rotary_dim: int = 0
    salient: float = 0.5
    criterion: str = "qk_norm"
    prefill_tokens: int | None = None

    role = "key"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range("high_bits", self.high_bits, 1, MAX_BITS)
        _check_range("low_bits", self.low_bits, 1, self.high_bits)
        _check_choice("pairing", self.pairing, PAIRINGS)
        if self.rotary_dim < 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and >= 0, got {self.rotary_dim}")
        if (self.pairing == "none") != (self.rotary_dim == 0):
            raise ValueError(
                f"pairing {self.pairing} does not go with rotary_dim {self.rotary_dim}"
            )
        if not 0 <= self.salient <= 1:
            raise ValueError(f"salient must be 0 to 1, got {self.salient}")
        if self.prefill_tokens is not None and self.prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, got {self.prefill_tokens}")
        if self.page_tokens is not None:
            _check_range("page_tokens", self.page_tokens, self.group_tokens, MAX_PAGE_TOKENS)
            if self.page_tokens % self.group_tokens:
                raise ValueError(
                    f"page_tokens {self.page_tokens} is no multiple of group_tokens "
                    f"{self.group_tokens}"
                )

    @property
    def page_groups(self) -> int | None:
        """Groups of a page."""
        return None if self.page_tokens is None else self.page_tokens // self.group_tokens

    def num_pairs(self, inner: int) -> int:
        """Pairs of a head of ``inner`` channels, those of one channel included."""
        return inner - self.rotary_dim // 2

    def channels_of(self, pairs: Mask) -> Mask:
        """From bool[..., num_pairs] which channels belong to these pairs, bool[..., inner]."""
        half = self.rotary_dim // 2
        rotated, rest = pairs[..., :half], pairs[..., half:]
        if self.pairing == "interleaved":
            return np.concatenate([np.repeat(rotated, 2, axis=-1), rest], axis=-1)
        return np.concatenate([rotated, rotated, rest], axis=-1)


@dataclass(frozen=True, kw_only=True)
class ValueConfig(_Config):
    """What the head records of values: codes of ``bits`` per token and group of channels."""

    bits: int = 2
    group_channels: int = 64

    role = "value"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in VALUE_BITS:
            raise ValueError(f"bits must be one of {VALUE_BITS}, got {self.bits}")
        if self.group_channels < 1:
            raise ValueError(f"group_channels must be at least 1, got {self.group_channels}")

    def channel_groups(self, inner: int) -> int:
        return -(-inner // self.group_channels)


Config = KeyConfig | ValueConfig


def config_from_dict(stored: Mapping[str, Any]) -> Config:
    """Raises InvalidField."""
    roles: dict[Any, type[KeyConfig] | type[ValueConfig]] = {"key": KeyConfig, "value": ValueConfig}
    role = stored.get("role")
    if not isinstance(role, str) or role not in roles:
        raise InvalidField(f"pnmix config: role must be key or value, got {role!r}")
    return roles[role].from_dict(stored)


def build_mask(pairs: Mask) -> bytes:
    """The codebook section from bool[outer, num_pairs]."""
    return np.packbits(pairs, axis=-1, bitorder="little").tobytes()


def salient_channels(section: bytes, outer: int, inner: int, config: KeyConfig) -> Mask:
    """bool[outer, inner] from the codebook section. Raises InvalidField."""
    if config.rotary_dim > inner:
        raise InvalidField(f"pnmix: rotary_dim {config.rotary_dim} of a head of {inner} channels")
    return config.channels_of(_parse_mask(section, outer, config.num_pairs(inner)))


def _parse_mask(section: bytes, outer: int, num_pairs: int) -> Mask:
    row = -(-num_pairs // 8)
    if num_pairs < 1 or len(section) != outer * row:
        raise InvalidField(
            f"pnmix mask has {len(section)} bytes, {outer} heads of {num_pairs} pairs need "
            f"{outer * row}"
        )
    packed = np.frombuffer(section, np.uint8).reshape(outer, row)
    bits = np.unpackbits(packed, axis=-1, bitorder="little").astype(bool)
    if bits[:, num_pairs:].any():
        raise InvalidField("pnmix mask: a bit beyond the last pair is set")
    return bits[:, :num_pairs]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Counts that follow from a chunk's shape and its place in the tensor.

    ``first``, ``last``: exact tokens at its two ends · ``coded``: those between · ``groups`` and
    ``octets`` (runs of up to 8 tokens of a group) of one outer index.
    """

    shape: Shape
    first: int
    coded: int
    last: int
    groups: int
    octets: int

    @classmethod
    def of(cls, shape: Shape, config: Config, start: int, num_tokens: int) -> Geometry:
        """``start``: the chunk's first token, of ``num_tokens`` that the tensor has."""
        tokens, group = shape[1], config.group_tokens
        first = min(max(config.sink_tokens - start, 0), tokens)
        tail = max(num_tokens - config.sink_tokens, 0) % group if config.tail == "exact" else 0
        last = min(max(start + tokens - (num_tokens - tail), 0), tokens - first)
        coded = tokens - first - last
        whole, rest = divmod(coded, group)
        octets = whole * -(-group // OCTET) + -(-rest // OCTET)
        return cls(shape, first, coded, last, -(-coded // group), octets)


def _common(geometry: Geometry) -> list[tuple[str, int]]:
    outer, _, inner = geometry.shape
    exact = geometry.first + geometry.last
    return [("exact", 2 * outer * exact * inner), ("flags", outer * geometry.groups)]


@lru_cache(maxsize=256)
def key_streams(geometry: Geometry, config: KeyConfig, num_high: int) -> tuple[Span, ...]:
    """The streams whose sizes are known before decoding; ``raw`` follows.

    ``num_high``: channels of salient pairs, of all outer indices together.
    """
    outer, _, inner = geometry.shape
    scale_nbytes, pages = 2, 0
    if config.page_groups is not None:
        scale_nbytes, pages = 1, -(-geometry.groups // config.page_groups)
    return place(
        [
            *_common(geometry),
            ("pages", 4 * outer * pages * inner),
            ("scales", 2 * scale_nbytes * outer * geometry.groups * inner),
            ("low", geometry.octets * config.low_bits * outer * inner),
            ("high", geometry.octets * (config.high_bits - config.low_bits) * num_high),
        ]
    )


@lru_cache(maxsize=256)
def value_streams(geometry: Geometry, config: ValueConfig) -> tuple[Span, ...]:
    """The same for values."""
    outer, _, inner = geometry.shape
    return place(
        [
            *_common(geometry),
            ("scales", 4 * outer * geometry.coded * config.channel_groups(inner)),
            ("codes", geometry.octets * config.bits * outer * inner),
        ]
    )


def raw_nbytes(flags: U8, geometry: Geometry, config: Config) -> int:
    """Bytes of the groups that ``flags`` (uint8[outer * groups]) marks. Raises InvalidField."""
    if (flags > 1).any():
        raise InvalidField(f"pnmix: group flag {int(flags.max())}, must be 0 or 1")
    if not geometry.groups:
        return 0
    marked = flags.reshape(-1, geometry.groups)
    last = geometry.coded - (geometry.groups - 1) * config.group_tokens
    tokens = config.group_tokens * int(marked[:, :-1].sum()) + last * int(marked[:, -1].sum())
    return 2 * tokens * geometry.shape[2]


def with_raw(
    payload: U8, fixed: tuple[Span, ...], geometry: Geometry, config: Config
) -> tuple[Span, ...]:
    """All streams of a payload. Raises InvalidField unless they fill it exactly."""
    check_fits(fixed, payload.size)
    flags = payload[fixed[1].offset : fixed[1].end]
    spans = (*fixed, *place([("raw", raw_nbytes(flags, geometry, config))], fixed[-1].end))
    if spans[-1].end != payload.size:
        raise InvalidField(f"pnmix: payload has {payload.size} bytes, must have {spans[-1].end}")
    return spans


def chunk_step(config: Config) -> int:
    """Tokens of which a chunk should hold a multiple: whole groups and pages, and all sinks."""
    page_tokens = config.page_tokens if isinstance(config, KeyConfig) else None
    step = page_tokens or config.group_tokens
    return step * max(1, -(-config.sink_tokens // step))
