"""Whose cache is it: what of a model decides the numbers in its KV cache."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvz.capture_metadata import LayerRecord, canonical_json, pack_layers, unpack_layers
from kvz.formats.errors import IdentityMismatch, InvalidField, KvzError

if TYPE_CHECKING:
    import torch

# Samples per parameter for the weights fingerprint: a fine-tune changes every tensor everywhere,
# so a thousand bytes of each tell two models apart without reading gigabytes.
_NUM_SAMPLES = 64
_SAMPLE_NBYTES = 16

_MAX_NAMED_MISMATCHES = 3

# Config members that do not reach the numbers of a KV cache: names and paths, training, output
# switches, token ids for padding and stopping, and the sampling defaults that older transformers
# kept in the model config. What the storage of the weights changes is in their fingerprint.
_IGNORED_CONFIG = frozenset(
    {
        "architectures",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "pruned_heads",
        "quantization_config",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    }
)
_IGNORED_SUFFIXES = ("_token_id", "_token_ids", "name_or_path", "dropout", "_aux_loss_coef")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field in which file and model differ; None stands for absent."""

    field: str
    in_file: Any
    in_model: Any

    def __str__(self) -> str:
        return f"{self.field}: file {_shown(self.in_file)}, model {_shown(self.in_model)}"


def canonical_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a model config that decide the numbers of its cache, flat and normalised.

    config: `config.to_dict()` of a decoder. Nested members get dotted keys. None and False count
    as absent, whole floats become integers, long lists become `[value, count]` runs, and RoPE
    settings of transformers 4 are renamed to those of 5: none of these is a difference.
    """
    flat: dict[str, Any] = {}
    for key, value in _flatten(_with_rope_parameters(config)):
        ignored = any(
            part.startswith("_") or part in _IGNORED_CONFIG or part.endswith(_IGNORED_SUFFIXES)
            for part in key.split(".")
        )
        if not (ignored or value is None or value is False or value == {}):
            flat[key] = value
    return flat


def model_identity(model: Any, layers: Sequence[LayerRecord]) -> dict[str, Any]:
    """Identity of a transformers model, JSON-compatible.

    layers: kinds and windows of the cache that the model makes; their token counts are ignored.
    Raises KvzError when a parameter has no data to fingerprint.
    """
    config = canonical_config(model.config.get_text_config(decoder=True).to_dict())
    return {
        "architecture": type(model).__name__,
        "config": config,
        "config_hash": hashlib.sha256(canonical_json(config).encode()).hexdigest(),
        "dtype": dtype_name(model.dtype),
        "layers": pack_layers(LayerRecord(layer.kind, layer.window) for layer in layers),
        "rope_inv_freq": rope_fingerprint(model),
        "weights": weights_fingerprint(model),
    }


def compare_identity(
    file_identity: Mapping[str, Any], model_identity: Mapping[str, Any]
) -> list[Mismatch]:
    """The fields in which two identities differ, the most telling first; empty when they agree.

    Raises InvalidField when the file's identity lacks a field.
    """
    missing = sorted(set(model_identity) - set(file_identity))
    if missing or not isinstance(file_identity["config"], Mapping):
        raise InvalidField(f"kvz metadata: identity lacks {', '.join(missing) or 'a config'}")
    mismatches = _compare_configs(file_identity["config"], model_identity["config"])
    mismatches += _compare_layers(file_identity["layers"], model_identity["layers"])
    fields = ["architecture", "dtype", "rope_inv_freq", "weights"]
    if not mismatches:
        # equal configs with unequal hashes: the document was edited
        fields.append("config_hash")
    if file_identity["dtype"] != model_identity["dtype"]:
        # the same weights in another dtype are other bytes: that would say the same again
        fields.remove("weights")
    mismatches += [
        Mismatch(field, file_identity[field], model_identity[field])
        for field in fields
        if file_identity[field] != model_identity[field]
    ]
    return mismatches


def identity_error(mismatches: Sequence[Mismatch]) -> IdentityMismatch:
    """The error that names what differs."""
    named = "; ".join(str(mismatch) for mismatch in mismatches[:_MAX_NAMED_MISMATCHES])
    rest = len(mismatches) - _MAX_NAMED_MISMATCHES
    more = f"; and {rest} more" if rest > 0 else ""
    return IdentityMismatch(f"cache belongs to another model: {named}{more}")


def token_hash(tokens: torch.Tensor) -> str:
    """SHA-256 of ids or mask `[batch, tokens]` as little-endian int64 in row order."""
    values = tokens.detach().cpu().long().contiguous().numpy().astype("<i8", copy=False)
    return hashlib.sha256(values.tobytes()).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors name of a dtype.

    Raises KvzError for one that safetensors does not have.
    """
    from kvz.torch_dtypes import SAFETENSORS_NAMES

    if dtype not in SAFETENSORS_NAMES:
        raise KvzError(f"dtype {dtype} has no safetensors name")
    return SAFETENSORS_NAMES[dtype]


