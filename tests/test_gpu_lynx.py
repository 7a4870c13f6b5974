"""Lynx on device tensors: the reference's bytes and values, whatever the tensors hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import ptx_emulation
import pytest
from cases import U8, U16
from cli_support import bf16, write_cache
from gpu_support import DEVICE, INTERPRETED, MARKS, real_gpu_only
from lynx_reference import reference_chunk

import kvz
from kvz.codecs import codec_from_options
from kvz.codecs.lynx import LynxCodec
from kvz.formats.codecs import lynx as layout
from kvz.formats.codecs.spans import residual_offset
from kvz.formats.errors import ConfigError, DamagedFile, InvalidField
from kvz.kernels.reference import lynx as reference

torch = pytest.importorskip("torch")

from gpu_tensors import placed, to_bits, to_device  # noqa: E402

pytestmark = MARKS

OPTIONS = {
    "linear": {},
    "paper": {"preset": "paper"},
    "linear by token": {"grouping": "token"},
    "paper by token": {"preset": "paper", "grouping": "token"},
    "short pages": {"page_tokens": "24", "group_tokens": "12", "exact_tokens": "2"},
    "groups of one": {"page_tokens": "5", "group_tokens": "1", "exact_tokens": "0"},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def codec_of(options: dict[str, str]) -> LynxCodec:
    codec = codec_from_options("lynx", options)
    assert isinstance(codec, LynxCodec)
    return codec


def like_a_cache(shape: tuple[int, int, int], seed: int = 0) -> U16:
    rng = np.random.default_rng(seed)
    outer, _, inner = shape
    level, spread = rng.normal(size=(2, outer, 1, inner))
    values = level + np.exp(spread) * rng.normal(size=shape)
    return reference.to_bf16(values.astype(np.float32))


def check_parity(
    bits: U16,
    options: dict[str, str],
    *,
    chunk_tokens: int = 1 << 20,
    offset: int = 4,
    gap: int = 0,
) -> None:
    """The reference's payloads, from a poisoned buffer; full values and drafts; nothing beside."""
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder, max_payload_nbytes

    codec = codec_of(options)
    starts = range(0, bits.shape[1], chunk_tokens)
    expected = [
        reference_chunk(bits[:, s : s + chunk_tokens], codec.config, is_first=s == 0)
        for s in starts
    ]
    source, _ = placed(bits, offset, gap)
    nbytes = max_payload_nbytes([bits.shape], codec, chunk_tokens=chunk_tokens)
    payloads = torch.full((nbytes,), cases.POISON, dtype=torch.uint8, device=DEVICE)
    encoder = DeviceEncoder([source], codec, payloads=payloads, chunk_tokens=chunk_tokens)
    encoder.encode()
    assert encoder.payload_nbytes() == [chunk.payload.size for chunk in expected]
    for i, chunk in enumerate(expected):
        assert np.array_equal(encoder.payload(i).cpu().numpy(), chunk.payload), encoder.chunks[i]
    output, whole = placed(np.full_like(bits, 0x7F7F), offset, gap)
    untouched = whole.clone()
    decoder = DeviceDecoder.of(encoder, [output])
    for decode, part in ((decoder.decode_draft, "draft"), (decoder.decode, "full")):
        decode()
        decoder.check()
        values = np.concatenate([getattr(chunk, part) for chunk in expected], axis=1)
        assert np.array_equal(to_bits(output), values), part
    output.copy_(to_device(np.full_like(bits, 0x7F7F)))
    assert torch.equal(whole, untouched)


@each_option
@pytest.mark.parametrize("inner", [16, 3] if INTERPRETED else [1, 3, 16, 63, 64, 80, 128, 256, 576])
def test_payloads_and_values_are_those_of_the_reference(
    options: dict[str, str], inner: int
) -> None:
    check_parity(like_a_cache((2, 37 if INTERPRETED else 600, inner)), options)


@pytest.mark.parametrize(
    "tokens", [1, 4, 33] if INTERPRETED else [1, 3, 4, 5, 31, 32, 33, 255, 256, 257, 511]
)
def test_any_number_of_tokens_works(tokens: int) -> None:
    check_parity(like_a_cache((1, tokens, 64), tokens), {})


@pytest.mark.parametrize(
    ("page", "group", "exact"),
    [(64, 32, 40)] if INTERPRETED else [(1024, 64, 300), (512, 256, 4), (96, 3, 7), (4096, 32, 0)],
)
def test_any_page_and_group_works(page: int, group: int, exact: int) -> None:
    options = {"page_tokens": page, "group_tokens": group, "exact_tokens": exact}
    bits = like_a_cache((1, 70 if INTERPRETED else 1100, 16))
    check_parity(bits, {name: str(value) for name, value in options.items()})


