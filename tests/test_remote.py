"""URLs wherever a file does, against a real S3 server; what is transferred is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from cli_support import (
    as_read,
    assert_refused,
    environment,
    kvz,
    python,
    read_cache,
    small_cache,
    write_cache,
)
from fault_proxy import FaultProxy
from remote_support import (
    Stored,
    archive,
    as_torch,
    local_copy,
    lynx,
    proxy,
    restored,
    server,
    small_parts,
    stored,
    tensors_of,
    url,
    write,
)
from s3_server import BUCKET, S3Server, s3_server

import kvz as api
from kvz.archive import Archive
from kvz.formats.errors import ConfigError, SourceError
from kvz.formats.ids import SectionKind
from kvz.remote import upload as upload_module
from kvz.remote.read_ahead import merged
from kvz.remote.remote_file import FRONT_NBYTES as FRONT
from kvz.remote.remote_file import TAIL_NBYTES as TAIL
from kvz.remote.remote_file import RemoteFile
from kvz.remote.sequential import RemoteStream
from kvz.remote.urls import is_remote, local_path, parse, same_object, with_suffix

__all__ = ["archive", "lynx", "proxy", "s3_server", "server", "small_parts"]

# -- which strings are URLs


@pytest.mark.parametrize(
    ("location", "remote"),
    [
        ("s3://bucket/key", True),
        ("S3://bucket/key", True),
        ("gs://b/k", True),
        ("az://b/k", True),
        ("http://h/k", True),
        ("https://h/k", True),
        ("file:///tmp/x", False),
        ("cache.kvz", False),
        ("-", False),
        ("folder/s3:/x", False),
        ("s3:/bucket/key", False),
        (Path("/tmp/x"), False),
    ],
)
def test_urls_are_told_from_paths(location: str | Path, remote: bool) -> None:
    assert is_remote(location) is remote


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("s3://bucket", "must name a bucket and a key"),
        ("s3://bucket/", "must name a bucket and a key"),
        ("s3:///key", "must name a bucket and a key"),
        ("s3://bucket/folder/", "must name a bucket and a key"),
        ("s3://bucket/a//b", "an empty part"),
        ("s3://bucket/../b", "an empty part, . or .."),
        ("s3://id:secret@bucket/key", "credentials belong into the environment"),
        ("https://host/key?X-Amz-Signature=secret", "a URL with a query"),
        ("ftp://host/key", "ftp:// is not known; known are s3://"),
        ("file://host/key", "must be file:// and an absolute path"),
        ("s3://buck et/key", "bucket is no name"),
        ("http://host:x/key", "host is no name"),
    ],
)
def test_urls_that_name_no_object_are_refused(location: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as caught:
        api.open(location)
    assert "secret" not in str(caught.value)


def test_parts_of_urls() -> None:
    assert parse("s3://b/a/c%20d.kvz").key == "a/c%20d.kvz"
    assert parse("https://host:1/a/c%20d.kvz").key == "a/c d.kvz"
    assert str(parse("http://user:secret@host:1/a.kvz")) == "http://host:1/a.kvz"
    assert local_path("file:///tmp/a%20b") == "/tmp/a b"
    assert local_path("file://localhost/tmp/a") == "/tmp/a"
    assert with_suffix("s3://b/a.b/cache.safetensors", ".kvz") == "s3://b/a.b/cache.kvz"
    assert with_suffix("s3://b/a.b/cache", ".kvz") == "s3://b/a.b/cache.kvz"
    assert same_object("s3://b/k", "S3://b/k")
    assert not same_object("s3://b/k", "s3://b/K")
    assert not same_object("s3://b/k", "b/k")


def test_ranges_are_merged_across_small_gaps_only() -> None:
    gap, large = 64 << 10, 8 << 20
    assert [(b.start, b.stop) for b in merged([(0, 10), (10 + gap, 5)])] == [(0, 15 + gap)]
    assert [(b.start, b.stop) for b in merged([(0, 10), (11 + gap, 5)])] == [
        (0, 10),
        (11 + gap, 16 + gap),
    ]
    assert [b.stop - b.start for b in merged([(0, large), (large, 1)])] == [large, 1]
    # anchors and residuals take turns: two runs, not one request each
    turns = [(0, 9), (500_000, 7), (9, 9), (500_007, 7)]
    assert [(b.start, b.stop, b.wanted) for b in merged(turns)] == [
        (0, 18, 18),
        (500_000, 500_014, 14),
    ]
    assert merged([(5, 0)]) == []


def test_file_urls_are_paths(tmp_path: Path) -> None:
    write_cache(tmp_path / "a b.safetensors", small_cache())
    source = f"file://{tmp_path}/a%20b.safetensors"
    assert kvz("compress", source, "--codec", "zstd", cwd=tmp_path).returncode == 0
    assert kvz("verify", f"file://{tmp_path}/a%20b.kvz", cwd=tmp_path).returncode == 0
    same = kvz("compress", source, "-o", "a b.safetensors", "-f", cwd=tmp_path)
    assert_refused(same, 2, "a b.safetensors: input and output are the same file")


def test_without_obstore_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["obstore"] = None
import kvz
try:
    kvz.open("s3://bucket/key")
except kvz.SourceError as error:
    print(error)
"""
    line = "s3://bucket/key: URLs need the package obstore: pip install 'kvz[remote]'"
    assert python(code, cwd=tmp_path).stdout.strip() == line


