"""How a token is chosen from logits, and when a draft is as good as the verifier's own choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvz.formats.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted token. probabilities: `[vocab]` float64 that it was drawn from; None if greedy."""

    token_id: int
    probabilities: torch.Tensor | None = None


class TokenRule(Protocol):
    """Chooses tokens, and judges those that the same rule chose on another cache."""

    def draft(self, logits: torch.Tensor) -> Draft:
        """A token from the draft's logits `[vocab]`."""
        ...

    def choose(self, logits: torch.Tensor) -> int:
        """A token from the verifier's logits `[vocab]`."""
        ...

    def accept(self, drafts: Sequence[Draft], logits: torch.Tensor) -> tuple[int, int]:
        """How many drafts stay, and the token that follows them.

        logits: `[len(drafts) + 1, vocab]` of the verifier, before each draft and after the last.
        """
        ...


class GreedyRule:
    """The most likely token, of several the first. A draft stays while it is that token."""

    def draft(self, logits: torch.Tensor) -> Draft:
        return Draft(self.choose(logits))

    def choose(self, logits: torch.Tensor) -> int:
        return int(logits.argmax())

    def accept(self, drafts: Sequence[Draft], logits: torch.Tensor) -> tuple[int, int]:
        expected = logits.argmax(dim=-1).tolist()
        for position, draft in enumerate(drafts):
            if draft.token_id != expected[position]:
                return position, expected[position]
        return len(drafts), expected[len(drafts)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of sampling; the same seed gives the same tokens on the same machine.

    temperature: divides the logits. top_k: only the k most likely tokens, ties with the last
    included. top_p: only the fewest of them that together have this probability.
    Raises ConfigError for values without sense.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature must be greater than 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be greater than 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed must be 0 to {(1 << 63) - 1}, got {self.seed}")

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution to draw from: `[vocab]` float64 on the CPU."""
        scaled = logits.double().cpu() / self.temperature
        if self.top_k is not None and self.top_k < len(scaled):
            scaled[scaled < scaled.topk(self.top_k).values[-1]] = -torch.inf
        probabilities = scaled.softmax(dim=-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(0) - ordered
            probabilities[order[before >= self.top_p]] = 0
            probabilities /= probabilities.sum()
        return probabilities


class SamplingRule:
    """Draws tokens; drafts stay by the rule that keeps the verifier's distribution exactly.

    A draft x, drawn with probability q(x), stays with probability min(1, p(x) / q(x)), p being
    the verifier's distribution; the first that does not is replaced by a token drawn in
    proportion to max(0, p - q). Each token is then distributed as if drawn from p (Leviathan,
    Kalman and Matias, 2023, "Fast inference from transformers via speculative decoding").
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def draft(self, logits: torch.Tensor) -> Draft:
        probabilities = self._sampling.probabilities(logits)
        return Draft(self._draw(probabilities), probabilities)

    def choose(self, logits: torch.Tensor) -> int:
        return self._draw(self._sampling.probabilities(logits))

    def accept(self, drafts: Sequence[Draft], logits: torch.Tensor) -> tuple[int, int]:
        for position, draft in enumerate(drafts):
            expected = self._sampling.probabilities(logits[position])
            drafted, token_id = draft.probabilities, draft.token_id
            if drafted is None:
                raise ConfigError("a draft that was not sampled cannot be judged as a sample")
            uniform = torch.rand((), dtype=torch.float64, generator=self._generator)
            if bool(uniform * drafted[token_id] < expected[token_id]):
                continue
            missing = (expected - drafted).clamp_min(0)
            # nothing is missing when the two differ by rounding only
            return position, self._draw(missing if missing.sum() > 0 else expected)
        return len(drafts), self.choose(logits[len(drafts)])

    def _draw(self, weights: torch.Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))
