"""Fitted levels of PN-Mix's keys in Triton: the operations of kernels/reference/pnmix_fit.py.

A program fits all channels of a group, a block (pnmix_blocks.py) at a time. Sums are of integers,
and as narrow as they can be: a position is below 2**12, a weight at most 2**13, and the mean of a
group's weights below :data:`MEAN_WEIGHT`.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import to_float
from kvz.kernels.gpu.pnmix_blocks import (
    BIAS,
    add_round,
    along_channels,
    along_tokens,
    biased,
    channel_ends,
    load_block,
    rounded_float,
    rounded_int,
    sum_channels,
    sum_tokens,
    wrap,
)
from kvz.kernels.gpu.pnmix_levels import reciprocal
from kvz.kernels.gpu.pnmix_tiles import (
    count_groups,
    find_group,
    fits_ptr,
    salient_range,
    tensor_ptr,
)
from kvz.kernels.gpu.words import NUM_FIELDS, load_field
from kvz.kernels.reference.pnmix_fit import (
    MAX_DISTANCE,
    MIN_START,
    MIN_WIDTH,
    ROUNDS,
    SCALE,
    UNITS,
)

#: Above the mean weight of a group: distances are 1 on average, 1/32 more when rounded, and a
#: weight is at most 16 * 8**2 times its token's distance, or 1 more.
MEAN_WEIGHT = 1058

_UNITS = tl.constexpr(UNITS)
_MIN_WIDTH = tl.constexpr(float(MIN_WIDTH))
_MIN_START = tl.constexpr(float(MIN_START))
_SCALE = tl.constexpr(float(SCALE))
_MAX_DISTANCE = tl.constexpr(float(MAX_DISTANCE))
_ROUNDS = tl.constexpr(ROUNDS)
_MEAN_WEIGHT = tl.constexpr(MEAN_WEIGHT)


@triton.jit
def _positions(data_ptr, tokens, first, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Positions (rounded), least elements and widths, and the positions of the last token, which
    tokens that do not exist repeat."""
    channel = first + tl.arange(0, BLOCK.channels)
    token = tl.minimum(tl.arange(0, BLOCK.tokens), tokens - 1)
    x = load_block(data_ptr, token, channel, BLOCK, TILE)
    low, high = channel_ends(x, BLOCK)
    width = high - low
    usable = width >= _MIN_WIDTH
    factor = tl.where(usable, tl.div_rn(float(_UNITS), tl.where(usable, width, 1.0)), 0.0)
    last_ptr = data_ptr + ((tokens - 1) * TILE.inner + channel)
    last = to_float(tl.load(last_ptr, mask=channel < TILE.inner, other=0))
    last = rounded_int(add_round((last - low) * factor))
    positions = (x - along_channels(low, BLOCK)) * along_channels(factor, BLOCK)
    return add_round(positions), low, width, last


