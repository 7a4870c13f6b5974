"""Speculative decoding on tiny models: the text, the cache after a rollback, the distribution."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import WINDOW, prompt_ids, tiny_gemma, tiny_llama

from kvz.capture_metadata import LAYER_KINDS, LayerRecord, encode_metadata, pack_layers
from kvz.capturing import Capture, capture, capture_cache
from kvz.formats.errors import ConfigError, IdentityMismatch, SourceError, UnsupportedCache
from kvz.restoring import generate_from, restore
from kvz.speculation import Sampling, sample, speculate
from kvz.speculation.decoder import CacheDecoder, Decoder
from kvz.speculation.rollback import Snapshot, check_rollback, longest_rollback
from kvz.speculation.rules import Draft, GreedyRule, SamplingRule
from kvz.speculation.speculating import _Writer

NUM_NEW = 12
MODELS = [tiny_llama, tiny_gemma]
Build = Callable[..., Any]


def captured(build: Build, dtype: torch.dtype = torch.float32, num_tokens: int = 40) -> Any:
    """A model and a capture of it; a random model's logits are flat, so its head is scaled up."""
    model = build(dtype=dtype, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight *= 40
    return model, capture(model, prompt_ids(1, num_tokens), queries=0, chunk_tokens=16)


def perturbed(source: Capture, noise: float, seed: int = 0, logits: float = 0.0) -> Capture:
    """Another cache of the same prompt: noise relative to the spread of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(source.tensors)
    for name, tensor in source.tensors.items():
        amount = logits if name == "next_token_logits" else noise
        if name.endswith((".key", ".value", "logits")):
            random = torch.randn(tensor.shape, generator=generator)
            changed = tensor.float() + amount * tensor.float().std() * random
            tensors[name] = changed.to(tensor.dtype)
    return Capture(tensors, source.metadata, None)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def drafts_of(token_ids: Sequence[int]) -> list[Draft]:
    return [Draft(token_id) for token_id in token_ids]


# The text


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("max_drafts", [1, 5, 64])
def test_verified_text_is_greedy_text_of_the_full_cache(
    build: Build, noise: float, max_drafts: int
) -> None:
    model, full = captured(build)
    expected = generate_from(full, model, NUM_NEW)
    for seed in range(3):
        report = speculate(
            perturbed(full, noise, seed), full, model, NUM_NEW, max_drafts=max_drafts
        )
        assert list(report.token_ids) == expected
        assert report.num_drafted == min(max_drafts, NUM_NEW)
        kept = report.draft_ids[: report.num_accepted]
        assert list(kept) == expected[: report.num_accepted]
        if report.num_accepted < report.num_drafted:
            assert report.draft_ids[report.num_accepted] != expected[report.num_accepted]
        if not noise:
            assert report.num_accepted == report.num_drafted


def test_the_noise_of_these_tests_makes_drafts_diverge_early_and_late() -> None:
    model, full = captured(tiny_llama)
    accepted = {
        speculate(perturbed(full, noise, seed), full, model, NUM_NEW).num_accepted
        for noise in (0.05, 0.3, 1.0)
        for seed in range(3)
    }
    assert len(accepted) >= 3
    assert min(accepted) < NUM_NEW // 2


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize("num_right", range(8))
def test_drafts_that_are_wrong_from_any_position_are_corrected(
    build: Build, num_drafts: int, num_right: int
) -> None:
    model, full = captured(build)
    expected = generate_from(full, model, NUM_NEW)
    num_right = min(num_right, num_drafts)
    wrong = [(token + 1) % 128 for token in expected[num_right:num_drafts]]
    writer = _Writer(GreedyRule(), NUM_NEW, frozenset(), 0.0)
    writer.drafts = drafts_of(expected[:num_right] + wrong)
    writer.draft_times_s = [0.0] * num_drafts
    decoder = CacheDecoder.of(restore(full, model), model)
    assert writer.verify(decoder) == num_right
    assert writer.token_ids == expected[: num_right + 1]
    assert decoder.cache.get_seq_length() == 40 + num_right
    writer.go_on(decoder)
    assert writer.token_ids == expected


def test_a_wrong_first_token_is_corrected() -> None:
    model, full = captured(tiny_llama)
    draft = perturbed(full, 0.0, logits=3.0)
    report = speculate(draft, full, model, NUM_NEW)
    assert report.num_accepted == 0
    assert list(report.token_ids) == generate_from(full, model, NUM_NEW)


@pytest.mark.parametrize("build", MODELS)
def test_text_goes_on_after_a_prompt(build: Build) -> None:
    model, full = captured(build)
    prompt = [5, 9, 77]
    expected = generate_from(full, model, NUM_NEW, prompt)
    report = speculate(perturbed(full, 0.3), full, model, NUM_NEW, prompt_ids=prompt)
    assert list(report.token_ids) == expected


def test_a_prefix_of_the_cache_can_be_gone_on_from() -> None:
    model, full = captured(tiny_llama)
    expected = generate_from(full, model, NUM_NEW, [7], num_tokens=9)
    draft = perturbed(full, 0.3)
    report = speculate(draft, full, model, NUM_NEW, prompt_ids=[7], num_tokens=9)
    assert list(report.token_ids) == expected


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_text_ends_with_the_first_stop_id(noise: float) -> None:
    model, full = captured(tiny_llama)
    free = generate_from(full, model, NUM_NEW)
    draft = perturbed(full, noise)
    drafted = speculate(draft, full, model, NUM_NEW).draft_ids
    for stop_ids in [{free[0]}, {free[4]}, {free[-1]}, {free[3], free[8]}, set(drafted[2:5])]:
        expected = generate_from(full, model, NUM_NEW, stop_ids=stop_ids)
        report = speculate(draft, full, model, NUM_NEW, stop_ids=stop_ids)
        assert list(report.token_ids) == expected
        assert not stop_ids & set(report.draft_ids[:-1])


@pytest.mark.parametrize("num_new", [1, 2, 3])
def test_no_more_tokens_are_made_than_asked_for(num_new: int) -> None:
    model, full = captured(tiny_llama)
    report = speculate(full, full, model, num_new)
    assert list(report.token_ids) == generate_from(full, model, num_new)
    assert report.num_drafted == report.num_accepted == num_new


def test_drafting_ends_when_the_full_cache_is_there() -> None:
    model, full = captured(tiny_llama)
    expected = generate_from(full, model, NUM_NEW)
    seen: list[int] = []
    report = speculate(
        full, lambda: full, model, NUM_NEW, ready=lambda: len(seen) >= 3, on_draft=seen.append
    )
    assert seen == list(report.draft_ids) == expected[:3]
    assert list(report.token_ids) == expected
    report = speculate(perturbed(full, 1.0), full, model, NUM_NEW, ready=lambda: True)
    assert report.draft_ids == ()
    assert list(report.token_ids) == expected


def test_events_come_in_order() -> None:
    model, full = captured(tiny_llama)
    report = speculate(full, full, model, NUM_NEW, max_drafts=4)
    times = [*report.draft_times_s, report.full_ready_s, report.token_times_s[4]]
    assert times == sorted(times)
    assert report.full_ready_s < report.verified_s
    assert report.token_times_s[:4] == report.draft_times_s
    assert len(report.token_times_s) == NUM_NEW


def test_in_bfloat16_the_parallel_pass_of_the_verifier_decides() -> None:
    model, full = captured(tiny_gemma, torch.bfloat16)
    report = speculate(perturbed(full, 0.1), full, model, NUM_NEW)
    ids = torch.tensor([report.draft_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=restore(full, model).cache).logits[0]
    first = full.tensors["next_token_logits"]
    expected = torch.cat([first, logits]).argmax(-1).tolist()
    agreeing = [a == b for a, b in zip(report.draft_ids, expected, strict=False)]
    num_accepted = [*agreeing, False].index(False)
    assert report.num_accepted == num_accepted
    assert list(report.token_ids[: num_accepted + 1]) == expected[: num_accepted + 1][:NUM_NEW]


# The cache after a rollback


@contextmanager
def recording_updates(cache: Any) -> Iterator[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """New keys and values that each layer is given while open."""
    given: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in cache.layers]
    for layer, seen in zip(cache.layers, given, strict=True):

        def update(
            key: Any, value: Any, *args: Any, stock: Any = layer.update, seen: Any = seen, **kw: Any
        ) -> Any:
            seen.append((key.clone(), value.clone()))
            return stock(key, value, *args, **kw)

        layer.update = update
    yield given
    for layer in cache.layers:
        del layer.update


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("num_tokens", [3, WINDOW - 2, WINDOW - 1, WINDOW, 40])
@pytest.mark.parametrize("num_new", [1, 6, WINDOW - 1])
def test_rollback_leaves_exactly_the_accepted_tokens(
    build: Build, num_tokens: int, num_new: int
) -> None:
    model, full = captured(build, num_tokens=num_tokens)
    new = prompt_ids(1, num_new, seed=2)[0].tolist()
    for kept in range(num_new + 1):
        decoder = CacheDecoder.of(restore(full, model), model)
        layers = decoder.cache.layers
        before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
        decoder.mark()
        with recording_updates(decoder.cache) as given:
            decoder.extend(new)
        decoder.keep(kept)
        fresh = CacheDecoder.of(restore(full, model), model)
        if kept:
            fresh.extend(new[:kept])
        for i, layer in enumerate(layers):
            assert layer.get_seq_length() == num_tokens + kept
            width = getattr(layer, "sliding_window", None)
            for j, tensor in enumerate((layer.keys, layer.values)):
                whole = torch.cat([before[i][j], given[i][0][j][:, :, :kept]], dim=2)
                expected = whole if width is None else whole[:, :, 1 - width :]
                assert torch.equal(bits(tensor), bits(expected))
                other = fresh.cache.layers[i]
                assert torch.allclose(tensor, (other.keys, other.values)[j], atol=1e-5)
        assert torch.allclose(decoder.logits, fresh.logits, atol=1e-4)
        decoder.extend([11, 12])
        fresh.extend([11, 12])
        assert torch.allclose(decoder.logits, fresh.logits, atol=1e-4)


def test_nothing_of_the_draft_is_left_in_the_cache() -> None:
    model, full = captured(tiny_gemma)
    expected = generate_from(full, model, NUM_NEW)
    writer = _Writer(GreedyRule(), NUM_NEW, frozenset(), 0.0)
    writer.draft(CacheDecoder.of(restore(perturbed(full, 1.0), model), model), 8)
    decoder = CacheDecoder.of(restore(full, model), model)
    assert writer.verify(decoder) < 8
    writer.go_on(decoder)
    assert writer.token_ids == expected
    reference = CacheDecoder.of(restore(full, model), model)
    for token_id in expected[:-1]:
        reference.extend([token_id])
    for ours, theirs in zip(decoder.cache.layers, reference.cache.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == 40 + NUM_NEW - 1
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(ours.values, theirs.values, atol=1e-5)


def test_drafts_are_no_more_than_a_sliding_window_can_take_back() -> None:
    model, full = captured(tiny_gemma)
    report = speculate(perturbed(full, 0.3), full, model, 40)
    assert report.num_drafted == WINDOW - 1
    assert list(report.token_ids) == generate_from(full, model, 40)
    cache = restore(full, model).cache
    decoder = CacheDecoder(
        model, cache, torch.ones((1, 40), dtype=torch.long), torch.zeros((1, 128))
    )
    decoder.mark()
    decoder.extend(list(range(WINDOW)))
    with pytest.raises(ConfigError, match="a window of 16 has dropped some of the 16 new tokens"):
        decoder.keep(3)
    decoder.keep(WINDOW)
    assert cache.get_seq_length() == 40 + WINDOW


def test_tokens_can_be_taken_back_once_after_a_mark() -> None:
    model, full = captured(tiny_llama)
    decoder = CacheDecoder.of(restore(full, model), model)
    with pytest.raises(ConfigError, match="once after a mark"):
        decoder.keep(0)
    decoder.mark()
    decoder.extend([1, 2])
    with pytest.raises(ConfigError, match="cannot keep 3 of 2 new tokens"):
        decoder.keep(3)


def test_windows_limit_how_much_can_be_taken_back() -> None:
    layers = [LayerRecord("full"), LayerRecord("sliding", 512), LayerRecord("sliding", 16)]
    assert longest_rollback(layers[:1]) is None
    assert longest_rollback(layers) == 15
    assert longest_rollback([LayerRecord("sliding", 1)]) is None


# What is refused


def test_every_kind_but_full_sliding_and_empty_is_refused() -> None:
    allowed = {"full", "sliding", "empty"}
    for kind in LAYER_KINDS:
        windowed = "sliding" in kind or "compressed" in kind
        layers = [LayerRecord("full"), LayerRecord(kind, 4 if windowed else None)]
        if kind in allowed:
            check_rollback(layers, {"class": "DynamicCache"})
            continue
        with pytest.raises(UnsupportedCache, match=f"cache layer 1 of kind '{kind}', only from"):
            check_rollback(layers, {"class": "DynamicCache"})
    with pytest.raises(UnsupportedCache, match="cannot be taken back from a StaticCache"):
        check_rollback([LayerRecord("full")], {"class": "StaticCache", "max_cache_len": 64})


def never() -> Any:
    pytest.fail("the full cache was asked for")


def test_an_evicted_cache_is_refused_before_any_work() -> None:
    _, full = captured(tiny_llama)
    document = json.loads(full.metadata["kvz"])
    record = LayerRecord("evicted", num_tokens=10, cumulative_length=40)
    metadata = encode_metadata({**document, "layers": pack_layers([record] * 3)})
    # no model: it must not be needed
    with pytest.raises(UnsupportedCache, match="layer 0 of kind 'evicted'"):
        speculate(Capture(full.tensors, metadata, None), never, None)


def test_a_static_cache_is_refused() -> None:
    from transformers import StaticCache

    model = tiny_llama(dtype=torch.float32)
    ids = prompt_ids(1, 8)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache).logits[:, -1]
    try:
        source = capture_cache(model, cache, ids, next_token_logits=logits)
    except UnsupportedCache:
        pytest.skip("this release of transformers does not count the tokens of a static cache")
    with pytest.raises(UnsupportedCache, match="cannot be taken back from a StaticCache"):
        speculate(source, never, model)
    with pytest.raises(UnsupportedCache, match="cache layer 0 of kind 'static'"):
        Snapshot(cache)


def test_caches_of_different_prompts_are_refused() -> None:
    model, full = captured(tiny_llama)
    other = capture(model, prompt_ids(1, 40, seed=9), queries=0)
    with pytest.raises(IdentityMismatch, match="of different prompts"):
        speculate(full, other, model, 4)


def test_a_batch_is_refused() -> None:
    model = tiny_llama(dtype=torch.float32)
    batch = capture(model, prompt_ids(2, 10), queries=0)
    with pytest.raises(ConfigError, match="can generate from one sequence, cache has 2"):
        speculate(batch, never, model, 4)


def test_what_ends_the_arrival_of_the_full_cache_is_raised() -> None:
    model, full = captured(tiny_llama)

    def broken() -> Any:
        raise SourceError("connection reset")

    with pytest.raises(SourceError, match="connection reset"):
        speculate(full, broken, model, 4, ready=lambda: False)


@pytest.mark.parametrize("given", [{"max_drafts": 0}, {"max_new_tokens": 0}])
def test_counts_below_one_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        speculate(None, never, None, **given)  # type: ignore[arg-type]


# Sampling


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"temperature": 0.5}, [0.25 / 0.34375, 0.0625 / 0.34375, 1 / 22, 1 / 22]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        # ties with the last one stay
        ({"top_k": 3}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.8}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"top_p": 1.0}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
    ],
)
def test_probabilities_worked_by_hand(given: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([4.0, 2.0, 1.0, 1.0]).log()
    found = Sampling(**given).probabilities(logits)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    "given",
    [
        *({"temperature": value} for value in (0.0, -1.0, float("nan"), float("inf"))),
        *({"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}, {"seed": 1 << 63}),
    ],
)
def test_sampling_without_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        Sampling(**given)


def test_sampling_from_one_token_is_greedy() -> None:
    model, full = captured(tiny_gemma)
    sampling = Sampling(temperature=2.0, top_k=1)
    report = speculate(perturbed(full, 0.3), full, model, NUM_NEW, sampling=sampling)
    assert list(report.token_ids) == generate_from(full, model, NUM_NEW)
    assert sample(restore(full, model), model, sampling, NUM_NEW) == list(report.token_ids)


def test_the_same_seed_gives_the_same_tokens() -> None:
    model, full = captured(tiny_gemma)
    draft = perturbed(full, 0.3)
    first, again, other = (
        speculate(draft, full, model, NUM_NEW, sampling=Sampling(2.0, seed=seed)).token_ids
        for seed in (3, 3, 4)
    )
    assert first == again != other


VOCAB = 5
DEPTH = 3
RUNS = 20_000
Table = Mapping[tuple[int, ...], torch.Tensor]


class TableDecoder:
    """A decoder whose logits were computed before, for every text of up to `DEPTH` tokens."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._seen: tuple[int, ...] = ()

    @property
    def logits(self) -> torch.Tensor:
        return self._table[self._seen]

    def extend(self, token_ids: Sequence[int]) -> torch.Tensor:
        self._before = self._seen
        rows = []
        for token_id in token_ids:
            self._seen += (token_id,)
            rows.append(self._table[self._seen])
        return torch.stack(rows)

    def mark(self) -> None:
        pass

    def keep(self, num_tokens: int) -> None:
        self._seen = self._seen[: len(self._before) + num_tokens]


def table_of(source: Capture, model: Any) -> Table:
    """Logits of the model after the source's prompt and each text of up to `DEPTH` tokens."""
    decoder = CacheDecoder.of(restore(source, model), model)
    table = {(): decoder.logits}
    for text in itertools.product(range(VOCAB), repeat=DEPTH):
        decoder.mark()
        rows = decoder.extend(text)
        decoder.keep(0)
        table.update({text[: i + 1]: rows[i] for i in range(DEPTH)})
    return table


def exact_distribution(table: Table, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each text of `DEPTH` tokens, by enumeration."""
    steps = {seen: sampling.probabilities(logits).tolist() for seen, logits in table.items()}
    found = {}
    for text in itertools.product(range(VOCAB), repeat=DEPTH):
        found[text] = 1.0
        for i in range(DEPTH):
            found[text] *= steps[text[:i]][text[i]]
    return found


def chi_square(counts: Counter[tuple[int, ...]], exact: Mapping[tuple[int, ...], float]) -> float:
    """The statistic as a standard normal deviate (Wilson and Hilferty), rare texts pooled."""
    total = sum(counts.values())
    assert not [text for text in counts if exact[text] == 0]
    pairs = [(counts[text], total * p) for text, p in exact.items() if total * p >= 8]
    rest = (total - sum(n for n, _ in pairs), total - sum(e for _, e in pairs))
    if rest[1] >= 8:
        pairs.append(rest)
    freedom = len(pairs) - 1
    assert freedom > 20
    statistic = sum((n - e) ** 2 / e for n, e in pairs)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


@pytest.fixture(scope="module")
def tables() -> tuple[Table, Table]:
    """Of the full cache and of a draft that differs a lot, from the first token on."""
    model = tiny_llama(dtype=torch.float32, vocab_size=VOCAB, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight *= 12
    full = capture(model, prompt_ids(1, 24) % VOCAB, queries=0)
    return table_of(full, model), table_of(perturbed(full, 1.0, logits=0.6), model)


def texts(
    draft: Table, full: Table, rule: SamplingRule, max_drafts: Sequence[int]
) -> Iterator[_Writer]:
    for num_drafts in itertools.islice(itertools.cycle(max_drafts), RUNS):
        writer = _Writer(rule, DEPTH, frozenset(), 0.0)
        drafter: Decoder = TableDecoder(draft)
        writer.draft(drafter, num_drafts)
        verifier: Decoder = TableDecoder(full)
        writer.verify(verifier)
        writer.go_on(verifier)
        yield writer


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(1.3, top_p=0.95, seed=2)])
def test_speculation_does_not_change_the_distribution(
    tables: tuple[Table, Table], sampling: Sampling
) -> None:
    full, draft = tables
    exact = exact_distribution(full, sampling)
    runs = list(texts(draft, full, SamplingRule(sampling), (1, 2, 3)))
    with_drafts = Counter(tuple(writer.token_ids) for writer in runs)
    # 4: one in 30,000 by chance, and the seed is fixed
    assert abs(chi_square(with_drafts, exact)) < 4
    without = texts(draft, full, SamplingRule(sampling), (0,))
    assert abs(chi_square(Counter(tuple(w.token_ids) for w in without), exact)) < 4
    # the same statistic sees the difference between the two caches at once
    drafted = exact_distribution(draft, sampling)
    rejected = sum(
        [d.token_id for d in writer.drafts] != writer.token_ids[: len(writer.drafts)]
        for writer in runs
    )
    assert 0.1 * RUNS < rejected < 0.9 * RUNS
    distance = sum(abs(exact[text] - drafted[text]) for text in exact) / 2
    assert distance > 0.1


def test_the_chi_square_tells_a_rule_that_keeps_too_many_drafts(
    tables: tuple[Table, Table],
) -> None:
    class Lenient(SamplingRule):
        """Keeps drafts that are at least half as likely as they should be."""

        def accept(self, drafts: Sequence[Draft], logits: torch.Tensor) -> tuple[int, int]:
            halved = [Draft(d.token_id, d.probabilities * 0.5) for d in drafts]
            return super().accept(halved, logits)

    full, draft = tables
    sampling = Sampling(seed=1)
    runs = texts(draft, full, Lenient(sampling), (1, 2, 3))
    counts = Counter(tuple(writer.token_ids) for writer in runs)
    assert chi_square(counts, exact_distribution(full, sampling)) > 10
