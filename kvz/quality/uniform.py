"""The uniform quantiser of INT4, INT8 and KIVI baselines: minimum and step for every group.

A baseline to compare codecs with, not a codec: it gives decoded tensors and the bytes that packed
codes, scales and exact tokens would take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvz.formats.errors import ConfigError

AXES = ("channel", "token", "tensor")
_SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_SCALE_NBYTES = 2
_SCALES_PER_GROUP = 2
_MAX_BITS = 8


@dataclass(frozen=True, slots=True)
class UniformConfig:
    """Asymmetric b-bit codes between the minimum and maximum of a group.

    axis: "channel" (a group is `group` tokens of one channel and head), "token" (`group` channels
    of one token and head) or "tensor" (all of it). exact_tokens: so many first tokens keep their
    bits; groups start after them. scales: dtype of minimum and step. The last group may be short.
    Raises ConfigError.
    """

    bits: int
    axis: str
    group: int = 32
    exact_tokens: int = 0
    scales: str = "float16"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= _MAX_BITS:
            raise ConfigError(f"bits must be 1 to {_MAX_BITS}, got {self.bits}")
        if self.axis not in AXES:
            raise ConfigError(f"axis must be {', '.join(AXES)}, got {self.axis!r}")
        if self.group < 1 or self.exact_tokens < 0:
            raise ConfigError(
                f"need group >= 1 and exact_tokens >= 0, got {self.group} and {self.exact_tokens}"
            )
        if self.scales not in _SCALE_DTYPES:
            raise ConfigError(f"scales must be {' or '.join(_SCALE_DTYPES)}, got {self.scales!r}")

    def stored_nbytes(self, shape: tuple[int, int, int], itemsize: int) -> int:
        """Bytes of a tensor `[outer, tokens, inner]`: packed codes, scales, exact tokens."""
        outer, tokens, inner = shape
        exact = min(self.exact_tokens, tokens)
        coded = tokens - exact
        if self.axis == "channel":
            groups = outer * inner * -(-coded // self.group)
        elif self.axis == "token":
            groups = outer * coded * -(-inner // self.group)
        else:
            groups = 1 if outer * coded * inner else 0
        codes = -(-outer * coded * inner * self.bits // 8)
        scales = groups * _SCALES_PER_GROUP * _SCALE_NBYTES
        return codes + scales + outer * exact * inner * itemsize


def decode(tensor: torch.Tensor, config: UniformConfig) -> torch.Tensor:
    """What comes back of a floating-point tensor `[outer, tokens, inner]`, in its own dtype.

    Codes are rounded to nearest even with the scales as they are stored, and decode to
    minimum + step * code in float32. Raises ConfigError for groups beyond the range of the scales.
    """
    exact = min(config.exact_tokens, tensor.shape[1])
    decoded = tensor.clone()
    if tensor[:, exact:].numel() == 0:
        return decoded
    if config.axis == "tensor":
        rest = tensor[:, exact:]
        lowest, highest = rest.amin().float(), rest.amax().float()
        for source, target in zip(tensor, decoded, strict=True):
            target[exact:] = _decode_group(source[exact:].float(), lowest, highest, config)
        return decoded
    # head by head: float32 copies of a long layer would be several times its size
    for source, target in zip(tensor, decoded, strict=True):
        for group, out in _groups(source[exact:], target[exact:], config):
            x = group.float()
            axis = 1 if config.axis == "channel" else 2
            lowest, highest = x.amin(dim=axis, keepdim=True), x.amax(dim=axis, keepdim=True)
            out.copy_(_decode_group(x, lowest, highest, config))
    return decoded


def _groups(
    source: torch.Tensor, target: torch.Tensor, config: UniformConfig
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The full groups of `[tokens, inner]` in one view, then the short one."""
    axis = 0 if config.axis == "channel" else 1
    size = source.shape[axis]
    full = size - size % config.group
    for begin, end, group in ((0, full, config.group), (full, size, size - full)):
        if end > begin:
            parts = [x.narrow(axis, begin, end - begin) for x in (source, target)]
            a, b = (torch.unflatten(x, axis, (-1, group)) for x in parts)
            yield a, b


def _decode_group(
    x: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor, config: UniformConfig
) -> torch.Tensor:
    levels = (1 << config.bits) - 1
    dtype = _SCALE_DTYPES[config.scales]
    minimum = lowest.to(dtype).float()
    step = ((highest - minimum) / levels).to(dtype).float()
    if not bool(torch.isfinite(minimum).all() and torch.isfinite(step).all()):
        raise ConfigError(
            f"a group lies beyond the range of {config.scales} scales; "
            "scales=bfloat16 holds every finite value"
        )
    codes = ((x - minimum) / step).round().clamp(0, levels)
    return minimum + step * torch.where(step == 0, 0.0, codes)
