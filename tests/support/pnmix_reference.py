"""Payloads and values of PN-Mix: the NumPy reference's, laid out as spec/pnmix.md says."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from cases import U8, U16
from numpy.typing import NDArray

from kvz.formats.codecs.pnmix import KeyConfig, ValueConfig
from kvz.kernels.reference import pnmix as reference

Config = KeyConfig | ValueConfig
Mask = NDArray[np.bool_]


def start_below_fp16() -> U16:
    """Keys [1, 16, 20] whose first channel, if all are salient, is fitted best by a line that
    begins at about -71500: below what FP16 holds."""
    values = np.zeros((1, 16, 20), np.float32)
    values[:, 3:5, 1:] = 1
    values[:, :, 0] = 17536
    values[:, 0, 0], values[:, 4, 0] = -32640, 32640
    return (values.view(np.uint32) >> 16).astype(np.uint16)


class ReferenceChunk(NamedTuple):
    """``values``: the decoded chunk · ``num_raw``: elements of groups that are stored as they are ·
    ``flags``: where the stream of flags lies in the payload."""

    payload: U8
    values: U16
    num_raw: int
    flags: slice


def reference_chunk(
    chunk: U16, config: Config, salient: Mask | None, start: int, num_tokens: int
) -> ReferenceChunk:
    """Of a chunk ``[outer, tokens, inner]`` that begins with token ``start`` of its tensor.

    ``salient``: of keys, bool[outer, inner].
    """
    positions = np.arange(start, start + chunk.shape[1])
    is_exact = positions < config.sink_tokens
    if config.tail == "exact":
        tail = max(num_tokens - config.sink_tokens, 0) % config.group_tokens
        is_exact |= positions >= num_tokens - tail
    coded = chunk[:, ~is_exact]
    streams: Any
    if isinstance(config, KeyConfig):
        assert salient is not None
        widths = reference.Widths(config.high_bits, config.low_bits)
        sizes = {"group_tokens": config.group_tokens, "page_groups": config.page_groups}
        streams = reference.encode_keys(coded, salient, widths, rule=config.levels, **sizes)
    else:
        sizes = {"group_tokens": config.group_tokens, "group_channels": config.group_channels}
        streams = reference.encode_values(coded, config.bits, rule=config.levels, **sizes)
    values = chunk.copy()
    if coded.size and isinstance(config, KeyConfig):
        assert salient is not None
        decoded = reference.decode_keys(streams, salient, widths, coded.shape[1], **sizes)
        values[:, ~is_exact] = decoded
    elif coded.size:
        values[:, ~is_exact] = reference.decode_values(streams, coded.shape[1], **sizes)
    payload = b""
    offsets = []
    for stream in (chunk[:, is_exact], *streams):
        payload += bytes(-len(payload) % 16)
        offsets.append(len(payload))
        payload += np.ascontiguousarray(stream).tobytes()
    flags = slice(offsets[1], offsets[1] + streams.flags.size)
    return ReferenceChunk(np.frombuffer(payload, np.uint8), values, streams.raw.size, flags)
