"""Batches for the GPU kernels: one table row for each chunk, one map entry for each program.

One launch handles any number of chunks of any number of tensors that share their inner size, so a
cache of many small layers costs as little as one large tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton

NUM_FIELDS = 16


def compiles(kernel: object) -> bool:
    """False where Triton interprets its kernels, or where they do not become NVIDIA's PTX."""
    return isinstance(kernel, triton.JITFunction) and torch.version.hip is None


class ChunkPlace(NamedTuple):
    """One chunk ``[outer, tokens, inner]`` and where its parts lie in device memory.

    ``data``: address of its first element · ``outer_stride``: elements from one outer index to the
    next · ``payload``, ``codebook``: addresses · ``streams``: offsets of the streams after the
    first in the payload, in the order of the format · ``last_nbytes``: length of the last stream
    (read by decoders).
    """

    data: int
    outer_stride: int
    tokens: int
    outer: int
    payload: int
    codebook: int
    num_programs: int
    streams: Sequence[int]
    last_nbytes: int = 0


class Batch(NamedTuple):
    """Device tables. ``chunks`` int64[n, 16] · ``program_chunk`` int32[programs] ·
    ``num_programs`` int32[n] per chunk · ``unit``: how many neighbouring elements may be accessed
    as one word, 4 if all data, payloads and codebooks lie at multiples of 8 bytes, else 1 ·
    ``fewest_tokens`` of a chunk."""

    chunks: torch.Tensor
    program_chunk: torch.Tensor
    num_programs: torch.Tensor
    total_programs: int
    unit: int
    fewest_tokens: int

    @classmethod
    def of(cls, places: Sequence[ChunkPlace], device: torch.device) -> Batch:
        rows = np.zeros((len(places), NUM_FIELDS), np.int64)
        counts = np.array([place.num_programs for place in places], np.int32)
        starts = np.cumsum(counts, dtype=np.int64) - counts
        for row, place, start in zip(rows, places, starts, strict=True):
            row[:7] = (*place[:6], start)
            row[7 : 7 + len(place.streams)] = place.streams
            row[7 + len(place.streams)] = place.last_nbytes
        words = all(
            (p.data | p.payload | p.codebook) % 8 == 0 and (p.outer == 1 or p.outer_stride % 4 == 0)
            for p in places
        )
        program_chunk = np.repeat(np.arange(len(places), dtype=np.int32), counts)
        return cls(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(program_chunk).to(device),
            torch.from_numpy(counts).to(device),
            int(counts.sum()),
            4 if words else 1,
            min(p.tokens for p in places),
        )
