"""``kvz generate``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvz.cli import models, options
from kvz.cli.text import count, emit, emit_json, is_terminal, printable

if TYPE_CHECKING:
    from kvz.identity import Mismatch
    from kvz.speculation import Sampling, SpeculationReport


def _first_tokens(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``:512``, or ``0:512``."""
    if value is None:
        return None
    match = re.fullmatch(r"0?:([0-9]+)", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} must be :N, such as :512")
    return int(match[1])


@click.command()
@click.argument("file", metavar="FILE", type=options.PATH_OR_DASH)
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
@click.option(
    "--progressive",
    is_flag=True,
    help="Draft on the anchors of a lynx archive while its residuals are read, then verify.",
)
@click.option(
    "--max-drafts",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --progressive: most tokens to draft.  [default: 64]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, min_open=True),
    metavar="T",
    help="Sample at this temperature; greedy without it.",
)
@click.option(
    "--top-k", type=click.IntRange(min=1), metavar="K", help="Sample from the K likeliest."
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="P",
    help="Sample from the fewest tokens that have the probability P together.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 63) - 1),
    metavar="N",
    help="Seed of sampling.  [default: 0]",
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
    progressive: bool,
    max_drafts: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    force: bool,
    dtype: str,
    device: str,
    gguf_file: str | None,
    as_json: bool,
) -> None:
    """Go on generating from a cache, in a new process.

    FILE is an archive or a .safetensors capture, or the URL of one; with --progressive a lynx
    archive, - for standard input. The text that follows is what the model would have said without
    a break, greedily. A cache of another model is refused.

    With --progressive the model drafts on the anchors of a lynx archive as soon as they are read,
    and all drafts are verified in one pass once the residuals are there; only verified text is
    printed. That pass is the reference: in float32 the text equals token-by-token decoding on
    the whole archive, in bfloat16 the two can differ where two tokens are nearly as likely.

    \b
    Example:
      kvz generate cache.kvz --model ./model --max-new-tokens 64
    """
    if max_drafts is not None and not progressive:
        raise click.UsageError("--max-drafts needs --progressive")
    sampled = {"top_k": top_k, "top_p": top_p, "seed": seed}
    given: dict[str, Any] = {k: value for k, value in sampled.items() if value is not None}
    if given and temperature is None:
        raise click.UsageError("--top-k, --top-p and --seed need --temperature")
    if progressive:
        options.check_streams(file, None)
    elif file == options.STANDARD_STREAM:
        raise click.UsageError("reading from standard input needs --progressive")

    def load() -> tuple[Any, Any]:
        return models.load(model, dtype, device, gguf_file)

    wanted: dict[str, Any] = {"force": force, "num_tokens": tokens}
    if temperature is not None:
        from kvz.speculation import Sampling

        wanted["sampling"] = Sampling(temperature, **given)
    if progressive:
        if max_drafts is not None:
            wanted["max_drafts"] = max_drafts
        document = _speculate(file, load, prompt, max_new_tokens, wanted)
    else:
        document = _generate(file, load, prompt, max_new_tokens, **wanted)
    if as_json:
        emit_json(document)
    else:
        emit(document["text"])


def _generate(
    file: str,
    load: Callable[[], tuple[Any, Any]],
    prompt: str | None,
    max_new_tokens: int,
    force: bool,
    num_tokens: int | None,
    sampling: Sampling | None = None,
) -> dict[str, Any]:
    from kvz.restoring import continue_from, restore
    from kvz.speculation import sample

    _check_restorable(file)
    model, tokenizer = load()
    prompt_ids = _prompt_ids(tokenizer, prompt)
    with models.quiet():
        restored = restore(file, model, force=force, num_tokens=num_tokens)
    _warn(file, restored.mismatches)
    with models.quiet():
        given: dict[str, Any] = {"prompt_ids": prompt_ids, "stop_ids": models.stop_ids(model)}
        if sampling is None:
            token_ids = continue_from(restored, model, max_new_tokens, **given)
        else:
            token_ids = sample(restored, model, sampling, max_new_tokens, **given)
    return _document(tokenizer, token_ids, restored.mismatches)


def _speculate(
    file: str,
    load: Callable[[], tuple[Any, Any]],
    prompt: str | None,
    max_new_tokens: int,
    wanted: dict[str, Any],
) -> dict[str, Any]:
    from kvz.files import naming
    from kvz.progressive import ProgressiveReader
    from kvz.speculation import check_metadata, speculate

    # reading goes on in the background while the model is loaded
    with ProgressiveReader(file) as reader:
        with naming(reader.name):
            check_metadata(reader.metadata)
        model, tokenizer = load()
        shown = _Provisional(tokenizer) if is_terminal(sys.stderr) else None
        prompt_ids = _prompt_ids(tokenizer, prompt)
        with naming(reader.name), models.quiet():
            report = speculate(
                reader.anchor(),
                reader.full,
                model,
                max_new_tokens,
                prompt_ids=prompt_ids,
                stop_ids=models.stop_ids(model),
                ready=reader.is_complete,
                on_draft=None if shown is None else shown.add,
                **wanted,
            )
    if shown is not None:
        shown.close(report)
    _warn(reader.name, report.mismatches)
    document = _document(tokenizer, list(report.token_ids), report.mismatches)
    document["speculation"] = {
        "draft_ids": list(report.draft_ids),
        "num_drafted": report.num_drafted,
        "num_accepted": report.num_accepted,
        "full_ready_s": report.full_ready_s,
        "verified_s": report.verified_s,
        "token_times_s": list(report.token_times_s),
    }
    return document


class _Provisional:
    """Shows drafts on standard error as they come; they may be corrected later."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = sys.stderr
        self._token_ids: list[int] = []
        self._shown = ""

    def add(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        # the last character may still change while its bytes are incomplete
        text = printable(text.rstrip("\ufffd"))
        start = "kvz: draft: " if len(self._token_ids) == 1 else ""
        print(start + text[len(self._shown) :], end="", file=self._stream, flush=True)
        self._shown = text

    def close(self, report: SpeculationReport) -> None:
        if self._token_ids:
            print(file=self._stream)
            drafted = count(report.num_drafted, "drafted token")
            emit(f"kvz: {report.num_accepted} of {drafted} verified", to_stderr=True)


def _prompt_ids(tokenizer: Any, prompt: str | None) -> list[int] | None:
    if prompt is None:
        return None
    with models.quiet():
        ids: list[int] = tokenizer(prompt, add_special_tokens=False).input_ids
    return ids


def _warn(file: str, mismatches: tuple[Mismatch, ...]) -> None:
    for mismatch in mismatches:
        emit(f"kvz: warning: {printable(f'{file}: overridden: {mismatch}')}", to_stderr=True)


def _document(
    tokenizer: Any, token_ids: list[int], mismatches: tuple[Mismatch, ...]
) -> dict[str, Any]:
    with models.quiet():
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return {
        "text": text,
        "token_ids": token_ids,
        "overridden": [str(mismatch) for mismatch in mismatches],
    }


def _check_restorable(file: str) -> None:
    """Refuse what no model can restore before one is loaded, which takes long."""
    from kvz.capture_metadata import decode_metadata
    from kvz.state_reader import open_source

    with open_source(file) as source:
        decode_metadata(source.metadata)
