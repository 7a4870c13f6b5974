"""Replace the values of a cache restored from anchors by those of the whole archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvz.capture_metadata import decode_metadata, unpack_layers
from kvz.formats.errors import IdentityMismatch, UnsupportedCache
from kvz.identity import compare_identity, identity_error
from kvz.layers.attention import num_held
from kvz.layers.containers import container_of, layer_objects
from kvz.layers.table import layer_kind
from kvz.restoring import Restored
from kvz.source_protocol import CacheSource
from kvz.state_reader import Prompt, open_source, read_prompt, read_states

_KINDS = frozenset({"full", "sliding"})


def refine(restored: Restored, source: str | Path | CacheSource) -> None:
    """Give the prompt's tokens in `restored.cache` the keys and values of `source`, in place.

    restored: of :func:`kvz.restore`, from the anchors of the same archive, all of its tokens.
    Tokens that the cache has seen since stay as they are: their keys and values were computed on
    the anchors. A sliding layer refines what it still holds. source: the whole cache.
    All of it is refined or, when this raises, nothing. Raises IdentityMismatch when it is a cache
    of another model, other tokens or shapes, UnsupportedCache for layers other than full and
    sliding ones, and what a restore raises of the source.
    """
    with open_source(source) as opened:
        document = decode_metadata(opened.metadata)
        layers, container = unpack_layers(document["layers"]), container_of(document)
        prompt = read_prompt(opened, document, None)
        _check_prompt(restored, prompt)
        mismatches = compare_identity(document["identity"], restored.identity)
        if mismatches:
            raise identity_error(mismatches)
        dtype, batch = document["identity"]["dtype"], len(prompt.input_ids)
        states = read_states(opened, layers, container, dtype, batch)
    objects = layer_objects(restored.cache)
    if len(objects) != len(states):
        raise IdentityMismatch(
            f"the cache to refine has {len(objects)} layers, the source {len(states)}"
        )
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer_idx, (layer, state) in enumerate(zip(objects, states, strict=True)):
        kind = layer_kind(layer, layer_idx)
        if state and kind not in _KINDS:
            raise UnsupportedCache(
                f"cache layer {layer_idx} of kind {kind!r} cannot be refined, only full and "
                "sliding ones"
            )
        if state:
            pairs += _pairs(layer, layer_idx, state, prompt.input_ids.shape[1])
    # keys of a forward pass in this mode may be changed in this mode only
    with torch.inference_mode():
        for held, refined in pairs:
            held.copy_(refined)


def _check_prompt(restored: Restored, prompt: Prompt) -> None:
    for name in ("input_ids", "attention_mask"):
        if not torch.equal(getattr(prompt, name), getattr(restored, name)):
            what = "tokens" if name == "input_ids" else "padding"
            raise IdentityMismatch(f"the cache to refine holds other {what} than the source")


def _pairs(
    layer: Any, layer_idx: int, state: dict[str, torch.Tensor], num_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a layer holds of the prompt, and what it is to hold. Raises IdentityMismatch."""
    num_new = int(layer.get_seq_length()) - num_tokens
    if num_new < 0:
        raise IdentityMismatch(
            f"cache layer {layer_idx} has lost {-num_new} of the prompt's {num_tokens} tokens"
        )
    num_kept = num_held(layer.keys) - num_new
    if num_kept <= 0:
        return
    for tensor, part in ((layer.keys, "key"), (layer.values, "value")):
        if part in state:
            held = tensor[:, :, :num_kept]
            # the newest of the prompt's tokens; a full layer holds all of them
            refined = state[part][:, :, max(0, state[part].shape[2] - num_kept) :]
            if held.shape != refined.shape:
                raise IdentityMismatch(
                    f"cache layer {layer_idx} holds {part}s {list(held.shape)} of the prompt, "
                    f"the source {list(refined.shape)}"
                )
            yield held, refined
