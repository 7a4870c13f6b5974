"""PN-Mix's encoder in Triton: the kernel alone. Layout and names: kernels/reference/pnmix.py.

``encode_kernel`` encodes as if no group had to be stored as it is; ``finish_kernel``
(pnmix_finish.py) counts those that have to; ``raw_kernel`` encodes these, and the rest of their
pages, again. Where levels are fitted, ``fit_kernel`` (pnmix_fit.py) must have run before.
"""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton has no unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from kvz.kernels.gpu.elements import element_float, join_elements, set_byte, to_float
from kvz.kernels.gpu.pnmix_levels import ROUND, levels, page_scale
from kvz.kernels.gpu.pnmix_ranges import (
    group_range,
    is_beyond,
    limit_float,
    limits,
    merge_unless,
    no_range,
    token_limits,
)
from kvz.kernels.gpu.pnmix_tiles import (
    NEVER,
    along_lanes,
    any_of,
    copy_exact,
    count_groups,
    find_group,
    first_bits,
    fits_ptr,
    high_place,
    in_octet,
    is_salient,
    load_selectors,
    low_ptr,
    pages_ptr,
    salient_range,
    scales_ptr,
    stream_address,
    tensor_ptr,
    tile_octets,
    tile_tokens,
)
from kvz.kernels.gpu.words import NUM_FIELDS, load_field

_NEVER = tl.constexpr(NEVER)
_OCTET = tl.constexpr(8)
_ONES = tl.constexpr(0x01010101)


