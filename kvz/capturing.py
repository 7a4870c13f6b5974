"""Capture: run a prompt through a model and keep its KV cache with proof of whose it is."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from kvz import hf
from kvz.capture_metadata import encode_metadata, pack_layers
from kvz.formats.errors import ConfigError, UnsupportedCache
from kvz.identity import dtype_name, model_identity, token_hash
from kvz.pair_norms import PairNormMean, RopeLayout, rope_layout
from kvz.torch_dtypes import describe_tensor


@dataclass(frozen=True)
class Capture:
    """A captured KV cache; a `CacheSource`, so that it can be compressed without a file between.

    tensors: by name, contiguous, on the CPU. `layers.{i}.key` and `layers.{i}.value`
    `[batch, kv_heads, tokens, head_dim]`, `layers.{i}.query` `[batch, q_heads, n, head_dim]`,
    `layers.{i}.query_pair_norm` and `layers.{i}.key_pair_norm` float32 `[heads, num_pairs]`,
    `query_positions` int64 `[n]` (columns of the prompt), `input_ids`, `attention_mask` and
    `position_ids` int64 `[batch, tokens]`, `next_token_logits` `[batch, vocab]`.
    metadata: safetensors metadata, see `kvz.capture_metadata`.
    cache: the live transformers cache, to go on generating in this process. Tensors may share
    its memory: generating leaves them alone, changing the cache in place does not.
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
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


