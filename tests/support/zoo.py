"""Tiny randomly initialised models of many architectures, and caches of every class for them.

Importing this loads neither torch nor transformers. An entry that the installed transformers
does not have is left out by `available`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True)
class Entry:
    """config: name of the configuration class. kinds: of its cache's layers, as a set."""

    config: str
    kinds: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def _entry(config: str, kinds: str, without: tuple[str, ...] = (), **options: Any) -> Entry:
    return Entry(config, frozenset(kinds.split()), options, without)


ZOO: dict[str, Entry] = {
    "llama": _entry("LlamaConfig", "full"),
    "qwen3": _entry("Qwen3Config", "full", head_dim=16),
    "gpt2": _entry("GPT2Config", "full", n_embd=64, n_layer=4, n_head=4, n_positions=256),
    "gptj": _entry("GPTJConfig", "full", n_embd=64, n_layer=4, n_head=4, rotary_dim=8),
    "mistral": _entry("MistralConfig", "sliding", sliding_window=16),
    "gemma3": _entry(
        "Gemma3TextConfig",
        "sliding full",
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
    ),
    "gpt_oss": _entry(
        "GptOssConfig",
        "sliding full",
        head_dim=16,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "llama4": _entry(
        "Llama4TextConfig",
        "sliding full",
        head_dim=16,
        attention_chunk_size=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
    ),
    "gemma3n": _entry(
        "Gemma3nTextConfig",
        "sliding full empty",
        head_dim=16,
        sliding_window=16,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    "gemma4": _entry(
        "Gemma4TextConfig",
        "sliding full empty",
        head_dim=16,
        global_head_dim=32,
        sliding_window=16,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
    ),
    "deepseek_v3": _entry("DeepseekV3Config", "full", **_MLA),
    "deepseek_v32": _entry(
        "DeepseekV32Config",
        "indexed",
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        **_MLA,
    ),
    "deepseek_v4": _entry(
        "DeepseekV4Config",
        "heavily_compressed compressed_sparse",
        sliding_window=16,
        compress_rates={"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=8,
    ),
    "mamba": _entry("MambaConfig", "linear", state_size=8),
    "mamba2": _entry(
        "Mamba2Config", "linear", state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=16
    ),
    "falcon_mamba": _entry("FalconMambaConfig", "linear", state_size=8),
    "lfm2": _entry(
        "Lfm2Config",
        "linear full",
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_multiple_of=32,
    ),
    "qwen3_next": _entry(
        "Qwen3NextConfig",
        "linear full",
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "jamba": _entry(
        "JambaConfig",
        "linear full",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "bamba": _entry("BambaConfig", "linear full", attn_layer_indices=[1, 3], **_MAMBA2),
    "falcon_h1": _entry("FalconH1Config", "hybrid", head_dim=16, mamba_d_ssm=128, **_MAMBA2),
    "zamba2": _entry(
        "Zamba2Config",
        "linear hybrid",
        num_hidden_layers=6,
        num_key_value_heads=4,
        layers_block_type=["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=1,
        chunk_size=16,
        adapter_rank=8,
        num_mem_blocks=1,
    ),
    "inkling": _entry(
        "InklingTextConfig",
        "hybrid hybrid_sliding",
        head_dim=16,
        swa_head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        sliding_window_size=16,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
        d_rel=4,
        rel_extent=64,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
    "minimax_m3": _entry(
        "MiniMaxM3VLTextConfig",
        "full minimax_m3_sparse",
        head_dim=16,
        rotary_dim=8,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=8,
        index_topk_blocks=2,
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
    ),
}


def build(name: str, seed: int = 0, dtype: str = "bfloat16", **changes: Any) -> Any:
    """A model of the zoo, in evaluation mode."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    entry = ZOO[name]
    options = {k: v for k, v in {**_SIZES, **entry.options}.items() if k not in entry.without}
    torch.manual_seed(seed)
    config = getattr(transformers, entry.config)(**{**options, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def available() -> list[str]:
    """Names of the entries that the installed transformers has."""
    import transformers

    return [name for name, entry in ZOO.items() if hasattr(transformers, entry.config)]
