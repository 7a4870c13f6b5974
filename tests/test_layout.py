"""Which axis counts tokens, and which tensors are keys and values of which layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvz
from kvz.formats.errors import ConfigError, SourceError
from kvz.formats.safetensors import StoredTensor
from kvz.layout import Layout, layer_index, part_name, role


def axis_of(name: str, shape: tuple[int, ...], layout: Layout | None = None) -> int | None:
    return (layout or Layout()).token_axis(StoredTensor(name, "BF16", shape, 0))


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("layers.3.key", (1, 8, 4, 64), 2),  # kvz's own names: never guessed
        ("k.0", (64, 4, 32), 0),  # tokens, heads, channels
        ("k.0", (4, 64, 32), 1),  # heads, tokens, channels
        ("cache.layer0.keys", (2, 64, 4, 32), 1),
        ("key_cache.3", (2, 4, 64, 32), 2),
        ("model.layers.3.self_attn.v", (1, 5, 5, 8), 2),  # a tie: as in kvz's own
        ("lm_head.weight", (100, 40, 8), None),
        ("layers.3.key_pair_norm", (3, 4, 8), None),
    ],
)
def test_token_axis_follows_from_name_and_shape(
    name: str, shape: tuple[int, ...], axis: int | None
) -> None:
    assert axis_of(name, shape) == axis


def test_layout_says_it_better_and_in_any_case() -> None:
    assert axis_of("k.0", (64, 4, 32), Layout("htd")) == 1
    assert axis_of("anything", (64, 4, 32), Layout("THD")) == 0
    assert axis_of("anything", (64, 4, 32), Layout("THD", "^k")) is None


@pytest.mark.parametrize(
    ("name", "layer", "kind", "part"),
    [
        ("layers.12.key", 12, "key", "key"),
        ("k.0", 0, "key", "key"),
        ("cache.layer7.values", 7, "value", "value"),
        ("value_cache.3", 3, "value", "value"),
        ("past_key.5", 5, "key", "key"),
        ("model.v2.layers.3.k", 3, "key", "key"),
        ("layers.3.indexer_key", 3, "key", "indexer_key"),
        ("layers.3.query", 3, None, "query"),
    ],
)
def test_names_give_layer_and_part(name: str, layer: int, kind: str | None, part: str) -> None:
    assert (layer_index(name), role(name), part_name(name)) == (layer, kind, part)


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """An archive of tensors [tokens, heads, channels] under names that are not kvz's."""
    values = torch.randn(64, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    path = tmp_path / "c.kvz"
    report = kvz.compress({"k.0": values, "v.0": -values}, path)
    assert report.guessed_axis == "axis 0 of k.0 [64, 4, 32]"
    return path, values


def test_foreign_layers_are_read_in_part(foreign: tuple[Path, torch.Tensor]) -> None:
    path, values = foreign
    with kvz.open(path) as archive:
        parts = archive.read(0, slice(8, 16))
    expected = values[8:16].view(torch.uint16).numpy()
    assert np.array_equal(parts["key"], expected)
    assert np.array_equal(parts["value"], expected ^ 0x8000)


def test_layout_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    tensors = {"k.0": torch.zeros(4, 4, 4, dtype=torch.bfloat16)}
    with pytest.raises(ConfigError, match="no tensor has the name and the axes"):
        kvz.compress(tensors, tmp_path / "c.kvz", layout="BHTD")
    assert list(tmp_path.iterdir()) == []


def test_two_keys_of_one_layer_are_not_taken_for_one(tmp_path: Path) -> None:
    same = torch.zeros(4, 4, 4, dtype=torch.bfloat16)
    kvz.compress({"a.layers.0.key": same, "b.layers.0.key": same}, tmp_path / "c.kvz")
    with kvz.open(tmp_path / "c.kvz") as archive, pytest.raises(ConfigError, match="several"):
        archive.read(0)


def test_unknown_tensor_is_named(foreign: tuple[Path, torch.Tensor]) -> None:
    with kvz.open(foreign[0]) as archive, pytest.raises(ConfigError, match="has no tensor 'zz'"):
        archive.read_tensor("zz")


def test_output_goes_where_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "real.kvz").write_bytes(b"old")
    (tmp_path / "link.kvz").symlink_to("real.kvz")
    kvz.compress({"k.0": torch.zeros(2, 2, 2)}, tmp_path / "link.kvz", overwrite=True)
    assert (tmp_path / "link.kvz").is_symlink()
    assert (tmp_path / "real.kvz").read_bytes()[1:4] == b"KVZ"


def test_output_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="not a regular file"):
        kvz.compress({"k.0": torch.zeros(2, 2, 2)}, tmp_path / "pipe", overwrite=True)
    assert (tmp_path / "pipe").is_fifo()