@triton.jit
def _variances(positions, last, tokens, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Sums of positions (uint32), and their variances times the square of ``tokens``, int64."""
    WHOLE: tl.constexpr = (BLOCK.tokens * BIAS) % (1 << 32)
    repeated = (BLOCK.tokens - tokens).to(tl.uint32)
    bits = biased(positions)
    total = sum_tokens(bits, BLOCK) - WHOLE
    if BLOCK.tokens <= 256:
        squares = sum_tokens(bits * bits, BLOCK) - total * (2 * BIAS)
        squares = (squares - last * last * repeated).to(tl.int64)
    else:
        position = rounded_int(positions)
        squares = sum_tokens((position * position).to(tl.int64), BLOCK)
        squares -= (last * last).to(tl.int64) * repeated
    total -= last * repeated
    whole = total.to(tl.int64)
    return total, tokens * squares - whole * whole


@triton.jit
def _distances(positions, last, tokens, salient, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Of tokens, in the block's salient channels: sums of parts of 1/16, int32."""
    total, variance = _variances(positions, last, tokens, BLOCK, TILE)
    counts = (salient != 0) & (variance > 0)
    factor = tl.div_rn(_SCALE, tl.maximum(variance, 1).to(tl.float32))
    factor = tl.where(counts, factor, 0.0)
    # exact: integers below 2**24
    count = tl.zeros(positions.shape, tl.float32) + tokens.to(tl.float32)
    difference = tl.fma(
        rounded_float(positions), count, -along_channels(total.to(tl.float32), BLOCK)
    )
    distance = add_round(difference * difference * along_channels(factor, BLOCK))
    WHOLE: tl.constexpr = (BLOCK.channels * BIAS) % (1 << 32)
    return (sum_channels(biased(distance), BLOCK) - WHOLE).to(tl.int32)


@triton.jit
def _weigh(distances, num_salient, tokens, BLOCK: tl.constexpr):
    """Weights (uint32) of tokens; those that do not exist have none."""
    distance = tl.div_rn(distances.to(tl.float32), _SCALE * num_salient.to(tl.float32))
    distance = tl.minimum(distance, _MAX_DISTANCE)
    weights = tl.maximum(rounded_int(add_round(distance * distance * distance * _SCALE)), 1)
    weights = tl.where(num_salient > 0, weights, 1)
    return tl.where(tl.arange(0, BLOCK.tokens) < tokens, weights, 0)


@triton.jit
def _code_sums(positions, rounded, w, sum_w, sum_u, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Sums, int64, of codes (rounded), of their squares, of their products with positions.

    ``sum_w``, ``sum_u`` int64 · ``MOST``: not below the last of the sums.
    """
    if MOST < 1 << 32:
        q = biased(rounded)
        wq = w * q
        sum_q = sum_tokens(wq, BLOCK) - wrap(sum_w * BIAS)
        sum_qq = sum_tokens(wq * q, BLOCK) - sum_q * (2 * BIAS)
        sum_uq = sum_tokens(wq * biased(positions), BLOCK) - (sum_q + wrap(sum_u)) * BIAS
        return sum_q.to(tl.int64), sum_qq.to(tl.int64), sum_uq.to(tl.int64)
    else:
        q = rounded_int(rounded)
        wq = w * q
        sum_uq = sum_tokens((wq * rounded_int(positions)).to(tl.int64), BLOCK)
        return sum_tokens(wq, BLOCK).to(tl.int64), sum_tokens(wq * q, BLOCK).to(tl.int64), sum_uq


@triton.jit
def _regress(sum_w, sum_u, sums, start, step):
    """Start and step, where there is a step above 0."""
    sum_q, sum_qq, sum_uq = sums
    determinant = sum_w * sum_qq - sum_q * sum_q
    covariance = sum_w * sum_uq - sum_u * sum_q
    exists = (determinant > 0) & (covariance > 0)
    better = tl.div_rn(covariance.to(tl.float32), tl.maximum(determinant, 1).to(tl.float32))
    weight = sum_w.to(tl.float32)
    mean_q, mean_u = (
        tl.div_rn(sum_q.to(tl.float32), weight),
        tl.div_rn(sum_u.to(tl.float32), weight),
    )
    return tl.where(exists, mean_u - better * mean_q, start), tl.where(exists, better, step)


@triton.jit
def _fit(positions, weights, salient, rounds, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Start and step of channels, in units of a position."""
    MOST: tl.constexpr = TILE.group * _MEAN_WEIGHT * _UNITS
    is_high = salient != 0
    last = tl.where(is_high, float(BLOCK.high_last), float(BLOCK.low_last))
    start = tl.where(is_high, BLOCK.high_first[0], BLOCK.low_first[0])
    step = tl.where(is_high, BLOCK.high_first[1], BLOCK.low_first[1])
    sum_w = tl.sum(weights.to(tl.int32), axis=0).to(tl.int64)
    w = along_tokens(weights, BLOCK)
    if MOST < 1 << 32:
        sum_u = sum_tokens(w * biased(positions), BLOCK) - wrap(sum_w * BIAS)
    else:
        sum_u = sum_tokens((w * rounded_int(positions)).to(tl.int64), BLOCK)
    sum_u = sum_u.to(tl.int64)
    i = tl.zeros((), tl.int32)
    while i < rounds:
        inverse = along_channels(reciprocal(step, TILE.fast), BLOCK)
        nearest = (rounded_float(positions) - along_channels(start, BLOCK)) * inverse
        nearest = tl.minimum(tl.maximum(nearest, 0.0), along_channels(last, BLOCK))
        rounded = add_round(nearest)
        sums = _code_sums(positions, rounded, w, sum_w, sum_u, MOST * BLOCK.high_last, BLOCK)
        start, step = _regress(sum_w, sum_u, sums, start, step)
        i += 1
    return start, step


@triton.jit
def _store(ptr, first, low, width, start, step, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Start and step as values."""
    channel = first + tl.arange(0, BLOCK.channels)
    usable = width >= _MIN_WIDTH
    unit = tl.div_rn(width, float(_UNITS))
    start = tl.where(usable, tl.maximum(low + start * unit, _MIN_START), low)
    step = tl.where(usable, step * unit, 0.0)
    tl.store(ptr + channel, start, mask=channel < TILE.inner)
    tl.store(ptr + TILE.slabs * TILE.slab + channel, step, mask=channel < TILE.inner)


@triton.jit
def _load_salient(row_ptr, outer, first, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Which channels are salient, int32."""
    channel = first + tl.arange(0, BLOCK.channels)
    ptr = load_field(row_ptr, 5).to(tl.pointer_type(tl.int32)) + (load_field(row_ptr, 3) + 1)
    ptr += outer.to(tl.int64) * TILE.num_selectors
    word = tl.load(ptr + channel // 4, mask=channel < TILE.inner, other=0)
    return (word >> (channel & 3)) & 1


@triton.jit
def _fit_group(row_ptr, to_ptr, where, num_salient, BLOCK: tl.constexpr, TILE: tl.constexpr):
    TOKENS: tl.constexpr = BLOCK.tokens
    _, outer, _, tokens, _, _, _, _ = where
    data_ptr = tensor_ptr(row_ptr, where, TILE).to(tl.pointer_type(tl.uint16))
    # without salient channels only 1-bit codes are fitted, and once
    rounds = tl.where(num_salient > 0, _ROUNDS, 1)
    if BLOCK.channels >= TILE.inner:
        salient = _load_salient(row_ptr, outer, 0, BLOCK, TILE)
        positions, low, width, last = _positions(data_ptr, tokens, 0, BLOCK, TILE)
        distances = _distances(positions, last, tokens, salient, BLOCK, TILE)
        weights = _weigh(distances, num_salient, tokens, BLOCK)
        start, step = _fit(positions, weights, salient, rounds, BLOCK, TILE)
        _store(to_ptr, 0, low, width, start, step, BLOCK, TILE)
    else:
        distances = tl.zeros((TOKENS,), tl.int64)
        first = 0
        while first < TILE.inner:
            salient = _load_salient(row_ptr, outer, first, BLOCK, TILE)
            positions, low, width, last = _positions(data_ptr, tokens, first, BLOCK, TILE)
            distances += _distances(positions, last, tokens, salient, BLOCK, TILE).to(tl.int64)
            first += BLOCK.channels
        weights = _weigh(distances, num_salient, tokens, BLOCK)
        first = 0
        while first < TILE.inner:
            salient = _load_salient(row_ptr, outer, first, BLOCK, TILE)
            positions, low, width, last = _positions(data_ptr, tokens, first, BLOCK, TILE)
            start, step = _fit(positions, weights, salient, rounds, BLOCK, TILE)
            _store(to_ptr, first, low, width, start, step, BLOCK, TILE)
            first += BLOCK.channels


@triton.jit
def fit_kernel(chunks_ptr, program_chunk_ptr, scratch_ptr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The program of a group's first slab fits the group; others have nothing to do.

    Nor have those of outer indices whose levels are not fitted. Of groups with elements that are
    not coded the result is anything.
    """
    program = tl.program_id(0).to(tl.int64)
    row_ptr = chunks_ptr + tl.load(program_chunk_ptr + program).to(tl.int64) * NUM_FIELDS
    block = (program - load_field(row_ptr, 6)).to(tl.int32)
    num_blocks = count_groups(row_ptr, TILE) * load_field(row_ptr, 3).to(tl.int32) * TILE.slabs
    if (block < num_blocks) & (block % TILE.slabs == 0):
        where = find_group(row_ptr, block, TILE)
        before, after = salient_range(row_ptr, where)
        if (after > before) | (TILE.low_bits == 1):
            to_ptr = fits_ptr(row_ptr, scratch_ptr, where, TILE)
            _fit_group(row_ptr, to_ptr, where, after - before, BLOCK, TILE)
