"""Keys in polar coordinates: radius and angle of each RoPE pair, quantised uniformly; a baseline.

The scheme of PolarQuant (arXiv 2502.00527) with a range for every group: radius and angle have a
minimum and a step for each pair and group of tokens, as :mod:`kvz.quality.uniform` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvz.formats.errors import ConfigError
from kvz.quality.cache_file import KEY, VALUE, CacheFile, CacheTensor
from kvz.quality.schemes import Bits, StoredCache, bits_of
from kvz.quality.uniform import UniformConfig, decode
from kvz.saliency import recorded_pairs


@dataclass(frozen=True, slots=True)
class PolarScheme:
    """Keys as radius and angle; values are exact."""

    name: str
    radius: UniformConfig
    angle: UniformConfig

    @classmethod
    def of(cls, name: str, options: Mapping[str, str]) -> PolarScheme:
        """Options: radius_bits, angle_bits, group, exact_tokens. Raises ConfigError."""
        chosen = {"radius_bits": "2", "angle_bits": "2", "group": "128", "exact_tokens": "32"}
        unknown = sorted(options.keys() - chosen.keys())
        if unknown:
            raise ConfigError(f"scheme {name}: has no option {unknown[0]!r}")
        try:
            numbers = {key: int(value) for key, value in (chosen | dict(options)).items()}
            common = ("channel", numbers["group"], numbers["exact_tokens"])
            parts = [UniformConfig(numbers[f"{x}_bits"], *common) for x in ("radius", "angle")]
        except ValueError as error:
            raise ConfigError(f"scheme {name}: {error}") from None
        return cls(name, *parts)

    @property
    def config(self) -> Mapping[str, Any]:
        return {"radius": asdict(self.radius), "angle": asdict(self.angle)}

    def store(self, cache: CacheFile, folder: Path) -> StoredCache:
        return _PolarCache(cache, self)


class _PolarCache(AbstractContextManager["_PolarCache"]):
    """Decodes a key of the capture when it is asked for."""

    def __init__(self, cache: CacheFile, scheme: PolarScheme) -> None:
        self._cache = cache
        self._scheme = scheme
        self._tensors = {tensor.name: tensor for tensor in cache.tensors}
        # refused before the long work
        self._channels = {tensor.name: self._pairs(tensor) for tensor in cache.part(KEY)}

    def _pairs(self, key: CacheTensor) -> tuple[slice, slice]:
        """First and second channels of all pairs."""
        pairs, inner = recorded_pairs(self._cache.source.metadata, key.name), key.shape[2]
        if pairs is None or pairs.pairing == "none" or pairs.rotary_dim != inner:
            raise ConfigError(
                f"scheme {self._scheme.name}: needs a capture that says how all {inner} channels "
                f"of {key.name} were rotated, this one says {pairs}"
            )
        if pairs.pairing == "interleaved":
            return slice(0, inner, 2), slice(1, inner, 2)
        return slice(0, inner // 2), slice(inner // 2, inner)

    @property
    def bits(self) -> Bits:
        nbytes, elements = {KEY: 0, VALUE: 0}, {KEY: 0, VALUE: 0}
        for tensor in self._tensors.values():
            outer, tokens, inner = tensor.shape
            half = (outer, tokens, inner // 2)
            elements[tensor.part] += tensor.num_elements
            if tensor.part == VALUE:
                nbytes[VALUE] += tensor.num_elements * tensor.itemsize
                continue
            for config in (self._scheme.radius, self._scheme.angle):
                nbytes[KEY] += config.stored_nbytes(half, tensor.itemsize)
        return bits_of(nbytes, elements)

    def read(self, name: str) -> torch.Tensor:
        tensor, exact = self._tensors[name], self._cache.read(name)
        if tensor.part == VALUE:
            return exact
        first, second = self._channels[name]
        x = exact.reshape(tensor.shape).float()
        radius = decode(torch.hypot(x[..., first], x[..., second]), self._scheme.radius)
        angle = decode(torch.atan2(x[..., second], x[..., first]), self._scheme.angle)
        coded = slice(self._scheme.radius.exact_tokens, None)
        x[:, coded, first] = (radius * angle.cos())[:, coded]
        x[:, coded, second] = (radius * angle.sin())[:, coded]
        return x.to(exact.dtype).reshape(exact.shape)

    def __exit__(self, *_: object) -> None:
        pass
