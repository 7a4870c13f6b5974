"""``kvz bench --quality``: what lossy schemes do to one's own captures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import torch

from kvz.bench.workload import origin_of
from kvz.files import naming
from kvz.formats.errors import ConfigError
from kvz.layout import Layout, layer_index
from kvz.quality.cache_file import KEY, VALUE, CacheFile
from kvz.quality.layer_run import SchemeSums, measure_layer, measure_tensor
from kvz.quality.layers import plan_attention
from kvz.quality.next_token import NextToken
from kvz.quality.results import (
    AttentionQuality,
    CaptureQuality,
    QualityReport,
    SchemeResult,
    WindowsResult,
)
from kvz.quality.saliency_report import saliency_report
from kvz.quality.schemes import DEFAULT_SCHEMES, Scheme, parse_scheme
from kvz.quality.window_run import ModelLevel, measure_windows
from kvz.version import __version__

DEFAULT_QUERIES = 512

#: Called with what is going on, steps done, and steps in all.
QualityProgress = Callable[[str, int, int], None]


def run_quality(
    paths: Sequence[str | os.PathLike[str]],
    *,
    schemes: Sequence[str] | None = None,
    queries: int = DEFAULT_QUERIES,
    device: str = "cpu",
    layout: Layout | None = None,
    model_level: ModelLevel | None = None,
    progress: QualityProgress | None = None,
) -> QualityReport:
    """Measure what schemes lose on captures (safetensors files).

    schemes: see :func:`kvz.quality.schemes.parse_scheme`; default
    :data:`kvz.quality.schemes.DEFAULT_SCHEMES`. queries: how many last queries of a capture attend;
    0 leaves attention out, and then any file with keys and values will do. device: of torch; where
    attention is computed. model_level: also measure next-token distributions.

    Raises ConfigError (arguments, captures without queries), IdentityMismatch (the model is not the
    capture's), UnsupportedCache, and what codecs and :class:`SafetensorsFile` raise.
    """
    specs = DEFAULT_SCHEMES if schemes is None else tuple(schemes)
    if not paths or not specs or queries < 0:
        raise ConfigError("need a capture, a scheme, and queries >= 0")
    for spec in specs:
        if specs.count(spec) > 1:
            raise ConfigError(f"scheme {spec!r} is listed twice")
    parsed = [parse_scheme(spec) for spec in specs]
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    captures = []
    for path in paths:
        with CacheFile(path, layout) as cache, naming(cache.name):
            steps = _Steps(os.path.basename(cache.name), progress)
            captures.append(
                _measure(cache, parsed, queries, torch.device(device), model_level, steps)
            )
    versions = {"kvz": __version__, "torch": version("torch")}
    return QualityReport(date, versions, device, tuple(captures))


class _Steps:
    """Tells the progress of the work on one capture."""

    def __init__(self, name: str, progress: QualityProgress | None) -> None:
        self._name = name
        self._progress = progress
        self._done = 0
        self.total = 0

    def begin(self, what: str) -> None:
        """Another step begins."""
        if self._progress is not None:
            self._progress(f"{self._name}: {what}", self._done, self.total)
        self._done += 1


def _measure(
    cache: CacheFile,
    schemes: Sequence[Scheme],
    queries: int,
    device: torch.device,
    level: ModelLevel | None,
    steps: _Steps,
) -> CaptureQuality:
    # everything that can be refused is, before the long work
    plan = plan_attention(cache.source, queries) if queries else None
    saliency = saliency_report(cache.source, [tensor.name for tensor in cache.part(KEY)])
    windows = [] if level is None else level.windows(cache)
    layers = () if plan is None else plan.layers
    attended = {name for layer in layers for name in (layer.key_name, layer.value_name)}
    rest = [tensor for tensor in cache.tensors if tensor.name not in attended]
    steps.total = len(schemes) + len(layers) + len(rest) + len(windows) * (1 + len(schemes))
    sums = [SchemeSums() for _ in schemes]
    with tempfile.TemporaryDirectory(prefix="kvz-quality-") as folder, ExitStack() as stack:
        stored = []
        for scheme in schemes:
            steps.begin(scheme.name)
            stored.append(stack.enter_context(scheme.store(cache, Path(folder))))
        for layer in layers:
            steps.begin(f"layer {layer.index}")
            assert plan is not None
            measure_layer(cache, plan, layer, stored, sums, device)
        for tensor in rest:
            steps.begin(tensor.name)
            measure_tensor(cache, tensor.name, tensor.part, stored, sums)
        bits = [store.bits for store in stored]
    described: WindowsResult | None = None
    next_tokens: Sequence[NextToken | None] = [None] * len(schemes)
    if level is not None:
        described, next_tokens = measure_windows(level, windows, schemes, steps.begin)
    results = [
        SchemeResult(
            name=scheme.name,
            config=scheme.config,
            bits=own_bits,
            key=own.tensor_quality(KEY),
            value=own.tensor_quality(VALUE),
            attention=AttentionQuality.of(own.layers) if own.layers else None,
            next_token=next_token,
        )
        for scheme, own_bits, own, next_token in zip(schemes, bits, sums, next_tokens, strict=True)
    ]
    return CaptureQuality(
        source=cache.name,
        origin=origin_of(cache.source.metadata),
        num_layers=len({layer_index(tensor.name) for tensor in cache.tensors}),
        num_tokens=max(tensor.shape[1] for tensor in cache.tensors),
        num_elements=sum(tensor.num_elements for tensor in cache.tensors),
        num_queries=0 if plan is None else len(plan.columns),
        saliency=saliency,
        windows=described,
        schemes=tuple(results),
    )
