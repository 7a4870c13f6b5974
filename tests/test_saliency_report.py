"""How concentrated saliency is, and how early it shows: figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import prompt_ids, tiny_llama

import kvz
from kvz.formats.errors import InvalidField
from kvz.quality.report import render
from kvz.quality.run import run_quality
from kvz.quality.saliency_report import RangeOverlap, held, jaccard, saliency_report
from kvz.safetensors_io import MemorySource

Tensors = dict[str, tuple[str, NDArray[Any]]]


def f32(values: Any) -> tuple[str, NDArray[Any]]:
    return "F32", np.asarray(values, np.float32).view(np.uint32)


def norms(query: Any, key: Any, num_tokens: int, layer: int = 0) -> Tensors:
    return {
        f"layers.{layer}.query_pair_norm": f32(query),
        f"layers.{layer}.key_pair_norm": f32(key),
        "attention_mask": ("I64", np.ones((1, num_tokens), np.uint64)),
    }


def test_part_of_the_importance_is_that_of_the_largest_pairs() -> None:
    """Ten pairs: 1 of them is 10 %, 3 are 30 %, 5 are 50 %."""
    importance = np.array([[4, 1, 1, 1, 8, 1, 1, 1, 1, 1], [1] * 10], np.float32)
    # of 20 the first head has 8, 8 + 4 + 1 and 8 + 4 + 3 in front
    assert held(importance, 0.1) == pytest.approx((8 / 20 + 0.1) / 2)
    assert held(importance, 0.3) == pytest.approx((13 / 20 + 0.3) / 2)
    assert held(importance, 0.5) == pytest.approx((15 / 20 + 0.5) / 2)
    assert held(np.zeros((1, 10), np.float32), 0.3) == 1


def test_overlap_is_both_over_either_as_the_mean_over_heads() -> None:
    first = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    second = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
    assert jaccard(first, second) == pytest.approx((1 + 1 / 3 + 0 + 1) / 4)


def test_report_is_the_one_worked_out_by_hand() -> None:
    """One kv head of two query heads, 4 pairs, blocks of 1,024, 1,024 and 512 tokens."""
    query = np.ones((3, 2, 4))
    query[:, 1] = 3  # mean over query heads: 2
    key = [[[4, 3, 2, 1]], [[4, 1, 3, 2]], [[1, 2, 3, 4]]]
    report = saliency_report(MemorySource(norms(query, key, 2560), {}), ["layers.0.key"])
    assert report is not None
    assert (report.num_layers, report.prefill) == (1, 1024)
    # {0, 1} at first, then {0, 2}, then {2, 3}
    assert report.ranges == (RangeOverlap(1024, 2048, 1 / 3), RangeOverlap(2048, 2560, 0.0))
    # weights 2 2 1: sums 17 10 13 10 of 50; 10 % of 4 pairs are none, 30 % are 1, 50 % are 2
    assert [top.share for top in report.top] == [0.1, 0.3, 0.5]
    assert [top.importance for top in report.top] == pytest.approx([0, 17 / 50, 30 / 50])


def test_later_blocks_are_in_four_ranges_and_layers_are_averaged() -> None:
    """Eight blocks; layer 0 always chooses pair 0, layer 1 pair 1 in blocks 5 and 6."""
    tokens = 7 * 1024 + 100
    steady = np.tile([2.0, 1.0], (8, 1, 1))
    moving = steady.copy()
    moving[5:7] = [1.0, 9.0]
    ones = np.ones((8, 1, 2))
    tensors = {**norms(ones, steady, tokens), **norms(ones, moving, tokens, layer=1)}
    names = ["layers.0.key", "layers.1.key", "layers.2.key"]
    report = saliency_report(MemorySource(tensors, {}), names)
    assert report is not None
    assert report.num_layers == 2
    # blocks 1-2, 3-4, 5-6 and 7
    assert report.ranges == (
        RangeOverlap(1024, 3072, 1.0),
        RangeOverlap(3072, 5120, 1.0),
        RangeOverlap(5120, 7168, 0.5),
        RangeOverlap(7168, tokens, 1.0),
    )


def test_statistics_of_the_whole_prompt_have_no_ranges() -> None:
    tensors = norms([[1, 1]], [[3, 1]], 5000)
    report = saliency_report(MemorySource(tensors, {}), ["layers.0.key"])
    assert report is not None
    assert report.ranges == ()
    assert report.top[2].importance == pytest.approx(3 / 4)


def test_value_that_is_not_finite_has_no_importance() -> None:
    tensors = norms([[1, 1, 1, 1]], [[np.nan, 1, np.inf, 3]], 10)
    report = saliency_report(MemorySource(tensors, {}), ["layers.0.key"])
    assert report is not None
    assert report.top[1].importance == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("query", "key", "num_tokens"),
    [
        (np.ones((1, 2, 4)), np.ones((1, 1, 5)), 10),
        (np.ones((1, 3, 4)), np.ones((1, 2, 4)), 10),
        (np.ones((2, 4)), np.ones((1, 2, 4)), 10),
        (np.ones((1, 2, 4)), np.ones((1, 2, 4)), 2000),
        (np.ones(4), np.ones(4), 10),
        (np.ones((2, 0)), np.ones((2, 0)), 10),
    ],
)
def test_norms_that_do_not_belong_together_are_refused(
    query: Any, key: Any, num_tokens: int
) -> None:
    with pytest.raises(InvalidField, match=r"layers\.0\.key"):
        saliency_report(MemorySource(norms(query, key, num_tokens), {}), ["layers.0.key"])


def test_quality_report_shows_it_for_captures_with_pair_norms(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    kvz.capture(tiny_llama(), prompt_ids(1, 40)).save(path)
    report = run_quality([path], schemes=["bf16"], queries=0)
    (capture,) = report.captures
    assert capture.saliency is not None
    assert capture.saliency.num_layers == 3
    document = report.to_dict()["captures"][0]["saliency"]
    assert document["top"][2]["importance"] == capture.saliency.top[2].importance
    assert f"hold {100 * capture.saliency.top[0].importance:.1f} / " in render(report)
