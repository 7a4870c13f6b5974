"""Windows of text through a model, with every scheme's cache in place of the exact one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvz.capture_metadata import decode_metadata
from kvz.formats.errors import ConfigError
from kvz.identity import identity_error
from kvz.quality.cache_file import CacheFile
from kvz.quality.next_token import NextToken, NextTokenSums, Transform, Window, cut_windows
from kvz.quality.results import WindowsResult
from kvz.quality.schemes import Scheme, StoredCache
from kvz.restoring import check_model
from kvz.state_reader import read_tensor


@dataclass(frozen=True)
class ModelLevel:
    """The model-level measurement: a loaded transformers model and where its text comes from.

    token_ids: int64 `[1, tokens]`; None: those of the capture, which must then be the model's.
    prefill: tokens before the cache is replaced. positions: tokens that are fed after it.
    Raises ConfigError.
    """

    name: str
    model: Any = field(repr=False)
    token_ids: torch.Tensor | None = field(default=None, repr=False)
    prefill: int = 1500
    positions: int = 512
    max_windows: int = 8

    def __post_init__(self) -> None:
        if min(self.prefill, self.positions, self.max_windows) < 1:
            raise ConfigError(
                "prefill, positions and windows must be at least 1, got "
                f"{self.prefill}, {self.positions} and {self.max_windows}"
            )

    def windows(self, cache: CacheFile) -> list[torch.Tensor]:
        """Token ids of each window, int64 `[1, prefill + positions + 1]`.

        Raises ConfigError when the text is too short, IdentityMismatch when the text is to come
        from a capture of another model.
        """
        length = self.prefill + self.positions + 1
        if self.token_ids is not None:
            return cut_windows([self.token_ids[0]], length, self.max_windows)
        document = decode_metadata(cache.source.metadata)
        mismatches = check_model(document, self.model, force=True)
        # the model may compute in another dtype than the one that made the capture
        others = [mismatch for mismatch in mismatches if mismatch.field != "dtype"]
        if others:
            raise identity_error(others)
        ids = read_tensor(cache.source, "input_ids")
        mask = read_tensor(cache.source, "attention_mask").bool()
        texts = [row[seen] for row, seen in zip(ids, mask, strict=True)]
        return cut_windows(texts, length, self.max_windows)


def _reading(stored: StoredCache) -> Transform:
    """The decoded tensors of a cache that was stored as a whole."""

    def transform(name: str, exact: torch.Tensor) -> torch.Tensor:
        return stored.read(name)

    return transform


def measure_windows(
    level: ModelLevel,
    windows: Sequence[torch.Tensor],
    schemes: Sequence[Scheme],
    begin: Callable[[str], None],
) -> tuple[WindowsResult, list[NextToken]]:
    """The figures of each scheme over all windows; `begin` is told what each step does."""
    exact = NextTokenSums()
    sums = [NextTokenSums() for _ in schemes]
    for number, token_ids in enumerate(windows):
        what = f"window {number + 1} of {len(windows)}"
        begin(f"{what}, exact")
        window = Window(level.model, token_ids, level.prefill)
        window.add_exact(exact)
        with tempfile.TemporaryDirectory(prefix="kvz-quality-") as folder:
            path = Path(folder) / "window.safetensors"
            window.capture.save(path)
            with closing(CacheFile(path)) as cache:
                for scheme, own in zip(schemes, sums, strict=True):
                    begin(f"{what}, {scheme.name}")
                    with scheme.store(cache, Path(folder)) as stored:
                        window.compare(_reading(stored), own)
    described = WindowsResult(
        model=level.name,
        dtype=str(level.model.dtype).removeprefix("torch."),
        num_windows=len(windows),
        prefill=level.prefill,
        positions=level.positions,
        exact_perplexity=exact.result().perplexity,
    )
    return described, [own.result() for own in sums]
