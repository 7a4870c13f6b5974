"""Which pairs of a head's channels matter most: the masks of PN-Mix.

A criterion gives each pair of each kv head a number; the largest are salient. ``qk_norm`` is that
of the PN-Mix paper: mean norm of the queries times mean norm of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.capture_metadata import PAIR_NORM_BLOCK, unpack_layers
from kvz.codecs.base import TensorLookup
from kvz.contents import read_document
from kvz.formats.codecs.pnmix import KeyConfig, Mask
from kvz.formats.errors import ConfigError, InvalidField
from kvz.layout import layer_index

F64 = NDArray[np.float64]

RANDOM = "random"
#: Criteria that rank single channels: their masks have pairs of one.
CHANNEL_CRITERIA = frozenset({"k_magnitude", "k_range"})
#: Tokens whose float64 copies are in memory at once, for each channel.
_BLOCK_TOKENS = 1 << 14


class RopePairs(NamedTuple):
    """``pairing``: "half", "interleaved", "none" · ``rotary_dim``: channels that are rotated."""

    pairing: str
    rotary_dim: int


def recorded_pairs(metadata: Mapping[str, str], name: str | None) -> RopePairs | None:
    """How a capture says that the key ``name`` was rotated, or the first key; None: not at all."""
    document, _ = read_document(metadata)
    rope = None if document is None else document.get("rope")
    if document is None or not isinstance(rope, dict):
        return None
    values = []
    for member in ("pairing", "rotary_dim"):
        value = rope.get(member)
        if isinstance(value, list):
            # one for each layer that caches something
            cached = [i for i, x in enumerate(unpack_layers(document["layers"])) if x.num_tokens]
            by_layer: dict[int | None, Any] = dict(zip(cached, value, strict=False))
            value = by_layer.get(layer_index(name)) if name is not None else value[:1] and value[0]
        values.append(value)
    pairing, rotary_dim = values
    if pairing not in ("half", "interleaved", "none") or type(rotary_dim) is not int:
        return None
    return RopePairs(pairing, rotary_dim)


def select(importance: NDArray[np.float32], ratio: float) -> Mask:
    """The ``ratio`` of pairs of largest importance float32[heads, pairs]; ties: lowest first."""
    count = math.floor(ratio * importance.shape[1] + 0.5)
    order = np.argsort(-importance, axis=1, kind="stable")
    mask = np.zeros(importance.shape, bool)
    np.put_along_axis(mask, order[:, :count], True, axis=1)
    return mask


@dataclass(frozen=True, slots=True)
class KeyTensor:
    """A key tensor whose pairs are ranked, and where to look for what is known of it.

    ``shape``: its view ``[outer, tokens, inner]``.
    """

    source: TensorLookup
    name: str
    shape: tuple[int, int, int]
    config: KeyConfig

    def importance(self) -> NDArray[np.float32]:
        """float32[kv heads, pairs] by the criterion of the configuration. Raises ConfigError."""
        criterion, _, seed = self.config.criterion.partition(":")
        found = self._random(seed) if criterion == RANDOM else _CRITERIA[criterion](self)
        if self.shape[0] % len(found) or found.shape[1] != self.config.num_pairs(self.shape[2]):
            raise ConfigError(
                f"statistics of {self.name} are of {found.shape[0]} heads with {found.shape[1]} "
                f"pairs, the tensor has {self.shape[0]} with "
                f"{self.config.num_pairs(self.shape[2])}"
            )
        # a pair of which nothing is known is not salient
        return np.where(np.isfinite(found), found, 0).astype(np.float32)

    def _random(self, seed: str) -> F64:
        shape = (self.shape[0], self.config.num_pairs(self.shape[2]))
        # another draw for every layer
        return np.random.default_rng([int(seed or 0), layer_index(self.name) or 0]).random(shape)

    def query_norm(self) -> F64:
        """Mean norm of pairs of queries, over the query heads of each kv head."""
        norms = self._recorded("query")
        if norms is None:
            norms = self._query_norm_of_file()
        heads = len(self.key_norm())
        if norms.shape[0] % heads:
            raise ConfigError(f"{self.name} has {heads} heads, its queries {norms.shape[0]}")
        return np.asarray(norms.reshape(heads, -1, norms.shape[1]).mean(axis=1))

    def key_norm(self) -> F64:
        """Mean norm of pairs of keys."""
        norms = self._recorded("key")
        return self._mean(lambda x: np.sqrt(self._by_pair(x * x))) if norms is None else norms

    def magnitude(self) -> F64:
        """Mean absolute value of a channel."""
        return self._mean(np.abs)

    def range(self) -> F64:
        """Distance of a channel's largest element from its smallest."""
        elements = self._elements()
        ends = []
        for function, worst in ((np.fmax, -np.inf), (np.fmin, np.inf)):
            usable = np.where(np.isfinite(elements), elements, worst)
            ends.append(function.reduce(usable, axis=(0, 2)).astype(np.float64))
        return np.asarray(ends[0] - ends[1])

    def variance(self) -> F64:
        """Mean variance within a group of tokens, summed over the channels of a pair."""
        elements, group = self._elements(), self.config.group_tokens
        coded = elements[:, :, self.config.sink_tokens :]
        num_groups = coded.shape[2] // group
        if not num_groups:
            return self._by_pair(np.nanvar(_finite(elements), axis=(0, 2)))
        step = max(1, _BLOCK_TOKENS // group)
        total, count = np.zeros(coded.shape[1::2]), np.zeros(coded.shape[1::2])
        for first in range(0, num_groups, step):
            part = coded[:, :, first * group : min(first + step, num_groups) * group]
            grouped = part.reshape(*part.shape[:2], -1, group, part.shape[3]).astype(np.float64)
            variances = grouped.var(axis=3)
            usable = np.isfinite(variances)
            total += np.where(usable, variances, 0).sum(axis=(0, 2))
            count += usable.sum(axis=(0, 2))
        return self._by_pair(total / np.maximum(count, 1))

    # -- what these are made of

    def _by_pair(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums over the channels of each pair, [..., inner] to [..., pairs]."""
        half = self.config.rotary_dim // 2
        rotated, rest = values[..., : 2 * half], values[..., 2 * half :]
        if self.config.pairing == "interleaved":
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :half], rotated[..., half:]
        return np.concatenate([first + second, rest], axis=-1)

    def _mean(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> F64:
        """Mean over batch and tokens of a function of [..., channels], of finite values only."""
        elements = self._elements()
        total, count = 0.0, 0.0
        for first in range(0, elements.shape[2], _BLOCK_TOKENS):
            part = elements[:, :, first : first + _BLOCK_TOKENS].astype(np.float64)
            values = function(part)
            usable = np.isfinite(values)
            total = total + np.where(usable, values, 0).sum(axis=(0, 2))
            count = count + usable.sum(axis=(0, 2))
        return np.asarray(total / np.maximum(count, 1))

    def _elements(self) -> NDArray[np.float32]:
        """The keys [batch, heads, tokens, inner], NaN where padding is; up to prefill_tokens."""
        found = self.source.find(self.name)
        if found is None:
            raise ConfigError(
                f"criterion {self.config.criterion} must read {self.name} twice: give a file, "
                "not standard input"
            )
        bits = found[1]
        if bits.ndim == 4 and bits.shape[2:] != self.shape[1:]:
            raise ConfigError(
                f"{self.name} is {list(bits.shape)}: pairs of channels need axes batch, heads, "
                "tokens, channels"
            )
        batch = bits.shape[0] if bits.ndim == 4 else 1
        outer, tokens, inner = self.shape
        keys = bf16_to_float(bits.reshape(batch, outer // batch, tokens, inner))
        mask = self.source.find("attention_mask")
        # of a sliding window the mask's last columns
        if mask is not None and mask[1].ndim == 2 and len(mask[1]) == batch and not mask[1].all():
            padded = mask[1][:, -tokens:] == 0
            keys = np.where(padded[:, None, :, None], np.float32(np.nan), keys)
        return keys[:, :, : self.config.prefill_tokens]

    def _recorded(self, part: str) -> F64 | None:
        """Pair norms of the capture, float64[heads, pairs]; None when it has none."""
        found = self.source.find(f"{self.name.rpartition('.')[0]}.{part}_pair_norm")
        if found is None:
            return None
        dtype, bits = found
        if dtype != "F32" or bits.ndim not in (2, 3):
            raise InvalidField(f"{part}_pair_norm of {self.name}: {dtype} {list(bits.shape)}")
        norms = bits.view(np.float32).astype(np.float64)
        wanted = self.config.prefill_tokens
        if norms.ndim == 2:
            if wanted is not None:
                raise ConfigError(
                    f"statistics of {self.name} are of the whole prompt, prefill_tokens needs them "
                    "by blocks: capture it again with kvz capture"
                )
            return norms
        tokens = tokens_of_blocks(self.source, self.name, len(norms))
        count = len(norms) if wanted is None else _num_blocks(wanted, len(norms))
        return mean_of_blocks(norms[:count], tokens[:count])

    def _query_norm_of_file(self) -> F64:
        found = self.source.find(f"{self.name.rpartition('.')[0]}.query")
        if found is None or found[0] != "BF16" or found[1].ndim != 4:
            raise ConfigError(
                f"nothing says what the queries of {self.name} are like, which criterion "
                f"{self.config.criterion} needs: capture it again with kvz capture (from a file, "
                "not standard input), or choose criterion=k_norm"
            )
        queries = bf16_to_float(found[1]).astype(np.float64)
        norms = np.sqrt(self._by_pair(queries * queries))
        return np.asarray(norms.mean(axis=(0, 2)))


def tokens_of_blocks(source: TensorLookup, name: str, num_blocks: int) -> F64:
    """How many tokens each block of the pair norms of ``name`` is the mean of, float64[blocks].

    Raises InvalidField when the capture's attention_mask does not have so many blocks.
    """
    mask = source.find("attention_mask")
    if mask is None or mask[1].ndim != 2:
        raise InvalidField("tensor attention_mask is missing, pair norms by blocks need it")
    columns = (mask[1] != 0).sum(axis=0)
    if -(-len(columns) // PAIR_NORM_BLOCK) != num_blocks:
        raise InvalidField(
            f"pair norms of {name} are of {num_blocks} blocks, the prompt has {len(columns)} tokens"
        )
    starts = np.arange(0, len(columns), PAIR_NORM_BLOCK)
    return np.add.reduceat(columns, starts).astype(np.float64)


def mean_of_blocks(norms: F64, tokens: F64) -> F64:
    """Mean of means [blocks, heads, pairs] of ``tokens`` [blocks] tokens each."""
    total = (norms * tokens[:, None, None]).sum(axis=0)
    return np.asarray(total / max(float(tokens.sum()), 1.0))


def _num_blocks(wanted: int, num_blocks: int) -> int:
    """Blocks of the first ``wanted`` tokens. Raises ConfigError when they end inside one."""
    if wanted < num_blocks * PAIR_NORM_BLOCK and wanted % PAIR_NORM_BLOCK:
        raise ConfigError(
            f"prefill_tokens must be a multiple of {PAIR_NORM_BLOCK}, of which the capture "
            f"has statistics; got {wanted}"
        )
    return min(-(-wanted // PAIR_NORM_BLOCK), num_blocks)


def bf16_to_float(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _finite(values: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, np.nan).astype(np.float64)


_CRITERIA: dict[str, Callable[[KeyTensor], F64]] = {
    "qk_norm": lambda key: key.query_norm() * key.key_norm(),
    "query_variance": lambda key: key.query_norm() ** 2 * key.variance(),
    "k_norm": KeyTensor.key_norm,
    "k_magnitude": KeyTensor.magnitude,
    "k_range": KeyTensor.range,
}


def check_criterion(criterion: str) -> None:
    """Raises ValueError unless it is a criterion, or ``random:SEED``."""
    name, colon, seed = criterion.partition(":")
    if criterion in _CRITERIA or criterion == RANDOM:
        return
    if name == RANDOM and colon and seed.isascii() and seed.isdigit():
        return
    raise ValueError(
        f"criterion must be {', '.join(_CRITERIA)} or {RANDOM}:SEED, got {criterion!r}"
    )
