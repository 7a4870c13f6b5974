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
_TOKEN_STEP = 64

#: Names that caches go by: ``layers.3.key``, ``key_cache.3``, ``model.layers.3.self_attn.v``, ...
_CACHE_NAME = re.compile(
    r"(^|[._/])(past_)?(k|v|q|key|value|query)s?(_cache|_states)?([._/]\d+)?$", re.IGNORECASE
)
_LAYER = re.compile(r"(?:^|[._/])(?:layers?|h|blocks?|key_cache|value_cache)[._/](\d+)(?:[._/]|$)")
_KEY_VALUE = re.compile(r"[._/](key|value)$")


@dataclass(frozen=True, slots=True)
class Layout:
    """``axes``: one letter per dimension, ``T`` for tokens, e.g. ``BHTD``; None: by name and rank.

    ``pattern``: regular expression for the names it applies to; None: all of matching rank.
    """

    axes: str | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.axes is not None and (self.axes.count("T") != 1 or not self.axes.isalpha()):
            raise ConfigError(
                f"layout {self.axes!r} must name every axis by a letter and tokens by one T, "
                "for example BHTD"
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ConfigError(f"pattern {self.pattern!r}: {error}") from None

    def token_axis(self, tensor: StoredTensor) -> int | None:
        """The token axis of a tensor, or None when it is not a cache tensor."""
        rank = len(tensor.shape)
        if self.axes is None and self.pattern is None:
            recognised = _CACHE_NAME.search(tensor.name) and rank in (3, 4)
            return rank - 2 if recognised else None
        if self.pattern is not None and not re.search(self.pattern, tensor.name):
            return None
        axes = self.axes or "BHTD"[-rank:]
        return axes.index("T") if len(axes) == rank and "T" in axes else None


def layer_index(name: str) -> int | None:
    """The layer that a tensor's name gives."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def is_key_or_value(name: str) -> bool:
    return _KEY_VALUE.search(name) is not None


def chunk_tokens(tensor: StoredTensor, token_axis: int | None) -> int:
    """Tokens per chunk: equal parts of about :data:`TARGET_CHUNK_NBYTES`, in steps of 64."""
    itemsize = DTYPE_NBYTES[tensor.dtype]
    if token_axis is None:
        return max(1, TARGET_CHUNK_NBYTES // itemsize)
    tokens = tensor.shape[token_axis]
    per_token = max(1, itemsize * math.prod(tensor.shape) // max(1, tokens))
    parts = max(1, round(tokens * per_token / TARGET_CHUNK_NBYTES))
    step = -(-tokens // (parts * _TOKEN_STEP)) * _TOKEN_STEP
    return max(1, min(step, MAX_CHUNK_NBYTES // per_token))
