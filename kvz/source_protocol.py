"""What restore, compress and bench need of a cache, whether it is a capture or an archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt


class CacheSource(Protocol):
    """Named tensors with string metadata, read one at a time."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The safetensors `__metadata__` of the capture."""
        ...

    @property
    def tensor_names(self) -> Sequence[str]:
        """Names of all tensors, in file order."""
        ...

    def dtype(self, name: str) -> str:
        """Safetensors dtype string of a tensor: "BF16", "F16", "F32", "I64", ..."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor."""
        ...

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its shape, as little-endian unsigned integers of its element width."""
        ...


@runtime_checkable
class AnnouncedSource(Protocol):
    """A source that reads ahead when it knows what comes."""

    def announce(self, names: Sequence[str]) -> None:
        """Say that these tensors will be read next, in this order."""
        ...
