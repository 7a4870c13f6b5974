"""Codebook files: calibrate on some caches, compress others with the result.

JSON, because a codebook is small and worth reading: ``{"kvz_codebook": 1, "codec": {...},
"tensors": {name: {"outer": n, "inner": n, "codebook": base64}}}``.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.codecs.base import Codec
from kvz.files import atomic_output, naming
from kvz.formats.errors import ContentMismatch, NotCodebookFile
from kvz.formats.head import TensorEntry
from kvz.formats.limits import MAX_CODEBOOK_NBYTES
from kvz.locations import open_stream, shown_name
from kvz.safetensors_io import TensorReader

_VERSION = 1
#: What reading a document of another form can raise (OverflowError: an infinite number).
_MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    binascii.Error,
)
#: Calibration looks at this many tokens of a tensor, in runs spread evenly over it.
_SAMPLE_TOKENS = 512
_RUN_TOKENS = 64


def sample_starts(num_tokens: int) -> tuple[list[int], int]:
    """First tokens and length of the runs that a codebook is calibrated on."""
    if num_tokens <= _SAMPLE_TOKENS:
        return [0], num_tokens
    starts = np.linspace(0, num_tokens - _RUN_TOKENS, _SAMPLE_TOKENS // _RUN_TOKENS)
    return starts.astype(int).tolist(), _RUN_TOKENS


def read_sample(reader: TensorReader, entry: TensorEntry) -> NDArray[Any]:
    """The tokens that a codebook is calibrated on: ``[outer, n, inner]``."""
    outer, tokens, inner = entry.view_shape
    starts, length = sample_starts(tokens)
    sample = np.empty((outer, len(starts) * length, inner), f"u{entry.itemsize}")
    if len(starts) == 1:
        reader.read(0, sample)
        return sample
    run = np.empty((outer, length, inner), sample.dtype)
    for i, start in enumerate(starts):
        reader.read(start, run)
        sample[:, i * length : (i + 1) * length] = run
    return sample


def _describe(codec: str, config: Mapping[str, Any]) -> str:
    return " ".join([codec, *(f"{key}={value}" for key, value in config.items())])


@dataclass(frozen=True, slots=True)
class TensorCodebook:
    """The codebook section of one tensor and the shape that it was calibrated for."""

    outer: int
    inner: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class CodebookFile:
    """Codebooks by tensor name, for one codec configuration."""

    codec: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorCodebook]

    def find(self, codec: Codec, entry: TensorEntry) -> bytes:
        """The codebook section for a tensor. Raises ContentMismatch when there is none."""
        if (self.codec, self.config) != (codec.name, codec.config_dict()):
            raise ContentMismatch(
                f"codebook is for {_describe(self.codec, self.config)}, "
                f"not for {_describe(codec.name, codec.config_dict())}"
            )
        book = self.tensors.get(entry.name)
        outer, _, inner = entry.view_shape
        if book is None:
            raise ContentMismatch(f"codebook has nothing for tensor {entry.name!r}")
        if (book.outer, book.inner) != (outer, inner):
            raise ContentMismatch(
                f"codebook for {entry.name!r} has {book.outer} heads of {book.inner} channels, "
                f"the tensor {outer} of {inner}"
            )
        return book.payload

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        document = {
            "kvz_codebook": _VERSION,
            "codec": {"name": self.codec, **self.config},
            "tensors": {
                name: {
                    "outer": book.outer,
                    "inner": book.inner,
                    "codebook": base64.b64encode(book.payload).decode(),
                }
                for name, book in self.tensors.items()
            },
        }
        with atomic_output(path, overwrite=overwrite) as stream:
            stream.write(json.dumps(document, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CodebookFile:
        """Raises SourceError or NotCodebookFile."""
        with naming(shown_name(path)):
            with open_stream(path) as stream:
                data = stream.read(MAX_CODEBOOK_NBYTES)
            try:
                document = json.loads(data)
                if document["kvz_codebook"] != _VERSION:
                    raise ValueError(f"version {document['kvz_codebook']} is not known")
                config = dict(document["codec"])
                tensors = {
                    name: TensorCodebook(
                        int(book["outer"]), int(book["inner"]), base64.b64decode(book["codebook"])
                    )
                    for name, book in document["tensors"].items()
                }
                return cls(config.pop("name"), config, tensors)
            except _MALFORMED as error:
                raise NotCodebookFile(f"not a codebook that kvz calibrate made: {error}") from None
