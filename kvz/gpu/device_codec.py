"""Encode and decode tensors in device memory: what a serving engine calls.

::

    encoder = DeviceEncoder([key, value], "gaac")   # calibrates; allocates everything
    encoder.encode()                                # asynchronous; may be captured in a CUDA graph
    decoder = DeviceDecoder.of(encoder, [key_out, value_out])
    decoder.decode()                                # so is this; lengths never leave the device
    decoder.check()                                 # waits

Payloads are those of an archive's sections, byte for byte (spec/gaac.md, spec/splitzip.md). A
progressive codec's (spec/lynx.md) are anchor, padding up to a multiple of 64, and residual; while
the residuals have not arrived, ``decoder.decode_draft()`` decodes the anchors, and later
``decoder.decode()`` refines what that left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvz.codecs import DEFAULT_CODEC
from kvz.codecs.base import Codec
from kvz.formats.errors import ConfigError, InvalidField, KvzError
from kvz.gpu.bindings import Detail, Workspace
from kvz.gpu.calibration import calibrate
from kvz.gpu.device import ALIGNMENT, align, device_of
from kvz.gpu.device_chunks import (
    DeviceChunk,
    Launch,
    as_bits,
    bind,
    max_payload_nbytes,
    plan_chunks,
    resolve_codec,
)

__all__ = ["DeviceChunk", "DeviceDecoder", "DeviceEncoder", "max_payload_nbytes", "plan_chunks"]


class DeviceEncoder:
    """Encodes BF16 tensors ``[..., tokens, head_dim]`` in device memory, always the same ones.

    Everything is allocated, and codebooks are calibrated on what the tensors hold, when it is
    made; from then on :meth:`encode` neither allocates nor waits. Attributes:

    - ``chunks``: where each chunk's payload lies in ``payloads``;
    - ``payloads``: uint8, device; ``lengths``: int64[chunks], device, valid after encoding;
    - ``codebooks``: for each tensor, the codebook section of an archive.

    A payload that is not shorter than its chunk is complete and decodes, but an archive would hold
    the chunk raw instead.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        codec: str | Codec = DEFAULT_CODEC,
        *,
        codec_options: Mapping[str, str] | None = None,
        codebooks: Sequence[bytes] | None = None,
        payloads: torch.Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """``payloads``: uint8[:func:`max_payload_nbytes`] to use, cleared here; its address must be
        a multiple of 64. Raises ConfigError, or InvalidField for a codebook.
        """
        self.codec = resolve_codec(codec, codec_options)
        self.chunk_tokens = chunk_tokens
        self._binding = bind(self.codec)
        shapes = [tensor.shape for tensor in tensors]
        self.chunks = plan_chunks(shapes, self.codec, chunk_tokens=chunk_tokens)
        if not self.chunks:
            raise ConfigError("there is nothing to encode")
        device = device_of(tensors[0]).torch_device
        bits = [as_bits(tensor) for tensor in tensors]
        if codebooks is None:
            codebooks = calibrate(self.codec, self._binding, bits)
        self.codebooks = _check_count(codebooks, tensors, "codebooks")
        prepared = [
            self.codec.prepare(book, "BF16", (part.shape[0], part.shape[1], part.shape[2]))
            for book, part in zip(codebooks, bits, strict=True)
        ]
        self.payloads = _take_payloads(payloads, self.chunks, device)
        self._launch = Launch(self._binding, self.chunks, bits, prepared, self.payloads, None)
        batch, inner = self._launch.batch, self._launch.inner
        self._work = Workspace.empty(batch, self._binding.scratch_nbytes(batch, inner), device)
        self.lengths = torch.zeros(len(self.chunks), dtype=torch.int64, device=device)
        self._tensors = list(tensors)

    def encode(self) -> None:
        """Encode what the tensors hold now, in the current stream."""
        launch = self._launch
        self._binding.encode(launch.batch, self._work, self.lengths, launch.inner)

    def payload_nbytes(self) -> list[int]:
        """The length of each chunk's payload. Waits for the device."""
        lengths: list[int] = self.lengths.tolist()
        return lengths

    def payload(self, chunk: int) -> torch.Tensor:
        """The payload of a chunk, as a view. Waits for the device."""
        offset = self.chunks[chunk].offset
        return self.payloads[offset : offset + int(self.lengths[chunk])]


def _check_count(items: Sequence[bytes], tensors: Sequence[torch.Tensor], what: str) -> list[bytes]:
    if len(items) != len(tensors):
        raise ConfigError(f"{len(items)} {what} for {len(tensors)} tensors")
    return list(items)


def _take_payloads(
    payloads: torch.Tensor | None, chunks: Sequence[DeviceChunk], device: torch.device
) -> torch.Tensor:
    """Payloads start as zeros: encoders do not touch the gaps between streams."""
    needed = chunks[-1].offset + align(chunks[-1].capacity)
    if payloads is None:
        return torch.zeros(needed, dtype=torch.uint8, device=device)
    if payloads.dtype is not torch.uint8 or payloads.numel() < needed or payloads.device != device:
        raise ConfigError(
            f"payloads must be uint8[{needed}] on {device}, got "
            f"{payloads.dtype}[{payloads.numel()}] on {payloads.device}"
        )
    if not payloads.is_contiguous():
        raise ConfigError("payloads must be contiguous")
    payloads.zero_()
    return payloads


