"""Whole caches: their class, their layers, and the older shapes they came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kvz.capture_metadata import LayerRecord
from kvz.formats.errors import InvalidField, UnsupportedCache
from kvz.layers.table import layer_kind, read_kind, read_layer

_QUANTIZED_OPTIONS = ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length")


@dataclass(frozen=True)
class CacheContents:
    """container: JSON description of the cache object; layers and their tensors, in one order.

    An encoder-decoder cache lists the layers of self-attention, then those of cross-attention.
    """

    container: dict[str, Any]
    layers: tuple[LayerRecord, ...]
    tensors: tuple[dict[str, torch.Tensor], ...]


def tensor_name(container: Mapping[str, Any], layer_idx: int, part: str) -> str:
    """Name of a tensor in a file: `layers.3.key`, or `layers.3.cross_key` of cross-attention."""
    num_self = container.get("num_self_layers")
    if num_self is None or layer_idx < num_self:
        return f"layers.{layer_idx}.{part}"
    return f"layers.{layer_idx - num_self}.cross_{part}"


def read_cache(cache: Any, model_dtype: torch.dtype | None) -> CacheContents:
    """All that a live cache holds; tensors are not copied.

    cache: a transformers cache of any release, or tuples of key and value for each layer.
    Raises UnsupportedCache naming the class, or the layer and its class.
    """
    if hasattr(cache, "self_attention_cache"):
        return _read_encoder_decoder(cache, model_dtype)
    pairs = _legacy_pairs(cache)
    if pairs is not None:
        return _read_pairs(pairs, model_dtype)
    container = describe_container(cache)
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()  # layers may still be on their way to the host
    read = [read_layer(layer, i, model_dtype) for i, layer in enumerate(cache.layers)]
    return CacheContents(container, tuple(r for r, _ in read), tuple(t for _, t in read))


def describe_container(cache: Any) -> dict[str, Any]:
    """JSON description of a cache object, enough to make an empty one for the same model.

    Raises UnsupportedCache for a class that keeps state beside its layers.
    """
    kind = type(cache)
    if not hasattr(cache, "layers") or kind.__module__.partition(".")[0] != "transformers":
        raise UnsupportedCache(f"kvz cannot read a {kind.__name__}")
    if kind.__name__ == "DynamicCache":
        if getattr(cache, "layer_class_to_replicate", None) is not None:
            return {"class": "DynamicCache", "lazy": True}
        return {"class": "DynamicCache"}
    if kind.__name__ == "StaticCache":
        lengths = [getattr(layer, "max_cache_len", 0) for layer in cache.layers]
        return {"class": "StaticCache", "max_cache_len": max(lengths, default=0)}
    if kind.__name__ == "QuantizedCache" and cache.layers:
        backend = layer_kind(cache.layers[0], 0)
        options = {} if backend == "fp8" else _quantized_options(cache.layers[0])
        return {"class": "QuantizedCache", "backend": backend, **options}
    raise UnsupportedCache(f"a {kind.__name__} holds more than its layers, or kvz does not know it")


def _quantized_options(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in _QUANTIZED_OPTIONS}


def _read_encoder_decoder(cache: Any, model_dtype: torch.dtype | None) -> CacheContents:
    own = read_cache(cache.self_attention_cache, model_dtype)
    cross = read_cache(cache.cross_attention_cache, model_dtype)
    container = {
        "class": "EncoderDecoderCache",
        "self": own.container,
        "cross": cross.container,
        "num_self_layers": len(own.layers),
    }
    return CacheContents(container, own.layers + cross.layers, own.tensors + cross.tensors)


def _legacy_pairs(cache: Any) -> Sequence[Any] | None:
    """`(key, value)` or `(key, value, cross key, cross value)` of each layer, where it is that."""
    if isinstance(cache, (tuple, list)):
        return cache
    keys, values = getattr(cache, "key_cache", None), getattr(cache, "value_cache", None)
    if not hasattr(cache, "layers") and keys is not None and values is not None:
        if type(cache).__name__ != "DynamicCache":
            raise UnsupportedCache(
                f"a {type(cache).__name__} may hold more than key_cache and value_cache"
            )
        return list(zip(keys, values, strict=True))
    return None


def _read_pairs(pairs: Sequence[Any], model_dtype: torch.dtype | None) -> CacheContents:
    read: list[tuple[LayerRecord, dict[str, torch.Tensor]]] = []
    cross: list[tuple[LayerRecord, dict[str, torch.Tensor]]] = []
    for layer_idx, pair in enumerate(pairs):
        if pair is None:
            read.append((LayerRecord("empty"), {}))
            continue
        if not isinstance(pair, (tuple, list)) or len(pair) not in (2, 4):
            raise UnsupportedCache(f"layer {layer_idx} of the cache is not a pair of key and value")
        try:
            read.append(_read_pair(pair[:2], model_dtype))
            if len(pair) == 4:
                cross.append(_read_pair(pair[2:], model_dtype))
        except UnsupportedCache as error:
            raise UnsupportedCache(f"layer {layer_idx} of the cache: {error}") from None
    container: dict[str, Any] = {"class": "DynamicCache", "lazy": True}
    if cross:
        container = {
            "class": "EncoderDecoderCache",
            "self": container,
            "cross": container,
            "num_self_layers": len(read),
        }
    read += cross
    return CacheContents(container, tuple(r for r, _ in read), tuple(t for _, t in read))


def _read_pair(
    pair: Sequence[Any], model_dtype: torch.dtype | None
) -> tuple[LayerRecord, dict[str, torch.Tensor]]:
    key, value = pair
    if key is None or key.numel() == 0:
        return LayerRecord("empty" if key is None else "full"), {}
    return read_kind("full", SimpleNamespace(keys=key, values=value), model_dtype)


def container_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The container in a capture's document. Raises InvalidField when it is malformed."""
    container = document.get("cache", {"class": "DynamicCache"})
    if not isinstance(container, dict) or not isinstance(container.get("class"), str):
        raise InvalidField(f"kvz metadata: cache must name its class, got {container!r}")
    num_self = container.get("num_self_layers", 0)
    if type(num_self) is not int or num_self < 0:
        raise InvalidField(f"kvz metadata: num_self_layers must be >= 0, got {num_self!r}")
    return container


def layer_objects(cache: Any) -> list[Any]:
    """The layers of a cache, cross-attention last."""
    if hasattr(cache, "self_attention_cache"):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def note_cross_attention(cache: Any) -> None:
    """Tell an encoder-decoder cache which cross-attention it need not compute again."""
    for layer_idx, layer in enumerate(getattr(cache, "cross_attention_cache", cache).layers):
        if hasattr(cache, "is_updated"):
            cache.is_updated[layer_idx] = layer.get_seq_length() > 0
