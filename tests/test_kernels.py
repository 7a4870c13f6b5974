"""The CPU kernels: exact on every shape, both paths alike, safe on hostile streams."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from cases import GAAC_CASES, KERNEL_CASES, CodecCase
from guarded import guarded, guarded_empty
from hypothesis import given, settings
from hypothesis import strategies as st

from kvz.codecs import codec_from_options
from kvz.formats.codecs import gaac as gaac_layout
from kvz.formats.codecs import splitzip as splitzip_layout
from kvz.formats.errors import DamagedFile
from kvz.kernels.cpu import calibration, gaac, splitzip
from kvz.kernels.reference import calibration as calibration_reference
from kvz.kernels.reference import gaac as gaac_reference
from kvz.kernels.reference import planes
from kvz.kernels.reference import splitzip as splitzip_reference

TOKENS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 1023, 1025]
HEAD_DIMS = [1, 3, 63, 64, 80, 96, 112, 128, 192, 256, 576]
OUTER = [batch * heads for batch in (1, 3) for heads in (1, 3, 8)]
#: Content of every shape: cut from one pool, because drawing it anew would take most of the time.
POOL = cases.like_a_cache((24, 1100, 600)).reshape(-1)

each_kernel_case = pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.id)


@pytest.fixture(params=["plain", "vector"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both paths of the kernels; the vector one is portable, so it runs everywhere."""
    for module in (gaac, splitzip):
        monkeypatch.setattr(module, "HAVE_SIMD", request.param == "vector")
    return str(request.param)


def cut(shape: tuple[int, int, int], start: int = 0) -> cases.U16:
    """A chunk of this shape from the pool."""
    size = int(np.prod(shape))
    start = start % max(1, POOL.size - size)
    return POOL[start : start + size].reshape(shape)


@each_kernel_case
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_shape_comes_back_bit_for_bit(case: CodecCase, head_dim: int) -> None:
    codec = case.codec()
    for outer, tokens in itertools.product(OUTER, TOKENS[1:]):
        chunk = cut((outer, tokens, head_dim), 977 * tokens + head_dim)
        _, prepared = cases.prepare(codec, chunk[:, :64])
        payload = cases.encode(codec, prepared, chunk)
        decoded = cases.decode(codec, prepared, payload, chunk.shape, np.uint16)
        assert np.array_equal(decoded, chunk), (outer, tokens)


@each_kernel_case
@pytest.mark.parametrize("tokens", TOKENS[1:])
def test_streams_of_every_tokens_and_head_dim_are_those_of_the_reference(
    case: CodecCase, tokens: int, path: str
) -> None:
    codec = case.codec()
    # outer moves along with the head dimension, so every value of it meets every number of tokens
    for i, head_dim in enumerate(HEAD_DIMS):
        outer = 1 if tokens > 1000 and i % 3 else OUTER[(i + tokens) % len(OUTER)]
        if tokens * head_dim * outer > 600_000:
            outer = 1
        chunk = cut((outer, tokens, head_dim), 31 * tokens + head_dim)
        _, prepared = cases.prepare(codec, chunk)
        payload = cases.encode(codec, prepared, chunk)
        expected = cases.reference_payload(case, prepared, chunk)
        assert np.array_equal(payload, expected), (outer, head_dim)
        decoded = cases.decode(codec, prepared, payload, chunk.shape, np.uint16)
        assert np.array_equal(decoded, chunk), (outer, head_dim)


def test_environment_turns_the_vector_path_off() -> None:
    script = "from kvz.kernels.cpu.simd import HAVE_SIMD; print(HAVE_SIMD)"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "KVZ_NO_SIMD": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "False\n"


@each_kernel_case
def test_batch_and_heads_share_nothing(case: CodecCase, path: str) -> None:
    """Every outer index decodes to its own data: heads are distinct, so a mix-up shows."""
    codec = case.codec()
    chunk = cases.bf16(np.broadcast_to(10 * np.arange(24)[:, None, None], (24, 17, 40)))
    _, prepared = cases.prepare(codec, chunk)
    payload = cases.encode(codec, prepared, chunk)
    assert np.array_equal(cases.decode(codec, prepared, payload, chunk.shape, np.uint16), chunk)


@each_kernel_case
def test_calibration_of_no_tokens_gives_a_codebook(case: CodecCase) -> None:
    codec = case.codec()
    book, prepared = cases.prepare(codec, np.zeros((3, 0, 64), np.uint16))
    assert book
    chunk = cases.random_bits((3, 9, 64))
    payload = cases.encode(codec, prepared, chunk)
    assert np.array_equal(cases.decode(codec, prepared, payload, chunk.shape, np.uint16), chunk)


