"""Binding of the codec ``raw``: bytes as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kvz.codecs.base import U8, Chunk, Shape, WholeChunks
from kvz.formats.errors import InvalidField


class RawCodec(WholeChunks):
    """Stores every chunk as it is."""

    name = "raw"
    needs_codebook = False
    OPTIONS: ClassVar[dict[str, Any]] = {}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RawCodec:
        if fields:
            raise InvalidField(f"raw config must be empty, got {dict(fields)}")
        return cls()

    @classmethod
    def from_options(cls) -> RawCodec:
        return cls()

    def config_dict(self) -> dict[str, Any]:
        return {}

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        return True

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        return b""

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> None:
        return None

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        return int(np.prod(shape)) * itemsize

    def encode(self, chunk: Chunk, prepared: None, buffer: U8, start: int = 0) -> int:
        np.copyto(buffer[: chunk.nbytes].view(chunk.dtype).reshape(chunk.shape), chunk)
        return chunk.nbytes

    def decode(self, payload: U8, prepared: None, out: Chunk, start: int = 0) -> None:
        if payload.size != out.nbytes:
            raise InvalidField(f"raw section has {payload.size} bytes, must have {out.nbytes}")
        np.copyto(out, payload.view(out.dtype).reshape(out.shape))
