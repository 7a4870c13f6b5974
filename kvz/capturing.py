"""Capture: run a prompt through a model and keep its KV cache with proof of whose it is."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from kvz import hf
from kvz.attention_recorder import AttentionRecorder, attention_facts
from kvz.capture_metadata import LayerRecord, encode_metadata, pack_layers
from kvz.formats.errors import ConfigError, UnsupportedCache
from kvz.identity import dtype_name, model_identity, token_hash
from kvz.layers.containers import CacheContents, read_cache, tensor_name
from kvz.layers.table import IN_PLACE_KINDS, ONE_PASS_KINDS
from kvz.torch_dtypes import describe_tensor

# Kinds whose attention takes the layer's own keys in the order of the tokens.
_RECORDED_KINDS = frozenset({"full", "sliding", "hybrid", "hybrid_sliding"})


@dataclass(frozen=True)
class Capture:
    """A captured KV cache; a `CacheSource`, so that it can be compressed without a file between.

    tensors: by name, contiguous, on the CPU. `layers.{i}.key` and `layers.{i}.value`
    `[batch, kv_heads, tokens, head_dim]`, `layers.{i}.query` `[batch, q_heads, n, head_dim]`,
    `layers.{i}.query_pair_norm` and `layers.{i}.key_pair_norm` float32
    `[blocks, heads, num_pairs]` (means over blocks of 1,024 columns of the prompt),
    `query_positions` int64 `[n]` (columns of the prompt), `input_ids`, `attention_mask` and
    `position_ids` int64 `[batch, tokens]`, `next_token_logits` `[batch, vocab]`.
    metadata: safetensors metadata, see `kvz.capture_metadata`.
    cache: the live transformers cache, to go on generating in this process. Tensors may share
    its memory: generating leaves them alone, changing the cache in place does not.
    """

    tensors: dict[str, torch.Tensor] = field(repr=False)
    metadata: dict[str, str] = field(repr=False)
    cache: Any = field(repr=False, compare=False)

    @property
    def tensor_names(self) -> Sequence[str]:
        """Names of all tensors, in file order."""
        return list(self.tensors)

    def dtype(self, name: str) -> str:
        """Safetensors dtype string of a tensor."""
        return dtype_name(self.tensors[name].dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor."""
        return tuple(self.tensors[name].shape)

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """The tensor as unsigned integers of its width."""
        return describe_tensor(self.tensors[name])[1]

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a safetensors file; it appears complete or not at all.

        Raises SourceError when it exists and overwrite is false.
        """
        from kvz.safetensors_io import write_safetensors

        write_safetensors(path, self.tensors, self.metadata, overwrite=overwrite)


def capture(
    model: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    queries: int = 256,
    chunk_tokens: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> Capture:
    """Prefill `model` with a prompt, `chunk_tokens` at a time, and keep its cache.

    input_ids: int64 `[batch, tokens]`. attention_mask: 0 for left padding, 1 for tokens; all
    ones by default. queries: of how many last positions to keep the queries, 0 for none.
    chunk_tokens: models with recurrent states take the prompt in one pass whatever it says.
    progress: called with (tokens done, tokens in all) after each chunk. The model is left as it
    was. Raises ConfigError for arguments that make no sense and UnsupportedCache, before any
    work where possible, for a model whose cache kvz cannot store exactly.
    """
    input_ids, mask = _check_inputs(input_ids, attention_mask, queries, chunk_tokens)
    num_tokens = input_ids.shape[1]
    num_queries = min(queries, num_tokens)
    hf.check_model(model)
    cache = hf.new_cache(model)
    layers = hf.cache_layers(cache)
    if any(layer.kind in ONE_PASS_KINDS for layer in layers):
        chunk_tokens = num_tokens
    # before the prefill: RoPE that adapts to the prompt's length changes the model's buffers
    identity = model_identity(model, layers)
    recorder = AttentionRecorder(model, mask.bool(), num_queries)
    device_ids, device_mask = input_ids.to(model.device), mask.to(model.device)
    with hf.recording_attention(model, recorder.record):
        for start in range(0, num_tokens, chunk_tokens):
            recorder.start = start
            chunk = device_ids[:, start : start + chunk_tokens]
            logits = hf.feed(model, cache, chunk, device_mask, start)
            if progress is not None:
                progress(start + chunk.shape[1], num_tokens)

    contents = read_cache(cache, model.dtype)
    _check_states(contents, model)
    cached = [i for i, layer in enumerate(contents.layers) if layer.num_tokens]
    recorded = bool(cached) and all(
        recorder.saw_all(i) and contents.layers[i].kind in _RECORDED_KINDS for i in cached
    )
    tensors = _layer_tensors(contents, recorder if recorded else None)
    if recorded and num_queries:
        tensors["query_positions"] = torch.arange(num_tokens - num_queries, num_tokens)
    document = {
        **_document(identity, contents, tensors, input_ids, mask),
        "origin": "captured from a model by kvz",
        "capture": {
            "chunk_tokens": chunk_tokens,
            "queries": num_queries if recorded else 0,
            "device": str(model.device),
        },
        **(attention_facts(identity["config"], recorder, cached) if recorded else {}),
    }
    if not recorded:
        document["capture"]["note"] = "attention not reachable: no queries and no pair norms"
    tensors.update(_prompt_tensors(input_ids, mask, logits))
    return Capture(tensors, encode_metadata(document), cache)


def capture_cache(
    model: Any,
    cache: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    next_token_logits: torch.Tensor | None = None,
    evicted: bool = False,
) -> Capture:
    """Keep a cache that `model` has filled already, of whatever class.

    cache: a transformers cache of any release (dynamic, static, quantised, encoder-decoder), or
    tuples of key and value for each layer. input_ids: int64 `[batch, tokens]`, exactly the
    tokens that the cache has seen (of an encoder-decoder model: the decoder's).
    next_token_logits: `[batch, vocab]` after the last of them, to go on from. evicted: full
    layers that hold fewer tokens have dropped the others on purpose.
    Raises UnsupportedCache for a layer that kvz cannot store exactly, ConfigError when the
    cache has seen another number of tokens.
    """
    input_ids, mask = _check_inputs(input_ids, attention_mask, 0, 1)
    contents = read_cache(cache, model.dtype)
    contents = _check_lengths(contents, input_ids.shape[1], evicted)
    tensors = _layer_tensors(contents, None)
    identity = model_identity(model, hf.cache_layers(hf.new_cache(model)))
    document = {
        **_document(identity, contents, tensors, input_ids, mask),
        "origin": "read from a live cache by kvz",
    }
    tensors.update(_prompt_tensors(input_ids, mask, next_token_logits))
    return Capture(tensors, encode_metadata(document), cache)


def _check_lengths(contents: CacheContents, num_tokens: int, evicted: bool) -> CacheContents:
    layers: list[LayerRecord] = []
    num_self = contents.container.get("num_self_layers", len(contents.layers))
    for layer_idx, layer in enumerate(contents.layers):
        seen = layer.cumulative_length
        if evicted and layer.kind == "full" and 0 < seen < num_tokens:
            layer = dataclasses.replace(layer, kind="evicted", cumulative_length=num_tokens)
        elif seen not in (0, num_tokens) and layer_idx < num_self:
            hint = " (evicted=True when it dropped the others)" if seen < num_tokens else ""
            raise ConfigError(
                f"cache layer {layer_idx} has seen {seen} tokens, input_ids has {num_tokens}{hint}"
            )
        layers.append(layer)
    return dataclasses.replace(contents, layers=tuple(layers))


def _check_inputs(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, queries: int, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        shape = list(input_ids.shape)
        raise ConfigError(f"input_ids must be [batch, tokens] with a token, got shape {shape}")
    if input_ids.is_floating_point():
        raise ConfigError(f"input_ids must hold integers, got {input_ids.dtype}")
    if queries < 0 or chunk_tokens < 1:
        raise ConfigError(
            f"need queries >= 0 and chunk_tokens >= 1, got {queries} and {chunk_tokens}"
        )
    ids = input_ids.detach().cpu().long().contiguous()
    if attention_mask is None:
        return ids, torch.ones_like(ids)
    mask = attention_mask.detach().cpu().long().contiguous()
    if (
        mask.shape != ids.shape
        or bool((mask.diff(dim=1) < 0).any())
        or bool(((mask != 0) & (mask != 1)).any() or (mask[:, -1] != 1).any())
    ):
        raise ConfigError(
            "attention_mask must have the shape of input_ids and each row zeros (left padding), "
            "then ones up to the end"
        )
    return ids, mask


def _check_states(contents: CacheContents, model: Any) -> None:
    """A recurrent layer without a state after a prefill keeps it elsewhere."""
    for layer_idx, layer in enumerate(contents.layers):
        if layer.kind == "linear" and not contents.tensors[layer_idx]:
            raise UnsupportedCache(
                f"cache layer {layer_idx} of {type(model).__name__} holds no state after a prefill"
            )


def _layer_tensors(
    contents: CacheContents, recorder: AttentionRecorder | None
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for layer_idx, parts in enumerate(contents.tensors):
        layer = contents.layers[layer_idx]
        for part, tensor in parts.items():
            kept = tensor.clone() if layer.kind in IN_PLACE_KINDS else tensor
            tensors[tensor_name(contents.container, layer_idx, part)] = kept.cpu().contiguous()
        if recorder is not None and layer.num_tokens:
            tensors.update(recorder.layer_tensors(layer_idx))
    return tensors


def _prompt_tensors(
    input_ids: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    tensors = {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": hf.position_ids(mask, 0, input_ids.shape[1]).contiguous(),
    }
    if logits is not None:
        tensors["next_token_logits"] = logits.detach().cpu().contiguous()
    return tensors


def _document(
    identity: dict[str, Any],
    contents: CacheContents,
    tensors: dict[str, torch.Tensor],
    input_ids: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, Any]:
    document = {
        "identity": identity,
        "layers": pack_layers(contents.layers),
        "shard": _whole_shard(tensors),
        "tokens": {
            "batch": input_ids.shape[0],
            "count": input_ids.shape[1],
            "mask_sha256": token_hash(mask),
            "sha256": token_hash(input_ids),
        },
        "versions": _versions(),
    }
    if contents.container != {"class": "DynamicCache"}:
        document["cache"] = contents.container
    return document


def _whole_shard(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    # one descriptor for all layers: heads [first, end) of how many, here of the widest layer
    heads = [t.shape[1] for name, t in tensors.items() if name.endswith(".key") and t.ndim == 4]
    num_kv_heads = max(heads, default=0)
    return {"kv_heads": [0, num_kv_heads, num_kv_heads]}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("kvz", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "source"
    return versions
