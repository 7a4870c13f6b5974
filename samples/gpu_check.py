"""Everything about the GPU in one command, with compact results: parity, file pipeline, benchmark.

Run it from the checkout, for example:
    PYTHONPATH=. python samples/gpu_check.py --parity --pipeline 4 --bench
    PYTHONPATH=. python samples/gpu_check.py --cut long.safetensors short.safetensors 6 4096
"""

from __future__ import annotations

import argparse
import filecmp
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvz
from kvz.formats.safetensors import build_header
from kvz.layout import is_key_or_value, layer_index
from kvz.safetensors_io import SafetensorsFile

SAMPLE = Path(__file__).parent / "smollm2-docs.safetensors"
CODECS: list[tuple[str, dict[str, str]]] = [
    ("gaac", {"windows": "2/3/4"}),
    ("gaac", {"windows": "3/4"}),
    ("splitzip", {}),
]
LOSSY: list[tuple[str, dict[str, str]]] = [
    ("lynx", {}),
    ("lynx", {"preset": "paper"}),
    ("pnmix", {}),
    ("pnmix", {"preset": "paper", "values": "2"}),
]


def key_values(source: SafetensorsFile) -> Iterator[str]:
    """Names of keys and values, in the order of the file."""
    return (name for name in source.tensor_names if is_key_or_value(name))


def write_cut(source: Path, target: Path, layers: int, tokens: int) -> None:
    """Keys and values of the first layers, their first tokens."""
    with SafetensorsFile(source) as opened:
        arrays = {
            name: np.ascontiguousarray(opened.read_tensor(name)[..., :tokens, :])
            for name in key_values(opened)
            if (layer_index(name) or 0) < layers
        }
        listing = [(name, opened.dtype(name), array.shape) for name, array in arrays.items()]
        metadata = {"origin": f"first {layers} layers and {tokens} tokens of {source.name}"}
    with open(target, "wb") as stream:
        stream.write(build_header(listing, metadata)[0])
        for array in arrays.values():
            stream.write(array.reshape(-1).view(np.uint8))


