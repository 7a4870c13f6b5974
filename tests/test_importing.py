"""Dumps of other programs: what they hold, what is asked for, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cli_support import assert_refused, bf16, kvz, names, read_cache, write_cache  # noqa: E402
from tiny_models import WORDS, prompt_ids, save_model, tiny_llama  # noqa: E402

from kvz.capturing import capture  # noqa: E402
from kvz.formats.errors import ConfigError, NotSafetensorsFile, SourceError  # noqa: E402
from kvz.importing import DumpOptions, read_dump  # noqa: E402
from kvz.restoring import generate_from  # noqa: E402

BATCH_OF_ONE = (1, 3, 10, 4)  # batch, kv heads, tokens, head_dim


def caches(num_layers: int = 2) -> list[tuple[Any, Any]]:
    return [(bf16(BATCH_OF_ONE, 2 * i), bf16(BATCH_OF_ONE, 2 * i + 1)) for i in range(num_layers)]


def packed(key: Any, value: Any, axes: str) -> Any:
    """Key and value `[1, H, T, D]` in one array with these axes."""
    both = np.stack([key[0], value[0]])  # 2HTD
    array = both.transpose(["2HTD".index(letter) for letter in axes.replace("C", "HD")])
    if "C" in axes:
        at = axes.index("C")
        array = array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])
    return np.ascontiguousarray(array)


def write_dump(folder: Path, layers: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for i, tensors in enumerate(layers):
        path = folder / f"model.layers.{i}.self_attn.attn.safetensors"
        write_cache(path, {name: ("BF16", array) for name, array in tensors.items()})
    return folder


def as_bits(tensor: Any) -> Any:
    return tensor.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ("2TC", DumpOptions(kv_heads=3)),  # the example connector, most attention backends
        ("T2HD", DumpOptions()),  # its Triton backend
        ("2THD", DumpOptions(axes="2THD")),
        ("2HTD", DumpOptions(axes="2HTD")),
        ("H2TD", DumpOptions(axes="H2TD")),
    ],
)
def test_packed_layers_are_taken_apart(tmp_path: Path, axes: str, options: DumpOptions) -> None:
    original = caches()
    dump = write_dump(tmp_path / "d", [{"kv_cache": packed(k, v, axes)} for k, v in original])
    found = read_dump(dump, options)
    for (key, value), (expected_key, expected_value) in zip(found, original, strict=True):
        assert np.array_equal(as_bits(key), expected_key)
        assert np.array_equal(as_bits(value), expected_value)


@pytest.mark.parametrize(("name", "axes"), [("key", "BHTD"), ("k_cache", "HTD"), ("k", "THD")])
def test_separate_layers_are_read_with_the_axes_given(tmp_path: Path, name: str, axes: str) -> None:
    original = caches()

    def shaped(array: Any) -> Any:
        if axes == "BHTD":
            return array
        return array[0] if axes == "HTD" else np.ascontiguousarray(array[0].transpose(1, 0, 2))

    layers = [{name: shaped(k), name.replace("k", "v", 1): shaped(v)} for k, v in original]
    if name == "key":
        layers = [{"key": k, "value": v} for k, v in original]
    dump = write_dump(tmp_path / "d", layers)
    with pytest.raises(ConfigError, match="say what its axes are"):
        read_dump(dump, DumpOptions())
    found = read_dump(dump, DumpOptions(axes=axes))
    assert np.array_equal(as_bits(found[1][0]), original[1][0])
    assert np.array_equal(as_bits(found[1][1]), original[1][1])


def test_latents_are_one_head_without_values(tmp_path: Path) -> None:
    latents = bf16((10, 24))
    dump = write_dump(tmp_path / "d", [{"kv_cache": latents}])
    ((key, value),) = read_dump(dump, DumpOptions())
    assert value is None
    assert np.array_equal(as_bits(key), latents[None, None])


@pytest.mark.parametrize("shape", [(2, 2, 12), (2, 10, 3, 4), (2, 2, 3, 4), (3, 10, 4)])
def test_shapes_with_several_readings_are_asked_about(tmp_path: Path, shape: Any) -> None:
    dump = write_dump(tmp_path / "d", [{"kv_cache": bf16(shape)}])
    with pytest.raises(ConfigError, match=r"layers\.0.*several ways: say what its axes are"):
        read_dump(dump, DumpOptions())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (DumpOptions(), r"one axis of 12: give kv_heads"),
        (DumpOptions(kv_heads=5), "an axis of 12 is not 5 heads"),
        (DumpOptions(axes="2THD"), "does not have the axes '2THD'"),
        (DumpOptions(axes="T2C", kv_heads=3), "has no pair where"),
        (DumpOptions(axes="BTC", kv_heads=3), "has no 2 for the pair"),
    ],
)
def test_axes_that_do_not_fit_are_refused(tmp_path: Path, options: DumpOptions, named: str) -> None:
    dump = write_dump(tmp_path / "d", [{"kv_cache": packed(*caches()[0], "2TC")}])
    with pytest.raises(ConfigError, match=named):
        read_dump(dump, options)


@pytest.mark.parametrize("axes", ["2HD", "2TXD", "TTHD", "2TCD", "2THC", "2TH", ""])
def test_axes_without_sense_are_refused(axes: str) -> None:
    with pytest.raises(ConfigError, match="must name each axis once"):
        DumpOptions(axes=axes)


def test_gaps_and_doubles_are_refused(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d", [{"kv_cache": bf16((10, 4))}] * 3)
    (dump / "layer_1.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match="is of layer 1, as is"):
        read_dump(dump, DumpOptions())
    (dump / "layer_1.safetensors").unlink()
    (dump / "model.layers.1.self_attn.attn.safetensors").unlink()
    with pytest.raises(SourceError, match="layer 1 is missing, layer 2 is there"):
        read_dump(dump, DumpOptions())
    (dump / "other.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match="does not say of which layer"):
        read_dump(dump, DumpOptions())
    with pytest.raises(SourceError, match="no such folder"):
        read_dump(tmp_path / "gone", DumpOptions())


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d", [{"a": bf16((10, 4)), "b": bf16((10, 4))}])
    with pytest.raises(SourceError, match="needs one tensor, or a key and a value; holds a, b"):
        read_dump(dump, DumpOptions())


@pytest.mark.parametrize(
    ("magic", "named"),
    [
        (0x6767736E, "a llama.cpp session"),
        (0x67677371, "the llama.cpp state of a sequence"),
        (0x46554747, "a GGUF model"),
    ],
)
def test_states_of_llama_cpp_are_refused_by_name(tmp_path: Path, magic: int, named: str) -> None:
    path = tmp_path / "slot.bin"
    path.write_bytes(magic.to_bytes(4, "little") + bytes(60))
    for given in (path, tmp_path):
        with pytest.raises(NotSafetensorsFile, match=f"slot.bin: is {named}"):
            read_dump(given, DumpOptions())
    found = kvz("convert", "slot.bin", "-o", "c.safetensors", cwd=tmp_path)
    assert found.returncode == 3
    assert found.stderr.decode().count("\n") == 1
    assert names(tmp_path) == {"slot.bin"}


def test_a_converted_dump_has_the_names_of_a_capture(tmp_path: Path) -> None:
    original = caches()
    write_dump(tmp_path / "d", [{"kv_cache": packed(k, v, "2TC")} for k, v in original])
    assert_refused(
        kvz("convert", "d", "-o", "c.safetensors", cwd=tmp_path),
        2,
        "d/model.layers.0.self_attn.attn.safetensors: heads and head_dim are one axis of 12: "
        "give kv_heads",
    )
    done = kvz("convert", "d", "--kv-heads", "3", "-o", "c.safetensors", cwd=tmp_path)
    assert done.stdout == b"c.safetensors: 2 layers, keys [1, 3, 10, 4], of an unknown model\n"
    found = read_cache((tmp_path / "c.safetensors").read_bytes())
    assert found["layers.1.value"] == ("BF16", [1, 3, 10, 4], original[1][1].tobytes())
    # nothing says whose it is
    (tmp_path / "m").mkdir()
    save_model(tiny_llama(), tmp_path / "m")
    refused = kvz("generate", "c.safetensors", "--model", "m", cwd=tmp_path)
    assert refused.returncode == 5


def test_a_dump_that_the_model_confirms_can_be_restored(tmp_path: Path) -> None:
    model = tiny_llama()
    save_model(model, tmp_path / "m")
    ids = prompt_ids(1, 37)
    whole = capture(model, ids[:, :32], chunk_tokens=32)
    layers = []
    for i in range(3):
        key, value = (as_bits(whole.tensors[f"layers.{i}.{part}"]) for part in ("key", "value"))
        layers.append({"kv_cache": packed(key, value, "2TC")})
    write_dump(tmp_path / "d", layers)
    (tmp_path / "p").write_text(" ".join(WORDS[i] for i in ids[0].tolist()))
    given = ("convert", "d", "--kv-heads", "2", "--model", "m", "-o", "c.safetensors")
    done = kvz(*given, "--prompt-file", "p", cwd=tmp_path)
    assert done.stdout == b"c.safetensors: 3 layers, keys [1, 2, 32, 16], belongs to the model\n"
    # the five tokens after the last whole block are fed on top
    rest = ids[0, 32:].tolist()
    expected = generate_from(whole, model, 6, rest)
    assert generate_from(tmp_path / "c.safetensors", model, 6, rest) == expected
    (tmp_path / "p").write_text(" ".join(WORDS[i ^ 1] for i in ids[0].tolist()))
    refused = kvz(*given, "--prompt-file", "p", "-f", cwd=tmp_path)
    assert refused.returncode == 5
    assert b"layers.0.key: the model's differs by" in refused.stderr