def test_errors_show_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVZ_REMOTE_RETRIES", "0")
    with pytest.raises(SourceError, match=r"^http://127.0.0.1:1/c.kvz: connection refused") as e:
        api.open("http://user:secret@127.0.0.1:1/c.kvz")
    assert "secret" not in str(e.value)


def test_plain_http_is_for_reading_only(tmp_path: Path) -> None:
    capture = write_cache(tmp_path / "c.safetensors", small_cache())
    with pytest.raises(SourceError, match="HTTP servers can only be read from"):
        api.compress(capture, "http://127.0.0.1:1/c.kvz")


# -- round trips


def test_a_cache_goes_through_the_store_and_comes_back(tmp_path: Path, server: S3Server) -> None:
    tensors = small_cache(num_tokens=2000)
    capture = write_cache(tmp_path / "c.safetensors", tensors)
    key = "round/trip.kvz"
    settings = {"env": environment(**server.environment())}
    zstd = ("compress", "--codec", "zstd")
    made = kvz(*zstd, "c.safetensors", "-o", url(key), cwd=tmp_path, **settings)
    assert made.stderr == b""
    assert made.stdout.decode().startswith(f"s3://{BUCKET}/{key}: ")
    result = kvz("decompress", url(key), "-o", "back.safetensors", cwd=tmp_path, **settings)
    assert (result.returncode, result.stderr) == (0, b"")
    assert read_cache((tmp_path / "back.safetensors").read_bytes()) == as_read(tensors)
    result = kvz("verify", url(key), "--against", "c.safetensors", cwd=tmp_path, **settings)
    assert (result.returncode, result.stderr) == (0, b"")
    # a default output lies beside its input
    server.put("round/c.safetensors", capture.read_bytes())
    result = kvz(*zstd, url("round/c.safetensors"), cwd=tmp_path, **settings)
    assert (result.returncode, result.stderr) == (0, b"")
    assert server.get("round/c.kvz") == server.get(key)


