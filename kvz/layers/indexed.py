"""Indexer keys of sparse attention: DeepSeek sparse attention and MiniMax M3."""

from __future__ import annotations

from typing import Any

from kvz.formats.errors import InvalidField
from kvz.layers.state import LayerState


class IndexerKeys:
    """`indexer_keys` `[batch, tokens, dim]`, `indexer_position_ids` `[dims, batch, tokens]`."""

    attributes = ("indexer_keys", "indexer_position_ids")

    def read(self, layer: Any, state: LayerState) -> None:
        if layer.is_indexer_initialized:
            state.add("indexer_key", layer.indexer_keys)
        state.add("indexer_position_ids", getattr(layer, "indexer_position_ids", None))

    def put(self, layer: Any, state: LayerState) -> None:
        key = state.pop("indexer_key")
        if key is not None:
            layer.lazy_initialization_indexer(key)
            layer.indexer_keys = key
        # transformers 5.17 has none; what has no place here is refused by put_layer
        if hasattr(layer, "indexer_position_ids"):
            layer.indexer_position_ids = state.pop("indexer_position_ids")


class StaticIndexerKeys:
    """The filled part of an indexer buffer of `max_cache_len` tokens."""

    attributes = ("indexer_keys", "indexer_position_ids", "indexer_cumulative_length")

    def read(self, layer: Any, state: LayerState) -> None:
        if layer.is_indexer_initialized:
            filled = int(layer.indexer_cumulative_length)
            state.add("indexer_key", layer.indexer_keys[:, :filled])
        state.add("indexer_position_ids", getattr(layer, "indexer_position_ids", None))

    def put(self, layer: Any, state: LayerState) -> None:
        key = state.pop("indexer_key")
        if key is not None:
            _check_fits(key.shape[1], layer)
            layer.lazy_initialization_indexer(key)
            layer.indexer_keys[:, : key.shape[1]].copy_(key)
            layer.indexer_cumulative_length.fill_(key.shape[1])
        # transformers 5.17 has none; what has no place here is refused by put_layer
        if hasattr(layer, "indexer_position_ids"):
            layer.indexer_position_ids = state.pop("indexer_position_ids")


class BlockIndexKeys:
    """MiniMax M3: `idx_keys` `[batch, 1, tokens, dim]`, None on layers without an indexer."""

    attributes = ("idx_keys",)

    def read(self, layer: Any, state: LayerState) -> None:
        state.add("indexer_key", layer.idx_keys)

    def put(self, layer: Any, state: LayerState) -> None:
        layer.idx_keys = state.pop("indexer_key")


class StaticBlockIndexKeys:
    """The filled part of MiniMax M3's index buffer."""

    attributes = ("idx_keys", "idx_cumulative_length")

    def read(self, layer: Any, state: LayerState) -> None:
        if layer.idx_keys is not None:
            state.add("indexer_key", layer.idx_keys[:, :, : int(layer.idx_cumulative_length)])

    def put(self, layer: Any, state: LayerState) -> None:
        key = state.pop("indexer_key")
        if key is not None:
            _check_fits(key.shape[2], layer)
            layer.update_index(key)


def _check_fits(num_tokens: int, layer: Any) -> None:
    if num_tokens > layer.max_cache_len:
        raise InvalidField(f"indexer_key has {num_tokens} tokens, buffer {layer.max_cache_len}")
