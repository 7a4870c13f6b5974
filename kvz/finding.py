"""The files that folders, prefixes of object stores and patterns stand for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import iglob
from pathlib import Path, PurePosixPath

from kvz.files import naming
from kvz.formats.errors import SourceError
from kvz.locations import shown_name
from kvz.remote.urls import is_remote, local_path

_WILDCARD = re.compile(r"[*?]")


@dataclass(frozen=True, slots=True)
class Found:
    """A file or object.

    ``relative``: its path below the folder or prefix that was named, or before the first wildcard;
    the last part of ``location`` for what was named itself. ``nbytes`` None: not known yet.
    """

    location: str
    relative: str
    nbytes: int | None = None


def stands_for_many(location: str) -> bool:
    """Whether a location is a folder, a prefix (a URL with ``/`` at its end) or a pattern."""
    if is_remote(location):
        return location.endswith("/") or _WILDCARD.search(location) is not None
    path = Path(local_path(location))
    return path.is_dir() or (_WILDCARD.search(str(path)) is not None and not path.exists())


def find(location: str, suffix: str) -> list[Found]:
    """What a location stands for, sorted; itself if it is not :func:`stands_for_many`.

    Of folders and prefixes all files whose names end in ``suffix``, at any depth; of patterns
    (``*``, ``?``, and ``**`` for any number of folders) all that match. Raises SourceError for what
    cannot be listed, ConfigError for a URL without sense.
    """
    if not stands_for_many(location):
        return [Found(location, PurePosixPath(local_path(location)).name)]
    if is_remote(location):
        return _objects(location, suffix)
    path = local_path(location)
    with naming(path):
        files = _files(path, suffix) if Path(path).is_dir() else _matches(path)
        return [Found(str(f), str(f.relative_to(base)), _size(f)) for f, base in files]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:  # a link to nowhere: whoever opens it says so
        return None


def find_some(location: str, suffix: str) -> list[Found]:
    """The same; raises SourceError when there is nothing."""
    found = find(location, suffix)
    if not found:
        what = "nothing matches" if _WILDCARD.search(location) else f"holds no {suffix} file"
        raise SourceError(f"{shown_folder(location)}: {what}")
    return found


def shown_folder(location: str) -> str:
    """How messages call a folder, prefix or pattern: without credentials."""
    return location if is_remote(location) else shown_name(location)


def _files(folder: str, suffix: str) -> list[tuple[Path, Path]]:
    def fail(error: OSError) -> None:
        raise error

    base = Path(folder)
    walk = os.walk(base, onerror=fail)
    paths = (Path(root, name) for root, _, names in walk for name in names if name.endswith(suffix))
    return [(path, base) for path in sorted(paths)]


def _matches(pattern: str) -> list[tuple[Path, Path]]:
    base = Path(_before_wildcards(pattern))
    paths = (Path(name) for name in iglob(pattern.replace("[", "[[]"), recursive=True))
    return [(path, base) for path in sorted(paths) if path.is_file()]


def _objects(location: str, suffix: str) -> list[Found]:
    from kvz.remote.prefixes import list_objects

    prefix = _before_wildcards(location) if _WILDCARD.search(location) else location
    listed = list_objects(prefix)
    if prefix == location:
        listed = [one for one in listed if one.relative.endswith(suffix)]
    else:
        wanted = location[len(prefix) :].split("/")
        listed = [one for one in listed if _fits(one.relative.split("/"), wanted)]
    return [Found(one.url, one.relative, one.nbytes) for one in listed]


def _before_wildcards(pattern: str) -> str:
    """The folders of a pattern before the first part with a wildcard, with their slash."""
    wildcard = _WILDCARD.search(pattern)
    assert wildcard is not None
    return pattern[: pattern.rfind("/", 0, wildcard.start()) + 1]


def _fits(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_fits(parts[i:], wanted[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _fits(parts[1:], wanted[1:])


def expand(locations: Sequence[str], suffix: str) -> Iterator[tuple[str, list[Found] | Exception]]:
    """Each location with what it stands for, or with the reason why that cannot be said."""
    for location in locations:
        try:
            yield location, find_some(location, suffix)
        except Exception as error:  # the other locations are still to be dealt with
            yield location, error
