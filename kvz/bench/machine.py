"""What a figure depends on besides the code: processor, caches, versions."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import zstandard

from kvz.version import __version__
from kvz.workers import thread_count

#: Assumed where the system does not tell the size of its last cache.
FALLBACK_CACHE_NBYTES = 64 << 20

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and software of a run; ``cache_nbytes`` is the last-level cache of core 0."""

    cpu: str
    num_cores: int
    cache_nbytes: int
    cache_nbytes_known: bool
    simd: bool
    system: str
    versions: dict[str, str]


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.machine()


def last_cache_nbytes(caches: Path = _CACHES) -> int | None:
    """Size of the highest-level cache listed under ``caches`` (sysfs), or None if none is."""
    sizes: dict[int, int] = {}
    for folder in caches.glob("index*"):
        try:
            level = int((folder / "level").read_text())
            text = (folder / "size").read_text().strip()
            sizes[level] = int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1)
        except (OSError, ValueError):
            continue
    return sizes[max(sizes)] if sizes else None


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def describe_machine() -> Machine:
    """The machine that this process runs on."""
    from kvz.kernels.cpu.simd import HAVE_SIMD

    cache_nbytes = last_cache_nbytes()
    return Machine(
        cpu=cpu_model(),
        num_cores=thread_count(None),
        cache_nbytes=cache_nbytes or FALLBACK_CACHE_NBYTES,
        cache_nbytes_known=cache_nbytes is not None,
        simd=HAVE_SIMD,
        system=f"{platform.system()} {platform.release()}",
        versions={
            "kvz": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": _package_version("numba"),
            "zstandard": zstandard.__version__,
            "libzstd": ".".join(str(part) for part in zstandard.ZSTD_VERSION),
        },
    )
