"""Many captures compressed into a folder or under a prefix; what is there already is kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kvz.archive import Archive
from kvz.codecs import DEFAULT_CODEC, codec_from_options
from kvz.compressing import CompressReport, compress
from kvz.devices import DEFAULT_DEVICE
from kvz.files import naming
from kvz.finding import Found
from kvz.formats.errors import ConfigError, DamagedFile, FormatError, SourceError
from kvz.formats.head import Head
from kvz.layout import Layout
from kvz.locations import shown_name
from kvz.planning import plan
from kvz.remote.pool import RequestPool
from kvz.remote.urls import is_remote, local_path, parse, parse_folder
from kvz.safetensors_io import SafetensorsFile

#: How long an interrupted batch waits for its files to be abandoned: parts of uploads are aborted.
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class CompressSettings:
    """What :func:`kvz.compress` is told for every file of a batch."""

    codec: str = DEFAULT_CODEC
    codec_options: Mapping[str, str] = field(default_factory=dict)
    codebook: str | os.PathLike[str] | None = None
    layout: Layout = field(default_factory=Layout)
    device: str = DEFAULT_DEVICE
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one source: ``report`` if it was compressed, ``error`` if it could not be.

    Neither: its archive was there already.
    """

    source: str
    destination: str
    report: CompressReport | None = None
    error: Exception | None = None


class _Stopped(Exception):
    """The batch ends early: unfinished outputs are removed on the way up."""


def destinations(found: Sequence[Found], folder: str) -> list[str]:
    """Where the archive of each source goes: below ``folder``, with the suffix ``.kvz``.

    Raises ConfigError when two sources would become one archive, when one would leave ``folder``,
    when that is a file, or for a URL without sense.
    """
    base = str(parse_folder(folder)).rstrip("/") if is_remote(folder) else local_path(folder)
    if not is_remote(folder) and os.path.lexists(base) and not os.path.isdir(base):
        raise ConfigError(f"{base} is a file; archives go into a folder")
    sources: dict[str, str] = {}
    for one in found:
        below = PurePosixPath(one.relative)
        # a key is anything that its writer chose
        if below.is_absolute() or ".." in below.parts:
            raise ConfigError(f"{one.location}: would not go below {base}")
        relative = str(below.with_suffix(".kvz"))
        target = f"{base}/{relative}" if is_remote(folder) else str(Path(base, relative))
        if target in sources:
            raise ConfigError(
                f"{shown_name(sources[target])} and {shown_name(one.location)} would both become "
                f"{target}: name their common folder, or compress them apart"
            )
        sources[target] = one.location
    return list(sources)


def compress_batch(
    found: Sequence[Found],
    folder: str,
    settings: CompressSettings,
    *,
    jobs: int = 1,
    overwrite: bool = False,
) -> Generator[BatchResult, None, None]:
    """Compress every source into ``folder`` (path or URL), ``jobs`` at a time; results in order.

    A destination that exists is left as it is, if it is a whole archive whose tensors, metadata and
    codecs are those that the source would give: its values are not compared, which is what
    :func:`kvz.verify` does. Another one is a SourceError, or with ``overwrite`` is replaced,
    as every other is then. Errors of single files are in their results. Raises ConfigError
    (:func:`destinations`), and SourceError when ``folder`` cannot be listed.
    """
    targets = destinations(found, folder)
    existing = _Existing(folder, overwrite)
    stopping = threading.Event()

    def work(source: str, target: str) -> BatchResult:
        try:
            if existing.has(target):
                check_finished(source, target, settings)
                return BatchResult(source, target)
            report = _compress(source, target, settings, overwrite, stopping)
            return BatchResult(source, target, report)
        except Exception as error:  # of one file; the others are still to be done
            return BatchResult(source, target, error=error)

    pool = RequestPool(jobs)
    results: list[Future[BatchResult]] = []
    try:
        for one, target in zip(found, targets, strict=True):
            results.append(pool.submit(work, one.location, target))
        for result in results:
            yield result.result()
    finally:
        stopping.set()
        wait(results, timeout=_STOP_S)
        pool.close()


class _Existing:
    """Which archives are there when a batch begins; of a store, one listing tells."""

    def __init__(self, folder: str, overwrite: bool) -> None:
        self._names: set[str] | None = None
        self._overwrite = overwrite
        if not overwrite and is_remote(folder):
            from kvz.remote.prefixes import list_objects

            self._names = {listed.url for listed in list_objects(folder)}

    def has(self, target: str) -> bool:
        if self._overwrite:
            return False
        return os.path.lexists(target) if self._names is None else str(parse(target)) in self._names


def _compress(
    source: str, target: str, settings: CompressSettings, overwrite: bool, stopping: threading.Event
) -> CompressReport:
    def stop_if_asked(_: int = 0) -> None:
        if stopping.is_set():
            raise _Stopped

    stop_if_asked()
    if not is_remote(target):
        with naming(target):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
    return compress(
        source,
        target,
        settings.codec,
        codec_options=settings.codec_options,
        codebook=settings.codebook,
        layout=settings.layout,
        device=settings.device,
        threads=settings.threads,
        overwrite=overwrite,
        progress=stop_if_asked,
    )


def check_finished(source: str, destination: str, settings: CompressSettings) -> None:
    """Raises SourceError unless ``destination`` is the archive that the source would become.

    Only headers are compared, and of the destination also its end is read; no values.
    """
    expected = _expected_head(source, settings)
    name = shown_name(destination)
    with naming(name):
        try:
            with Archive(destination) as archive:
                head = archive.head
        except (FormatError, DamagedFile) as error:
            reason = Exception.__str__(error)
            raise SourceError(
                f"exists already and is not a whole archive ({reason}); use -f to replace it"
            ) from None
        difference = _difference(head, expected)
        if difference is not None:
            raise SourceError(
                f"exists already and is not what {shown_name(source)} would become "
                f"({difference}); use -f to replace it"
            )


def _expected_head(source: str, settings: CompressSettings) -> Head:
    codec = codec_from_options(settings.codec, settings.codec_options)
    with SafetensorsFile(source) as opened, naming(opened.name):
        planned = plan(opened, codec, settings.layout)
    return Head.from_bytes(planned.head.to_bytes())


def _difference(stored: Head, expected: Head) -> str | None:
    """The first thing in which two heads differ; not how they are cut into chunks."""
    tensors = {t.name: (t.dtype, t.shape) for t in stored.tensors}
    wanted = {t.name: (t.dtype, t.shape) for t in expected.tensors}
    for name in sorted(wanted.keys() | tensors.keys()):
        if tensors.get(name) != wanted.get(name):
            return f"tensor {name} differs"
    if dict(stored.metadata) != dict(expected.metadata):
        return "the metadata differ"
    codecs = {t.name: stored.codec_of(t) for t in stored.tensors}
    for tensor in expected.tensors:
        if codecs[tensor.name] != expected.codec_of(tensor):
            return f"another codec or other options for {tensor.name}"
    return None
