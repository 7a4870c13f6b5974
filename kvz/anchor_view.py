"""A progressive archive seen by its anchors alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from kvz.files import naming
from kvz.formats.errors import ConfigError
from kvz.formats.head import Head
from kvz.lossy import with_lossy_note

if TYPE_CHECKING:
    from kvz.archive import Archive


class AnchorView:
    """Tensors of an archive decoded from their anchors: a :class:`kvz.source_protocol.CacheSource`.

    Tensors of other codecs, and chunks that are stored as they are, come as they are. Lives as long
    as the archive is open. Raises ConfigError when it has no anchors.
    """

    def __init__(self, archive: Archive) -> None:
        with naming(archive.name):
            check_progressive(archive.head)
        self._archive = archive

    @property
    def metadata(self) -> Mapping[str, str]:
        """That of the archive, with a note that the cache is lossy."""
        return with_lossy_note(self._archive.head, anchor_only=True)

    @property
    def tensor_names(self) -> Sequence[str]:
        return self._archive.tensor_names

    def dtype(self, name: str) -> str:
        return self._archive.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._archive.shape(name)

    def read_tensor(self, name: str, tokens: slice | None = None) -> NDArray[Any]:
        """As :meth:`kvz.archive.Archive.read_tensor`, without residuals."""
        return self._archive.read_tensor(name, tokens, anchor_only=True)

    def announce(self, names: Sequence[str]) -> None:
        """As :meth:`kvz.archive.Archive.announce`, without residuals."""
        self._archive.announce(names, anchor_only=True)


def check_progressive(head: Head) -> None:
    """Raises ConfigError when no tensor of an archive has anchors."""
    if not any(head.is_progressive(tensor) for tensor in head.tensors):
        used = {tensor.codec for tensor in head.tensors}
        names = ", ".join(codec.name for i, codec in enumerate(head.codecs) if i in used)
        raise ConfigError(f"has no anchors: only codec lynx makes them, this archive is of {names}")
