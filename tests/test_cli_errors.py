"""Exit codes, error lines, and what failures leave behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import time
import zlib
from pathlib import Path

import click
import numpy as np
import pytest
from cli_support import (
    assert_refused,
    bf16,
    command_line,
    environment,
    kvz,
    names,
    python,
    small_cache,
    write_cache,
)

from kvz.cli import options
from kvz.cli.errors import exit_code
from kvz.formats import errors

CONTEXT, OPTION = click.Context(click.Command("x")), click.Option(["--x"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``cache.safetensors`` and its archive ``cache.kvz``; not to be written to."""
    folder = tmp_path_factory.mktemp("made")
    write_cache(folder / "cache.safetensors", small_cache())
    assert kvz("compress", "cache.safetensors", "--codec", "zstd", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path) -> Path:
    """A folder of one's own with copies of the two files."""
    for name in names(made):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    return tmp_path


# -- one code for each kind of failure


def test_every_error_class_has_the_exit_code_that_is_documented() -> None:
    codes = {
        errors.KvzError: 1,
        errors.ConfigError: 2,
        errors.FormatError: 3,
        errors.NotKvzFile: 3,
        errors.NotSafetensorsFile: 3,
        errors.NotCodebookFile: 3,
        errors.UnsupportedVersion: 3,
        errors.UnsupportedFeature: 3,
        errors.UnknownCodec: 3,
        errors.UnsupportedCache: 3,
        errors.DamagedFile: 4,
        errors.TruncatedFile: 4,
        errors.ChecksumMismatch: 4,
        errors.InvalidField: 4,
        errors.LimitExceeded: 4,
        errors.MismatchError: 5,
        errors.IdentityMismatch: 5,
        errors.ContentMismatch: 5,
        errors.SourceError: 6,
        errors.ModelLoadError: 6,
    }
    defined = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.KvzError)
    }
    assert codes.keys() == defined
    assert {kind: exit_code(kind("x")) for kind in codes} == codes
    assert exit_code(FileNotFoundError()) == 6
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(ZeroDivisionError()) == 1
    assert exit_code(MemoryError()) == 1


def test_success_is_zero_with_the_report_on_stdout(work: Path) -> None:
    result = kvz("compress", "cache.safetensors", "-o", "new.kvz", "--codec", "raw", cwd=work)
    assert result.returncode == 0
    assert result.stderr == b""
    assert result.stdout.startswith(b"new.kvz: 37.6 kB -> ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no command given (see kvz --help)"),
        (["frob"], "No such command 'frob' (see kvz --help)"),
        (["compress"], "Missing argument 'SRC...' (see kvz compress --help)"),
        (
            ["compress", "x", "--frobnicate"],
            "No such option '--frobnicate' (see kvz compress --help)",
        ),
        (
            ["compress", "x", "--device", "tpu"],
            "Invalid value for '--device': 'tpu' must be auto, cpu, cuda or cuda:N "
            "(see kvz compress --help)",
        ),
        (
            ["compress", "x", "--codec-option", "level"],
            "Invalid value for '--codec-option': 'level' must be KEY=VALUE, such as axis=channel "
            "(see kvz compress --help)",
        ),
        (
            ["compress", "-"],
            "name the output with -o when the input is standard input (see kvz compress --help)",
        ),
        (
            ["compress", "cache.safetensors", "--codec", "zstd", "--codec-option", "speed=3"],
            "codec zstd has no option 'speed'; options: level",
        ),
        (
            ["compress", "cache.safetensors", "--layout", "BHD"],
            "layout 'BHD' must name every axis by a letter and tokens by one T, for example BHTD",
        ),
        (
            ["decompress", "x.kvz", "--layers", "3-1"],
            "Invalid value for '--layers': range 3-1 ends before it begins "
            "(see kvz decompress --help)",
        ),
        (
            ["decompress", "x.kvz", "--layers", "0-99999999999"],
            "Invalid value for '--layers': no model has a layer 99999999999 "
            "(see kvz decompress --help)",
        ),
        (
            ["decompress", "x.kvz", "--tokens", "5"],
            "Invalid value for '--tokens': '5' must be START:STOP, such as 0:512 "
            "(see kvz decompress --help)",
        ),
        (
            ["decompress", "x.kvz", "--tokens", "5:5"],
            "Invalid value for '--tokens': '5:5' holds no token: STOP must be greater than START "
            "(see kvz decompress --help)",
        ),
        (
            ["verify", "-", "-"],
            "standard input can be read only once (see kvz verify --help)",
        ),
        (
            ["bench", "x", "--codec", "lz4"],
            "Invalid value for '--codec': 'lz4' is none of raw, zstd, splitzip, gaac, lynx, "
            "pnmix (see kvz bench --help)",
        ),
        (
            ["capture", "model", "-o", "x.safetensors"],
            "give the prompt with either --prompt or --prompt-file (see kvz capture --help)",
        ),
        (
            ["capture", "model", "-o", "x.kvz", "--prompt", "hello"],
            "Invalid value for '-o' / '--output': 'x.kvz' must end in .safetensors "
            "(kvz compress makes the archive of it) (see kvz capture --help)",
        ),
    ],
)
def test_a_command_line_that_makes_no_sense_is_2(
    made: Path, arguments: list[str], line: str
) -> None:
    before = names(made)
    assert_refused(kvz(*arguments, cwd=made), 2, line)
    assert names(made) == before


