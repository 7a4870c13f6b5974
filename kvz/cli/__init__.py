"""The command ``kvz``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from kvz.cli import errors


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with one of the codes of :mod:`kvz.cli.errors`."""
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    try:
        errors.clean_up_on_termination()
        # here, so that Ctrl-C during the import ends like any other
        from kvz.cli.group import invoke

        code = invoke(list(arguments))
        errors.flush_output()
        return code
    except BaseException as error:
        return errors.report(error)
