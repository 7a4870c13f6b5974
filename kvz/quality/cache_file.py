"""A capture as the quality tool sees it: its keys and values as torch tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from kvz.codecs.raw import RawCodec
from kvz.formats.errors import ConfigError
from kvz.formats.head import TensorEntry
from kvz.layout import Layout, is_key_or_value, part_name
from kvz.planning import plan
from kvz.safetensors_io import SafetensorsFile
from kvz.state_reader import read_tensor

#: What the quality of a lossy codec can be asked of.
_DTYPES = ("BF16", "F16", "F32")
KEY, VALUE = "key", "value"


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A key or value tensor: `shape` is `[outer, tokens, inner]` of the stored one."""

    name: str
    part: str
    shape: tuple[int, int, int]
    itemsize: int

    @property
    def num_elements(self) -> int:
        outer, tokens, inner = self.shape
        return outer * tokens * inner


class CacheFile:
    """A safetensors file with keys and values; a context manager.

    tensors: its floating-point keys and values, in file order. Raises ConfigError when it has none
    whose tokens can be told, and what :class:`SafetensorsFile` raises.
    """

    def __init__(self, path: str | os.PathLike[str], layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        self.source = SafetensorsFile(path)
        self.name = self.source.name
        try:
            entries = plan(self.source, RawCodec(), self.layout).head.tensors
            self.tensors = tuple(_describe(entry) for entry in entries if _is_wanted(entry))
            if not self.tensors:
                raise ConfigError(f"{self.name}: no key or value tensor with a known token axis")
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> torch.Tensor:
        """A tensor in its shape and dtype, on the CPU."""
        return read_tensor(self.source, name)

    def part(self, part: str) -> list[CacheTensor]:
        """All keys or all values."""
        return [tensor for tensor in self.tensors if tensor.part == part]

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> CacheFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_wanted(entry: TensorEntry) -> bool:
    return (
        entry.dtype in _DTYPES
        and entry.token_axis is not None
        and entry.num_elements > 0
        and is_key_or_value(entry.name)
        and part_name(entry.name) in (KEY, VALUE)
    )


def _describe(entry: TensorEntry) -> CacheTensor:
    return CacheTensor(entry.name, part_name(entry.name), entry.view_shape, entry.itemsize)
