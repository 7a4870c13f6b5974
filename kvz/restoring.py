"""Restore: build the cache a model would have after its prompt, from a file, or refuse."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvz import hf
from kvz.capture_metadata import LayerRecord, decode_metadata, unpack_layers
from kvz.formats.errors import ConfigError, IdentityMismatch, InvalidField
from kvz.identity import Mismatch, compare_identity, identity_error, model_identity
from kvz.source_protocol import CacheSource
from kvz.state_reader import open_source, read_prompt, read_states

# Prompts fed on top of a restored cache go through in pieces of this many tokens.
_PROMPT_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Restored:
    """A restored cache and what is needed to go on from it.

    cache: transformers cache on the model's device. input_ids, attention_mask: int64
    `[batch, tokens]`, CPU. next_token_logits: `[batch, vocab]`, CPU; None when the file has none
    or the cache is a shorter prefix. mismatches: what `force` overrode; empty without it.
    """

    cache: Any
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    next_token_logits: torch.Tensor | None
    mismatches: tuple[Mismatch, ...] = ()


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
        cache = hf.new_cache(model)
        model_layers = hf.cache_layers(cache)
        mismatches = _check_model(document, model, model_layers, force)
        _check_shard(document)
        layers = unpack_layers(document["layers"])
        prompt = read_prompt(opened, document, input_ids)
        total = prompt.input_ids.shape[1]
        _check_layers(layers, model_layers, total)
        kept = _check_prefix(layers, total, num_tokens)
        states = read_states(opened, layers, document["identity"]["dtype"], prompt.input_ids)
    _fill(cache, states, layers, model, None if kept == total else kept)
    return Restored(
        cache,
        prompt.input_ids[:, :kept],
        prompt.attention_mask[:, :kept],
        prompt.next_token_logits if kept == total else None,
        tuple(mismatches),
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
        logits = hf.feed(model, cache, token, mask)
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
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Restore a cache of one sequence and go on greedily, after `prompt_ids` when given.

    Raises ConfigError for a batch, and when there is neither a prompt nor stored logits;
    else as `restore`.
    """
    restored = restore(source, model, force=force)
    if len(restored.input_ids) != 1:
        raise ConfigError(f"can generate from one sequence, cache has {len(restored.input_ids)}")
    mask, logits = restored.attention_mask, restored.next_token_logits
    if prompt_ids:
        prompt = torch.tensor([list(prompt_ids)], dtype=torch.long)
        mask = torch.cat([mask, torch.ones_like(prompt)], dim=1)
        for start in range(0, prompt.shape[1], _PROMPT_CHUNK_TOKENS):
            chunk = prompt[:, start : start + _PROMPT_CHUNK_TOKENS].to(model.device)
            logits = hf.feed(model, restored.cache, chunk, mask.to(model.device))
    if logits is None:
        raise ConfigError("cache has no next_token_logits: give a prompt to go on from")
    tokens = greedy(
        model, restored.cache, logits, max_new_tokens, attention_mask=mask, stop_ids=stop_ids
    )
    return [int(token) for token in tokens[0]]


def _check_model(
    document: dict[str, Any], model: Any, model_layers: Sequence[LayerRecord], force: bool
) -> list[Mismatch]:
    mismatches = compare_identity(document["identity"], model_identity(model, model_layers))
    if mismatches and not force:
        raise identity_error(mismatches)
    return mismatches


def _check_shard(document: dict[str, Any]) -> None:
    heads = document["shard"].get("kv_heads")
    if not isinstance(heads, list) or len(heads) != 3:
        raise InvalidField(f"kvz metadata: shard.kv_heads must be [first, end, of], got {heads!r}")
    if heads[0] != 0 or heads[1] != heads[2]:
        raise IdentityMismatch(
            f"cache is a shard: kv heads {heads[0]} to {heads[1]} of {heads[2]}; "
            "restore needs all of them in one file"
        )


def _check_prefix(layers: Sequence[LayerRecord], total: int, num_tokens: int | None) -> int:
    """Number of tokens to keep, the first of `total`."""
    if num_tokens is None:
        return total
    if not 0 <= num_tokens <= total:
        raise ConfigError(f"num_tokens must be 0 to {total}, got {num_tokens}")
    partial = [i for i, layer in enumerate(layers) if layer.kind == "sliding"]
    if partial and num_tokens != total:
        raise ConfigError(
            f"only a cache of full layers has prefixes, layer {partial[0]} keeps a sliding window"
        )
    return num_tokens


def _check_layers(
    layers: Sequence[LayerRecord], model_layers: Sequence[LayerRecord], total: int
) -> None:
    # also under force: tokens of one window in a layer of another would sit at wrong positions
    if len(layers) != len(model_layers):
        raise IdentityMismatch(f"file has {len(layers)} cache layers, model {len(model_layers)}")
    for layer_idx, (ours, theirs) in enumerate(zip(layers, model_layers, strict=True)):
        if (ours.kind, ours.window) != (theirs.kind, theirs.window):
            raise IdentityMismatch(
                f"layer {layer_idx}: file {ours.kind} with window {ours.window}, "
                f"model {theirs.kind} with window {theirs.window}"
            )
        if ours.cumulative_length not in (0, total):
            raise InvalidField(
                f"layer {layer_idx} has seen {ours.cumulative_length} of {total} tokens"
            )


def _fill(
    cache: Any,
    states: dict[int, tuple[torch.Tensor, torch.Tensor]],
    layers: Sequence[LayerRecord],
    model: Any,
    num_tokens: int | None,
) -> None:
    devices = hf.layer_devices(model, len(layers))
    for layer_idx in sorted(states):
        # popped, so that at most one layer is held twice
        key, value = (
            tensor[:, :, :num_tokens].to(device=devices[layer_idx], dtype=model.dtype)
            for tensor in states.pop(layer_idx)
        )
        if not key.shape[2]:
            continue
        layer = cache.layers[layer_idx]
        layer.update(key, value)
        if layers[layer_idx].kind == "sliding":
            # update counted the kept tokens; positions go on from all that were seen
            layer.cumulative_length = layers[layer_idx].cumulative_length
