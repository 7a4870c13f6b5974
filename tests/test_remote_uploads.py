"""Outputs in object storage: the whole object or none, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import (
    command_line,
    environment,
    write_cache,
)
from fault_proxy import Fault, FaultProxy
from numpy.typing import NDArray
from remote_support import (
    MIB,
    payload,
    proxy,
    server,
    small_parts,
    tensors_of,
    url,
    write,
)
from s3_server import S3Server, s3_server

from kvz.files import atomic_output
from kvz.formats.errors import SourceError

__all__ = ["proxy", "s3_server", "server", "small_parts"]


def is_part(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber" in path


def is_completion(method: str, path: str) -> bool:
    return method == "POST" and "uploadId" in path


UPLOAD_FAULTS = {
    "503 for a part": Fault("503", times=2, skip=1, where=is_part),
    "a part is refused": Fault("refuse", times=2, skip=1, where=is_part),
    "no answer to a part": Fault("drop", times=2, where=is_part),
    "503 at the end": Fault("503", times=2, where=is_completion),
    "refused at the end": Fault("refuse", times=1, where=is_completion),
    "503 for all in one": Fault("503", times=2, where=lambda method, path: method == "PUT"),
}


@pytest.mark.parametrize("nbytes", [0, 1, 5 * MIB, 5 * MIB + 1, 17 * MIB])
def test_outputs_of_any_size_arrive_whole(nbytes: int, server: S3Server, small_parts: None) -> None:
    data = payload(nbytes)
    write(f"size-{nbytes}", data)
    assert server.get(f"size-{nbytes}") == data
    assert server.unfinished_uploads(f"size-{nbytes}") == 0


@pytest.mark.parametrize("fault", UPLOAD_FAULTS)
def test_faults_during_an_upload_that_pass_do_no_harm(
    fault: str, server: S3Server, proxy: FaultProxy, small_parts: None
) -> None:
    key = f"upload-{fault}".replace(" ", "-")
    data = payload((4 if "all in one" in fault else 17) * MIB)
    proxy.faults.append(Fault(**vars(UPLOAD_FAULTS[fault])))
    write(key, data)
    assert proxy.faults[0].times == 0, "the fault did not happen"
    assert server.get(key) == data
    assert server.unfinished_uploads(key) == 0


def test_a_lost_answer_to_the_last_request_is_no_damage(
    server: S3Server, proxy: FaultProxy, small_parts: None
) -> None:
    # whether the object was made cannot be known then: it is whole, or there is an error, or both
    data = payload(17 * MIB)
    proxy.faults.append(Fault("drop", where=is_completion))
    with contextlib.suppress(SourceError):
        write("lost-answer", data)
    assert server.get("lost-answer") == data


@pytest.mark.parametrize("size", ["one request", "parts"])
def test_a_server_that_dies_during_an_upload_leaves_nothing_visible(
    size: str, server: S3Server, proxy: FaultProxy, small_parts: None
) -> None:
    key = f"dead-{size[0]}"
    stops_at = 1 if size == "one request" else 4

    def die(number: int, method: str, path: str) -> None:
        if number == stops_at:
            proxy.stop()

    proxy.before = die
    with pytest.raises(SourceError, match=f"^{url(key)}: "):
        write(key, payload((2 if size == "one request" else 40) * MIB))
    assert server.get(key) is None


def test_an_error_during_an_upload_leaves_nothing_at_all(
    server: S3Server, proxy: FaultProxy, small_parts: None
) -> None:
    def fail_midway() -> None:
        with atomic_output(url("abandoned"), overwrite=False) as output:
            output.write(payload(22 * MIB))
            end = time.monotonic() + 10
            while not any(is_part(e.method, e.path) for e in proxy.exchanges):
                assert time.monotonic() < end, "no part was sent"
                time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_midway()
    assert server.get("abandoned") is None
    assert server.unfinished_uploads("abandoned") == 0


@pytest.mark.parametrize("where", [is_part, is_completion])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_request_that_is_never_accepted_leaves_nothing_at_all(
    where: Callable[[str, str], bool],
    skip: int,
    server: S3Server,
    proxy: FaultProxy,
    small_parts: None,
) -> None:
    key = f"refused-{where.__name__}-{skip}"
    proxy.faults.append(Fault("503", times=1000, skip=skip if where is is_part else 0, where=where))
    with pytest.raises(SourceError, match=f"^{url(key)}: the server answered 503"):
        write(key, payload(17 * MIB))
    assert server.get(key) is None
    assert server.unfinished_uploads(key) == 0


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_writer_that_is_stopped_leaves_nothing_visible(
    signal_: signal.Signals, tmp_path: Path, server: S3Server, proxy: FaultProxy
) -> None:
    key = f"stopped-{signal_.name}.kvz"
    write_cache(tmp_path / "c.safetensors", big_cache())
    process = subprocess.Popen(
        command_line("compress", "c.safetensors", "--codec", "raw", "-o", url(key)),
        cwd=tmp_path,
        env=environment(**server.environment(proxy.port)),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    proxy.faults.append(Fault("503", times=1000, skip=1, where=is_part))
    while not any(is_part(e.method, e.path) for e in list(proxy.exchanges)):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal_)
    error = process.communicate(timeout=30)[1]
    if signal_ is signal.SIGINT:
        assert (process.returncode, error) == (130, b"kvz: interrupted\n")
    assert process.returncode != 0
    assert server.get(key) is None
    # a process that is killed can abort nothing
    assert server.unfinished_uploads(key) == (1 if signal_ is signal.SIGKILL else 0)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def big_cache() -> dict[str, tuple[str, NDArray[Any]]]:
    """64 MiB, more than the parts that may be under way."""
    return {name: ("BF16", array) for name, array in tensors_of(4, 16384).items()}


@pytest.mark.parametrize("nbytes", [1000, 12 * MIB])
def test_an_existing_object_is_kept_without_force(
    nbytes: int, server: S3Server, small_parts: None
) -> None:
    key = f"kept-{nbytes}"
    first, second = payload(nbytes, 1), payload(nbytes, 2)
    write(key, first)
    with pytest.raises(SourceError, match=f"^{url(key)}: exists already; use -f"):
        write(key, second)
    assert server.get(key) == first
    write(key, second, overwrite=True)
    assert server.get(key) == second
    assert server.unfinished_uploads(key) == 0


@pytest.mark.parametrize("nbytes", [1000, 12 * MIB])
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_writers_never_mix(
    nbytes: int, overwrite: bool, server: S3Server, small_parts: None
) -> None:
    key = f"two-{nbytes}-{overwrite}"
    first, second = payload(nbytes, 1), payload(nbytes + 1, 2)
    with contextlib.ExitStack() as stack:
        # both have begun, and each has sent parts, before one ends
        late = stack.enter_context(contextlib.ExitStack())
        output = late.enter_context(atomic_output(url(key), overwrite=overwrite))
        output.write(second)
        write(key, first, overwrite=overwrite)
        assert server.get(key) == first
        if overwrite:
            late.close()
        else:
            with pytest.raises(SourceError, match="was created by another writer meanwhile"):
                late.close()
    assert server.get(key) == (second if overwrite else first)
    assert server.unfinished_uploads(key) == 0


def test_of_many_small_writers_at_once_one_wins(server: S3Server) -> None:
    outcomes: list[int | None] = []

    def run(seed: int) -> None:
        try:
            write("contended", payload(50_000, seed))
            outcomes.append(seed)
        except SourceError:
            outcomes.append(None)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (seed for seed in outcomes if seed is not None)
    assert server.get("contended") == payload(50_000, winner)
