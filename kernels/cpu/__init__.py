"""CPU kernels, compiled by numba.

Compiled code is kept on disk. numba compares it with the file that a function stands in, not with
the modules whose intrinsics are compiled into it; so whatever was kept is dropped here as soon as
any module of this folder has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path


def _drop_stale_code(folder: Path) -> None:
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    kept = folder / "__pycache__"
    stamp = kept / "kernels.sha256"
    with contextlib.suppress(OSError):
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        for file in kept.glob("*.nb[ci]"):
            file.unlink(missing_ok=True)
        kept.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())


_drop_stale_code(Path(__file__).parent)
