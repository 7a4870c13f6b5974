"""Chunks of tensors in device memory: how tensors are cut, and what a launch is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvz.codecs import DEFAULT_CODEC, codec_from_options
from kvz.codecs.base import U8, Codec, Shape
from kvz.formats.errors import ConfigError
from kvz.formats.head import TensorEntry
from kvz.formats.safetensors import StoredTensor
from kvz.gpu.bindings import ChunkMemory, DeviceBinding, make_batch, require_binding
from kvz.gpu.device import ALIGNMENT, align
from kvz.layout import chunk_tokens as default_chunk_tokens


@dataclass(frozen=True, slots=True)
class DeviceChunk:
    """Tokens ``start:stop`` of tensor number ``tensor``, and where its payload is.

    ``offset`` and ``capacity`` in bytes; ``capacity`` is the largest payload of this shape.
    """

    tensor: int
    start: int
    stop: int
    shape: Shape
    offset: int
    capacity: int


def resolve_codec(codec: str | Codec, options: Mapping[str, str] | None) -> Codec:
    """A codec by its name and options as on the command line, or as it is.

    Raises UnknownCodec or ConfigError.
    """
    return codec_from_options(codec, options or {}) if isinstance(codec, str) else codec


def bind(codec: Codec) -> DeviceBinding:
    """The GPU's counterpart of a codec. Raises ConfigError."""
    return require_binding(codec.name, codec.config_dict())


def plan_chunks(
    shapes: Sequence[Sequence[int]],
    codec: str | Codec = DEFAULT_CODEC,
    codec_options: Mapping[str, str] | None = None,
    *,
    chunk_tokens: int | None = None,
) -> list[DeviceChunk]:
    """The chunks of tensors ``[..., tokens, head_dim]`` of these shapes.

    ``chunk_tokens``: tokens of a chunk, by default as many as :func:`kvz.compress` takes. Raises
    ConfigError.
    """
    resolved = resolve_codec(codec, codec_options)
    binding = bind(resolved)
    chunks: list[DeviceChunk] = []
    offset = 0
    for number, shape in enumerate(shapes):
        entry = _entry(tuple(shape), chunk_tokens, resolved.chunk_step)
        for chunk in range(entry.num_chunks):
            binding.check_shape(entry.chunk_shape(chunk))
            capacity = binding.max_payload_nbytes(entry.chunk_shape(chunk))
            start, stop = entry.chunk_range(chunk)
            chunk_shape = entry.chunk_shape(chunk)
            chunks.append(DeviceChunk(number, start, stop, chunk_shape, offset, capacity))
            offset += align(capacity)
    return chunks


def max_payload_nbytes(
    shapes: Sequence[Sequence[int]],
    codec: str | Codec = DEFAULT_CODEC,
    codec_options: Mapping[str, str] | None = None,
    *,
    chunk_tokens: int | None = None,
) -> int:
    """Bytes that the payloads of tensors of these shapes can take at worst. Raises ConfigError."""
    chunks = plan_chunks(shapes, codec, codec_options, chunk_tokens=chunk_tokens)
    return chunks[-1].offset + align(chunks[-1].capacity) if chunks else 0


def _entry(shape: tuple[int, ...], chunk_tokens: int | None, chunk_step: int) -> TensorEntry:
    if len(shape) < 2:
        raise ConfigError(f"tensor of shape {list(shape)} must be [..., tokens, head_dim]")
    axis = len(shape) - 2
    step = chunk_tokens or default_chunk_tokens(
        StoredTensor("", "BF16", shape, 0), axis, chunk_step
    )
    return TensorEntry("", "BF16", shape, axis, step, 0)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """BF16 ``[..., tokens, head_dim]`` as int16 ``[outer, tokens, inner]``, the same memory.

    Raises ConfigError for another dtype, or when an outer index is not contiguous, or when outer
    indices are not equally far apart.
    """
    if tensor.dtype is not torch.bfloat16 or tensor.ndim < 2:
        raise ConfigError(
            f"tensor is {tensor.dtype} of shape {list(tensor.shape)}, must be torch.bfloat16 "
            "[..., tokens, head_dim]"
        )
    tokens, inner = tensor.shape[-2:]
    try:
        bits = tensor.detach().view(torch.int16).view(-1, tokens, inner)
    except RuntimeError:
        bits = None
    contiguous = bits is not None and (bits.numel() == 0 or bits[0].is_contiguous())
    if bits is None or not contiguous or (len(bits) > 1 and bits.stride(0) < tokens * inner):
        raise ConfigError(
            f"tensor with strides {list(tensor.stride())} must be contiguous in its last two "
            "dimensions, and regular in the others"
        )
    return bits


class Launch:
    """The chunks of some tensors and their payloads, as one launch needs them."""

    def __init__(
        self,
        binding: DeviceBinding,
        chunks: Sequence[DeviceChunk],
        tensors: Sequence[torch.Tensor],
        prepared: Sequence[Any],
        payloads: torch.Tensor,
        lengths: Sequence[int] | None,
    ) -> None:
        if payloads.data_ptr() % ALIGNMENT:
            raise ConfigError(f"payloads must start at an address that {ALIGNMENT} divides")
        books = [binding.codebook(each) for each in prepared]
        self.books = _upload_codebooks(books, payloads.device)
        self.inner = chunks[0].shape[2]
        if any(chunk.shape[2] != self.inner for chunk in chunks):
            raise ConfigError("all tensors of one encoder or decoder must have the same head_dim")
        memories = []
        for i, chunk in enumerate(chunks):
            bits = tensors[chunk.tensor]
            memories.append(
                ChunkMemory(
                    shape=chunk.shape,
                    data=bits.data_ptr() + 2 * chunk.start * bits.shape[2],
                    outer_stride=bits.stride(0),
                    payload=payloads.data_ptr() + chunk.offset,
                    codebook=self.books[chunk.tensor].data_ptr(),
                    payload_nbytes=0 if lengths is None else lengths[i],
                    start=chunk.start,
                    prepared=prepared[chunk.tensor],
                )
            )
        self.batch = make_batch(binding, memories, payloads.device)


def _upload_codebooks(books: Sequence[U8], device: torch.device) -> list[torch.Tensor]:
    offsets = [0]
    for book in books:
        offsets.append(offsets[-1] + align(book.size))
    host = np.zeros(offsets[-1], np.uint8)
    for book, offset in zip(books, offsets, strict=False):
        host[offset : offset + book.size] = book.reshape(-1)
    arena = torch.from_numpy(host).to(device)
    return [arena[o : o + book.size] for book, o in zip(books, offsets, strict=False)]
