"""Attention over decoded keys and values against attention over the exact ones, block by block.

Nothing here is longer than a block of keys, so that the longest cache fits. Products of queries
with keys and of weights with values are float32; everything from the scores on is float64. The
difference of two scores is taken as the query's product with the difference of the keys, because
subtracting two large scores would leave only their rounding when keys are nearly exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

#: Scores that are in memory at once: what caches of a CPU hold, and what keeps a GPU busy.
_BLOCK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 25}
_MIN_BLOCK_LEN = 64


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a model turns products of query and key into scores.

    scale: factor of the products. softcap: scores are ``softcap * tanh(x / softcap)``; None: x.
    """

    scale: float
    softcap: float | None = None

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """Scaled and capped, float64."""
        scaled = products.double() * self.scale
        if self.softcap is None:
            return scaled
        return scaled.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of one sequence and layer, and the keys that each of them sees.

    states: `[q_heads, n, head_dim]`. start, stop: int64 `[n]`; query i sees the keys
    start[i] <= k < stop[i], at least one, counted within the layer's stored keys.
    """

    states: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor

    def __post_init__(self) -> None:
        if not bool((self.start < self.stop).all()):
            raise ValueError("every query must see a key")

    @property
    def num_queries(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Attended:
    """log_sum: float64 `[q_heads, n]`, log of the softmax's denominator. output: float64
    `[q_heads, n, value_dim]`."""

    log_sum: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionError:
    """Per query, float64 `[q_heads, n]`.

    kl: sum over keys of p ln(p / p'), p and p' the weights with exact and decoded keys.
    squared_error: squared 2-norm of the difference of the outputs. squared_norm: that of the exact
    output.
    """

    kl: torch.Tensor
    squared_error: torch.Tensor
    squared_norm: torch.Tensor


def attend(queries: Queries, key: torch.Tensor, value: torch.Tensor, softmax: Softmax) -> Attended:
    """Attention over key and value `[kv_heads, tokens, head_dim]`."""
    heads = []
    for head in range(key.shape[0]):
        rows = _Rows(queries, head, key.shape[0])
        running = _RunningSoftmax(rows.num_rows, value.shape[-1], key.device)
        for keys in rows.blocks():
            scores = softmax.scores(rows.states @ key[head, keys].float().T)
            rows.hide(scores, keys, -torch.inf)
            running.add(scores, value[head, keys].float())
        heads.append((running.log_sum(), running.output()))
    return Attended(*(_by_query_head(parts, queries) for parts in zip(*heads, strict=True)))


def compare(
    queries: Queries,
    exact: Attended,
    key: torch.Tensor,
    decoded_key: torch.Tensor,
    decoded_value: torch.Tensor,
    softmax: Softmax,
) -> AttentionError:
    """What decoded keys and values `[kv_heads, tokens, head_dim]` do to the attention `exact`.

    exact: what :func:`attend` gave for the exact `key` and value. Decoded tensors that equal them
    give exactly zero.
    """
    heads = []
    for head in range(key.shape[0]):
        rows = _Rows(queries, head, key.shape[0])
        log_sum = rows.of(exact.log_sum)
        running = _RunningSoftmax(rows.num_rows, decoded_value.shape[-1], key.device)
        gain = torch.zeros_like(log_sum)
        for keys in rows.blocks():
            exact_key = key[head, keys].float()
            change = exact_key - decoded_key[head, keys].float()
            products = rows.states @ exact_key.T
            scores = softmax.scores(products)
            decoded = softmax.scores(products.double().sub_(rows.states @ change.T))
            difference = scores - decoded
            for hidden, fill in ((scores, -torch.inf), (decoded, -torch.inf), (difference, 0.0)):
                rows.hide(hidden, keys, fill)
            weights = scores.sub_(log_sum[:, None]).exp_()
            gain += weights.mul_(difference).sum(dim=1)
            running.add(decoded, decoded_value[head, keys].float())
        kl = (gain + (running.log_sum() - log_sum)).clamp_min_(0.0)
        error = (running.output() - rows.of(exact.output)).square().sum(dim=-1)
        heads.append((kl, error, rows.of(exact.output).square().sum(dim=-1)))
    return AttentionError(*(_by_query_head(parts, queries) for parts in zip(*heads, strict=True)))


def _by_query_head(parts: tuple[torch.Tensor, ...], queries: Queries) -> torch.Tensor:
    """Rows of all kv heads `[group * n, ...]` as `[q_heads, n, ...]`."""
    num_heads, num_queries = queries.states.shape[:2]
    return torch.cat(parts).reshape(num_heads, num_queries, *parts[0].shape[1:])


class _Rows:
    """The queries that share one kv head, one row for each query head and position."""

    def __init__(self, queries: Queries, kv_head: int, num_kv_heads: int) -> None:
        group = queries.states.shape[0] // num_kv_heads
        self._heads = slice(kv_head * group, (kv_head + 1) * group)
        self.states = self.of(queries.states).float()
        self.num_rows = self.states.shape[0]
        self._start, self._stop = queries.start.repeat(group), queries.stop.repeat(group)
        self._first, self._end = int(self._start.min()), int(self._stop.max())
        # inside, every row sees every key
        self._seen_by_all = int(self._start.max()), int(self._stop.min())

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """`[q_heads, n, ...]` to `[rows, ...]`."""
        return x[self._heads].flatten(0, 1)

    def blocks(self) -> Iterator[slice]:
        """The keys that any row sees."""
        step = max(_MIN_BLOCK_LEN, _BLOCK_SCORES[self.states.device.type] // self.num_rows)
        for begin in range(self._first, self._end, step):
            yield slice(begin, min(begin + step, self._end))

    def hide(self, x: torch.Tensor, keys: slice, fill: float) -> None:
        """Fill `x [rows, keys]` in place where the row does not see the key."""
        if self._seen_by_all[0] <= keys.start and keys.stop <= self._seen_by_all[1]:
            return
        position = torch.arange(keys.start, keys.stop, device=x.device)
        unseen = (position < self._start[:, None]) | (position >= self._stop[:, None])
        x.masked_fill_(unseen, fill)


class _RunningSoftmax:
    """Softmax over keys that come in blocks, and the mean of the values under it."""

    def __init__(self, num_rows: int, value_dim: int, device: torch.device) -> None:
        like = torch.zeros((num_rows, value_dim), dtype=torch.float64, device=device)
        # finite: a row may see nothing of its first blocks
        self._max = like.new_full((num_rows,), torch.finfo(torch.float64).min)
        self._sum = like.new_zeros(num_rows)
        self._output = like

    def add(self, scores: torch.Tensor, value: torch.Tensor) -> None:
        """scores: float64 `[rows, keys]`, overwritten. value: float32 `[keys, value_dim]`."""
        highest = torch.maximum(self._max, scores.amax(dim=1))
        weights = scores.sub_(highest[:, None]).exp_()
        shrink = (self._max - highest).exp_()
        self._sum = self._sum * shrink + weights.sum(dim=1)
        self._output = self._output * shrink[:, None] + (weights.float() @ value)
        self._max = highest

    def log_sum(self) -> torch.Tensor:
        return self._max + self._sum.log()

    def output(self) -> torch.Tensor:
        return self._output / self._sum[:, None]