@triton.jit
def _load_group(row_ptr, where, TILE: tl.constexpr):
    """The words of a group's tokens.

    Tokens and lanes that do not exist repeat the last one, so that they change no least or greatest
    element.
    """
    _, _, _, tokens, _, slab, lane, _ = where
    slab_lanes: tl.constexpr = TILE.slab // TILE.unit
    last = tl.minimum((slab + 1) * slab_lanes, TILE.inner // TILE.unit) - 1
    ptr = tensor_ptr(row_ptr, where, TILE) + tl.minimum(lane, last)
    at = tl.minimum(tile_tokens(TILE), tokens - 1) * (TILE.inner // TILE.unit)
    return tl.load(along_lanes(ptr, at, TILE))


@triton.jit
def _any_beyond(ranges, TILE: tl.constexpr):
    """Whether a group has an element that is not coded."""
    UNIT: tl.constexpr = TILE.unit
    low, high = limits(ranges, 0, TILE)
    beyond = is_beyond(low, high)
    for k in tl.static_range(1, UNIT):
        low, high = limits(ranges, k, TILE)
        beyond |= is_beyond(low, high)
    return any_of(beyond)


@triton.jit
def _store_scales(ptr, stored, mask, keep, WIDE: tl.constexpr, TILE: tl.constexpr):
    """One number (int32) for each element of lanes, of 16 bits if ``WIDE``, else of 8."""
    UNIT: tl.constexpr = TILE.unit
    kept = ()
    packed = tl.zeros_like(stored[0]).to(tl.uint32)
    for k in tl.static_range(UNIT):
        kept = kept + (stored[k].to(tl.uint32) & keep,)
        packed = set_byte(packed, kept[k], k, TILE.fast)
    word = join_elements(kept, UNIT) if WIDE else packed
    tl.store(ptr, word.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_planes(row_ptr, where, codes, keep, selectors, TILE: tl.constexpr):
    """Planes of codes (a byte for each element of a lane)."""
    LOW: tl.constexpr = TILE.low_bits
    EXTRA: tl.constexpr = TILE.extra_bits
    UNIT: tl.constexpr = TILE.unit
    _, _, _, tokens, _, _, lane, exists = where
    octet = tile_octets(TILE)
    own = (octet * _OCTET < tokens) & exists
    keep &= first_bits(tl.maximum(tl.minimum(tokens - octet * _OCTET, 8), 0))
    ptr = low_ptr(row_ptr, where, TILE)
    for bit in tl.static_range(LOW):
        plane = _plane(codes, bit) & keep
        at = (octet * LOW + bit) * (TILE.inner // TILE.unit) + lane
        tl.store(ptr + at, plane.to(TILE.bytes_type), mask=own)
    if EXTRA > 0:
        chosen, before = selectors
        address, count = high_place(row_ptr, where, TILE)
        high_ptr = address.to(tl.pointer_type(tl.uint8))
        for bit in tl.static_range(EXTRA):
            at = (octet * EXTRA + bit) * count + before
            plane = _plane(codes, LOW + bit) & keep
            for k in tl.static_range(UNIT):
                byte = ((plane >> 8 * k) & 0xFF).to(tl.uint8)
                byte_ptr = along_lanes(high_ptr, at, TILE)
                tl.store(byte_ptr, byte, mask=own & is_salient(chosen, k))
                at += (chosen >> k) & 1


@triton.jit
def _plane(codes, bit: tl.constexpr):
    """Bit ``bit`` of the codes of octets, ``[rows, parts, steps, 1, lanes]``."""
    return tl.sum(((codes >> bit) & _ONES) << in_octet(), axis=3, keep_dims=True).to(tl.uint32)


@triton.jit
def _code(x, start, inverse, last):
    """Codes of elements (uint32, of which the low byte counts)."""
    nearest = tl.minimum(tl.maximum((x - start) * inverse, 0.0), last) + ROUND
    return nearest.to(tl.uint32, bitcast=True)


@triton.jit
def _encode_keys(row_ptr, scratch_ptr, where, words, ranges, page, keep, TILE: tl.constexpr):
    """Scales and codes of a group. ``page``: minimums and scales of the lanes' elements."""
    UNIT: tl.constexpr = TILE.unit
    PAGED: tl.constexpr = TILE.page_groups > 0
    LAST_LOW: tl.constexpr = float((1 << TILE.low_bits) - 1)
    LAST_HIGH: tl.constexpr = float((1 << TILE.high_bits) - 1)
    _, _, _, _, _, _, lane, exists = where
    selectors = (tl.zeros_like(lane), tl.zeros_like(lane))
    if TILE.extra_bits > 0:
        selectors = load_selectors(row_ptr, where, TILE)
    FITTED: tl.constexpr = TILE.low_fitting != _NEVER
    if FITTED:
        before, after = salient_range(row_ptr, where)
        fit_ptr = fits_ptr(row_ptr, scratch_ptr, where, TILE) + lane * UNIT
    starts, steps = (), ()
    codes = tl.zeros(words.shape, tl.uint32)
    for k in tl.static_range(UNIT):
        low, high = limits(ranges, k, TILE)
        low, high = limit_float(low), limit_float(high)
        fit = (False, low, low)
        if FITTED:
            start = tl.load(fit_ptr + k, mask=exists, other=0)
            step = tl.load(fit_ptr + TILE.slabs * TILE.slab + k, mask=exists, other=0)
            fit = (after > before, start, step)
        salient = is_salient(selectors[0], k)
        own_page = (page[0][k], page[1][k]) if PAGED else (low, low)
        level = levels(low, high, fit, salient, own_page, TILE)
        starts, steps = starts + (level[0],), steps + (level[1],)
        last_code = tl.where(salient, LAST_HIGH, LAST_LOW)
        code = _code(element_float(words, k, UNIT), level[2], level[3], last_code)
        codes = set_byte(codes, code, k, TILE.fast)
    ptr = scales_ptr(row_ptr, where, TILE) + lane
    _store_scales(ptr, starts, exists, keep, not PAGED, TILE)
    _store_scales(ptr + TILE.inner // TILE.unit, steps, exists, keep, not PAGED, TILE)
    _store_planes(row_ptr, where, codes, keep, selectors, TILE)


@triton.jit
def _encode_values(row_ptr, where, words, keep, TILE: tl.constexpr):
    """Scales and codes of a program's channels of a group of tokens.

    Returns whether one of their elements is not coded.
    """
    UNIT: tl.constexpr = TILE.unit
    LAST: tl.constexpr = float((1 << TILE.high_bits) - 1)
    _, _, _, tokens, _, slab, _, _ = where
    token = tile_tokens(TILE)
    low, high = token_limits(words, TILE)
    beyond = is_beyond(low, high)
    low, high = limit_float(low), limit_float(high)
    level = levels(low, high, (False, low, low), False, (low, low), TILE)
    ptr = scales_ptr(row_ptr, where, TILE) + (token * (2 * TILE.slabs) + slab)
    for i in tl.static_range(2):
        stored = (level[i].to(tl.uint32) & keep).to(tl.uint16)
        tl.store(ptr + i * TILE.slabs, stored, mask=token < tokens)
    codes = tl.zeros(words.shape, tl.uint32)
    for k in tl.static_range(UNIT):
        code = _code(element_float(words, k, UNIT), level[2], level[3], LAST)
        codes = set_byte(codes, code, k, TILE.fast)
    _store_planes(row_ptr, where, codes, keep, (), TILE)
    return any_of(beyond)


@triton.jit
def load_flag(row_ptr, where):
    return tl.load(stream_address(row_ptr, 7).to(tl.pointer_type(tl.uint8)) + where[0]).to(tl.int32)


@triton.jit
def _page_range(row_ptr, block, num_groups, KNOWN: tl.constexpr, TILE: tl.constexpr):
    """The range of a page's groups that are coded, and how many these are."""
    _, _, _, _, _, _, lane, _ = find_group(row_ptr, block, TILE)
    ranges, used = no_range(lane, TILE), 0
    i = 0
    while i < num_groups:
        where = find_group(row_ptr, block + i * TILE.slabs, TILE)
        is_raw = load_flag(row_ptr, where) if KNOWN else 0
        group = group_range(_load_group(row_ptr, where, TILE), TILE)
        ranges = merge_unless(ranges, group, is_raw, TILE)
        used += 1 - is_raw
        i += 1
    return ranges, used


@triton.jit
def _store_page(row_ptr, where, ranges, used, TILE: tl.constexpr):
    """Minimums and scales of the lanes' elements, float32."""
    UNIT: tl.constexpr = TILE.unit
    _, _, _, _, _, _, lane, exists = where
    keep = tl.where(used > 0, -1, 0).to(tl.uint32)
    low_bits, scale_bits, minimums, scales = (), (), (), ()
    for k in tl.static_range(UNIT):
        low, high = limits(ranges, k, TILE)
        low, high = limit_float(low & keep), limit_float(high & keep)
        scale = page_scale(low, high)
        low_bits = low_bits + (low.to(tl.uint32, bitcast=True) >> 16,)
        scale_bits = scale_bits + (scale,)
        minimums, scales = minimums + (low,), scales + (to_float(scale),)
    ptr = pages_ptr(row_ptr, where, TILE) + lane
    _store_scales(ptr, low_bits, exists, keep, True, TILE)
    _store_scales(ptr + TILE.inner // TILE.unit, scale_bits, exists, keep, True, TILE)
    return minimums, scales


@triton.jit
def encode_group(row_ptr, scratch_ptr, block, page, KNOWN: tl.constexpr, TILE: tl.constexpr):
    """Returns whether the group must be stored as it is."""
    where = find_group(row_ptr, block, TILE)
    # a group that is stored as it is has zeros everywhere else
    is_raw = load_flag(row_ptr, where) if KNOWN else 0
    keep = tl.where(is_raw != 0, 0, -1).to(tl.uint32)
    words = _load_group(row_ptr, where, TILE)
    if TILE.by_token:
        return _encode_values(row_ptr, where, words, keep, TILE)
    else:
        ranges = group_range(words, TILE)
        _encode_keys(row_ptr, scratch_ptr, where, words, ranges, page, keep, TILE)
        return _any_beyond(ranges, TILE)


@triton.jit
def encode_page(row_ptr, scratch_ptr, sizes_ptr, block, KNOWN: tl.constexpr, TILE: tl.constexpr):
    """The groups of the page that begins with that of ``block``; ``sizes`` of its programs."""
    where = find_group(row_ptr, block, TILE)
    num_groups = tl.minimum(count_groups(row_ptr, TILE) - where[2], TILE.page_groups)
    ranges, used = _page_range(row_ptr, block, num_groups, KNOWN, TILE)
    page = _store_page(row_ptr, where, ranges, used, TILE)
    i = 0
    while i < num_groups:
        is_raw = encode_group(row_ptr, scratch_ptr, block + i * TILE.slabs, page, KNOWN, TILE)
        if not KNOWN:
            tl.store(sizes_ptr + i * TILE.slabs, is_raw)
        i += 1


@triton.jit
def encode_kernel(chunks_ptr, program_chunk_ptr, scratch_ptr, sizes_ptr, TILE: tl.constexpr):
    """A program encodes ``slab`` channels of a group, or of all groups of a page, or copies exact
    tokens. ``sizes[program]`` becomes 1 if its group must be stored as it is, else 0."""
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(program_chunk_ptr + program).to(tl.int64)
    row_ptr = chunks_ptr + chunk * NUM_FIELDS
    block = (program - load_field(row_ptr, 6)).to(tl.int32)
    groups = count_groups(row_ptr, TILE)
    num_blocks = groups * load_field(row_ptr, 3).to(tl.int32) * TILE.slabs
    if block >= num_blocks:
        copy_exact(row_ptr, block - num_blocks, True, TILE)
    elif TILE.page_groups == 0:
        tl.store(sizes_ptr + program, encode_group(row_ptr, scratch_ptr, block, (), False, TILE))
    elif block // TILE.slabs % groups % TILE.page_groups == 0:
        encode_page(row_ptr, scratch_ptr, sizes_ptr + program, block, False, TILE)
