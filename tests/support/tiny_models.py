"""Randomly initialised models of real architectures, small enough to run in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WINDOW = 16
# one token for each
WORDS = [f"w{i}" for i in range(128)]


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Three full layers, grouped queries, half-rotation RoPE."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    options = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(**{**options, **changes})
    # not model.to(dtype): that would round the RoPE frequencies too
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tiny_gemma(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Layers sliding, sliding, full, sliding; the first layer slides."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    options = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "max_position_embeddings": 256,
    }
    torch.manual_seed(seed)
    config = Gemma3TextConfig(**{**options, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompt_ids(batch: int, num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Token ids `[batch, num_tokens]` int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (batch, num_tokens), generator=generator)


def left_padded_mask(batch: int, num_tokens: int, padding: int) -> torch.Tensor:
    """Mask `[batch, num_tokens]` int64 whose first row starts with `padding` zeros."""
    mask = torch.ones((batch, num_tokens), dtype=torch.long)
    mask[0, :padding] = 0
    return mask


def save_tokenizer(folder: Path) -> None:
    """A tokenizer that knows `WORDS`, between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def save_model(model: Any, folder: Path) -> Path:
    """Write a model with that tokenizer; returns the folder."""
    save_tokenizer(folder)
    model.save_pretrained(folder)
    return folder
