"""The tests of the GPU code in Triton's interpreter, on the CPU; and what no GPU means."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli_support import assert_refused, environment, kvz, small_cache, write_cache

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 800


def interpret(module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{module}.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    """The modules that were asked for, as many at a time as there are processors."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [
        item.callspec.params["module"]
        for item in items
        if item.originalname == test_gpu_tests_pass_in_the_interpreter.__name__
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield {module: pool.submit(interpret, module) for module in chosen}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "module",
    # the longest first
    ["test_gpu_pnmix", "test_gpu_codecs", "test_gpu_lynx", "test_gpu_files", "test_gpu_bench"],
)
def test_gpu_tests_pass_in_the_interpreter(module: str, runs: dict[str, Future[Any]]) -> None:
    result = runs[module].result()
    assert result.returncode == 0, result.stdout[-6000:]
    assert " passed" in result.stdout


@pytest.mark.parametrize("command", ["compress", "decompress", "bench"])
def test_cuda_without_a_gpu_is_refused_in_one_line(command: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    write_cache(tmp_path / "c.safetensors", small_cache())
    assert kvz("compress", "c.safetensors", cwd=tmp_path).returncode == 0
    source = "c.kvz" if command == "decompress" else "c.safetensors"
    output = [] if command == "bench" else ["-o", "out"]
    hidden = environment(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    result = kvz(command, source, *output, "--device", "cuda", cwd=tmp_path, env=hidden)
    version = torch.__version__
    assert_refused(result, 2, f"device cuda: torch {version} finds no CUDA device")
    assert not (tmp_path / "out").exists()


def test_cuda_without_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')\n")
    write_cache(tmp_path / "c.safetensors", small_cache())
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    result = kvz(
        *("compress", "c.safetensors", "--device", "cuda:1"),
        cwd=tmp_path,
        env=environment(PYTHONPATH=path),
    )
    assert_refused(result, 2, "device cuda:1 needs the packages torch and triton")
