"""One table of codecs and awkward inputs; the generic tests of codecs and kernels run all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvz.codecs import codec_from_options
from kvz.codecs.base import Codec
from kvz.kernels.reference import gaac as gaac_reference
from kvz.kernels.reference import splitzip as splitzip_reference

U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
POISON = 0xA5


@dataclass(frozen=True)
class CodecCase:
    """A codec with options; ``config`` is what the head must record."""

    id: str
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    needs_codebook: bool = False
    bf16_only: bool = False

    def codec(self) -> Codec:
        return codec_from_options(self.name, self.options)


def _gaac(windows: list[int], axis: str) -> CodecCase:
    text = "/".join(map(str, windows))
    return CodecCase(
        id=f"gaac-{text.replace('/', '')}-{axis}",
        name="gaac",
        config={"windows": windows, "axis": axis},
        options={"windows": text, "axis": axis},
        needs_codebook=True,
        bf16_only=True,
    )


CASES = [
    *(_gaac(windows, axis) for windows in ([2, 3, 4], [3, 4]) for axis in ("token", "channel")),
    CodecCase("splitzip", "splitzip", needs_codebook=True, bf16_only=True),
    CodecCase("zstd", "zstd", config={"level": 1}),
    CodecCase("zstd-19", "zstd", config={"level": 19}, options={"level": "19"}),
    CodecCase("raw", "raw"),
]
GAAC_CASES = [case for case in CASES if case.name == "gaac"]
KERNEL_CASES = [case for case in CASES if case.needs_codebook]


def bf16(exponents: NDArray[Any], sign_mantissa: NDArray[Any] | int = 0) -> U16:
    """BF16 bit patterns from exponents and sign-and-mantissa bytes."""
    packed = np.asarray(sign_mantissa, np.uint16)
    bits = (packed & 0x80) << 8 | np.asarray(exponents, np.uint16) << 7 | packed & 0x7F
    return bits.astype(np.uint16)


def like_a_cache(shape: tuple[int, int, int], seed: int = 0) -> U16:
    """Exponents as keys have them: a level per channel, a spread of a few, rare outliers."""
    rng = np.random.default_rng(seed)
    outer, _, inner = shape
    level = rng.integers(110, 134, (outer, 1, inner))
    exponents = level - np.minimum(rng.geometric(0.5, shape), 20)
    exponents = np.where(rng.random(shape) < 0.003, rng.integers(0, 256, shape), exponents)
    return bf16(exponents, rng.integers(0, 256, shape))


def random_bits(shape: tuple[int, int, int], seed: int = 0) -> U16:
    return np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(np.uint16)


def awkward_chunks() -> dict[str, U16]:
    """Chunks ``uint16[outer, tokens, inner]`` that meet the edges of the codecs."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    ends = np.where(np.arange(16 * 48).reshape(1, 16, 48) % 3, 0, 255)
    one_outlier = np.full((2, 24, 40), 120)
    one_outlier[1, 13, 37] = 3
    ramp = np.broadcast_to(np.arange(256)[None, :, None], (1, 256, 33))
    return {
        "one element": bf16(np.array([[[127]]]), 0x81),
        "zeros": np.zeros((1, 8, 32), np.uint16),
        "minus zeros": np.full((2, 9, 33), 0x8000, np.uint16),
        "NaN with payloads": bf16(np.full((1, 17, 64), 255), np.arange(17 * 64).reshape(1, 17, 64)),
        "both ends of the exponents": bf16(ends),
        "one outlier": bf16(one_outlier),
        "every exponent in turn": bf16(ramp),
        "every BF16 pattern, by channel": codes.reshape(1, 256, 256).copy(),
        "every BF16 pattern, by token": codes.reshape(1, 256, 256).swapaxes(1, 2).copy(),
        "one token": like_a_cache((3, 1, 129), 1),
        "one channel": like_a_cache((3, 1025, 1), 2),
        "no multiple of anything": like_a_cache((5, 31, 37), 3),
        "two escape blocks": like_a_cache((1, 136, 65), 4),
        "random bits": random_bits((2, 50, 70), 5),
    }


def encode(codec: Codec, prepared: Any, chunk: U16, poison: int = POISON) -> U8:
    """The payload of a chunk, from a buffer that was poisoned first."""
    nbytes = codec.buffer_nbytes(chunk.shape, chunk.itemsize)
    buffer = np.full(nbytes, poison, np.uint8)
    return buffer[: codec.encode(chunk, prepared, buffer)].copy()


def decode(codec: Codec, prepared: Any, payload: U8, shape: tuple[int, ...], dtype: Any) -> Any:
    """The chunk of a payload, decoded into poisoned memory."""
    out = np.empty(shape, dtype)
    out.reshape(-1).view(np.uint8)[:] = POISON
    codec.decode(payload, prepared, out)
    return out


def prepare(codec: Codec, chunk: U16, dtype: str = "BF16") -> tuple[bytes, Any]:
    """A codebook calibrated on the chunk, and what encoding and decoding need."""
    book = codec.calibrate(chunk, chunk.shape[1])
    return book, codec.prepare(book, dtype, chunk.shape)


def reference_payload(case: CodecCase, prepared: U8, chunk: U16) -> U8:
    """The payload that the NumPy reference gives, its streams laid out as container.md says."""
    streams: tuple[NDArray[Any], ...]
    if case.name == "splitzip":
        streams = splitzip_reference.encode(chunk.reshape(-1), prepared, block_len=8192)
    else:
        by_channel = case.config["axis"] == "channel"
        columns = -(-chunk.shape[2] // 8) if by_channel else chunk.shape[2]
        streams = gaac_reference.encode(
            chunk,
            prepared,
            narrow=2 in case.config["windows"],
            channel_axis=by_channel,
            block_tiles=max(1, 4096 // (8 * columns)),
        )
    payload = b""
    for stream in streams:
        payload += bytes(-len(payload) % 16) + stream.tobytes()
    return np.frombuffer(payload, np.uint8)
