"""PN-Mix on device tensors: the reference's bytes and values, whatever the tensors hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import ptx_emulation
import pytest
import sample_capture
from cases import U8, U16
from cli_support import bf16, write_cache
from gpu_support import DEVICE, INTERPRETED, MARKS, real_gpu_only
from pnmix_reference import (
    Config,
    Mask,
    ReferenceChunk,
    reference_chunk,
    start_below_fp16,
)

import kvz
from kvz.codecs.pnmix import PnmixCodec
from kvz.codecs.pnmix_chunks import Prepared
from kvz.codecs.pnmix_values import PnmixValueCodec
from kvz.formats.codecs.pnmix import KeyConfig, ValueConfig, build_mask
from kvz.formats.errors import ConfigError, DamagedFile, InvalidField

torch = pytest.importorskip("torch")

from gpu_tensors import placed, to_bits, to_device  # noqa: E402

pytestmark = MARKS

Shape = tuple[int, int, int]
OPEN: dict[str, Any] = {"sink_tokens": 0, "tail": "coded"}
CONFIGS: dict[str, Config] = {
    "H3L1": KeyConfig(pairing="none", group_tokens=32, sink_tokens=5),
    "H3L1 by pages": KeyConfig(pairing="none", group_tokens=16, page_tokens=32, sink_tokens=3),
    "H4L2": KeyConfig(pairing="none", high_bits=4, low_bits=2, group_tokens=24, **OPEN),
    "uniform 2 bits": KeyConfig(pairing="none", high_bits=2, low_bits=2, group_tokens=16, **OPEN),
    "min and max": KeyConfig(pairing="none", levels="minmax", group_tokens=16, **OPEN),
    "8 bits by pages, odd groups": KeyConfig(
        pairing="none", high_bits=8, group_tokens=13, page_tokens=39, sink_tokens=5
    ),
    "groups of one token": KeyConfig(pairing="none", high_bits=2, group_tokens=1, **OPEN),
    "values of 2 bits": ValueConfig(group_tokens=16, sink_tokens=3),
    "values of 4 bits, odd groups": ValueConfig(bits=4, group_channels=7, group_tokens=13, **OPEN),
    "values of 8 bits, min and max": ValueConfig(
        bits=8, levels="minmax", group_channels=48, group_tokens=8, **OPEN
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
#: Every head dim is another set of kernels to compile: all with these, with others one of each
#: kind (one channel, words and single elements that do not fill the lanes, a last slab that is not
#: full).
USUAL = ("H3L1", "H3L1 by pages", "values of 2 bits")
HEAD_DIMS = [16, 5] if INTERPRETED else [1, 3, 20, 63, 64, 80, 128, 256, 576]
FEW_HEAD_DIMS = [16, 5] if INTERPRETED else [1, 20, 63, 64, 576]


def like_a_cache(shape: Shape, seed: int = 0) -> U16:
    rng = np.random.default_rng(seed)
    outer, _, inner = shape
    level, spread = rng.normal(size=(2, outer, 1, inner))
    values = level + np.exp(spread) * rng.normal(size=shape)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def some_salient(shape: Shape, share: float = 0.5) -> Mask:
    """Another number of channels in each head."""
    outer, _, inner = shape
    return np.random.default_rng(outer + inner).random((outer, inner)) < share


def codec_of(config: Config) -> Any:
    return PnmixCodec(config) if isinstance(config, KeyConfig) else PnmixValueCodec(config)


def book_of(config: Config, salient: Mask) -> bytes:
    # pairs of one channel
    return build_mask(salient) if isinstance(config, KeyConfig) else b""


def reference_chunks(
    bits: U16, config: Config, salient: Mask, chunk_tokens: int
) -> list[ReferenceChunk]:
    tokens = bits.shape[1]
    return [
        reference_chunk(bits[:, s : s + chunk_tokens], config, salient, s, tokens)
        for s in range(0, tokens, chunk_tokens)
    ]


def check_parity(
    bits: U16,
    config: Config,
    salient: Mask | None = None,
    *,
    chunk_tokens: int = 1 << 20,
    offset: int = 4,
    gap: int = 0,
) -> None:
    """The reference's payloads, from a poisoned buffer, and its values; nothing beside them."""
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder, max_payload_nbytes

    salient = some_salient(bits.shape) if salient is None else salient
    codec, expected = codec_of(config), reference_chunks(bits, config, salient, chunk_tokens)
    source, _ = placed(bits, offset, gap)
    nbytes = max_payload_nbytes([bits.shape], codec, chunk_tokens=chunk_tokens)
    encoder = DeviceEncoder(
        [source],
        codec,
        codebooks=[book_of(config, salient)],
        payloads=torch.full((nbytes,), cases.POISON, dtype=torch.uint8, device=DEVICE),
        chunk_tokens=chunk_tokens,
    )
    encoder.encode()
    assert encoder.payload_nbytes() == [chunk.payload.size for chunk in expected]
    for i, chunk in enumerate(expected):
        assert np.array_equal(encoder.payload(i).cpu().numpy(), chunk.payload), encoder.chunks[i]
    output, whole = placed(np.full_like(bits, 0x7F7F), offset, gap)
    untouched = whole.clone()
    decoder = DeviceDecoder.of(encoder, [output])
    decoder.decode()
    decoder.check()
    values = np.concatenate([chunk.values for chunk in expected], axis=1)
    assert np.array_equal(to_bits(output), values)
    output.copy_(to_device(np.full_like(bits, 0x7F7F)))
    assert torch.equal(whole, untouched)


