"""Where tests of the GPU code run: on an NVIDIA GPU, or on the CPU in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported, so for a whole process:
test_gpu_interpreted.py starts one for each of the modules that use this.
"""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


MARKS = [
    pytest.mark.cuda,
    pytest.mark.skipif(not INTERPRETED and not _has_gpu(), reason="needs an NVIDIA GPU"),
]
#: For what the interpreter cannot do.
real_gpu_only = pytest.mark.skipif(
    INTERPRETED or not _has_gpu(), reason="needs an NVIDIA GPU, not the interpreter"
)
