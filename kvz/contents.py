"""Whose cache a file holds and which layers, as far as names, shapes and metadata tell."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvz.capture_metadata import METADATA_KEY, LayerRecord, decode_metadata, unpack_layers
from kvz.formats.errors import KvzError
from kvz.formats.head import Head, TensorEntry
from kvz.layout import is_key_or_value, layer_index, part_name

_LAYER_NUMBER = re.compile(r"(?<=[._/])\d+(?=[._/]|$)")


@dataclass(frozen=True, slots=True)
class Identity:
    """Model and tokens of a cache, as its capture recorded them; None where it did not."""

    model_type: str | None
    architecture: str | None
    dtype: str | None
    config_hash: str | None
    weights: str | None
    rope: Mapping[str, Any]
    batch: int | None
    num_tokens: int | None
    tokens_sha256: str | None
    kv_heads: tuple[int, int, int] | None
    origin: str | None
    versions: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Key or value of a layer. ``shape`` is usually ``[batch, kv_heads, tokens, head_dim]``."""

    part: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers, ends included, that are alike. ``kind`` None: the file does not say."""

    first: int
    last: int
    kind: str | None
    window: int | None
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are no keys or values and differ only in the number in their names."""

    name: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    codec: str


def read_document(metadata: Mapping[str, str]) -> tuple[dict[str, Any] | None, str | None]:
    """The capture's document, or why it cannot be had; (None, None) when there is none."""
    if METADATA_KEY not in metadata:
        return None, None
    try:
        return decode_metadata(metadata), None
    except KvzError as error:
        return None, str(error)


def identity_of(document: Mapping[str, Any]) -> Identity:
    """The identity in a capture's document; a member of the wrong type counts as absent."""
    identity, tokens = document["identity"], document["tokens"]
    config, heads = identity.get("config"), document["shard"].get("kv_heads")
    whole = isinstance(heads, list) and len(heads) == 3 and all(type(h) is int for h in heads)
    return Identity(
        model_type=_typed(config.get("model_type"), str) if isinstance(config, dict) else None,
        architecture=_typed(identity.get("architecture"), str),
        dtype=_typed(identity.get("dtype"), str),
        config_hash=_typed(identity.get("config_hash"), str),
        weights=_typed(identity.get("weights"), str),
        rope=_typed(document.get("rope"), dict) or {},
        batch=_typed(tokens.get("batch"), int),
        num_tokens=_typed(tokens.get("count"), int),
        tokens_sha256=_typed(tokens.get("sha256"), str),
        kv_heads=(heads[0], heads[1], heads[2]) if whole else None,
        origin=_typed(document.get("origin"), str),
        versions=_typed(document.get("versions"), dict) or {},
    )


def _typed(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def layer_records(document: Mapping[str, Any]) -> tuple[Sequence[LayerRecord], str | None]:
    """The capture's layers, or why they cannot be had."""
    try:
        return unpack_layers(document["layers"]), None
    except KvzError as error:
        return (), str(error)


def group_layers(head: Head, records: Sequence[LayerRecord]) -> tuple[LayerGroup, ...]:
    """Runs of equal layers: those that ``records`` describe and those that have tensors."""
    parts: dict[int, list[StoredPart]] = {i: [] for i in range(len(records))}
    for entry in head.tensors:
        number = layer_index(entry.name)
        if number is not None and is_key_or_value(entry.name):
            part = StoredPart(part_name(entry.name), entry.dtype, entry.shape)
            parts.setdefault(number, []).append(part)
    groups: list[LayerGroup] = []
    for number in sorted(parts):
        record = records[number] if number < len(records) else None
        kind, window = (None, None) if record is None else (record.kind, record.window)
        group = LayerGroup(number, number, kind, window, tuple(parts[number]))
        if groups and _continues(groups[-1], group):
            last = groups.pop()
            group = LayerGroup(last.first, number, kind, window, last.parts)
        groups.append(group)
    return tuple(groups)


def _continues(group: LayerGroup, following: LayerGroup) -> bool:
    alike = (group.kind, group.window, group.parts)
    return following.first == group.last + 1 and alike == (
        following.kind,
        following.window,
        following.parts,
    )


def group_others(head: Head) -> tuple[TensorGroup, ...]:
    """All tensors but the keys and values of layers, equal ones of several layers together."""
    counts: dict[tuple[str, str, tuple[int, ...], str], int] = {}
    for entry in head.tensors:
        if not _in_layer(entry):
            name = _LAYER_NUMBER.sub("*", entry.name, count=1)
            key = (name, entry.dtype, entry.shape, head.codec_of(entry).name)
            counts[key] = counts.get(key, 0) + 1
    return tuple(
        TensorGroup(name, count, dtype, shape, codec)
        for (name, dtype, shape, codec), count in counts.items()
    )


def _in_layer(entry: TensorEntry) -> bool:
    return layer_index(entry.name) is not None and is_key_or_value(entry.name)


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one that kvz compresses rather than an archive."""
    from kvz.safetensors_io import SafetensorsFile

    try:
        SafetensorsFile(path).close()
    except KvzError:
        return False
    return True
