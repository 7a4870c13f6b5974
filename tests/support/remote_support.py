"""Archives in a real store, and a proxy before it, for the tests of URLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from cli_support import (
    bf16,
)
from fault_proxy import FaultProxy
from numpy.typing import NDArray
from s3_server import BUCKET, S3Server, s3_server

import kvz as api
from kvz.files import atomic_output
from kvz.remote import upload as upload_module

__all__ = ["s3_server"]

TIMEOUT_S = 1.0


@pytest.fixture
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server itself, named by the environment."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, named by the environment; faults are noticed soon."""
    opened = FaultProxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{opened.port}")
    monkeypatch.setenv("KVZ_REMOTE_TIMEOUT", str(TIMEOUT_S))
    monkeypatch.setenv("KVZ_REMOTE_RETRIES", "3")
    yield opened
    opened.stop()


def url(key: str) -> str:
    return f"s3://{BUCKET}/{key}"


class Stored(NamedTuple):
    """An archive in the store, the bytes that it has there, and what went into it."""

    key: str
    data: bytes
    tensors: dict[str, Any]

    @property
    def url(self) -> str:
        return url(self.key)


def tensors_of(num_layers: int, num_tokens: int) -> dict[str, NDArray[np.uint16]]:
    """Keys and values ``[1, 4, num_tokens, 64]`` of some layers; no two chunks are alike."""
    base = bf16((1, 4, num_tokens + 64 * num_layers, 64))
    return {
        f"layers.{layer}.{part}": base[:, :, 2 * layer + i : 2 * layer + i + num_tokens]
        for layer in range(num_layers)
        for i, part in enumerate(("key", "value"))
    }


def as_torch(tensors: dict[str, NDArray[np.uint16]]) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(a.copy()).view(torch.bfloat16) for name, a in tensors.items()}


def stored(folder: Path, server: S3Server, key: str, codec: str, *size: int) -> Stored:
    tensors = tensors_of(*size)
    path = folder / "archive.kvz"
    api.compress(as_torch(tensors), path, codec, threads=1)
    data = path.read_bytes()
    server.put(key, data)
    return Stored(key, data, tensors)


@pytest.fixture(scope="module")
def archive(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """16 MiB of keys and values in 16 chunks."""
    return stored(tmp_path_factory.mktemp("a"), s3_server, "archive.kvz", "splitzip", 4, 4096)


@pytest.fixture(scope="module")
def lynx(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The same kind of cache with anchors and residuals."""
    return stored(tmp_path_factory.mktemp("l"), s3_server, "lynx.kvz", "lynx", 8, 4096)


def local_copy(archive: Stored, folder: Path) -> Path:
    path = folder / "local.kvz"
    path.write_bytes(archive.data)
    return path


def restored(source: str | Path, folder: Path, **settings: Any) -> bytes:
    """What an archive decompresses to."""
    path = folder / "restored.safetensors"
    api.decompress(source, path, overwrite=True, **settings)
    return path.read_bytes()


MIB = 1 << 20


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the smallest size that S3 takes."""
    monkeypatch.setattr(upload_module, "PART_NBYTES", 5 * MIB)


def payload(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def write(key: str, data: bytes, *, overwrite: bool = False) -> None:
    """Upload through the function that every command writes with."""
    with atomic_output(url(key), overwrite=overwrite) as output:
        for start in range(0, len(data), 300_000):
            output.write(data[start : start + 300_000])
