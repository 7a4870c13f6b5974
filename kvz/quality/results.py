"""What the quality tool found."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvz.quality.next_token import NextToken
from kvz.quality.saliency_report import SaliencyReport
from kvz.quality.schemes import Bits


@dataclass(frozen=True, slots=True)
class TensorQuality:
    """Over all keys, or all values, of a capture: see :class:`kvz.quality.tensor_error`."""

    nmse: float
    max_error: float


@dataclass(frozen=True, slots=True)
class LayerQuality:
    """Attention of one layer. window: tokens that a query sees at most; None: all before it.

    kl: attention KL in nats, mean over query heads and queries. output_error: mean over query
    heads of (sum over queries of the squared 2-norm of the output's change / the same sum of the
    exact output). num_queries: per query head, of all sequences together.
    """

    layer: int
    window: int | None
    num_queries: int
    kl: float
    output_error: float


@dataclass(frozen=True, slots=True)
class AttentionQuality:
    """Means over layers; those of full layers alone are None when all layers are full."""

    kl: float
    output_error: float
    full_kl: float | None
    full_output_error: float | None
    layers: tuple[LayerQuality, ...]

    @classmethod
    def of(cls, layers: Sequence[LayerQuality]) -> AttentionQuality:
        full = [layer for layer in layers if layer.window is None]
        mixed = bool(full) and len(full) < len(layers)
        return cls(
            kl=_mean([layer.kl for layer in layers]),
            output_error=_mean([layer.output_error for layer in layers]),
            full_kl=_mean([layer.kl for layer in full]) if mixed else None,
            full_output_error=_mean([layer.output_error for layer in full]) if mixed else None,
            layers=tuple(layers),
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """One scheme on one capture; None: was not asked for."""

    name: str
    config: Mapping[str, Any]
    bits: Bits
    key: TensorQuality
    value: TensorQuality
    attention: AttentionQuality | None
    next_token: NextToken | None


@dataclass(frozen=True, slots=True)
class WindowsResult:
    """The windows of text behind the next-token figures; exact_perplexity: with the exact cache."""

    model: str
    dtype: str
    num_windows: int
    prefill: int
    positions: int
    exact_perplexity: float


@dataclass(frozen=True, slots=True)
class CaptureQuality:
    """One capture. num_queries: last queries of each sequence that were used, 0: none.

    saliency: None when the capture holds no pair norms.
    """

    source: str
    origin: str | None
    num_layers: int
    num_tokens: int
    num_elements: int
    num_queries: int
    saliency: SaliencyReport | None
    windows: WindowsResult | None
    schemes: tuple[SchemeResult, ...]


@dataclass(frozen=True, slots=True)
class QualityReport:
    """A whole run of ``kvz bench --quality``; ``date`` is its start, ISO 8601 with offset."""

    date: str
    versions: Mapping[str, str]
    device: str
    captures: tuple[CaptureQuality, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a figure that is not finite is null."""
        document: dict[str, Any] = json.loads(json.dumps(_finite(asdict(self)), allow_nan=False))
        return document


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
