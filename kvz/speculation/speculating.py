"""Draft tokens on a coarse cache while the exact one arrives, then verify them all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvz.formats.errors import ConfigError, IdentityMismatch
from kvz.identity import Mismatch
from kvz.restoring import Restored, restore
from kvz.source_protocol import CacheSource
from kvz.speculation.decoder import CacheDecoder, Decoder
from kvz.speculation.rollback import check_metadata, longest_rollback
from kvz.speculation.rules import Draft, GreedyRule, Sampling, SamplingRule, TokenRule
from kvz.state_reader import open_source

DEFAULT_MAX_DRAFTS = 64


@dataclass(frozen=True)
class SpeculationReport:
    """What was generated and when; times in seconds since `started_at`.

    token_ids: the verified tokens. draft_ids: the provisional ones; the first `num_accepted` of
    them are the first of `token_ids`, the others were dropped. started_at: `time.monotonic()` of
    the call. draft_times_s: when each draft was known. full_ready_s: when the full cache was
    restored and had seen the prompt. verified_s: when the drafts were judged. token_times_s: when
    each of `token_ids` was first known, as an accepted draft or from the full cache.
    mismatches: what `force` overrode.
    """

    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    num_accepted: int
    started_at: float
    draft_times_s: tuple[float, ...]
    full_ready_s: float
    verified_s: float
    token_times_s: tuple[float, ...]
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def num_drafted(self) -> int:
        """Tokens drafted, accepted or not."""
        return len(self.draft_ids)


def speculate(
    draft_source: str | Path | CacheSource,
    full_source: str | Path | CacheSource | Callable[[], CacheSource],
    model: Any,
    max_new_tokens: int = 64,
    *,
    prompt_ids: Sequence[int] | None = None,
    max_drafts: int = DEFAULT_MAX_DRAFTS,
    stop_ids: Collection[int] = (),
    sampling: Sampling | None = None,
    ready: Callable[[], bool] | None = None,
    force: bool = False,
    num_tokens: int | None = None,
    on_draft: Callable[[int], None] | None = None,
) -> SpeculationReport:
    """Go on from a cache of one sequence: draft on `draft_source`, verify on `full_source`.

    Drafts at most `max_drafts` tokens (fewer where a sliding window is shorter), runs all of them
    through the model in one forward pass on the full cache, keeps the longest prefix that it
    agrees with, replaces the first that it does not, and goes on from there on the full cache
    alone. No key or value computed on the draft's cache is kept: that cache is dropped before
    the full one is restored.

    The guarantee: the verifier's parallel forward pass is the reference. Greedily
    (`sampling=None`), each token is the most likely one by the logits of that pass, or of single
    steps after it. In float32 this equals token-by-token greedy decoding on the full cache; in
    bfloat16 the two can differ where two tokens are nearly as likely, because a pass over many
    tokens rounds differently from single steps. With `sampling`, each token is distributed as
    if drawn from the logits of that pass.

    full_source: a callable is called once the drafts are made and may wait for the data.
    prompt_ids: tokens to go on after, behind the cached ones. ready: asked before each draft;
    drafting ends when it says True. None: all drafts are made. stop_ids: the text ends with the
    first of them. on_draft: called with each draft. force, num_tokens: as for `restore`.
    With a progressive reader:
    `speculate(reader.anchor(), reader.full, model, ready=reader.is_complete)`.

    Raises UnsupportedCache, before any work, for a cache from which tokens cannot be taken back
    (layers other than full and sliding ones); IdentityMismatch when the two are caches of
    different prompts; ConfigError for arguments without sense; and what `restore` and
    `continue_from` raise.
    """
    started_at = time.monotonic()
    if max_new_tokens < 1 or max_drafts < 1:
        raise ConfigError("max_new_tokens and max_drafts must be at least 1")
    with open_source(draft_source) as opened:
        limit = longest_rollback(check_metadata(opened.metadata))
    num_drafts = min(max_drafts, max_new_tokens, *([] if limit is None else [limit]))
    rule: TokenRule = GreedyRule() if sampling is None else SamplingRule(sampling)
    writer = _Writer(rule, max_new_tokens, frozenset(stop_ids), started_at)

    restored = restore(draft_source, model, force=force, num_tokens=num_tokens)
    drafter = CacheDecoder.of(restored, model, prompt_ids)
    writer.draft(drafter, num_drafts, ready, on_draft)
    mismatches, expected = restored.mismatches, (restored.input_ids, restored.attention_mask)
    del drafter, restored  # so that the two caches are never in memory together

    full = full_source() if callable(full_source) else full_source
    restored = restore(full, model, force=force, num_tokens=num_tokens)
    _check_same_prompt(expected, restored)
    mismatches += tuple(one for one in restored.mismatches if one not in mismatches)
    verifier = CacheDecoder.of(restored, model, prompt_ids)
    full_ready_s = writer.now()
    num_accepted = writer.verify(verifier)
    verified_s = writer.now()
    writer.go_on(verifier)
    return SpeculationReport(
        token_ids=tuple(writer.token_ids),
        draft_ids=tuple(draft.token_id for draft in writer.drafts),
        num_accepted=num_accepted,
        started_at=started_at,
        draft_times_s=tuple(writer.draft_times_s),
        full_ready_s=full_ready_s,
        verified_s=verified_s,
        token_times_s=tuple(writer.token_times_s),
        mismatches=mismatches,
    )


def sample(
    restored: Restored,
    model: Any,
    sampling: Sampling,
    max_new_tokens: int = 64,
    *,
    prompt_ids: Sequence[int] | None = None,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Go on from a restored cache of one sequence, which grows, by sampling without drafts.

    Arguments as for `speculate`. Raises what `continue_from` raises.
    """
    writer = _Writer(SamplingRule(sampling), max_new_tokens, frozenset(stop_ids), time.monotonic())
    decoder = CacheDecoder.of(restored, model, prompt_ids)
    writer.verify(decoder)
    writer.go_on(decoder)
    return writer.token_ids


