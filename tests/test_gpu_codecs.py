"""Codecs on device tensors: the CPU's bytes, exact tensors back, nothing touched beside them."""

from __future__ import annotations

from collections.abc import Sequence

import cases
import numpy as np
import pytest
from gpu_support import DEVICE, INTERPRETED, MARKS, real_gpu_only

from kvz.codebooks import sample_starts
from kvz.codecs import codec_from_options
from kvz.codecs.base import Codec
from kvz.formats.errors import ConfigError, InvalidField

torch = pytest.importorskip("torch")
pytestmark = MARKS

CODECS = [("gaac", {"windows": "2/3/4"}), ("gaac", {"windows": "3/4"}), ("splitzip", {})]
each_codec = pytest.mark.parametrize(
    ("name", "options"), CODECS, ids=["gaac-234", "gaac-34", "splitzip"]
)
MARGIN = 5
#: The interpreter takes a second for each thousand elements, and longer for narrow tensors.
HEAD_DIMS = [20, 63] if INTERPRETED else [1, 3, 20, 63, 64, 80, 112, 128, 192, 256, 576]


def to_device(bits: cases.U16) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).to(DEVICE).view(torch.bfloat16)


def to_bits(tensor: torch.Tensor) -> cases.U16:
    bits: cases.U16 = tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def shifted(bits: cases.U16, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor inside a longer one, from element ``offset`` on, and the longer one."""
    whole = torch.full((bits.size + offset + MARGIN,), 0x55AA, dtype=torch.int16, device=DEVICE)
    view = whole[offset : offset + bits.size].view(bits.shape)
    view.copy_(to_device(bits).view(torch.int16))
    return view.view(torch.bfloat16), whole


def cpu_payloads(codec: Codec, book: bytes, bits: cases.U16, chunk_tokens: int) -> list[cases.U8]:
    prepared = codec.prepare(book, "BF16", bits.shape)
    starts = range(0, bits.shape[1], chunk_tokens)
    return [cases.encode(codec, prepared, bits[:, s : s + chunk_tokens]) for s in starts]


def cpu_codebook(codec: Codec, bits: cases.U16) -> bytes:
    starts, length = sample_starts(bits.shape[1])
    sample = np.concatenate([bits[:, s : s + length] for s in starts], axis=1)
    return codec.calibrate(sample, bits.shape[1])


def check_parity(name: str, options: dict[str, str], arrays: Sequence[cases.U16]) -> None:
    """The CPU's payloads, into a poisoned buffer, and from there the tensors, exactly."""
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder, max_payload_nbytes

    codec = codec_from_options(name, options)
    tensors = [to_device(bits) for bits in arrays]
    step = 96
    books = [cpu_codebook(codec, bits) for bits in arrays]
    nbytes = max_payload_nbytes([t.shape for t in tensors], codec, chunk_tokens=step)
    payloads = torch.full((nbytes,), cases.POISON, dtype=torch.uint8, device=DEVICE)
    encoder = DeviceEncoder(tensors, codec, codebooks=books, payloads=payloads, chunk_tokens=step)
    encoder.encode()
    expected = [
        payload
        for bits, book in zip(arrays, books, strict=True)
        for payload in cpu_payloads(codec, book, bits, step)
    ]
    assert encoder.payload_nbytes() == [payload.size for payload in expected]
    for i, payload in enumerate(expected):
        assert np.array_equal(encoder.payload(i).cpu().numpy(), payload), encoder.chunks[i]
    outputs = [shifted(np.full_like(bits, 0x7F7F), 4) for bits in arrays]
    decoder = DeviceDecoder.of(encoder, [view for view, _ in outputs])
    decoder.decode()
    decoder.check()
    for bits, (view, whole) in zip(arrays, outputs, strict=True):
        assert np.array_equal(to_bits(view), bits)
        beside = torch.cat([whole[:4], whole[4 + bits.size :]])
        assert (beside == 0x55AA).all()


@each_codec
def test_payloads_are_those_of_the_cpu(name: str, options: dict[str, str]) -> None:
    shapes = [(1, 1, 64), (3, 25, 64), (1, 170, 64)]
    check_parity(name, options, [cases.like_a_cache(s, i) for i, s in enumerate(shapes)])


@each_codec
@pytest.mark.parametrize("inner", HEAD_DIMS)
def test_any_head_dim_works(name: str, options: dict[str, str], inner: int) -> None:
    check_parity(name, options, [cases.like_a_cache((2, 27, inner))])


@each_codec
@pytest.mark.parametrize(
    "content", ["NaN with payloads", "both ends of the exponents", "minus zeros"]
)
def test_awkward_bits_come_back(name: str, options: dict[str, str], content: str) -> None:
    check_parity(name, options, [cases.awkward_chunks()[content]])


@each_codec
def test_random_bits_come_back(name: str, options: dict[str, str]) -> None:
    check_parity(name, options, [cases.random_bits((2, 9, 64), 5)])


@each_codec
def test_every_bf16_pattern_comes_back(name: str, options: dict[str, str]) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(1, 1024, 64)
    if INTERPRETED:  # every exponent with some of its mantissas
        patterns = np.ascontiguousarray(patterns[:, ::16])
    check_parity(name, options, [patterns])


@each_codec
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_any_storage_offset_works(name: str, options: dict[str, str], offset: int) -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    codec = codec_from_options(name, options)
    bits = cases.like_a_cache((2, 19, 64), 1)
    source, _ = shifted(bits, offset)
    output, _ = shifted(np.zeros_like(bits), offset)
    book = cpu_codebook(codec, bits)
    encoder = DeviceEncoder([source], codec, codebooks=[book])
    encoder.encode()
    (expected,) = cpu_payloads(codec, book, bits, 64)
    assert np.array_equal(encoder.payload(0).cpu().numpy(), expected)
    decoder = DeviceDecoder.of(encoder, [output])
    decoder.decode()
    decoder.check()
    assert np.array_equal(to_bits(output), bits)


@each_codec
def test_outer_indices_need_not_be_multiples_of_16_bytes_apart(
    name: str, options: dict[str, str]
) -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    codec = codec_from_options(name, options)
    tokens = 19 if INTERPRETED else 150
    bits = cases.like_a_cache((3, tokens, 64), 6)
    stride = tokens * 64 + 4
    arenas = [torch.full((3 * stride,), 0x55AA, dtype=torch.int16, device=DEVICE) for _ in range(2)]
    source, output = (
        arena.as_strided(bits.shape, (stride, 64, 1)).view(torch.bfloat16) for arena in arenas
    )
    source.copy_(to_device(bits))
    book = cpu_codebook(codec, bits)
    encoder = DeviceEncoder([source], codec, codebooks=[book])
    encoder.encode()
    (expected,) = cpu_payloads(codec, book, bits, tokens)
    assert np.array_equal(encoder.payload(0).cpu().numpy(), expected)
    decoder = DeviceDecoder.of(encoder, [output])
    decoder.decode()
    decoder.check()
    assert np.array_equal(to_bits(output), bits)
    # and nothing between them
    assert torch.equal(*arenas)


@each_codec
def test_a_part_of_a_preallocated_cache_is_encoded_where_it_lies(
    name: str, options: dict[str, str]
) -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    whole = cases.like_a_cache((4, 40, 64), 2)
    cache = to_device(whole).view(2, 2, 40, 64)
    restored = torch.zeros_like(cache)
    codec = codec_from_options(name, options)
    book = cpu_codebook(codec, whole)
    encoder = DeviceEncoder([cache[:, :, :29]], codec, codebooks=[book], chunk_tokens=16)
    encoder.encode()
    expected = cpu_payloads(codec, book, whole[:, :29], 16)
    got = [encoder.payload(i).cpu().numpy() for i in range(len(encoder.chunks))]
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    decoder = DeviceDecoder.of(encoder, [restored[:, :, :29]])
    decoder.decode()
    decoder.check()
    assert np.array_equal(to_bits(restored[:, :, :29]), whole[:, :29].reshape(2, 2, 29, 64))
    assert not to_bits(restored[:, :, 29:]).any()


@each_codec
def test_encoding_again_leaves_nothing_of_the_last_time(name: str, options: dict[str, str]) -> None:
    from kvz.gpu.device_codec import DeviceEncoder

    codec = codec_from_options(name, options)
    first, second = cases.random_bits((1, 13, 64), 1), cases.like_a_cache((1, 13, 64), 2)
    book = cpu_codebook(codec, second)
    tensor = to_device(first)
    encoder = DeviceEncoder([tensor], codec, codebooks=[book])
    for bits in (first, second):
        tensor.copy_(to_device(bits))
        encoder.encode()
        (expected,) = cpu_payloads(codec, book, bits, 64)
        assert np.array_equal(encoder.payload(0).cpu().numpy(), expected)


@each_codec
def test_payloads_of_the_cpu_decode_on_the_device(name: str, options: dict[str, str]) -> None:
    from kvz.gpu.device_codec import DeviceDecoder

    codec = codec_from_options(name, options)
    bits = cases.like_a_cache((2, 20, 64), 3)
    book = cpu_codebook(codec, bits)
    payloads = cpu_payloads(codec, book, bits, 16)
    offsets = [8192 * i for i in range(len(payloads))]
    host = np.full(8192 * len(payloads), cases.POISON, np.uint8)
    for offset, payload in zip(offsets, payloads, strict=True):
        host[offset : offset + payload.size] = payload
    output = to_device(np.zeros_like(bits))
    decoder = DeviceDecoder(
        [output],
        torch.from_numpy(host).clone().to(DEVICE),  # where torch allocates: at multiples of 64
        offsets,
        [payload.size for payload in payloads],
        [book],
        codec,
        chunk_tokens=16,
    )
    decoder.decode()
    decoder.check()
    assert np.array_equal(to_bits(output), bits)


@each_codec
def test_a_damaged_payload_is_told_and_harms_no_other(name: str, options: dict[str, str]) -> None:
    from kvz.formats.codecs import gaac, splitzip
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    codec = codec_from_options(name, options)
    bits = cases.like_a_cache((1, 48, 64), 4)
    output = to_device(np.zeros_like(bits))
    book = cpu_codebook(codec, bits)
    encoder = DeviceEncoder([to_device(bits)], codec, codebooks=[book], chunk_tokens=16)
    encoder.encode()
    if name == "gaac":
        spans = gaac.fixed_streams((1, 16, 64), gaac.GaacConfig.from_dict(codec.config_dict()))
    else:
        spans = splitzip.fixed_streams(16 * 64)
    damaged = next(span for span in spans if span.name == "offsets")
    encoder.payload(1)[damaged.offset : damaged.end] = 0xFF
    decoder = DeviceDecoder.of(encoder, [output])
    decoder.decode()
    with pytest.raises(InvalidField, match=r"tensor 0, tokens 16:32: .* contradict each other"):
        decoder.check()
    assert decoder.status.tolist() == [0, 1, 0]
    for start in (0, 32):
        part = slice(start, start + 16)
        assert np.array_equal(to_bits(output)[:, part], bits[:, part])


@each_codec
def test_the_worst_case_is_enough_for_bits_without_any_pattern(
    name: str, options: dict[str, str]
) -> None:
    from kvz.gpu.device_codec import DeviceEncoder, max_payload_nbytes

    codec = codec_from_options(name, options)
    # the codebook is of other data: every exponent is an escape
    book = cpu_codebook(codec, cases.bf16(np.full((1, 16, 64), 120)))
    bits = cases.bf16(np.random.default_rng(0).integers(180, 256, (1, 17, 64)))
    encoder = DeviceEncoder([to_device(bits)], codec, codebooks=[book], chunk_tokens=16)
    encoder.encode()
    expected = cpu_payloads(codec, book, bits, 16)
    assert encoder.payload_nbytes() == [payload.size for payload in expected]
    assert max_payload_nbytes([bits.shape], codec, chunk_tokens=16) == encoder.payloads.numel()
    assert all(
        nbytes <= chunk.capacity
        for nbytes, chunk in zip(encoder.payload_nbytes(), encoder.chunks, strict=True)
    )


@pytest.mark.parametrize("tokens", [1, 63, 161, 513])
def test_codebooks_of_the_device_are_those_of_the_cpu(tokens: int) -> None:
    from kvz.gpu.calibration import calibrate
    from kvz.gpu.device_chunks import as_bits, bind

    for name, options in CODECS:
        codec = codec_from_options(name, options)
        arrays = [cases.like_a_cache((1, tokens, 64), tokens)]
        tensors = [as_bits(to_device(bits)) for bits in arrays]
        expected = [cpu_codebook(codec, bits) for bits in arrays]
        assert calibrate(codec, bind(codec), tensors) == expected


def test_ties_between_windows_go_to_the_lowest() -> None:
    from kvz.gpu.calibration import window_bases

    counts = np.zeros((2, 256), np.int32)
    counts[0, [120, 123, 124, 131]] = [5, 5, 5, 2]
    # width 4: 120..123 and 121..124 both hold 10; width 8 from 117; width 16 from 116
    bases = window_bases(torch.from_numpy(counts).to(DEVICE)).cpu()
    assert bases[:, 0].tolist() == [120, 117, 116]
    assert bases[:, 1].tolist() == [0, 0, 0]


BAD_TENSORS = [
    (lambda: torch.zeros((2, 8, 16), dtype=torch.float16, device=DEVICE), "must be torch.bfloat16"),
    (lambda: torch.zeros(16, dtype=torch.bfloat16, device=DEVICE), r"must be \[..., tokens"),
    (
        lambda: torch.zeros((2, 16, 8), dtype=torch.bfloat16, device=DEVICE).transpose(1, 2),
        "must be contiguous in its last two",
    ),
    (
        lambda: torch.zeros((1, 8, 16), dtype=torch.bfloat16, device=DEVICE).expand(3, 8, 16),
        "must be contiguous in its last two",
    ),
    (lambda: torch.zeros((1, 8, 1024), dtype=torch.bfloat16, device=DEVICE), "up to 1023 channels"),
    (lambda: torch.zeros((1, 0, 16), dtype=torch.bfloat16, device=DEVICE), "nothing to encode"),
]


@pytest.mark.parametrize(("make", "message"), BAD_TENSORS)
def test_a_tensor_that_the_kernels_cannot_take_is_refused(make: object, message: str) -> None:
    from kvz.gpu.device_codec import DeviceEncoder

    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        DeviceEncoder([make()], "gaac")


@pytest.mark.parametrize(
    ("codec", "options", "message"),
    [
        ("gaac", {"axis": "channel"}, "axis=channel has no GPU kernels"),
        ("zstd", {}, "codec zstd has no GPU kernels"),
    ],
)
def test_a_codec_without_gpu_kernels_is_refused(
    codec: str, options: dict[str, str], message: str
) -> None:
    from kvz.gpu.device_codec import max_payload_nbytes

    with pytest.raises(ConfigError, match=message):
        max_payload_nbytes([(1, 8, 16)], codec, options)


def test_payloads_that_are_too_small_or_misaligned_are_refused() -> None:
    from kvz.gpu.device_codec import DeviceEncoder, max_payload_nbytes

    tensor = to_device(cases.like_a_cache((1, 8, 16)))
    nbytes = max_payload_nbytes([tensor.shape])
    room = torch.zeros(nbytes + 64, dtype=torch.uint8, device=DEVICE)
    first = -room.data_ptr() % 64
    with pytest.raises(ConfigError, match=rf"payloads must be uint8\[{nbytes}\]"):
        DeviceEncoder([tensor], payloads=room[first : first + nbytes - 1])
    with pytest.raises(ConfigError, match="an address that 64 divides"):
        DeviceEncoder([tensor], payloads=room[first + 1 : first + 1 + nbytes])


def test_a_payload_shorter_than_its_shape_requires_is_refused() -> None:
    from kvz.gpu.device_codec import DeviceDecoder

    codec = codec_from_options("gaac", {})
    bits = cases.like_a_cache((1, 8, 16))
    book = cpu_codebook(codec, bits)
    room = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(InvalidField, match=r"chunk 0: stream .* the section has 100"):
        DeviceDecoder([to_device(bits)], room, [0], [100], [book], codec)
    with pytest.raises(ConfigError, match=r"payload at bytes 4032..4132 of 4096"):
        DeviceDecoder([to_device(bits)], room, [4032], [100], [book], codec)


@real_gpu_only
@each_codec
def test_encoding_and_decoding_are_captured_in_a_cuda_graph(
    name: str, options: dict[str, str]
) -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    codec = codec_from_options(name, options)
    first, second = cases.like_a_cache((2, 300, 64), 1), cases.like_a_cache((2, 300, 64), 2)
    tensor, output = to_device(first), to_device(np.zeros_like(first))
    encoder = DeviceEncoder([tensor], codec)
    decoder = DeviceDecoder.of(encoder, [output])
    encoder.encode()
    decoder.decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encoder.encode()
        decoder.decode()
    tensor.copy_(to_device(second))
    output.fill_(7)
    graph.replay()
    decoder.check()
    assert np.array_equal(to_bits(output), second)
    (expected,) = cpu_payloads(codec, encoder.codebooks[0], second, 300)
    assert np.array_equal(encoder.payload(0).cpu().numpy(), expected)


@real_gpu_only
@each_codec
def test_a_tensor_of_more_than_two_to_the_31_elements_comes_back(
    name: str, options: dict[str, str]
) -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    length = (1 << 31) + 4096
    bits = torch.full((1, length // 128, 128), 127 << 7, dtype=torch.int16, device=DEVICE)
    noise = torch.randint(0, 128, bits.shape, dtype=torch.int16, device=DEVICE)
    bits |= noise
    del noise
    # escapes at the very end: exponents of both ends
    bits[0, -2:, ::3] = 0x7F80
    bits[0, -1, 1::3] = 1
    output = torch.full_like(bits, 0x5555)
    encoder = DeviceEncoder([bits.view(torch.bfloat16)], codec_from_options(name, options))
    encoder.encode()
    decoder = DeviceDecoder.of(encoder, [output.view(torch.bfloat16)])
    decoder.decode()
    decoder.check()
    assert torch.equal(bits, output)
