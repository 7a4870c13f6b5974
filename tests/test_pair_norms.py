from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_gemma, tiny_llama

from kvz.hf import modelling_global
from kvz.pair_norms import NO_ROPE, PairNormMean, RopeLayout, pair_norms, rope_layout

# 3-4-5 and 5-12-13 triangles: norms without rounding
HEAD = torch.tensor([3.0, 5.0, 4.0, 12.0, -7.0])


def test_half_rotation_pairs_a_channel_with_that_half_a_rotation_later() -> None:
    assert pair_norms(HEAD, RopeLayout("half", 4)).tolist() == [5.0, 13.0, 7.0]


def test_interleaved_rotation_pairs_neighbours() -> None:
    interleaved = HEAD[[0, 2, 1, 3, 4]]
    assert pair_norms(interleaved, RopeLayout("interleaved", 4)).tolist() == [5.0, 13.0, 7.0]


def test_channels_without_rotation_are_pairs_of_one() -> None:
    assert pair_norms(HEAD, NO_ROPE).tolist() == [3.0, 5.0, 4.0, 12.0, 7.0]


def test_mean_counts_unmasked_positions_only() -> None:
    mean = PairNormMean(RopeLayout("half", 2))
    x = torch.tensor([[3.0, 4.0], [float("nan"), 1.0], [6.0, 8.0]])[None, None]
    mean.add(x, torch.tensor([[True, False, True]]), 0)
    mean.add(torch.tensor([[0.0, 3.0]])[None, None], torch.tensor([[True]]), 3)
    assert mean.mean().tolist() == [[[(5.0 + 10.0 + 3.0) / 3]]]


def test_means_are_of_blocks_of_1024_columns_however_they_arrive() -> None:
    x = torch.arange(2100.0)[None, None, :, None]
    mask = torch.ones((1, 2100), dtype=torch.bool)
    # 5 to 1023, 1024 to 2047, 2048 to 2099
    mask[:, :5] = False
    for chunk in (2100, 1000, 1024):
        mean = PairNormMean(NO_ROPE)
        for start in range(0, 2100, chunk):
            own = slice(start, start + chunk)
            mean.add(x[:, :, own], mask[:, own], start)
        assert mean.mean().tolist() == [[[514.0]], [[1535.5]], [[2073.5]]]


def test_block_of_padding_alone_is_zero() -> None:
    mean = PairNormMean(NO_ROPE)
    mask = torch.arange(1030)[None] >= 1024
    mean.add(torch.full((1, 1, 1030, 1), 3.0), mask, 0)
    assert mean.mean().tolist() == [[[0.0]], [[3.0]]]


def test_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no positions"):
        PairNormMean(NO_ROPE).mean()


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma])
def test_llama_and_gemma_turn_halves(build: object) -> None:
    model = build()  # type: ignore[operator]
    attention = model.model.layers[0].self_attn
    assert rope_layout(model, attention, 16, modelling_global) == RopeLayout("half", 16)


def test_glm_turns_half_of_the_head_in_neighbouring_pairs() -> None:
    from transformers import GlmConfig, GlmForCausalLM

    config = GlmConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        partial_rotary_factor=0.5,
        pad_token_id=0,
    )
    model = GlmForCausalLM(config)
    attention = model.model.layers[0].self_attn
    assert rope_layout(model, attention, 16, modelling_global) == RopeLayout("interleaved", 8)
