"""Cache dumps of other programs, brought to the names and axes of a capture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvz.formats.errors import ConfigError, NotSafetensorsFile, SourceError
from kvz.safetensors_io import SafetensorsFile
from kvz.state_reader import read_tensor

# One safetensors file for each layer, named after vLLM's layer: model.layers.3.self_attn.attn
_LAYER_NUMBER = re.compile(r"(?:^|[._-])(?:layers?|h|blocks?)[._-]?(\d+)(?=[._-]|$)")
_NUMBER = re.compile(r"\d+")
_KEY_NAME = re.compile(r"(^|[._])(k|key)s?(_cache)?$")
_VALUE_NAME = re.compile(r"(^|[._])(v|value)s?(_cache)?$")
_AXES = "2BTHDC"

# The first four bytes, little endian, of what llama.cpp writes.
_LLAMA_CPP = {
    b"nsgg": "a llama.cpp session (magic ggsn)",
    b"qsgg": "the llama.cpp state of a sequence (magic ggsq)",
    b"algg": "a llama.cpp adapter (magic ggla)",
    b"GGUF": "a GGUF model, not a cache",
}


@dataclass(frozen=True)
class DumpOptions:
    """How to read a dump that does not say.

    axes: a letter for each axis of a stored tensor: 2 for key and value packed into one, B
    batch, T tokens, H kv heads, D head_dim, C heads and head_dim in one. kv_heads: to take C
    apart.
    """

    axes: str | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ConfigError(f"kv_heads must be >= 1, got {self.kv_heads}")
        axes = self.axes
        if axes is None:
            return
        valid = set(axes) <= set(_AXES) and len(set(axes)) == len(axes) and "T" in axes
        if not valid or ("C" in axes) == ("D" in axes) or ("C" in axes and "H" in axes):
            raise ConfigError(
                f"axes {axes!r} must name each axis once: 2 (key and value), B, T (tokens), "
                "H (kv heads), D (head_dim), or C for heads and head_dim in one; such as 2THD"
            )


def read_dump(
    path: str | Path, options: DumpOptions
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Key and value `[batch, kv_heads, tokens, head_dim]` of each layer; no value for latents.

    path: a folder with one safetensors file for each layer (as the example connector of vLLM
    writes them), each with one packed tensor or one of keys and one of values.
    Raises SourceError for a folder without layers or with gaps, NotSafetensorsFile for files of
    llama.cpp, ConfigError when the axes are ambiguous and not given.
    """
    files = _layer_files(Path(path))
    return [_read_layer(file, options) for file in files]


