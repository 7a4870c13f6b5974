"""What passes through a model's attention during a prefill: queries, pair norms, scales."""

from __future__ import annotations

from typing import Any

import torch

from kvz import hf
from kvz.pair_norms import PairNormMean, RopeLayout, rope_layout


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
        layer_idx, num_tokens = getattr(module, "layer_idx", None), query.shape[2]
        if not isinstance(layer_idx, int):
            return  # one module for several layers: `saw_all` then says that some are missing
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
            self.query_norms[layer_idx].add(query, mask, self.start)
            self.key_norms[layer_idx].add(key[:, :, -num_tokens:], mask, self.start)
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


def attention_facts(
    config: dict[str, Any], recorder: AttentionRecorder, cached: list[int]
) -> dict[str, Any]:
    """RoPE, softmax scale and soft cap of the layers that cache keys, for the document."""
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
