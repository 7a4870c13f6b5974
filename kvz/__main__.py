"""``python -m kvz`` is the command ``kvz``."""

from __future__ import annotations

from kvz.cli import main

if __name__ == "__main__":
    main()
