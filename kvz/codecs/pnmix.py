"""Binding of the codec ``pnmix``: keys, and which codec values go to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvz.codecs.base import Chunk, Codec, Shape, TensorLookup
from kvz.codecs.gaac import GaacCodec
from kvz.codecs.pnmix_chunks import Arrays, PnmixChunks, Prepared
from kvz.codecs.pnmix_values import PnmixValueCodec
from kvz.formats.codecs import pnmix as layout
from kvz.formats.codecs.pnmix import Geometry, KeyConfig, ValueConfig
from kvz.formats.codecs.spans import Span
from kvz.formats.errors import ConfigError
from kvz.layout import role
from kvz.saliency import (
    CHANNEL_CRITERIA,
    KeyTensor,
    RopePairs,
    check_criterion,
    recorded_pairs,
    select,
)

# kernels are imported where they run: configuration and sizes do without numba

_EXACT = "exact"
_VALUES = (_EXACT, *map(str, layout.VALUE_BITS))
_SCALES = ("fp16", "page")
#: About so many tokens share the range within which scales are bytes.
_PAGE_TOKENS = 1024
_MAX_GROUP_CHANNELS = 64
_PRESETS: dict[str, dict[str, Any]] = {
    # least attention KL at about 2.3 bits on SmolLM2's captures; on Gemma qk_norm is 1 % better
    "default": {
        "group_tokens": 64,
        "scales": "page",
        "tail": "coded",
        "criterion": "query_variance",
    },
    "paper": {
        "group_tokens": 128,
        "scales": "fp16",
        "tail": "exact",
        "criterion": "qk_norm",
    },
}


class Choices(NamedTuple):
    """What the user said besides the configuration.

    ``values``: bits of the codes of values, or "exact". ``rope``, ``rotary_dim``: how keys were
    rotated, of captures that do not say it.
    """

    values: str = _EXACT
    rope: str | None = None
    rotary_dim: int | None = None

    def check(self) -> None:
        """Raises ValueError."""
        if self.values not in _VALUES:
            raise ValueError(f"values must be {', '.join(_VALUES)}, got {self.values!r}")
        if self.rope not in (None, "half", "interleaved"):
            raise ValueError(f"rope must be half or interleaved, got {self.rope!r}")
        if self.rotary_dim is not None and self.rope is None:
            raise ValueError("rotary_dim needs rope=half or rope=interleaved")


def _with_pairs(config: KeyConfig, pairs: RopePairs) -> KeyConfig:
    """Raises ConfigError."""
    try:
        return replace(config, pairing=pairs.pairing, rotary_dim=pairs.rotary_dim)
    except ValueError as error:
        raise ConfigError(f"codec pnmix: {error}") from None


class PnmixCodec(PnmixChunks[KeyConfig]):
    """Keys with more bits in the channels of salient pairs (PN-Mix); lossy.

    From options it is for no tensor yet: ``for_source`` and ``for_tensor`` find out how a capture's
    keys were rotated and which pairs are salient.
    """

    needs_codebook = True
    OPTIONS: ClassVar[dict[str, Any]] = {
        "preset": str,
        "high_bits": int,
        "low_bits": int,
        "salient": float,
        "group_tokens": int,
        "sink_tokens": int,
        "tail": str,
        "scales": str,
        "page_tokens": int,
        "levels": str,
        "criterion": str,
        "prefill_tokens": int,
        "values": str,
        "rope": str,
        "rotary_dim": int,
    }

    def __init__(
        self,
        config: KeyConfig,
        choices: Choices | None = None,
        source: TensorLookup | None = None,
        mask: bytes | None = None,
    ) -> None:
        super().__init__(config)
        self._choices = choices or Choices()
        self._source = source
        self._mask = mask

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PnmixCodec | PnmixValueCodec:
        """The codec of keys or of values that a head names. Raises InvalidField."""
        config = layout.config_from_dict(fields)
        return cls(config) if isinstance(config, KeyConfig) else PnmixValueCodec(config)

    @classmethod
    def from_options(cls, preset: str = "default", **options: Any) -> PnmixCodec:
        """Raises ValueError."""
        if preset not in _PRESETS:
            raise ValueError(f"preset must be {' or '.join(_PRESETS)}, got {preset!r}")
        # "none" until a capture says how its keys were rotated
        given = {"pairing": "none", **_PRESETS[preset], **options}
        choices = Choices(**{key: given.pop(key) for key in Choices._fields if key in given})
        choices.check()
        scales = given.pop("scales")
        if scales not in _SCALES:
            raise ValueError(f"scales must be {' or '.join(_SCALES)}, got {scales!r}")
        if scales == "page":
            group = max(1, given["group_tokens"])
            given.setdefault("page_tokens", max(group, _PAGE_TOKENS // group * group))
        elif "page_tokens" in given:
            raise ValueError("page_tokens needs scales=page")
        config = KeyConfig(**given)
        check_criterion(config.criterion)
        return cls(config, choices)

    # -- from a capture to a mask

    def for_source(self, source: TensorLookup) -> PnmixCodec:
        """The codec for the keys of one capture."""
        # what most of its keys will say; each may have its own
        pairs = recorded_pairs(source.metadata, None) if self._needs_pairs else None
        config = self.config if pairs is None else _with_pairs(self.config, pairs)
        return PnmixCodec(config, self._choices, source)

    @property
    def _needs_pairs(self) -> bool:
        """Whether the mask depends on which channels are pairs."""
        return 0 < self.config.salient < 1 and self.config.criterion not in CHANNEL_CRITERIA

    def for_tensor(
        self, name: str, dtype: str, shape: Shape, token_axis: int | None
    ) -> Codec | None:
        """The codec for one key with its mask, or for one value. Raises ConfigError."""
        if not self.supports(dtype, token_axis):
            return None
        part = role(name)
        if part == "value":
            return self._for_values(shape)
        return self._for_key(name, shape) if part == "key" else None

    def _for_values(self, shape: Shape) -> Codec:
        if self._choices.values == _EXACT:
            return GaacCodec()
        config = self.config
        return PnmixValueCodec(
            ValueConfig(
                bits=int(self._choices.values),
                group_channels=max(1, min(_MAX_GROUP_CHANNELS, shape[2])),
                group_tokens=config.group_tokens,
                sink_tokens=config.sink_tokens,
                tail=config.tail,
                levels=config.levels,
            )
        )

    def _for_key(self, name: str, shape: Shape) -> PnmixCodec:
        assert self._source is not None, "for_source comes first"
        config = self.config
        if self._needs_pairs:
            config = _with_pairs(config, self._pairs(name, shape[2]))
        if not shape[0] * shape[1] * shape[2]:
            return PnmixCodec(config, self._choices, mask=b"")
        if 0 < config.salient < 1:
            importance = KeyTensor(self._source, name, shape, config).importance()
        else:
            importance = np.zeros((1, config.num_pairs(shape[2])), np.float32)
        mask = select(importance, config.salient)
        whole = np.tile(mask, (shape[0] // len(mask), 1))
        return PnmixCodec(config, self._choices, mask=layout.build_mask(whole))

    def _pairs(self, name: str, inner: int) -> RopePairs:
        """How a key was rotated. Raises ConfigError when nothing, or not the same, says it."""
        assert self._source is not None
        rope, rotary_dim = self._choices.rope, self._choices.rotary_dim
        recorded = recorded_pairs(self._source.metadata, name)
        if recorded is None:
            if rope is None:
                raise ConfigError(
                    f"nothing says how {name} was rotated: say which channels are pairs with "
                    "--codec-option rope=half (channel i and i + rotary_dim/2) or "
                    "rope=interleaved (2i and 2i + 1)"
                )
            recorded = RopePairs(rope, inner if rotary_dim is None else rotary_dim)
        said = RopePairs(
            rope or recorded.pairing, recorded.rotary_dim if rotary_dim is None else rotary_dim
        )
        if said != recorded:
            raise ConfigError(
                f"rope={said.pairing} with rotary_dim {said.rotary_dim} contradicts the capture: "
                f"{name} has {recorded.pairing} with rotary_dim {recorded.rotary_dim}"
            )
        if said.rotary_dim % 2 or said.rotary_dim > inner:
            raise ConfigError(
                f"{name} has heads of {inner} channels, of which {said.rotary_dim} cannot be pairs"
            )
        return said

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        """The mask. Raises ConfigError: it comes from a capture's own queries and keys."""
        if self._mask is None:
            raise ConfigError(
                "codec pnmix: masks are made while a capture is compressed, not by kvz calibrate"
            )
        return self._mask

    # -- chunks

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> Prepared:
        outer, tokens, inner = shape
        return Prepared(tokens, layout.salient_channels(codebook, outer, inner, self.config))

    def _fixed(self, geometry: Geometry, num_high: int) -> tuple[Span, ...]:
        return layout.key_streams(geometry, self.config, num_high)

    def _shape(self, arrays: Arrays, geometry: Geometry) -> None:
        outer, _, inner = geometry.shape
        config = self.config
        if config.page_tokens is None:
            arrays["scales"] = arrays["scales"].view(np.uint16)
        arrays["scales"] = arrays["scales"].reshape(outer, geometry.groups, 2, inner)
        arrays["pages"] = arrays["pages"].view(np.uint16).reshape(outer, -1, 2, inner)
        arrays["low"] = arrays["low"].reshape(outer, geometry.octets, config.low_bits, inner)

    def _encode(self, chunk: Chunk, prepared: Prepared, arrays: Arrays) -> int:
        from kvz.kernels.cpu import pnmix as kernels

        assert prepared.salient is not None
        config = self.config
        return kernels.encode_keys(
            chunk,
            prepared.salient,
            high_bits=config.high_bits,
            low_bits=config.low_bits,
            group_tokens=config.group_tokens,
            page_groups=config.page_groups,
            rule=config.levels,
            **arrays,
        )

    def _decode(self, arrays: Arrays, prepared: Prepared, out: Chunk) -> None:
        from kvz.kernels.cpu import pnmix as kernels

        assert prepared.salient is not None
        config = self.config
        kernels.decode_keys(
            **arrays,
            salient=prepared.salient,
            out=out,
            high_bits=config.high_bits,
            low_bits=config.low_bits,
            group_tokens=config.group_tokens,
            page_groups=config.page_groups,
        )
