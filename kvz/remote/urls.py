"""Which strings are URLs of objects, and what is in them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from kvz.formats.errors import ConfigError

#: Bucket (container) stores and plain HTTP; ``file://`` is another way to write a path.
BUCKET_SCHEMES = ("s3", "gs", "az")
HTTP_SCHEMES = ("http", "https")
_FILE_SCHEME = "file"
_SCHEMES = (*BUCKET_SCHEMES, *HTTP_SCHEMES, _FILE_SCHEME)
#: Buckets, and hosts with a port, credentials or the brackets of IPv6.
_HOST = re.compile(r"([^\s/@]+@)?(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d+)?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """An object. ``bucket``: bucket or container; of HTTP the scheme and host, ``key`` decoded.

    ``str()`` has no credentials in it.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        if self.scheme in HTTP_SCHEMES:
            host = self.bucket.partition("://")[2].rpartition("@")[2]
            return f"{self.scheme}://{host}/{self.key}"
        return f"{self.scheme}://{self.bucket}/{self.key}"


def _scheme(location: str | os.PathLike[str]) -> str | None:
    match = _SCHEME.match(os.fspath(location)) if isinstance(location, (str, os.PathLike)) else None
    return None if match is None else match[1].lower()


def is_remote(location: str | os.PathLike[str]) -> bool:
    """Whether a location is a URL of an object; paths and ``file://`` are not.

    Raises ConfigError for a URL of a kind that kvz does not know.
    """
    scheme = _scheme(location)
    if scheme is None or scheme == _FILE_SCHEME:
        return False
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise ConfigError(f"{os.fspath(location)}: {scheme}:// is not known; known are {known}")
    return True


def _split(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError as error:
        scheme = text.partition("://")[0]
        raise ConfigError(f"{scheme}://...: {error}") from None


def local_path(location: str | os.PathLike[str]) -> str:
    """The path of a local file: what follows ``file://``, or ``location`` as it is.

    Raises ConfigError for ``file://`` with a host or a relative path.
    """
    text = os.fspath(location)
    if _scheme(location) != _FILE_SCHEME:
        return text
    parts = _split(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(
            f"{text}: must be file:// and an absolute path, such as file:///tmp/c.kvz"
        )
    return unquote(text.partition("://")[2][len(parts.netloc) :])


def parse(location: str | os.PathLike[str]) -> ObjectUrl:
    """Take a URL apart. Raises ConfigError when bucket or key are missing or make no sense."""
    return _parse(location, folder=False)


def parse_folder(location: str | os.PathLike[str]) -> ObjectUrl:
    """The URL of all objects under a prefix, a slash at its end or not; no key: of the bucket.

    Raises ConfigError; also for HTTP, whose servers have no listing.
    """
    folder = _parse(location, folder=True)
    if folder.scheme in HTTP_SCHEMES:
        raise ConfigError(f"{folder}: HTTP servers cannot be asked what they hold; name each file")
    return folder


def _parse(location: str | os.PathLike[str], *, folder: bool) -> ObjectUrl:
    text = os.fspath(location)
    scheme = _scheme(location) or ""
    rest = text.partition("://")[2]
    if scheme in HTTP_SCHEMES:
        parts = _split(text)
        shown = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if parts.query or parts.fragment:
            raise ConfigError(f"{shown}: a URL with a query (?...) or fragment cannot be used")
        bucket, key = f"{scheme}://{parts.netloc}", unquote(parts.path.lstrip("/"))
        needs = "a host and a path"
    else:
        bucket, _, key = rest.partition("/")
        shown, needs = text, "a bucket" if folder else "a bucket and a key"
        if "@" in bucket:
            raise ConfigError(f"{scheme}://...: credentials belong into the environment, not here")
    if folder:
        key = key.removesuffix("/")
    is_whole = folder or (key and not key.endswith("/"))
    if not bucket.rpartition("/")[2] or not is_whole:
        example = f"{scheme}://bucket/folder/" + ("" if folder else "cache.kvz")
        raise ConfigError(f"{shown}: must name {needs}, such as {example}")
    if not _HOST.fullmatch(bucket.rpartition("/")[2]):
        raise ConfigError(f"{shown}: {'bucket' if scheme in BUCKET_SCHEMES else 'host'} is no name")
    if key and any(part in ("", ".", "..") for part in key.split("/")):
        raise ConfigError(f"{shown}: an empty part, . or .. in a key cannot be addressed")
    return ObjectUrl(scheme, bucket, key)


def with_suffix(location: str, suffix: str) -> str:
    """A URL whose last part has another suffix, as :meth:`pathlib.PurePath.with_suffix`."""
    folder, _, name = location.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return f"{folder}/{stem if dot and stem else name}{suffix}"


def same_object(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Whether both are URLs of one object."""
    return is_remote(first) and is_remote(second) and parse(first) == parse(second)
