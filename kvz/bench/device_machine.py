"""What a figure on a GPU depends on besides the code: card, driver, clocks, versions."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from kvz.gpu.device import Device
from kvz.version import __version__

_QUERIES = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "memory_max_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
_PACKAGES = ("triton", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12")


@dataclass(frozen=True, slots=True)
class DeviceMachine:
    """``readings``: what nvidia-smi said after the last case, under the load's clocks or nearly so;
    empty where it is missing."""

    gpu: str
    num_multiprocessors: int
    memory_nbytes: int
    interpreted: bool
    readings: dict[str, str]
    system: str
    versions: dict[str, str]


def _readings(index: int) -> dict[str, str]:
    command = [
        "nvidia-smi",
        f"--id={index}",
        f"--query-gpu={','.join(_QUERIES.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in result.stdout.strip().split(",")]
    return dict(zip(_QUERIES, values, strict=False))


def _versions() -> dict[str, str]:
    versions = {
        "kvz": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
    }
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def describe_device(device: Device) -> DeviceMachine:
    """The card and the software that run now."""
    system = f"{platform.system()} {platform.release()}"
    if device.interpreted:
        return DeviceMachine("none: Triton interprets", 0, 0, True, {}, system, _versions())
    card = torch.cuda.get_device_properties(device.torch_device)
    return DeviceMachine(
        gpu=card.name,
        num_multiprocessors=card.multi_processor_count,
        memory_nbytes=card.total_memory,
        interpreted=False,
        readings=_readings(device.torch_device.index),
        system=system,
        versions=_versions(),
    )