def _layer_files(path: Path) -> list[Path]:
    if path.is_file():
        check_known_format(path)
        raise SourceError(f"{path}: is a file; a dump is a folder with a file for each layer")
    if not path.is_dir():
        raise SourceError(f"{path}: no such folder")
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix != ".safetensors":
            check_known_format(file)
    by_layer: dict[int, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        number = _layer_number(file)
        if number in by_layer:
            raise SourceError(f"{file}: is of layer {number}, as is {by_layer[number].name}")
        by_layer[number] = file
    missing = [i for i in range(len(by_layer)) if i not in by_layer]
    if not by_layer:
        raise SourceError(f"{path}: holds no .safetensors file")
    if missing:
        raise SourceError(f"{path}: layer {missing[0]} is missing, layer {max(by_layer)} is there")
    return [by_layer[i] for i in range(len(by_layer))]


def check_known_format(path: Path) -> None:
    """Refuse what llama.cpp writes by its name. Raises NotSafetensorsFile."""
    with open(path, "rb") as stream:
        kind = _LLAMA_CPP.get(stream.read(4))
    if kind is not None:
        raise NotSafetensorsFile(
            f"{path}: is {kind}; its layout is private to one release of llama.cpp, kvz does not "
            "read it: capture the prompt with kvz capture instead"
        )


def _layer_number(file: Path) -> int:
    stem = file.name.removesuffix(".safetensors")
    match = _LAYER_NUMBER.search(stem)
    if match is not None:
        return int(match.group(1))
    numbers = _NUMBER.findall(stem)
    if len(numbers) != 1:
        raise SourceError(f"{file}: its name does not say of which layer it is")
    return int(numbers[0])


def _read_layer(path: Path, options: DumpOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    with SafetensorsFile(path) as file:
        tensors = {name: read_tensor(file, name) for name in file.tensor_names}
    if len(tensors) == 1:
        (tensor,) = tensors.values()
        axes = options.axes or _packed_axes(path, tensor)
        if "2" not in axes:
            if options.axes is not None and axes != "TC":
                raise ConfigError(f"{path}: holds one tensor, axes {axes!r} has no 2 for the pair")
            return _to_capture(path, tensor, axes.replace("C", "D"), options), None
        key, value = _unpack(path, tensor, axes)
        rest = axes.replace("2", "")
        return _to_capture(path, key, rest, options), _to_capture(path, value, rest, options)
    keys = [name for name in tensors if _KEY_NAME.search(name)]
    values = [name for name in tensors if _VALUE_NAME.search(name)]
    if len(tensors) != 2 or len(keys) != 1 or len(values) != 1:
        names = ", ".join(sorted(tensors))
        raise SourceError(f"{path}: needs one tensor, or a key and a value; holds {names}")
    if options.axes is None or "2" in options.axes:
        shape = list(tensors[keys[0]].shape)
        raise ConfigError(f"{path}: {keys[0]} is {shape}: say what its axes are, such as BHTD")
    key, value = (tensors[name] for name in (keys[0], values[0]))
    return (
        _to_capture(path, key, options.axes, options),
        _to_capture(path, value, options.axes, options),
    )


def _packed_axes(path: Path, tensor: torch.Tensor) -> str:
    """Axes of a packed tensor, where its shape leaves one reading."""
    shape = tuple(tensor.shape)
    if len(shape) == 2:
        return "TC"  # latents: one row for each token
    pairs = [axis for axis in (0, 1) if len(shape) > 2 and shape[axis] == 2]
    if pairs == [0] and len(shape) == 3:
        return "2TC"
    if pairs == [1] and len(shape) == 4:
        return "T2HD"
    raise ConfigError(
        f"{path}: a tensor of shape {list(shape)} can be read in several ways: "
        "say what its axes are, such as 2THD or 2HTD"
    )


def _unpack(path: Path, tensor: torch.Tensor, axes: str) -> Sequence[torch.Tensor]:
    _check_rank(path, tensor, axes)
    axis = axes.index("2")
    if tensor.shape[axis] != 2:
        raise ConfigError(
            f"{path}: shape {list(tensor.shape)} has no pair where {axes!r} has its 2"
        )
    return tensor.unbind(axis)


def _to_capture(path: Path, tensor: torch.Tensor, axes: str, options: DumpOptions) -> torch.Tensor:
    _check_rank(path, tensor, axes)
    if "C" in axes:
        axis, width = axes.index("C"), tensor.shape[axes.index("C")]
        heads = options.kv_heads
        if heads is None:
            raise ConfigError(f"{path}: heads and head_dim are one axis of {width}: give kv_heads")
        if width % heads:
            raise ConfigError(f"{path}: an axis of {width} is not {heads} heads")
        sizes = tensor.shape
        tensor = tensor.reshape(*sizes[:axis], heads, width // heads, *sizes[axis + 1 :])
        axes = axes.replace("C", "HD")
    for letter in "BH":
        if letter not in axes:
            tensor, axes = tensor.unsqueeze(0), letter + axes
    return tensor.permute([axes.index(letter) for letter in "BHTD"]).contiguous()


def _check_rank(path: Path, tensor: torch.Tensor, axes: str) -> None:
    if tensor.ndim != len(axes):
        raise ConfigError(f"{path}: shape {list(tensor.shape)} does not have the axes {axes!r}")
