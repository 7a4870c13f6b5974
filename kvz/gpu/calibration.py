"""Codebooks calibrated on the device: the bytes that kvz.codecs would give for the same tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvz.codebooks import sample_starts
from kvz.codecs.base import Codec
from kvz.codecs.gaac import GaacCodec
from kvz.codecs.splitzip import SplitzipCodec
from kvz.formats.codecs import gaac as gaac_layout
from kvz.formats.codecs import splitzip as splitzip_layout
from kvz.gpu.bindings import ChunkMemory, DeviceBinding, Workspace, make_batch
from kvz.kernels.gpu.histogram import count_exponents
from kvz.kernels.reference.calibration import WINDOW_BITS, frequent_exponents


def sample(bits: torch.Tensor) -> torch.Tensor:
    """The tokens of ``bits [outer, tokens, inner]`` that a codebook is calibrated on."""
    starts, length = sample_starts(bits.shape[1])
    if len(starts) == 1:
        return bits
    return torch.cat([bits[:, start : start + length] for start in starts], dim=1)


def exponent_histogram(bits: torch.Tensor) -> torch.Tensor:
    """Count the BF16 exponents of ``bits`` (int16[outer, tokens, inner]) per channel.

    Returns int32[outer, inner, 256].
    """
    outer, _, inner = bits.shape
    counts = torch.zeros((outer, inner, 256), dtype=torch.int32, device=bits.device)
    count_exponents(bits, counts)
    return counts


def window_bases(counts: torch.Tensor) -> torch.Tensor:
    """First exponent of the window of 4, 8 and 16 that covers most counts; ties: the lowest.

    ``counts`` int[..., 256]; returns uint8[3, ...].
    """
    sums = torch.nn.functional.pad(counts.to(torch.int64).cumsum(-1), (1, 0))
    bases = []
    for bits in WINDOW_BITS:
        size = 1 << bits
        covered = sums[..., size:] - sums[..., :-size]
        # no two of these are equal, so no order of the maximum's search matters
        rank = torch.arange(covered.shape[-1] - 1, -1, -1, device=counts.device)
        bases.append((covered * 256 + rank).argmax(dim=-1))
    return torch.stack(bases).to(torch.uint8)


def calibrate(codec: Codec, binding: DeviceBinding, tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The codebook of each tensor, int16[outer, tokens, inner], as a file would hold it.

    Waits for the device.
    """
    if not codec.needs_codebook:
        return [b""] * len(tensors)
    if isinstance(codec, GaacCodec):
        return [_calibrate_gaac(codec, binding, bits) for bits in tensors]
    if not isinstance(codec, SplitzipCodec):
        # it comes from the whole capture, not from these elements
        return [codec.calibrate(np.empty((0, 0, 0), np.uint16), len(bits[0])) for bits in tensors]
    counts = [exponent_histogram(sample(bits)).sum(dim=(0, 1)) for bits in tensors]
    size = splitzip_layout.CODEBOOK_SIZE
    return [frequent_exponents(row, size).tobytes() for row in torch.stack(counts).cpu().numpy()]


def _calibrate_gaac(codec: GaacCodec, binding: DeviceBinding, bits: torch.Tensor) -> bytes:
    seen = sample(bits)
    counts = exponent_histogram(seen)
    per_channel = _codebook(codec, counts)
    if bits.shape[1] > codec.SMALL_TENSOR_TOKENS or not seen.numel():
        return per_channel
    per_head = _codebook(codec, counts.sum(dim=1, keepdim=True))
    candidates = (per_head, per_channel)
    return min(candidates, key=lambda book: len(book) + _encoded_nbytes(codec, binding, seen, book))


def _codebook(codec: GaacCodec, counts: torch.Tensor) -> bytes:
    return gaac_layout.build_codebook(window_bases(counts).cpu().numpy(), codec.config)


def _encoded_nbytes(
    codec: GaacCodec, binding: DeviceBinding, bits: torch.Tensor, codebook: bytes
) -> int:
    outer, tokens, inner = bits.shape
    device = bits.device
    prepared: NDArray[np.uint8] = codec.prepare(codebook, "BF16", (outer, tokens, inner))
    book = torch.from_numpy(prepared).to(device)
    payload = torch.empty(
        binding.max_payload_nbytes((outer, tokens, inner)), dtype=torch.uint8, device=device
    )
    memory = ChunkMemory(
        (outer, tokens, inner), bits.data_ptr(), bits.stride(0), payload.data_ptr(), book.data_ptr()
    )
    batch = make_batch(binding, [memory], device)
    work = Workspace.empty(batch, binding.scratch_nbytes(batch, inner), device)
    lengths = torch.empty(1, dtype=torch.int64, device=device)
    binding.encode(batch, work, lengths, inner)
    return int(lengths)
