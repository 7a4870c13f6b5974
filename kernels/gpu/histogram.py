"""Exponent counts in Triton, for codebooks calibrated on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHANNELS = 64
_TOKENS = 16


@triton.jit
def histogram_kernel(
    bits_ptr,
    counts_ptr,
    tokens,
    inner,
    outer_stride,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Add one to ``counts[outer, channel, exponent]`` for every element.

    A program handles ``TOKENS`` tokens of ``CHANNELS`` channels of one outer index. Integer sums do
    not depend on the order in which they are made.
    """
    outer = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    in_bounds = (channel < inner) & (token < tokens)
    at = outer * outer_stride + token.to(tl.int64) * inner + channel
    bits = tl.load(bits_ptr + at, mask=in_bounds, other=0)
    exponent = (bits.to(tl.int32) >> 7) & 0xFF
    count = ((outer * inner + channel) << 8) + exponent
    tl.atomic_add(counts_ptr + count, 1, mask=in_bounds, sem="relaxed")


def count_exponents(bits: torch.Tensor, counts: torch.Tensor) -> None:
    """Count the BF16 exponents of ``bits`` (int16[outer, tokens, inner]) into ``counts``.

    Outer indices may lie apart, each is contiguous. ``counts``, int32[outer, inner, 256] and whole,
    is added to.
    """
    outer, tokens, inner = bits.shape
    grid = (triton.cdiv(inner, _CHANNELS), triton.cdiv(tokens, _TOKENS), outer)
    if bits.numel():
        histogram_kernel[grid](
            bits, counts, tokens, inner, bits.stride(0), CHANNELS=_CHANNELS, TOKENS=_TOKENS
        )
