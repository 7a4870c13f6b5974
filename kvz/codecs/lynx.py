"""Binding of the codec ``lynx``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvz.codecs.base import RESIDUAL_ALIGNMENT, U8, Chunk, ForAllSources, Shape
from kvz.formats.codecs import lynx as layout
from kvz.formats.codecs.lynx import Companding, Geometry, LynxConfig
from kvz.formats.codecs.spans import Span, clear_gaps, place, residual_offset
from kvz.formats.errors import InvalidField

# kernels are imported where they run: configuration and sizes do without numba

PRESETS = ("default", "paper")
PAPER_ALPHA = 1.0
PAPER_EXACT_TOKENS = 0


class LynxCodec(ForAllSources):
    """8-bit codes for BF16 whose upper halves are a draft (arXiv 2607.01831); lossy.

    A payload is an anchor section, zeros up to ``residual_offset`` and a residual section.
    """

    name = "lynx"
    needs_codebook = False
    is_progressive = True
    OPTIONS: ClassVar[dict[str, Any]] = {
        "preset": str,
        "page_tokens": int,
        "group_tokens": int,
        "exact_tokens": int,
        "grouping": str,
        "alpha": float,
    }

    def __init__(self, config: LynxConfig | None = None) -> None:
        self.config = config or LynxConfig()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LynxCodec:
        return cls(LynxConfig.from_dict(fields))

    @classmethod
    def from_options(cls, preset: str = "default", **options: Any) -> LynxCodec:
        """Raises ValueError."""
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {PRESETS}, got {preset!r}")
        if preset == "paper":
            options["companding"] = Companding.of(options.pop("alpha", PAPER_ALPHA))
            options.setdefault("exact_tokens", PAPER_EXACT_TOKENS)
        elif "alpha" in options:
            raise ValueError("alpha needs preset=paper: the linear code has no companding")
        return cls(LynxConfig(**options))

    @property
    def chunk_step(self) -> int:
        # pages lie whole in chunks
        return 1 if self.config.by_token else self.config.page_tokens

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def supports(self, dtype: str, token_axis: int | None) -> bool:
        return dtype == "BF16" and token_axis is not None

    def calibrate(self, sample: Chunk, num_tokens: int) -> bytes:
        return b""

    def prepare(self, codebook: bytes, dtype: str, shape: Shape) -> None:
        return None

    def buffer_nbytes(self, shape: Shape, itemsize: int) -> int:
        # while encoding, the marked pages lie after the residual
        return layout.max_payload_nbytes(shape, self.config) + RESIDUAL_ALIGNMENT

    def residual_nbytes(self, shape: Shape) -> int:
        return layout.residual_nbytes(shape, self.config)

    def anchor_nbytes(self, anchor: U8, shape: Shape, start: int) -> int:
        """Length that an anchor section must have. Raises InvalidField."""
        return layout.streams(anchor, shape, self.config, is_first=start == 0)[-1].end

    def encode(self, chunk: Chunk, prepared: None, buffer: U8, start: int) -> int:
        """Encode ``chunk``, whose first token is token ``start`` of its tensor.

        Returns the length of the anchor section at the front of ``buffer``; the residual section
        starts at ``residual_offset`` of it.
        """
        from kvz.kernels.cpu import lynx as kernels

        shape, config = chunk.shape, self.config
        fixed = layout.fixed_streams(shape, config, is_first=start == 0)
        arrays = self._arrays(buffer, fixed, shape, start)
        exact = arrays.pop("exact")
        num_exact = exact.shape[1]
        exact[:] = chunk[:, :num_exact]
        first_coded = min(num_exact, shape[1] - 1)
        if config.by_token:
            chunk = chunk.swapaxes(1, 2).copy()
            chunk[..., :first_coded] = chunk[..., first_coded, None]
            first_coded = 0
        # where everything lies when no page is marked, as usual
        anchor_nbytes = place([("raw", 0)], fixed[-1].end)[-1].end
        (residual,) = place(
            [("residual", self.residual_nbytes(shape))], residual_offset(anchor_nbytes)
        )
        (raw,) = place([("raw", 2 * chunk.size)], residual.end)
        marked = buffer[raw.offset : raw.end].view(np.uint16)
        num_raw = kernels.encode(
            chunk,
            page_tokens=config.page_tokens,
            group_tokens=config.group_tokens,
            thresholds=None if config.companding is None else config.companding.thresholds(),
            residuals=buffer[residual.offset : residual.end].reshape(arrays["anchors"].shape),
            raw=marked,
            first_coded=first_coded,
            **arrays,
        )
        (raw,) = place([("raw", 2 * num_raw)], fixed[-1].end)
        final = residual._replace(offset=residual_offset(raw.end))
        if num_raw:
            contents = marked[:num_raw].copy()
            residuals = buffer[residual.offset : residual.end].copy()
            buffer[raw.offset : raw.end].view(np.uint16)[:] = contents
            buffer[final.offset : final.end] = residuals
        clear_gaps(buffer, [*fixed, raw, final])
        return raw.end

    def decode(self, payload: U8, prepared: None, out: Chunk, start: int) -> None:
        """Decode an anchor section, padding and a residual section. Raises InvalidField."""
        spans = layout.streams(payload, out.shape, self.config, is_first=start == 0)
        offset = residual_offset(spans[-1].end)
        self._check_length(payload, offset + self.residual_nbytes(out.shape))
        self._decode(payload, spans, payload[offset:], out, start)

    def decode_anchor(self, payload: U8, prepared: None, out: Chunk, start: int) -> None:
        """Decode an anchor section alone: the draft. Raises InvalidField."""
        spans = layout.streams(payload, out.shape, self.config, is_first=start == 0)
        self._check_length(payload, spans[-1].end)
        self._decode(payload, spans, None, out, start)

    @staticmethod
    def _check_length(payload: U8, nbytes: int) -> None:
        if payload.size != nbytes:
            raise InvalidField(f"lynx: payload has {payload.size} bytes, must have {nbytes}")

    def _decode(
        self, payload: U8, spans: list[Span], residuals: U8 | None, out: Chunk, start: int
    ) -> None:
        from kvz.kernels.cpu import lynx as kernels

        config = self.config
        arrays = self._arrays(payload, spans, out.shape, start)
        exact = arrays.pop("exact")
        if residuals is not None:
            residuals = residuals.reshape(arrays["anchors"].shape)
        target = np.empty(config.coded_shape(out.shape), np.uint16) if config.by_token else out
        kernels.decode(
            residuals=residuals,
            table=config.anchor_table if residuals is None else config.table,
            out=target,
            page_tokens=config.page_tokens,
            group_tokens=config.group_tokens,
            **arrays,
        )
        if config.by_token:
            out[:] = target.swapaxes(1, 2)
        out[:, : exact.shape[1]] = exact

    def _arrays(
        self, payload: U8, spans: list[Span] | tuple[Span, ...], shape: Shape, start: int
    ) -> dict[str, NDArray[Any]]:
        """The streams in their shapes."""
        geometry = Geometry.of(shape, self.config, is_first=start == 0)
        outer, length, channels = geometry.shape
        arrays: dict[str, NDArray[Any]] = {s.name: payload[s.offset : s.end] for s in spans}
        arrays["exact"] = (
            arrays["exact"].view(np.uint16).reshape(shape[0], geometry.exact, shape[2])
        )
        arrays["pages"] = (
            arrays["pages"].view(np.uint16).reshape(outer, geometry.pages, 2, channels)
        )
        arrays["groups"] = arrays["groups"].reshape(outer, geometry.groups, 2, channels)
        arrays["flags"] = arrays["flags"].reshape(outer, geometry.pages)
        arrays["anchors"] = arrays["anchors"].reshape(outer, length, geometry.half)
        if "raw" in arrays:
            arrays["raw"] = arrays["raw"].view(np.uint16)
        return arrays
