"""Connections to object stores, and what their errors mean.

Credentials and endpoints come from the environment variables that tools of each store use:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL (or
AWS_ENDPOINT_URL_S3), AWS_SKIP_SIGNATURE=true for public buckets, web identity and instance roles;
GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME and
AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY. HTTPS_PROXY and NO_PROXY count.

Of our own: KVZ_REMOTE_TIMEOUT, the seconds without a byte after which a request is given up and
tried again (default 20), and KVZ_REMOTE_RETRIES, how often in a row that may bring nothing new
(default 5).
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from functools import lru_cache
from typing import Any

from kvz.formats.errors import ConfigError, KvzError, SourceError
from kvz.remote.urls import HTTP_SCHEMES, ObjectUrl

TIMEOUT_VARIABLE = "KVZ_REMOTE_TIMEOUT"
RETRIES_VARIABLE = "KVZ_REMOTE_RETRIES"
_CONNECT_TIMEOUT_S = 10
#: Bounds one request of a reader; long, since a body that is cut goes on where it was.
_READ_TOTAL_S = 600
#: One part of an upload must be through in this time: 0.45 Mbit/s for 16 MiB.
_WRITE_TOTAL_S = 300
_ENVIRONMENT = ("AWS_", "AZURE_", "GOOGLE_", "KVZ_REMOTE_", "HTTP_PROXY", "HTTPS_PROXY")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def timeout_s() -> float:
    """Seconds without a byte after which a request is given up. Raises ConfigError."""
    return _number(TIMEOUT_VARIABLE, 20.0, low=0.1)


def num_retries() -> int:
    """How often in a row a request may fail without having brought anything."""
    return int(_number(RETRIES_VARIABLE, 5, low=0))


def _number(variable: str, default: float, low: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low <= value <= 1e6:
        raise ConfigError(f"{variable} is {text!r}, must be a number from {low:g}")
    return value


def require_obstore() -> Any:
    """The package obstore. Raises SourceError that says how to get it."""
    try:
        import obstore
    except ImportError:
        raise SourceError("URLs need the package obstore: pip install 'kvz[remote]'") from None
    return obstore


def open_store(url: ObjectUrl, *, writing: bool = False) -> Any:
    """The obstore store that holds an object; equal ones share their connections.

    ``writing``: with retries of its own; whoever reads tries again by himself, to go on where a
    body was cut. Raises SourceError or ConfigError.
    """
    settings = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(_ENVIRONMENT)))
    return _store(url.scheme, url.bucket, writing, settings)


@lru_cache(maxsize=32)
def _store(scheme: str, bucket: str, writing: bool, settings: tuple[tuple[str, str], ...]) -> Any:
    require_obstore()
    from obstore import store

    endpoint = next((v for name in _ENDPOINTS for k, v in settings if k == name), "")
    if scheme == "s3" and endpoint and not re.match(r"https?://[^\s/]+", endpoint):
        raise ConfigError("AWS_ENDPOINT_URL must be a URL, such as https://s3.example.org:9000")
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, timeout_s())),
        "timeout": timedelta(seconds=_WRITE_TOTAL_S if writing else _READ_TOTAL_S),
    }
    if not writing:
        client["read_timeout"] = timedelta(seconds=timeout_s())
    if scheme == "http" or endpoint.startswith("http://"):
        client["allow_http"] = True
    retry: dict[str, Any] = {
        "max_retries": num_retries() if writing else 0,
        "retry_timeout": timedelta(seconds=180),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
    given: dict[str, Any] = {"client_options": client, "retry_config": retry}
    try:
        if scheme == "s3":
            return store.S3Store(bucket, **given)
        if scheme == "gs":
            return store.GCSStore(bucket, **given)
        if scheme == "az":
            return store.AzureStore(bucket, **given)
        return store.HTTPStore.from_url(bucket, **given)
    except Exception as error:
        raise SourceError(f"cannot use {scheme}://: {_reason(error)}") from None


def object_path(url: ObjectUrl) -> str:
    """How the store of an object calls it."""
    return url.key


def can_write(url: ObjectUrl) -> bool:
    """Plain HTTP servers have no uploads that appear whole or not at all."""
    return url.scheme not in HTTP_SCHEMES


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: the connection, the server's fault, too many requests."""
    from obstore.exceptions import GenericError

    if not isinstance(error, GenericError):
        return False
    status = _status(str(error))
    return status is None or status in (408, 429, 500, 502, 503, 504)


def is_missing(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error tells of, if it does."""
    return _status(str(error))


def as_source_error(error: BaseException) -> KvzError:
    """An error of obstore as ours, in one line."""
    return SourceError(_reason(error))


def _status(text: str) -> int | None:
    match = re.search(r"status code: (\d{3})", text)
    return None if match is None else int(match[1])


_CONNECTION = re.compile(
    r'message: "(Connection refused|Connection reset by peer|No route to host|'
    r'Network is unreachable|Broken pipe)"'
)


def _reason(error: BaseException) -> str:
    text = str(error)
    if is_missing(error):
        return "no such bucket" if "NoSuchBucket" in text else "no such object"
    status = re.search(r"status code: (\d{3} [\w -]+)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if status is not None:
        detail = "" if code is None else f" ({code[1]})"
        hint = ""
        if status[1][:3] in ("401", "403"):
            hint = "; check the credentials in the environment"
        return f"the server answered {status[1].strip()}{detail}{hint}"
    if "169.254.169.254" in text or "credential" in text.lower():
        return (
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or what the store "
            "needs), or AWS_SKIP_SIGNATURE=true for what is public"
        )
    connection = _CONNECTION.search(text)
    if connection is not None:
        return f"{connection[1].lower()}: is the endpoint right and the server up?"
    if "dns error" in text:
        return "the host is not known: is the endpoint right?"
    if "TimedOut" in text or "timed out" in text:
        return "timed out"
    first = text.strip().partition("\n")[0]
    first = re.sub(r"^Generic \w+ error: ", "", first)
    return re.sub(r"\s*\(?\w+://\S+", "", first).strip() or type(error).__name__
