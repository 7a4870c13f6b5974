"""PN-Mix written a second time, from formats/spec/pnmix.md: one element, one statement, no vectors.

Exact rational arithmetic (fractions) wherever the page says nothing about rounding; no import from
kvz.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

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


class Levels(NamedTuple):
    """Of one group and channel: start and step (FP16 numbers), codes."""

    start: float
    step: float
    codes: list[int]


def group_levels(
    columns: list[list[float]], bits: list[int], salient: list[bool], rule: str
) -> list[Levels]:
    """Of each channel of a group. ``columns``: the elements of each channel."""
    placed = [positions(column) for column in columns]
    weights = token_weights(placed, salient)
    found = []
    for column, own, w in zip(columns, placed, bits, strict=True):
        least, most = min(column), max(column)
        width, last = F32(most) - F32(least), F32(2**w - 1)
        if rule == "best" and (w == 1 or (w <= 4 and any(salient))):
            z, s = F32(least), F32(0)
            if width >= F32(2.0**-64):
                z, s = fit(own, weights, w, (2 if any(salient) else int(w == 1)))
                unit = width / F32(4095)
                z, s = max(F32(least) + z * unit, F32(-65504)), s * unit
            start, step = half(float(z), "nearest"), half(float(s), "nearest")
        elif rule == "best" and w in (2, 3):
            margin = width / F32(8 if w == 2 else 32)
            start = half(float(F32(least) + margin), "nearest")
            step = half(float((width - margin * F32(2)) / last), "nearest")
        else:
            start = half(least, "down")
            step = half(float((F32(most) - F32(start)) / last), "up")
        found.append(Levels(start, step, codes_of(column, start, step, w)))
    return found


def codes_of(column: Iterable[float], start: float, step: float, bits: int) -> list[int]:
    if step == 0:
        return [0 for _ in column]
    inverse = F32(1) / F32(step)
    nearest = [nearest_integer(float((F32(x) - F32(start)) * inverse)) for x in column]
    return [min(max(code, 0), 2**bits - 1) for code in nearest]


def positions(column: list[float]) -> list[int]:
    least = F32(min(column))
    width = F32(max(column)) - least
    if width < F32(2.0**-64):
        return [0] * len(column)
    return [nearest_integer(float((F32(x) - least) * (F32(4095) / width))) for x in column]


def token_weights(placed: list[list[int]], salient: list[bool]) -> list[int]:
    n = len(placed[0])
    if not any(salient):
        return [1] * n
    sums = [0] * n
    for column, chosen in zip(placed, salient, strict=True):
        total = sum(column)
        v = n * sum(u * u for u in column) - total**2
        if not chosen or v == 0:
            continue
        for t, u in enumerate(column):
            difference = F32(n * u - total)
            sums[t] += nearest_integer(float(difference * difference * (F32(16) / F32(v))))
    weights = []
    for total in sums:
        d = min(F32(total) / F32(16 * sum(salient)), F32(8))
        weights.append(max(1, nearest_integer(float(d * d * d * F32(16)))))
    return weights


def fit(column: list[int], weights: list[int], bits: int, rounds: int) -> tuple[Any, Any]:
    """Start and step in positions."""
    inset = {1: Fraction(1, 4), 2: Fraction(1, 8), 3: Fraction(1, 32), 4: Fraction(1, 64)}[bits]
    z = F32(float(4095 * inset))
    s = F32(float(4095 * (1 - 2 * inset))) / F32(2**bits - 1)
    for _ in range(rounds):
        codes = codes_of(column, float(z), float(s), bits)
        rows = list(zip(weights, codes, column, strict=True))
        s_1, s_q, s_u = sum(weights), sum(w * q for w, q, _ in rows), sum(w * u for w, _, u in rows)
        det = s_1 * sum(w * q * q for w, q, _ in rows) - s_q**2
        cov = s_1 * sum(w * u * q for w, q, u in rows) - s_u * s_q
        if det > 0 and cov > 0:
            s = F32(cov) / F32(det)
            z = F32(s_u) / F32(s_1) - s * (F32(s_q) / F32(s_1))
    return z, s


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
            columns = [
                [value_of(int(keys[head, t, c])) for t in tokens] for c in range(keys.shape[2])
            ]
            own = [bool(x) for x in salient[head]]
            bits = [options["high_bits"] if x else options["low_bits"] for x in own]
            found = group_levels(columns, bits, own, options.get("levels", "best"))
            for channel, (start, step, codes) in enumerate(found):
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
