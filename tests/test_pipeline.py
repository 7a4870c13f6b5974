"""Compress, read, decompress and verify: exact, deterministic, partial, and careful with files."""

from __future__ import annotations

import io
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import sample_capture
import torch
from safetensors.torch import save_file
from safetensors_file import read_tensors, safetensors_bytes, with_header

import kvz
from kvz.codebooks import CodebookFile, TensorCodebook
from kvz.formats.errors import (
    ConfigError,
    ContentMismatch,
    InvalidField,
    KvzError,
    NotCodebookFile,
    NotSafetensorsFile,
    SourceError,
    TruncatedFile,
)
from kvz.formats.safetensors import StoredTensor
from kvz.layout import Layout, chunk_tokens

CODECS = ["gaac", "splitzip", "zstd", "raw"]
ITEM_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
METADATA = {"kvz": '{"schema": 1}', "ключ": "värde 🗝", "empty": "", "quotes": '"\\\n\t\x01'}

each_codec = pytest.mark.parametrize("codec", CODECS)


def bf16_tensor(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    tokens, inner = shape[-2:]
    bits = cases.like_a_cache((int(np.prod(shape[:-2])), tokens, inner), seed)
    return torch.from_numpy(bits.view(np.int16).reshape(shape)).view(torch.bfloat16)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def small_cache() -> dict[str, torch.Tensor]:
    """Two layers, several chunks a tensor, tokens that are no multiple of anything."""
    cache = {
        f"layers.{layer}.{part}": bf16_tensor((1, 4, 3001, 64), 10 * layer + (part == "key"))
        for layer, part in itertools.product(range(2), ("key", "value"))
    }
    return {**cache, "input_ids": torch.arange(3001)[None]}


@pytest.fixture(scope="module")
def cache() -> dict[str, torch.Tensor]:
    return small_cache()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, cache: dict[str, torch.Tensor]) -> Path:
    path = tmp_path_factory.mktemp("source") / "cache.safetensors"
    listing = [
        (name, "BF16" if t.dtype == torch.bfloat16 else "I64", list(t.shape), raw_bytes(t))
        for name, t in cache.items()
    ]
    path.write_bytes(safetensors_bytes(listing, METADATA))
    return path


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    path = tmp_path_factory.mktemp("archive") / "cache.kvz"
    kvz.compress(source, path, threads=1)
    return path


def patch_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def round_trip(source: Path, folder: Path, codec: str, **options: Any) -> bytes:
    kvz.compress(source, folder / "rt.kvz", codec, threads=1, overwrite=True, **options)
    kvz.verify(folder / "rt.kvz", against=source, threads=1)
    kvz.decompress(folder / "rt.kvz", folder / "rt.safetensors", threads=1, overwrite=True)
    return (folder / "rt.safetensors").read_bytes()


# -- exact


def every_dtype() -> list[tuple[str, str, list[int], bytes]]:
    rng = np.random.default_rng(3)
    listing: list[tuple[str, str, list[int], bytes]] = []
    for dtype, itemsize in ITEM_NBYTES.items():
        for shape in ([], [0], [1], [3, 0, 5], [1, 3, 0, 64], [7, 11], [1, 2, 9, 16]):
            cached = len(shape) in (0, 4)
            name = f"layers.{len(listing)}.{dtype}.key" if cached else f"{dtype} {shape} é"
            raw = rng.integers(0, 256, int(np.prod(shape)) * itemsize, np.uint8).tobytes()
            listing.append((name, dtype, shape, raw))
    for name in ("", " ", "a/b\\c", '"quoted"', "\n", "层.0.键", "layers.0.key"):
        listing.append((name, "BF16", [1, 1, 9, 8], rng.bytes(144)))
    return listing


