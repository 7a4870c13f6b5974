"""Binding of the codec ``zstd``: byte planes, each compressed by Zstandard where that helps."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import zstandard

from kvz.codecs.base import U8, Chunk, Shape, WholeChunks
from kvz.formats.codecs.zstd import LENGTH_NBYTES, STORED_FLAG, ZstdConfig, streams
from kvz.formats.errors import DamagedFile, InvalidField
from kvz.formats.ids import SIGNED_FLOATS
from kvz.kernels.reference.planes import join, split

_PROBE_NBYTES = 64 << 10
#: A plane whose beginning keeps more than this share of its size is stored as it is.
_PROBE_LIMIT = 0.98


class ZstdCodec(WholeChunks):
    """Lossless for every dtype."""

    name = "zstd"
    needs_codebook = False
    OPTIONS: ClassVar[dict[str, Any]] = {"level": int}

    def __init__(self, config: ZstdConfig | None = None) -> None:
        self.config = config or ZstdConfig()
        # a zstandard context must not be shared between threads
        self._contexts = threading.local()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ZstdCodec:
        return cls(ZstdConfig.from_dict(fields))

    @classmethod
    def from_options(cls, **options: Any) -> ZstdCodec:
        return cls(ZstdConfig(**options))

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        return True

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        return b""

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> bool:
        """Whether elements are rotated before they are split."""
        return dtype in SIGNED_FLOATS

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        return int(np.prod(shape)) * itemsize + LENGTH_NBYTES * itemsize

    def encode(self, chunk: Chunk, rotate: bool, buffer: U8, start: int = 0) -> int:
        compressor = getattr(self._contexts, "compressor", None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(level=self.config.level, write_checksum=True)
            self._contexts.compressor = compressor
        planes = split(chunk.reshape(-1), rotate)
        words = buffer[: LENGTH_NBYTES * len(planes)].view("<u4")
        position = words.nbytes
        for i, plane in enumerate(planes):
            payload = _compress_plane(compressor, plane)
            stored = payload is plane
            words[i] = payload.size | (STORED_FLAG if stored else 0)
            buffer[position : position + payload.size] = payload
            position += payload.size
        return position

    def decode(self, payload: U8, rotate: bool, out: Chunk, start: int = 0) -> None:
        planes = [
            _plane(payload[span.offset : span.end], stored, out.size)
            for span, stored in streams(payload, out.itemsize)
        ]
        if out.flags.c_contiguous:
            join(planes, out.reshape(-1), rotate)
        else:
            joined = np.empty(out.size, out.dtype)
            join(planes, joined, rotate)
            np.copyto(out, joined.reshape(out.shape))


def _compress_plane(compressor: zstandard.ZstdCompressor, plane: U8) -> U8:
    """The plane as a zstd frame, or the plane itself where that is not larger.

    A long plane is given up after its beginning: mantissas do not compress, and trying costs most
    of the time.
    """
    if plane.size > 2 * _PROBE_NBYTES:
        probe = compressor.compress(memoryview(plane[:_PROBE_NBYTES]))
        if len(probe) > _PROBE_LIMIT * _PROBE_NBYTES:
            return plane
    packed = np.frombuffer(compressor.compress(memoryview(plane)), np.uint8)
    return plane if packed.size >= plane.size else packed


def _plane(data: U8, stored: bool, length: int) -> U8:
    if stored:
        if data.size != length:
            raise InvalidField(f"stored plane has {data.size} bytes, must have {length}")
        return data
    frame = memoryview(data)
    try:
        # the declared size is checked before anything of that size is allocated
        if zstandard.frame_content_size(frame) != length:
            raise InvalidField(f"zstd frame does not declare the {length} bytes of a plane")
        decompressor = zstandard.ZstdDecompressor()
        plane = decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedFile(f"zstd: {error}") from None
    if len(plane) != length:
        raise InvalidField(f"zstd frame holds {len(plane)} bytes, must hold {length}")
    return np.frombuffer(plane, np.uint8)
