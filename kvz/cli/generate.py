"""``kvz generate``."""

from __future__ import annotations

import re

import click

from kvz.cli import models, options
from kvz.cli.text import emit, emit_json, printable


def _first_tokens(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``:512``, or ``0:512``."""
    if value is None:
        return None
    match = re.fullmatch(r"0?:([0-9]+)", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} must be :N, such as :512")
    return int(match[1])


@click.command()
@click.argument("file", metavar="FILE", type=options.PATH)
@click.option("--model", required=True, help="Folder, name on the hub, or .gguf file.")
@click.option("--prompt", metavar="TEXT", help="Text to go on from, after the cached tokens.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N"
)
@click.option(
    "--tokens",
    metavar=":N",
    callback=_first_tokens,
    help="Go on after the first N cached tokens; needs --prompt unless N is all of them.",
)
@click.option("--force", is_flag=True, help="Accept a cache of another model, with a warning.")
@models.model_options
@options.json_option
def command(
    file: str,
    model: str,
    prompt: str | None,
    max_new_tokens: int,
    tokens: int | None,
    force: bool,
    dtype: str,
    device: str,
    gguf_file: str | None,
    as_json: bool,
) -> None:
    """Go on generating from a cache, in a new process.

    FILE is an archive or a .safetensors capture. The text that follows is what the model would
    have said without a break, greedily. A cache of another model is refused.

    \b
    Example:
      kvz generate cache.kvz --model ./model --max-new-tokens 64
    """
    _check_restorable(file)
    loaded, tokenizer = models.load(model, dtype, device, gguf_file)
    from kvz.restoring import continue_from, restore

    with models.quiet():
        prompt_ids = None
        if prompt is not None:
            prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        restored = restore(file, loaded, force=force, num_tokens=tokens)
    for mismatch in restored.mismatches:
        emit(f"kvz: warning: {printable(f'{file}: overridden: {mismatch}')}", to_stderr=True)
    with models.quiet():
        token_ids = continue_from(
            restored, loaded, max_new_tokens, prompt_ids, stop_ids=models.stop_ids(loaded)
        )
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
    if as_json:
        overridden = [str(mismatch) for mismatch in restored.mismatches]
        emit_json({"text": text, "token_ids": token_ids, "overridden": overridden})
    else:
        emit(text)


def _check_restorable(file: str) -> None:
    """Refuse what no model can restore before one is loaded, which takes long."""
    from kvz.capture_metadata import decode_metadata
    from kvz.state_reader import open_source

    with open_source(file) as source:
        decode_metadata(source.metadata)
