"""What PN-Mix and its baselines lose, on captures and on a model's next tokens: the tables.

``attention CACHE...`` measures captures that hold queries (kvz capture --queries 512). ``windows``
measures SmolLM2 in float32 on Python's reference pages: a prefill whose keys and values are
replaced, and tokens that are fed after it. Results go to a JSON file, some schemes or a window at a
time; a run that was stopped goes on where it was. ``show`` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import models
import prompts
import torch

from kvz.bench.machine import describe_machine
from kvz.cli.models import load, token_ids
from kvz.cli.text import aligned
from kvz.quality.cache_file import KEY, CacheFile
from kvz.quality.layers import plan_attention
from kvz.quality.run import run_quality
from kvz.quality.saliency_report import saliency_report
from kvz.quality.schemes import parse_scheme
from kvz.quality.window_run import ModelLevel, measure_windows

PREFILL = "prefill_tokens=1024"
#: Schemes by the name that they have in the tables; values are exact.
ATTENTION = {
    "KIVI-2, min/max": "pnmix:preset=paper,salient=0,high_bits=2,low_bits=2,levels=minmax",
    "H3L1 50 %": f"pnmix:preset=paper,{PREFILL}",
    "INT4 per token": "int4-token:values=exact",
    "INT4 per channel, 4 raw tokens": "int4-channel:exact_tokens=4,values=exact",
    "lynx anchor": "lynx:detail=anchor",
    "KIVI-2, cell centres": "pnmix:preset=paper,salient=0,high_bits=2,low_bits=2",
    "H3L1 50 %, whole sequence": "pnmix:preset=paper",
    "H3L1 50 %, literal min/max": f"pnmix:preset=paper,{PREFILL},levels=minmax",
    "H3L1 50 %, k_norm": f"pnmix:preset=paper,{PREFILL},criterion=k_norm",
    "H3L1 50 %, k_magnitude": f"pnmix:preset=paper,{PREFILL},criterion=k_magnitude",
    "H3L1 50 %, k_range": f"pnmix:preset=paper,{PREFILL},criterion=k_range",
    "H3L1 50 %, random": f"pnmix:preset=paper,{PREFILL},criterion=random:0",
    "H3L1 50 %, query_variance": f"pnmix:preset=paper,{PREFILL},criterion=query_variance",
    "H4L2 12.5 %": f"pnmix:preset=paper,{PREFILL},high_bits=4,low_bits=2,salient=0.125",
    "H4L2 37.5 %": f"pnmix:preset=paper,{PREFILL},high_bits=4,low_bits=2,salient=0.375",
    "H3L1 50 %, no exact tail": f"pnmix:preset=paper,{PREFILL},tail=coded",
    "default": "pnmix",
    "default, 1,024 tokens": f"pnmix:{PREFILL}",
    "KIVI-3": "pnmix:preset=paper,salient=0,high_bits=3,low_bits=3",
    "KIVI-4": "pnmix:preset=paper,salient=0,high_bits=4,low_bits=4",
    "polar, 2 + 2 bits": "polar",
    "polar, 2 + 4 bits": "polar:angle_bits=4",
    "default, qk_norm": f"pnmix:{PREFILL},criterion=qk_norm",
}
#: The same for next tokens; saliency from the whole prefill of a window.
WINDOWS = {
    "KIVI-2, min/max": "pnmix:preset=paper,salient=0,high_bits=2,low_bits=2,levels=minmax",
    "KIVI-3": "pnmix:preset=paper,salient=0,high_bits=3,low_bits=3",
    "KIVI-4": "pnmix:preset=paper,salient=0,high_bits=4,low_bits=4",
    "H3L1 50 % (paper)": "pnmix:preset=paper",
    "H3L1 50 %, no exact tail": "pnmix:preset=paper,tail=coded",
    "H3L1 50 %, values 2": "pnmix:preset=paper,values=2",
    "H3L1 50 %, values 4": "pnmix:preset=paper,values=4",
    "default": "pnmix",
    "H4L2 12.5 %": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.125",
    "H4L2 12.5 %, values 2": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.125,values=2",
    "H4L2 12.5 %, values 4": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.125,values=4",
    "H4L2 37.5 %": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.375",
    "H4L2 37.5 %, no exact tail": (
        "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.375,tail=coded"
    ),
    "H4L2 37.5 %, values 2": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.375,values=2",
    "H4L2 37.5 %, values 4": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.375,values=4",
    "H4L2 62.5 %": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.625",
    "H4L2 62.5 %, values 2": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.625,values=2",
    "H4L2 62.5 %, values 4": "pnmix:preset=paper,high_bits=4,low_bits=2,salient=0.625,values=4",
    "INT4 per channel, 4 raw tokens": "int4-channel:exact_tokens=4",
    "INT4 per token": "int4-token",
    "INT8 per channel": "int8-channel",
    "lynx anchor": "lynx:detail=anchor",
    "lynx": "lynx",
}
QUERIES = 512
#: Schemes whose stored files are there at once.
_AT_ONCE = 5
#: The layers 0, 4, 8, ...
_LAYER_STEP = 4
#: A text of which the windows are the beginning.
_TEXT_CHARACTERS = 150_000


def full_key_bits(path: str, specs: Sequence[str]) -> list[float]:
    """Bits per key of each scheme over the layers that see all tokens, head and index counted."""
    found = []
    with CacheFile(path) as cache, tempfile.TemporaryDirectory() as folder:
        layers = plan_attention(cache.source, QUERIES).layers
        full = [layer for layer in layers if layer.window is None]
        names = {name for layer in full for name in (layer.key_name, layer.value_name)}
        cache.tensors = tuple(tensor for tensor in cache.tensors if tensor.name in names)
        for spec in specs:
            with parse_scheme(spec).store(cache, Path(folder)) as stored:
                # head and index are all counted with the keys
                found.append(2 * stored.bits.total - stored.bits.value)
    return found


def measure_attention(path: str, results: dict[str, Any]) -> Iterator[str]:
    """Add the schemes that are missing; yields what is being done."""
    entry = results["captures"].setdefault(Path(path).stem, {"schemes": {}})
    with CacheFile(path) as cache:
        report = saliency_report(cache.source, [tensor.name for tensor in cache.part(KEY)])
    entry["saliency"] = report and asdict(report)
    missing = [spec for spec in ATTENTION.values() if spec not in entry["schemes"]]
    for first in range(0, len(missing), _AT_ONCE):
        specs = missing[first : first + _AT_ONCE]
        yield f"{path}: {' '.join(specs)}"
        (capture,) = run_quality([path], schemes=specs, queries=QUERIES).captures
        entry["num_tokens"], entry["num_queries"] = capture.num_tokens, capture.num_queries
        bits = full_key_bits(path, specs)
        for own_bits, result in zip(bits, capture.schemes, strict=True):
            assert result.attention is not None
            full = [layer for layer in result.attention.layers if layer.window is None]
            entry["schemes"][result.name] = {
                "key_bits": own_bits,
                "key_nmse": result.key.nmse,
                "kl": {layer.layer: layer.kl for layer in full},
            }


def measure_next_tokens(results: dict[str, Any]) -> Iterator[str]:
    """Add the schemes and windows that are missing; yields what is being done."""
    model, tokenizer = load(str(models.smollm2()), "float32", "cpu", None)
    ids = token_ids(tokenizer, prompts.docs()[:_TEXT_CHARACTERS])
    level = ModelLevel("SmolLM2-135M-Instruct", model, ids)
    entry = results["windows"]
    length = level.prefill + level.positions + 1
    for number in range(level.max_windows):
        own = entry.get(str(number), {"schemes": {}})
        specs = [spec for spec in WINDOWS.values() if spec not in own["schemes"]]
        if not specs:
            continue
        yield f"window {number}, {len(specs)} schemes"
        window = ids[:, number * length : (number + 1) * length]
        schemes = [parse_scheme(spec) for spec in specs]
        described, found = measure_windows(level, [window], schemes, lambda what: None)
        own["perplexity"] = described.exact_perplexity
        own["schemes"] |= {
            spec: {"kl": r.kl, "agreement": r.agreement, "perplexity": r.perplexity}
            for spec, r in zip(specs, found, strict=True)
        }
        entry[str(number)] = own


def mean_kl(kl: Mapping[str, float], step: int = 1) -> float:
    """Mean over layers, or over every ``step``-th."""
    return statistics.fmean(value for layer, value in kl.items() if int(layer) % step == 0)


def attention_tables(results: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in results["captures"].items():
        yield f"{name}: {entry['num_tokens']} tokens, last {entry['num_queries']} queries"
        rows = [["", "key bits", "KL", "layers 0, 4, 8, ..."]]
        for label, spec in ATTENTION.items():
            if (found := entry["schemes"].get(spec)) is None:
                continue
            some = any(int(layer) % _LAYER_STEP == 0 for layer in found["kl"])
            subset = f"{mean_kl(found['kl'], _LAYER_STEP):.4g}" if some else "-"
            rows.append([label, f"{found['key_bits']:.3f}", f"{mean_kl(found['kl']):.4g}", subset])
        yield from aligned(rows, "<>>>")
        if entry["saliency"] is not None:
            top, ranges = entry["saliency"]["top"], entry["saliency"]["ranges"]
            yield "importance of the top " + ", ".join(
                f"{100 * part['share']:g} %: {100 * part['importance']:.1f} %" for part in top
            )
            yield "overlap with the pairs of the first block " + ", ".join(
                f"{part['start']}:{part['stop']} {100 * part['jaccard']:.1f} %" for part in ranges
            )
        yield ""


def next_token_table(results: Mapping[str, Any]) -> Iterator[str]:
    windows = list(results["windows"].values())
    if not windows:
        return

    def perplexity(parts: Sequence[float]) -> str:
        return f"{math.exp(statistics.fmean(map(math.log, parts))):.3f}"

    rows = [["", "windows", "KL", "agreement %", "perplexity"]]
    exact = perplexity([w["perplexity"] for w in windows])
    rows.append(["BF16", str(len(windows)), "0", "100", exact])
    for label, spec in WINDOWS.items():
        found = [w["schemes"][spec] for w in windows if spec in w["schemes"]]
        if found:
            kl, agreement = (statistics.fmean(f[key] for f in found) for key in ("kl", "agreement"))
            own = perplexity([f["perplexity"] for f in found])
            rows.append([label, str(len(found)), f"{kl:.4g}", f"{100 * agreement:.2f}", own])
    yield from aligned(rows, "<>>>>")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("attention", "windows", "show"))
    parser.add_argument("caches", nargs="*", metavar="CACHE", help="for attention")
    parser.add_argument("-o", "--output", type=Path, default=Path("quality.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "machine": asdict(describe_machine()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "captures": {},
        "windows": {},
    }
    if arguments.output.exists():
        earlier = json.loads(arguments.output.read_text())
        results |= {key: earlier[key] for key in ("captures", "windows")}
    parts = [measure_attention(path, results) for path in arguments.caches]
    if arguments.what == "windows":
        parts = [measure_next_tokens(results)]
    start = time.monotonic()
    for part in parts:
        for what in part:
            # what came before is whole
            arguments.output.write_text(json.dumps(results, indent=1))
            print(f"{time.monotonic() - start:.0f} s: {what}", flush=True)
        arguments.output.write_text(json.dumps(results, indent=1))
    print("\n".join([*attention_tables(results), *next_token_table(results)]))


if __name__ == "__main__":
    main()