@pytest.mark.parametrize("runs", [True, False], ids=["run of exponents", "with gaps"])
def test_splitzip_codebook_with_and_without_gaps(runs: bool, path: str) -> None:
    exponents = np.arange(100, 116) if runs else np.r_[np.arange(100, 108), np.arange(200, 208)]
    codec = codec_from_options("splitzip", {})
    prepared = codec.prepare(exponents.astype(np.uint8).tobytes(), "BF16", (1, 1, 1))
    for n in (1, 2, 31, 32, 33, 8191, 8192, 8193, 3 * 8192 + 77):
        escapes_everywhere = cases.random_bits((1, n, 1), n)
        no_escapes = cases.bf16(exponents[escapes_everywhere % 16], escapes_everywhere >> 4)
        for chunk in (escapes_everywhere, no_escapes):
            payload = cases.encode(codec, prepared, chunk)
            expected = cases.reference_payload(KERNEL_CASES[-1], prepared, chunk)
            assert np.array_equal(payload, expected), n
            decoded = cases.decode(codec, prepared, payload, chunk.shape, np.uint16)
            assert np.array_equal(decoded, chunk), n


def draw_chunk(data: st.DataObject) -> cases.U16:
    outer, tokens, inner = (data.draw(st.integers(1, top), "size") for top in (3, 19, 70))
    shape = (outer, tokens, inner)
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    make = cases.random_bits if data.draw(st.booleans(), "random") else cases.like_a_cache
    return make(shape, seed)


@pytest.mark.parametrize("case", GAAC_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("vector", [False, True])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_gaac_with_any_bits_and_bases_is_exact(
    case: CodecCase, vector: bool, data: st.DataObject
) -> None:
    codec = case.codec()
    chunk = draw_chunk(data)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "bases"))
    limits = np.array([252, 248, 240])[:, None, None]
    bases = rng.integers(0, limits + 1, (3, chunk.shape[0], chunk.shape[2])).astype(np.uint8)
    if 2 not in case.config["windows"]:
        bases[0] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaac, "HAVE_SIMD", vector)
        payload = cases.encode(codec, bases, chunk)
        decoded = cases.decode(codec, bases, payload, chunk.shape, np.uint16)
    assert np.array_equal(decoded, chunk)
    assert np.array_equal(payload, cases.reference_payload(case, bases, chunk))


@pytest.mark.parametrize("vector", [False, True])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_splitzip_with_any_bits_and_codebook_is_exact(vector: bool, data: st.DataObject) -> None:
    chunk = draw_chunk(data)
    if data.draw(st.booleans(), "run"):
        exponents = np.arange(16) + data.draw(st.integers(0, 240), "lowest")
    else:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "book"))
        exponents = np.sort(rng.choice(256, 16, replace=False))
    book = exponents.astype(np.uint8)
    codec = codec_from_options("splitzip", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitzip, "HAVE_SIMD", vector)
        payload = cases.encode(codec, book, chunk)
        decoded = cases.decode(codec, book, payload, chunk.shape, np.uint16)
    assert np.array_equal(decoded, chunk)
    assert np.array_equal(payload, cases.reference_payload(KERNEL_CASES[-1], book, chunk))


@pytest.mark.parametrize("name", cases.awkward_chunks())
@pytest.mark.parametrize("case", GAAC_CASES, ids=lambda case: case.id)
def test_gaac_reference_inverts_itself(case: CodecCase, name: str) -> None:
    chunk = cases.awkward_chunks()[name]
    flags = {
        "narrow": 2 in case.config["windows"],
        "channel_axis": case.config["axis"] == "channel",
    }
    bases = calibration_reference.window_bases(calibration_reference.exponent_histogram(chunk))
    streams = gaac_reference.encode(chunk, bases, block_tiles=3, **flags)
    assert np.array_equal(gaac_reference.decode(streams, bases, chunk.shape, **flags), chunk)


@pytest.mark.parametrize("name", cases.awkward_chunks())
def test_splitzip_reference_inverts_itself(name: str) -> None:
    chunk = cases.awkward_chunks()[name].reshape(-1)
    book = np.arange(112, 128, dtype=np.uint8)
    streams = splitzip_reference.encode(chunk, book, block_len=64)
    assert np.array_equal(splitzip_reference.decode(streams, book, block_len=64), chunk)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("rotate", [False, True])
def test_planes_of_any_bits_come_back(itemsize: int, rotate: bool) -> None:
    bits = np.random.default_rng(itemsize).integers(0, 256, 8 * 999, np.uint8)
    elements = bits.view(f"u{itemsize}")
    out = np.full(elements.shape, 0x5A, elements.dtype)
    planes.join(planes.split(elements, rotate), out, rotate)
    assert np.array_equal(out, elements)


