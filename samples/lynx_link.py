"""Time until a model goes on from a cache that comes over a link: lynx against other formats.

SmolLM2 after a long prompt of docs. The link is modelled (`kvz.link`), everything else is run:
bytes are really read through it, decoded and restored, and lynx really drafts and verifies
meanwhile. From a cache that came whole the model goes on alike whatever brought it: those 64 steps
are run once and added to each format's first token. Beside the measured times stand those that
follow from the parts measured alone.

Formats: `bf16`, the safetensors capture; `gaac`, lossless, decoded as it arrives; `lynx`, whose
drafts are verified; and `int8`, `int4` per channel in groups of 32 tokens with fp16 scale and
minimum: of these only the number of bytes counts, decoding them is taken to cost nothing.
Times are seconds from the first byte asked for to the n-th token; in brackets what the parts alone
predict. `drafts count`: an accepted draft counts when it was drafted; `verified`: when it was
verified. A draft that is dropped never counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import models
import numpy as np
import prompts
import torch

import kvz
from kvz.archive_stream import ArchiveStream
from kvz.bench.machine import describe_machine
from kvz.capturing import Capture
from kvz.cli.models import load
from kvz.cli.text import aligned
from kvz.files import read_exactly
from kvz.link import over_link
from kvz.progressive import ProgressiveReader
from kvz.restoring import restore
from kvz.speculation import speculate
from kvz.speculation.decoder import CacheDecoder

SPEEDS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
# the first follows from logits that are in the file, the second needs the cache
NTH = (1, 2, 8, 32, 64)
NEW_TOKENS = 64
GROUP_TOKENS = 32
FORMATS = ("bf16", "gaac", "int8", "int4", "lynx")


class Arrived:
    """Tensors in memory: a `CacheSource`."""

    def __init__(self, like: Any, arrays: Mapping[str, Any]) -> None:
        self.metadata = like.metadata
        self.tensor_names = list(arrays)
        self._dtypes = {name: like.dtype(name) for name in arrays}
        self._arrays = arrays

    def dtype(self, name: str) -> str:
        return self._dtypes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._arrays[name].shape
        return shape

    def read_tensor(self, name: str) -> Any:
        return self._arrays[name]


def quantised_nbytes(captured: Capture, bits: int) -> int:
    """Bytes of keys and values at `bits` per channel, of the other tensors as they are."""
    nbytes = 0
    for tensor in captured.tensors.values():
        if tensor.dtype != torch.bfloat16 or tensor.ndim != 4:
            nbytes += tensor.nbytes
            continue
        batch, heads, num_tokens, head_dim = tensor.shape
        channels = batch * heads * head_dim
        num_groups = -(-num_tokens // GROUP_TOKENS)
        nbytes += channels * (-(-num_tokens * bits // 8) + 4 * num_groups)
    return nbytes


class Bench:
    """One prompt, its model, and each format's bytes."""

    def __init__(self, num_tokens: int, folder: Path) -> None:
        self.model, tokenizer = load(str(models.smollm2()), "bfloat16", "cpu", None)
        ids = torch.tensor([tokenizer(prompts.docs()).input_ids[:num_tokens]])
        start = time.monotonic()
        self.captured = kvz.capture(self.model, ids, queries=0)
        self.prefill_s = time.monotonic() - start
        self.num_tokens = ids.shape[1]
        self.files = {name: folder / f"{name}.kvz" for name in ("gaac", "lynx")}
        reports = {
            name: kvz.compress(self.captured, path, codec=name) for name, path in self.files.items()
        }
        self.nbytes = {
            "bf16": sum(tensor.nbytes for tensor in self.captured.tensors.values()),
            "gaac": reports["gaac"].stored_nbytes,
            "int8": quantised_nbytes(self.captured, 8),
            "int4": quantised_nbytes(self.captured, 4),
            "lynx": reports["lynx"].stored_nbytes,
        }
        self.anchor_nbytes: int = reports["lynx"].anchor_nbytes or 0
        with kvz.open(self.files["lynx"]) as lynx:
            drafted = speculate(lynx.anchor(), lynx, self.model, NEW_TOKENS)
        self.num_accepted = drafted.num_accepted
        self.later_s = self._go_on()

    # -- over the link

    def over(self, name: str, bits_per_second: float, latency_s: float) -> dict[str, Any]:
        """Token times of a format over a link."""
        if name in self.files:
            data: BinaryIO = io.BytesIO(self.files[name].read_bytes())
        else:
            data = io.BytesIO(bytes(self.nbytes[name]))
        stream = over_link(data, bits_per_second, latency_s)
        start = time.monotonic()
        if name == "lynx":
            return self._speculate(stream, start)
        if name == "gaac":
            source: Any = self._decode_stream(stream)
        else:
            read_exactly(stream, self.nbytes[name])
            source = self.captured
        restored = restore(source, self.model)
        first = time.monotonic() - start
        del restored
        return {"token_times_s": [first + t for t in self.later_s]}

    def _decode_stream(self, stream: BinaryIO) -> Arrived:
        archive = ArchiveStream(stream)
        entries = archive.head.tensors
        arrays = [np.empty(entry.view_shape, f"u{entry.itemsize}") for entry in entries]
        for chunk in archive.chunks(lambda *_: True):
            first, stop = entries[chunk.tensor].chunk_range(chunk.chunk)
            chunk.decode(arrays[chunk.tensor][:, first:stop])
        found = {e.name: a.reshape(e.shape) for e, a in zip(entries, arrays, strict=True)}
        return Arrived(self.captured, found)

    def _go_on(self) -> list[float]:
        """Seconds from the first token to each of the tokens on a whole cache."""
        decoder = CacheDecoder.of(restore(self.captured, self.model), self.model)
        start = time.monotonic()
        times = [0.0]
        while len(times) < NEW_TOKENS:
            decoder.extend([int(decoder.logits.argmax())])
            times.append(time.monotonic() - start)
        return times

    def _speculate(self, stream: BinaryIO, start: float) -> dict[str, Any]:
        with ProgressiveReader(stream) as reader:
            anchor = reader.anchor()
            report = speculate(
                anchor, reader.full, self.model, NEW_TOKENS, ready=reader.is_complete
            )
        offset = report.started_at - start
        times = [offset + t for t in report.token_times_s]
        verified = offset + report.verified_s
        return {
            "token_times_s": times,
            # drafts count when they are judged
            "final_times_s": [max(t, verified) for t in times],
            "draft_times_s": [offset + t for t in report.draft_times_s],
            "num_drafted": report.num_drafted,
            "num_accepted": report.num_accepted,
        }

    # -- the parts alone

    def parts(self) -> dict[str, float]:
        """Seconds of what does not depend on the link, medians of three."""
        restored = restore(self.captured, self.model)
        decoder = CacheDecoder.of(restored, self.model)
        ids = list(range(NEW_TOKENS))

        def verify() -> None:
            decoder.mark()
            decoder.extend(ids)
            decoder.keep(0)

        with kvz.open(self.files["lynx"]) as lynx, kvz.open(self.files["gaac"]) as gaac:
            return {
                "prefill": self.prefill_s,
                "step": self.later_s[-1] / (NEW_TOKENS - 1),
                "verify_64": _median_s(verify),
                "restore_bf16": _median_s(lambda: restore(self.captured, self.model)),
                "restore_gaac": _median_s(lambda: restore(gaac, self.model)),
                "restore_lynx": _median_s(lambda: restore(lynx, self.model)),
                "restore_anchor": _median_s(lambda: restore(lynx.anchor(), self.model)),
            }