@pytest.mark.parametrize(
    ("name", "inner"),
    [(n, dim) for n in CONFIGS for dim in (HEAD_DIMS if n in USUAL else FEW_HEAD_DIMS)],
)
def test_payloads_and_values_are_those_of_the_reference(name: str, inner: int) -> None:
    config = CONFIGS[name]
    # the interpreter takes long for many groups
    tokens = (9 if config.group_tokens == 1 else 31) if INTERPRETED else 600
    check_parity(like_a_cache((2, tokens, inner)), config)


@pytest.mark.parametrize(
    "tokens", [1, 6, 37] if INTERPRETED else [1, 4, 5, 6, 12, 13, 36, 37, 38, 69, 255, 1000]
)
@pytest.mark.parametrize("name", ["H3L1", "values of 2 bits"])
def test_any_number_of_tokens_works(name: str, tokens: int) -> None:
    check_parity(like_a_cache((1, tokens, 16), tokens), CONFIGS[name])


def test_sinks_and_tail_are_those_of_the_tensor_not_of_every_chunk() -> None:
    check_parity(like_a_cache((2, 75, 16), 1), CONFIGS["H3L1"], chunk_tokens=32)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_and_all_channels_may_be_salient(share: float) -> None:
    shape = (2, 40, 16)
    check_parity(like_a_cache(shape), CONFIGS["H3L1"], some_salient(shape, share))


@pytest.mark.parametrize("bits", [(4, 1), (3, 2), (4, 4), (8, 4), (8, 5)], ids=str)
@pytest.mark.parametrize("page_tokens", [None, 32])
def test_heads_with_and_without_salient_channels_have_their_own_levels(
    page_tokens: int | None, bits: tuple[int, int]
) -> None:
    high_bits, low_bits = bits
    config = KeyConfig(
        pairing="none",
        high_bits=high_bits,
        low_bits=low_bits,
        group_tokens=16,
        page_tokens=page_tokens,
        **OPEN,
    )
    shape = (3, 40, 12)
    salient = some_salient(shape)
    salient[1] = False
    check_parity(like_a_cache(shape), config, salient)


@pytest.mark.parametrize("content", ["like a cache", "every ninth token apart"])
@pytest.mark.parametrize(
    ("group", "inner", "high_bits"), [(126, 8, 3), (126, 4, 4), (500, 4, 3), (1000, 20, 4)]
)
def test_sums_of_many_tokens_are_exact(
    group: int, inner: int, high_bits: int, content: str
) -> None:
    # the widest blocks, several of a group, and sums that need more than 32 bits
    config = KeyConfig(pairing="none", high_bits=high_bits, group_tokens=group, **OPEN)
    shape = (1, group + 50, inner)
    bits = like_a_cache(shape) if content == "like a cache" else awkward(content, shape)
    check_parity(bits, config)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_masks_of_partially_rotated_heads_are_those_of_the_cpu(pairing: str) -> None:
    from kvz.gpu.device_codec import DeviceEncoder

    config = KeyConfig(pairing=pairing, rotary_dim=10, group_tokens=16, **OPEN)
    codec, bits = PnmixCodec(config), like_a_cache((2, 20, 15))
    # 5 pairs and 5 channels
    book = build_mask(np.random.default_rng(3).random((2, 10)) < 0.5)
    encoder = DeviceEncoder([to_device(bits)], codec, codebooks=[book])
    encoder.encode()
    prepared = codec.prepare(book, "BF16", bits.shape)
    expected = reference_chunk(bits, config, prepared.salient, 0, 20)
    assert np.array_equal(encoder.payload(0).cpu().numpy(), expected.payload)