@each_codec
def test_every_dtype_shape_and_name_comes_back_byte_for_byte(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "all.safetensors"
    path.write_bytes(safetensors_bytes(every_dtype(), METADATA))
    assert round_trip(path, tmp_path, codec) == path.read_bytes()


@each_codec
def test_file_of_the_safetensors_package_comes_back_byte_for_byte(
    tmp_path: Path, codec: str
) -> None:
    tensors = {
        **{f"layers.{i}.key": bf16_tensor((2, 3, 130, 64), i) for i in range(3)},
        "scale": torch.tensor(0.5),
        "mask": torch.tensor([[True, False]]),
        "f8": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "half": torch.linspace(-1, 1, 99, dtype=torch.float16),
        "double": torch.linspace(-1, 1, 99, dtype=torch.float64),
        "nothing": torch.zeros(0, 4),
    }
    path = tmp_path / "package.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    assert round_trip(path, tmp_path, codec) == path.read_bytes()


@each_codec
def test_real_capture_comes_back_byte_for_byte_and_smaller(tmp_path: Path, codec: str) -> None:
    path = sample_capture.cut(tmp_path / "slice.safetensors", layers=2, tokens=40)
    assert round_trip(path, tmp_path, codec) == path.read_bytes()
    nbytes = (tmp_path / "rt.kvz").stat().st_size
    if codec != "raw":
        assert path.stat().st_size / nbytes > 1.25


@each_codec
def test_cache_of_several_chunks_comes_back_byte_for_byte(
    source: Path, tmp_path: Path, codec: str
) -> None:
    assert round_trip(source, tmp_path, codec) == source.read_bytes()


def test_file_without_tensors_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    path.write_bytes(safetensors_bytes([], {"only": "metadata"}))
    assert round_trip(path, tmp_path, "gaac") == path.read_bytes()


@each_codec
def test_random_bits_cost_at_most_a_thousandth(tmp_path: Path, codec: str) -> None:
    raw = np.random.default_rng(0).bytes(8 << 20)
    path = tmp_path / "noise.safetensors"
    path.write_bytes(safetensors_bytes([("layers.0.key", "BF16", [1, 4, 16384, 64], raw)]))
    assert round_trip(path, tmp_path, codec) == path.read_bytes()
    assert (tmp_path / "rt.kvz").stat().st_size <= 1.001 * len(raw)


STRIDED = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "every second token": lambda x: x[:, :, ::2],
    "last channels": lambda x: x[..., 3:],
    "expanded heads": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "expanded tokens": lambda x: x[:, :, :1].expand(-1, -1, 77, -1),
    "permuted": lambda x: x.permute(3, 2, 1, 0),
    "needs a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", STRIDED)
@each_codec
def test_tensor_of_any_strides_is_stored_as_it_looks(tmp_path: Path, codec: str, name: str) -> None:
    tensor = STRIDED[name](bf16_tensor((2, 3, 70, 24)))
    kvz.compress({"layers.0.key": tensor}, tmp_path / "c.kvz", codec, threads=1)
    with kvz.open(tmp_path / "c.kvz") as opened:
        assert opened.shape("layers.0.key") == tuple(tensor.shape)
        stored = opened.read_tensor("layers.0.key")
    np.testing.assert_array_equal(stored, bits_of(tensor.detach()))


def test_numpy_arrays_keep_their_values(tmp_path: Path) -> None:
    arrays = {
        "i": np.arange(-5, 5, dtype=np.int16),
        "b": np.array([True, False]),
        "f": np.linspace(0, 1, 9, dtype=np.float64)[::2],
        "big endian": np.arange(7, dtype=">i4"),
        "scalar": np.array(3, np.uint8),
    }
    kvz.compress(arrays, tmp_path / "c.kvz", threads=1)
    with kvz.open(tmp_path / "c.kvz") as opened:
        for name, array in arrays.items():
            native = array.astype(array.dtype.newbyteorder("="))
            stored = opened.read_tensor(name).view(native.dtype)
            np.testing.assert_array_equal(stored, native)


def test_array_without_a_safetensors_dtype_is_refused(tmp_path: Path) -> None:
    for array in (np.array(["text"]), np.zeros(2, np.longdouble), np.zeros(2, "M8[s]")):
        with pytest.raises(SourceError, match="has no safetensors name"):
            kvz.compress({"x": array}, tmp_path / "c.kvz", threads=1)
    assert not list(tmp_path.iterdir())


