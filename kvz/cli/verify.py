"""``kvz verify``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from kvz.cli import errors, models, options
from kvz.cli.progress import meter, raw_nbytes
from kvz.cli.text import count, emit, emit_json, format_nbytes, printable
from kvz.devices import DEFAULT_DEVICE


@click.command()
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=options.PATH_OR_DASH,
)
@click.option("--against", metavar="CACHE", type=options.PATH, help="Capture to compare with.")
@click.option("--model", help="Check that the cache is this model's: folder, hub name, or .gguf.")
@click.option(
    "--replay",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --model: compute the first N positions again and compare.",
)
@click.option(
    "--prompt-file",
    metavar="FILE",
    type=options.PATH,
    help="With --model: the prompt that the cache must be of.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --prompt-file: only its first N tokens, as at the capture.",
)
@models.model_options
@options.threads_option
@options.json_option
def command(
    files: tuple[str, ...],
    against: str | None,
    model: str | None,
    replay: int | None,
    prompt_file: str | None,
    max_tokens: int | None,
    dtype: str,
    device: str,
    gguf_file: str | None,
    threads: int | None,
    as_json: bool,
) -> int:
    """Check archives from the first byte to the last.

    Every checksum is verified and every chunk decoded; with --against every element and the
    metadata are compared with a capture, or with what a lossy codec makes of it. With --model,
    config, RoPE, weights, dtype, tokens and shard must be that model's; --replay also compares
    numbers: to the bit where the same kernels run, else within rounding, or what a lossy codec
    leaves of them. --device cuda decodes on the GPU as well. All files are checked; the exit code
    is the highest of theirs. FILE may be a URL, - for standard input, a folder or a URL prefix
    ending in / (all .kvz files below them), or a pattern in quotes.

    \b
    Example:
      kvz verify cache.kvz --model ./model --replay 64
    """
    if files.count(options.STANDARD_STREAM) > 1:
        raise click.UsageError("standard input can be read only once")
    if model is None and (replay is not None or prompt_file is not None):
        raise click.UsageError("--replay and --prompt-file need --model")
    if prompt_file is None and max_tokens is not None:
        raise click.UsageError("--max-tokens needs --prompt-file")
    if model is not None and options.STANDARD_STREAM in files:
        raise click.UsageError("--model needs a file, standard input can be read only once")
    judge = None
    if model is not None:
        text = None if prompt_file is None else models.read_text(prompt_file)
        loaded, tokenizer = models.load(model, dtype, device, gguf_file)
        ids = None if text is None else models.token_ids(tokenizer, text)[:, :max_tokens]
        judge = _Judge(loaded, ids, replay or 0)
    results = []
    for path, failure in _expanded(files):
        options.check_streams(path, None)
        if failure is None:
            result = _check(path, against, _codec_device(device), threads, judge)
        else:
            result = _failed(path, failure)
        results.append(result)
        if result["error"] is None and not as_json:
            for line in _lines(result):
                emit(line)
    if as_json:
        emit_json({"ok": all(r["error"] is None for r in results), "files": results})
    elif len(results) > len(files):
        num_ok = sum(result["error"] is None for result in results)
        emit(f"{count(len(results), 'file')}: {num_ok} ok, {len(results) - num_ok} not")
    return max(int(result["exit_code"]) for result in results)


def _expanded(files: tuple[str, ...]) -> Iterator[tuple[str, Exception | None]]:
    """The files that folders, prefixes and patterns stand for, or why that cannot be said."""
    from kvz.finding import expand

    for file in files:
        if file == options.STANDARD_STREAM:
            yield file, None
            continue
        for location, found in expand([file], ".kvz"):
            if isinstance(found, Exception):
                yield location, found
            else:
                yield from ((one.location, None) for one in found)


def _codec_device(device: str) -> str:
    """Archives are decoded where the model runs, if that is a CUDA device."""
    return device if device.partition(":")[0] == "cuda" else DEFAULT_DEVICE


class _Judge:
    """A model that says whether a cache is its own."""

    def __init__(self, model: Any, token_ids: Any | None, replay: int) -> None:
        self._model = model
        self._replay = replay
        self._token_ids = token_ids

    def __call__(self, path: str) -> dict[str, Any]:
        from kvz.replaying import verify_model

        with models.quiet():
            report = verify_model(path, self._model, replay=self._replay, input_ids=self._token_ids)
        return {"model": "matches", "replay": None if report is None else asdict(report)}


def _check(
    path: str, against: str | None, device: str, threads: int | None, judge: _Judge | None
) -> dict[str, Any]:
    import kvz

    try:
        with meter("verifying", raw_nbytes(path)) as progress:
            report = kvz.verify(
                path, against=against, device=device, threads=threads, progress=progress.advance
            )
        judged = {} if judge is None else judge(path)
    except Exception as error:  # the other files are still to be checked
        return _failed(path, error)
    return {**asdict(report), **judged, "error": None, "exit_code": 0}


def _failed(path: str, error: Exception) -> dict[str, Any]:
    code = errors.tell(error)
    return {"path": path, "error": errors.describe(error), "exit_code": code}


def _lines(result: dict[str, Any]) -> list[str]:
    compared = ""
    if result["compared"] is not None and result["lossy"]:
        compared = f", what {result['lossy']} makes of {result['compared']}"
    elif result["compared"] is not None:
        compared = f", equal to {result['compared']}"
    belongs = ", belongs to the model" if "model" in result else ""
    first = printable(
        f"{result['path']}: ok, {count(result['num_tensors'], 'tensor')}, "
        f"{count(result['num_sections'], 'section')}, {format_nbytes(result['nbytes'])}"
        f"{compared}{belongs}"
    )
    replay = result.get("replay")
    return [first] if replay is None else [first, _replay_line(replay)]


def _replay_line(replay: dict[str, Any]) -> str:
    tensors = count(replay["num_tensors"], "tensor")
    line = f"replayed {count(replay['num_positions'], 'position')}: {tensors} compared, "
    if replay["num_exact"] == replay["num_tensors"]:
        line += "all equal to the bit"
    elif replay["lossy"]:
        line += (
            f"{replay['num_exact']} equal to the bit, others as near as {replay['lossy']} leaves "
            f"them (largest difference {replay['largest_difference']:.2g} in {replay['where']}, "
            f"bound {replay['bound']:.2g})"
        )
    else:
        line += (
            f"{replay['num_exact']} equal to the bit, others within rounding (largest difference "
            f"{replay['largest_difference']:.2g} in {replay['where']}, "
            f"bound {replay['bound']:.2g}): other kernels than at capture"
        )
    if replay["skipped"]:
        line += f"; {count(len(replay['skipped']), 'layer')} not comparable"
    return line
