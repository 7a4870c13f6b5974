"""Codec bindings, by the names that stand in an archive's head."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kvz.codecs.base import Codec
from kvz.formats.errors import ConfigError, UnknownCodec

# module and class by codec name; imported on use, because the fast codecs import numba
_BINDINGS = {
    "raw": ("kvz.codecs.raw", "RawCodec"),
    "zstd": ("kvz.codecs.zstd", "ZstdCodec"),
    "splitzip": ("kvz.codecs.splitzip", "SplitzipCodec"),
    "gaac": ("kvz.codecs.gaac", "GaacCodec"),
    "lynx": ("kvz.codecs.lynx", "LynxCodec"),
    "pnmix": ("kvz.codecs.pnmix", "PnmixCodec"),
}

DEFAULT_CODEC = "gaac"


def _binding(name: str) -> Any:
    if name not in _BINDINGS:
        raise UnknownCodec(f"codec {name!r} is not known; known are {', '.join(_BINDINGS)}")
    module, attribute = _BINDINGS[name]
    return getattr(import_module(module), attribute)


def codec_from_head(name: str, config: Mapping[str, Any]) -> Codec:
    """The codec that an archive's head names. Raises UnknownCodec or InvalidField."""
    codec: Codec = _binding(name).from_dict(config)
    return codec


def codec_from_options(name: str, options: Mapping[str, str]) -> Codec:
    """The codec for ``--codec NAME --codec-option KEY=VALUE``. Raises ConfigError."""
    binding = _binding(name)
    unknown = options.keys() - binding.OPTIONS.keys()
    if unknown:
        known = ", ".join(binding.OPTIONS) or "none"
        raise ConfigError(f"codec {name} has no option {sorted(unknown)[0]!r}; options: {known}")
    parsed = {}
    for key, value in options.items():
        try:
            parsed[key] = binding.OPTIONS[key](value)
        except ValueError as error:
            number = binding.OPTIONS[key] in (int, float)
            why = f"{key} must be a number, got {value!r}" if number else str(error)
            raise ConfigError(f"codec {name}: {why}") from None
    try:
        codec: Codec = binding.from_options(**parsed)
    except ValueError as error:
        raise ConfigError(f"codec {name}: {error}") from None
    return codec
