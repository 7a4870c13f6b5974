"""Restore: build the cache a model would have after its prompt, from a file, or refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvz import hf
from kvz.capture_metadata import LayerRecord, decode_metadata, read_shard, unpack_layers
from kvz.formats.errors import ConfigError, IdentityMismatch, InvalidField
from kvz.identity import Mismatch, compare_identity, identity_error, model_identity
from kvz.layers.containers import container_of, layer_objects, note_cross_attention
from kvz.layers.table import ONE_PASS_KINDS, has_prefix, put_layer
from kvz.source_protocol import CacheSource
from kvz.state_reader import open_source, read_prompt, read_states
from kvz.torch_dtypes import TORCH_DTYPES

# Prompts fed on top of a restored cache go through in pieces of this many tokens.
_PROMPT_CHUNK_TOKENS = 1024

_LAYER_ARGUMENTS = (
    *("max_cache_len", "number_of_states"),
    *("nbits", "axis_key", "axis_value", "q_group_size", "residual_length"),
)


@dataclass(frozen=True)
class Restored:
    """A restored cache and what is needed to go on from it.

    cache: transformers cache on the model's device. input_ids, attention_mask: int64
    `[batch, tokens]`, CPU. next_token_logits: `[batch, vocab]`, CPU; None when the file has none
    or the cache is a shorter prefix. mismatches: what `force` overrode; empty without it.
    identity: whose cache the source said it is.
    """

    cache: Any
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    next_token_logits: torch.Tensor | None
    mismatches: tuple[Mismatch, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)


def to_cache(
    source: str | Path | CacheSource,
    model: Any,
    *,
    force: bool = False,
    num_tokens: int | None = None,
) -> Any:
    """The transformers cache in `source`; see `restore` for arguments and errors."""
    return restore(source, model, force=force, num_tokens=num_tokens).cache


def restore(
    source: str | Path | CacheSource,
    model: Any,
    *,
    force: bool = False,
    num_tokens: int | None = None,
    input_ids: torch.Tensor | None = None,
) -> Restored:
    """Rebuild the cache in `source` for `model`, all of it or none.

    source: path of an archive or `.safetensors` capture, or one opened. force: accept a cache
    of another model (values are converted to the model's dtype). num_tokens: only the first
    tokens; needs every layer full. input_ids: the prompt `[batch, tokens]` that the cache must
    be of. Raises IdentityMismatch when the cache is of another model, of other tokens, or of a
    part of the heads; InvalidField when its tensors contradict its metadata; UnsupportedCache
    for layers that kvz or the model cannot hold; ConfigError for a num_tokens out of range.
    """
    with open_source(source) as opened:
        document = decode_metadata(opened.metadata)
        mismatches = check_model(document, model, force=force)
        check_shard(document)
        layers, container = unpack_layers(document["layers"]), container_of(document)
        prompt = read_prompt(opened, document, input_ids)
        batch, total = prompt.input_ids.shape
        cache = hf.make_cache(model, container, len(layers))
        _check_layers(layers, hf.cache_layers(cache), container, total)
        kept = _check_prefix(layers, total, num_tokens)
        dtype = document["identity"]["dtype"]
        states = read_states(opened, layers, container, dtype, batch)
    _fill(cache, states, layers, model, dtype, None if kept == total else kept)
    return Restored(
        cache,
        prompt.input_ids[:, :kept],
        prompt.attention_mask[:, :kept],
        prompt.next_token_logits if kept == total else None,
        tuple(mismatches),
        document["identity"],
    )


def greedy(
    model: Any,
    cache: Any,
    next_token_logits: torch.Tensor,
    max_new_tokens: int,
    *,
    attention_mask: torch.Tensor,
    stop_ids: Collection[int] = (),
) -> torch.Tensor:
    """Greedy tokens `[batch, <= max_new_tokens]` int64 on the CPU, one forward pass each.

    cache: grows by all tokens but the last. next_token_logits: `[batch, vocab]`, the logits
    that choose the first token. attention_mask: int64 `[batch, tokens]` over the cached columns.
    Ends early once every row has produced one of stop_ids.
    """
    device = model.device
    mask = attention_mask.to(device)
    logits = next_token_logits.to(device)
    tokens: list[torch.Tensor] = []
    stopped = torch.zeros(len(logits), dtype=torch.bool)
    for step in range(max_new_tokens):
        token = logits.argmax(dim=-1, keepdim=True)
        tokens.append(token.cpu())
        stopped |= torch.isin(tokens[-1][:, 0], torch.tensor(list(stop_ids), dtype=torch.long))
        if bool(stopped.all()) or step == max_new_tokens - 1:
            break
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        logits = hf.feed(model, cache, token, mask, mask.shape[1] - 1)
    if not tokens:
        return torch.empty((len(logits), 0), dtype=torch.long)
    return torch.cat(tokens, dim=1)


def generate_from(
    source: str | Path | CacheSource,
    model: Any,
    max_new_tokens: int = 64,
    prompt_ids: Sequence[int] | None = None,
    *,
    force: bool = False,
    num_tokens: int | None = None,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Restore a cache of one sequence and go on greedily, after `prompt_ids` when given.

    Raises what `restore` and `continue_from` raise.
    """
    restored = restore(source, model, force=force, num_tokens=num_tokens)
    return continue_from(restored, model, max_new_tokens, prompt_ids, stop_ids=stop_ids)


def continue_from(
    restored: Restored,
    model: Any,
    max_new_tokens: int = 64,
    prompt_ids: Sequence[int] | None = None,
    *,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Go on greedily from a restored cache of one sequence, which grows.

    Raises ConfigError for a batch, and when there is neither a prompt nor stored logits.
    """
    mask, logits = feed_prompt(restored, model, prompt_ids)
    tokens = greedy(
        model, restored.cache, logits, max_new_tokens, attention_mask=mask, stop_ids=stop_ids
    )
    return [int(token) for token in tokens[0]]


def feed_prompt(
    restored: Restored, model: Any, prompt_ids: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a restored cache of one sequence see `prompt_ids`; the mask and logits to go on with.

    Returns the attention mask int64 `[1, tokens]` over all columns seen, and the logits
    `[1, vocab]` after the last of them. Raises what `continue_from` raises.
    """
    if len(restored.input_ids) != 1:
        raise ConfigError(f"can generate from one sequence, cache has {len(restored.input_ids)}")
    mask, logits = restored.attention_mask, restored.next_token_logits
    if prompt_ids:
        prompt = torch.tensor([list(prompt_ids)], dtype=torch.long)
        start = mask.shape[1]
        mask = torch.cat([mask, torch.ones_like(prompt)], dim=1)
        step = _prompt_step(restored)
        for first in range(0, prompt.shape[1], step):
            chunk = prompt[:, first : first + step].to(model.device)
            logits = hf.feed(model, restored.cache, chunk, mask.to(model.device), start + first)
    if logits is None:
        raise ConfigError("a part of a cache has no logits to go on from: give a prompt (--prompt)")
    return mask, logits


def _prompt_step(restored: Restored) -> int:
    """Tokens of a prompt to feed at once.

    One for caches that models may not extend by several: recurrent states, and layers of which
    the causal mask of several tokens would not know how many were evicted.
    """
    layers = hf.cache_layers(restored.cache)
    seen = restored.input_ids.shape[1]
    plain = all(
        layer.kind not in ONE_PASS_KINDS and layer.cumulative_length in (0, seen)
        for layer in layers
    )
    return _PROMPT_CHUNK_TOKENS if plain else 1


def check_model(document: dict[str, Any], model: Any, *, force: bool = False) -> list[Mismatch]:
    """In what a file's identity differs from a model's. Raises IdentityMismatch unless forced."""
    identity = model_identity(model, hf.cache_layers(hf.new_cache(model)))
    mismatches = compare_identity(document["identity"], identity)
    if mismatches and not force:
        raise identity_error(mismatches)
    return mismatches


def check_shard(document: dict[str, Any]) -> None:
    """Refuse a part of the heads. Raises IdentityMismatch, InvalidField."""
    first, end, of = read_shard(document)
    if (first, end) != (0, of):
        raise IdentityMismatch(
            f"cache is a shard: kv heads {first} to {end} of {of}; "
            "restore needs all of them in one file (kvz merge)"
        )


def _check_prefix(layers: Sequence[LayerRecord], total: int, num_tokens: int | None) -> int:
    """Number of tokens to keep, the first of `total`."""
    if num_tokens is None:
        return total
    if not 0 <= num_tokens <= total:
        raise ConfigError(f"a prefix of {total} tokens has 0 to {total} of them, not {num_tokens}")
    partial = [i for i, layer in enumerate(layers) if not has_prefix(layer)]
    if partial and num_tokens != total:
        kind = layers[partial[0]].kind
        what = "a sliding window" if kind == "sliding" else f"a state of kind {kind!r}"
        raise ConfigError(
            f"only a cache of full layers has prefixes, layer {partial[0]} keeps {what}"
        )
    return num_tokens


def _check_layers(
    layers: Sequence[LayerRecord],
    made: Sequence[LayerRecord],
    container: Mapping[str, Any],
    total: int,
) -> None:
    # also under force: tokens of one window in a layer of another would sit at wrong positions
    if len(layers) != len(made):
        raise IdentityMismatch(f"file has {len(layers)} cache layers, model {len(made)}")
    for layer_idx, (ours, theirs) in enumerate(zip(layers, made, strict=True)):
        kind = "full" if ours.kind == "evicted" else ours.kind
        if (kind, ours.window) != (theirs.kind, theirs.window):
            raise IdentityMismatch(
                f"layer {layer_idx}: file {kind} with window {ours.window}, "
                f"model {theirs.kind} with window {theirs.window}"
            )
        for name, value in theirs.options.items():
            # what a fresh layer was made with; the counts of a filled one may differ
            if name in _LAYER_ARGUMENTS and ours.options.get(name) != value:
                raise IdentityMismatch(
                    f"layer {layer_idx}: {name}: file {ours.options.get(name)}, model {value}"
                )
        own = layer_idx < container.get("num_self_layers", len(layers))
        if own and ours.cumulative_length not in (0, total):
            raise InvalidField(
                f"layer {layer_idx} has seen {ours.cumulative_length} of {total} tokens"
            )


def _fill(
    cache: Any,
    states: list[dict[str, torch.Tensor]],
    layers: Sequence[LayerRecord],
    model: Any,
    dtype: str,
    num_tokens: int | None,
) -> None:
    objects = layer_objects(cache)
    devices = hf.layer_devices(model, len(layers))
    stored = TORCH_DTYPES.get(dtype)
    for layer_idx, layer in enumerate(layers):
        # popped, so that at most one layer is held twice
        tensors = {
            part: tensor.to(
                device=devices[layer_idx],
                # under force the model may compute in another dtype
                dtype=model.dtype if tensor.dtype == stored else tensor.dtype,
            )
            for part, tensor in states[layer_idx].items()
        }
        states[layer_idx] = {}
        if tensors or layer.options:
            put_layer(objects[layer_idx], layer, tensors, num_tokens)
    note_cross_attention(cache)