@pytest.mark.parametrize("text", ["-1", "1-", "a", "", "1,,2", "1.5", "-3-4", "\u0661"])
def test_garbage_for_layers_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        options.parse_layers(CONTEXT, OPTION, text)
    assert refused.value.message == f"{text!r} must be layers or ranges of them, such as 0-3,7"


@pytest.mark.parametrize("text", ["-5:5", ":", "a:b", "1:2:3", "1-2", "\u0661:5"])
def test_garbage_for_tokens_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        options.parse_tokens(CONTEXT, OPTION, text)
    assert refused.value.message == f"{text!r} must be START:STOP, such as 0:512"


def test_ranges_of_layers_include_both_ends_and_those_of_tokens_do_not() -> None:
    assert options.parse_layers(CONTEXT, OPTION, "0-2,7, 1") == frozenset({0, 1, 2, 7})
    assert options.parse_tokens(CONTEXT, OPTION, "5:9") == slice(5, 9)
    assert options.parse_tokens(CONTEXT, OPTION, "5:") == slice(5, None)
    assert options.parse_tokens(CONTEXT, OPTION, ":9") == slice(None, 9)


def test_layers_and_tokens_that_the_archive_does_not_have_are_2(work: Path) -> None:
    before = names(work)
    result = kvz("decompress", "cache.kvz", "-o", "part", "--layers", "1,7", cwd=work)
    assert_refused(
        result, 2, "cache.kvz: no key or value of layer 7 in the archive: it holds layers 0 to 2"
    )
    assert names(work) == before


def test_a_file_that_is_no_archive_is_3(work: Path) -> None:
    (work / "notes.txt").write_text("some notes\n")
    for command in ("decompress", "verify", "inspect"):
        assert_refused(
            kvz(command, "notes.txt", cwd=work),
            3,
            "notes.txt: not a kvz file (the first bytes are not the kvz magic)",
        )


def test_inspecting_a_capture_is_3_and_says_what_to_do(work: Path) -> None:
    assert_refused(
        kvz("inspect", "cache.safetensors", cwd=work),
        3,
        "cache.safetensors: is a safetensors file, not a kvz archive; "
        "make one with: kvz compress cache.safetensors",
    )


def test_a_source_that_is_no_safetensors_file_is_3_and_leaves_no_output(work: Path) -> None:
    (work / "noise").write_bytes(bytes(range(256)))
    before = names(work)
    result = kvz("compress", "noise", "-o", "out.kvz", cwd=work)
    assert result.returncode == 3
    assert result.stderr.startswith(b"kvz: error: noise: not a safetensors file: ")
    assert result.stderr.count(b"\n") == 1
    assert names(work) == before


def test_an_archive_of_the_future_is_3(work: Path) -> None:
    data = bytearray((work / "cache.kvz").read_bytes())
    data[12:16] = struct.pack("<HH", 9, 0)
    data[60:64] = struct.pack("<I", zlib.crc32(data[:60]))
    (work / "future.kvz").write_bytes(data)
    assert_refused(
        kvz("inspect", "future.kvz", cwd=work),
        3,
        "future.kvz: file needs a reader of format 9.0, this one reads up to 0.2: update kvz",
    )


