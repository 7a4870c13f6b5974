"""Runs the command line as a user does, in a process of its own, on small made-up caches.

The caches are for the mechanics only: their ratios mean nothing.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
Tensors = dict[str, tuple[str, NDArray[Any]]]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a command: the package of this checkout, no debugging, no hub."""
    kept = {k: v for k, v in os.environ.items() if k not in ("KVZ_DEBUG", "COLUMNS")}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **extra}


def command_line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "kvz", *map(str, arguments)]


def kvz(
    *arguments: str | Path, cwd: Path, data: bytes = b"", **settings: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run ``kvz ARGUMENTS`` in ``cwd`` with ``data`` on standard input."""
    settings.setdefault("stdout", subprocess.PIPE)
    settings.setdefault("stderr", subprocess.PIPE)
    settings.setdefault("env", environment())
    if "stdin" not in settings:
        settings["input"] = data
    return subprocess.run(command_line(*arguments), cwd=cwd, timeout=120, check=False, **settings)


def python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that uses the package."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess[bytes], code: int, line: str) -> None:
    """The command ended with ``code``, exactly one line on stderr, and nothing on stdout."""
    assert result.stderr.decode() == f"kvz: error: {line}\n"
    assert (result.stdout or b"") == b""
    assert result.returncode == code


def bf16(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint16]:
    """Bit patterns of normally distributed BF16 values."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def small_cache(num_tokens: int = 96, num_layers: int = 3, seed: int = 0) -> Tensors:
    """Keys and values ``[1, 2, num_tokens, 16]`` of some layers, and their tokens."""
    tensors: Tensors = {"input_ids": ("I64", np.arange(num_tokens, dtype=np.int64)[None])}
    for layer in range(num_layers):
        for i, part in enumerate(("key", "value")):
            array = bf16((1, 2, num_tokens, 16), seed + 2 * layer + i)
            tensors[f"layers.{layer}.{part}"] = ("BF16", array)
    return tensors


def write_cache(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file, put together here so that it does not depend on what is tested."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, (dtype, array) in tensors.items():
        end = position + array.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for _, array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def read_cache(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: (f["dtype"], f["shape"], body[slice(*f["data_offsets"])])
        for name, f in header.items()
    }


def as_read(tensors: Tensors) -> dict[str, tuple[str, list[int], bytes]]:
    """What :func:`read_cache` gives for a cache that was written with these tensors."""
    return {n: (dtype, list(a.shape), a.tobytes()) for n, (dtype, a) in tensors.items()}


def names(folder: Path) -> set[str]:
    """Everything that lies in a folder, hidden files included."""
    return {path.name for path in folder.iterdir()}