@real_gpu_only
@pytest.mark.parametrize("shape", [(2, 1500, 64), (1, 700, 66)], ids=str)
@pytest.mark.parametrize("page_groups", [None, 3])
@pytest.mark.parametrize("group", [1, 2, 7, 8, 9, 100, 128, 512, 1024])
def test_any_size_of_a_group_works(group: int, page_groups: int | None, shape: Shape) -> None:
    page = page_groups and page_groups * group
    config = KeyConfig(pairing="none", group_tokens=group, page_tokens=page, sink_tokens=32)
    check_parity(like_a_cache(shape, group), config)


@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (4, 4), (3, 5)])
@pytest.mark.parametrize("name", ["H3L1", "values of 2 bits"])
def test_any_place_in_memory_works(name: str, offset: int, gap: int) -> None:
    check_parity(like_a_cache((3, 30, 16)), CONFIGS[name], offset=offset, gap=gap)


def awkward(content: str, shape: Shape) -> U16:
    rng = np.random.default_rng(7)
    bits = like_a_cache(shape, 3)
    if content == "NaN and infinities":
        # in the first group that is coded, and in the last
        bits[0, 7, 3], bits[-1, -12, -1], bits[0, 20, 0] = 0x7FC1, 0xFF80, 0x7F80
    elif content == "an element of 2^15":
        bits[-1, 17, 2] = 0xC700
    elif content == "nearly 2^15":
        bits[:] = np.where(rng.random(shape) < 0.5, 0x46FF, 0xC6FF)
    elif content == "all too large":
        bits[:] = 0x7F7F
    elif content == "zeros of both signs":
        bits[:] = np.where(rng.random(shape) < 0.5, 0, 0x8000)
    elif content == "constant channels":
        bits[:] = bits[:, :1]
    elif content == "subnormals":
        bits[:] = rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15
    elif content == "around 2^-64 in every other channel":
        bits[:, :, ::2] = rng.integers(55, 70, bits[:, :, ::2].shape) << 7
    elif content == "every ninth token apart":
        # the greatest weights, and as many of them as there can be
        bits[:] = 0
        bits[:, ::9] = 0x3F80
    elif content == "halves of codes":
        values = (rng.integers(0, 15, shape) / 2).astype(np.float32)
        bits[:] = values.view(np.uint32) >> 16
    else:
        assert content == "random bits"
        bits[:] = rng.integers(0, 1 << 16, shape)
    return bits


CONTENTS = [
    "NaN and infinities",
    "an element of 2^15",
    "nearly 2^15",
    "all too large",
    "zeros of both signs",
    "constant channels",
    "subnormals",
    "around 2^-64 in every other channel",
    "every ninth token apart",
    "halves of codes",
    "random bits",
]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["H3L1", "H3L1 by pages", "values of 2 bits"])
def test_awkward_elements_are_coded_as_by_the_reference(name: str, content: str) -> None:
    check_parity(awkward(content, (2, 56, 16)), CONFIGS[name])


def test_start_that_a_fit_puts_below_fp16_is_limited() -> None:
    config = KeyConfig(pairing="none", group_tokens=16, **OPEN)
    check_parity(start_below_fp16(), config, np.ones((1, 20), bool))


@real_gpu_only
@each_config
@pytest.mark.parametrize("content", CONTENTS)
def test_many_awkward_elements_are_coded_as_by_the_reference(config: Config, content: str) -> None:
    for shape in ((2, 1100, 64), (1, 300, 66)):
        check_parity(awkward(content, shape), config)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs the instructions themselves")
@pytest.mark.parametrize("name", ["H3L1", "H3L1 by pages", "H4L2", "values of 2 bits"])
def test_the_fast_paths_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx_emulation.emulate(monkeypatch)
    monkeypatch.setattr("kvz.kernels.gpu.pnmix.compiles", lambda kernel: True)
    for content in ("NaN and infinities", "zeros of both signs", "every ninth token apart"):
        check_parity(awkward(content, (2, 56, 12)), CONFIGS[name])