def test_metadata_that_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metadata"):
        kvz.compress({}, tmp_path / "c.kvz", metadata={"a": 1}, threads=1)  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("axes", "shape"), [("BHTD", (2, 3, 50, 8)), ("TBHD", (50, 2, 3, 8)), ("HDT", (3, 8, 50))]
)
@each_codec
def test_layout_names_the_token_axis(
    tmp_path: Path, codec: str, axes: str, shape: tuple[int, ...]
) -> None:
    tensor = bf16_tensor((int(np.prod(shape)) // 8, 1, 8)).reshape(shape)
    layout = Layout(axes=axes)
    kvz.compress({"anything": tensor}, tmp_path / "c.kvz", codec, layout=layout, threads=1)
    with kvz.open(tmp_path / "c.kvz") as opened:
        assert opened.entry("anything").token_axis == axes.index("T")
        np.testing.assert_array_equal(
            opened.read_tensor("anything", slice(3, 41)),
            np.take(bits_of(tensor), range(3, 41), axis=axes.index("T")),
        )


def test_chunk_of_tokens_too_wide_for_64_of_them_stays_below_the_limit() -> None:
    tensor = StoredTensor("layers.0.key", "BF16", (64, 64, 128, 1024), 0)
    # 8 MiB a token, 256 MiB at most
    assert chunk_tokens(tensor, 2) == 32


# -- deterministic


@each_codec
def test_archive_does_not_depend_on_threads_or_on_the_run(
    source: Path, tmp_path: Path, codec: str
) -> None:
    archives = []
    for i, threads in enumerate([1, 1, 2, 4]):
        kvz.compress(source, tmp_path / f"{i}.kvz", codec, threads=threads)
        archives.append((tmp_path / f"{i}.kvz").read_bytes())
    assert archives.count(archives[0]) == 4


@each_codec
def test_file_memory_and_pipe_give_the_same_archive(
    source: Path,
    cache: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
) -> None:
    kvz.compress(source, tmp_path / "file.kvz", codec, threads=2)
    kvz.compress(cache, tmp_path / "memory.kvz", codec, metadata=METADATA, threads=2)
    patch_stdin(monkeypatch, source.read_bytes())
    kvz.compress("-", tmp_path / "pipe.kvz", codec, threads=2)
    from_file = (tmp_path / "file.kvz").read_bytes()
    assert (tmp_path / "memory.kvz").read_bytes() == from_file
    assert (tmp_path / "pipe.kvz").read_bytes() == from_file


def test_report_counts_every_byte(source: Path, tmp_path: Path) -> None:
    report = kvz.compress(source, tmp_path / "c.kvz", threads=1)
    tensors = read_tensors(source)[1]
    assert report.stored_nbytes == (tmp_path / "c.kvz").stat().st_size
    assert report.original_nbytes == sum(len(raw) for _, _, raw in tensors.values())
    assert report.ratio == report.original_nbytes / report.stored_nbytes


def test_frames_and_index_cost_little(archive: Path, source: Path) -> None:
    with kvz.open(archive) as opened:
        payloads = int(opened.index["length"].sum())
        overhead = archive.stat().st_size - payloads - opened.prelude.head_nbytes
    assert overhead < 0.001 * source.stat().st_size


# -- partial


RANGES = [(0, 3001), (0, 1), (3000, 3001), (0, 0), (1499, 1503), (8, 16), (17, 2999)]


@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_tokens_of_a_tensor_are_a_slice_of_the_source(
    archive: Path, cache: dict[str, torch.Tensor], start: int, stop: int
) -> None:
    with kvz.open(archive) as opened:
        for name in ("layers.0.key", "layers.1.value"):
            expected = bits_of(cache[name])[:, :, start:stop]
            np.testing.assert_array_equal(opened.read_tensor(name, slice(start, stop)), expected)


def test_token_slice_with_an_open_end_is_a_slice_of_the_source(
    archive: Path, cache: dict[str, torch.Tensor]
) -> None:
    expected = bits_of(cache["layers.0.key"])
    with kvz.open(archive) as opened:
        for tokens in (slice(None), slice(2990, None), slice(None, 5), slice(1, 9, 1)):
            np.testing.assert_array_equal(
                opened.read_tensor("layers.0.key", tokens), expected[:, :, tokens]
            )


@pytest.mark.parametrize(
    "tokens", [slice(0, 3002), slice(-1, None), slice(5, 4), slice(0, 9, 2), slice(9, 0, -1)]
)
def test_tokens_that_the_archive_does_not_hold_are_refused(archive: Path, tokens: slice) -> None:
    with kvz.open(archive) as opened, pytest.raises(ConfigError):
        opened.read_tensor("layers.0.key", tokens)


def test_layer_is_read_as_key_and_value(archive: Path, cache: dict[str, torch.Tensor]) -> None:
    with kvz.open(archive) as opened:
        assert [layer.index for layer in opened.layers] == [0, 1]
        assert opened.layers[0].shape == (1, 4, 3001, 64)
        layer = opened.read(1, slice(100, 200))
        assert layer.keys() == {"key", "value"}
        for part, bits in layer.items():
            expected = bits_of(cache[f"layers.1.{part}"])[:, :, 100:200]
            np.testing.assert_array_equal(bits, expected)
        with pytest.raises(ConfigError, match="no layer 2"):
            opened.read(2)


@pytest.mark.parametrize(
    ("layers", "tokens"),
    [
        ([1], None),
        ([0, 1], None),
        (None, slice(1490, 1510)),
        ([1], slice(1490, 1510)),
        ([1, 0], slice(3000, None)),
    ],
)
def test_partial_file_holds_slices_of_the_source(
    archive: Path,
    cache: dict[str, torch.Tensor],
    tmp_path: Path,
    layers: list[int] | None,
    tokens: slice | None,
) -> None:
    part = tmp_path / "part.safetensors"
    kvz.decompress(archive, part, layers=layers, tokens=tokens, threads=2)
    metadata, tensors = read_tensors(part)
    wanted = [f"layers.{i}.{p}" for i in (layers or [0, 1]) for p in ("key", "value")]
    assert sorted(tensors) == sorted(wanted)
    for name, (dtype, shape, raw) in tensors.items():
        expected = bits_of(cache[name])[:, :, tokens or slice(None)]
        assert (dtype, shape, raw) == ("BF16", list(expected.shape), expected.tobytes())
    assert metadata.items() > METADATA.items()
    assert "kvz.selection" in metadata


def test_pipe_gives_the_same_partial_file(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection: dict[str, Any] = {"layers": [1], "tokens": slice(7, 2222)}
    kvz.decompress(archive, tmp_path / "random", threads=2, **selection)
    patch_stdin(monkeypatch, archive.read_bytes())
    kvz.decompress("-", tmp_path / "piped", threads=2, **selection)
    assert (tmp_path / "piped").read_bytes() == (tmp_path / "random").read_bytes()


@pytest.mark.parametrize(
    "selection",
    [{"layers": [2]}, {"layers": [0, 7]}, {"tokens": slice(0, 4000)}, {"tokens": slice(0, 9, 3)}],
)
def test_selection_that_the_archive_does_not_hold_is_refused(
    archive: Path, tmp_path: Path, selection: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        kvz.decompress(archive, tmp_path / "part", threads=1, **selection)
    assert not list(tmp_path.iterdir())


def test_tokens_of_an_archive_without_keys_and_values_are_refused(tmp_path: Path) -> None:
    kvz.compress({"weights": torch.ones(5, 5)}, tmp_path / "c.kvz", threads=1)
    with pytest.raises(ConfigError, match="no key or value"):
        kvz.decompress(tmp_path / "c.kvz", tmp_path / "part", tokens=slice(0, 2), threads=1)
    assert not (tmp_path / "part").exists()


def test_hundred_tokens_of_a_layer_read_little_of_a_large_file(tmp_path: Path) -> None:
    base = bf16_tensor((1, 1, 16384, 64))
    # 126 MB, of which only the base exists in memory
    tensors = {
        f"layers.{i}.{part}": base.expand(1, 3, -1, -1)
        for i, part in itertools.product(range(10), ("key", "value"))
    }
    report = kvz.compress(tensors, tmp_path / "large.kvz", threads=2)
    with kvz.open(tmp_path / "large.kvz") as opened:
        layer = opened.read(7, slice(9000, 9100))
        assert opened.nbytes_read < 0.02 * report.stored_nbytes
    expected = bits_of(base.expand(1, 3, -1, -1)[:, :, 9000:9100])
    np.testing.assert_array_equal(layer["value"], expected)


# -- codebook files


def codebook_file(path: Path, codec: str, **books: TensorCodebook) -> Path:
    config = {"windows": [2, 3, 4], "axis": "token"} if codec == "gaac" else {}
    named = {f"layers.0.{part}": book for part, book in books.items()}
    CodebookFile(codec, config, named).save(path, overwrite=True)
    return path


BOOKS = {"gaac": TensorCodebook(4, 64, b"\1" + 12 * b"\x70"), "splitzip": TensorCodebook(
    4, 64, bytes(range(112, 128))
)}  # fmt: skip


@pytest.mark.parametrize("codec", BOOKS)
def test_codebook_from_a_file_is_embedded_and_exact(tmp_path: Path, codec: str) -> None:
    tensor = bf16_tensor((1, 4, 500, 64))
    book = codebook_file(tmp_path / "book", codec, key=BOOKS[codec])
    kvz.compress({"layers.0.key": tensor}, tmp_path / "c.kvz", codec, codebook=book, threads=1)
    with kvz.open(tmp_path / "c.kvz") as opened:
        assert opened.read_payload(0).tobytes() == BOOKS[codec].payload
        np.testing.assert_array_equal(opened.read_tensor("layers.0.key"), bits_of(tensor))


@pytest.mark.parametrize(
    ("codec", "options", "book", "message"),
    [
        ("splitzip", {}, {"key": BOOKS["gaac"]}, "codebook is for gaac"),
        ("gaac", {"axis": "channel"}, {"key": BOOKS["gaac"]}, "codebook is for gaac"),
        ("zstd", {}, {"key": BOOKS["gaac"]}, "codebook is for gaac"),
        ("gaac", {}, {"value": BOOKS["gaac"]}, "nothing for tensor 'layers.0.key'"),
        ("gaac", {}, {"key": TensorCodebook(3, 64, b"")}, "has 3 heads of 64 channels"),
        ("gaac", {}, {"key": TensorCodebook(4, 32, b"")}, "has 4 heads of 32 channels"),
    ],
)
def test_codebook_for_something_else_is_refused(
    tmp_path: Path,
    codec: str,
    options: dict[str, str],
    book: dict[str, TensorCodebook],
    message: str,
) -> None:
    path = codebook_file(tmp_path / "book", "gaac", **book)
    with pytest.raises(ContentMismatch, match=message):
        kvz.compress(
            {"layers.0.key": bf16_tensor((1, 4, 9, 64))},
            tmp_path / "c.kvz",
            codec,
            codec_options=options,
            codebook=path,
            threads=1,
        )
    assert not (tmp_path / "c.kvz").exists()


def test_codebook_whose_payload_is_invalid_is_refused(tmp_path: Path) -> None:
    path = codebook_file(tmp_path / "book", "gaac", key=TensorCodebook(4, 64, b"\1\2"))
    with pytest.raises(InvalidField, match="codebook has 2 bytes, must have 13"):
        kvz.compress(
            {"layers.0.key": bf16_tensor((1, 4, 9, 64))},
            tmp_path / "c.kvz",
            codebook=path,
            threads=2,
        )
    assert not (tmp_path / "c.kvz").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"kvz_codebook":2,"codec":{"name":"gaac"},"tensors":{}}',
        b'{"kvz_codebook":1,"codec":{},"tensors":{}}',
        b'{"kvz_codebook":1,"codec":[1],"tensors":{}}',
        b'{"kvz_codebook":1,"codec":{"name":"gaac"},"tensors":[]}',
        b'{"kvz_codebook":1,"codec":{"name":"gaac"},"tensors":{"a":1}}',
        b'{"kvz_codebook":1,"codec":{"name":"gaac"},"tensors":{"a":{"outer":Infinity}}}',
        b'{"kvz_codebook":1,"codec":{"name":"gaac"},"tensors":{"a":{"outer":1,"inner":1,'
        b'"codebook":"x"}}}',
    ],
)
def test_file_that_is_no_codebook_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "book").write_bytes(text)
    with pytest.raises(NotCodebookFile, match="not a codebook that kvz calibrate made"):
        CodebookFile.load(tmp_path / "book")


