"""How far decoded tensors are from the exact ones."""

from __future__ import annotations

import math

import torch

#: Elements that are compared at once, in float64.
_PART_LEN = 1 << 22


class TensorError:
    """Normalised mean squared error and largest error over any number of tensors.

    The sums run over the elements that are finite in the exact tensor. What is not must come back
    as it is, and what is must come back finite, or every figure is infinite.
    """

    def __init__(self) -> None:
        self._squared_error = 0.0
        self._squared_norm = 0.0
        self._max_error = 0.0

    def add(self, exact: torch.Tensor, decoded: torch.Tensor) -> None:
        """Floating-point tensors of one shape."""
        parts = (torch.split(tensor.reshape(-1), _PART_LEN) for tensor in (exact, decoded))
        for x, y in zip(*parts, strict=True):
            self._add_part(x.double(), y.double())

    def _add_part(self, x: torch.Tensor, y: torch.Tensor) -> None:
        error = y - x
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            same = (x == y) | (x.isnan() & y.isnan())
            error = torch.where(finite, error, torch.where(same, 0.0, torch.inf))
            x = torch.where(finite, x, 0.0)
        error = torch.where(error.isnan(), torch.inf, error)
        self._squared_error += float(error.square().sum())
        self._squared_norm += float(x.square().sum())
        self._max_error = max(self._max_error, float(error.abs().max()))

    @property
    def nmse(self) -> float:
        """Sum of squared errors / sum of squares, 0 when nothing differs."""
        if self._squared_error == 0:
            return 0.0
        return self._squared_error / self._squared_norm if self._squared_norm else math.inf

    @property
    def max_error(self) -> float:
        """Largest absolute difference."""
        return self._max_error
