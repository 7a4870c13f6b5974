"""Tensors of BF16 bits where the tests of the GPU code run (gpu_support.py)."""

from __future__ import annotations

import numpy as np
import torch
from cases import U16
from gpu_support import DEVICE

MARGIN = 64
POISON = 0x55AA


def to_device(bits: U16) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).to(DEVICE).view(torch.bfloat16)


def to_bits(tensor: torch.Tensor) -> U16:
    bits: U16 = tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def placed(bits: U16, offset: int, gap: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor from element ``offset`` of a longer one on, outer indices ``gap`` further apart;
    and the longer one."""
    outer, tokens, inner = bits.shape
    stride = tokens * inner + gap
    whole = torch.full(
        (offset + outer * stride + MARGIN,), POISON, dtype=torch.int16, device=DEVICE
    )
    view = whole.as_strided(bits.shape, (stride, inner, 1), offset).view(torch.bfloat16)
    view.copy_(to_device(bits))
    return view, whole
