"""Payloads of Lynx as the NumPy reference makes them, and what it decodes from their streams."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cases import U8, U16

from kvz.formats.codecs.lynx import Geometry, LynxConfig
from kvz.formats.codecs.spans import residual_offset
from kvz.kernels.reference import lynx as reference


class ReferenceChunk(NamedTuple):
    """A chunk, its payload (anchor, padding, residual), and the length of the anchor."""

    payload: U8
    anchor_nbytes: int
    full: U16
    draft: U16


def reference_chunk(chunk: U16, config: LynxConfig, *, is_first: bool = True) -> ReferenceChunk:
    """``full``, ``draft``: what is decoded from both sections, and from the anchor alone."""
    tokens = chunk.shape[1]
    num_exact = Geometry.of(chunk.shape, config, is_first=is_first).exact
    coded = chunk.copy()
    coded[:, :num_exact] = coded[:, min(num_exact, tokens - 1), None]
    if config.by_token:
        coded = np.ascontiguousarray(coded.swapaxes(1, 2))
    options = {"page_tokens": config.page_tokens, "group_tokens": config.group_tokens}
    thresholds = None if config.companding is None else config.companding.thresholds()
    streams = reference.encode(coded, **options, thresholds=thresholds)
    anchor = b""
    for stream in (chunk[:, :num_exact], *streams[:4], streams.raw):
        anchor += bytes(-len(anchor) % 16) + stream.tobytes()
    padding = bytes(residual_offset(len(anchor)) - len(anchor))
    payload = np.frombuffer(anchor + padding + streams.residuals.tobytes(), np.uint8)
    decoded = []
    for table in (config.table, config.anchor_table):
        values = reference.decode(streams, table, **options)
        if config.by_token:
            values = values.swapaxes(1, 2).copy()
        values[:, :num_exact] = chunk[:, :num_exact]
        decoded.append(values)
    return ReferenceChunk(payload, len(anchor), *decoded)