class AttentionRecorder:
    """Post-RoPE queries of the last positions and pair norms of all, taken as chunks pass.

    num_queries: how many of the last columns keep their queries. mask: bool `[batch, tokens]`.
    """

    def __init__(self, model: Any, mask: torch.Tensor, num_queries: int) -> None:
        self._model = model
        self._mask = mask
        self._first_query = mask.shape[1] - num_queries
        self._queries: dict[int, list[torch.Tensor]] = {}
        self.start = 0
        self.query_norms: dict[int, PairNormMean] = {}
        self.key_norms: dict[int, PairNormMean] = {}
        self.layouts: dict[int, RopeLayout] = {}
        self.scales: dict[int, float] = {}
        self.softcaps: dict[int, float] = {}
        self.num_seen: dict[int, int] = {}

    def record(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Take query `[batch, q_heads, n, head_dim]` and the last n of the keys."""
        layer_idx, num_tokens = module.layer_idx, query.shape[2]
        if layer_idx not in self.layouts:
            layout = rope_layout(self._model, module, query.shape[3], hf.modelling_global)
            self.layouts[layer_idx] = layout
            self.query_norms[layer_idx] = PairNormMean(layout)
            self.key_norms[layer_idx] = PairNormMean(layout)
        self.scales[layer_idx] = scale
        if softcap is not None:
            self.softcaps[layer_idx] = softcap
        self.num_seen[layer_idx] = self.num_seen.get(layer_idx, 0) + num_tokens
        if self.layouts[layer_idx].pairing != "unknown":
            mask = self._mask[:, self.start : self.start + num_tokens].to(query.device)
            self.query_norms[layer_idx].add(query, mask)
            self.key_norms[layer_idx].add(key[:, :, -num_tokens:], mask)
        first = max(self._first_query - self.start, 0)
        if first < num_tokens:
            # a copy: a view would keep the whole chunk alive
            self._queries.setdefault(layer_idx, []).append(query[:, :, first:].cpu().clone())

    def saw_all(self, layer_idx: int) -> bool:
        """Whether every token of the prompt passed this layer's attention exactly once."""
        return self.num_seen.get(layer_idx) == self._mask.shape[1]

    def layer_tensors(self, layer_idx: int) -> dict[str, torch.Tensor]:
        """What was recorded of one layer, by the names of the capture file."""
        tensors = {}
        if layer_idx in self._queries:
            query = torch.cat(self._queries[layer_idx], dim=2).contiguous()
            tensors[f"layers.{layer_idx}.query"] = query
        if self.layouts[layer_idx].pairing != "unknown":
            tensors[f"layers.{layer_idx}.query_pair_norm"] = self.query_norms[layer_idx].mean()
            tensors[f"layers.{layer_idx}.key_pair_norm"] = self.key_norms[layer_idx].mean()
        return tensors


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
    progress: called with (tokens done, tokens in all) after each chunk. The model is left as it
    was. Raises ConfigError for arguments that make no sense and UnsupportedCache, before any
    work where possible, for a model whose cache kvz cannot store exactly.
    """
    input_ids, mask = _check_inputs(input_ids, attention_mask, queries, chunk_tokens)
    num_tokens = input_ids.shape[1]
    num_queries = min(queries, num_tokens)
    cache = hf.new_cache(model)
    # before the prefill: RoPE that adapts to the prompt's length changes the model's buffers
    identity = model_identity(model, hf.cache_layers(cache))
    recorder = AttentionRecorder(model, mask.bool(), num_queries)
    device_ids, device_mask = input_ids.to(model.device), mask.to(model.device)
    with hf.recording_attention(model, recorder.record):
        for start in range(0, num_tokens, chunk_tokens):
            recorder.start = start
            chunk = device_ids[:, start : start + chunk_tokens]
            logits = hf.feed(model, cache, chunk, device_mask)
            if progress is not None:
                progress(start + chunk.shape[1], num_tokens)

    layers = hf.cache_layers(cache)
    cached = [i for i, layer in enumerate(layers) if layer.num_tokens]
    recorded = all(recorder.saw_all(layer_idx) for layer_idx in cached)
    tensors = _layer_tensors(cache, cached, recorder if recorded else None)
    if recorded and num_queries:
        tensors["query_positions"] = torch.arange(num_tokens - num_queries, num_tokens)
    tensors["input_ids"] = input_ids
    tensors["attention_mask"] = mask
    tensors["position_ids"] = hf.position_ids(mask, 0, num_tokens).contiguous()
    tensors["next_token_logits"] = logits.cpu().contiguous()

    document = {
        "identity": identity,
        "layers": pack_layers(layers),
        "origin": "captured from a model by kvz",
        "shard": _whole_shard(cache, cached),
        "tokens": {
            "batch": input_ids.shape[0],
            "count": num_tokens,
            "mask_sha256": token_hash(mask),
            "sha256": token_hash(input_ids),
        },
        "versions": _versions(),
        "capture": {
            "chunk_tokens": chunk_tokens,
            "queries": num_queries if recorded else 0,
            "device": str(model.device),
        },
        **(_attention_facts(identity["config"], recorder, cached) if recorded else {}),
    }
    if not recorded:
        document["capture"]["note"] = "attention not reachable: no queries and no pair norms"
    return Capture(tensors, encode_metadata(document), cache)


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


def _layer_tensors(
    cache: Any, cached: list[int], recorder: AttentionRecorder | None
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for layer_idx in cached:
        layer = cache.layers[layer_idx]
        for part, tensor in (("key", layer.keys), ("value", layer.values)):
            if tensor.ndim != 4:
                raise UnsupportedCache(
                    f"{part} of cache layer {layer_idx} has shape {list(tensor.shape)}, "
                    "not [batch, kv_heads, tokens, head_dim]"
                )
            tensors[f"layers.{layer_idx}.{part}"] = tensor.detach().cpu().contiguous()
        if recorder is not None:
            tensors.update(recorder.layer_tensors(layer_idx))
    return tensors


def _whole_shard(cache: Any, cached: list[int]) -> dict[str, list[int]]:
    # one descriptor for all layers: heads [first, end) of how many, here of the widest layer
    num_kv_heads = max((cache.layers[i].keys.shape[1] for i in cached), default=0)
    return {"kv_heads": [0, num_kv_heads, num_kv_heads]}


def _attention_facts(
    config: dict[str, Any], recorder: AttentionRecorder, cached: list[int]
) -> dict[str, Any]:
    prefix = "rope_parameters."
    parameters = {
        key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)
    }
    facts: dict[str, Any] = {
        "rope": {
            "pairing": _uniform([recorder.layouts[i].pairing for i in cached]),
            "parameters": parameters,
            "rotary_dim": _uniform([recorder.layouts[i].rotary_dim for i in cached]),
        },
        "softmax_scale": _uniform([recorder.scales[i] for i in cached]),
    }
    if recorder.softcaps:
        facts["softcap"] = _uniform([recorder.softcaps.get(i) for i in cached])
    return facts


def _uniform(per_layer: list[Any]) -> Any:
    """The one value of all cached layers, or the list of them."""
    same = all(value == per_layer[0] for value in per_layer)
    return per_layer[0] if same else per_layer


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("kvz", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "source"
    return versions
