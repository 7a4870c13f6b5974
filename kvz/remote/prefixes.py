"""What objects lie under a prefix."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvz.files import naming
from kvz.formats.errors import KvzError
from kvz.remote import urls
from kvz.remote.pool import RequestPool
from kvz.remote.store import as_source_error, is_missing, open_store, require_obstore
from kvz.remote.urls import ObjectUrl


class ListedObject(NamedTuple):
    """An object: its URL, its key below the prefix, and its size."""

    url: str
    relative: str
    nbytes: int


def list_objects(location: str | os.PathLike[str]) -> list[ListedObject]:
    """All objects under a prefix, sorted by key; one request for a thousand of them.

    A prefix ends where a part of a key ends: ``s3://bucket/run`` is not one of ``run-7/a.kvz``.
    Raises ConfigError, and SourceError when the bucket is missing or cannot be listed.
    """
    folder = urls.parse_folder(location)
    with naming(str(folder)):
        pool = RequestPool(1)
        try:
            return pool.run(_list, folder)
        except KvzError:
            raise
        except Exception as error:
            if is_missing(error):
                return []
            raise as_source_error(error) from None
        finally:
            pool.close()


def _list(folder: ObjectUrl) -> list[ListedObject]:
    obstore = require_obstore()
    start = len(folder.key) + 1 if folder.key else 0
    found = []
    for some in obstore.list(open_store(folder, writing=True), folder.key or None):
        for meta in some:
            key = meta["path"]
            url = str(ObjectUrl(folder.scheme, folder.bucket, key))
            found.append((key, ListedObject(url, key[start:], int(meta["size"]))))
    return [listed for _, listed in sorted(found)]