def write_tiled(source: Path, target: Path, nbytes: int) -> int:
    """A capture of at least ``nbytes``: the keys and values of ``source``, repeated as more layers.

    Each is first repeated along tokens to 16 MiB. Returns the size of the file.
    """
    with SafetensorsFile(source) as opened:
        arrays = [(opened.dtype(name), opened.read_tensor(name)) for name in key_values(opened)]
    base = [
        (dtype, np.concatenate([array] * max(1, (16 << 20) // array.nbytes), axis=-2))
        for dtype, array in arrays
    ]
    count = -(-nbytes // sum(array.nbytes for _, array in base)) * len(base)
    listing = []
    for i in range(count):
        dtype, array = base[i % len(base)]
        listing.append((f"layers.{i // 2}.{('key', 'value')[i % 2]}", dtype, array.shape))
    with open(target, "wb") as stream:
        stream.write(build_header(listing, {"origin": f"{source.name}, repeated"})[0])
        for i in range(count):
            stream.write(base[i % len(base)][1].reshape(-1).view(np.uint8))
    return target.stat().st_size


def check_parity(captures: list[Path], device: str, folder: Path) -> None:
    """Same archives on both, and both decode them alike; what is not lossy to the capture."""
    for capture in captures:
        for codec, options in (*CODECS, *LOSSY):
            label = f"{capture.name} {codec} {','.join(options.values())}".rstrip()
            cpu, gpu = folder / "cpu.kvz", folder / "gpu.kvz"
            given: dict[str, Any] = {"codec_options": options, "overwrite": True}
            kvz.compress(capture, cpu, codec, **given)
            kvz.compress(capture, gpu, codec, device=device, **given)
            assert filecmp.cmp(cpu, gpu, shallow=False), f"{label}: archives differ"
            for anchor_only in (False, True) if codec == "lynx" else (False,):
                check_decoded(label, gpu, device, anchor_only=anchor_only)
            if (codec, options) in CODECS:
                kvz.verify(gpu, against=capture, device=device)
                kvz.verify(gpu, against=capture)
            ratio = capture.stat().st_size / cpu.stat().st_size
            print(f"parity {label}: ratio {ratio:.4f}, archives equal, decoded alike", flush=True)


def check_decoded(label: str, archive: Path, device: str, *, anchor_only: bool) -> None:
    """The files that CPU and GPU make of it are equal."""
    cpu, gpu = (archive.with_name(name) for name in ("cpu.safetensors", "gpu.safetensors"))
    for path, where in ((cpu, "cpu"), (gpu, device)):
        kvz.decompress(archive, path, device=where, overwrite=True, anchor_only=anchor_only)
    assert filecmp.cmp(cpu, gpu, shallow=False), f"{label}: decoded files differ"


def report_stages(label: str, nbytes: int, report: Any) -> dict[str, Any]:
    """One line, and the same for the JSON file."""
    stages = ", ".join(f"{name} {seconds:.3f}" for name, seconds in (report.stages or {}).items())
    print(
        f"pipeline {label}: {report.seconds:.3f} s, {nbytes / report.seconds / 1e9:.2f} GB/s"
        f"{f'; seconds: {stages}' if stages else ''}",
        flush=True,
    )
    return {"what": label, "nbytes": nbytes, "seconds": report.seconds, "stages": report.stages}


def check_pipeline(
    capture: Path, gigabytes: float, device: str, folder: Path, *, with_cpu: bool
) -> list[dict[str, Any]]:
    """Compress, verify and decompress a large capture on a RAM disk, each twice on the GPU."""
    cache, archive, back = (folder / n for n in ("big.safetensors", "big.kvz", "back.safetensors"))
    nbytes = write_tiled(capture, cache, int(gigabytes * 1e9))
    print(f"pipeline: {capture.name} repeated to {nbytes / 1e9:.2f} GB on {folder}", flush=True)
    lines = []
    for codec, options in (CODECS[0], CODECS[2]):
        label = f"{codec} {options.get('windows', '')}".rstrip()
        given: dict[str, Any] = {"codec_options": options, "overwrite": True}
        # the first run compiles kernels and touches everything for the first time
        for run in ("first", "second"):
            done = kvz.compress(cache, archive, codec, device=device, **given)
            lines.append(report_stages(f"{label} compress, {run} run", nbytes, done))
        if with_cpu:
            other = folder / "cpu.kvz"
            on_cpu = kvz.compress(cache, other, codec, **given)
            lines.append(report_stages(f"{label} compress, cpu", nbytes, on_cpu))
            assert filecmp.cmp(archive, other, shallow=False), f"{label}: archives differ"
            other.unlink()
        for run in ("first", "second"):
            restored = kvz.decompress(archive, back, device=device, overwrite=True)
            lines.append(report_stages(f"{label} decompress, {run} run", nbytes, restored))
        assert filecmp.cmp(cache, back, shallow=False), f"{label}: not restored"
        verified = kvz.verify(archive, device=device)
        lines.append(report_stages(f"{label} verify", nbytes, verified))
        back.unlink()
    return lines


def run_bench(arguments: argparse.Namespace, captures: list[Path]) -> dict[str, Any]:
    from kvz.bench.device_report import render
    from kvz.bench.device_run import DEFAULT_SIZES, run_device_bench

    sizes = [int(mib) << 20 for mib in arguments.size_mib] or DEFAULT_SIZES
    report = run_device_bench(
        captures,
        device=arguments.device,
        sizes=sizes,
        calibrate_on=arguments.calibrate_on,
        rounds=arguments.rounds,
    )
    print(render(report), flush=True)
    return report.to_dict()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--capture", action="append", type=Path, default=[], metavar="FILE")
    parser.add_argument("--parity", action="store_true", help="archives of CPU and GPU are equal")
    parser.add_argument("--pipeline", type=float, metavar="GB", help="files of this size")
    parser.add_argument("--with-cpu", action="store_true", help="pipeline: the CPU as well")
    parser.add_argument("--ram-disk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--size-mib", action="append", default=[], metavar="N")
    parser.add_argument("--calibrate-on", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--cut", nargs=4, metavar=("SRC", "DST", "LAYERS", "TOKENS"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.cut:
        source, target, layers, tokens = arguments.cut
        write_cut(Path(source), Path(target), int(layers), int(tokens))
        return
    captures = arguments.capture or [SAMPLE]
    results: dict[str, Any] = {"command": sys.argv[1:]}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.ram_disk, prefix="kvz-gpu-") as name:
        folder = Path(name)
        if arguments.parity:
            # the sample always: it also holds tensors that are no keys or values
            check_parity([SAMPLE, *arguments.capture], arguments.device, folder)
        if arguments.pipeline:
            results["pipeline"] = check_pipeline(
                captures[0],
                arguments.pipeline,
                arguments.device,
                folder,
                with_cpu=arguments.with_cpu,
            )
        if arguments.bench:
            results["bench"] = run_bench(arguments, captures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"all done in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
