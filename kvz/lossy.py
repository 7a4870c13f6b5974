"""How a cache says that its values are not those that the model computed."""

from __future__ import annotations

from collections.abc import Mapping

from kvz.formats.head import Head
from kvz.formats.ids import LOSSY_CODECS

#: Key of the metadata of a cache that went through a lossy codec; its value is for people.
LOSSY_KEY = "kvz.lossy"


def lossy_codecs(head: Head) -> list[str]:
    """Names of the lossy codecs that tensors of an archive use."""
    used = {tensor.codec for tensor in head.tensors}
    names = [c.name for i, c in enumerate(head.codecs) if i in used and c.name in LOSSY_CODECS]
    return list(dict.fromkeys(names))


def lossy_note(head: Head, *, anchor_only: bool = False) -> str:
    """What :data:`LOSSY_KEY` says of a cache decoded from an archive; empty when it is exact."""
    earlier = head.metadata.get(LOSSY_KEY)
    now = ", ".join(lossy_codecs(head)) + (" (anchors only)" if anchor_only else "")
    return "; ".join(part for part in (earlier, now) if part)


def with_lossy_note(head: Head, *, anchor_only: bool = False) -> Mapping[str, str]:
    """The metadata of a cache decoded from an archive."""
    note = lossy_note(head, anchor_only=anchor_only)
    return {**head.metadata, LOSSY_KEY: note} if note else head.metadata
