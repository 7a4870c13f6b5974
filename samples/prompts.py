"""Text for prompts that every Python has: the same on every machine with the same Python."""

from __future__ import annotations

import pydoc_data.topics
import sysconfig
from pathlib import Path


def docs() -> str:
    """English prose: Python's reference pages (PSF licence), 700 kB."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def topic(name: str) -> str:
    """One of those pages, such as "with"."""
    return str(pydoc_data.topics.topics[name])


def code() -> str:
    """Source code: the top-level modules of Python's standard library (PSF licence)."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")))
