"""What PN-Mix's encoder and decoder share: where a group lies, its planes, its exact tokens.

Widths and offsets are in lanes (see :class:`Tile`). Fields of the chunks' rows:
kernels/gpu/pnmix.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvz.kernels.gpu.words import load_field
from kvz.kernels.reference.pnmix_fit import MAX_BITS
from kvz.kernels.reference.pnmix_levels import INSETS

#: Elements of exact tokens that a program copies.
EXACT_LEN = 4096
#: Whether levels are fitted: those of 1-bit codes always, those of others where the outer index has
#: a salient channel.
NEVER, SOMETIMES, ALWAYS = range(3)

_OCTET = tl.constexpr(8)
_EXACT_LEN = tl.constexpr(EXACT_LEN)
_ONES = tl.constexpr(0x01010101)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program goes through a group, known when the kernels are compiled.

    Tensors are ``[rows, parts, steps, 8, lanes]``: a lane is ``unit`` neighbouring channels,
    ``parts`` times ``lanes`` are at least the ``slab`` channels of a program, ``steps`` times
    ``rows`` octets make a group. The order of the axes makes Triton keep the steps and the tokens
    of an octet in a thread and, where ``rows * lanes`` is 32, a group in a warp. Sizes are powers
    of two.

    ``inner``: channels of a token · ``by_token``: values, whose scales are those of a token and
    slab · ``low_bits``, ``high_bits``: of a code · ``group``: tokens · ``page_groups``: groups of a
    page, 0 with FP16 scales · ``best``: levels that are fitted, or within the ends · ``fast``:
    NVIDIA's instructions for pairs of BF16 and for bytes, which Triton's interpreter lacks.
    """

    inner: int
    by_token: bool
    low_bits: int
    high_bits: int
    group: int
    page_groups: int
    best: bool
    slab: int
    unit: int
    rows: int
    parts: int
    lanes: int
    steps: int
    fast: bool

    @property
    def slabs(self) -> int:
        """Of a group."""
        return -(-self.inner // self.slab)

    @property
    def octets(self) -> int:
        """Of a whole group."""
        return -(-self.group // 8)

    @property
    def extra_bits(self) -> int:
        """Of codes in salient channels."""
        return self.high_bits - self.low_bits

    @property
    def num_selectors(self) -> int:
        """Words of an outer index in the tables."""
        return -(-self.inner // 4)

    def inset(self, bits: int) -> float:
        """How far from the ends of the range the first and last level of codes of ``bits`` lie, as
        a part of the range, if they are not fitted."""
        return INSETS.get(bits, 0.0) if self.best else 0.0

    @property
    def low_inset(self) -> float:
        return self.inset(self.low_bits)

    @property
    def high_inset(self) -> float:
        return self.inset(self.high_bits)

    def fitting(self, bits: int) -> int:
        """:data:`NEVER`, :data:`SOMETIMES` or :data:`ALWAYS`."""
        if self.by_token or not self.best or bits > MAX_BITS:
            return NEVER
        return ALWAYS if bits == 1 else SOMETIMES

    @property
    def low_fitting(self) -> int:
        return self.fitting(self.low_bits)

    @property
    def high_fitting(self) -> int:
        """Of salient channels, if these have more bits: an outer index with them has one."""
        return NEVER if self.fitting(self.high_bits) == NEVER else ALWAYS

    @property
    def bits_type(self) -> tl.dtype:
        """Of a lane's elements."""
        return tl.uint64 if self.unit == 4 else tl.uint16

    @property
    def bytes_type(self) -> tl.dtype:
        """Of a byte for each element of a lane."""
        return tl.uint32 if self.unit == 4 else tl.uint8


@triton.jit
def count_groups(row_ptr, TILE: tl.constexpr):
    """Groups of an outer index."""
    return (load_field(row_ptr, 14).to(tl.int32) + TILE.group - 1) // TILE.group


@triton.jit
def find_group(row_ptr, block, TILE: tl.constexpr):
    """Where a program works.

    The group's number in the chunk, its outer index, its number there, its tokens, the octets of an
    outer index, the program's slab, its lanes ``[1, parts, 1, 1, lanes]``, which of them exist.
    """
    coded = load_field(row_ptr, 14).to(tl.int32)
    groups = count_groups(row_ptr, TILE)
    octets = coded // TILE.group * TILE.octets + (coded % TILE.group + 7) // _OCTET
    number = block // TILE.slabs
    outer = number // groups
    group = number - outer * groups
    tokens = tl.minimum(coded - group * TILE.group, TILE.group)
    slab = block % TILE.slabs
    in_slab = tl.arange(0, TILE.lanes)[None, None, None, None, :]
    in_slab += TILE.lanes * tl.arange(0, TILE.parts)[None, :, None, None, None]
    lane = slab * (TILE.slab // TILE.unit) + in_slab
    exists = (lane < TILE.inner // TILE.unit) & (in_slab < TILE.slab // TILE.unit)
    return number, outer, group, tokens, octets, slab, lane, exists


@triton.jit
def tile_octets(TILE: tl.constexpr):
    """Octets of the group ``[rows, 1, steps, 1, 1]``; some may lie beyond it."""
    row = tl.arange(0, TILE.rows)[:, None, None, None, None]
    return row + TILE.rows * tl.arange(0, TILE.steps)[None, None, :, None, None]


@triton.jit
def along_lanes(ptr, at, TILE: tl.constexpr):
    """``ptr + at``, to lanes that need not be contiguous, with the claim that keeps them along the
    threads (words.py)."""
    # a claim about an argument is lost: it belongs to the operation that makes the tensor
    moved = ptr + at
    if TILE.parts * TILE.lanes > 1:
        return tl.max_contiguous(moved, (1, 1, 1, 1, 8))
    else:
        # Triton fails on claims about a tensor of one element
        return moved


@triton.jit
def in_octet():
    """Numbers of an octet's tokens, ``[1, 1, 1, 8, 1]``."""
    return tl.arange(0, 8)[None, None, None, :, None]


@triton.jit
def tile_tokens(TILE: tl.constexpr):
    """Tokens of the group ``[rows, 1, steps, 8, 1]``; some may lie beyond it."""
    return tile_octets(TILE) * _OCTET + in_octet()


@triton.jit
def tensor_ptr(row_ptr, where, TILE: tl.constexpr):
    """To the first token of a group of the chunk."""
    _, outer, group, _, _, _, _, _ = where
    ptr = load_field(row_ptr, 0).to(tl.pointer_type(TILE.bits_type))
    ptr += outer.to(tl.int64) * (load_field(row_ptr, 1) // TILE.unit)
    token = load_field(row_ptr, 13) + group.to(tl.int64) * TILE.group
    return ptr + token * (TILE.inner // TILE.unit)


@triton.jit
def stream_address(row_ptr, field: tl.constexpr):
    """Of the stream whose offset the field holds."""
    return load_field(row_ptr, 4) + load_field(row_ptr, field)


@triton.jit
def low_ptr(row_ptr, where, TILE: tl.constexpr):
    """To a group's planes of low bits."""
    _, outer, group, _, octets, _, _, _ = where
    ptr = stream_address(row_ptr, 10).to(tl.pointer_type(TILE.bytes_type))
    octet = outer.to(tl.int64) * octets + group * TILE.octets
    return ptr + octet * (TILE.low_bits * (TILE.inner // TILE.unit))


@triton.jit
def scales_ptr(row_ptr, where, TILE: tl.constexpr):
    """To a group's starts; steps follow one token, or ``slabs``, further."""
    number, outer, group, _, _, _, _, _ = where
    address = stream_address(row_ptr, 9)
    if TILE.by_token:
        token = outer.to(tl.int64) * load_field(row_ptr, 14) + group * TILE.group
        return address.to(tl.pointer_type(tl.uint16)) + token * (2 * TILE.slabs)
    elif TILE.page_groups > 0:
        at = number.to(tl.int64) * (2 * (TILE.inner // TILE.unit))
        return address.to(tl.pointer_type(TILE.bytes_type)) + at
    else:
        at = number.to(tl.int64) * (2 * (TILE.inner // TILE.unit))
        return address.to(tl.pointer_type(TILE.bits_type)) + at


@triton.jit
def pages_ptr(row_ptr, where, TILE: tl.constexpr):
    """To the minimums of a group's page; scales follow one token further."""
    _, outer, group, _, _, _, _, _ = where
    pages = (count_groups(row_ptr, TILE) + TILE.page_groups - 1) // TILE.page_groups
    page = outer.to(tl.int64) * pages + group // TILE.page_groups
    ptr = stream_address(row_ptr, 8).to(tl.pointer_type(TILE.bits_type))
    return ptr + page * (2 * (TILE.inner // TILE.unit))


@triton.jit
def load_selectors(row_ptr, where, TILE: tl.constexpr):
    """Of the lanes' channels: which are salient (a bit each), and how many channels of their outer
    index are before the first one."""
    _, outer, _, _, _, _, lane, exists = where
    num_outer = load_field(row_ptr, 3)
    table_ptr = load_field(row_ptr, 5).to(tl.pointer_type(tl.int32)) + (num_outer + 1)
    table_ptr += outer.to(tl.int64) * TILE.num_selectors
    if TILE.unit == 4:
        word = tl.load(table_ptr + lane, mask=exists, other=0)
        return word & 15, word >> 4
    else:
        word = tl.load(table_ptr + lane // 4, mask=exists, other=0)
        before = word & ((1 << (lane & 3)) - 1)
        count = (before & 1) + ((before >> 1) & 1) + ((before >> 2) & 1)
        return (word >> (lane & 3)) & 1, (word >> 4) + count


@triton.jit
def salient_range(row_ptr, where):
    """Salient channels before those of the outer index, and before those of the next."""
    table_ptr = load_field(row_ptr, 5).to(tl.pointer_type(tl.int32)) + where[1]
    return tl.load(table_ptr), tl.load(table_ptr + 1)


@triton.jit
def fits_ptr(row_ptr, scratch_ptr, where, TILE: tl.constexpr):
    """To the fitted starts of a group's channels (as many as its slabs have); then come steps."""
    place = load_field(row_ptr, 6) + where[0].to(tl.int64) * TILE.slabs
    return scratch_ptr + place * (2 * TILE.slab)


@triton.jit
def high_place(row_ptr, where, TILE: tl.constexpr):
    """Address of a group's planes of high bits, and bytes of each: salient channels of the outer
    index."""
    _, _, group, _, octets, _, _, _ = where
    before, after = salient_range(row_ptr, where)
    count = after - before
    at = octets.to(tl.int64) * before + group.to(tl.int64) * TILE.octets * count
    return stream_address(row_ptr, 11) + at * TILE.extra_bits, count


@triton.jit
def is_salient(chosen, k: tl.constexpr):
    """Whether element ``k`` of lanes belongs to a salient pair."""
    return ((chosen >> k) & 1) != 0


@triton.jit
def any_of(flags):
    """Whether one of the integers is not 0 (none is negative), int32."""
    largest = tl.max(tl.max(flags, axis=4), axis=3)
    return tl.max(tl.max(tl.max(largest, axis=2), axis=1), axis=0)


@triton.jit
def first_bits(count):
    """The low ``count`` (0 to 8) bits of each byte of a uint32."""
    return (((1 << count) - 1) * _ONES).to(tl.uint32)


@triton.jit
def copy_raw(row_ptr, where, raw, TO_PAYLOAD: tl.constexpr, TILE: tl.constexpr):
    """A program's channels of a group, between the tensor and address ``raw``."""
    _, _, _, tokens, _, _, lane, exists = where
    raw_ptr = raw.to(tl.pointer_type(TILE.bits_type))
    ptr = tensor_ptr(row_ptr, where, TILE)
    first = 0
    while first < tokens:
        token = first + tl.arange(0, TILE.rows)[:, None, None, None, None]
        at = token * (TILE.inner // TILE.unit) + lane
        own = (token < tokens) & exists
        if TO_PAYLOAD:
            tl.store(raw_ptr + at, tl.load(ptr + at, mask=own, other=0), mask=own)
        else:
            tl.store(ptr + at, tl.load(raw_ptr + at, mask=own, other=0), mask=own)
        first += TILE.rows


@triton.jit
def copy_exact(row_ptr, part, TO_PAYLOAD: tl.constexpr, TILE: tl.constexpr):
    """Run number ``part`` of the exact tokens, between the tensor and the payload."""
    width: tl.constexpr = TILE.inner // TILE.unit
    length: tl.constexpr = _EXACT_LEN // TILE.unit
    first, coded = load_field(row_ptr, 13).to(tl.int32), load_field(row_ptr, 14)
    per_outer = (load_field(row_ptr, 2) - coded).to(tl.int32) * width
    parts = (per_outer + length - 1) // length
    outer = (part // parts).to(tl.int64)
    at = (part % parts) * length + tl.arange(0, length)
    own = at < per_outer
    ptr = load_field(row_ptr, 0).to(tl.pointer_type(TILE.bits_type))
    ptr += outer * (load_field(row_ptr, 1) // TILE.unit)
    exact_ptr = load_field(row_ptr, 4).to(tl.pointer_type(TILE.bits_type)) + outer * per_outer
    ptr += at + tl.where(at >= first * width, coded * width, 0)
    if TO_PAYLOAD:
        tl.store(exact_ptr + at, tl.load(ptr, mask=own, other=0), mask=own)
    else:
        tl.store(ptr, tl.load(exact_ptr + at, mask=own, other=0), mask=own)