def test_exact_tokens_are_those_of_the_tensor_not_of_every_chunk() -> None:
    check_parity(like_a_cache((2, 70, 16), 1), {}, chunk_tokens=32)


@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (4, 4), (0, 3)])
def test_any_address_and_stride_works(offset: int, gap: int) -> None:
    check_parity(like_a_cache((2, 35, 16), 2), {}, offset=offset, gap=gap)


def awkward(content: str, shape: tuple[int, int, int]) -> U16:
    rng = np.random.default_rng(3)
    bits = like_a_cache(shape, 4)
    signs = rng.integers(0, 2, shape) << 15
    mantissas = rng.integers(0, 128, shape)
    if content == "NaN and infinities":
        bits[0, shape[1] // 2, 1], bits[-1, -1, -1], bits[-1, 0, 0] = 0x7FC1, 0x7F80, 0xFF81
    elif content == "beyond 2**126":
        bits[0, 5, 0] = 0x7E80
    elif content == "up to 2**126":
        bits = np.where(signs > 0, 0x7E7F, 0xFE7F).astype(np.uint16)
    elif content == "constant channels":
        bits[..., ::2], bits[..., 1] = 0x8000, 0x3F80
    elif content == "zeros of both signs":
        bits = signs.astype(np.uint16)
    elif content == "subnormals":
        bits = (signs | mantissas).astype(np.uint16)
    elif content == "around the smallest scale":
        bits = (rng.integers(25, 34, shape) << 7 | mantissas).astype(np.uint16)
    elif content == "one outlier":
        bits[0, 7, 2] = 0x461C
    elif content == "random bits":
        bits = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    else:
        bits = (signs | rng.integers(0, 253, shape) << 7 | mantissas).astype(np.uint16)
    return bits


CONTENTS = [
    "NaN and infinities",
    "beyond 2**126",
    "up to 2**126",
    "constant channels",
    "zeros of both signs",
    "subnormals",
    "around the smallest scale",
    "one outlier",
    "random bits",
    "every finite magnitude",
]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["linear"] if INTERPRETED else list(OPTIONS))
def test_awkward_values_are_coded_as_by_the_reference(content: str, name: str) -> None:
    shape = (2, 40, 16) if INTERPRETED else (2, 600, 64)
    check_parity(awkward(content, shape), OPTIONS[name])


@pytest.mark.parametrize("name", ["paper", "linear by token"])
def test_pages_that_are_stored_as_they_are_come_back(name: str) -> None:
    check_parity(awkward("NaN and infinities", (2, 40, 16)), OPTIONS[name])


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs the instructions themselves")
@pytest.mark.parametrize("name", ["linear", "paper", "short pages"])
def test_the_fast_paths_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx_emulation.emulate(monkeypatch)
    monkeypatch.setattr("kvz.kernels.gpu.lynx.compiles", lambda kernel: True)
    for content in ("zeros of both signs", "NaN and infinities", "one outlier"):
        check_parity(awkward(content, (1, 40, 16)), OPTIONS[name])


@real_gpu_only
@pytest.mark.parametrize("name", ["linear", "paper"])
@pytest.mark.parametrize("finite", [False, True])
def test_every_bf16_pattern_is_coded_as_by_the_reference(name: str, finite: bool) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    if finite:
        patterns = patterns[(patterns >> 7 & 0xFF) < 253]
    check_parity(patterns.reshape(1, -1, 64), OPTIONS[name])
    check_parity(np.ascontiguousarray(patterns.reshape(1, 64, -1).swapaxes(1, 2)), OPTIONS[name])


def test_encoding_again_leaves_nothing_of_the_last_time() -> None:
    from kvz.gpu.device_codec import DeviceEncoder

    codec = codec_of({})
    first, second = awkward("NaN and infinities", (1, 40, 16)), like_a_cache((1, 40, 16))
    tensor = to_device(first)
    encoder = DeviceEncoder([tensor], codec)
    for bits in (first, second):
        tensor.copy_(to_device(bits))
        encoder.encode()
        expected = reference_chunk(bits, codec.config).payload
        assert np.array_equal(encoder.payload(0).cpu().numpy(), expected)


