"""Which axis of a tensor counts tokens, and how its tokens are cut into chunks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvz.formats.errors import ConfigError
from kvz.formats.ids import DTYPE_NBYTES
from kvz.formats.limits import MAX_CHUNK_NBYTES
from kvz.formats.safetensors import StoredTensor

#: Raw bytes that a chunk aims at: small enough for partial reads, large enough that frames and
#: index stay below 0.02 % of the file.
TARGET_CHUNK_NBYTES = 1 << 20

#: Names that caches go by: ``layers.3.key``, ``key_cache.3``, ``model.layers.3.self_attn.v``, ...
_CACHE_NAME = re.compile(
    r"(?:^|[._/])(?:past_)?(k|v|q|key|value|query)s?(?:_cache|_states)?(?:[._/]?\d+)?$",
    re.IGNORECASE,
)
#: The names of kvz's own captures, whose axes are always batch, heads, tokens, channels.
_CAPTURE_NAME = re.compile(r"layers\.\d+\.(key|value|query)")
#: The number after a word for layers, or else the first number.
_LAYERS = (
    re.compile(
        r"(?:^|[._/])(?:layers?|h|blocks?|key_cache|value_cache)[._/]?(\d+)(?:[._/]|$)",
        re.IGNORECASE,
    ),
    re.compile(r"(?:^|[._/a-z])(\d+)(?:[._/]|$)", re.IGNORECASE),
)


#: Key that marks the metadata of a file that holds only a part of a cache.
SELECTION_KEY = "kvz.selection"


@dataclass(frozen=True, slots=True)
class Layout:
    """``axes``: one letter per dimension, ``T`` for tokens, e.g. ``BHTD``; None: by name and rank.

    ``pattern``: regular expression for the names it applies to; None: all of matching rank.
    """

    axes: str | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.axes is not None:
            object.__setattr__(self, "axes", self.axes.upper())
        if self.axes is not None and (self.axes.count("T") != 1 or not self.axes.isalpha()):
            raise ConfigError(
                f"layout {self.axes!r} must name every axis by a letter and tokens by one T, "
                "for example BHTD"
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ConfigError(f"pattern {self.pattern!r}: {error}") from None

    @property
    def given(self) -> bool:
        """Whether the caller said anything about the layout."""
        return self.axes is not None or self.pattern is not None

    def token_axis(self, tensor: StoredTensor) -> int | None:
        """The token axis of a tensor, or None when it is not a cache tensor."""
        if self.pattern is not None and not re.search(self.pattern, tensor.name):
            return None
        if self.axes is not None:
            return self.axes.index("T") if len(self.axes) == len(tensor.shape) else None
        if len(tensor.shape) not in (3, 4):
            return None
        if self.pattern is None and not _CACHE_NAME.search(tensor.name):
            return None
        return _likely_token_axis(tensor)

    def is_guess(self, name: str) -> bool:
        """Whether the token axis of a tensor follows from nothing but its shape."""
        return self.axes is None and not _CAPTURE_NAME.fullmatch(name)


def _likely_token_axis(tensor: StoredTensor) -> int:
    """The axis before the channels in kvz's own captures, else the longer of heads and tokens."""
    last = len(tensor.shape) - 2
    if _CAPTURE_NAME.fullmatch(tensor.name) or tensor.shape[last] >= tensor.shape[last - 1]:
        return last
    return last - 1


def layer_index(name: str) -> int | None:
    """The layer that a tensor's name gives: the number after a word for it, or its first number."""
    matches = (pattern.search(name) for pattern in _LAYERS)
    return next((int(match.group(1)) for match in matches if match), None)


def role(name: str) -> str | None:
    """``key`` or ``value`` if the name says that it is one, else None."""
    match = _CACHE_NAME.search(name)
    if match is None:
        return None
    return {"k": "key", "v": "value"}.get(match.group(1)[0].lower())


def is_key_or_value(name: str) -> bool:
    return role(name) is not None


def part_name(name: str) -> str:
    """What a tensor is to its layer: ``key``, ``value`` or a word of its own (``indexer_key``)."""
    own = name.rpartition(".")[2]
    if own.isdigit() or (role(own) is not None and "_" not in own.removesuffix("_cache")):
        return str(role(name))
    return own


def chunk_tokens(tensor: StoredTensor, token_axis: int | None, step: int = 64) -> int:
    """Tokens per chunk: equal parts of about :data:`TARGET_CHUNK_NBYTES`, multiples of ``step``."""
    itemsize = DTYPE_NBYTES[tensor.dtype]
    if token_axis is None:
        return max(1, TARGET_CHUNK_NBYTES // itemsize)
    tokens = tensor.shape[token_axis]
    per_token = max(1, itemsize * math.prod(tensor.shape) // max(1, tokens))
    parts = max(1, round(tokens * per_token / TARGET_CHUNK_NBYTES))
    length = -(-tokens // (parts * step)) * step
    return max(1, min(length, MAX_CHUNK_NBYTES // per_token))
