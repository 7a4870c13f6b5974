"""``kvz capture``."""

from __future__ import annotations

import time
from typing import Any

import click

from kvz.cli import models, options
from kvz.cli.progress import meter
from kvz.cli.text import count, emit, emit_json, format_nbytes, printable


def _destination(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value != options.STANDARD_STREAM and not value.endswith(".safetensors"):
        raise click.BadParameter(
            f"{value!r} must end in .safetensors (kvz compress makes the archive of it)"
        )
    return value


@click.command()
@click.argument("model")
@options.output_option(
    required=True, callback=_destination, help="Safetensors file to write, - for standard output."
)
@click.option("--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "--prompt-file",
    metavar="FILE",
    type=options.PATH_OR_DASH,
    help="File with the prompt, - for standard input.",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", help="Only the first N tokens."
)
@click.option(
    "--queries",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    metavar="N",
    help="Keep the queries of the last N positions.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="Tokens in one forward pass.",
)
@models.model_options
@options.overwrite_option
@options.json_option
def command(
    model: str,
    destination: str,
    prompt: str | None,
    prompt_file: str | None,
    max_tokens: int | None,
    queries: int,
    chunk_tokens: int,
    dtype: str,
    device: str,
    gguf_file: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run a prompt through a model and save its KV cache.

    MODEL is a folder, a name on the Hugging Face hub, or a .gguf file. The capture records whose
    cache it is, so that a restore can refuse any other model.

    \b
    Example:
      kvz capture ./model --prompt-file prompt.txt -o cache.safetensors
    """
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give the prompt with either --prompt or --prompt-file")
    options.check_streams(None, destination)
    options.check_writable_later(destination, overwrite)
    text = prompt if prompt is not None else models.read_text(str(prompt_file))
    loaded, tokenizer = models.load(model, dtype, device, gguf_file)
    start = time.perf_counter()
    token_ids = models.token_ids(tokenizer, text)[:, :max_tokens]
    captured = _capture(loaded, token_ids, queries=queries, chunk_tokens=chunk_tokens)
    seconds = time.perf_counter() - start
    captured.save(destination, overwrite=overwrite)
    document = {
        "destination": destination,
        "model": model,
        "num_tokens": captured.shape("input_ids")[1],
        "num_tensors": len(captured.tensor_names),
        "nbytes": sum(tensor.nbytes for tensor in captured.tensors.values()),
        "seconds": seconds,
    }
    to_stderr = destination == options.STANDARD_STREAM
    if as_json:
        emit_json(document, to_stderr=to_stderr)
    else:
        emit(_line(document), to_stderr=to_stderr)


def _capture(model: Any, token_ids: Any, *, queries: int, chunk_tokens: int) -> Any:
    import kvz

    with meter("prefill", token_ids.shape[1], unit="tokens") as progress:
        return kvz.capture(
            model,
            token_ids,
            queries=queries,
            chunk_tokens=chunk_tokens,
            progress=progress.update,
        )


def _line(document: dict[str, Any]) -> str:
    name = "<stdout>" if document["destination"] == "-" else document["destination"]
    return (
        f"{printable(name)}: {count(document['num_tokens'], 'token')}, "
        f"{count(document['num_tensors'], 'tensor')}, {format_nbytes(document['nbytes'])}, "
        f"{document['num_tokens'] / document['seconds']:.0f} tokens/s"
    )