def test_encoding_again_leaves_nothing_of_the_last_time() -> None:
    from kvz.gpu.device_codec import DeviceEncoder

    config, shape = CONFIGS["H3L1 by pages"], (1, 56, 16)
    salient = some_salient(shape)
    first, second = awkward("NaN and infinities", shape), like_a_cache(shape)
    tensor = to_device(first)
    book = book_of(config, salient)
    encoder = DeviceEncoder([tensor], codec_of(config), codebooks=[book])
    for bits in (first, second):
        tensor.copy_(to_device(bits))
        encoder.encode()
        expected = reference_chunk(bits, config, salient, 0, 56).payload
        assert np.array_equal(encoder.payload(0).cpu().numpy(), expected)


def decode_on_device(
    payload: U8, config: Config, salient: Mask, shape: Shape
) -> tuple[U16, bool, bool]:
    """What the device makes of a payload, whether it accepts it, whether it kept to its output."""
    from kvz.gpu.device_codec import DeviceDecoder

    output, whole = placed(np.full(shape, 0x7F7F, np.uint16), 4)
    untouched = whole.clone()
    # the length as on the device: nothing is checked before
    lengths = torch.tensor([payload.size], dtype=torch.int64, device=DEVICE)
    stored = torch.from_numpy(payload.copy()).clone().to(DEVICE)  # as torch allocates: aligned
    book = book_of(config, salient)
    decoder = DeviceDecoder([output], stored, [0], lengths, [book], codec_of(config))
    decoder.decode()
    try:
        decoder.check()
        accepted = True
    except InvalidField:
        accepted = False
    values = to_bits(output).copy()
    output.copy_(to_device(np.full(shape, 0x7F7F, np.uint16)))
    return values, accepted, torch.equal(whole, untouched)


