"""How much of the importance a few pairs of channels hold, and how early a prompt shows which."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvz.capture_metadata import PAIR_NORM_BLOCK
from kvz.codecs.base import TensorLookup
from kvz.formats.codecs.pnmix import Mask
from kvz.formats.errors import InvalidField
from kvz.saliency import mean_of_blocks, select, tokens_of_blocks

F64 = NDArray[np.float64]

#: Of the pairs of a head.
TOP_SHARES = (0.1, 0.3, 0.5)
#: Share of the pairs whose choice is compared.
CHOSEN_SHARE = 0.5
_MAX_RANGES = 4


@dataclass(frozen=True, slots=True)
class TopPairs:
    """The most important `share` of a head's pairs hold `importance` of the sum over its pairs."""

    share: float
    importance: float


@dataclass(frozen=True, slots=True)
class RangeOverlap:
    """Pairs chosen on columns start:stop of the prompt and on its first block: `jaccard` is
    |both| / |either|."""

    start: int
    stop: int
    jaccard: float


@dataclass(frozen=True, slots=True)
class SaliencyReport:
    """Means over the heads of `num_layers` layers; the importance of a pair is its qk_norm.

    prefill: columns of the first block. ranges: at most four, of about as many whole blocks each;
    none when a capture's statistics are of one block or of the whole prompt.
    """

    num_layers: int
    top: tuple[TopPairs, ...]
    prefill: int
    ranges: tuple[RangeOverlap, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Pair norms of one layer, `[blocks, heads, pairs]`, and the tokens of each block."""

    query: F64
    key: F64
    tokens: F64

    def importance(self, blocks: slice = slice(None)) -> NDArray[np.float32]:
        """qk_norm over some blocks, `[kv_heads, pairs]`; 0 where it is not finite."""
        query, key = (
            mean_of_blocks(x[blocks], self.tokens[blocks]) for x in (self.query, self.key)
        )
        product = query.reshape(len(key), -1, key.shape[1]).mean(axis=1) * key
        return np.where(np.isfinite(product), product, 0).astype(np.float32)


def saliency_report(source: TensorLookup, key_names: Sequence[str]) -> SaliencyReport | None:
    """The report on those of the keys that the capture has pair norms of; None: it has none.

    Raises InvalidField for pair norms that do not belong together.
    """
    layers = [layer for name in key_names if (layer := _read(source, name)) is not None]
    if not layers:
        return None
    num_blocks = min(len(layer.tokens) for layer in layers)
    found = source.find("attention_mask")
    num_columns = found[1].shape[1] if found is not None and found[1].ndim == 2 else 0
    runs = np.array_split(np.arange(1, num_blocks), min(_MAX_RANGES, num_blocks - 1) or 1)
    ranges = []
    for run in runs if num_blocks > 1 else ():
        first, end = int(run[0]), int(run[-1]) + 1
        overlaps = [
            jaccard(
                select(layer.importance(slice(1)), CHOSEN_SHARE),
                select(layer.importance(slice(first, end)), CHOSEN_SHARE),
            )
            for layer in layers
        ]
        stop = min(end * PAIR_NORM_BLOCK, num_columns)
        ranges.append(RangeOverlap(first * PAIR_NORM_BLOCK, stop, statistics.fmean(overlaps)))
    return SaliencyReport(
        num_layers=len(layers),
        top=tuple(
            TopPairs(share, statistics.fmean(held(layer.importance(), share) for layer in layers))
            for share in TOP_SHARES
        ),
        prefill=min(PAIR_NORM_BLOCK, num_columns),
        ranges=tuple(ranges),
    )


def held(importance: NDArray[np.float32], share: float) -> float:
    """Part of the importance `[heads, pairs]` that the top `share` of pairs has, mean over heads.

    As many pairs as a mask of that share has. A head without importance counts as 1.
    """
    total = importance.sum(axis=1, dtype=np.float64)
    top = np.where(select(importance, share), importance, 0).sum(axis=1, dtype=np.float64)
    return float(np.divide(top, total, out=np.ones_like(total), where=total > 0).mean())


def jaccard(first: Mask, second: Mask) -> float:
    """|both| / |either| of masks `[heads, pairs]`, mean over heads; 1 where both are empty."""
    both, either = ((first & second).sum(axis=1), (first | second).sum(axis=1))
    return float(np.divide(both, either, out=np.ones(len(both)), where=either > 0).mean())


def _read(source: TensorLookup, key_name: str) -> _Layer | None:
    prefix = key_name.rpartition(".")[0]
    norms = []
    for part in ("query", "key"):
        found = source.find(f"{prefix}.{part}_pair_norm")
        if found is None:
            return None
        dtype, bits = found
        if dtype != "F32" or bits.ndim not in (2, 3) or not bits.size:
            raise InvalidField(f"{part}_pair_norm of {key_name}: {dtype} {list(bits.shape)}")
        norms.append(bits.view(np.float32).astype(np.float64))
    query, key = norms
    if (
        query.ndim != key.ndim
        or query.shape[-1] != key.shape[-1]
        or query.shape[-2] % key.shape[-2]
        or query.shape[:-2] != key.shape[:-2]
    ):
        raise InvalidField(
            f"pair norms of {key_name}: those of queries are {list(query.shape)}, of keys "
            f"{list(key.shape)}"
        )
    if key.ndim == 2:
        # of the whole prompt
        return _Layer(query[None], key[None], np.ones(1))
    return _Layer(query, key, tokens_of_blocks(source, key_name, len(key)))
