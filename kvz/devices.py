"""Names of devices: what ``--device`` and ``device=`` take."""

from __future__ import annotations

import re
from importlib.util import find_spec

from kvz.formats.errors import ConfigError

DEFAULT_DEVICE = "auto"


def gpu_index(device: str) -> int | None:
    """Number of the GPU that ``device`` asks for; None for the CPU (``auto`` is the CPU for now).

    Raises ConfigError.
    """
    if device in ("auto", "cpu"):
        return None
    match = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", device)
    if match is None:
        raise ConfigError(f"device {device!r} must be auto, cpu, cuda or cuda:N")
    return int(match[1] or 0)


def require_gpu(device: str) -> bool:
    """Whether ``device`` asks for a GPU; then the packages that its kernels need are there.

    Raises ConfigError.
    """
    if gpu_index(device) is None:
        return False
    if find_spec("triton") is not None:
        try:
            import torch  # noqa: F401

            return True
        except ImportError:
            pass
    raise ConfigError(f"device {device} needs the packages torch and triton")
