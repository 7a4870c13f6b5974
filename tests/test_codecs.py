"""What holds of every codec, whatever it does: driven by the table in support/cases.py."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import spec_reader
from cases import CASES, KERNEL_CASES, CodecCase
from guarded import guarded, guarded_empty

from kvz.codecs import codec_from_head, codec_from_options
from kvz.codecs.base import is_chunk
from kvz.formats.errors import ConfigError, DamagedFile, UnknownCodec

CHUNKS = cases.awkward_chunks()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_kernel_case = pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.id)
each_chunk = pytest.mark.parametrize("name", CHUNKS)


def decode_by_spec(
    case: CodecCase, book: bytes, payload: bytes, shape: tuple[int, int, int]
) -> bytes:
    """What the second reader makes of a payload."""
    if case.name == "gaac":
        return spec_reader.decode_gaac(payload, book, shape, dict(case.config))
    num_elements = int(np.prod(shape))
    if case.name == "splitzip":
        return spec_reader.decode_splitzip(payload, book, num_elements)
    if case.name == "zstd":
        return spec_reader.decode_zstd(payload, num_elements, 2, "BF16")
    return payload


@each_case
@each_chunk
def test_awkward_chunk_comes_back_bit_for_bit(case: CodecCase, name: str) -> None:
    chunk, codec = CHUNKS[name], case.codec()
    _, prepared = cases.prepare(codec, chunk)
    payload = cases.encode(codec, prepared, chunk)
    decoded = cases.decode(codec, prepared, payload, chunk.shape, np.uint16)
    np.testing.assert_array_equal(decoded, chunk)


@each_case
@each_chunk
def test_second_reader_decodes_an_awkward_chunk(case: CodecCase, name: str) -> None:
    chunk, codec = CHUNKS[name], case.codec()
    book, prepared = cases.prepare(codec, chunk)
    payload = cases.encode(codec, prepared, chunk).tobytes()
    assert decode_by_spec(case, book, payload, chunk.shape) == chunk.tobytes()


@each_case
@each_chunk
def test_payload_does_not_depend_on_what_was_in_the_buffer(case: CodecCase, name: str) -> None:
    chunk, codec = CHUNKS[name], case.codec()
    _, prepared = cases.prepare(codec, chunk)
    first, second = (cases.encode(codec, prepared, chunk, poison) for poison in (0x00, 0xFF))
    np.testing.assert_array_equal(first, second)


@each_kernel_case
@each_chunk
def test_codec_with_a_codebook_of_other_data_is_lossless(case: CodecCase, name: str) -> None:
    chunk, codec = CHUNKS[name], case.codec()
    other = cases.bf16(np.full(chunk.shape, 7))
    _, prepared = cases.prepare(codec, other)
    payload = cases.encode(codec, prepared, chunk)
    decoded = cases.decode(codec, prepared, payload, chunk.shape, np.uint16)
    np.testing.assert_array_equal(decoded, chunk)


TOKEN_RANGES = [(0, 8), (5, 29), (8, 40), (39, 40)]


@each_case
@pytest.mark.parametrize(("start", "stop"), TOKEN_RANGES)
@pytest.mark.parametrize("inner", [1, 37, 64])
def test_token_range_of_a_tensor_encodes_like_its_copy(
    case: CodecCase, start: int, stop: int, inner: int
) -> None:
    codec = case.codec()
    chunk = guarded(cases.like_a_cache((3, 40, inner)))[:, start:stop]
    copy = np.ascontiguousarray(chunk)
    _, prepared = cases.prepare(codec, copy)
    np.testing.assert_array_equal(
        cases.encode(codec, prepared, chunk), cases.encode(codec, prepared, copy)
    )


@each_case
@pytest.mark.parametrize(("start", "stop"), TOKEN_RANGES)
@pytest.mark.parametrize("inner", [1, 37, 64])
def test_decoding_into_a_token_range_touches_nothing_else(
    case: CodecCase, start: int, stop: int, inner: int
) -> None:
    codec = case.codec()
    chunk = cases.like_a_cache((3, 40, inner))[:, start:stop].copy()
    _, prepared = cases.prepare(codec, chunk)
    payload = cases.encode(codec, prepared, chunk)
    out = guarded_empty((3, 40, inner), np.uint16)
    expected = out.copy()
    expected[:, start:stop] = chunk
    codec.decode(payload, prepared, out[:, start:stop])
    np.testing.assert_array_equal(out, expected)


@each_case
@pytest.mark.parametrize("name", ["one element", "one outlier", "no multiple of anything"])
def test_payload_that_is_cut_short_is_rejected(case: CodecCase, name: str) -> None:
    chunk, codec = CHUNKS[name], case.codec()
    _, prepared = cases.prepare(codec, chunk)
    payload = cases.encode(codec, prepared, chunk)
    step = max(1, payload.size // 200)
    for nbytes in [*range(0, payload.size, step), payload.size - 1]:
        with pytest.raises(DamagedFile):
            cases.decode(codec, prepared, payload[:nbytes].copy(), chunk.shape, np.uint16)


@each_case
@pytest.mark.parametrize("extra", [1, 15, 16, 4096])
def test_payload_with_bytes_after_its_end_is_rejected(case: CodecCase, extra: int) -> None:
    chunk, codec = CHUNKS["no multiple of anything"], case.codec()
    _, prepared = cases.prepare(codec, chunk)
    payload = cases.encode(codec, prepared, chunk)
    longer = np.concatenate([payload, np.zeros(extra, np.uint8)])
    with pytest.raises(DamagedFile):
        cases.decode(codec, prepared, longer, chunk.shape, np.uint16)


@each_case
def test_head_records_the_configuration(case: CodecCase) -> None:
    codec = case.codec()
    assert (codec.name, codec.config_dict()) == (case.name, dict(case.config))
    assert codec.needs_codebook == case.needs_codebook
    assert codec_from_head(case.name, case.config).config_dict() == dict(case.config)


@each_case
def test_codec_says_which_tensors_it_takes(case: CodecCase) -> None:
    codec = case.codec()
    assert codec.supports("BF16", 2)
    assert codec.supports("F32", 2) == (not case.bf16_only)
    assert codec.supports("BF16", None) == (case.name != "gaac")


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["I", "F"])
def test_zstd_takes_elements_of_every_width(itemsize: int, dtype: str) -> None:
    name = "F8_E4M3" if (dtype, itemsize) == ("F", 1) else f"{dtype}{8 * itemsize}"
    rng = np.random.default_rng(itemsize)
    raw = rng.integers(0, 4, 8 * 1001, np.uint8)
    chunk = raw.view(f"u{itemsize}").reshape(1, -1, 1)
    codec = codec_from_options("zstd", {})
    prepared = codec.prepare(b"", name, chunk.shape)
    payload = cases.encode(codec, prepared, chunk)
    assert payload.size < chunk.nbytes / 2
    decoded = cases.decode(codec, prepared, payload, chunk.shape, chunk.dtype)
    np.testing.assert_array_equal(decoded, chunk)
    by_spec = spec_reader.decode_zstd(payload.tobytes(), chunk.size, itemsize, name)
    assert by_spec == chunk.tobytes()


@each_kernel_case
@each_chunk
def test_payload_is_that_of_the_reference(case: CodecCase, name: str) -> None:
    chunk, codec = CHUNKS[name], case.codec()
    _, prepared = cases.prepare(codec, chunk)
    np.testing.assert_array_equal(
        cases.encode(codec, prepared, chunk), cases.reference_payload(case, prepared, chunk)
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gaac", {"window": "3/4"}, "no option 'window'; options: windows, axis"),
        ("gaac", {"windows": "4/3"}, "codec gaac: windows must be"),
        ("gaac", {"windows": "two"}, "codec gaac"),
        ("gaac", {"axis": "head"}, "axis must be one of"),
        ("zstd", {"level": "0"}, "level must be 1..22, got 0"),
        ("zstd", {"level": "fast"}, "codec zstd"),
        ("raw", {"level": "3"}, "no option 'level'; options: none"),
    ],
)
def test_option_that_makes_no_sense_is_refused(
    name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_from_options(name, options)


def test_only_arrays_whose_outer_indices_are_contiguous_are_chunks() -> None:
    tensor = np.zeros((4, 10, 6), np.uint16)
    record = np.zeros(4, [("flag", "u1"), ("key", "u2", (10, 6))])["key"]
    assert is_chunk(tensor)
    assert is_chunk(tensor[:, 3:7])
    assert is_chunk(tensor[::2, 3:7])
    for other in (
        tensor[:, ::2],
        tensor[:, :, :3],
        tensor[::-1],
        tensor.swapaxes(0, 1),
        np.broadcast_to(tensor[:1], (4, 10, 6)),
        record,
    ):
        assert not is_chunk(other)


def test_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(UnknownCodec, match="'lz4' is not known; known are raw, zstd"):
        codec_from_options("lz4", {})
