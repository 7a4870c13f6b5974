"""Tensor-parallel pieces of a cache: split by kv heads, merged again, never taken for the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kvz.capture_metadata import (
    LayerRecord,
    decode_metadata,
    encode_metadata,
    pack_layers,
    read_shard,
    unpack_layers,
)
from kvz.formats.errors import (
    ConfigError,
    ContentMismatch,
    IdentityMismatch,
    InvalidField,
    KvzError,
    SourceError,
    UnsupportedCache,
)
from kvz.layers.containers import container_of, tensor_name
from kvz.lossy import LOSSY_KEY
from kvz.source_protocol import CacheSource
from kvz.state_reader import open_source, read_tensor

# Axis of the heads by part; query heads are a multiple of the kv heads. Pair norms may have an axis
# of blocks before it.
_HEAD_AXES = {
    "key": 1,
    "value": 1,
    "cross_key": 1,
    "cross_value": 1,
    "query": 1,
    "query_pair_norm": -2,
    "key_pair_norm": -2,
}
_DIVISIBLE_KINDS = frozenset({"full", "evicted", "sliding", "static", "static_sliding", "empty"})


def split(source: str | Path | CacheSource, paths: Sequence[str | Path]) -> list[tuple[int, int]]:
    """Write a whole cache as one safetensors file for each of `paths`, equal runs of kv heads.

    Returns the heads `[first, end)` of each. Raises ConfigError when the heads do not divide,
    UnsupportedCache for layers whose state is not one per head, SourceError when a file exists:
    then, as after any error, none is left behind.
    """
    for path in paths:
        if Path(path).exists():
            raise SourceError(f"{path}: exists already")
    with open_source(source) as opened:
        document = decode_metadata(opened.metadata)
        first, end, of = read_shard(document)
        if (first, end) != (0, of):
            raise IdentityMismatch(f"cache is a shard already: kv heads {first} to {end} of {of}")
        if of == 0 or of % len(paths):
            raise ConfigError(f"{of} kv heads do not divide into {len(paths)} shards")
        layers, container = unpack_layers(document["layers"]), container_of(document)
        _check_divisible(opened, layers, container, of)
        tensors = {name: read_tensor(opened, name) for name in opened.tensor_names}
        notes = _notes([opened])
    step = of // len(paths)
    ranges = [(start, start + step) for start in range(0, of, step)]
    written: list[Path] = []
    try:
        for path, heads in zip(paths, ranges, strict=True):
            _write_shard(path, tensors, document, layers, heads, notes)
            written.append(Path(path))
    except BaseException:
        for done in written:
            done.unlink(missing_ok=True)
        raise
    return ranges


def _write_shard(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    document: Mapping[str, Any],
    layers: Sequence[LayerRecord],
    heads: tuple[int, int],
    notes: Mapping[str, str],
) -> None:
    from kvz.safetensors_io import write_safetensors

    of = read_shard(document)[2]
    parts = {name: _heads_of(name, tensor, heads, of) for name, tensor in tensors.items()}
    metadata = _document(document, layers, heads[1] - heads[0], [*heads, of])
    write_safetensors(path, parts, {**metadata, **notes})


def _heads_of(name: str, tensor: torch.Tensor, heads: tuple[int, int], of: int) -> torch.Tensor:
    axis = _head_axis(name)
    if axis is None:
        return tensor
    per_head = tensor.shape[axis] // of
    start, length = heads[0] * per_head, (heads[1] - heads[0]) * per_head
    return tensor.narrow(axis, start, length).contiguous()


def _head_axis(name: str) -> int | None:
    layer, _, part = name.rpartition(".")
    return _HEAD_AXES.get(part) if layer else None


def _check_divisible(
    source: CacheSource,
    layers: Sequence[LayerRecord],
    container: Mapping[str, Any],
    num_heads: int,
) -> None:
    for layer_idx, layer in enumerate(layers):
        name = tensor_name(container, layer_idx, "key")
        extra = set(layer.state or ()) - {"key", "value"}
        if layer.kind not in _DIVISIBLE_KINDS or extra:
            raise UnsupportedCache(
                f"{name} is of a {layer.kind} layer: its state is not one per kv head"
            )
    for name in source.tensor_names:
        axis = _head_axis(name)
        if axis is None:
            continue
        held = source.shape(name)[axis]
        grouped = name.rpartition(".")[2] in ("query", "query_pair_norm")
        if held % num_heads if grouped else held != num_heads:
            raise UnsupportedCache(
                f"{name} has {held} heads, others {num_heads}: layers do not divide alike"
            )


def _document(
    document: Mapping[str, Any],
    layers: Sequence[LayerRecord],
    num_heads: int,
    shard: list[int],
) -> dict[str, str]:
    described = [_with_heads(layer, num_heads) for layer in layers]
    return encode_metadata(
        {**document, "layers": pack_layers(described), "shard": {"kv_heads": shard}}
    )


def _with_heads(layer: LayerRecord, num_heads: int) -> LayerRecord:
    if layer.state is None:
        return layer
    state = {}
    for name, (dtype, shape) in layer.state.items():
        if len(shape) != 4:
            raise InvalidField(f"layer state {name} has shape {shape}, not one with heads")
        state[name] = [dtype, [shape[0], num_heads, *shape[2:]]]
    return dataclasses.replace(layer, state=state)


def merge(
    sources: Sequence[str | Path], destination: str | Path, *, overwrite: bool = False
) -> int:
    """Put shards together to one whole safetensors file, in the order of their heads.

    Returns the number of kv heads. Raises IdentityMismatch when heads are missing or held twice,
    or when the shards belong to different models or tokens; ContentMismatch when a tensor that
    they share differs.
    """
    from kvz.safetensors_io import write_safetensors

    documents = [_read_document(source) for source in sources]
    order = _in_order(sources, documents)
    names, first = [str(sources[i]) for i in order], documents[order[0]]
    _check_same_document(names, [documents[i] for i in order])
    with ExitStack() as stack:
        shards = [stack.enter_context(open_source(name)) for name in names]
        tensors = {name: _merged(name, shards, names) for name in shards[0].tensor_names}
        notes = _notes(shards)
    of = read_shard(first)[2]
    layers = unpack_layers(first["layers"])
    metadata = _document(first, layers, of, [0, of, of])
    write_safetensors(destination, tensors, {**metadata, **notes}, overwrite=overwrite)
    return of


def _notes(sources: Sequence[CacheSource]) -> dict[str, str]:
    """That a cache is lossy, if one of its sources is."""
    said = {source.metadata[LOSSY_KEY] for source in sources if LOSSY_KEY in source.metadata}
    return {LOSSY_KEY: "; ".join(sorted(said))} if said else {}


def _read_document(source: str | Path) -> dict[str, Any]:
    with open_source(source) as opened:
        document = decode_metadata(opened.metadata)
        read_shard(document)
    return document


def _about(file: str, error: KvzError) -> KvzError:
    """The error, which belongs to one of several files."""
    error.file = file
    return error


def _in_order(sources: Sequence[str | Path], documents: Sequence[Mapping[str, Any]]) -> list[int]:
    ranges = [read_shard(document) for document in documents]
    order = sorted(range(len(ranges)), key=lambda i: ranges[i])
    position, of = 0, ranges[order[0]][2]
    for i in order:
        first, end, total = ranges[i]
        if total != of:
            message = f"is of {total} kv heads, {sources[order[0]]} of {of}"
            raise _about(str(sources[i]), IdentityMismatch(message))
        if first > position:
            raise IdentityMismatch(f"kv heads {position} to {first} of {of} are missing")
        if first < position:
            message = f"kv heads {first} to {end} are there already"
            raise _about(str(sources[i]), IdentityMismatch(message))
        position = end
    if position != of:
        raise IdentityMismatch(f"kv heads {position} to {of} of {of} are missing")
    return order


def _check_same_document(names: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> None:
    def comparable(document: Mapping[str, Any], member: str) -> Any:
        value = document.get(member)
        if member == "layers":
            return [_with_heads(layer, 1) for layer in unpack_layers(value)]
        return value

    for name, document in zip(names[1:], documents[1:], strict=True):
        # when and where a shard was made may differ, whose it is may not
        for member in ("identity", "layers", "tokens", "cache"):
            if comparable(document, member) != comparable(documents[0], member):
                message = f"its {member} is not that of {names[0]}"
                raise _about(name, IdentityMismatch(message))


def _merged(name: str, shards: Sequence[CacheSource], names: Sequence[str]) -> torch.Tensor:
    for shard, shard_name in zip(shards, names, strict=True):
        if name not in shard.tensor_names:
            message = f"tensor {name} is missing, {names[0]} has it"
            raise _about(shard_name, IdentityMismatch(message))
    parts = [read_tensor(shard, name) for shard in shards]
    axis = _head_axis(name)
    if axis is not None:
        _check_alike(name, parts, names, axis)
        return torch.cat(parts, dim=axis)
    for part, shard_name in zip(parts[1:], names[1:], strict=True):
        same = part.dtype == parts[0].dtype and part.shape == parts[0].shape
        if not same or not torch.equal(_bytes(part), _bytes(parts[0])):
            message = f"tensor {name} differs from that of {names[0]}"
            raise _about(shard_name, ContentMismatch(message))
    return parts[0]


def _check_alike(name: str, parts: Sequence[torch.Tensor], names: Sequence[str], axis: int) -> None:
    def without_heads(tensor: torch.Tensor) -> list[int]:
        return [size for i, size in enumerate(tensor.shape) if i != axis % tensor.ndim]

    for part, shard_name in zip(parts, names, strict=True):
        if part.dtype != parts[0].dtype or without_heads(part) != without_heads(parts[0]):
            message = (
                f"tensor {name} is {part.dtype} {list(part.shape)}, "
                f"in {names[0]} {parts[0].dtype} {list(parts[0].shape)}"
            )
            raise _about(shard_name, ContentMismatch(message))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
