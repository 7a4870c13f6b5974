"""The table of layer kinds, and the one way to read a layer and to put it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvz.capture_metadata import LayerRecord
from kvz.formats.errors import InvalidField, UnsupportedCache
from kvz.layers.attention import (
    GrowingKeyValue,
    SlidingKeyValue,
    StaticKeyValue,
    StaticSlidingKeyValue,
)
from kvz.layers.compressed import Compressor, ReferenceSlidingKeyValue, SharedSlidingKeyValue
from kvz.layers.indexed import (
    BlockIndexKeys,
    IndexerKeys,
    StaticBlockIndexKeys,
    StaticIndexerKeys,
)
from kvz.layers.linear import LinearStates
from kvz.layers.quantized import Fp8KeyValue, HqqKeyValue
from kvz.layers.state import LayerState, Part, describe, empty_like
from kvz.torch_dtypes import SAFETENSORS_NAMES

_BUFFERS = ("buffer_kv", "buffer_gate", "compressed_kv")

PARTS: Mapping[str, tuple[Part, ...]] = {
    "full": (GrowingKeyValue(),),
    "evicted": (GrowingKeyValue(),),
    "sliding": (SlidingKeyValue(),),
    "empty": (),
    "indexed": (GrowingKeyValue(), IndexerKeys()),
    "minimax_m3_sparse": (GrowingKeyValue(), BlockIndexKeys()),
    "linear": (LinearStates(),),
    "hybrid": (GrowingKeyValue(), LinearStates()),
    "hybrid_sliding": (SlidingKeyValue(), LinearStates()),
    "heavily_compressed": (SharedSlidingKeyValue(), Compressor(_BUFFERS)),
    "compressed_sparse": (
        SharedSlidingKeyValue(),
        Compressor((*_BUFFERS, "overlap_kv", "overlap_gate")),
    ),
    "reference_sliding": (ReferenceSlidingKeyValue(),),
    "static": (StaticKeyValue(),),
    "static_sliding": (StaticSlidingKeyValue(),),
    "static_indexed": (StaticKeyValue(), StaticIndexerKeys()),
    "static_minimax_m3_sparse": (StaticKeyValue(), StaticBlockIndexKeys()),
    "static_hybrid": (StaticKeyValue(), LinearStates()),
    "static_hybrid_sliding": (StaticSlidingKeyValue(), LinearStates()),
    "fp8": (Fp8KeyValue(),),
    "hqq": (HqqKeyValue(),),
}

# Exact classes of transformers: a subclass may hold more than its base.
CLASS_KINDS: Mapping[str, str] = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "DummyLayer": "empty",
    "DynamicIndexedLayer": "indexed",
    "MiniMaxM3VLSparseCacheLayer": "minimax_m3_sparse",
    "LinearAttentionLayer": "linear",
    "LinearAttentionAndFullAttentionLayer": "hybrid",
    "LinearAttentionAndSlidingWindowAttentionLayer": "hybrid_sliding",
    "DeepseekV4HCACache": "heavily_compressed",
    "DeepseekV4CSACache": "compressed_sparse",
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": "reference_sliding",
    "StaticLayer": "static",
    "StaticSlidingWindowLayer": "static_sliding",
    "StaticIndexedLayer": "static_indexed",
    "MiniMaxM3VLSparseStaticCacheLayer": "static_minimax_m3_sparse",
    "LinearAttentionAndStaticFullAttentionLayer": "static_hybrid",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": "static_hybrid_sliding",
    "Fp8QuantizedLayer": "fp8",
    "HQQQuantizedLayer": "hqq",
}

#: Kinds that start over, or take what comes for decoding, when a prompt is fed in pieces.
ONE_PASS_KINDS = frozenset(
    {"reference_sliding"}
    | {kind for kind, parts in PARTS.items() if any(isinstance(p, LinearStates) for p in parts)}
)

#: Kinds whose tensors the next forward pass writes over.
IN_PLACE_KINDS = ONE_PASS_KINDS | {kind for kind in PARTS if kind.startswith("static")}

# Tensors that follow from how the layer was made.
_DERIVED = frozenset({"_sliding_window_tensor", "sliding_window_tensor"})

# Token axis of the tensors that a prefix of the prompt cuts, of kinds that hold every token.
_PREFIX_AXES = {"key": 2, "value": 2, "indexer_key": -2, "indexer_position_ids": -1}
_BATCH_FIRST = re.compile(r"(key|value|conv_state(_\d+)?|recurrent_state(_\d+)?|indexer_key)$")
_PREFIX_KINDS = frozenset({"full", "indexed", "minimax_m3_sparse", "static", "static_indexed"})


def layer_kind(layer: Any, layer_idx: int) -> str:
    """Kind of a layer object. Raises UnsupportedCache naming its index and class."""
    if layer is None:
        return "empty"
    kind = type(layer)
    name = CLASS_KINDS.get(kind.__name__)
    if name is None or kind.__module__.partition(".")[0] != "transformers":
        raise UnsupportedCache(
            f"cache layer {layer_idx} is a {kind.__name__}, which kvz cannot store exactly"
        )
    return name


def read_layer(
    layer: Any, layer_idx: int, model_dtype: torch.dtype | None
) -> tuple[LayerRecord, dict[str, torch.Tensor]]:
    """Record and tensors (by part name, on the layer's device, not copied) of a cache layer.

    model_dtype: that of a standard key and value, which need no description. Raises
    UnsupportedCache naming index and class when the layer holds what kvz cannot store exactly.
    """
    kind = layer_kind(layer, layer_idx)
    try:
        return read_kind(kind, layer, model_dtype)
    except UnsupportedCache as error:
        name = type(layer).__name__
        raise UnsupportedCache(f"cache layer {layer_idx} ({name}): {error}") from None


def read_kind(
    kind: str, layer: Any, model_dtype: torch.dtype | None
) -> tuple[LayerRecord, dict[str, torch.Tensor]]:
    """The same for any object with the attributes of a layer of this kind."""
    state = LayerState()
    for part in PARTS[kind]:
        part.read(layer, state)
    _check_nothing_left(layer, kind)
    standard = _is_standard(state, model_dtype)
    record = LayerRecord(
        kind,
        state.window,
        state.num_tokens,
        state.cumulative_length,
        state.options,
        None if standard else describe(state.tensors),
    )
    # tensors without elements are in the description
    return record, {name: t for name, t in state.tensors.items() if t.numel()}


def _is_standard(state: LayerState, model_dtype: torch.dtype | None) -> bool:
    if not state.tensors:
        return not state.num_tokens
    if set(state.tensors) != {"key", "value"}:
        return False
    return all(
        tensor.ndim == 4
        and tensor.numel() > 0
        and tensor.dtype == model_dtype
        and tensor.shape[2] == state.num_tokens
        for tensor in state.tensors.values()
    )


def _check_nothing_left(layer: Any, kind: str) -> None:
    """No attribute with a tensor may be lost: a newer release can have added one."""
    known = {name for part in PARTS[kind] for name in part.attributes} | _DERIVED
    for name, value in vars(layer).items() if layer is not None else ():
        if name not in known and any(_tensors_in(value)):
            raise UnsupportedCache(f"kvz does not know its attribute {name}")


def _tensors_in(value: object) -> Iterator[bool]:
    if isinstance(value, torch.Tensor):
        yield value.numel() > 0
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def expected_state(record: LayerRecord) -> tuple[str, ...]:
    """Names of the stored tensors of a layer, by part name."""
    if record.state is None:
        return ("key", "value") if record.num_tokens else ()
    return tuple(name for name, (_, shape) in record.state.items() if 0 not in shape)


def check_tensor(
    name: str, part: str, tensor: torch.Tensor, record: LayerRecord, dtype: str, batch: int
) -> None:
    """Dtype and shape of a stored tensor against the record. Raises InvalidField.

    name: as in the file, for the message. dtype: safetensors name of the model's dtype.
    """
    if record.state is None:
        expected_dtype = dtype
        fits = tensor.ndim == 4 and tuple(tensor.shape[::2]) == (batch, record.num_tokens)
        shape = f"[{batch}, kv_heads, {record.num_tokens}, head_dim]"
    else:
        expected_dtype, sizes = record.state[part]
        fits = list(tensor.shape) == list(sizes)
        if _BATCH_FIRST.match(part):
            fits = fits and tensor.ndim > 0 and tensor.shape[0] == batch
        shape = f"{list(sizes)}, a batch of {batch}"
    if not fits:
        raise InvalidField(f"{name} has shape {list(tensor.shape)}, metadata says {shape}")
    if SAFETENSORS_NAMES.get(tensor.dtype) != expected_dtype:
        raise InvalidField(f"{name} is {tensor.dtype}, metadata says {expected_dtype}")


def has_prefix(record: LayerRecord) -> bool:
    """Whether the first tokens of a layer's state are the state after those tokens."""
    return record.kind in _PREFIX_KINDS or record.kind == "empty"


def put_layer(
    layer: Any,
    record: LayerRecord,
    tensors: Mapping[str, torch.Tensor],
    num_tokens: int | None = None,
) -> None:
    """Give a fresh layer of the record's kind its state.

    tensors: by part name, on the device where the layer shall live, contiguous. num_tokens: only
    the first ones, where `has_prefix` allows it. Raises InvalidField for tensors that do not fit.
    """
    held = dict(tensors)
    device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
    for name, entry in (record.state or {}).items():
        if 0 in entry[1]:
            held[name] = empty_like(entry, device)
    seen, kept = record.cumulative_length, record.num_tokens
    if num_tokens is not None and kept:
        seen = kept = min(num_tokens, kept)
        if not kept:
            return
        held = {name: _first(tensor, _PREFIX_AXES[name], kept) for name, tensor in held.items()}
    state = LayerState(held, dict(record.options), record.window, kept, seen)
    for part in PARTS[record.kind]:
        part.put(layer, state)
    if state.tensors:
        raise InvalidField(f"a {record.kind} layer has no place for {', '.join(state.tensors)}")


def _first(tensor: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    # contiguous: a view would keep all of it in memory
    return tensor.narrow(axis, 0, min(count, tensor.shape[axis])).contiguous()
