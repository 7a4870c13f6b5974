"""``kvz bench --quality``: its options, and the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvz.cli import models, options
from kvz.cli.progress import meter
from kvz.devices import gpu_index
from kvz.formats.errors import ConfigError

if TYPE_CHECKING:
    from kvz.layout import Layout
    from kvz.quality.window_run import ModelLevel

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """What the command line says of the quality measurement; None and empty: not given."""

    schemes: tuple[str, ...]
    queries: int | None
    model: str | None
    gguf_file: str | None
    dtype: str | None
    text: str | None
    windows: int | None
    prefill: int | None
    positions: int | None

    @classmethod
    def take(cls, given: dict[str, Any]) -> QualityOptions:
        """Take the options of :func:`quality_options` out of a command's arguments."""
        return cls(**{option.name: given.pop(option.name) for option in fields(cls)})

    def check_unused(self) -> None:
        """Refuse every option of the quality measurement in a run without it."""
        for option in fields(self):
            if getattr(self, option.name) not in (None, ()):
                name = "scheme" if option.name == "schemes" else option.name.replace("_", "-")
                raise click.UsageError(f"--{name} needs --quality")

    def check(self) -> None:
        """Refuse what only makes sense with a model."""
        for name in ("gguf_file", "dtype", "text", "windows", "prefill", "positions"):
            if self.model is None and getattr(self, name) is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --model")


def quality_options(command: F) -> F:
    """The options that need ``--quality``."""
    count = click.IntRange(min=1)
    for option in (
        click.option("--positions", type=count, metavar="N", help="Tokens fed after it; 512."),
        click.option("--prefill", type=count, metavar="N", help="Tokens of each cache; 1500."),
        click.option("--windows", type=count, metavar="N", help="At most so many; 8."),
        click.option(
            "--text",
            metavar="F",
            type=options.PATH_OR_DASH,
            help="Text for the model; default: the tokens of the capture.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(models.DTYPES),
            help="What the model computes in; default float32, its exact cache is bfloat16.",
        ),
        click.option("--gguf-file", metavar="F", help="GGUF file inside the model's folder."),
        click.option(
            "--model", metavar="MODEL", help="With --quality: also measure next-token quality."
        ),
        click.option(
            "--queries",
            type=click.IntRange(min=0),
            metavar="N",
            help="With --quality: last queries that attend, default 512; 0 leaves attention out.",
        ),
        click.option(
            "--scheme",
            "schemes",
            multiple=True,
            metavar="NAME[:KEY=VALUE,...]",
            help="With --quality: a codec or baseline to compare, such as lynx:detail=anchor or "
            "int4-channel:exact_tokens=4; repeat it. Default: the usual ones.",
        ),
        click.option(
            "--quality", is_flag=True, help="Measure what lossy codecs lose instead of speed."
        ),
    ):
        command = option(command)
    return command


def run(
    caches: tuple[str, ...],
    chosen: QualityOptions,
    *,
    codecs: tuple[str, ...] | None,
    device: str,
    threads: int | None,
    layout: Layout,
) -> tuple[str, dict[str, Any]]:
    """The report as text and as JSON values. Raises what :func:`run_quality` raises."""
    chosen.check()
    if find_spec("torch") is None:
        raise ConfigError("--quality needs the package torch")
    import torch

    from kvz.quality.report import render
    from kvz.quality.run import DEFAULT_QUERIES, run_quality
    from kvz.quality.schemes import parse_scheme

    on_gpu = gpu_index(device) is not None
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no GPU")
    if threads is not None:
        torch.set_num_threads(threads)
    schemes = (*chosen.schemes, *(codecs or ())) or None
    for spec in schemes or ():
        parse_scheme(spec)  # refused before a model is loaded
    place = device if on_gpu else "cpu"
    level = None if chosen.model is None else _model_level(chosen, place)
    with meter("quality", unit="steps") as progress:
        report = run_quality(
            caches,
            schemes=schemes,
            queries=DEFAULT_QUERIES if chosen.queries is None else chosen.queries,
            device=place,
            layout=layout,
            model_level=level,
            progress=lambda what, done, steps: progress.update(done, steps, what),
        )
    return render(report), report.to_dict()


def _model_level(chosen: QualityOptions, device: str) -> ModelLevel:
    from kvz.quality.window_run import ModelLevel

    text = None if chosen.text is None else models.read_text(chosen.text)
    name = str(chosen.model)
    model, tokenizer = models.load(name, chosen.dtype or "float32", device, chosen.gguf_file)
    sizes = {
        "prefill": chosen.prefill,
        "positions": chosen.positions,
        "max_windows": chosen.windows,
    }
    return ModelLevel(
        name=name,
        model=model,
        token_ids=None if text is None else models.token_ids(tokenizer, text),
        **{key: size for key, size in sizes.items() if size is not None},
    )
