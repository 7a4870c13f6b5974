"""Pieces of a cache by kv heads: split, refused alone, merged to the same bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cli_support import assert_refused, kvz, names, read_cache  # noqa: E402
from tiny_models import prompt_ids, tiny_gemma, tiny_llama  # noqa: E402

import kvz as kvz_package  # noqa: E402
from kvz.capturing import Capture, capture, capture_cache  # noqa: E402
from kvz.formats.errors import (  # noqa: E402
    ConfigError,
    ContentMismatch,
    IdentityMismatch,
    SourceError,
    UnsupportedCache,
)
from kvz.restoring import generate_from, restore  # noqa: E402
from kvz.sharding import merge, split  # noqa: E402


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `c.safetensors`, a capture of four kv heads and eight query heads."""
    folder = tmp_path_factory.mktemp("whole")
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=4)
    capture(model, prompt_ids(2, 30), queries=5).save(folder / "c.safetensors")
    return folder


def document(path: Path) -> Any:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["kvz"])


def test_shards_hold_their_heads_and_merge_to_the_same_file(whole: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    assert split(whole / "c.safetensors", paths) == [(0, 2), (2, 4)]
    original = read_cache((whole / "c.safetensors").read_bytes())
    # [batch, heads, tokens, head_dim] BF16: the second half of each row of the batch
    row = 4 * 30 * 8 * 2
    data = original["layers.1.key"][2]
    second = b"".join(data[i * row + row // 2 : (i + 1) * row] for i in range(2))
    shard = read_cache(paths[1].read_bytes())
    assert shard["layers.1.key"] == ("BF16", [2, 2, 30, 8], second)
    assert shard["layers.1.query"][1] == [2, 4, 5, 8]
    assert shard["layers.1.query_pair_norm"][1] == [1, 4, 4]
    assert shard["input_ids"] == original["input_ids"]
    assert document(paths[1])["shard"] == {"kv_heads": [2, 4, 4]}
    merged = tmp_path / "m.safetensors"
    assert merge(paths[::-1], merged) == 4
    assert merged.read_bytes() == (whole / "c.safetensors").read_bytes()


def test_archives_are_split_and_merged_too(whole: Path, tmp_path: Path) -> None:
    kvz_package.compress(whole / "c.safetensors", tmp_path / "c.kvz")
    paths = [tmp_path / f"{i}.safetensors" for i in range(4)]
    split(tmp_path / "c.kvz", paths)
    for path in paths:
        kvz_package.compress(path, path.with_suffix(".kvz"))
    merge([path.with_suffix(".kvz") for path in paths], tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (whole / "c.safetensors").read_bytes()


def test_a_merged_cache_goes_on_and_a_shard_does_not(tmp_path: Path) -> None:
    model = tiny_gemma()
    captured = capture(model, prompt_ids(1, 50))
    expected = generate_from(captured, model, 8)
    captured.save(tmp_path / "c.safetensors")
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    split(tmp_path / "c.safetensors", paths)
    for force in (False, True):
        with pytest.raises(IdentityMismatch, match="kv heads 0 to 1 of 2"):
            restore(paths[0], model, force=force)
    merge(paths, tmp_path / "m.safetensors")
    assert generate_from(tmp_path / "m.safetensors", model, 8) == expected


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        ([0], "kv heads 1 to 4 of 4 are missing"),
        ([1, 2, 3], "kv heads 0 to 1 of 4 are missing"),
        ([0, 1, 3], "kv heads 2 to 3 of 4 are missing"),
        ([0, 1, 1, 2, 3], "kv heads 1 to 2 are there already"),
    ],
)
def test_heads_that_are_missing_or_twice_are_refused(
    whole: Path, tmp_path: Path, kept: list[int], named: str
) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(4)]
    split(whole / "c.safetensors", paths)
    before = names(tmp_path)
    with pytest.raises(IdentityMismatch, match=named):
        merge([paths[i] for i in kept], tmp_path / "m.safetensors")
    assert names(tmp_path) == before


def test_shards_of_different_caches_do_not_merge(whole: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    split(whole / "c.safetensors", paths)
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=4)
    other_prompt = capture(model, prompt_ids(2, 30, seed=9), queries=5)
    other_model = capture(
        tiny_llama(1, num_attention_heads=8, num_key_value_heads=4), prompt_ids(2, 30), queries=5
    )
    for other, named in ((other_prompt, "tokens"), (other_model, "identity")):
        other.save(tmp_path / f"{named}.safetensors")
        theirs = [tmp_path / f"{named}-{i}.safetensors" for i in range(2)]
        split(tmp_path / f"{named}.safetensors", theirs)
        with pytest.raises(IdentityMismatch, match=f"its {named} is not that of"):
            merge([paths[0], theirs[1]], tmp_path / "m.safetensors")


def test_tensors_that_shards_share_must_be_equal(whole: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    split(whole / "c.safetensors", paths)
    from kvz.safetensors_io import SafetensorsFile
    from kvz.state_reader import read_tensor

    with SafetensorsFile(paths[1]) as file:
        tensors = {name: read_tensor(file, name) for name in file.tensor_names}
        metadata = dict(file.metadata)
    tensors["next_token_logits"] = tensors["next_token_logits"] + 1
    Capture(tensors, metadata, None).save(tmp_path / "changed.safetensors")
    with pytest.raises(ContentMismatch, match="tensor next_token_logits differs"):
        merge([paths[0], tmp_path / "changed.safetensors"], tmp_path / "m.safetensors")
    del tensors["layers.2.value"]
    Capture(tensors, metadata, None).save(tmp_path / "less.safetensors")
    with pytest.raises(IdentityMismatch, match=r"tensor layers\.2\.value is missing"):
        merge([paths[0], tmp_path / "less.safetensors"], tmp_path / "m.safetensors")


def test_what_does_not_divide_is_refused(whole: Path, tmp_path: Path) -> None:
    three = [tmp_path / f"{i}.safetensors" for i in range(3)]
    with pytest.raises(ConfigError, match="4 kv heads do not divide into 3"):
        split(whole / "c.safetensors", three)
    two = three[:2]
    split(whole / "c.safetensors", two)
    before = names(tmp_path)
    with pytest.raises(SourceError, match="exists already"):
        split(whole / "c.safetensors", [tmp_path / "new.safetensors", two[0]])
    with pytest.raises(IdentityMismatch, match="a shard already: kv heads 0 to 2 of 4"):
        split(two[0], [tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert names(tmp_path) == before


def test_states_that_are_not_one_per_head_are_refused(tmp_path: Path) -> None:
    import zoo

    if "lfm2" not in zoo.available():
        pytest.skip("this transformers has no LFM2")
    model = zoo.build("lfm2")
    try:
        captured = capture(model, prompt_ids(1, 20))
    except UnsupportedCache as error:
        pytest.skip(str(error))
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    with pytest.raises(
        UnsupportedCache, match=r"layers\.0\.key is of a linear layer: its state is not one per kv"
    ):
        split(captured, paths)
    assert names(tmp_path) == set()


def test_described_states_are_divided_with_their_description(tmp_path: Path) -> None:
    import transformers

    model = tiny_llama()
    cache = transformers.DynamicCache()
    for layer_idx in range(3):
        cache.update(*(torch.randn(1, 2, 6, 16) for _ in range(2)), layer_idx)
    captured = capture_cache(model, cache, prompt_ids(1, 6))
    captured.save(tmp_path / "c.safetensors")
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    split(tmp_path / "c.safetensors", paths)
    assert document(paths[0])["layers"]["kinds"][0]["state"]["key"] == ["F32", [1, 1, 6, 16]]
    merge(paths, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_commands_split_and_merge(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "c.safetensors").write_bytes((whole / "c.safetensors").read_bytes())
    done = kvz("split", "c.safetensors", "--shards", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    shards = ["c-0-of-2.safetensors", "c-1-of-2.safetensors"]
    assert done.stdout.decode().splitlines() == [
        f"{shards[0]}: kv heads 0:2 of 4",
        f"{shards[1]}: kv heads 2:4 of 4",
    ]
    assert_refused(
        kvz("merge", shards[0], "-o", "m.safetensors", cwd=tmp_path),
        5,
        "kv heads 2 to 4 of 4 are missing",
    )
    assert_refused(
        kvz("merge", *shards, "-o", "c.safetensors", cwd=tmp_path),
        6,
        "c.safetensors: exists already; use -f to overwrite it",
    )
    done = kvz("merge", *shards, "-o", "m.safetensors", cwd=tmp_path)
    assert done.stdout == b"m.safetensors: 4 kv heads of 2 shards\n"
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_shards_of_a_lossy_cache_say_so_and_so_does_what_they_merge_to(
    whole: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "lossy.kvz"
    kvz_package.compress(whole / "c.safetensors", archive, "lynx")
    shards = [tmp_path / f"lossy-{i}.safetensors" for i in range(2)]
    split(archive, shards)
    merge(shards, tmp_path / "merged.safetensors")
    for path in (*shards, tmp_path / "merged.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        assert json.loads(data[8 : 8 + length])["__metadata__"]["kvz.lossy"] == "lynx"
