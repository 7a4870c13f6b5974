"""Is a cache the one that a model would make: its identity, and some of its numbers again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvz import hf
from kvz.capture_metadata import LayerRecord, decode_metadata, unpack_layers
from kvz.formats.errors import ConfigError, ContentMismatch, InvalidField
from kvz.layers.containers import container_of, read_cache, tensor_name
from kvz.layers.table import ONE_PASS_KINDS
from kvz.lossy import LOSSY_KEY
from kvz.restoring import check_model, check_shard
from kvz.source_protocol import CacheSource
from kvz.state_reader import Prompt, open_source, read_prompt, read_states

# Key and value of these hold every token in order, whatever else differs.
_ALL_TOKENS = frozenset(
    {"full", "indexed", "minimax_m3_sparse", "hybrid", "static", "static_indexed", "static_hybrid"}
)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay compared.

    num_positions: tokens recomputed and compared, the first of the prompt. num_tensors,
    num_exact: compared, and equal to the bit. largest_difference: the largest relative
    difference (2-norm) of those that are not, in the tensor `where`; 0 and None when all are
    exact. bound: what it had to stay below. skipped: layers that a replay says nothing about.
    lossy: the codecs that changed the values; empty when none did.
    """

    num_positions: int
    num_tensors: int
    num_exact: int
    largest_difference: float
    where: str | None
    bound: float
    skipped: tuple[int, ...]
    lossy: str = ""


#: Of a lossy cache: its codes err by less than 0.35 of the norm, another model's tensors by more
#: than 1.
_LOSSY_BOUND = 0.6


def verify_model(
    source: str | Path | CacheSource,
    model: Any,
    *,
    replay: int = 0,
    input_ids: torch.Tensor | None = None,
) -> ReplayReport | None:
    """Check that a cache belongs to `model`; with `replay`, recompute its first positions.

    The replay runs the stored tokens through the model, cut as the capture cut them, so that the
    same kernels on the same machine give the same bits; elsewhere the difference is bounded by
    the square root of the dtype's epsilon; of a lossy cache by 0.6 of the norm. input_ids: the
    prompt `[batch, tokens]` that the cache must be of. Raises IdentityMismatch, ContentMismatch
    naming the tensor and both figures, InvalidField, and ConfigError when no layer holds the asked
    positions.
    """
    with open_source(source) as opened:
        document = decode_metadata(opened.metadata)
        check_model(document, model)
        check_shard(document)
        layers, container = unpack_layers(document["layers"]), container_of(document)
        prompt = read_prompt(opened, document, input_ids)
        if replay < 1:
            return None
        batch = len(prompt.input_ids)
        states = read_states(opened, layers, container, document["identity"]["dtype"], batch)
        if "num_self_layers" in container:
            raise ConfigError("a replay needs what the encoder was given, which is not stored")
        lossy = opened.metadata.get(LOSSY_KEY, "")
        return _replay(document, model, layers, states, prompt, replay, lossy)


def _replay(
    document: Mapping[str, Any],
    model: Any,
    layers: tuple[LayerRecord, ...],
    states: list[dict[str, torch.Tensor]],
    prompt: Prompt,
    wanted: int,
    lossy: str,
) -> ReplayReport:
    total = prompt.input_ids.shape[1]
    cache = hf.new_cache(model)
    step = _chunk_tokens(document, total)
    if any(layer.kind in ONE_PASS_KINDS for layer in hf.cache_layers(cache)):
        step = total
    positions = min(wanted, total)
    # whole chunks: a product over fewer rows may round differently
    end = min(-(-positions // step) * step, total)
    ids, mask = prompt.input_ids.to(model.device), prompt.attention_mask.to(model.device)
    for start in range(0, end, step):
        hf.feed(model, cache, ids[:, start : min(start + step, end)], mask, start)
    again = read_cache(cache, model.dtype)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    skipped = []
    for layer_idx, stored in enumerate(states):
        compared = _comparable(layers[layer_idx], again.layers[layer_idx], end == total)
        found = {part: again.tensors[layer_idx].get(part) for part in stored if part in compared}
        for part, tensor in found.items():
            if tensor is not None:
                ours = stored[part]
                if layers[layer_idx].kind in _ALL_TOKENS and part in ("key", "value"):
                    ours, tensor = ours[:, :, :positions], tensor[:, :, :positions]
                pairs[tensor_name({}, layer_idx, part)] = (ours, tensor.cpu())
        if stored and not found:
            skipped.append(layer_idx)
    if not pairs:
        raise ConfigError(
            f"no layer holds the first {positions} tokens: a replay needs all {total} of them"
        )
    return _compare(pairs, positions, tuple(skipped), lossy)


def _chunk_tokens(document: Mapping[str, Any], total: int) -> int:
    capture = document.get("capture")
    # a cache that kvz did not fill: the usual prefill is one pass
    step = capture.get("chunk_tokens") if isinstance(capture, dict) else max(total, 1)
    if type(step) is not int or step < 1:
        raise InvalidField(f"kvz metadata: capture.chunk_tokens must be >= 1, got {step!r}")
    return step


def _comparable(stored: LayerRecord, again: LayerRecord, whole: bool) -> frozenset[str]:
    """Parts of a stored layer that a replay computes, too."""
    if stored.kind == again.kind and whole:
        return frozenset(stored.state or ("key", "value"))
    if stored.kind in _ALL_TOKENS and again.kind in _ALL_TOKENS:
        return frozenset({"key", "value"})
    return frozenset()


def _compare(
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    positions: int,
    skipped: tuple[int, ...],
    lossy: str,
) -> ReplayReport:
    num_exact, largest, where, bound_there = 0, 0.0, None, 0.0
    for name, (stored, again) in pairs.items():
        if stored.shape != again.shape or stored.dtype != again.dtype:
            raise ContentMismatch(
                f"{name}: file {stored.dtype} {list(stored.shape)}, "
                f"model {again.dtype} {list(again.shape)}"
            )
        if _same_bits(stored, again):
            num_exact += 1
            continue
        bound = torch.finfo(stored.dtype).eps ** 0.5 if stored.is_floating_point() else 0.0
        explains = "rounding"
        if lossy and stored.is_floating_point():
            bound, explains = _LOSSY_BOUND, lossy
        difference = _relative_difference(stored, again)
        if not difference <= bound:  # NaN, too
            raise ContentMismatch(
                f"{name}: the model's differs by {difference:.2g} of its norm over {positions} "
                f"positions, {explains} explains at most {bound:.2g}"
            )
        if difference >= largest:
            largest, where, bound_there = difference, name, bound
    return ReplayReport(
        positions, len(pairs), num_exact, largest, where, bound_there, skipped, lossy
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _relative_difference(stored: torch.Tensor, again: torch.Tensor) -> float:
    expected = again.double()
    norm = float(expected.norm())
    difference = float((stored.double() - expected).norm())
    return difference / norm if norm else difference
