"""Exit codes and error lines of the command ``kvz``.

0 done · 1 unexpected failure, out of memory · 2 usage: an option or argument makes no sense · 3 not
a kvz file, or one that needs a newer kvz · 4 damaged or incomplete file · 5 identity or content do
not match · 6 input or output cannot be used (missing file, no space, no model) · 130 Ctrl-C · 141
the reader of our output went away (as if killed by SIGPIPE; nothing is printed) · 143 terminated.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import NoReturn, TypeVar

from kvz.cli.text import printable
from kvz.formats.errors import (
    ConfigError,
    DamagedFile,
    FormatError,
    KvzError,
    MismatchError,
    SourceError,
)

UNEXPECTED = 1
USAGE = 2
INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE
#: The class of an error decides; the first that fits.
EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ConfigError, USAGE),
    (FormatError, 3),
    (DamagedFile, 4),
    (MismatchError, 5),
    (SourceError, 6),
    (OSError, 6),
)

_Error = TypeVar("_Error", bound=BaseException)


def exit_code(error: BaseException) -> int:
    """The exit code for an exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if _cause(error, BrokenPipeError) is not None:
        return CLOSED_PIPE
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), UNEXPECTED)


def describe(error: BaseException) -> str:
    """What is wrong, in one line."""
    if isinstance(error, KvzError):
        return printable(str(error))
    if isinstance(error, OSError):
        # errors of files are named where they happen: what has no name is the report itself
        name = error.filename or "<stdout>"
        reason = error.strerror or str(error)
        return printable(f"{name}: {reason}")
    if isinstance(error, MemoryError):
        return "out of memory; fewer --threads need less"
    details = f": {error}" if str(error) else ""
    return printable(
        f"unexpected {type(error).__name__}{details} "
        "(please report it; KVZ_DEBUG=1 shows where it happened)"
    )


def tell(error: BaseException) -> int:
    """Print the line for an exception, if it deserves one; returns its exit code."""
    if os.environ.get("KVZ_DEBUG"):
        traceback.print_exception(error)
    code = exit_code(error)
    if code == INTERRUPTED:
        _print("kvz: interrupted")
    elif code != CLOSED_PIPE:
        _print(f"kvz: error: {describe(error)}")
    return code


def report(error: BaseException) -> int:
    """End the command with an exception: print its line, return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else UNEXPECTED
    code = tell(error)
    _drop_unwritable_output()
    return code


def report_usage(message: str, command_path: str) -> int:
    """Print the line for a command line that makes no sense; returns the exit code."""
    _print(f"kvz: error: {printable(message.rstrip('.'))} (see {command_path} --help)")
    return USAGE


def flush_output() -> None:
    """Write out what is buffered, while a failure can still be told."""
    if sys.stdout is not None:
        sys.stdout.flush()


def clean_up_on_termination() -> None:
    """Let SIGTERM and SIGHUP unwind the stack, so that unfinished outputs are removed."""

    def terminate(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminate)


def _cause(error: BaseException, kind: type[_Error]) -> _Error | None:
    """The exception itself, or the first one behind it, that is of ``kind``."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, kind):
            return link
        link = link.__cause__ or link.__context__
    return None


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _drop_unwritable_output() -> None:
    """Keep the interpreter from failing once more when it flushes standard output at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