def test_a_flipped_byte_is_4_and_leaves_no_output(work: Path) -> None:
    data = bytearray((work / "cache.kvz").read_bytes())
    listed = json.loads(kvz("inspect", "cache.kvz", "--sections", "--json", cwd=work).stdout)
    section = next(s for s in listed["sections"] if s["tensor"] == "layers.1.key")
    data[section["offset"] + section["length"] // 2] ^= 0x10
    (work / "bad.kvz").write_bytes(data)
    before = names(work)
    line = "bad.kvz: chunk 0 of layers.1.key: checksum does not match: the file is damaged"
    assert_refused(kvz("decompress", "bad.kvz", cwd=work), 4, line)
    assert names(work) == before


def test_a_truncated_archive_is_4_and_leaves_no_output(work: Path) -> None:
    (work / "short.kvz").write_bytes((work / "cache.kvz").read_bytes()[:-1])
    before = names(work)
    line = (
        "short.kvz: the file has no trailer: it is incomplete (a writer was interrupted, or the "
        "end was cut off)"
    )
    assert_refused(kvz("decompress", "short.kvz", cwd=work), 4, line)
    assert_refused(kvz("inspect", "short.kvz", cwd=work), 4, line)
    assert names(work) == before


def test_contents_that_differ_are_5(work: Path) -> None:
    tensors = small_cache()
    tensors["layers.2.value"][1][0, 1, 5, 3] ^= 1
    write_cache(work / "other.safetensors", tensors)
    result = kvz("verify", "cache.kvz", "--against", "other.safetensors", cwd=work)
    assert result.returncode == 5
    # [outer, token, channel]; outer counts batch and heads
    assert b"cache.kvz: layers.2.value differs at element " in result.stderr
    assert result.stdout == b""


@pytest.mark.parametrize("command", ["compress", "decompress", "verify", "inspect", "calibrate"])
def test_a_missing_file_is_6(tmp_path: Path, command: str) -> None:
    extra = ["-o", "out"] if command in ("compress", "decompress", "calibrate") else []
    result = kvz(command, "gone", *extra, cwd=tmp_path)
    assert_refused(result, 6, "gone: No such file or directory")
    assert names(tmp_path) == set()


def test_a_missing_model_is_6(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = kvz("capture", "./nowhere", "-o", "x.safetensors", "--prompt", "a", cwd=tmp_path)
    assert_refused(result, 6, "cannot load model ./nowhere: no such folder")


def test_an_unexpected_failure_is_1_in_one_line_unless_debugging(tmp_path: Path) -> None:
    program = (
        "import kvz, os\n"
        "from kvz.cli import main\n"
        "def broken(*a, **k): raise {error}\n"
        "kvz.verify = kvz.decompress = broken\n"
        "main(['decompress', 'x.kvz'])\n"
    )
    result = python(program.format(error="ZeroDivisionError('by zero')"), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        "kvz: error: unexpected ZeroDivisionError: by zero "
        "(please report it; KVZ_DEBUG=1 shows where it happened)\n"
    )
    result = python(program.format(error="MemoryError()"), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "kvz: error: out of memory; fewer --threads need less\n"
    debug = "import os; os.environ['KVZ_DEBUG'] = '1'\n"
    result = python(debug + program.format(error="ZeroDivisionError('by zero')"), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    name = "a\x1b[31m\nb"
    result = kvz("inspect", name, cwd=tmp_path)
    assert_refused(result, 6, "a\\x1b[31m\\nb: No such file or directory")


# -- outputs


def test_an_existing_output_is_kept_without_f_and_replaced_with_it(work: Path) -> None:
    (work / "out").write_bytes(b"precious")
    for command in (
        ["compress", "cache.safetensors", "--codec", "raw"],
        ["decompress", "cache.kvz"],
        ["calibrate", "cache.safetensors"],
    ):
        result = kvz(*command, "-o", "out", cwd=work)
        assert_refused(result, 6, "out: exists already; use -f to overwrite it")
        assert (work / "out").read_bytes() == b"precious"
    before = names(work)
    assert kvz("decompress", "cache.kvz", "-o", "out", "-f", cwd=work).returncode == 0
    assert (work / "out").read_bytes() != b"precious"
    assert names(work) == before


def test_an_output_that_failed_leaves_the_existing_file_as_it_was(work: Path) -> None:
    (work / "short.kvz").write_bytes((work / "cache.kvz").read_bytes()[:-100])
    (work / "out").write_bytes(b"precious")
    before = names(work)
    assert kvz("decompress", "short.kvz", "-o", "out", "-f", cwd=work).returncode == 4
    assert (work / "out").read_bytes() == b"precious"
    assert names(work) == before


@pytest.mark.parametrize(
    ("command", "name"),
    [("compress", "cache.safetensors"), ("decompress", "cache.kvz")],
)
def test_input_as_output_is_refused_even_with_f(work: Path, command: str, name: str) -> None:
    (work / "link").symlink_to(name)
    data = (work / name).read_bytes()
    for output in (name, "link"):
        result = kvz(command, name, "-o", output, "-f", cwd=work)
        assert_refused(result, 2, f"{output}: input and output are the same file")
        assert (work / name).read_bytes() == data


def test_an_output_in_a_missing_folder_is_6(work: Path) -> None:
    result = kvz("compress", "cache.safetensors", "-o", "no/x.kvz", "--codec", "raw", cwd=work)
    assert_refused(result, 6, "no/x.kvz: no such folder: no")


def test_a_full_disk_is_6_and_names_the_output(work: Path) -> None:
    def no_large_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    before = names(work)
    for command in (
        ["compress", "cache.safetensors", "-o", "out", "--codec", "raw"],
        ["decompress", "cache.kvz", "-o", "out"],
    ):
        result = kvz(*command, cwd=work, preexec_fn=no_large_files)
        assert_refused(result, 6, "out: File too large")
        assert names(work) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_6(work: Path) -> None:
    for command in (
        ["compress", "cache.safetensors", "-o", "-", "--codec", "raw"],
        ["inspect", "cache.kvz"],
    ):
        with open("/dev/full", "wb") as full:
            result = kvz(*command, cwd=work, stdout=full)
        assert_refused(result, 6, "<stdout>: No space left on device")


# -- interruption


def start_long_compress(folder: Path, *extra: str) -> subprocess.Popen[bytes]:
    """A compress that takes half a minute, once its output has been begun."""
    write_cache(folder / "large.safetensors", {"layers.0.key": ("BF16", bf16((1, 8, 65536, 32)))})
    process = subprocess.Popen(
        command_line(
            *("compress", "large.safetensors", "-o", "out.kvz", "--codec", "zstd"),
            *("--codec-option", "level=22", *extra),
        ),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # an interactive shell's children have it, those of a background job do not
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 30
    while not any(name.endswith(".part") for name in names(folder)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("threads", ["1", "2"])
def test_ctrl_c_is_130_and_leaves_no_file(tmp_path: Path, threads: str) -> None:
    process = start_long_compress(tmp_path, "--threads", threads)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, b"", b"kvz: interrupted\n")
    assert names(tmp_path) == {"large.safetensors"}


def test_termination_is_143_and_leaves_no_file(tmp_path: Path) -> None:
    process = start_long_compress(tmp_path, "--threads", "1")
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (143, b"", b"")
    assert names(tmp_path) == {"large.safetensors"}


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "cache.kvz", "--sections"],
        ["verify", "cache.kvz"],
        ["compress", "cache.safetensors", "-o", "-", "--codec", "raw"],
        ["decompress", "cache.kvz", "-o", "-"],
    ],
)
def test_a_closed_pipe_is_silent(work: Path, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = kvz(*command, cwd=work, stdout=writer)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_binary_data_is_not_written_to_a_terminal(work: Path) -> None:
    ours, theirs = os.openpty()
    try:
        result = kvz("compress", "cache.safetensors", "-o", "-", cwd=work, stdout=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert_refused(
        result, 2, "refusing to write to a terminal: use a file or a pipe (see kvz compress --help)"
    )


def test_verify_goes_on_after_a_bad_file_and_ends_with_the_worst_code(work: Path) -> None:
    data = (work / "cache.kvz").read_bytes()
    (work / "short.kvz").write_bytes(data[:-64])
    (work / "notes.txt").write_text("some notes")
    result = kvz("verify", "notes.txt", "short.kvz", "cache.kvz", cwd=work)
    assert result.returncode == 4
    assert (
        result.stdout.decode()
        == f"cache.kvz: ok, 7 tensors, 7 sections, {len(data) / 1e3:.1f} kB\n"
    )
    lines = result.stderr.decode().splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["kvz", "error", "notes.txt"],
        ["kvz", "error", "short.kvz"],
    ]
    result = kvz("verify", "cache.kvz", "gone", "short.kvz", "--json", cwd=work)
    assert result.returncode == 6
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert [file["exit_code"] for file in document["files"]] == [0, 6, 4]
    assert document["files"][1]["error"] == "gone: No such file or directory"
    assert np.unique([file["path"] for file in document["files"]]).size == 3
