"""A codec of kvz as a scheme: through a real archive, whose bytes are counted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvz.archive import Archive
from kvz.capture_metadata import canonical_json
from kvz.codecs import codec_from_options
from kvz.compressing import compress
from kvz.formats.container import PRELUDE_NBYTES, TRAILER_NBYTES
from kvz.formats.errors import ConfigError
from kvz.formats.ids import PROGRESSIVE_CODECS, SectionKind
from kvz.quality.cache_file import KEY, VALUE, CacheFile
from kvz.quality.schemes import Bits, StoredCache, bits_of
from kvz.source_protocol import CacheSource
from kvz.state_reader import read_tensor

DETAILS = ("full", "anchor")


@dataclass(frozen=True, slots=True)
class ArchiveScheme:
    """A codec with options as on the command line, read in full or by its anchors alone."""

    name: str
    codec: str
    options: Mapping[str, str]
    detail: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, codec: str, options: Mapping[str, str], detail: str) -> ArchiveScheme:
        """Raises ConfigError for options or a detail that the codec does not have."""
        if detail not in DETAILS or (detail == "anchor" and codec not in PROGRESSIVE_CODECS):
            raise ConfigError(
                f"scheme {name}: detail must be one of {', '.join(DETAILS)}, and anchor needs a "
                f"progressive codec ({', '.join(sorted(PROGRESSIVE_CODECS))})"
            )
        config = codec_from_options(codec, options).config_dict()
        return cls(name, codec, options, detail, {"codec": codec, **config, "detail": detail})

    def store(self, cache: CacheFile, folder: Path) -> StoredCache:
        """Compresses the whole capture, once for all details of one codec and its options."""
        described = canonical_json([self.codec, dict(self.options)])
        path = folder / f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.kvz"
        if not path.exists():
            compress(cache.name, path, self.codec, codec_options=self.options, layout=cache.layout)
        return _ArchivedCache(path, cache, anchor_only=self.detail == "anchor")


class _ArchivedCache(AbstractContextManager["_ArchivedCache"]):
    def __init__(self, path: Path, cache: CacheFile, *, anchor_only: bool) -> None:
        self._archive = Archive(path)
        self._cache = cache
        self._anchor_only = anchor_only
        self._view: CacheSource = self._archive.anchor() if anchor_only else self._archive

    @property
    def bits(self) -> Bits:
        """As if the archive held keys and values alone, every byte counted.

        Sections with their frames and padding belong to keys or to values; prelude, head, index and
        trailer to both.
        """
        archive, index = self._archive, self._archive.index
        ends = index["offset"].astype(np.int64) + index["length"].astype(np.int64)
        sizes = np.diff(ends, prepend=PRELUDE_NBYTES + archive.prelude.head_nbytes)
        counted = np.ones(index.size, bool)
        if self._anchor_only:
            counted = index["kind"] != SectionKind.RESIDUAL
        numbers = {entry.name: i for i, entry in enumerate(archive.head.tensors)}
        nbytes, elements, num_sections = {KEY: 0, VALUE: 0}, {KEY: 0, VALUE: 0}, 0
        for tensor in self._cache.tensors:
            own = counted & (index["tensor"] == numbers[tensor.name])
            nbytes[tensor.part] += int(sizes[own].sum())
            elements[tensor.part] += tensor.num_elements
            num_sections += int(own.sum())
        entries = tuple(archive.entry(tensor.name) for tensor in self._cache.tensors)
        head = replace(archive.head, tensors=entries).to_bytes()
        shared = PRELUDE_NBYTES + len(head) + num_sections * index.itemsize + TRAILER_NBYTES
        return bits_of(nbytes, elements, shared)

    def read(self, name: str) -> torch.Tensor:
        return read_tensor(self._view, name)

    def __exit__(self, *_: object) -> None:
        self._archive.close()
