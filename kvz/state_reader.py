"""Opens a capture or archive and reads from it what a restore needs, every tensor checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvz.capture_metadata import LayerRecord
from kvz.files import naming
from kvz.formats.errors import IdentityMismatch, InvalidField, UnsupportedCache
from kvz.identity import token_hash
from kvz.layers.containers import tensor_name
from kvz.layers.table import check_tensor, expected_state
from kvz.layout import SELECTION_KEY
from kvz.locations import shown_name
from kvz.source_protocol import AnnouncedSource, CacheSource
from kvz.torch_dtypes import TORCH_DTYPES, to_tensor

_LAYER_TENSOR = re.compile(r"layers\.\d+\.(\w+)")
_STATISTIC_PARTS = ("query", "query_pair_norm", "key_pair_norm")


@contextmanager
def open_source(source: str | Path | CacheSource) -> Iterator[CacheSource]:
    """A source for as long as the context lasts; errors inside it name the file."""
    if not isinstance(source, (str, Path)):
        yield source
        return
    opened: Any
    if str(source).endswith(".safetensors"):
        from kvz.safetensors_io import SafetensorsFile

        opened = SafetensorsFile(source)
    else:
        import kvz

        opened = kvz.open(source)
    try:
        with naming(shown_name(source)):
            _refuse_part(opened)
            yield opened
    finally:
        if hasattr(opened, "close"):
            opened.close()


def _refuse_part(source: CacheSource) -> None:
    selection = source.metadata.get(SELECTION_KEY)
    if selection is not None:
        raise IdentityMismatch(
            f"holds only a part of a cache ({selection}): a restore needs all of it"
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens and mask int64 `[batch, tokens]`, logits `[batch, vocab]` or None."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    next_token_logits: torch.Tensor | None


def read_prompt(
    source: CacheSource, document: dict[str, Any], expected_ids: torch.Tensor | None
) -> Prompt:
    """Tokens, mask and logits of a source, checked against the tokens part of its metadata.

    expected_ids: `[batch, tokens]` that they must equal. Raises InvalidField when tensors and
    metadata contradict each other, IdentityMismatch when the tokens are others.
    """
    facts = document["tokens"]
    shape = (facts.get("batch"), facts.get("count"))
    tensors = {name: read_tensor(source, name) for name in ("input_ids", "attention_mask")}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shape or tensor.dtype != torch.int64:
            raise InvalidField(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, metadata says int64 {list(shape)}"
            )
    for name, field in (("input_ids", "sha256"), ("attention_mask", "mask_sha256")):
        digest = token_hash(tensors[name])
        if digest != facts.get(field):
            raise IdentityMismatch(
                f"tokens.{field}: metadata says {facts.get(field)}, {name} hashes to {digest}"
            )
    if expected_ids is not None:
        _check_prompt(tensors["input_ids"], expected_ids.cpu().long())
    has_logits = "next_token_logits" in source.tensor_names
    logits = read_tensor(source, "next_token_logits") if has_logits else None
    if logits is not None and (logits.ndim != 2 or len(logits) != shape[0]):
        raise InvalidField(f"next_token_logits has shape {list(logits.shape)}, not [batch, vocab]")
    return Prompt(tensors["input_ids"], tensors["attention_mask"], logits)


def _check_prompt(stored: torch.Tensor, expected: torch.Tensor) -> None:
    if stored.shape != expected.shape:
        raise IdentityMismatch(
            f"cache belongs to another prompt: file {stored.shape[0]} x {stored.shape[1]} "
            f"tokens, prompt {expected.shape[0]} x {expected.shape[1]}"
        )
    if not torch.equal(stored, expected):
        row, column = (int(i) for i in (stored != expected).nonzero()[0])
        raise IdentityMismatch(
            f"cache belongs to another prompt: input_ids[{row}, {column}]: "
            f"file {int(stored[row, column])}, prompt {int(expected[row, column])}"
        )


def read_states(
    source: CacheSource,
    layers: Sequence[LayerRecord],
    container: Mapping[str, Any],
    dtype: str,
    batch: int,
) -> list[dict[str, torch.Tensor]]:
    """Tensors of each layer by part name, all of them checked against the records.

    dtype: safetensors name of the model's dtype. Raises InvalidField when a tensor has another
    shape or dtype than the metadata says, IdentityMismatch when one is missing, UnsupportedCache
    when the source holds layer state that no record mentions.
    """
    names = {
        tensor_name(container, i, part): (i, part)
        for i, layer in enumerate(layers)
        for part in expected_state(layer)
    }
    for name in source.tensor_names:
        match = _LAYER_TENSOR.fullmatch(name)
        if match and name not in names and match[1] not in _STATISTIC_PARTS:
            raise UnsupportedCache(f"tensor {name} has no place in this cache")
    if isinstance(source, AnnouncedSource):
        held = set(source.tensor_names)
        source.announce([name for name in names if name in held])
    states: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    for name, (layer_idx, part) in names.items():
        if name not in source.tensor_names:
            raise IdentityMismatch(f"tensor {name} is missing: file none, metadata has it")
        tensor = read_tensor(source, name)
        check_tensor(name, part, tensor, layers[layer_idx], dtype, batch)
        states[layer_idx][part] = tensor
    for layer_idx, state in enumerate(states):
        if layers[layer_idx].state is None and state:
            _check_same_heads(tensor_name(container, layer_idx, "value"), state)
    return states


def _check_same_heads(name: str, state: Mapping[str, torch.Tensor]) -> None:
    key, value = state["key"], state["value"]
    if value.shape[1] != key.shape[1]:
        raise InvalidField(
            f"{name} has shape {list(value.shape)}, its key has {key.shape[1]} heads"
        )


def read_tensor(source: CacheSource, name: str) -> torch.Tensor:
    """A tensor of a source with its dtype. Raises InvalidField when it has none or is absent."""
    if name not in source.tensor_names:
        raise InvalidField(f"tensor {name} is missing")
    if source.dtype(name) not in TORCH_DTYPES:
        raise InvalidField(f"tensor {name} has dtype {source.dtype(name)}, unknown to torch")
    # torch wants memory that it may write to; a mapped file is not
    array = np.require(source.read_tensor(name), requirements=["C", "W"])
    tensor = to_tensor(array, source.dtype(name))
    if tuple(tensor.shape) != tuple(source.shape(name)):
        raise InvalidField(f"tensor {name} reads as {list(tensor.shape)}, not as its shape says")
    return tensor
