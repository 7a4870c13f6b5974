"""PN-Mix's decoder in Triton: the kernel alone. Layout and names: kernels/reference/pnmix.py.

A program decodes ``slab`` channels of a group, or copies exact tokens. What it reads depends on
nothing in the payload but flags and lengths that it checks.
"""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton has no unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import (
    byte_float,
    element,
    half_float,
    join_elements,
    round_bits,
    round_pair,
    to_float,
)
from kvz.kernels.gpu.pnmix_tiles import (
    along_lanes,
    any_of,
    copy_exact,
    copy_raw,
    count_groups,
    find_group,
    high_place,
    in_octet,
    is_salient,
    load_selectors,
    low_ptr,
    pages_ptr,
    scales_ptr,
    stream_address,
    tensor_ptr,
    tile_octets,
    tile_tokens,
)
from kvz.kernels.gpu.words import NUM_FIELDS, bits_to_flags, load_field, permute

_OCTET = tl.constexpr(8)
_ONES = tl.constexpr(0x01010101)
_INFINITE = tl.constexpr(0x7F800000)
_BLOCK = tl.constexpr(1024)


@triton.jit
def _load_low(row_ptr, where, TILE: tl.constexpr):
    """The planes of low bits."""
    BITS: tl.constexpr = TILE.low_bits
    _, _, _, tokens, _, _, lane, exists = where
    ptr = low_ptr(row_ptr, where, TILE)
    octet = tile_octets(TILE)
    own = (octet * _OCTET < tokens) & exists
    planes = ()
    for bit in tl.static_range(BITS):
        at = (octet * TILE.low_bits + bit) * (TILE.inner // TILE.unit) + lane
        planes = planes + (tl.load(ptr + at, mask=own, other=0).to(tl.uint32),)
    return planes


@triton.jit
def _spread(address, at, chosen, own, selector, keep, TILE: tl.constexpr):
    """Bytes of salient channels, which lie one after the other from ``at`` on, in the places of
    their channels."""
    UNIT: tl.constexpr = TILE.unit
    if TILE.fast:
        # two words that hold the (up to four) bytes, of which the second may not be needed
        at += (address & 3).to(tl.int32)
        ptr = (address & -4).to(tl.pointer_type(tl.uint32))
        first_ptr = along_lanes(ptr, at >> 2, TILE)
        first = tl.load(first_ptr, mask=own & (chosen != 0), other=0)
        last = (at & 3) + ((keep & _ONES) * _ONES >> 24).to(tl.int32)
        second_ptr = along_lanes(ptr, (at >> 2) + 1, TILE)
        second = tl.load(second_ptr, mask=own & (last > 4), other=0)
        return permute(first, second, selector + ((at & 3) * 0x1111).to(tl.uint32)) & keep
    else:
        ptr = address.to(tl.pointer_type(tl.uint8))
        spread = tl.zeros(own.shape, tl.uint32)
        for k in tl.static_range(UNIT):
            here = own & is_salient(chosen, k)
            byte_ptr = along_lanes(ptr, at, TILE)
            spread |= tl.load(byte_ptr, mask=here, other=0).to(tl.uint32) << 8 * k
            at += ((chosen >> k) & 1).to(tl.int32)
        return spread


@triton.jit
def _load_high(row_ptr, where, chosen, before, TILE: tl.constexpr):
    """The planes of high bits, zero in channels that are not salient."""
    BITS: tl.constexpr = TILE.extra_bits
    _, _, _, tokens, _, _, _, exists = where
    address, count = high_place(row_ptr, where, TILE)
    keep = bits_to_flags(chosen.to(tl.uint32)) * 0xFF
    # which of the bytes each channel has
    selector = (chosen & 1) * 0x1110 + ((chosen >> 1) & 1) * 0x1100 + ((chosen >> 2) & 1) * 0x1000
    selector = selector.to(tl.uint32)
    octet = tile_octets(TILE)
    own = (octet * _OCTET < tokens) & exists
    planes = ()
    for bit in tl.static_range(BITS):
        at = (octet * TILE.extra_bits + bit) * count + before
        planes = planes + (_spread(address, at, chosen, own, selector, keep, TILE),)
    return planes


@triton.jit
def _key_scales(row_ptr, where, chosen, k: tl.constexpr, TILE: tl.constexpr):
    """Start and step of element ``k`` of lanes, float32."""
    _, _, _, _, _, _, lane, exists = where
    UNIT: tl.constexpr = TILE.unit
    width: tl.constexpr = TILE.inner // TILE.unit
    ptr = scales_ptr(row_ptr, where, TILE) + lane
    start, step = tl.load(ptr, mask=exists, other=0), tl.load(ptr + width, mask=exists, other=0)
    if TILE.page_groups > 0:
        page_ptr = pages_ptr(row_ptr, where, TILE) + lane
        minimum = to_float(element(tl.load(page_ptr, mask=exists, other=0), k, UNIT))
        scale = to_float(element(tl.load(page_ptr + width, mask=exists, other=0), k, UNIT))
        of_low: tl.constexpr = 2.0 ** (1 - TILE.low_bits)
        of_high: tl.constexpr = 2.0 ** (1 - TILE.high_bits)
        unit = scale * tl.where(is_salient(chosen, k), of_high, of_low)
        start = minimum + scale * ((start.to(tl.uint32) >> 8 * k) & 0xFF).to(tl.float32)
        return start, unit * ((step.to(tl.uint32) >> 8 * k) & 0xFF).to(tl.float32)
    else:
        return half_float(element(start, k, UNIT)), half_float(element(step, k, UNIT))


@triton.jit
def _all_key_scales(row_ptr, where, chosen, TILE: tl.constexpr):
    """Starts and steps of the lanes' elements."""
    UNIT: tl.constexpr = TILE.unit
    starts, steps = (), ()
    for k in tl.static_range(UNIT):
        start, step = _key_scales(row_ptr, where, chosen, k, TILE)
        starts, steps = starts + (start,), steps + (step,)
    return starts, steps


@triton.jit
def _are_finite(scales, TILE: tl.constexpr):
    """Whether all starts and steps of keys are finite."""
    UNIT: tl.constexpr = TILE.unit
    odd = tl.zeros_like(scales[0][0]).to(tl.int32)
    for i in tl.static_range(2):
        for k in tl.static_range(UNIT):
            bits = scales[i][k].to(tl.uint32, bitcast=True)
            odd |= ((bits & _INFINITE) == _INFINITE).to(tl.int32)
    return any_of(odd) == 0


@triton.jit
def _value_scales(row_ptr, where, TILE: tl.constexpr):
    """Starts and steps of a group's tokens, float32, the same for all lanes."""
    _, _, _, tokens, _, _, lane, exists = where
    token = tile_tokens(TILE)
    own = (token < tokens) & exists
    at = token * (2 * TILE.slabs) + lane // (TILE.slab // TILE.unit)
    start_ptr = along_lanes(scales_ptr(row_ptr, where, TILE), at, TILE)
    step_ptr = along_lanes(scales_ptr(row_ptr, where, TILE), at + TILE.slabs, TILE)
    start, step = tl.load(start_ptr, mask=own, other=0), tl.load(step_ptr, mask=own, other=0)
    return (half_float(start),), (half_float(step),)


@triton.jit
def _are_value_scales_finite(row_ptr, where, TILE: tl.constexpr):
    """Whether a group's scales are, those of all slabs."""
    _, _, _, tokens, _, _, _, _ = where
    ptr = scales_ptr(row_ptr, where, TILE)
    odd = tl.zeros((_BLOCK,), tl.int32)
    first = 0
    while first < 2 * TILE.slabs * tokens:
        at = first + tl.arange(0, _BLOCK)
        bits = tl.load(ptr + at, mask=at < 2 * TILE.slabs * tokens, other=0)
        odd |= ((bits & 0x7C00) == 0x7C00).to(tl.int32)
        first += _BLOCK
    return tl.max(odd, axis=0) == 0


@triton.jit
def _codes(low, high, TILE: tl.constexpr):
    """The codes of an octet's tokens, a byte for each element of a lane."""
    LOW: tl.constexpr = TILE.low_bits
    EXTRA: tl.constexpr = TILE.extra_bits
    codes = (low[0] >> in_octet()) & _ONES
    for bit in tl.static_range(1, LOW):
        codes |= ((low[bit] >> in_octet()) & _ONES) << bit
    for bit in tl.static_range(EXTRA):
        codes |= ((high[bit] >> in_octet()) & _ONES) << (LOW + bit)
    return codes


@triton.jit
def _value(codes, scales, k: tl.constexpr, TILE: tl.constexpr):
    """Element ``k`` of lanes, float32; ``scales``: starts and steps."""
    code = byte_float(codes, k, TILE.fast)
    OF: tl.constexpr = 0 if TILE.by_token else k
    start, step = scales[0][OF], scales[1][OF]
    if TILE.page_groups > 0:
        return start + step * code
    else:
        # the product is exact
        return tl.fma(step, code, start)


@triton.jit
def _lanes(codes, scales, CAREFUL: tl.constexpr, TILE: tl.constexpr):
    """Decoded lanes. Unless ``CAREFUL``, all scales are finite, so no element is NaN."""
    UNIT: tl.constexpr = TILE.unit
    if TILE.fast and not CAREFUL:
        first = round_pair(_value(codes, scales, 0, TILE), _value(codes, scales, 1, TILE))
        last = round_pair(_value(codes, scales, 2, TILE), _value(codes, scales, 3, TILE))
        return first.to(tl.uint64) | last.to(tl.uint64) << 32
    else:
        bits = ()
        for k in tl.static_range(UNIT):
            bits = bits + (round_bits(_value(codes, scales, k, TILE)),)
        return join_elements(bits, UNIT)


@triton.jit
def _store_group(row_ptr, where, low, high, scales, CAREFUL: tl.constexpr, TILE: tl.constexpr):
    """The elements of planes ``low`` and ``high``."""
    _, _, _, tokens, _, _, lane, exists = where
    token = tile_tokens(TILE)
    ptr = tensor_ptr(row_ptr, where, TILE) + (token * (TILE.inner // TILE.unit) + lane)
    words = _lanes(_codes(low, high, TILE), scales, CAREFUL, TILE)
    tl.store(ptr, words, mask=(token < tokens) & exists)


@triton.jit
def _decode_coded(row_ptr, where, TILE: tl.constexpr):
    low = _load_low(row_ptr, where, TILE)
    high = ()
    chosen = tl.zeros_like(where[6])
    if TILE.extra_bits > 0:
        chosen, before = load_selectors(row_ptr, where, TILE)
        high = _load_high(row_ptr, where, chosen, before, TILE)
    if TILE.by_token:
        scales = _value_scales(row_ptr, where, TILE)
        finite = _are_value_scales_finite(row_ptr, where, TILE)
    else:
        scales = _all_key_scales(row_ptr, where, chosen, TILE)
        finite = _are_finite(scales, TILE)
    if finite:
        _store_group(row_ptr, where, low, high, scales, False, TILE)
    else:
        _store_group(row_ptr, where, low, high, scales, True, TILE)


@triton.jit
def _count_raw(row_ptr, end, TILE: tl.constexpr):
    """Tokens of the marked groups before group ``end`` of the chunk, and the largest flag."""
    flags_ptr = stream_address(row_ptr, 7).to(tl.pointer_type(tl.uint8))
    coded, groups = load_field(row_ptr, 14).to(tl.int32), count_groups(row_ptr, TILE)
    total = tl.zeros((), tl.int64)
    largest = tl.zeros((), tl.int32)
    first = 0
    # "while": Triton's interpreter cannot take a range whose end is a tensor
    while first < end:
        number = first + tl.arange(0, _BLOCK)
        flag = tl.load(flags_ptr + number, mask=number < end, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.max(flag, axis=0))
        tokens = tl.minimum(coded - number % groups * TILE.group, TILE.group)
        total += tl.sum(tl.where(flag == 1, tokens, 0), axis=0).to(tl.int64)
        first += _BLOCK
    return total, largest


@triton.jit
def _decode_group(row_ptr, block, nbytes, TILE: tl.constexpr):
    """``nbytes`` of the payload; what its flags say is not trusted."""
    where = find_group(row_ptr, block, TILE)
    number, _, _, tokens, _, _, _, _ = where
    flag = tl.load(stream_address(row_ptr, 7).to(tl.pointer_type(tl.uint8)) + number)
    if flag == 0:
        _decode_coded(row_ptr, where, TILE)
    elif flag == 1:
        counted = _count_raw(row_ptr, number, TILE)
        raw_at = load_field(row_ptr, 12) + counted[0] * (2 * TILE.inner)
        if raw_at + tokens.to(tl.int64) * (2 * TILE.inner) <= nbytes:
            copy_raw(row_ptr, where, load_field(row_ptr, 4) + raw_at, False, TILE)


@triton.jit
def decode_kernel(chunks_ptr, program_chunk_ptr, status_ptr, TILE: tl.constexpr):
    """Writes 1 to a chunk's status where flags and the payload's length do not belong together."""
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(program_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    block = (program - load_field(row_ptr, 6)).to(tl.int32)
    raw_at, nbytes = load_field(row_ptr, 12), load_field(row_ptr, 15)
    num_groups = count_groups(row_ptr, TILE) * load_field(row_ptr, 3).to(tl.int32)
    if nbytes < raw_at:
        tl.store(status_ptr + chunk, 1)
    else:
        if block == 0:
            counted = _count_raw(row_ptr, num_groups, TILE)
            expected = raw_at + counted[0] * (2 * TILE.inner)
            if (counted[1] > 1) | (expected != nbytes):
                tl.store(status_ptr + chunk, 1)
        if block < num_groups * TILE.slabs:
            _decode_group(row_ptr, block, nbytes, TILE)
        else:
            copy_exact(row_ptr, block - num_groups * TILE.slabs, False, TILE)
