"""How good the anchors of a lynx archive are as a draft, on SmolLM2 and 96 prompts.

For each prompt: prefill in bfloat16 (or, with --prefill float32, in float32, and round the cache to
BF16) and compress the cache with lynx. Then, in each dtype asked for (float32: the same weights
widened, cache values widened from BF16): greedy text of 64 tokens on the whole archive, token by
token; the same 64 tokens fed to the anchors, the whole archive and the uncompressed cache
(teacher-forced) and their next-token distributions compared; 64 tokens speculated. Stop tokens are
ignored. Of 64 drafts the first follows from logits in the file.

Results go to a JSON file, prompt by prompt; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import models
import speculation_prompts
import torch

import kvz
from kvz.bench.machine import describe_machine
from kvz.capturing import Capture
from kvz.cli.models import load
from kvz.cli.text import aligned
from kvz.restoring import continue_from, restore
from kvz.speculation import speculate
from kvz.speculation.decoder import CacheDecoder

NEW_TOKENS = 64
DTYPES = ("float32", "bfloat16")


def teacher_forced(source: Any, model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities `[tokens, vocab]` after each of `token_ids`, fed at once."""
    decoder = CacheDecoder.of(restore(source, model, force=True), model)
    return decoder.extend(token_ids).double().log_softmax(-1)


def compared(p: torch.Tensor, q: torch.Tensor) -> dict[str, float]:
    """Mean KL(p || q) in nats and share of equal argmaxes, over tokens."""
    return {
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "agreement": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
    }


def measure(captured: Any, archive: Any, model: Any) -> dict[str, Any]:
    """All figures of one prompt in the model's dtype."""
    anchor = archive.anchor()
    full_text = continue_from(restore(archive, model, force=True), model, NEW_TOKENS)
    of_full = teacher_forced(archive, model, full_text)
    draft = compared(of_full, teacher_forced(anchor, model, full_text))
    of_exact = teacher_forced(captured, model, full_text)
    exact = compared(of_exact, of_full)
    report = speculate(anchor, archive, model, NEW_TOKENS, max_drafts=NEW_TOKENS, force=True)
    return {
        "draft_kl": draft["kl"],
        "draft_agreement": draft["agreement"],
        "num_accepted": report.num_accepted,
        "speculated_equals_greedy": list(report.token_ids) == full_text,
        "full_exact_kl": exact["kl"],
        "full_exact_agreement": exact["agreement"],
        # the first token follows from stored logits in both
        "full_text_equals_exact": of_exact.argmax(-1).tolist()[:-1] == full_text[1:],
    }


def capture_bf16(model: Any, token_ids: Sequence[int]) -> Any:
    """Capture whose cache and logits are BF16, rounded if the model computes in float32."""
    captured = kvz.capture(model, torch.tensor([token_ids]), queries=0)
    if model.dtype == torch.bfloat16:
        return captured
    document = json.loads(captured.metadata["kvz"])
    document["identity"]["dtype"] = "BF16"
    rounded = {
        name: tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
        for name, tensor in captured.tensors.items()
    }
    return Capture(rounded, {"kvz": json.dumps(document)}, None)


class Worker:
    """Models of one process, and what it measures."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        bf16, _ = load(str(models.smollm2()), "bfloat16", "cpu", None)
        self._models = {"bfloat16": bf16}
        if "float32" in (*arguments.dtype, arguments.prefill):
            # not loaded anew: the file's weights would then be unrounded, those of another model
            self._models["float32"] = copy.deepcopy(bf16).float()
        self._prefill = arguments.prefill
        self._options = dict(item.split("=", 1) for item in arguments.codec_option)

    def measure(self, token_ids: Sequence[int], dtypes: Sequence[str]) -> dict[str, Any]:
        captured = capture_bf16(self._models[self._prefill], token_ids)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "cache.kvz")
            kvz.compress(captured, path, codec="lynx", codec_options=self._options)
            with kvz.open(path) as archive:
                return {dtype: measure(captured, archive, self._models[dtype]) for dtype in dtypes}


_worker: Worker


def start_worker(arguments: argparse.Namespace) -> None:
    global _worker
    torch.set_num_threads(arguments.threads)
    _worker = Worker(arguments)


def work(token_ids: Sequence[int], dtypes: Sequence[str]) -> dict[str, Any]:
    return _worker.measure(token_ids, dtypes)


def run(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    _, tokenizer = load(str(models.smollm2()), "bfloat16", "cpu", None)
    prompts = speculation_prompts.build(tokenizer)
    start = time.monotonic()
    with ProcessPoolExecutor(
        arguments.processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(arguments,),
    ) as pool:
        pending = {}
        for prompt in prompts[:: len(prompts) // arguments.prompts]:
            default = {"num_tokens": len(prompt.token_ids)}
            entry = results["prompts"].setdefault(prompt.name, default)
            missing = [dtype for dtype in arguments.dtype if dtype not in entry]
            if missing:
                pending[pool.submit(work, prompt.token_ids, missing)] = prompt.name
        for done in as_completed(pending):
            results["prompts"][pending[done]].update(done.result())
            arguments.output.write_text(json.dumps(results, indent=1))
            print(pending[done], f"{time.monotonic() - start:.1f} s", flush=True)


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures over several prompts."""

    def mean(name: str) -> float:
        return statistics.fmean(entry[name] for entry in found)

    accepted = [entry["num_accepted"] for entry in found]
    return {
        "prompts": len(found),
        "draft agreement": mean("draft_agreement"),
        "draft KL": mean("draft_kl"),
        "accepted mean": statistics.fmean(accepted),
        "accepted median": statistics.median(accepted),
        "share >= 10": statistics.fmean(n >= 10 for n in accepted),
        "share all": statistics.fmean(n == NEW_TOKENS for n in accepted),
        "full/BF16 agreement": mean("full_exact_agreement"),
        "full/BF16 KL": mean("full_exact_kl"),
        "text = BF16's": sum(entry["full_text_equals_exact"] for entry in found),
        "text = greedy": sum(entry["speculated_equals_greedy"] for entry in found),
    }


def show(results: Mapping[str, Any]) -> None:
    for dtype in DTYPES:
        groups: dict[str, list[Any]] = {"all": []}
        for name, entry in results["prompts"].items():
            if dtype in entry:
                groups["all"].append(entry[dtype])
                groups.setdefault(name.split("-")[0], []).append(entry[dtype])
        if not groups["all"]:
            continue
        columns = {name: summary(found) for name, found in groups.items()}
        rows = [[dtype, *columns]]
        for figure in columns["all"]:
            rows.append([figure, *(f"{column[figure]:.4g}" for column in columns.values())])
        print("\n" + "\n".join(aligned(rows, "<" + ">" * len(columns))))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: both")
    parser.add_argument("--prefill", choices=DTYPES, default="bfloat16")
    parser.add_argument("--prompts", type=int, default=96, help="how many of the 96")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process")
    parser.add_argument("--codec-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("-o", "--output", type=Path, default=Path("lynx-speculation.json"))
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or list(DTYPES)
    results: dict[str, Any] = {
        "machine": dataclasses.asdict(describe_machine()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": arguments.threads,
        "prefill": arguments.prefill,
        "codec_options": arguments.codec_option,
        "prompts": {},
    }
    if arguments.output.exists():
        earlier = json.loads(arguments.output.read_text())
        if any(earlier.get(name) != results[name] for name in ("prefill", "codec_options")):
            parser.error(f"{arguments.output} holds results of other options")
        results["prompts"] = earlier["prompts"]
    run(arguments, results)
    show(results)


if __name__ == "__main__":
    main()