def test_a_draft_is_decoded_before_its_residual_is_there() -> None:
    from kvz.gpu.device_codec import DeviceDecoder

    codec = codec_of({})
    chunk = reference_chunk(like_a_cache((2, 40, 16)), codec.config)
    payload = torch.full((chunk.payload.size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    anchor = torch.from_numpy(chunk.payload[: chunk.anchor_nbytes].copy())
    payload[: anchor.numel()] = anchor
    output = to_device(np.zeros((2, 40, 16), np.uint16))
    decoder = DeviceDecoder([output], payload, [0], [payload.numel()], [b""], codec)
    decoder.decode_draft()
    decoder.check()
    assert np.array_equal(to_bits(output), chunk.draft)
    payload.copy_(torch.from_numpy(chunk.payload.copy()))
    decoder.decode()
    decoder.check()
    assert np.array_equal(to_bits(output), chunk.full)


def decode_on_device(
    payload: U8, codec: LynxCodec, shape: tuple[int, int, int]
) -> tuple[U16, bool, bool]:
    """What the device makes of a payload, whether it accepts it, whether it kept to its output."""
    from kvz.gpu.device_codec import DeviceDecoder

    output, whole = placed(np.full(shape, 0x7F7F, np.uint16), 4)
    untouched = whole.clone()
    # the length as on the device: nothing is checked before
    lengths = torch.tensor([payload.size], dtype=torch.int64, device=DEVICE)
    stored = torch.from_numpy(payload.copy()).clone().to(DEVICE)  # as torch allocates: aligned
    decoder = DeviceDecoder([output], stored, [0], lengths, [b""], codec)
    decoder.decode()
    try:
        decoder.check()
        accepted = True
    except InvalidField:
        accepted = False
    values = to_bits(output).copy()
    output.copy_(to_device(np.full(shape, 0x7F7F, np.uint16)))
    return values, accepted, torch.equal(whole, untouched)


def damaged_payloads(payload: U8, codec: LynxCodec, shape: tuple[int, int, int]) -> dict[str, U8]:
    """Payloads that a file could hold."""
    rng = np.random.default_rng(5)
    spans = {s.name: s for s in layout.fixed_streams(shape, codec.config, is_first=True)}

    def patched(name: str, value: Any) -> U8:
        changed = payload.copy()
        span = spans[name]
        changed[span.offset : span.end] = value
        return changed

    def noise(name: str) -> Any:
        return rng.integers(0, 256, spans[name].nbytes)

    pages = payload[spans["pages"].offset : spans["pages"].end].copy().view(np.uint16)
    odd = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x7F7F], np.uint16)
    return {
        "flags of 2": patched("flags", 2),
        "a flag without its page": patched("flags", 1),
        "random pages": patched("pages", noise("pages")),
        "odd minimums and scales": patched(
            "pages", rng.choice(odd, pages.size).astype(np.uint16).view(np.uint8)
        ),
        "random groups": patched("groups", noise("groups")),
        "random anchors": patched("anchors", noise("anchors")),
        "one byte less": payload[:-1],
        "one byte more": np.append(payload, np.uint8(0)),
        "half of it": payload[: payload.size // 2],
        "next to nothing": payload[:40],
    }


@pytest.mark.parametrize("name", ["linear"] if INTERPRETED else ["linear", "paper"])
@pytest.mark.parametrize("content", ["one outlier", "NaN and infinities"])
def test_a_damaged_payload_has_the_verdict_and_the_values_of_the_cpu(
    name: str, content: str
) -> None:
    codec, shape = codec_of(OPTIONS[name]), (2, 40, 16)
    good = reference_chunk(awkward(content, shape), codec.config).payload
    for what, payload in damaged_payloads(good, codec, shape).items():
        values, accepted, kept_to_output = decode_on_device(payload, codec, shape)
        assert kept_to_output, what
        expected = np.full(shape, 0x7F7F, np.uint16)
        try:
            codec.decode(payload, None, expected, 0)
        except DamagedFile:
            assert not accepted, what
        else:
            assert accepted, what
            assert np.array_equal(values, expected), what


@real_gpu_only
def test_encoding_and_decoding_are_captured_in_a_cuda_graph() -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    codec = codec_of({})
    first, second = like_a_cache((2, 300, 64)), awkward("NaN and infinities", (2, 300, 64))
    tensor, draft, output = to_device(first), to_device(first), to_device(first)
    encoder = DeviceEncoder([tensor], codec)
    decoders = [DeviceDecoder.of(encoder, [out]) for out in (draft, output)]

    def work() -> None:
        encoder.encode()
        decoders[0].decode_draft()
        decoders[1].decode()

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    tensor.copy_(to_device(second))
    graph.replay()
    expected = reference_chunk(second, codec.config)
    for decoder in decoders:
        decoder.check()
    assert np.array_equal(encoder.payload(0).cpu().numpy(), expected.payload)
    assert np.array_equal(to_bits(draft), expected.draft)
    assert np.array_equal(to_bits(output), expected.full)


def test_a_group_that_the_kernels_cannot_hold_is_refused() -> None:
    from kvz.gpu.device_codec import max_payload_nbytes

    options = {"page_tokens": "514", "group_tokens": "257"}
    with pytest.raises(ConfigError, match="group_tokens up to 256, not 257; use device cpu"):
        max_payload_nbytes([(1, 8, 16)], "lynx", options)


def test_a_draft_of_a_codec_without_anchors_is_refused() -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    tensor = to_device(like_a_cache((1, 8, 16)))
    decoder = DeviceDecoder.of(DeviceEncoder([tensor], "splitzip"), [tensor])
    with pytest.raises(ConfigError, match="makes no anchors"):
        decoder.decode_draft()


def test_a_payload_shorter_than_its_shape_requires_is_refused() -> None:
    from kvz.gpu.device_codec import DeviceDecoder

    room = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(InvalidField, match=r"chunk 0: stream residual .* the section has 400"):
        DeviceDecoder([to_device(like_a_cache((1, 40, 16)))], room, [0], [400], [b""], "lynx")


@pytest.mark.parametrize("options", [{}, {"preset": "paper", "grouping": "token"}])
def test_archives_are_those_of_the_cpu(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvz.layout.TARGET_CHUNK_NBYTES", 2048)
    monkeypatch.setattr("kvz.gpu.pipeline.BATCH_NBYTES", 9_000)
    options = {"page_tokens": "32", "group_tokens": "16", **options}
    noise = np.random.default_rng(0).integers(0, 1 << 16, (1, 1, 70, 16), np.uint16)
    tensors: dict[str, tuple[str, Any]] = {
        "input_ids": ("I64", np.arange(70)[None]),
        "layers.0.key": ("BF16", bf16((1, 1, 90, 16), 1)),
        "layers.0.value": ("BF16", bf16((1, 2, 40, 32), 2)),
        "layers.1.key": ("BF16", noise),
        "layers.1.value": ("BF16", bf16((1, 1, 3, 16), 3)),
    }
    cache = write_cache(tmp_path / "cache.safetensors", tensors)
    cpu, gpu = tmp_path / "cpu.kvz", tmp_path / "gpu.kvz"
    kvz.compress(cache, cpu, "lynx", codec_options=options)
    kvz.compress(cache, gpu, "lynx", codec_options=options, device="cuda", threads=2)
    assert gpu.read_bytes() == cpu.read_bytes()
    for anchor_only in (False, True):
        back = [tmp_path / f"{device}-{anchor_only}.safetensors" for device in ("cpu", "cuda")]
        for path, device in zip(back, ("cpu", "cuda"), strict=True):
            kvz.decompress(cpu, path, device=device, threads=2, anchor_only=anchor_only)
        assert back[0].read_bytes() == back[1].read_bytes()
    kvz.verify(cpu, device="cuda")


def test_the_benchmark_has_rows_of_the_codec_and_of_its_anchors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvz.bench.device_run import run_device_bench

    monkeypatch.setattr("kvz.bench.device_run.NUM_LAYERS", 1)
    monkeypatch.setattr("kvz.bench.device_run.SMALL_TENSOR_NBYTES", 1024)
    monkeypatch.setattr("kvz.bench.device_workload.MIN_TENSOR_NBYTES", 1)
    monkeypatch.setattr("kvz.bench.device_run.COPY_NBYTES", 1 << 16)
    tensors = {"layers.0.key": ("BF16", bf16((1, 1, 40, 16), 1))}
    capture = write_cache(tmp_path / "a.safetensors", tensors)
    report = run_device_bench([capture], codecs=["lynx"], sizes=[2048], rounds=1)
    (case, small) = report.captures[0].cases
    assert [r.name for r in case.contestants[:2]] == ["lynx", "lynx, anchors"]
    both, anchors = case.contestants[:2]
    expected = reference_chunk(bf16((1, 40, 16), 1), codec_of({}).config)
    assert case.nbytes / both.ratio == expected.payload.size
    assert case.nbytes / anchors.ratio == residual_offset(expected.anchor_nbytes)
    assert "lynx, no graph" in [r.name for r in small.contestants]
