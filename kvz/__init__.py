"""kvz: archives of LLM KV caches, exact to the bit or openly lossy.

Everything is loaded on first use, so ``import kvz`` costs nothing: neither torch nor transformers
nor numba is imported before a function needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvz.version import __version__

if TYPE_CHECKING:
    from kvz.archive import Archive
    from kvz.archive import open_archive as open
    from kvz.calibrating import CalibrateReport, calibrate
    from kvz.capturing import Capture, capture, capture_cache
    from kvz.compressing import CompressReport, compress
    from kvz.decompressing import DecompressReport, decompress
    from kvz.formats.errors import (
        ConfigError,
        ContentMismatch,
        DamagedFile,
        FormatError,
        IdentityMismatch,
        KvzError,
        MismatchError,
        SourceError,
        UnsupportedCache,
    )
    from kvz.layout import Layout
    from kvz.progressive import ProgressiveReader
    from kvz.refining import refine
    from kvz.restoring import generate_from, restore, to_cache
    from kvz.speculation import SpeculationReport, speculate
    from kvz.verifying import VerifyReport, verify

_EXPORTS = {
    "Archive": ("kvz.archive", "Archive"),
    "CalibrateReport": ("kvz.calibrating", "CalibrateReport"),
    "Capture": ("kvz.capturing", "Capture"),
    "CompressReport": ("kvz.compressing", "CompressReport"),
    "DecompressReport": ("kvz.decompressing", "DecompressReport"),
    "ConfigError": ("kvz.formats.errors", "ConfigError"),
    "ContentMismatch": ("kvz.formats.errors", "ContentMismatch"),
    "DamagedFile": ("kvz.formats.errors", "DamagedFile"),
    "FormatError": ("kvz.formats.errors", "FormatError"),
    "IdentityMismatch": ("kvz.formats.errors", "IdentityMismatch"),
    "MismatchError": ("kvz.formats.errors", "MismatchError"),
    "SourceError": ("kvz.formats.errors", "SourceError"),
    "UnsupportedCache": ("kvz.formats.errors", "UnsupportedCache"),
    "KvzError": ("kvz.formats.errors", "KvzError"),
    "Layout": ("kvz.layout", "Layout"),
    "ProgressiveReader": ("kvz.progressive", "ProgressiveReader"),
    "VerifyReport": ("kvz.verifying", "VerifyReport"),
    "calibrate": ("kvz.calibrating", "calibrate"),
    "capture": ("kvz.capturing", "capture"),
    "capture_cache": ("kvz.capturing", "capture_cache"),
    "compress": ("kvz.compressing", "compress"),
    "decompress": ("kvz.decompressing", "decompress"),
    "generate_from": ("kvz.restoring", "generate_from"),
    "open": ("kvz.archive", "open_archive"),
    "refine": ("kvz.refining", "refine"),
    "SpeculationReport": ("kvz.speculation", "SpeculationReport"),
    "speculate": ("kvz.speculation", "speculate"),
    "restore": ("kvz.restoring", "restore"),
    "to_cache": ("kvz.restoring", "to_cache"),
    "verify": ("kvz.verifying", "verify"),
}

__all__ = [
    "Archive",
    "CalibrateReport",
    "Capture",
    "CompressReport",
    "ConfigError",
    "ContentMismatch",
    "DamagedFile",
    "DecompressReport",
    "FormatError",
    "IdentityMismatch",
    "KvzError",
    "Layout",
    "MismatchError",
    "ProgressiveReader",
    "SourceError",
    "SpeculationReport",
    "UnsupportedCache",
    "VerifyReport",
    "__version__",
    "calibrate",
    "capture",
    "capture_cache",
    "compress",
    "decompress",
    "generate_from",
    "open",
    "refine",
    "restore",
    "speculate",
    "to_cache",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvz' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(module), attribute)
