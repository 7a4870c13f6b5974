"""Calibrate a codebook file on one or several captures: :func:`kvz.calibrate`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvz.codebooks import CodebookFile, TensorCodebook, read_sample
from kvz.codecs import DEFAULT_CODEC, codec_from_options
from kvz.codecs.base import Codec
from kvz.files import naming, same_file
from kvz.formats.errors import ConfigError, ContentMismatch
from kvz.formats.head import TensorEntry
from kvz.layout import Layout
from kvz.planning import plan
from kvz.safetensors_io import SafetensorsFile


@dataclass(frozen=True, slots=True)
class CalibrateReport:
    """What :func:`calibrate` did. ``num_tensors`` have a codebook; sizes in bytes."""

    sources: tuple[str, ...]
    destination: str
    codec: str
    num_tensors: int
    codebook_nbytes: int
    seconds: float


def calibrate(
    sources: Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    codec: str = DEFAULT_CODEC,
    *,
    codec_options: Mapping[str, str] | None = None,
    layout: Layout | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> CalibrateReport:
    """Write the codebook file ``destination`` for caches like those in ``sources``.

    Each tensor that ``codec`` (``gaac``, ``splitzip``) takes gets one codebook, calibrated on its
    samples from all captures together; captures may differ in their number of tokens only.
    ``progress`` is called with (tensors done, tensors in all). The file appears when it is complete
    and goes into ``kvz.compress(..., codebook=...)``.

    Raises SourceError and NotSafetensorsFile (inputs and output), ConfigError (options, no input,
    a codec without codebooks, no tensor that it takes), ContentMismatch (captures that differ).
    """
    start = time.perf_counter()
    binding = codec_from_options(codec, codec_options or {})
    if not binding.needs_codebook:
        raise ConfigError(f"codec {codec} has no codebook; those of gaac and splitzip can be made")
    if not sources:
        raise ConfigError("calibrate needs at least one capture")
    if any(same_file(source, destination) for source in sources):
        raise ConfigError(f"{os.fspath(destination)}: input and output are the same file")
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(source)) for source in sources]
        entries = [_entries(file, binding, layout or Layout()) for file in files]
        for file, theirs in zip(files[1:], entries[1:], strict=True):
            with naming(file.name):
                _check_alike(files[0].name, entries[0], theirs)
        tensors = {}
        for done, name in enumerate(entries[0], start=1):
            pooled = [(f, theirs[name]) for f, theirs in zip(files, entries, strict=True)]
            tensors[name] = _calibrate_tensor(binding, pooled)
            if progress is not None:
                progress(done, len(entries[0]))
    CodebookFile(binding.name, binding.config_dict(), tensors).save(
        destination, overwrite=overwrite
    )
    return CalibrateReport(
        sources=tuple(file.name for file in files),
        destination=os.fspath(destination),
        codec=codec,
        num_tensors=len(tensors),
        codebook_nbytes=sum(len(book.payload) for book in tensors.values()),
        seconds=time.perf_counter() - start,
    )


def _entries(file: SafetensorsFile, codec: Codec, layout: Layout) -> dict[str, TensorEntry]:
    """The tensors that the codec takes and that hold something, by name."""
    with naming(file.name):
        head = plan(file, codec, layout).head
        entries = {e.name: e for e in head.tensors if e.codec == 0 and e.num_elements}
        if not entries:
            raise ConfigError(f"holds no cache tensor that codec {codec.name} takes")
        return entries


def _check_alike(
    first: str, ours: Mapping[str, TensorEntry], theirs: Mapping[str, TensorEntry]
) -> None:
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            holder, other = ("this file", first) if name in theirs else (first, "this file")
            raise ContentMismatch(f"tensor {name!r} is in {holder}, but not in {other}")
        if _per_token(ours[name]) != _per_token(theirs[name]):
            raise ContentMismatch(
                f"tensor {name!r} has shape {list(theirs[name].shape)} {theirs[name].dtype}, in "
                f"{first} {list(ours[name].shape)} {ours[name].dtype}: they may differ in tokens "
                "only"
            )


def _per_token(entry: TensorEntry) -> tuple[str, int | None, int, int]:
    """What captures of one model have in common whatever their number of tokens."""
    outer, _, inner = entry.view_shape
    return entry.dtype, entry.token_axis, outer, inner


def _calibrate_tensor(
    codec: Codec, pooled: Sequence[tuple[SafetensorsFile, TensorEntry]]
) -> TensorCodebook:
    samples = []
    for file, entry in pooled:
        stored = next(t for t in file.header.tensors if t.name == entry.name)
        with naming(file.name):
            samples.append(read_sample(file.reader(stored, entry.view_shape), entry))
    outer, _, inner = pooled[0][1].view_shape
    num_tokens = sum(entry.view_shape[1] for _, entry in pooled)
    payload = codec.calibrate(np.concatenate(samples, axis=1), num_tokens)
    return TensorCodebook(outer, inner, payload)