def _median_s(run: Callable[[], object], rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


def predicted(
    bench: Bench, parts: Mapping[str, float], speed: float, latency: float
) -> dict[str, list[float]]:
    """Token times by row of the table, from the parts alone."""
    step = parts["step"]
    found = {}
    for name in FORMATS[:-1]:
        part = "restore_gaac" if name == "gaac" else "restore_bf16"
        first = latency + 8 * bench.nbytes[name] / speed + parts[part]
        found[name] = [first + i * step for i in range(NEW_TOKENS)]
    complete = latency + 8 * bench.nbytes["lynx"] / speed
    first = latency + 8 * bench.anchor_nbytes / speed + parts["restore_anchor"]
    num_drafts = 0 if complete <= first else min(NEW_TOKENS, int((complete - first) / step) + 1)
    drafts = [first + i * step for i in range(num_drafts)]
    arrived = max([complete, first, *drafts[-1:]])
    verified = arrived + parts["restore_lynx"] + (parts["verify_64"] if num_drafts else 0)
    num_accepted = min(num_drafts, bench.num_accepted)
    rest = [verified + i * step for i in range(NEW_TOKENS - num_accepted)]
    found["lynx, drafts count"] = drafts[:num_accepted] + rest
    found["lynx, verified"] = [verified] * num_accepted + rest
    return found


def table_rows(
    bench: Bench, measured: Mapping[str, Any], expected: Mapping[str, Sequence[float]]
) -> list[list[str]]:
    times = {name: run["token_times_s"] for name, run in measured.items() if name != "lynx"}
    times["lynx, drafts count"] = measured["lynx"]["token_times_s"]
    times["lynx, verified"] = measured["lynx"]["final_times_s"]
    rows = []
    for name, found in times.items():
        cells = [f"{found[n - 1]:.2f} ({expected[name][n - 1]:.2f})" for n in NTH]
        rows.append([name, f"{bench.nbytes[name.split(',')[0]] / 1e6:.1f}", *cells])
    return rows


def show(bench: Bench, parts: Mapping[str, float], runs: Mapping[str, Any], latency: float) -> None:
    print(f"{bench.num_tokens} tokens, anchors {bench.anchor_nbytes / 1e6:.1f} MB")
    print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items()))
    print("prefilling instead of fetching takes as long as its entry says, without any link\n")
    for label, measured in runs.items():
        expected = predicted(bench, parts, SPEEDS[label], latency)
        heading = [label, "MB", *(f"token {n}" for n in NTH)]
        rows = table_rows(bench, measured, expected)
        print("\n".join(aligned([heading, *rows], "<" + ">" * (1 + len(NTH)))))
        lynx = measured["lynx"]
        print(f"{lynx['num_drafted']} drafted, {lynx['num_accepted']} accepted")
        for n in NTH:
            ours = lynx["final_times_s"][n - 1]
            faster = [f for f in FORMATS[:-1] if measured[f]["token_times_s"][n - 1] <= ours]
            if faster:
                print(f"verified token {n}: nothing gained over {', '.join(faster)}")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8000, help="length of the prompt")
    parser.add_argument("--latency", type=float, default=0.02, metavar="S", help="default: 20 ms")
    parser.add_argument("-o", "--output", type=Path, default=Path("lynx-link.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.tokens, Path(folder))
        parts = bench.parts()
        print("compressed and measured the parts", flush=True)
        runs: dict[str, dict[str, Any]] = {}
        for label, speed in SPEEDS.items():
            runs[label] = {name: bench.over(name, speed, arguments.latency) for name in FORMATS}
    show(bench, parts, runs, arguments.latency)
    results = {
        "machine": dataclasses.asdict(describe_machine()),
        "threads": torch.get_num_threads(),
        "num_tokens": bench.num_tokens,
        "latency_s": arguments.latency,
        "nbytes": bench.nbytes,
        "anchor_nbytes": bench.anchor_nbytes,
        "num_accepted_of_64": bench.num_accepted,
        "parts_s": parts,
        "runs": runs,
        "predicted_s": {
            label: predicted(bench, parts, speed, arguments.latency)
            for label, speed in SPEEDS.items()
        },
    }
    arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
