"""Sections of an archive, however they arrive: what must hold of them, and how they decode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.codecs import codec_from_head
from kvz.codecs.base import Codec, is_progressive
from kvz.formats.errors import InvalidField, KvzError
from kvz.formats.head import Head, TensorEntry
from kvz.formats.ids import SectionKind


class EncodedChunk(NamedTuple):
    """One chunk of a tensor, not yet decoded. Its functions may be called from any thread.

    ``kind``: RAW, ENCODED, ANCHOR (the anchor alone) or RESIDUAL (both: the payload is the anchor
    and, at the next multiple of RESIDUAL_ALIGNMENT, the residual). ``decode`` fills a
    ``uint[outer, n, inner]`` (a :data:`kvz.codecs.base.Chunk`) and raises DamagedFile. Who decodes
    the payload himself takes it with ``read`` into uint8[payload_nbytes], checks it with ``check``
    (raises ChecksumMismatch), and asks ``prepared`` for the codebook as
    :meth:`kvz.codecs.base.Codec.prepare` gives it (raises DamagedFile).
    """

    tensor: int
    chunk: int
    kind: SectionKind
    payload_nbytes: int
    decode: Callable[[NDArray[Any]], None]
    read: Callable[[NDArray[np.uint8]], None]
    check: Callable[[NDArray[np.uint8]], None]
    prepared: Callable[[], Any]


#: Which chunks are wanted: ``(tensor, chunk) -> bool``.
Wanted = Callable[[int, int], bool]


class Decoder:
    """Decodes sections of one archive; safe to use from several threads."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._codecs: dict[int, Codec] = {}
        self._lock = threading.Lock()

    def codec(self, entry: TensorEntry) -> Codec:
        """The binding of a tensor's codec, made on first use (it may import numba)."""
        with self._lock:
            if entry.codec not in self._codecs:
                stored = self.head.codec_of(entry)
                self._codecs[entry.codec] = codec_from_head(stored.name, stored.config)
            return self._codecs[entry.codec]

    def prepare(self, entry: TensorEntry, codebook: bytes | None) -> Any:
        """What decoding the tensor's chunks needs. Raises InvalidField."""
        codec = self.codec(entry)
        if not codec.supports(entry.dtype, entry.token_axis):
            raise InvalidField(
                f"tensor {entry.name!r}: codec {codec.name} does not hold {entry.dtype} tensors "
                f"with token axis {entry.token_axis}"
            )
        if codec.needs_codebook and codebook is None:
            raise InvalidField(f"tensor {entry.name!r} has no codebook")
        if codebook is not None and not codec.needs_codebook:
            raise InvalidField(f"tensor {entry.name!r} has a codebook, codec {codec.name} has none")
        try:
            return codec.prepare(codebook or b"", entry.dtype, entry.view_shape)
        except KvzError as error:
            raise type(error)(f"codebook of {entry.name}: {error}") from None

    def check_parts(
        self, entry: TensorEntry, chunk: int, anchor: NDArray[np.uint8], residual_nbytes: int
    ) -> None:
        """Both sections of a chunk have the lengths that they must have. Raises InvalidField.

        In memory they lie together, where an anchor that is too short would not show.
        """
        codec, shape = self.codec(entry), entry.chunk_shape(chunk)
        if not is_progressive(codec):
            return
        name = f"chunk {chunk} of {entry.name}"
        try:
            needed = codec.anchor_nbytes(anchor, shape, entry.chunk_range(chunk)[0])
        except KvzError as error:
            raise type(error)(f"{name}: {error}") from None
        if anchor.size != needed:
            raise InvalidField(f"{name}: anchor has {anchor.size} bytes, must have {needed}")
        if residual_nbytes != codec.residual_nbytes(shape):
            raise InvalidField(
                f"residual of {name} has {residual_nbytes} bytes, "
                f"must have {codec.residual_nbytes(shape)}"
            )

    def decode(
        self,
        kind: SectionKind,
        entry: TensorEntry,
        chunk: int,
        payload: NDArray[np.uint8],
        prepared: Any,
        out: NDArray[Any],
    ) -> None:
        """Decode one chunk, whose checksum was verified, into ``out``; ``kind`` as in EncodedChunk.

        Raises DamagedFile or one of its subclasses.
        """
        if kind is SectionKind.RAW:
            if payload.size != out.nbytes:
                raise InvalidField(
                    f"chunk {chunk} of {entry.name}: raw section has {payload.size} bytes, "
                    f"must have {out.nbytes}"
                )
            np.copyto(out, payload.view(out.dtype).reshape(out.shape))
            return
        try:
            codec, start = self.codec(entry), entry.chunk_range(chunk)[0]
            if kind is SectionKind.ANCHOR and is_progressive(codec):
                codec.decode_anchor(payload, prepared, out, start)
            else:
                codec.decode(payload, prepared, out, start)
        except KvzError as error:
            raise type(error)(f"chunk {chunk} of {entry.name}: {error}") from None