# -- calibration


@pytest.mark.parametrize("name", cases.awkward_chunks())
def test_calibration_is_that_of_the_reference(name: str) -> None:
    chunk = cases.awkward_chunks()[name]
    counts = calibration_reference.exponent_histogram(chunk)
    assert np.array_equal(calibration.exponent_histogram(chunk), counts)
    assert np.array_equal(
        calibration.window_bases(counts), calibration_reference.window_bases(counts)
    )


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), top=st.sampled_from([1, 3, 1000, 2**32 - 1]))
def test_window_bases_of_any_counts_are_those_of_the_reference(seed: int, top: int) -> None:
    counts = np.random.default_rng(seed).integers(0, top, (2, 5, 256), np.uint32, endpoint=True)
    assert np.array_equal(
        calibration.window_bases(counts), calibration_reference.window_bases(counts)
    )


def test_window_covers_the_most_and_ties_go_to_the_lowest() -> None:
    counts = np.zeros((1, 256), np.uint32)
    counts[0, [120, 123, 124, 131]] = [5, 5, 5, 2]
    # width 4: 120..123 and 121..124 both hold 10; width 8 from 117; width 16 from 116
    assert calibration.window_bases(counts)[:, 0].tolist() == [120, 117, 116]


def test_window_at_the_top_of_the_exponents_does_not_reach_beyond_255() -> None:
    counts = np.zeros((1, 256), np.uint32)
    counts[0, 255] = 1
    assert calibration.window_bases(counts)[:, 0].tolist() == [252, 248, 240]


def test_frequent_exponents_are_the_most_frequent_ones() -> None:
    counts = np.zeros(256, np.int64)
    counts[[100, 120]] = [3, 9]
    expected = [*range(14), 100, 120]
    assert calibration.frequent_exponents(counts, 16).tolist() == expected


def test_frequent_exponents_are_a_run_where_that_costs_at_most_the_tolerance() -> None:
    counts = np.zeros(256, np.int64)
    counts[110:125] = 10_000  # 15 exponents, 150,000 elements
    # the run misses 160 and keeps 11: 149 of 150,171 are fewer than 1e-3
    counts[[90, 125]] = [160, 11]
    assert calibration.frequent_exponents(counts, 16).tolist() == list(range(110, 126))
    counts[90] = 162  # 151 of 150,173 are more
    assert calibration.frequent_exponents(counts, 16).tolist() == [90, *range(110, 125)]


# -- hostile streams: memory ends right after every array, so any stray access stops the test


def decode_guarded(
    codec: Any, prepared: Any, payload: cases.U8, shape: tuple[int, int, int]
) -> cases.U16:
    out = guarded_empty(shape, np.uint16)
    codec.decode(guarded(payload), prepared, out)
    return out


@each_kernel_case
@pytest.mark.parametrize(
    "shape", [(1, 8, 32), (2, 9, 33), (1, 16, 64), (3, 7, 31), (1, 1, 1), (1, 24, 576)]
)
def test_kernels_stay_inside_their_arrays(
    case: CodecCase, shape: tuple[int, int, int], path: str
) -> None:
    codec = case.codec()
    for chunk in (cases.random_bits(shape, 1), cases.like_a_cache(shape, 2)):
        _, prepared = cases.prepare(codec, chunk)
        buffer = guarded_empty((codec.buffer_nbytes(shape, 2),), np.uint8)
        payload = buffer[: codec.encode(guarded(chunk), prepared, buffer)]
        assert np.array_equal(decode_guarded(codec, prepared, payload, shape), chunk)


@each_kernel_case
@pytest.mark.parametrize("seed", range(4))
def test_decoder_on_random_damage_refuses_or_returns(case: CodecCase, path: str, seed: int) -> None:
    codec = case.codec()
    rng = np.random.default_rng(seed)
    shape = [(2, 9, 33), (1, 16, 64), (1, 40, 100), (3, 1030, 8)][seed]
    chunk = cases.like_a_cache(shape, seed)
    _, prepared = cases.prepare(codec, chunk)
    payload = cases.encode(codec, prepared, chunk)
    start = chunk.size
    refused = 0
    for _ in range(300):
        damaged = payload.copy()
        at = rng.integers(start, payload.size, rng.integers(1, 9))
        damaged[at] = rng.choice([0, 1, 127, 128, 255, int(rng.integers(256))], at.size)
        try:
            decode_guarded(codec, prepared, damaged, shape)
        except DamagedFile:
            refused += 1
    assert refused


