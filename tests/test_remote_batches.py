"""Many archives at once: listed, verified, and compressed by runs that can be taken up again."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import command_line, environment, names, small_cache, write_cache
from fault_proxy import FaultProxy
from remote_support import proxy, server, url
from s3_server import S3Server, s3_server

import kvz as api
from kvz.batches import destinations
from kvz.cli import errors, main
from kvz.finding import Found, find
from kvz.formats.errors import ConfigError, SourceError

__all__ = ["proxy", "s3_server", "server"]

NUM_TOKENS = 96


def metadata(num_tokens: int, model_type: str = "llama") -> dict[str, str]:
    """What a capture says of its model and tokens."""
    document = {
        "schema": 1,
        "identity": {"config": {"model_type": model_type}},
        "tokens": {"batch": 1, "count": num_tokens},
        "layers": {},
        "shard": {},
    }
    return {"kvz": json.dumps(document)}


def write_captures(folder: Path, *relative: str) -> Path:
    """Captures of different values and equal shapes, under their names below ``folder``."""
    for seed, name in enumerate(relative):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cache(path, small_cache(NUM_TOKENS, seed=10 * seed), metadata(NUM_TOKENS))
    return folder


Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(errors, "clean_up_on_termination", lambda: None)

    def call(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return (ended.value.code, *capsys.readouterr())

    return call


def documents(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


def archive_bytes(capture: Path, codec: str = "splitzip") -> bytes:
    path = capture.with_suffix(".made")
    api.compress(capture, path, codec, threads=1, overwrite=True)
    return path.read_bytes()


def damaged(data: bytes) -> dict[str, tuple[bytes, int, str]]:
    """Objects that are no archives: their bytes, exit code, and what is said of them."""
    return {
        "cut": (data[:-1], 4, "incomplete"),
        "empty": (b"", 3, "not a kvz file"),
        "other": (b"text" * 100, 3, "not a kvz file"),
        "head": (data[:100] + bytes([data[100] ^ 1]) + data[101:], 4, "checksum"),
    }


# -- kvz ls


def test_ls_tells_of_each_archive_what_its_head_says(
    server: S3Server, run: Run, tmp_path: Path
) -> None:
    write_captures(tmp_path, "a.safetensors")
    exact, lossy = (archive_bytes(tmp_path / "a.safetensors", c) for c in ("splitzip", "lynx"))
    for key, data in {"b": exact, "deep/er/a": lossy}.items():
        server.put(f"ls/{key}.kvz", data)
    server.put("ls/notes.txt", b"no archive")
    server.put("ls-other/x.kvz", exact)
    code, out, err = run("ls", url("ls"), "--json")
    assert (code, err) == (0, "")
    first, second = documents(out)
    # six tensors [1, 2, 96, 16] of two bytes, and 96 tokens of eight
    original = 6 * 2 * NUM_TOKENS * 16 * 2 + NUM_TOKENS * 8
    assert first == {
        "location": url("ls/b.kvz"),
        "relative": "b.kvz",
        "nbytes": len(exact),
        "original_nbytes": original,
        "ratio": original / len(exact),
        "codec": "splitzip",
        "model_type": "llama",
        "num_tokens": NUM_TOKENS,
        "lossy": "",
        "error": None,
        "exit_code": 0,
    }
    assert second["relative"] == "deep/er/a.kvz"
    assert (second["codec"], second["lossy"], second["nbytes"]) == ("lynx", "lynx", len(lossy))
    shown = run("ls", url("ls/"))[1].splitlines()
    assert [line.split()[0] for line in shown] == ["archive", "b.kvz", "deep/er/a.kvz"]
    assert shown[1].split()[-4:] == ["splitzip", "llama", "96", "lossless"]
    assert shown[2].endswith("lossy: lynx")


def test_ls_lists_broken_archives_with_the_reason_and_ends_with_the_worst_code(
    server: S3Server, run: Run, tmp_path: Path
) -> None:
    write_captures(tmp_path, "a.safetensors")
    data = archive_bytes(tmp_path / "a.safetensors")
    broken = damaged(data)
    server.put("broken/good.kvz", data)
    for name, (content, _, _) in broken.items():
        server.put(f"broken/{name}.kvz", content)
    code, out, err = run("ls", url("broken"), "--json")
    assert (code, err) == (4, "kvz: error: 4 of 5 archives cannot be used\n")
    listed = {document["relative"][:-4]: document for document in documents(out)}
    assert list(listed) == sorted([*broken, "good"])
    assert listed["good"]["exit_code"] == 0
    for name, (content, expected, reason) in broken.items():
        assert listed[name]["exit_code"] == expected
        assert listed[name]["error"].startswith(f"{url(f'broken/{name}.kvz')}: ")
        assert reason in listed[name]["error"]
        assert (listed[name]["nbytes"], listed[name]["ratio"]) == (len(content), None)
    code, out, _ = run("ls", url("broken"))
    assert code == 4
    assert len(out.splitlines()) == 6
    assert "checksum" in out


def test_ls_of_nothing_is_no_error_but_of_no_bucket_it_is(server: S3Server, run: Run) -> None:
    empty = url("no/such/prefix")
    assert run("ls", empty) == (0, "", f"kvz: note: {empty}: no archives\n")
    code, out, err = run("ls", "s3://no-such-bucket/x")
    assert (code, out) == (6, "")
    assert err.startswith("kvz: error: s3://no-such-bucket/x: ")


def test_ls_takes_two_requests_an_archive_and_one_to_find_them(
    server: S3Server, proxy: FaultProxy, run: Run, tmp_path: Path
) -> None:
    # 1.6 MB each: more than an end and a front together
    write_cache(tmp_path / "a.safetensors", small_cache(8192), metadata(8192))
    data = archive_bytes(tmp_path / "a.safetensors", "raw")
    assert len(data) > 1_000_000
    for i in range(4):
        server.put(f"requests/{i}.kvz", data)
    assert run("ls", url("requests"))[0] == 0
    assert proxy.num_requests <= 1 + 2 * 4
    assert proxy.nbytes < 4 * 200_000 + 10_000


def test_ls_of_a_folder_equals_ls_of_a_prefix(server: S3Server, run: Run, tmp_path: Path) -> None:
    write_captures(tmp_path, "x/a.safetensors", "x/y/b.safetensors")
    assert run("compress", "x", "--out-dir", "both", "--codec", "zstd")[0] == 0
    assert run("compress", "x", "--out-dir", url("both"), "--codec", "zstd")[0] == 0
    local, remote = run("ls", "both"), run("ls", url("both"))
    assert local == remote
    assert len(local[1].splitlines()) == 3


# -- finding


def test_patterns_match_objects_as_they_match_files(server: S3Server, tmp_path: Path) -> None:
    keys = ["p/1.kvz", "p/a/1.kvz", "p/a/2.kvz", "p/a/b/1.kvz", "p/a/b/1.txt"]
    for key in keys:
        server.put(key, b"x")
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    expected = {
        "p/": keys[:4],
        "p/*": keys[:1],
        "p/?/1.kvz": keys[1:2],
        "p/**/1.kvz": [keys[0], keys[1], keys[3]],
        "p/a/*/1.*": keys[3:],
        "p/*.txt": [],
    }
    for pattern, wanted in expected.items():
        remote = find(url(pattern), ".kvz")
        local = find(str(tmp_path / pattern), ".kvz")
        assert sorted(one.location for one in remote) == sorted(map(url, wanted)), pattern
        assert sorted(one.location for one in local) == sorted(str(tmp_path / k) for k in wanted)
        assert {one.relative for one in remote} == {one.relative for one in local}
        assert all(one.nbytes == 1 for one in (*remote, *local))


# -- batches


def test_a_batch_writes_what_single_runs_would(server: S3Server, run: Run, tmp_path: Path) -> None:
    write_captures(tmp_path / "c", "a.safetensors", "d/b.safetensors")
    code, out, err = run(
        *("compress", "c", "--out-dir", url("batch/"), "--codec", "splitzip", "--json")
    )
    assert code == 0
    assert err.startswith("2 files: 2 compressed; ")
    for document, key in zip(documents(out), ("a", "d/b"), strict=True):
        expected = archive_bytes(tmp_path / "c" / f"{key}.safetensors")
        assert server.get(f"batch/{key}.kvz") == expected
        assert document["status"] == "compressed"
        assert document["source"] == f"c/{key}.safetensors"
        assert document["destination"] == url(f"batch/{key}.kvz")
        assert (document["stored_nbytes"], document["exit_code"]) == (len(expected), 0)


def test_a_batch_reads_objects_too(server: S3Server, run: Run, tmp_path: Path) -> None:
    write_captures(tmp_path, "a.safetensors", "b.safetensors")
    for name in ("a", "b"):
        server.put(f"from/x/{name}.safetensors", (tmp_path / f"{name}.safetensors").read_bytes())
    code, _, err = run("compress", url("from/*/b*"), url("from/x/"), "--out-dir", "out")
    assert (code, err) == (0, "")
    # below what the first source that names it says
    assert names(tmp_path / "out") == {"a.kvz", "x"}
    for archive, name in (("out/a.kvz", "a"), ("out/x/b.kvz", "b")):
        api.verify(tmp_path / archive, against=tmp_path / f"{name}.safetensors", threads=1)


def test_a_killed_batch_is_taken_up_where_it_was(
    server: S3Server, proxy: FaultProxy, run: Run, tmp_path: Path
) -> None:
    write_captures(tmp_path / "c", *(f"{i}.safetensors" for i in range(5)))
    arguments = ("compress", "c", "--out-dir", url("killed"), "--codec", "zstd", "--jobs", "1")
    process = subprocess.Popen(
        command_line(*arguments), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL
    )

    def kill(number: int, method: str, path: str) -> None:
        if method == "PUT" and "/2.kvz" in path:
            process.kill()
            process.wait()
            raise ConnectionResetError

    proxy.before = kill
    assert process.wait(60) == -signal.SIGKILL
    archives = [server.get(f"killed/{i}.kvz") for i in range(5)]
    assert [data is not None for data in archives] == [True, True, False, False, False]
    proxy.clear()
    code, out, err = run(*arguments, "--json")
    assert code == 0
    assert [d["status"] for d in documents(out)] == ["kept"] * 2 + ["compressed"] * 3
    assert err.startswith("5 files: 3 compressed, 2 kept; ")
    written = [e.path.partition("?")[0] for e in proxy.exchanges if e.method == "PUT"]
    assert [path[-5:] for path in written] == ["2.kvz", "3.kvz", "4.kvz"]
    for i in range(5):
        expected = archive_bytes(tmp_path / "c" / f"{i}.safetensors", "zstd")
        assert server.get(f"killed/{i}.kvz") == expected
    proxy.clear()
    code, out, _ = run(*arguments)
    assert (code, out.splitlines()[-1].partition(",")[0]) == (0, "5 files: 5 kept")
    assert {e.method for e in proxy.exchanges} == {"GET"}


def test_what_is_there_is_kept_only_if_it_is_whole_and_of_the_source(
    server: S3Server, run: Run, tmp_path: Path
) -> None:
    folder = write_captures(tmp_path / "c", "a.safetensors")
    whole = archive_bytes(folder / "a.safetensors")
    shapes = write_cache(tmp_path / "s.safetensors", small_cache(95), metadata(NUM_TOKENS))
    facts = write_cache(tmp_path / "m.safetensors", small_cache(NUM_TOKENS), metadata(95))
    wrong = {
        "cut": (whole[:-1], "is not a whole archive (the file has no trailer"),
        "text": (b"text" * 100, "is not a whole archive (not a kvz file"),
        "shape": (archive_bytes(shapes), "(tensor input_ids differs)"),
        "metadata": (archive_bytes(facts), "(the metadata differ)"),
        "codec": (archive_bytes(folder / "a.safetensors", "zstd"), "(another codec or other"),
    }
    for name, (data, reason) in wrong.items():
        server.put(f"wrong/{name}/a.kvz", data)
        arguments = ("compress", "c", "--out-dir", url(f"wrong/{name}"), "--codec", "splitzip")
        code, out, err = run(*arguments, "--json")
        assert code == 6
        assert err.startswith(f"kvz: error: {url(f'wrong/{name}/a.kvz')}: exists already and is ")
        assert reason in err
        assert "use -f to replace it" in err
        assert documents(out)[0]["status"] == "failed"
        assert server.get(f"wrong/{name}/a.kvz") == data
        assert run(*arguments, "-f")[0] == 0
        assert server.get(f"wrong/{name}/a.kvz") == whole


@pytest.mark.parametrize("codec", ["gaac", "lynx", "zstd"])
def test_a_second_run_keeps_what_the_first_one_wrote(codec: str, run: Run, tmp_path: Path) -> None:
    write_captures(tmp_path / "c", "a.safetensors")
    arguments = ("compress", "c", "--out-dir", "o", "--codec", codec)
    assert run(*arguments)[0] == 0
    before = (tmp_path / "o/a.kvz").stat().st_ino
    assert run(*arguments)[0] == 0
    assert (tmp_path / "o/a.kvz").stat().st_ino == before
    assert run(*arguments, "-f")[1].startswith("o/a.kvz: 37.6 kB -> ")
    assert (tmp_path / "o/a.kvz").stat().st_ino != before


def test_a_file_that_fails_does_not_stop_the_others(
    server: S3Server, run: Run, tmp_path: Path
) -> None:
    folder = write_captures(tmp_path / "c", "a.safetensors", "z.safetensors")
    (folder / "b.safetensors").write_bytes(b"no capture")
    (folder / "k.safetensors").write_bytes((folder / "a.safetensors").read_bytes()[:-1])
    code, out, err = run(
        *("compress", "c", "missing", url("none/"), "--out-dir", url("fail"), "--json")
    )
    # missing file or empty prefix 6, cut capture 4, no capture 3
    assert code == 6
    found = {d["source"]: (d["status"], d["exit_code"]) for d in documents(out)}
    assert found == {
        url("none/"): ("failed", 6),
        "c/a.safetensors": ("compressed", 0),
        "c/b.safetensors": ("failed", 3),
        "c/k.safetensors": ("failed", 4),
        "c/z.safetensors": ("compressed", 0),
        "missing": ("failed", 6),
    }
    assert "kvz: error: missing: No such file or directory" in err
    assert err.splitlines()[-1].startswith("6 files: 2 compressed, 4 failed; ")
    assert run("compress", "c", "--out-dir", url("fail"))[0] == 4


def test_a_terminated_batch_leaves_no_unfinished_file(tmp_path: Path) -> None:
    write_cache(tmp_path / "a.safetensors", small_cache(200_000))
    process = subprocess.Popen(
        command_line(
            *("compress", "a.safetensors", "--out-dir", "o", "--threads", "1"),
            *("--codec", "zstd", "--codec-option", "level=19"),
        ),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 30
    while not (tmp_path / "o").is_dir() or not names(tmp_path / "o"):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.terminate()
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 128 + signal.SIGTERM
    assert names(tmp_path / "o") == set()


MEANINGLESS = {
    "several SRC, and --jobs, need --out-dir": ("a", "b"),
    "--out-dir takes files, and neither -o nor --timings": ("-", "--out-dir", "o"),
    "a/x and b/x would both become o/x.kvz: name their common folder, or compress them apart": (
        *("a/x", "b/x", "--out-dir", "o"),
    ),
    "http://h/o: HTTP servers cannot be asked what they hold; name each file": (
        *("a", "--out-dir", "http://h/o"),
    ),
}


@pytest.mark.parametrize("message", MEANINGLESS)
def test_a_batch_that_makes_no_sense_is_refused(message: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run("compress", *MEANINGLESS[message])
    assert (code, out) == (2, "")
    assert err.removesuffix(" (see kvz compress --help)\n").rstrip() == f"kvz: error: {message}"
    assert names(tmp_path) == set()


@pytest.mark.parametrize("relative", ["../x.safetensors", "a/../../x.safetensors", "/x"])
def test_no_archive_goes_elsewhere_because_of_a_key(relative: str) -> None:
    for folder in ("out", url("out")):
        with pytest.raises(ConfigError, match=r"would not go below"):
            destinations([Found(url("x"), relative)], folder)


def test_a_file_is_no_place_for_archives(run: Run, tmp_path: Path) -> None:
    (tmp_path / "o").write_bytes(b"kept")
    code, out, err = run("compress", "a", "--out-dir", "o")
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith("kvz: error: o is a file; archives go into a folder")
    assert (tmp_path / "o").read_bytes() == b"kept"


# -- kvz verify


def test_verify_checks_all_archives_of_a_prefix(server: S3Server, run: Run, tmp_path: Path) -> None:
    write_captures(tmp_path, "a.safetensors")
    data = archive_bytes(tmp_path / "a.safetensors")
    middle = len(data) // 2
    server.put("check/a.kvz", data)
    server.put("check/n/bad.kvz", data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    server.put("check/z.kvz", data)
    code, out, err = run("verify", url("check/"))
    assert code == 4
    assert [line.partition(": ")[0] for line in out.splitlines()] == [
        url("check/a.kvz"),
        url("check/z.kvz"),
        "3 files",
    ]
    assert out.endswith(": 2 ok, 1 not\n")
    assert err.startswith(f"kvz: error: {url('check/n/bad.kvz')}: ")
    code, out, _ = run("verify", url("check/"), "--json")
    assert code == 4
    assert [f["exit_code"] for f in json.loads(out)["files"]] == [0, 4, 0]
    assert run("verify", url("check/?.kvz"))[0] == 0
    empty = url("check/none/")
    assert run("verify", empty) == (6, "", f"kvz: error: {empty}: holds no .kvz file\n")


def test_nothing_found_is_told_apart_from_what_cannot_be_listed(server: S3Server) -> None:
    assert find(url("nothing/"), ".kvz") == []
    with pytest.raises(SourceError, match=r"^s3://no-such-bucket/: "):
        find("s3://no-such-bucket/", ".kvz")