def _check_same_prompt(expected: tuple[torch.Tensor, torch.Tensor], restored: Restored) -> None:
    found = (restored.input_ids, restored.attention_mask)
    if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
        raise IdentityMismatch("draft and full cache are of different prompts")


class _Writer:
    """The text so far: drafts, then verified tokens, with the time of each."""

    def __init__(
        self, rule: TokenRule, max_new_tokens: int, stop_ids: frozenset[int], started_at: float
    ) -> None:
        self.drafts: list[Draft] = []
        self.draft_times_s: list[float] = []
        self.token_ids: list[int] = []
        self.token_times_s: list[float] = []
        self._rule = rule
        self._max_new_tokens = max_new_tokens
        self._stop_ids = stop_ids
        self._started_at = started_at

    def now(self) -> float:
        return time.monotonic() - self._started_at

    def draft(
        self,
        decoder: Decoder,
        num_drafts: int,
        ready: Callable[[], bool] | None = None,
        on_draft: Callable[[int], None] | None = None,
    ) -> None:
        while len(self.drafts) < num_drafts and not (ready is not None and ready()):
            if self.drafts:
                if self.drafts[-1].token_id in self._stop_ids:
                    break
                decoder.extend([self.drafts[-1].token_id])
            self.drafts.append(self._rule.draft(decoder.logits))
            self.draft_times_s.append(self.now())
            if on_draft is not None:
                on_draft(self.drafts[-1].token_id)

    def verify(self, decoder: Decoder) -> int:
        """Judge all drafts in one pass; `decoder` has then seen the accepted ones only."""
        ids = [draft.token_id for draft in self.drafts]
        logits = decoder.logits[None]
        if ids:
            decoder.mark()
            logits = torch.cat([logits, decoder.extend(ids)])
        num_accepted, token_id = self._rule.accept(self.drafts, logits)
        if ids:
            decoder.keep(num_accepted)
        self.token_ids += ids[:num_accepted]
        self.token_times_s += self.draft_times_s[:num_accepted]
        if not self._is_finished():
            self._add(token_id)
        return num_accepted

    def go_on(self, decoder: Decoder) -> None:
        while not self._is_finished():
            decoder.extend(self.token_ids[-1:])
            self._add(self._rule.choose(decoder.logits))

    def _add(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.token_times_s.append(self.now())

    def _is_finished(self) -> bool:
        return len(self.token_ids) >= self._max_new_tokens or (
            bool(self.token_ids) and self.token_ids[-1] in self._stop_ids
        )