GAAC_HOSTILE_SHAPE = (1, 16, 40)


def gaac_streams(case: CodecCase, fill: dict[str, int], num_escapes: int) -> cases.U8:
    """A payload of constant streams."""
    config = gaac_layout.GaacConfig.from_dict(case.config)
    spans = gaac_layout.fixed_streams(GAAC_HOSTILE_SHAPE, config)
    payload = np.zeros(-(-spans[-1].end // 16) * 16 + num_escapes, np.uint8)
    for span in spans:
        payload[span.offset : span.end] = fill.get(span.name, 0)
    return payload


@pytest.mark.parametrize("case", GAAC_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("fill", [{"tags": 255}, {"tags": 170}, {"tags": 85}, {"offsets": 255}])
@pytest.mark.parametrize("num_escapes", [0, 1, 239, 240, 241, 399, 400, 401, 479, 480, 481])
def test_gaac_with_constant_tags_and_offsets_is_safe(
    case: CodecCase, path: str, fill: dict[str, int], num_escapes: int
) -> None:
    codec = case.codec()
    bases = np.zeros((3, 1, 40), np.uint8)
    payload = gaac_streams(case, fill, num_escapes)
    # 255: all 80 groups raw; 85 and 170: every second one, the others tag 0. Along channels a tile
    # has 5 columns, so each fill sets spare bits.
    narrow = 2 in case.config["windows"]
    needed = {255: 480 if narrow else 400, 170: 240, 85: 240}.get(fill.get("tags", 0))
    uses_tag_0 = fill.get("tags") != 255
    refused = case.config["axis"] == "channel" or (uses_tag_0 and not narrow)
    if refused or num_escapes != needed:
        with pytest.raises(DamagedFile):
            decode_guarded(codec, bases, payload, GAAC_HOSTILE_SHAPE)
    else:
        assert not decode_guarded(codec, bases, payload, GAAC_HOSTILE_SHAPE).any()


SPLITZIP_LEN = 8192 + 100


def splitzip_payload(offsets: list[int], positions: list[int]) -> cases.U8:
    spans = [
        *splitzip_layout.fixed_streams(SPLITZIP_LEN),
        *splitzip_layout.escape_streams(SPLITZIP_LEN, len(positions)),
    ]
    payload = np.zeros(spans[-1].end, np.uint8)
    by_name = {span.name: payload[span.offset : span.end] for span in spans}
    by_name["offsets"].view(np.uint32)[:] = offsets
    by_name["positions"].view(np.uint16)[:] = positions
    by_name["exponents"][:] = 200
    return payload


@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize(
    ("offsets", "positions", "message"),
    [
        ([0, 0, 1], [100], "outside its block"),
        ([0, 0, 1], [65535], "outside its block"),
        ([0, 1, 1], [8192], "outside its block"),
        ([0, 2, 2], [5, 5], "does not follow the one before"),
        ([0, 2, 2], [6, 5], "does not follow the one before"),
        ([1, 1, 1], [5], "offset does not follow"),
        ([0, 2, 1], [5], "offset does not follow"),
        ([0, 2**32 - 1, 1], [5], "offset does not follow"),
    ],
)
def test_splitzip_with_escapes_out_of_place_is_rejected(
    path: str, run: bool, offsets: list[int], positions: list[int], message: str
) -> None:
    codec = codec_from_options("splitzip", {})
    book = (np.arange(16) * (1 if run else 2)).astype(np.uint8)
    payload = splitzip_payload(offsets, positions)
    with pytest.raises(DamagedFile, match=message):
        decode_guarded(codec, book, payload, (1, SPLITZIP_LEN, 1))


def test_splitzip_escapes_at_the_ends_of_their_blocks_decode(path: str) -> None:
    codec = codec_from_options("splitzip", {})
    payload = splitzip_payload([0, 2, 4], [0, 8191, 0, 99])
    out = decode_guarded(codec, np.arange(16, dtype=np.uint8), payload, (1, SPLITZIP_LEN, 1))
    assert np.flatnonzero(out).tolist() == [0, 8191, 8192, 8291]
    assert out[0, 0, 0] == 200 << 7


@pytest.mark.parametrize("num_escapes", [1, 2**16, 2**31, 2**32 - 1])
def test_splitzip_that_promises_more_escapes_than_it_has_is_rejected(num_escapes: int) -> None:
    payload = splitzip_payload([0, 0, num_escapes], [])
    with pytest.raises(DamagedFile, match="the section has"):
        decode_guarded(
            codec_from_options("splitzip", {}),
            np.arange(16, dtype=np.uint8),
            payload,
            (1, SPLITZIP_LEN, 1),
        )