class DeviceDecoder:
    """Decodes payloads in device memory into BF16 tensors ``[..., tokens, head_dim]``.

    :meth:`decode` neither allocates nor waits; ``status`` int32[chunks] says afterwards, on the
    device, which payloads contradicted themselves (1).
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        payloads: torch.Tensor,
        offsets: Sequence[int],
        lengths: Sequence[int] | torch.Tensor,
        codebooks: Sequence[bytes],
        codec: str | Codec = DEFAULT_CODEC,
        *,
        codec_options: Mapping[str, str] | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """The payload of chunk i lies in ``payloads`` (uint8) at ``offsets[i]``, a multiple of 64.

        ``lengths`` in bytes; int64 on the device when the host does not know them: those must not
        reach beyond ``payloads``. Raises ConfigError, or InvalidField for codebooks and lengths
        that do not fit the shapes.
        """
        resolved = resolve_codec(codec, codec_options)
        self._is_progressive = resolved.is_progressive
        self._binding = bind(resolved)
        device = device_of(payloads).torch_device
        bits = [as_bits(tensor) for tensor in outputs]
        shapes = [tensor.shape for tensor in outputs]
        planned = plan_chunks(shapes, resolved, chunk_tokens=chunk_tokens)
        if not len(planned) == len(offsets) == len(lengths):
            raise ConfigError(
                f"{len(offsets)} offsets and {len(lengths)} lengths for {len(planned)} chunks"
            )
        prepared = [
            resolved.prepare(book, "BF16", (part.shape[0], part.shape[1], part.shape[2]))
            for book, part in zip(_check_count(codebooks, outputs, "codebooks"), bits, strict=True)
        ]
        known = None if isinstance(lengths, torch.Tensor) else list(lengths)
        self.chunks = [
            self._placed(i, chunk, offsets[i], known, payloads.numel())
            for i, chunk in enumerate(planned)
        ]
        self._launch = Launch(self._binding, self.chunks, bits, prepared, payloads, known)
        self._lengths = lengths if isinstance(lengths, torch.Tensor) else None
        fixed = [self._binding.fixed_nbytes(chunk.shape) for chunk in self.chunks]
        self._fixed = torch.tensor(fixed, dtype=torch.int64, device=device)
        self.status = torch.zeros(len(self.chunks), dtype=torch.int32, device=device)
        self._kept = (list(outputs), payloads)

    @classmethod
    def of(cls, encoder: DeviceEncoder, outputs: Sequence[torch.Tensor]) -> DeviceDecoder:
        """A decoder of what ``encoder`` will have encoded by then."""
        return cls(
            outputs,
            encoder.payloads,
            [chunk.offset for chunk in encoder.chunks],
            encoder.lengths,
            encoder.codebooks,
            encoder.codec,
            chunk_tokens=encoder.chunk_tokens,
        )

    def _placed(
        self, i: int, chunk: DeviceChunk, offset: int, lengths: list[int] | None, room: int
    ) -> DeviceChunk:
        nbytes = self._binding.fixed_nbytes(chunk.shape) if lengths is None else lengths[i]
        if offset % ALIGNMENT or not 0 <= offset <= offset + nbytes <= room:
            raise ConfigError(
                f"chunk {i}: payload at bytes {offset}..{offset + nbytes} of {room}; it must lie "
                f"inside, at a multiple of {ALIGNMENT}"
            )
        if lengths is not None:
            try:
                self._binding.check_payload(chunk.shape, nbytes, Detail.FULL)
            except KvzError as error:
                raise type(error)(f"chunk {i}: {error}") from None
        return DeviceChunk(chunk.tensor, chunk.start, chunk.stop, chunk.shape, offset, nbytes)

    def decode(self) -> None:
        """Decode into the outputs, in the current stream."""
        self._decode(Detail.FULL)

    def decode_draft(self) -> None:
        """Decode the anchors alone; residuals, which need not be there yet, are not read.

        Raises ConfigError for a codec that is not progressive.
        """
        if not self._is_progressive:
            raise ConfigError("the codec makes no anchors: there is no draft to decode")
        self._decode(Detail.DRAFT)

    def _decode(self, detail: Detail) -> None:
        batch = self._launch.batch
        if self._lengths is not None:
            field = batch.chunks[:, self._binding.last_nbytes_field]
            torch.sub(self._lengths, self._fixed, out=field)
        self.status.zero_()
        self._binding.decode(batch, self.status, self._launch.inner, detail)

    def check(self) -> None:
        """Wait for the device. Raises InvalidField when a payload contradicted itself."""
        bad = self.status.nonzero()
        if len(bad):
            chunk = self.chunks[int(bad[0])]
            raise InvalidField(
                f"payload of tensor {chunk.tensor}, tokens {chunk.start}:{chunk.stop}: its streams "
                "contradict each other"
            )
