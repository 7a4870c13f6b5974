"""``kvz convert``."""

from __future__ import annotations

from typing import Any

import click

from kvz.cli import models, options
from kvz.cli.text import count, emit, emit_json, printable
from kvz.formats.errors import ConfigError


@click.command()
@click.argument("dump", metavar="FOLDER", type=options.PATH)
@options.output_option(required=True, help="Safetensors file to write.")
@click.option(
    "--axes",
    metavar="AXES",
    help="A letter for each axis of a tensor: 2 key and value, B, T, H, D, C for H and D in one.",
)
@click.option("--kv-heads", type=click.IntRange(min=1), metavar="N", help="To take C apart.")
@click.option("--model", help="The model it is of: checked, and recorded for a restore.")
@click.option(
    "--prompt-file",
    metavar="FILE",
    type=options.PATH,
    help="With --model: the prompt it is of.",
)
@models.model_options
@options.overwrite_option
@options.json_option
def command(
    dump: str,
    destination: str,
    axes: str | None,
    kv_heads: int | None,
    model: str | None,
    prompt_file: str | None,
    dtype: str,
    device: str,
    gguf_file: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert a cache dump of another program to a capture.

    FOLDER holds one safetensors file for each layer, as the example connector of vLLM writes it:
    packed (one tensor) or a key and a value. Where shapes can be read in several ways, --axes is
    asked for. A dump does not say whose it is: with --model and --prompt-file the model computes
    it again, and only if they agree within rounding the capture can be restored. States of
    llama.cpp are recognised and refused.

    \b
    Example:
      kvz convert ./dump --kv-heads 8 -o cache.safetensors
    """
    if (model is None) != (prompt_file is None):
        raise click.UsageError("--model and --prompt-file need each other")
    if not destination.endswith(".safetensors"):
        raise click.UsageError(f"{destination} must end in .safetensors")
    options.check_writable_later(destination, overwrite)
    from kvz.importing import DumpOptions, read_dump

    layers = read_dump(dump, DumpOptions(axes, kv_heads))
    if model is not None and prompt_file is not None:
        text = models.read_text(prompt_file)
        captured = _checked(layers, *models.load(model, dtype, device, gguf_file), text)
        captured.save(destination, overwrite=overwrite)
    else:
        _write(layers, destination, overwrite)
    batch, heads, tokens, head_dim = layers[0][0].shape
    document = {
        "destination": destination,
        "layers": len(layers),
        "key_shape": [batch, heads, tokens, head_dim],
        "restorable": model is not None,
    }
    if as_json:
        emit_json(document)
    else:
        checked = "belongs to the model" if model is not None else "of an unknown model"
        emit(
            f"{printable(destination)}: {count(len(layers), 'layer')}, keys "
            f"{document['key_shape']}, {checked}"
        )


def _write(layers: Any, destination: str, overwrite: bool) -> None:
    from kvz.safetensors_io import write_safetensors

    tensors = {}
    for layer_idx, (key, value) in enumerate(layers):
        tensors[f"layers.{layer_idx}.key"] = key
        if value is not None:
            tensors[f"layers.{layer_idx}.value"] = value
    write_safetensors(destination, tensors, {}, overwrite=overwrite)


def _checked(layers: Any, model: Any, tokenizer: Any, text: str) -> Any:
    """The capture of a dump whose numbers are those of the model for a prompt."""
    import kvz
    from kvz.replaying import verify_model

    held = layers[0][0].shape[2]
    token_ids = models.token_ids(tokenizer, text)
    if token_ids.shape[1] < held:
        raise ConfigError(f"dump holds {held} tokens, the prompt has {token_ids.shape[1]}")
    with models.quiet():
        # serving engines store whole blocks, so the end of the prompt may be absent
        captured = kvz.capture_cache(model, layers, token_ids[:, :held])
        verify_model(captured, model, replay=held)
    return captured