def damaged_payloads(good: ReferenceChunk) -> dict[str, U8]:
    """Payloads that a file could hold."""
    rng = np.random.default_rng(5)
    payload, flags = good.payload, good.flags
    after = slice(-(-flags.stop // 16) * 16, payload.size - 2 * good.num_raw)

    def patched(where: slice, value: Any) -> U8:
        changed = payload.copy()
        changed[where] = value
        return changed

    odd = np.array([0, 0x80, 0x7C, 0xFC, 0x7E, 0xFF, 0x7F, 1], np.uint8)
    nbytes = after.stop - after.start
    return {
        "flags of 2": patched(flags, 2),
        "flags without their groups": patched(flags, 1),
        "random scales and codes": patched(after, rng.integers(0, 256, nbytes)),
        "scales that are infinite and NaN": patched(after, rng.choice(odd, nbytes)),
        "one byte less": payload[:-1],
        "one byte more": np.append(payload, np.uint8(0)),
        "half of it": payload[: payload.size // 2],
        "next to nothing": payload[:20],
    }


@pytest.mark.parametrize("name", ["H3L1", "H3L1 by pages", "values of 2 bits"])
@pytest.mark.parametrize("content", ["NaN and infinities", "halves of codes"])
def test_a_damaged_payload_has_the_verdict_and_the_values_of_the_cpu(
    name: str, content: str
) -> None:
    config, shape = CONFIGS[name], (2, 56, 16)
    salient = some_salient(shape)
    codec = codec_of(config)
    prepared = Prepared(56, salient if isinstance(config, KeyConfig) else None)
    good = reference_chunk(awkward(content, shape), config, salient, 0, 56)
    for what, payload in damaged_payloads(good).items():
        values, accepted, kept_to_output = decode_on_device(payload, config, salient, shape)
        assert kept_to_output, what
        expected = np.full(shape, 0x7F7F, np.uint16)
        try:
            codec.decode(payload, prepared, expected, 0)
        except DamagedFile:
            assert not accepted, what
        else:
            assert accepted, what
            assert np.array_equal(values, expected), what


@real_gpu_only
def test_encoding_and_decoding_are_captured_in_a_cuda_graph() -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    config, shape = CONFIGS["H3L1 by pages"], (2, 300, 64)
    salient = some_salient(shape)
    first, second = like_a_cache(shape), awkward("NaN and infinities", shape)
    tensor, output = to_device(first), to_device(first)
    book = book_of(config, salient)
    encoder = DeviceEncoder([tensor], codec_of(config), codebooks=[book])
    decoder = DeviceDecoder.of(encoder, [output])
    encoder.encode()
    decoder.decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encoder.encode()
        decoder.decode()
    tensor.copy_(to_device(second))
    graph.replay()
    decoder.check()
    expected = reference_chunk(second, config, salient, 0, 300)
    assert np.array_equal(encoder.payload(0).cpu().numpy(), expected.payload)
    assert np.array_equal(to_bits(output), expected.values)


def test_a_codec_without_a_mask_is_refused() -> None:
    from kvz.gpu.device_codec import DeviceEncoder

    with pytest.raises(ConfigError, match="masks are made while a capture is compressed"):
        DeviceEncoder([to_device(like_a_cache((1, 40, 16)))], "pnmix")


def test_groups_too_large_for_the_kernels_are_refused() -> None:
    from kvz.gpu.device_codec import max_payload_nbytes

    codec = PnmixValueCodec(ValueConfig(group_tokens=1024, group_channels=256))
    with pytest.raises(ConfigError, match="not 1024 tokens of 256 channels; use device cpu"):
        max_payload_nbytes([(1, 2000, 256)], codec)


@pytest.mark.parametrize("values", ["exact", "2"])
def test_archives_are_those_of_the_cpu(
    values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvz.layout.TARGET_CHUNK_NBYTES", 2048)
    monkeypatch.setattr("kvz.gpu.pipeline.BATCH_NBYTES", 9_000)
    options = {"group_tokens": "16", "sink_tokens": "4", "criterion": "k_norm", "rope": "half"}
    options["values"] = values
    nan = bf16((1, 2, 45, 16), 4)
    nan[0, 1, 30, 3] = 0x7FC0
    noise = np.random.default_rng(0).integers(0, 1 << 16, (1, 1, 70, 16), np.uint16)
    tensors: dict[str, tuple[str, Any]] = {
        "input_ids": ("I64", np.arange(70)[None]),
        "layers.0.key": ("BF16", bf16((1, 1, 90, 16), 1)),
        "layers.0.value": ("BF16", bf16((1, 2, 40, 32), 2)),
        "layers.1.key": ("BF16", nan),
        "layers.1.value": ("BF16", noise),
        "layers.2.key": ("BF16", bf16((1, 1, 3, 16), 3)),
        "layers.2.value": ("BF16", bf16((1, 1, 3, 16), 5)),
    }
    cache = write_cache(tmp_path / "cache.safetensors", tensors)
    cpu, gpu = tmp_path / "cpu.kvz", tmp_path / "gpu.kvz"
    kvz.compress(cache, cpu, "pnmix", codec_options=options)
    report = kvz.compress(cache, gpu, "pnmix", codec_options=options, device="cuda", threads=2)
    assert report.device == "cuda"
    assert gpu.read_bytes() == cpu.read_bytes()
    back = [tmp_path / f"{device}.safetensors" for device in ("cpu", "cuda")]
    for path, device in zip(back, ("cpu", "cuda"), strict=True):
        kvz.decompress(cpu, path, device=device, threads=2)
    assert back[0].read_bytes() == back[1].read_bytes()
    kvz.verify(cpu, device="cuda")


@real_gpu_only
def test_an_archive_of_the_sample_capture_is_that_of_the_cpu(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        kvz.compress(sample_capture.PATH, tmp_path / device, "pnmix", device=device)
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cuda").read_bytes()


def test_the_benchmark_has_a_row_of_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvz.bench.device_run import run_device_bench

    monkeypatch.setattr("kvz.bench.device_run.NUM_LAYERS", 1)
    monkeypatch.setattr("kvz.bench.device_run.SMALL_TENSOR_NBYTES", 1024)
    monkeypatch.setattr("kvz.bench.device_workload.MIN_TENSOR_NBYTES", 1)
    monkeypatch.setattr("kvz.bench.device_run.COPY_NBYTES", 1 << 16)
    tensors = {
        f"layers.0.{part}": ("BF16", like_a_cache((1, 32, 16), i)[None])
        for i, part in enumerate(("key", "value"))
    }
    capture = write_cache(tmp_path / "a.safetensors", tensors)
    options = "criterion=k_norm,rope=half,group_tokens=16,sink_tokens=0,values=4"
    report = run_device_bench([capture], codecs=[f"pnmix:{options}"], sizes=[2048], rounds=1)
    case = report.captures[0].cases[0]
    (result,) = case.contestants
    assert result.name == f"pnmix:{options}"
    assert (case.num_tensors, case.nbytes) == (2, 2 * 32 * 16 * 2)
    archive = tmp_path / "a.kvz"
    settings = dict(part.split("=") for part in options.split(","))
    kvz.compress(capture, archive, "pnmix", codec_options=settings)
    with kvz.open(archive) as opened:
        rows = opened.index[opened.index["kind"] == 3]
    assert result.ratio == case.nbytes / int(rows["length"].sum())
