"""One sequence on one cache: it is fed tokens, gives logits, and can take tokens back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvz import hf
from kvz.formats.errors import ConfigError
from kvz.restoring import Restored, feed_prompt
from kvz.speculation.rollback import Snapshot


class Decoder(Protocol):
    """What drafting and verifying need of a model and its cache."""

    @property
    def logits(self) -> torch.Tensor:
        """`[vocab]` after the last token seen."""
        ...

    def extend(self, token_ids: Sequence[int]) -> torch.Tensor:
        """See tokens in one forward pass; the logits after each of them, `[n, vocab]`."""
        ...

    def mark(self) -> None:
        """Make the next `extend` one that `keep` can take back."""
        ...

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the one `extend` since `mark`."""
        ...


class CacheDecoder:
    """A `Decoder` of a model and a live cache of one sequence.

    cache: grows and shrinks. attention_mask: int64 `[1, tokens]` over the columns it has seen.
    logits: `[1, vocab]` after the last of them.
    """

    def __init__(
        self, model: Any, cache: Any, attention_mask: torch.Tensor, logits: torch.Tensor
    ) -> None:
        self.cache = cache
        self._model = model
        self._mask = attention_mask.to(model.device)
        #: `[n, vocab]`: before the last pass, and after each of its tokens.
        self._before = self._after = logits.to(model.device)
        self._marked: Snapshot | None = None

    @classmethod
    def of(
        cls, restored: Restored, model: Any, prompt_ids: Sequence[int] | None = None
    ) -> CacheDecoder:
        """Goes on from a restored cache, after `prompt_ids`. Raises ConfigError for a batch."""
        return cls(model, restored.cache, *feed_prompt(restored, model, prompt_ids))

    @property
    def logits(self) -> torch.Tensor:
        return self._after[-1]

    def extend(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=self._model.device)
        start = self._mask.shape[1]
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        logits = hf.feed_for_logits(
            self._model, self.cache, ids, self._mask, start, len(token_ids)
        )[0]
        self._before, self._after = self._after[-1:], logits
        return logits

    def mark(self) -> None:
        self._marked = Snapshot(self.cache)

    def keep(self, num_tokens: int) -> None:
        if self._marked is None:
            raise ConfigError("tokens can be taken back once after a mark")
        self._marked.keep(num_tokens)
        num_dropped = len(self._after) - num_tokens
        self._mask = self._mask[:, : self._mask.shape[1] - num_dropped]
        self._after = self._after[:num_tokens] if num_tokens else self._before
        self._marked = None
