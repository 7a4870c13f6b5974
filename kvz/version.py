"""The version of kvz; pyproject.toml takes it from here."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