def test_captures_are_read_and_written_by_url(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.compress(as_torch(tensors_of(3, 4096)), tmp_path / "c.kvz", "splitzip")
    monkeypatch.setattr(upload_module, "PART_NBYTES", 5 << 20)
    api.decompress(tmp_path / "c.kvz", url("big.safetensors"))
    assert server.get("big.safetensors") == restored(tmp_path / "c.kvz", tmp_path)
    # larger than a part, and its tensors than a request for a piece
    api.compress(url("big.safetensors"), url("big.kvz"), "splitzip")
    assert server.get("big.kvz") == (tmp_path / "c.kvz").read_bytes()
    api.verify(url("big.kvz"), against=url("big.safetensors"))
    with pytest.raises(ConfigError, match="input and output are the same file"):
        api.compress(url("big.safetensors"), url("big.safetensors"), overwrite=True)


def test_a_remote_file_that_is_none_of_ours_is_refused(server: S3Server) -> None:
    server.put("empty", b"")
    server.put("text", b"x" * 1000)
    with pytest.raises(api.FormatError, match=r"^s3://kvz-tests/empty: not a kvz file"):
        api.open(url("empty"))
    with pytest.raises(api.FormatError, match=r"^s3://kvz-tests/text: not a kvz file"):
        api.verify(url("text"))
    with pytest.raises(SourceError, match=r"^s3://kvz-tests/missing: no such object$"):
        api.open(url("missing"))


def test_a_model_goes_on_from_a_cache_in_the_store(server: S3Server) -> None:
    pytest.importorskip("transformers")
    from tiny_models import prompt_ids, tiny_llama

    model = tiny_llama()
    captured = api.capture(model, prompt_ids(1, 40))
    expected = api.generate_from(captured, model, 8)
    api.compress(captured, url("model/cache.kvz"))
    captured_url = url("model/cache.safetensors")
    api.decompress(url("model/cache.kvz"), captured_url)
    assert api.generate_from(url("model/cache.kvz"), model, 8) == expected
    assert api.generate_from(captured_url, model, 8) == expected


def test_an_archive_is_read_over_plain_http(archive: Stored, server: S3Server) -> None:
    with api.open(f"{server.endpoint}/{BUCKET}/{archive.key}") as opened:
        found = opened.read(2)
        assert opened.num_requests == 4
    for part in ("key", "value"):
        assert np.array_equal(found[part], archive.tensors[f"layers.2.{part}"])


def test_a_server_that_knows_no_ranges_is_refused(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(bytes(1000))

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        name = f"http://127.0.0.1:{http.server_port}/c.kvz"
        with pytest.raises(SourceError, match="does not answer requests for a range of bytes"):
            api.open(name)
        http.shutdown()


@pytest.mark.parametrize("key", ["a b", "c%20d", "e#f?g", "i+j", "k\u00fcm", "n[o]*~&="])
def test_keys_are_taken_as_they_are(key: str, server: S3Server) -> None:
    write(f"keys/{key}", key.encode())
    assert server.get(f"keys/{quote(key)}") == key.encode()
    with RemoteStream(url(f"keys/{key}")) as stream:
        assert stream.read() == key.encode()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("KVZ_REMOTE_TIMEOUT", "soon", "KVZ_REMOTE_TIMEOUT is 'soon', must be a number from 0.1"),
        ("KVZ_REMOTE_RETRIES", "-1", "KVZ_REMOTE_RETRIES is '-1', must be a number from 0"),
        ("AWS_ENDPOINT_URL", "localhost", "AWS_ENDPOINT_URL must be a URL, such as https://"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        api.open("s3://bucket/key")


# -- what is transferred


def test_opening_takes_two_requests(archive: Stored, proxy: FaultProxy) -> None:
    with api.open(archive.url) as opened:
        assert opened.metadata == {}
        assert opened.nbytes == len(archive.data)
        assert opened.nbytes_read == proxy.nbytes <= 256 << 10
        assert opened.num_requests == proxy.num_requests == 2


def test_a_small_archive_is_opened_by_one_request(
    tmp_path: Path, server: S3Server, proxy: FaultProxy
) -> None:
    capture = write_cache(tmp_path / "c.safetensors", small_cache())
    api.compress(capture, tmp_path / "c.kvz")
    server.put("small.kvz", (tmp_path / "c.kvz").read_bytes())
    with api.open(url("small.kvz")) as opened:
        key = opened.read(1)["key"]
    assert np.array_equal(key, small_cache()["layers.1.key"][1])
    assert proxy.num_requests == 1


def test_part_of_a_layer_takes_its_chunks_only(
    tmp_path: Path, server: S3Server, proxy: FaultProxy
) -> None:
    large = stored(tmp_path, server, "large.kvz", "splitzip", 40, 4096)
    proxy.clear()
    with api.open(large.url) as opened:
        found = opened.read(3, slice(0, 256))
    for part in ("key", "value"):
        assert np.array_equal(found[part], large.tensors[f"layers.3.{part}"][:, :, :256])
    assert proxy.nbytes < 0.02 * len(large.data)
    assert proxy.num_requests <= 4


def test_anchor_only_fetches_no_residual(tmp_path: Path, lynx: Stored, proxy: FaultProxy) -> None:
    expected = restored(local_copy(lynx, tmp_path), tmp_path, anchor_only=True)
    assert restored(lynx.url, tmp_path, anchor_only=True) == expected
    assert proxy.nbytes <= 0.55 * len(lynx.data)
    with Archive(tmp_path / "local.kvz") as local:
        first = local.index[local.index["kind"] == SectionKind.RESIDUAL][0]
        residuals = range(int(first["offset"]), local.trailer.index_offset)
    for exchange in proxy.exchanges:
        assert exchange.start is not None
        assert exchange.stop is not None
        assert exchange.stop <= residuals.start or exchange.start >= residuals.stop - 64


@pytest.mark.parametrize("name", ["archive", "lynx"])
def test_inspect_says_what_reading_takes(
    name: str, tmp_path: Path, proxy: FaultProxy, request: pytest.FixtureRequest
) -> None:
    from kvz.inspection import inspect

    subject: Stored = request.getfixturevalue(name)
    costs = {cost.what: cost for cost in inspect(subject.url).costs}
    assert inspect(local_copy(subject, tmp_path)).costs == ()

    def transferred(read: Callable[[Archive], object]) -> tuple[int, int]:
        proxy.clear()
        with api.open(subject.url) as opened:
            read(opened)
        return proxy.nbytes, proxy.num_requests

    def all_chunks(opened: Archive, **settings: Any) -> None:
        for chunk in opened.chunks(lambda tensor, number: True, **settings):
            shape = opened.head.tensors[chunk.tensor].chunk_shape(chunk.chunk)
            chunk.decode(np.empty(shape, np.uint16))

    measured = {
        "opening": transferred(lambda opened: None),
        "layer 0": transferred(
            lambda opened: (
                opened.announce(opened.layers[0].names),
                opened.read(0),
            )
        ),
        "all": transferred(all_chunks),
    }
    if name == "lynx":
        measured["anchors"] = transferred(lambda opened: all_chunks(opened, anchor_only=True))
    assert {c.what: (c.nbytes, c.num_requests) for c in costs.values()} == measured


@pytest.mark.parametrize("threads", [1, 5])
def test_ranges_are_right_in_any_order(threads: int, archive: Stored, proxy: FaultProxy) -> None:
    rng = np.random.default_rng(threads)
    starts = np.sort(rng.choice(len(archive.data) - 70_000, 300, replace=False))
    # without overlaps; some end where the next begins, some read what opening brought
    ends = np.minimum(starts + rng.integers(1, 70_000, 300), [*starts[1:], len(archive.data)])
    ranges = list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
    file = RemoteFile(archive.url)
    file.prefetch(ranges)

    def check(place: tuple[int, int]) -> bool:
        return file.read(*place) == archive.data[place[0] : sum(place)]

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(check, rng.permutation(ranges).tolist()))
    # each block was fetched once, and what was not announced is read all the same
    assert proxy.num_requests == 1 + len(merged(r for r in ranges if r[0] < file.nbytes - TAIL)) + (
        1 if ranges[0][0] < FRONT else 0
    )
    assert file.read(12_345, 9_999_999) == archive.data[12_345 : 12_345 + 9_999_999]
    with pytest.raises(api.DamagedFile, match=f"file ends at byte {len(archive.data)}"):
        file.read_into(len(archive.data) - 1, np.empty(2, np.uint8))
    file.close()


def test_a_stream_reads_every_byte_once(archive: Stored, proxy: FaultProxy) -> None:
    with RemoteStream(archive.url) as stream:
        assert stream.read() == archive.data
    assert proxy.nbytes == len(archive.data)


def test_a_progressive_archive_is_usable_before_it_is_complete(
    tmp_path: Path, lynx: Stored, proxy: FaultProxy
) -> None:
    proxy.bits_per_second = 400e6
    with api.ProgressiveReader(lynx.url) as reader:
        anchor = reader.anchor().read_tensor("layers.7.value")
        full = reader.full().read_tensor("layers.7.value")
    with api.open(local_copy(lynx, tmp_path)) as local:
        assert np.array_equal(anchor, local.anchor().read_tensor("layers.7.value"))
        assert np.array_equal(full, local.read_tensor("layers.7.value"))
    head, anchors, complete = reader.events
    assert [head.what, anchors.what, complete.what] == ["head", "anchor", "complete"]
    assert head.seconds < anchors.seconds < complete.seconds
    assert anchors.nbytes <= 0.55 * len(lynx.data)
