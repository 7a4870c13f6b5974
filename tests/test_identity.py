from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_gemma, tiny_llama

from kvz import hf
from kvz.formats.errors import InvalidField, KvzError
from kvz.identity import (
    Mismatch,
    canonical_config,
    compare_identity,
    identity_error,
    model_identity,
    rope_fingerprint,
    token_hash,
    weights_fingerprint,
)


def identity_of(model: Any) -> dict[str, Any]:
    return model_identity(model, hf.cache_layers(hf.new_cache(model)))


def test_canonical_config_keeps_what_reaches_the_cache() -> None:
    config = {
        "_name_or_path": "/home/someone/model",
        "_model_name_or_path": "Someone's Model",
        "transformers_version": "5.24.0",
        "dtype": "bfloat16",
        "architectures": ["X"],
        "use_cache": True,
        "attention_dropout": 0.1,
        "pad_token_id": 0,
        "eos_token_id": [1, 2],
        "id2label": {"0": "LABEL_0"},
        "model_type": "llama",
        "head_dim": 64,
        "attention_bias": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256.0,
        "layer_types": ["s"] * 5 + ["f"],
        "pattern": [1, 2, 3],
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.5},
    }
    assert canonical_config(config) == {
        "model_type": "llama",
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "layer_types": [["s", 5], ["f", 1]],
        "pattern": [1, 2, 3],
        "rope_parameters.rope_type": "yarn",
        "rope_parameters.rope_theta": 10000,
        "rope_parameters.factor": 1.5,
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": None, "rope_local_base_freq": 1e4},
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
        ),
    ],
)
def test_rope_settings_of_transformers_4_and_5_are_the_same(old: Any, new: Any) -> None:
    assert canonical_config(old) == canonical_config(new)


def test_non_finite_members_stay_comparable() -> None:
    assert canonical_config({"limit": float("inf")}) == {"limit": "inf"}


def test_same_weights_and_config_agree() -> None:
    assert compare_identity(identity_of(tiny_llama()), identity_of(tiny_llama())) == []


def test_names_paths_and_library_version_are_no_difference() -> None:
    model, other = tiny_llama(), tiny_llama()
    other.config._name_or_path = "/elsewhere"
    other.config.transformers_version = "4.56.0"
    other.config.pad_token_id = 7
    other.config._attn_implementation = "eager"
    assert compare_identity(identity_of(model), identity_of(other)) == []


