"""What archives a folder or prefix holds, one summary each, from their ends and heads alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvz import contents
from kvz.archive import Archive
from kvz.finding import Found, find
from kvz.formats.head import Head
from kvz.formats.ids import LOSSY_CODECS
from kvz.lossy import lossy_note
from kvz.remote.pool import RequestPool
from kvz.remote.urls import is_remote

SUFFIX = ".kvz"
#: Archives that are opened at one time; for each one request is under way.
_NUM_OPEN = 16


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """One archive, or with ``error`` what ends in ``.kvz`` and cannot be opened as one.

    ``codec``: the lossy one, or that of most of its bytes. ``lossy``: what made it lossy, empty
    when nothing did; None
    with an error. ``model_type`` and ``num_tokens`` (per sequence) None: the file does not say.
    """

    location: str
    relative: str
    nbytes: int | None
    original_nbytes: int | None = None
    codec: str | None = None
    model_type: str | None = None
    num_tokens: int | None = None
    lossy: str | None = None
    error: Exception | None = None

    @property
    def ratio(self) -> float | None:
        if self.nbytes is None or self.original_nbytes is None:
            return None
        return self.original_nbytes / self.nbytes


def list_archives(location: str) -> Iterator[ArchiveSummary]:
    """All archives in a folder, under a prefix (with or without ``/`` at its end), or of a pattern.

    Sorted by name. Of a remote archive one or two requests read the end and the head. Raises
    SourceError when the place cannot be listed; archives that cannot be opened are among the rest.
    """
    is_prefix = is_remote(location) and not location.endswith((SUFFIX, "/"))
    if is_prefix and not any(c in location for c in "*?"):
        location += "/"
    pool = RequestPool(_NUM_OPEN)
    try:
        summaries = [pool.submit(_summary, found) for found in find(location, SUFFIX)]
        for summary in summaries:
            yield summary.result()
    finally:
        pool.close()


def _summary(found: Found) -> ArchiveSummary:
    try:
        with Archive(found.location) as archive:
            head, nbytes = archive.head, archive.nbytes
    except Exception as error:  # of one archive; the others are still to be listed
        return ArchiveSummary(found.location, found.relative, found.nbytes, error=error)
    document, _ = contents.read_document(head.metadata)
    identity = None if document is None else contents.identity_of(document)
    return ArchiveSummary(
        location=found.location,
        relative=found.relative,
        nbytes=nbytes,
        original_nbytes=head.nbytes,
        codec=_codec(head),
        model_type=None if identity is None else identity.model_type,
        num_tokens=None if identity is None else identity.num_tokens,
        lossy=lossy_note(head),
    )


def _codec(head: Head) -> str | None:
    nbytes: dict[str, int] = {}
    for tensor in head.tensors:
        name = head.codec_of(tensor).name
        nbytes[name] = nbytes.get(name, 0) + tensor.nbytes
    # what makes the archive lossy first, however much else is in it
    return max(nbytes, key=lambda name: (name in LOSSY_CODECS, nbytes[name]), default=None)
