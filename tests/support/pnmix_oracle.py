"""PN-Mix written a second time, from formats/spec/pnmix.md: one element, one statement, no vectors.

Exact rational arithmetic (fractions) wherever the page says nothing about rounding; no import from
kvz.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = np.float32


def value_of(bits: int) -> float:
    """A BF16 bit pattern as a number."""
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def half(value: float, direction: str) -> float:
    """The nearest FP16 number, or the next one "down" or "up"."""
    rounded = np.float16(value)
    if direction == "down" and float(rounded) > value:
        rounded = np.nextafter(rounded, np.float16(-np.inf))
    if direction == "up" and float(rounded) < value:
        rounded = np.nextafter(rounded, np.float16(np.inf))
    return float(rounded)


def nearest_integer(value: float) -> int:
    return round(Fraction(value))  # halves to even


def mean(elements: list[float]) -> float:
    units = sum(round(Fraction(x) * 2**28) for x in elements)
    return float(F32(units / len(elements) * 2.0**-28))


def group_levels(elements: list[float], bits: int, rule: str) -> tuple[float, float, list[int]]:
    """Start, step (FP16 numbers) and codes of one group and channel."""
    least, most = min(elements), max(elements)
    width = float(F32(F32(most) - F32(least)))
    last = 2**bits - 1
    if rule == "best" and bits == 1:
        middle = float(F32(F32(least) + F32(most)) * F32(0.5))
        codes = [int(x > middle) for x in elements]
        start = half(mean([x for x in elements if x <= middle]), "nearest")
        step = 0.0
        if width:
            top = mean([x for x in elements if x > middle])
            step = half(max(0.0, float(F32(F32(top) - F32(start)))), "nearest")
        return start, step, codes
    if rule == "best" and bits in (2, 3):
        margin = width / (8 if bits == 2 else 32)
        start = half(float(F32(least) + F32(margin)), "nearest")
        step = half(float((F32(width) - F32(2 * margin)) / F32(last)), "nearest")
    else:
        start = half(least, "down")
        step = half(float(F32(F32(most) - F32(start)) / F32(last)), "up")
    if step == 0:
        return start, step, [0] * len(elements)
    inverse = F32(1) / F32(step)
    codes = [nearest_integer(float((F32(x) - F32(start)) * inverse)) for x in elements]
    return start, step, [min(max(code, 0), last) for code in codes]


def round_to_bf16(value: float) -> int:
    bits = int(np.array([value], np.float32).view(np.uint32)[0])
    kept, rest = bits >> 16, bits & 0xFFFF
    return kept + int(rest > 0x8000 or (rest == 0x8000 and kept & 1))


def decoded_keys(
    keys: NDArray[Any], salient: NDArray[Any], options: dict[str, Any], *, exact: range
) -> tuple[NDArray[Any], dict[tuple[int, int, int], tuple[float, float]]]:
    """What uint16[outer, tokens, channels] becomes, and start and step by (head, group, channel).

    ``exact``: the tokens between the sinks and the tail, which are coded; options as those of the
    codec. FP16 scales.
    """
    out, scales = keys.copy(), {}
    group_tokens = options["group_tokens"]
    for head in range(keys.shape[0]):
        for number, first in enumerate(range(exact.start, exact.stop, group_tokens)):
            tokens = range(first, min(first + group_tokens, exact.stop))
            if any((int(b) >> 7) & 0xFF >= 142 for b in keys[head, tokens].flat):
                continue
            for channel in range(keys.shape[2]):
                bits = options["high_bits"] if salient[head, channel] else options["low_bits"]
                elements = [value_of(int(keys[head, t, channel])) for t in tokens]
                start, step, codes = group_levels(elements, bits, options.get("levels", "best"))
                scales[head, number, channel] = start, step
                for t, code in zip(tokens, codes, strict=True):
                    value = float(F32(start) + F32(step) * F32(code))
                    out[head, t, channel] = round_to_bf16(value)
    return out, scales


def pair_channels(pairing: str, rotary_dim: int, inner: int) -> list[list[int]]:
    """The channels of every pair."""
    h = rotary_dim // 2
    rotated = [[i, i + h] if pairing == "half" else [2 * i, 2 * i + 1] for i in range(h)]
    return rotated + [[c] for c in range(rotary_dim, inner)]


def mask(query_norms: NDArray[Any], key_norms: NDArray[Any], ratio: float) -> NDArray[np.bool_]:
    """Salient pairs of each kv head from mean norms [q heads, pairs] and [kv heads, pairs]."""
    heads, pairs = key_norms.shape
    share = query_norms.shape[0] // heads
    out = np.zeros((heads, pairs), bool)
    for h in range(heads):
        sigma = []
        for i in range(pairs):
            own = [float(query_norms[h * share + k, i]) for k in range(share)]
            sigma.append(F32(math.fsum(own) / share * float(key_norms[h, i])))
        order = sorted(range(pairs), key=lambda i: (-sigma[i], i))
        out[h, order[: math.floor(ratio * pairs + 0.5)]] = True
    return out
