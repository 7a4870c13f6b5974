"""Models for the commands that need one, loaded without the libraries' chatter."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from kvz.cli.options import STANDARD_STREAM
from kvz.formats.errors import ConfigError, SourceError

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = ("bfloat16", "float16", "float32")
#: Read by the libraries when they are imported.
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def model_options(command: F) -> F:
    """``--dtype``, ``--device`` and ``--gguf-file``."""
    for option in (
        click.option("--gguf-file", metavar="F", help="GGUF file inside the model's folder."),
        click.option("--device", default="cpu", show_default=True, help="Where the model runs."),
        click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what the libraries print off the terminal; KVZ_DEBUG=1 lets it through."""
    if os.environ.get("KVZ_DEBUG"):
        yield
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    unread = io.StringIO()
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(unread),
        contextlib.redirect_stderr(unread),
    ):
        yield


def load(model: str, dtype: str, device: str, gguf_file: str | None) -> tuple[Any, Any]:
    """Model and tokenizer. Raises ModelLoadError."""
    from kvz.hf import load_model

    with quiet():
        return load_model(model, dtype=dtype, device=device, gguf_file=gguf_file)


def read_text(path: str) -> str:
    """A text file, or standard input for ``-``. Raises SourceError when it is not UTF-8."""
    try:
        if path == STANDARD_STREAM:
            return sys.stdin.buffer.read().decode()
        with open(path, "rb") as stream:
            return stream.read().decode()
    except UnicodeDecodeError as error:
        name = "<stdin>" if path == STANDARD_STREAM else path
        raise SourceError(f"{name}: is not UTF-8 text (byte {error.start})") from None


def token_ids(tokenizer: Any, text: str) -> Any:
    """int64 ``[1, tokens]``. Raises ConfigError for a text without tokens."""
    with quiet():
        ids = tokenizer(text, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise ConfigError("the prompt has no tokens")
    return ids


def stop_ids(model: Any) -> list[int]:
    """Token ids after which the model has nothing more to say."""
    settings = getattr(model, "generation_config", None) or model.config
    ids = getattr(settings, "eos_token_id", None)
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
