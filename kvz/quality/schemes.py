"""What is compared: ways to store keys and values, each with its decoded cache and its bits.

A scheme is named as ``NAME`` or ``NAME:KEY=VALUE,...``: "bf16" (what is stored is exact),
"uniform" (:mod:`kvz.quality.uniform`), "polar" (:mod:`kvz.quality.polar`), one of :data:`PRESETS`,
or a codec of kvz with its options. Another kind of scheme is one call of :func:`register_scheme`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from kvz.formats.errors import ConfigError
from kvz.formats.ids import CODEC_NAMES
from kvz.quality.cache_file import KEY, VALUE, CacheFile
from kvz.quality.uniform import UniformConfig, decode

EXACT = "bf16"


@dataclass(frozen=True, slots=True)
class Bits:
    """Stored bits per element of the keys, of the values, and of both with everything counted."""

    key: float
    value: float
    total: float


class StoredCache(AbstractContextManager["StoredCache"], Protocol):
    """A cache that went through a scheme, for as long as the context lasts."""

    @property
    def bits(self) -> Bits: ...

    def read(self, name: str) -> torch.Tensor:
        """The decoded tensor, in the shape and dtype of the original, on the CPU."""
        ...


class Scheme(Protocol):
    """A way to store keys and values. `config`: JSON scalars that tell it from others."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    def store(self, cache: CacheFile, folder: Path) -> StoredCache:
        """Put the keys and values of `cache` through the scheme; `folder` is for its files.

        Both must live as long as the result.
        """
        ...


#: Makes a scheme from its whole name and its options. Raises ConfigError.
SchemeFactory = Callable[[str, Mapping[str, str]], Scheme]


@dataclass(frozen=True, slots=True)
class UniformScheme:
    """The uniform quantiser; None: that part is stored as it is."""

    name: str
    key: UniformConfig | None
    value: UniformConfig | None

    @property
    def config(self) -> Mapping[str, Any]:
        parts = {KEY: self.key, VALUE: self.value}
        return {part: config and asdict(config) for part, config in parts.items()}

    def store(self, cache: CacheFile, folder: Path) -> StoredCache:
        return _UniformCache(cache, {KEY: self.key, VALUE: self.value})


class _UniformCache(AbstractContextManager["_UniformCache"]):
    """Decodes a tensor of the capture when it is asked for."""

    def __init__(self, cache: CacheFile, configs: Mapping[str, UniformConfig | None]) -> None:
        self._cache = cache
        self._configs = configs
        self._tensors = {tensor.name: tensor for tensor in cache.tensors}

    @property
    def bits(self) -> Bits:
        nbytes, elements = {KEY: 0, VALUE: 0}, {KEY: 0, VALUE: 0}
        for tensor in self._tensors.values():
            config = self._configs[tensor.part]
            raw = tensor.num_elements * tensor.itemsize
            stored = raw if config is None else config.stored_nbytes(tensor.shape, tensor.itemsize)
            nbytes[tensor.part] += stored
            elements[tensor.part] += tensor.num_elements
        return bits_of(nbytes, elements)

    def read(self, name: str) -> torch.Tensor:
        tensor, exact = self._tensors[name], self._cache.read(name)
        config = self._configs[tensor.part]
        if config is None:
            return exact
        return decode(exact.reshape(tensor.shape), config).reshape(exact.shape)

    def __exit__(self, *_: object) -> None:
        pass


def bits_of(nbytes: Mapping[str, int], elements: Mapping[str, int], shared_nbytes: int = 0) -> Bits:
    """Bits per element from the bytes and elements of each part, and bytes for both."""
    total = 8 * (sum(nbytes.values()) + shared_nbytes) / sum(elements.values())
    parts = [8 * nbytes[part] / max(1, elements[part]) for part in (KEY, VALUE)]
    return Bits(parts[0], parts[1], total)


#: Of the options of "uniform": what the values are stored with.
_VALUES = ("same", "exact", "2", "4", "8")
_VALUE_GROUP = 64