def test_identity_survives_saving_and_loading(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_gemma()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert identity_of(loaded) == identity_of(model)


def test_rope_theta_is_named_with_both_values() -> None:
    mismatches = compare_identity(
        identity_of(tiny_llama()), identity_of(tiny_llama(rope_theta=20000.0))
    )
    assert mismatches[0] == Mismatch("rope_parameters.rope_theta", 10000, 20000)
    assert {m.field for m in mismatches} == {"rope_parameters.rope_theta", "rope_inv_freq"}
    message = str(identity_error(mismatches))
    assert "rope_parameters.rope_theta: file 10000, model 20000" in message


def test_other_weights_under_the_same_config_differ_only_there() -> None:
    mismatches = compare_identity(identity_of(tiny_llama(0)), identity_of(tiny_llama(1)))
    assert [m.field for m in mismatches] == ["weights"]


def test_dtype_is_a_difference() -> None:
    model, other = tiny_llama(), tiny_llama(dtype=torch.float32)
    mismatches = compare_identity(identity_of(model), identity_of(other))
    assert mismatches[0] == Mismatch("dtype", "BF16", "F32")


def test_window_is_a_difference_of_config_and_layers() -> None:
    mismatches = compare_identity(
        identity_of(tiny_gemma()), identity_of(tiny_gemma(sliding_window=32))
    )
    assert mismatches == [
        Mismatch("sliding_window", 16, 32),
        Mismatch("layers.0.window", 16, 32),
    ]


def test_number_of_layers_is_a_difference() -> None:
    fields = [
        str(m)
        for m in compare_identity(
            identity_of(tiny_llama()), identity_of(tiny_llama(num_hidden_layers=2))
        )
    ]
    assert "number of cache layers: file 3, model 2" in fields


def test_edited_config_hash_is_noticed() -> None:
    identity = identity_of(tiny_llama())
    edited = {**identity, "config_hash": "0" * 64}
    assert [m.field for m in compare_identity(edited, identity)] == ["config_hash"]


@pytest.mark.parametrize("field", ["weights", "config", "layers"])
def test_identity_without_a_field_is_rejected(field: str) -> None:
    identity = identity_of(tiny_llama())
    file_identity = {k: v for k, v in identity.items() if k != field}
    with pytest.raises(InvalidField, match=field):
        compare_identity(file_identity, identity)


def test_a_long_list_of_differences_is_cut() -> None:
    mismatches = [Mismatch(f"m{i}", i, i + 1) for i in range(5)]
    assert str(identity_error(mismatches)).endswith("m2: file 2, model 3; and 2 more")


def test_fingerprint_covers_every_byte_of_a_small_parameter() -> None:
    layer = torch.nn.Linear(2, 3)
    expected = hashlib.sha256()
    expected.update(b"bias\0[3]\0torch.float32\0" + layer.bias.detach().numpy().tobytes())
    expected.update(b"weight\0[3, 2]\0torch.float32\0" + layer.weight.detach().numpy().tobytes())
    assert weights_fingerprint(layer) == expected.hexdigest()


def test_fingerprint_samples_a_large_parameter_from_end_to_end() -> None:
    layer = torch.nn.Linear(100, 30, bias=False)
    data = layer.weight.detach().numpy().tobytes()
    samples = b""
    for i in range(64):
        start = (len(data) - 16) * i // 63
        samples += data[start : start + 16]
    expected = hashlib.sha256(b"weight\0[30, 100]\0torch.float32\0" + samples)
    assert weights_fingerprint(layer) == expected.hexdigest()


def test_fingerprint_counts_tied_weights_once() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in sorted(model.state_dict().items()):
            if name == "lm_head.weight":
                continue
            single = torch.nn.Module()
            single.register_parameter("x", torch.nn.Parameter(parameter))
            flat = parameter.contiguous().view(torch.int16).numpy().tobytes()
            starts = [(len(flat) - 16) * i // 63 for i in range(64)]
            small = len(flat) < 64 * 16 + 16
            sampled = flat if small else b"".join(flat[s : s + 16] for s in starts)
            digest.update(f"{name}\0{list(parameter.shape)}\0{parameter.dtype}\0".encode())
            digest.update(sampled)
    assert weights_fingerprint(model) == digest.hexdigest()


def test_fingerprint_ignores_memory_layout() -> None:
    layer, transposed = torch.nn.Linear(40, 40, bias=False), torch.nn.Linear(40, 40, bias=False)
    transposed.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert not transposed.weight.is_contiguous()
    assert weights_fingerprint(transposed) == weights_fingerprint(layer)


def test_offloaded_parameter_is_an_error_that_names_it() -> None:
    with pytest.raises(KvzError, match="weight is offloaded"):
        weights_fingerprint(torch.nn.Linear(2, 2, bias=False, device="meta"))


def test_rope_fingerprint_is_of_the_frequencies_as_computed() -> None:
    model = tiny_llama()
    frequencies = model.model.rotary_emb.inv_freq.float().numpy().tobytes()
    expected = hashlib.sha256(struct.pack("<Q", len(frequencies)) + frequencies).hexdigest()
    assert rope_fingerprint(model) == expected


def test_rope_scaled_after_loading_shows() -> None:
    model, scaled = tiny_llama(), tiny_llama()
    scaled.model.rotary_emb.inv_freq *= 0.5
    fields = [m.field for m in compare_identity(identity_of(model), identity_of(scaled))]
    assert fields == ["rope_inv_freq"]


def test_rope_that_adapted_to_a_long_prompt_is_no_difference() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    model = tiny_llama(rope_scaling=rope, max_position_embeddings=16)
    before = model.model.rotary_emb.inv_freq.clone()
    fresh = rope_fingerprint(model)
    with torch.no_grad():
        model(torch.zeros((1, 64), dtype=torch.long))
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert rope_fingerprint(model) == fresh


def test_token_hash_is_of_little_endian_int64() -> None:
    expected = hashlib.sha256(struct.pack("<4q", 1, 2, 3, -1)).hexdigest()
    assert token_hash(torch.tensor([[1, 2], [3, -1]], dtype=torch.int32)) == expected
    assert token_hash(torch.tensor([[1, 2], [3, 0]])) != expected
    assert np.int64(-1).tobytes() == b"\xff" * 8
