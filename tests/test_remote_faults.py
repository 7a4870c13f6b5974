"""Faults while a remote archive is read: the right data or a clear error, never wrong data."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import (
    assert_refused,
    command_line,
    environment,
    kvz,
)
from fault_proxy import Fault, FaultProxy
from remote_support import (
    Stored,
    archive,
    local_copy,
    proxy,
    restored,
    server,
    url,
)
from s3_server import S3Server, s3_server

import kvz as api
from kvz.archive import Archive
from kvz.formats.errors import ChecksumMismatch, ContentMismatch, SourceError

__all__ = ["archive", "proxy", "s3_server", "server"]


#: With three retries; what a reader got before a fault counts as progress.
PASSING = {
    "reset at once": Fault("reset", times=2),
    "reset mid-body": Fault("reset", times=3, nbytes=40_000),
    "reset late": Fault("reset", times=3, skip=2, nbytes=1_000_000),
    "short body": Fault("short", times=3, nbytes=30_000),
    "short, late": Fault("short", times=2, skip=2, nbytes=700_000),
    "fewer bytes than asked for": Fault("less", times=2, skip=2),
    "503": Fault("503", times=3),
    "503 later": Fault("503", times=3, skip=3),
    "refused": Fault("refuse", times=3),
    "no answer": Fault("drop", times=2),
    "slow": Fault("slow", times=4, seconds=0.005),
    "hangs": Fault("hang", times=1, skip=2, nbytes=100_000),
}
WAYS: dict[str, Callable[[str, Path], object]] = {
    "by ranges": lambda source, folder: restored(source, folder, threads=2),
    "as a stream": lambda source, folder: api.verify(source, threads=1).num_sections,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass_do_no_harm(
    way: str, fault: str, tmp_path: Path, archive: Stored, proxy: FaultProxy
) -> None:
    expected = WAYS[way](str(local_copy(archive, tmp_path)), tmp_path)
    proxy.faults.append(Fault(**vars(PASSING[fault])))
    assert WAYS[way](archive.url, tmp_path) == expected
    assert proxy.faults[0].times == 0, "the fault did not happen"
    if fault != "fewer bytes than asked for":
        # obstore drops that answer unread, of which megabytes may be in the buffers of sockets
        assert proxy.nbytes < 1.2 * len(archive.data)


LASTING = {
    "reset": (Fault("reset", times=1000, skip=3, nbytes=10), "tried 4 times"),
    "short": (Fault("short", times=1000, skip=3), "tried 4 times"),
    "503": (
        Fault("503", times=1000, skip=3),
        "the server answered 503 Service Unavailable .tried 4 times",
    ),
    "refused": (Fault("refuse", times=1000, skip=3), "tried 4 times"),
    "hangs": (Fault("hang", times=1000, skip=3), "timed out"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", LASTING)
def test_faults_that_last_end_in_an_error(
    way: str, fault: str, tmp_path: Path, archive: Stored, proxy: FaultProxy
) -> None:
    what, message = LASTING[fault]
    proxy.faults.append(Fault(**vars(what)))
    with pytest.raises(SourceError, match=message) as caught:
        WAYS[way](archive.url, tmp_path)
    assert str(caught.value).startswith(f"{archive.url}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_dies_is_an_error(
    way: str, tmp_path: Path, archive: Stored, proxy: FaultProxy
) -> None:
    def die(number: int, method: str, path: str) -> None:
        if number == 3:
            proxy.stop()

    proxy.before = die
    with pytest.raises(SourceError, match=archive.url):
        WAYS[way](archive.url, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replaced", ["by another", "by the same", "deleted"])
def test_an_object_that_is_replaced_while_it_is_read_is_told(
    way: str, replaced: str, tmp_path: Path, archive: Stored, server: S3Server, proxy: FaultProxy
) -> None:
    key = f"changing-{replaced[-1]}-{len(way)}.kvz"
    server.put(key, archive.data)

    def replace(number: int, method: str, path: str) -> None:
        if number == 3:
            if replaced == "deleted":
                server.request("DELETE", key)
            else:
                server.put(key, archive.data[: -(4 << 10)] + bytes(4 << 10))

    proxy.before = replace
    if replaced == "by the same":
        # the same bytes are the same version to the store, and to the reader
        proxy.before = lambda number, method, path: server.put(key, archive.data)
        WAYS[way](url(key), tmp_path)
        return
    kind: type[Exception] = SourceError if replaced == "deleted" else ContentMismatch
    what = "deleted" if replaced == "deleted" else "replaced"
    with pytest.raises(kind, match=f"was {what} while it was read"):
        WAYS[way](url(key), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_wrong_bytes_in_the_middle_are_told_by_chunk(
    way: str, tmp_path: Path, archive: Stored, proxy: FaultProxy
) -> None:
    with Archive(local_copy(archive, tmp_path)) as local:
        row = local.table.chunk_row(5, 1)
        name = local.head.tensors[5].name
        offset = int(local.index["offset"][row]) + 1000
    (tmp_path / "local.kvz").unlink()
    proxy.faults.append(Fault("corrupt", times=1000, offset=offset))
    with pytest.raises(ChecksumMismatch, match=rf"chunk 1 of {name}\b.*does not match"):
        WAYS[way](archive.url, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_of_remote_faults(
    tmp_path: Path, archive: Stored, server: S3Server, proxy: FaultProxy
) -> None:
    settings = {
        "env": environment(
            **server.environment(proxy.port), KVZ_REMOTE_TIMEOUT="1", KVZ_REMOTE_RETRIES="0"
        )
    }
    proxy.faults.append(Fault("503", times=1000))
    result = kvz("verify", archive.url, cwd=tmp_path, **settings)
    line = f"{archive.url}: the server answered 503 Service Unavailable"
    assert_refused(result, 6, line)
    proxy.clear()
    server.put("exit.kvz", archive.data)
    proxy.before = lambda number, *_: server.put("exit.kvz", bytes(100)) if number == 2 else None
    result = kvz("decompress", url("exit.kvz"), "-o", "x", cwd=tmp_path, **settings)
    assert_refused(result, 5, f"{url('exit.kvz')}: was replaced while it was read")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_is_interrupted_does_not_wait_for_a_silent_server(
    tmp_path: Path, archive: Stored, server: S3Server, proxy: FaultProxy
) -> None:
    proxy.faults.append(Fault("hang", times=1000, skip=1))
    process = subprocess.Popen(
        command_line("decompress", archive.url, "-o", "x.safetensors"),
        cwd=tmp_path,
        env=environment(**server.environment(proxy.port), KVZ_REMOTE_TIMEOUT="60"),
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 30
    while proxy.num_requests < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=30)[1]
    assert (process.returncode, error) == (130, b"kvz: interrupted\n")
    assert time.monotonic() - start < 15
    assert list(tmp_path.iterdir()) == []
