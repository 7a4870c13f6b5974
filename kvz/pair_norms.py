"""Mean norms of RoPE channel pairs over a prefill: what PN-Mix ranks key channels by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvz.capture_metadata import PAIR_NORM_BLOCK


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """Which channels of a head turn together.

    pairing: "half" (i, i + rotary_dim/2), "interleaved" (2i, 2i + 1), "none" (no rotation) or
    "unknown" (rotation that kvz cannot tell the pairs of).
    rotary_dim: the first rotary_dim channels are rotated, the others are pairs of one.
    """

    pairing: str
    rotary_dim: int


NO_ROPE = RopeLayout("none", 0)
UNKNOWN_ROPE = RopeLayout("unknown", 0)


def rope_layout(
    model: torch.nn.Module,
    attention: Any,
    head_dim: int,
    modelling_global: Callable[[Any, str], Any],
) -> RopeLayout:
    """How the model rotates the heads of one attention module, asked of the model itself.

    The number of frequencies gives rotary_dim; the modelling file's own rotation helper, called
    on numbered channels, gives the pairing.
    """
    num_frequencies = _num_frequencies(model, getattr(attention, "layer_type", None))
    if num_frequencies == 0 or not getattr(attention, "use_rope", True):
        return NO_ROPE
    # latent attention rotates the last channels of a head, not the first
    if 2 * num_frequencies > head_dim or hasattr(attention, "qk_rope_head_dim"):
        return UNKNOWN_ROPE
    for helper_name in ("rotate_half", "rotate_every_two"):
        helper = modelling_global(attention, helper_name)
        if helper is None:
            continue
        partner = -float(helper(torch.arange(2.0 * num_frequencies)[None, None, None])[..., 0])
        if partner == num_frequencies:
            return RopeLayout("half", 2 * num_frequencies)
        if partner == 1:
            return RopeLayout("interleaved", 2 * num_frequencies)
    return UNKNOWN_ROPE


def _num_frequencies(model: torch.nn.Module, layer_type: str | None) -> int:
    counts: dict[str, int] = {}
    for name, buffer in model.named_buffers():
        short = name.rpartition(".")[2]
        if short.endswith("inv_freq") and "original" not in short:
            counts.setdefault(short, buffer.numel())
    typed = counts.get(f"{layer_type}_inv_freq")
    return typed if typed is not None else counts.get("inv_freq", 0)


def pair_norms(x: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    """2-norms of the channel pairs, `[..., head_dim]` to float64 `[..., num_pairs]`.

    Rotated pairs first, in order of their frequency, then the channels that are not rotated.
    """
    rotated, rest = x[..., : layout.rotary_dim].double(), x[..., layout.rotary_dim :].double()
    if layout.pairing == "half":
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    return torch.cat([torch.hypot(first, second), rest.abs()], dim=-1)


class PairNormMean:
    """Means of pair norms over batch and tokens, one row per head, of blocks of columns.

    A block is :data:`PAIR_NORM_BLOCK` columns of the prompt. Sums are float64.
    """

    def __init__(self, layout: RopeLayout) -> None:
        self.layout = layout
        self._sums: list[torch.Tensor] = []
        self._counts: list[int] = []

    def add(self, x: torch.Tensor, mask: torch.Tensor, start: int) -> None:
        """x: `[batch, heads, tokens, head_dim]`, tokens from column `start` on. mask: bool
        `[batch, tokens]`, True to count."""
        norms = pair_norms(x, self.layout)
        # where, not a product: a padded position may hold NaN
        norms = torch.where(mask[:, None, :, None], norms, 0.0)
        end = start + x.shape[2]
        first = start
        while first < end:
            block = first // PAIR_NORM_BLOCK
            stop = min((block + 1) * PAIR_NORM_BLOCK, end)
            own = slice(first - start, stop - start)
            while len(self._sums) <= block:
                self._sums.append(torch.zeros_like(norms[0, :, 0]))
                self._counts.append(0)
            self._sums[block] += norms[:, :, own].sum(dim=(0, 2))
            self._counts[block] += int(mask[:, own].sum())
            first = stop

    def mean(self) -> torch.Tensor:
        """float32 `[blocks, heads, num_pairs]`, on the CPU; zeros in a block of padding alone."""
        if not any(self._counts):
            raise ValueError("mean of no positions")
        means = [
            total / max(count, 1) for total, count in zip(self._sums, self._counts, strict=True)
        ]
        return torch.stack(means).float().cpu()