def weights_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over name, shape, dtype and sampled bytes of every parameter, in name order.

    Persistent buffers count as parameters, since some quantisers keep weights there. Tied
    weights count once. Raises KvzError when a parameter is not in memory (meta device).
    """
    digest = hashlib.sha256()
    persistent = set(model.state_dict())
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update((n, b) for n, b in model.named_buffers() if n in persistent)
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.is_meta:
            raise KvzError(f"parameter {name} is offloaded: load the model fully to use its cache")
        digest.update(f"{name}\0{list(tensor.shape)}\0{tensor.dtype}\0".encode())
        digest.update(_sampled_bytes(tensor))
    return digest.hexdigest()


def rope_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the distinct inverse frequencies of the model's RoPE modules, as float32.

    The values as computed, so that a scaling applied after loading shows. Kinds of RoPE that
    adapt the frequencies to each input are judged by the frequencies they start from.
    """
    distinct: set[bytes] = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            if _adapts_at_run_time(module):
                original = f"{name.removesuffix('inv_freq')}original_inv_freq"
                buffer = getattr(module, original, buffer)
            values = buffer.detach().float().cpu().numpy().astype("<f4", copy=False)
            distinct.add(values.tobytes())
    digest = hashlib.sha256()
    for value in sorted(distinct):
        digest.update(len(value).to_bytes(8, "little") + value)
    return digest.hexdigest()


def _adapts_at_run_time(module: torch.nn.Module) -> bool:
    rope_type = getattr(module, "rope_type", "default")
    types = rope_type.values() if isinstance(rope_type, Mapping) else [rope_type]
    return any("dynamic" in str(t) or t == "longrope" for t in types)


def _sampled_bytes(tensor: torch.Tensor) -> bytes:
    import torch

    flat = tensor.reshape(-1).contiguous().view(torch.uint8)
    last = flat.numel() - _SAMPLE_NBYTES
    if last < _NUM_SAMPLES * _SAMPLE_NBYTES:
        return flat.cpu().numpy().tobytes()
    starts = [last * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)]
    offsets = torch.tensor(starts, device=flat.device)[:, None]
    offsets = offsets + torch.arange(_SAMPLE_NBYTES, device=flat.device)
    return flat[offsets].cpu().numpy().tobytes()


def _with_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    normal = dict(config)
    theta = normal.pop("rope_theta", None)
    scaling = dict(normal.pop("rope_scaling", None) or {})
    local_theta = normal.pop("rope_local_base_freq", None)
    if normal.get("rope_parameters") is None and theta is not None:
        scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type", "default"))
        rope = {"rope_theta": theta, **scaling}
        if local_theta is not None:
            local = {"rope_theta": local_theta, "rope_type": "default"}
            rope = {"full_attention": rope, "sliding_attention": local}
        normal["rope_parameters"] = rope
    return normal


def _flatten(value: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _flatten(value[key], f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)):
        yield prefix, _runs([_scalar(item) for item in value])
    else:
        yield prefix, _scalar(value)


def _scalar(value: object) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return int(value) if value.is_integer() else value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _scalar(value[key]) for key in value}
    if isinstance(value, (list, tuple)):
        return [_scalar(item) for item in value]
    return str(value)


def _runs(items: list[Any]) -> list[Any]:
    runs: list[list[Any]] = []
    for item in items:
        if runs and runs[-1][0] == item:
            runs[-1][1] += 1
        else:
            runs.append([item, 1])
    return runs if len(runs) <= len(items) // 2 else items


def _compare_configs(in_file: Mapping[str, Any], in_model: Mapping[str, Any]) -> list[Mismatch]:
    keys = sorted(set(in_file) | set(in_model))
    return [
        Mismatch(key, in_file.get(key), in_model.get(key))
        for key in keys
        if in_file.get(key) != in_model.get(key)
    ]


def _compare_layers(packed_file: object, packed_model: object) -> list[Mismatch]:
    in_file, in_model = unpack_layers(packed_file), unpack_layers(packed_model)
    if len(in_file) != len(in_model):
        return [Mismatch("number of cache layers", len(in_file), len(in_model))]
    for index, (ours, theirs) in enumerate(zip(in_file, in_model, strict=True)):
        for field in ("kind", "window"):
            if getattr(ours, field) != getattr(theirs, field):
                name = f"layers.{index}.{field}"
                return [Mismatch(name, getattr(ours, field), getattr(theirs, field))]
    return []


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    text = str(value)
    # enough of a hash to tell it from another
    return f"{text[:12]}..." if len(text) == 64 and text.isalnum() else text
