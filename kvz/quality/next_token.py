"""What a decoded cache does to a model's next-token distributions, teacher-forced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from kvz import hf
from kvz.capturing import Capture, capture
from kvz.formats.errors import ConfigError
from kvz.layout import is_key_or_value, part_name
from kvz.restoring import restore
from kvz.torch_dtypes import SAFETENSORS_NAMES, TORCH_DTYPES, describe_tensor

#: The decoded tensor of a name and a BF16 tensor, in the same shape and dtype.
Transform = Callable[[str, torch.Tensor], torch.Tensor]

#: Tokens of one forward pass, and positions whose distributions are in memory in float64 at once.
_PASS_TOKENS = 128
_COMPARED_ROWS = 32


@dataclass(frozen=True, slots=True)
class NextToken:
    """Over all positions of all windows.

    kl: mean of sum p ln(p / p') over the vocabulary, p and p' the next-token distributions with
    the exact and with the decoded cache. agreement: share of positions where both have the same
    most likely token. perplexity: exp of the mean of -ln p'(token that follows).
    """

    kl: float
    agreement: float
    perplexity: float
    num_positions: int


class NextTokenSums:
    """Adds up the positions of one decoded cache after another."""

    def __init__(self) -> None:
        self._kl = 0.0
        self._agreed = 0
        self._log_loss = 0.0
        self._num_positions = 0

    def add(self, exact: torch.Tensor, decoded: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits `[n, vocab]` and the tokens int64 `[n]` that follow, on one device."""
        parts = (torch.split(x, _COMPARED_ROWS) for x in (exact, decoded, targets))
        for p, q, target in zip(*parts, strict=True):
            p_log, q_log = p.double().log_softmax(dim=-1), q.double().log_softmax(dim=-1)
            # where p is 0 the summand is 0, however unlikely the token is otherwise
            summands = torch.where(p_log == -torch.inf, 0.0, p_log.exp() * (p_log - q_log))
            self._kl += float(summands.sum(dim=-1).clamp_min(0.0).sum())
            self._agreed += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
            self._log_loss -= float(q_log.gather(1, target[:, None]).sum())
            self._num_positions += len(target)

    def result(self) -> NextToken:
        """Raises ValueError when nothing was added."""
        n = self._num_positions
        if n == 0:
            raise ValueError("no positions were added")
        perplexity = math.exp(min(self._log_loss / n, math.log(1e300)))
        return NextToken(self._kl / n, self._agreed / n, perplexity, n)


class Window:
    """A prefill and the tokens that follow it, with the logits that the exact cache gives them.

    token_ids: int64 `[1, prefill + n + 1]`: n tokens are fed, each with one that follows it. The
    exact cache is that of the prefill, keys and values rounded to BF16; the model computes in its
    own dtype, and so are the keys and values of the n tokens.
    """

    def __init__(self, model: Any, token_ids: torch.Tensor, prefill: int) -> None:
        self._model = model
        self._continuation = token_ids[:, prefill:]
        self.capture = _in_bf16(capture(model, token_ids[:, :prefill], queries=0))
        self._dtype = SAFETENSORS_NAMES[model.dtype]
        self.exact_logits = torch.cat(list(self._logits(_unchanged)))

    def compare(self, transform: Transform, sums: NextTokenSums) -> None:
        """Add the positions of the cache whose keys and values went through `transform`."""
        begin = 0
        for logits in self._logits(transform):
            end = begin + len(logits)
            targets = self._continuation[0, begin + 1 : end + 1].to(logits.device)
            sums.add(self.exact_logits[begin:end], logits, targets)
            begin = end

    def add_exact(self, sums: NextTokenSums) -> None:
        """Add the positions of the exact cache, compared with itself."""
        targets = self._continuation[0, 1:].to(self.exact_logits.device)
        sums.add(self.exact_logits, self.exact_logits, targets)

    def _logits(self, transform: Transform) -> Iterator[torch.Tensor]:
        """`[<= _PASS_TOKENS, vocab]` after each fed token, in the model's dtype."""
        model = self._model
        restored = restore(_Transformed(self.capture, transform, self._dtype), model)
        start, fed = restored.input_ids.shape[1], self._continuation[:, :-1].to(model.device)
        mask = torch.ones(1, start + fed.shape[1], dtype=torch.long, device=model.device)
        for begin in range(0, fed.shape[1], _PASS_TOKENS):
            ids = fed[:, begin : begin + _PASS_TOKENS]
            yield hf.feed_for_logits(model, restored.cache, ids, mask, start + begin, ids.shape[1])[
                0
            ]


def next_token_quality(
    model: Any, windows: Iterable[torch.Tensor], prefill: int, transform: Transform
) -> NextToken:
    """Next-token quality of caches whose keys and values go through `transform`.

    windows: token ids as :class:`Window` takes them. Raises ConfigError for a model whose cache
    cannot be replaced, and what :func:`kvz.capture` raises.
    """
    sums = NextTokenSums()
    for token_ids in windows:
        Window(model, token_ids, prefill).compare(transform, sums)
    return sums.result()


def cut_windows(texts: Sequence[torch.Tensor], length: int, max_windows: int) -> list[torch.Tensor]:
    """Windows int64 `[1, length]`, side by side from the beginning of each text int64 `[tokens]`.

    Raises ConfigError when not one fits.
    """
    windows = [
        text[None, begin : begin + length]
        for text in texts
        for begin in range(0, len(text) - length + 1, length)
    ]
    if not windows:
        raise ConfigError(
            f"a window needs {length} tokens, the text has {max(map(len, texts), default=0)}: give "
            "a longer text (--text) or shorter windows (--prefill, --positions)"
        )
    return windows[:max_windows]


def _unchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_replaced(name: str) -> bool:
    return is_key_or_value(name) and part_name(name) in ("key", "value")


def _in_bf16(captured: Capture) -> Capture:
    """The capture with its keys and values rounded to BF16, without the live cache."""
    tensors = {
        name: tensor.bfloat16() if _is_replaced(name) else tensor
        for name, tensor in captured.tensors.items()
    }
    return Capture(tensors, captured.metadata, None)


class _Transformed:
    """A capture with BF16 keys and values as a CacheSource in the model's dtype."""

    def __init__(self, captured: Capture, transform: Transform, dtype: str) -> None:
        self._capture = captured
        self._transform = transform
        self._dtype = dtype

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._capture.metadata

    @property
    def tensor_names(self) -> Sequence[str]:
        return self._capture.tensor_names

    def dtype(self, name: str) -> str:
        return self._dtype if _is_replaced(name) else self._capture.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._capture.shape(name)

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        tensor = self._capture.tensors[name]
        if _is_replaced(name):
            tensor = self._transform(name, tensor).to(TORCH_DTYPES[self._dtype])
        return describe_tensor(tensor)[1]
