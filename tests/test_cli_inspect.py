"""``kvz inspect`` and the accounting behind it, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import Tensors, kvz, small_cache, write_cache

from kvz.formats.codecs import stream_nbytes
from kvz.formats.errors import InvalidField
from kvz.formats.ids import CODEC_NAMES


def inspected(folder: Path, tensors: Tensors, *compress: str, inspect: tuple[str, ...] = ()) -> Any:
    """The JSON report on an archive of the tensors."""
    write_cache(folder / "c.safetensors", tensors)
    made = kvz("compress", "c.safetensors", "-f", *compress, cwd=folder)
    assert made.returncode == 0, made.stderr
    result = kvz("inspect", "c.kvz", "--json", *inspect, cwd=folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def constant(exponent: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.full(shape, exponent << 7, np.uint16)


def bytes_by_stream(codec: Any) -> dict[str, int]:
    return {use["name"]: use["nbytes"] for use in codec["streams"]}


def test_the_bytes_of_gaac_follow_from_the_tags(tmp_path: Path) -> None:
    # 2 heads of 60 tokens of 12 channels, all with one exponent
    array = constant(100, (1, 2, 60, 12))
    found = inspected(tmp_path, {"layers.0.key": ("BF16", array)}, inspect=("--tags",))
    (codec,) = found["codecs"]
    # 8 tiles of 12 groups in each head, the last tile with 4 tokens only; no escapes at all;
    # tags: 2 bits of 12 columns are 2 bytes each in 16 tiles; one block of escapes
    assert bytes_by_stream(codec) == {
        # a base for each head and window, and the byte that says so
        "codebooks": 1 + 3 * 2,
        "sign_mantissa": 2 * 60 * 12,
        "low": 2 * 2 * 8 * 12,
        "tags": 16 * 2 * 2,
        "offsets": 4,
        # 4 bytes of offsets end 4 after a multiple of 16; escapes would start at the next one
        "padding": 12,
    }
    assert codec["tags"] == {
        "num_groups": 2 * 8 * 12,
        "shares": {"2-bit": 1.0, "3-bit": 0.0, "4-bit": 0.0, "raw": 0.0},
    }
    assert codec["bits_per_element"] == pytest.approx(8 * codec["stored_nbytes"] / array.size)


def test_tag_shares_count_each_kind_of_group(tmp_path: Path) -> None:
    # per channel: 4,096 tokens, mostly exponent 100; some groups of 8 hold one other exponent
    array = constant(100, (1, 1, 4096, 4))
    array[0, 0, 0:40:8, 0] = 105 << 7  # 5 groups need 3 bits, wherever the window of 8 begins
    array[0, 0, 0:24:8, 1] = 112 << 7  # 3 groups need 4 bits
    array[0, 0, 0:16:8, 2] = 220 << 7  # 2 groups need all bits
    found = inspected(
        *(tmp_path, {"layers.0.key": ("BF16", array)}),
        *("--codec-option", "windows=2/3/4"),
        inspect=("--tags",),
    )
    (codec,) = found["codecs"]
    shares = codec["tags"]["shares"]
    groups = 512 * 4
    assert codec["tags"]["num_groups"] == groups
    assert {name: share * groups for name, share in shares.items()} == {
        "2-bit": groups - 10,
        "3-bit": 5,
        "4-bit": 3,
        "raw": 2,
    }
    # a byte for the third plane, one more for the fourth, four more for a raw group
    assert bytes_by_stream(codec)["escapes"] == 5 * 1 + 3 * 2 + 2 * 6


def test_without_the_narrow_window_the_third_plane_is_a_stream(tmp_path: Path) -> None:
    array = constant(100, (1, 1, 64, 16))
    found = inspected(
        *(tmp_path, {"layers.0.key": ("BF16", array)}),
        *("--codec-option", "windows=3/4"),
        inspect=("--tags",),
    )
    (codec,) = found["codecs"]
    assert bytes_by_stream(codec)["plane2"] == 8 * 16
    assert codec["tags"]["shares"] == {"3-bit": 1.0, "4-bit": 0.0, "raw": 0.0}


def test_the_bytes_of_splitzip_count_its_escapes(tmp_path: Path) -> None:
    array = constant(100, (1, 1, 128, 16))
    # 20 exponents besides the one of almost all elements: 5 of them find no place among 16
    array[0, 0, :20, 0] = (np.arange(20, dtype=np.uint16) + 150) << 7
    found = inspected(tmp_path, {"layers.0.key": ("BF16", array)}, "--codec", "splitzip")
    (codec,) = found["codecs"]
    assert bytes_by_stream(codec) == {
        "codebooks": 16,
        "sign_mantissa": 2048,
        "codes": 1024,
        "offsets": 8,
        "escapes": 5 * 3,
        # before the positions (8 of 16 bytes used), between positions and exponents (10 of 16)
        "padding": 8 + 6,
    }


@pytest.mark.parametrize("num_elements", [1, 31, 8192, 8193])
def test_the_length_of_a_splitzip_section_gives_its_escapes(num_elements: int) -> None:
    def after(position: int, nbytes: int) -> int:
        return -(-position // 16) * 16 + nbytes

    fixed = after(after(num_elements, -(-num_elements // 2)), 4 * (-(-num_elements // 8192) + 1))
    counts = range(min(num_elements, 200) + 1)
    lengths = [after(after(fixed, 2 * n), n) for n in counts]
    shape = (1, num_elements, 1)
    for n, length in zip(counts, lengths, strict=True):
        assert stream_nbytes("splitzip", {}, shape, np.array([length])).get("escapes", 0) == 3 * n
    together = stream_nbytes("splitzip", {}, shape, np.array(lengths))
    assert together["escapes"] == 3 * sum(counts)


def test_chunks_that_would_grow_count_as_raw(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 16, (1, 1, 64, 16)).astype(np.uint16)
    found = inspected(tmp_path, {"layers.0.key": ("BF16", noise)}, "--codec", "zstd")
    assert bytes_by_stream(found["codecs"][0]) == {"raw": noise.nbytes}


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_bytes_of_all_parts_are_the_file(tmp_path: Path, codec: str) -> None:
    # 2 MiB in one tensor: several chunks, the last one shorter
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1, 2, 9000, 64), np.float32).view(np.uint32) >> 16
    tensors = {**small_cache(), "layers.3.key": ("BF16", values.astype(np.uint16))}
    # nothing says how these keys were rotated or what their queries are
    options = ["rope=half", "criterion=k_norm"] if codec == "pnmix" else []
    given = [word for option in options for word in ("--codec-option", option)]
    found = inspected(tmp_path, tensors, "--codec", codec, *given, inspect=("--sections",))
    size = (tmp_path / "c.kvz").stat().st_size
    parts = [use["nbytes"] for c in found["codecs"] for use in c["streams"]]
    assert found["nbytes"] == size
    assert sum(parts) + sum(found["overhead"].values()) == size
    assert sum(parts) == sum(section["length"] for section in found["sections"])
    original = sum(array.nbytes for _, array in tensors.values())
    assert found["original_nbytes"] == original
    assert found["ratio"] == pytest.approx(original / size)
    elements = sum(array.size for _, array in tensors.values())
    assert found["bits_per_element"] == pytest.approx(8 * size / elements)
    assert sum(1 for s in found["sections"] if s["tensor"] == "layers.3.key") >= 2


@pytest.mark.parametrize("codec", ["gaac", "splitzip"])
def test_a_section_too_short_for_its_shape_is_invalid(codec: str) -> None:
    config = {"windows": [2, 3, 4], "axis": "token"} if codec == "gaac" else {}
    with pytest.raises(InvalidField):
        stream_nbytes(codec, config, (1, 64, 16), np.array([100], np.int64))


def test_equal_layers_are_one_line_and_others_are_told_apart(tmp_path: Path) -> None:
    tensors = small_cache(num_layers=5)
    tensors["layers.3.key"] = ("BF16", constant(100, (1, 2, 32, 16)))
    found = inspected(tmp_path, tensors)
    ranges = [(group["first"], group["last"]) for group in found["layers"]]
    assert ranges == [(0, 2), (3, 3), (4, 4)]
    text = kvz("inspect", "c.kvz", cwd=tmp_path).stdout.decode()
    assert "layers    0-2: key/value [1, 2, 96, 16] BF16\n" in text
    assert "          3: key [1, 2, 32, 16] BF16, value [1, 2, 96, 16] BF16\n" in text
    assert "tensors   input_ids [1, 96] I64, zstd\n" in text
    assert "c.kvz: kvz archive, lossless\n" in text
    assert "identity  none: nothing says which model and tokens this cache is of\n" in text


def document(**changes: Any) -> str:
    members = {
        "schema": 1,
        "identity": {
            "architecture": "LlamaForCausalLM",
            "config": {"model_type": "llama"},
            "config_hash": "c" * 64,
            "dtype": "BF16",
            "weights": "f" * 64,
        },
        "layers": {
            "kinds": [
                {"kind": "full", "num_tokens": 96, "cumulative_length": 96},
                {"kind": "sliding", "window": 97, "num_tokens": 96, "cumulative_length": 96},
                {"kind": "empty"},
            ],
            "runs": [[0, 2], [1, 1], [2, 4]],
        },
        "rope": {"pairing": "half", "rotary_dim": 16, "parameters": {"rope_theta": 10000}},
        "shard": {"kv_heads": [0, 2, 2]},
        "tokens": {"batch": 1, "count": 96, "sha256": "a" * 64},
        "origin": "made by a test",
    }
    return json.dumps({**members, **changes})


def text_of(folder: Path, metadata: dict[str, str]) -> str:
    write_cache(folder / "c.safetensors", small_cache(), metadata)
    assert kvz("compress", "c.safetensors", "-f", "--codec", "raw", cwd=folder).returncode == 0
    result = kvz("inspect", "c.kvz", cwd=folder)
    assert (result.returncode, result.stderr) == (0, b"")
    return result.stdout.decode()


def test_identity_and_kinds_of_layers_come_from_the_capture(tmp_path: Path) -> None:
    text = text_of(tmp_path, {"kvz": document()})
    for line in (
        "model     llama LlamaForCausalLM BF16, weights ffffffffffff, config cccccccccccc",
        "rope      pairs half, rotary_dim 16, rope_theta 10000",
        "tokens    96, sha256 aaaaaaaaaaaa",
        "kv heads  all 2",
        "origin    made by a test",
        "layers    0-1: full, key/value [1, 2, 96, 16] BF16",
        "          2: sliding window 97, key/value [1, 2, 96, 16] BF16",
        "          3-6: empty, nothing stored",
    ):
        assert f"{line}\n" in text
    assert "metadata" not in text


def test_a_shard_says_which_heads_it_has(tmp_path: Path) -> None:
    text = text_of(tmp_path, {"kvz": document(shard={"kv_heads": [2, 4, 8]})})
    assert "kv heads  2 to 3 of 8\n" in text


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ("{", "kvz metadata is not JSON"),
        (document(schema=2), "kvz metadata has schema 2, this reader knows 1"),
        (document(tokens=[]), "kvz metadata has no object 'tokens'"),
        (document(layers={"kinds": [], "runs": [[0, 1]]}), "layer run [0, 1] has no record"),
    ],
)
def test_metadata_that_is_not_readable_is_told_and_does_not_hide_the_rest(
    tmp_path: Path, metadata: str, problem: str
) -> None:
    text = text_of(tmp_path, {"kvz": metadata})
    (line,) = [line for line in text.splitlines() if line.startswith("identity")]
    assert line.startswith("identity  not readable: ")
    assert problem in line
    assert "key/value [1, 2, 96, 16] BF16\n" in text


def test_members_of_wrong_types_count_as_absent(tmp_path: Path) -> None:
    identity = {"config": 3, "dtype": ["x"], "weights": None}
    text = text_of(
        tmp_path, {"kvz": document(identity=identity, shard={"kv_heads": "all"}, rope=7)}
    )
    assert ", weights unknown, config unknown\n" in text
    assert "kv heads" not in text
    assert "rope" not in text


def test_foreign_metadata_is_shortened_and_made_safe(tmp_path: Path) -> None:
    text = text_of(tmp_path, {"format": "pt", "note": "\x1b[31m" + "x" * 500})
    assert "metadata  format: pt\n" in text
    (line,) = [line for line in text.splitlines() if "note: " in line]
    assert line.startswith("          note: \\x1b[31mxxx")
    assert line.endswith("...")
    assert len(line) == 90


def test_sections_are_listed_where_they_lie(tmp_path: Path) -> None:
    write_cache(tmp_path / "c.safetensors", small_cache())
    assert kvz("compress", "c.safetensors", "--codec", "raw", cwd=tmp_path).returncode == 0
    lines = kvz("inspect", "c.kvz", "--sections", cwd=tmp_path).stdout.decode().splitlines()
    table = lines[lines.index("") + 1 :]
    table = table[table.index("") + 1 :]
    assert table[0].split() == ["offset", "length", "kind", "tensor", "chunk", "crc32"]
    data = (tmp_path / "c.kvz").read_bytes()
    assert len(table) == 1 + 7
    for line, (name, (_, array)) in zip(table[1:], small_cache().items(), strict=True):
        offset, length, kind, tensor, chunk, _ = line.split()
        assert (kind, tensor, chunk) == ("RAW", name, "0")
        assert data[int(offset) :][: int(length)] == array.tobytes()