# -- sources that are not what they seem


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_SOURCES: list[tuple[str, bytes, type[KvzError]]] = [
    ("empty", b"", NotSafetensorsFile),
    ("seven bytes", bytes(7), NotSafetensorsFile),
    ("a kvz magic", b"\x89KVZ\r\n\x1a\n" * 9, NotSafetensorsFile),
    ("header cut off", (100).to_bytes(8, "little") + b"{}", NotSafetensorsFile),
    ("header not JSON", (2).to_bytes(8, "little") + b"{]", NotSafetensorsFile),
    ("header a list", with_header([], b""), NotSafetensorsFile),
    ("deep header", (90_000).to_bytes(8, "little") + b"[" * 90_000, NotSafetensorsFile),
    ("entry a list", with_header({"a": []}, b""), NotSafetensorsFile),
    ("dtype unknown", with_header({"a": entry([1], 0, 1, "F128")}, b"1"), NotSafetensorsFile),
    ("dtype a list", with_header({"a": entry([1], 0, 1, [])}, b"1"), NotSafetensorsFile),
    ("negative dimension", with_header({"a": entry([-1], 0, 1)}, b"1"), NotSafetensorsFile),
    ("wrong size", with_header({"a": entry([2], 0, 1)}, b"1"), NotSafetensorsFile),
    ("hole", with_header({"a": entry([1], 1, 2)}, b"12"), NotSafetensorsFile),
    (
        "overlap",
        with_header({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"123"),
        NotSafetensorsFile,
    ),
    ("metadata numbers", with_header({"__metadata__": {"a": 1}}, b""), NotSafetensorsFile),
    ("half a surrogate pair", b'\x0d\0\0\0\0\0\0\0{"\\ud800":{}}', NotSafetensorsFile),
    ("data cut off", with_header({"a": entry([5], 0, 5)}, b"1234"), TruncatedFile),
    ("bytes after", with_header({"a": entry([3], 0, 3)}, b"1234"), TruncatedFile),
]


@pytest.mark.parametrize(("name", "data", "error"), BAD_SOURCES, ids=[b[0] for b in BAD_SOURCES])
@pytest.mark.parametrize("piped", [False, True])
def test_source_that_is_no_safetensors_file_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    data: bytes,
    error: type[KvzError],
    piped: bool,
) -> None:
    (tmp_path / "source").write_bytes(data)
    patch_stdin(monkeypatch, data)
    # a pipe has no size, so what is cut off shows as its end
    expected = (error, TruncatedFile, NotSafetensorsFile) if piped else error
    with pytest.raises(expected):
        kvz.compress("-" if piped else tmp_path / "source", tmp_path / "c.kvz", threads=1)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_missing_source_is_named(tmp_path: Path) -> None:
    for act in (
        lambda path: kvz.compress(path, tmp_path / "out"),
        lambda path: kvz.decompress(path, tmp_path / "out"),
        kvz.verify,
        kvz.open,
    ):
        with pytest.raises(SourceError, match=r"missing\.kvz: No such file"):
            act(tmp_path / "missing.kvz")
    assert not list(tmp_path.iterdir())