def _uniform(name: str, options: Mapping[str, str]) -> UniformScheme:
    """`values`: "same" as the keys, "exact", or bits per token in groups of 64 channels."""
    known = {"bits": int, "axis": str, "group": int, "exact_tokens": int, "scales": str}
    values = options.get("values", "same")
    if values not in _VALUES:
        raise ConfigError(f"scheme {name}: values must be {', '.join(_VALUES)}, got {values!r}")
    given = {key: value for key, value in options.items() if key != "values"}
    unknown = sorted(given.keys() - known.keys())
    if unknown or not {"bits", "axis"} <= given.keys():
        problem = f"has no option {unknown[0]!r}" if unknown else "needs bits and axis"
        raise ConfigError(f"scheme {name}: {problem}; options: {', '.join(known)}, values")
    try:
        key = UniformConfig(**{k: known[k](v) for k, v in given.items()})
    except ValueError as error:
        raise ConfigError(f"scheme {name}: {error}") from None
    value: UniformConfig | None = key
    if values == "exact":
        value = None
    elif values != "same":
        value = replace(key, bits=int(values), axis="token", group=_VALUE_GROUP)
    return UniformScheme(name, key, value)


def _exact(name: str, options: Mapping[str, str]) -> UniformScheme:
    if options:
        raise ConfigError(f"scheme {name}: {EXACT} takes no options")
    return UniformScheme(name, None, None)


def _codec(name: str, options: Mapping[str, str]) -> Scheme:
    from kvz.quality.archive_scheme import ArchiveScheme

    codec = name.partition(":")[0]
    detail = options.get("detail", "full")
    rest = {key: value for key, value in options.items() if key != "detail"}
    return ArchiveScheme.of(name, codec, rest, detail)


def _polar(name: str, options: Mapping[str, str]) -> Scheme:
    from kvz.quality.polar import PolarScheme

    return PolarScheme.of(name, options)


_FACTORIES: dict[str, SchemeFactory] = {EXACT: _exact, "uniform": _uniform, "polar": _polar}

#: Short names; options given with one are added to its own, or replace them.
PRESETS = {
    "int8-channel": "uniform:bits=8,axis=channel,group=32",
    "int8-token": "uniform:bits=8,axis=token,group=64",
    "int8-tensor": "uniform:bits=8,axis=tensor",
    "int4-channel": "uniform:bits=4,axis=channel,group=32",
    "int4-token": "uniform:bits=4,axis=token,group=64",
    "int4-tensor": "uniform:bits=4,axis=tensor",
    "kivi-2": "uniform:bits=2,axis=channel,group=128,exact_tokens=32,values=2",
    "kivi-3": "uniform:bits=3,axis=channel,group=128,exact_tokens=32,values=4",
    "kivi-4": "uniform:bits=4,axis=channel,group=128,exact_tokens=32,values=4",
}

#: Compared when nothing is chosen.
DEFAULT_SCHEMES = (
    EXACT,
    "lynx",
    "int8-channel",
    "int8-token",
    "int8-tensor",
    "lynx:detail=anchor",
    "int4-channel:exact_tokens=4",
    "int4-channel",
    "int4-token:exact_tokens=4",
    "int4-token",
    "int4-tensor",
)


def register_scheme(name: str, factory: SchemeFactory) -> None:
    """Make schemes of another kind available by name. Raises ConfigError when it is taken."""
    if name in _FACTORIES or name in PRESETS or name in CODEC_NAMES:
        raise ConfigError(f"a scheme {name!r} exists already")
    _FACTORIES[name] = factory


def scheme_names() -> tuple[str, ...]:
    """All names that :func:`parse_scheme` takes before a colon."""
    return (*_FACTORIES, *PRESETS, *CODEC_NAMES)


def parse_scheme(spec: str) -> Scheme:
    """The scheme that ``NAME`` or ``NAME:KEY=VALUE,...`` stands for. Raises ConfigError."""
    name, options = _split(spec)
    if name in PRESETS:
        preset, own = _split(PRESETS[name])
        return _FACTORIES[preset](spec, {**own, **options})
    if name in _FACTORIES:
        return _FACTORIES[name](spec, options)
    if name in CODEC_NAMES:
        return _codec(spec, options)
    raise ConfigError(f"scheme {spec!r} is none of {', '.join(scheme_names())}")


def _split(spec: str) -> tuple[str, dict[str, str]]:
    name, _, tail = spec.partition(":")
    options: dict[str, str] = {}
    for item in tail.split(",") if tail else []:
        key, equals, value = item.partition("=")
        if not equals or key in options:
            raise ConfigError(f"scheme {spec!r}: {item!r} must be KEY=VALUE, each key once")
        options[key] = value
    return name, options
