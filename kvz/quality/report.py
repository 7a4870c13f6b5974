"""The quality report as text, at most 100 columns wide."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence

from kvz.quality.results import CaptureQuality, QualityReport, SchemeResult
from kvz.quality.saliency_report import CHOSEN_SHARE, SaliencyReport

_WIDTH = 100
_NAME_WIDTH = 28

_NOTES = (
    "bits: stored bits per element of keys, of values and of both, everything counted (scales, "
    "exact tokens; of codecs the bytes of an archive, head and index under both). NMSE: sum of "
    "squared errors / sum of squares over all layers. max: largest absolute error of keys and "
    "values."
)
_ATTENTION_NOTE = (
    "attn KL: KL divergence (nats) of the causal attention weights with decoded keys from those "
    "with exact keys, mean over query heads, queries and layers. out err: squared error / squared "
    "norm of the attention output with decoded keys and values, summed over queries, mean over "
    "query heads and layers."
)
_WINDOW_NOTE = (
    "full: the same over layers that see all tokens. Of windowed layers a capture holds the last "
    "keys only: queries count for which it holds at least half of what they saw, and weights run "
    "over the keys that it holds."
)
_MODEL_NOTES = (
    "next-token KL (nats), agreement of the most likely token, and perplexity: teacher-forced "
    "after a prefill whose keys and values were replaced by their decoded selves (the exact cache "
    "is BF16 and has the perplexity in the heading); keys and values of later tokens are exact."
)

_SALIENCY_NOTE = (
    "importance of a pair of key channels: mean norm of the queries * mean norm of the keys in it. "
    "overlap: pairs chosen on both parts of the prompt / pairs chosen on either, mean over heads "
    "and layers; by chance about 33 %."
)

_Column = tuple[str, int, Callable[[SchemeResult], str]]


def render(report: QualityReport) -> str:
    """The whole report; ends with a newline."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [f"kvz bench --quality, {report.date}, on {report.device}"]
    lines += textwrap.wrap(versions, _WIDTH)
    for capture in report.captures:
        lines += ["", *_capture_lines(capture)]
    notes = [_NOTES]
    if any(capture.num_queries for capture in report.captures):
        notes.append(_ATTENTION_NOTE)
    if any(_is_mixed(capture) for capture in report.captures):
        notes.append(_WINDOW_NOTE)
    if any(capture.windows for capture in report.captures):
        notes.append(_MODEL_NOTES)
    if any(capture.saliency for capture in report.captures):
        notes.append(_SALIENCY_NOTE)
    for note in notes:
        lines += ["", *textwrap.wrap(note, _WIDTH)]
    return "\n".join(lines) + "\n"


def _is_mixed(capture: CaptureQuality) -> bool:
    attention = capture.schemes[0].attention
    return attention is not None and any(layer.window for layer in attention.layers)


def _capture_lines(capture: CaptureQuality) -> Iterator[str]:
    yield f"capture: {capture.source}"
    yield f"  origin: {capture.origin or 'not stated in the file'}"
    yield (
        f"  {capture.num_layers} layers, {capture.num_tokens} tokens, "
        f"{capture.num_elements / 1e6:.1f} million elements, "
        + (f"last {capture.num_queries} queries" if capture.num_queries else "no queries used")
    )
    yield ""
    yield from _table(capture.schemes, _columns(capture))
    if capture.saliency is not None:
        yield ""
        yield from _saliency_lines(capture.saliency)
    windows = capture.windows
    if windows is not None:
        yield ""
        described = (
            f"model {os.path.basename(windows.model)}, {windows.dtype}: {windows.num_windows} "
            f"windows of {windows.prefill} + {windows.positions} tokens, perplexity "
            f"{windows.exact_perplexity:.3f}"
        )
        yield from textwrap.wrap(described, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        yield from _table(capture.schemes, _MODEL_COLUMNS)


def _saliency_lines(report: SaliencyReport) -> Iterator[str]:
    shares = " / ".join(f"{100 * top.share:g}" for top in report.top)
    held = " / ".join(f"{100 * top.importance:.1f}" for top in report.top)
    yield (
        f"  salient pairs of {report.num_layers} layers: the top {shares} % hold {held} % of the "
        "importance"
    )
    if report.ranges:
        overlaps = ", ".join(f"{100 * x.jaccard:.1f} % ({x.start}:{x.stop})" for x in report.ranges)
        described = (
            f"the top {100 * CHOSEN_SHARE:g} % of tokens 0:{report.prefill} overlap with those of "
            f"later tokens by {overlaps}"
        )
        yield from textwrap.wrap(described, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _columns(capture: CaptureQuality) -> list[_Column]:
    columns: list[_Column] = [
        ("K bits", 6, lambda r: f"{r.bits.key:.3f}"),
        ("V bits", 6, lambda r: f"{r.bits.value:.3f}"),
        ("bits", 6, lambda r: f"{r.bits.total:.3f}"),
        ("NMSE K", 7, lambda r: _figure(r.key.nmse)),
        ("NMSE V", 7, lambda r: _figure(r.value.nmse)),
        ("max", 7, lambda r: _figure(max(r.key.max_error, r.value.max_error))),
    ]
    if capture.schemes[0].attention is not None:
        columns += [
            ("attn KL", 7, lambda r: _figure(r.attention.kl if r.attention else None)),
            ("out err", 7, lambda r: _figure(r.attention.output_error if r.attention else None)),
        ]
    if _is_mixed(capture):
        columns += [("full KL", 7, lambda r: _figure(r.attention.full_kl if r.attention else None))]
    return columns


_MODEL_COLUMNS: list[_Column] = [
    ("bits", 6, lambda r: f"{r.bits.total:.3f}"),
    ("next KL", 7, lambda r: _figure(r.next_token.kl if r.next_token else None)),
    ("agree %", 7, lambda r: f"{100 * r.next_token.agreement:.2f}" if r.next_token else "-"),
    ("perplexity", 10, lambda r: f"{r.next_token.perplexity:.4f}" if r.next_token else "-"),
]


def _figure(value: float | None) -> str:
    """Three significant digits in at most seven characters."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-2 <= value < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _table(schemes: Sequence[SchemeResult], columns: Sequence[_Column]) -> Iterator[str]:
    heading = " ".join(f"{title:>{width}}" for title, width, _ in columns)
    yield f"{'':<{_NAME_WIDTH}} {heading}"
    for result in schemes:
        name = result.name
        if len(name) > _NAME_WIDTH:
            yield name
            name = ""
        cells = " ".join(f"{cell(result):>{width}}" for _, width, cell in columns)
        yield f"{name:<{_NAME_WIDTH}} {cells}"