def test_directory_and_pipe_are_no_sources(tmp_path: Path) -> None:
    for act in (kvz.verify, kvz.open, lambda path: kvz.compress(path, tmp_path / "out")):
        with pytest.raises(SourceError):
            act(tmp_path)
    assert not list(tmp_path.iterdir())


# -- verify against a capture


def test_verify_names_the_first_element_that_differs(
    source: Path, archive: Path, tmp_path: Path
) -> None:
    data = bytearray(source.read_bytes())
    tensors = list(read_tensors(source)[1])
    assert tensors[1] == "layers.0.value"
    header = len(data) - sum(len(raw) for _, _, raw in read_tensors(source)[1].values())
    token, head, channel = 2017, 2, 5
    element = ((1 * 4 + head) * 3001 + token) * 64 + channel
    data[header + 2 * element] ^= 1
    (tmp_path / "other.safetensors").write_bytes(data)
    message = rf"layers\.0\.value differs at element \[{head}, {token}, {channel}\]"
    with pytest.raises(ContentMismatch, match=message):
        kvz.verify(archive, against=tmp_path / "other.safetensors", threads=2)


def test_verify_against_a_capture_of_other_tensors_or_metadata_is_a_mismatch(
    archive: Path, cache: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    listing = [(n, "BF16", list(t.shape), raw_bytes(t)) for n, t in list(cache.items())[:4]]
    listing.append(("input_ids", "I64", [1, 3001], raw_bytes(cache["input_ids"])))
    changed = {
        "metadata": safetensors_bytes(listing, {**METADATA, "empty": "x"}),
        "'layers.0.key'": safetensors_bytes(listing[1:], METADATA),
        "'more'": safetensors_bytes([*listing, ("more", "U8", [1], b"1")], METADATA),
        "'input_ids'": safetensors_bytes(
            [*listing[:4], ("input_ids", "I64", [3001], listing[4][3])], METADATA
        ),
    }
    for message, data in changed.items():
        (tmp_path / "other").write_bytes(data)
        with pytest.raises(ContentMismatch, match=message):
            kvz.verify(archive, against=tmp_path / "other", threads=1)
    (tmp_path / "other").write_bytes(safetensors_bytes(listing, METADATA))
    kvz.verify(archive, against=tmp_path / "other", threads=1)


# -- outputs


def test_existing_output_is_refused_and_kept(source: Path, archive: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_bytes(b"precious")
    for act in (kvz.compress, kvz.decompress):
        with pytest.raises(SourceError, match="exists already"):
            act(source if act is kvz.compress else archive, output, threads=1)
    assert output.read_bytes() == b"precious"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_failed_overwrite_keeps_the_old_output(source: Path, archive: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    output = tmp_path / "out"
    output.write_bytes(b"precious")
    damaged = bytearray(archive.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    for act, data in (
        (kvz.compress, source.read_bytes()[:-1]),
        (kvz.decompress, archive.read_bytes()[:-1]),
        (kvz.decompress, bytes(damaged)),
    ):
        broken.write_bytes(data)
        for threads in (1, 2):
            with pytest.raises(KvzError):
                act(broken, output, overwrite=True, threads=threads)
        assert output.read_bytes() == b"precious"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "out"]


def test_interrupted_write_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvz.compress(source, tmp_path / "out", threads=2, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_overwrite_replaces_the_output_and_keeps_its_mode(
    source: Path, archive: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.write_bytes(b"old")
    output.chmod(0o600)
    kvz.compress(source, output, overwrite=True, threads=1)
    assert output.read_bytes() == archive.read_bytes()
    assert output.stat().st_mode & 0o777 == 0o600


def test_input_as_output_is_refused(source: Path, archive: Path, tmp_path: Path) -> None:
    for act, original in ((kvz.compress, source), (kvz.decompress, archive)):
        path = tmp_path / original.name
        path.write_bytes(original.read_bytes())
        os.symlink(path, tmp_path / "link")
        for output in (path, tmp_path / "link", tmp_path / "." / path.name):
            with pytest.raises(ConfigError, match="input and output are the same file"):
                act(path, output, overwrite=True, threads=1)
        assert path.read_bytes() == original.read_bytes()
        (tmp_path / "link").unlink()


def test_output_in_a_missing_folder_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such folder"):
        kvz.compress(source, tmp_path / "missing" / "out", threads=1)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 3, 0), (1, 2, 0, 4)])
def test_tensor_without_elements_reads_as_empty(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "empty.kvz"
    kvz.compress({"layers.0.key": np.empty(shape, np.float32)}, path)
    kvz.verify(path)
    with kvz.open(path) as archive:
        assert archive.read_tensor("layers.0.key").shape == shape
        assert archive.read(0)["key"].shape == shape
