"""What Lynx's encoder and decoder share: where a page lies.

Widths and offsets are in lanes (see :class:`Tile`). Fields of the chunks' rows:
kernels/gpu/lynx.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from kvz.kernels.gpu.words import load_field

_RESIDUAL_ALIGNMENT = tl.constexpr(64)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program goes through a page, known when the kernels are compiled.

    Tensors are ``[rows, groups, steps, lanes]``: a lane is ``unit`` neighbouring channels,
    ``steps`` times ``rows`` positions make a group. A program takes ``slab`` channels of the lower
    half and, in the same lanes, those of the upper half that share bytes with them. The order of
    the axes makes Triton keep the steps in a thread and, where ``rows * lanes`` is 32, a group in a
    warp.

    ``inner``: channels of a token · ``by_token``: pages run along these · ``page``, ``group``:
    positions of each · ``companded``: the code has tables · ``fast``: NVIDIA's instructions for
    pairs of BF16 and for bytes, which Triton's interpreter lacks. Tensors' sizes are powers of two.
    """

    inner: int
    by_token: bool
    companded: bool
    page: int
    group: int
    slab: int
    unit: int
    rows: int
    groups: int
    lanes: int
    steps: int
    fast: bool

    @property
    def batches(self) -> int:
        """Times that a page has ``groups`` groups."""
        return -(-(self.page // self.group) // self.groups)

    @property
    def bits_type(self) -> tl.dtype:
        """Of a lane's elements."""
        return tl.uint64 if self.unit == 4 else tl.uint16

    @property
    def bytes_type(self) -> tl.dtype:
        """Of a byte for each element of a lane."""
        return tl.uint32 if self.unit == 4 else tl.uint8

    @property
    def small(self) -> Tile:
        """The same with little code, for what is rare: one group at a time."""
        return replace(self, rows=self.rows * self.steps, groups=1, steps=1)


@triton.jit
def find_axes(row_ptr, TILE: tl.constexpr):
    """Positions along a page's axis, lanes across it, and slabs of a page."""
    tokens = load_field(row_ptr, 2).to(tl.int32)
    if TILE.by_token:
        length, across = TILE.inner, tokens
    else:
        length, across = tokens, TILE.inner // TILE.unit
    slab = TILE.slab // TILE.unit
    return length, across, ((across + 1) // 2 + slab - 1) // slab


@triton.jit
def find_page(row_ptr, block, TILE: tl.constexpr):
    """Where a program works.

    The page's number in the chunk, its outer index and first position, its lanes of the lower half
    ``[1, 1, 1, lanes]``, and the positions and the lanes of an outer index.
    """
    length, across, slabs = find_axes(row_ptr, TILE)
    pages = (length + TILE.page - 1) // TILE.page
    page = block // slabs
    outer = page // pages
    first = (page - outer * pages) * TILE.page
    lane = tl.arange(0, TILE.lanes)[None, None, None, :]
    lane += (block % slabs) * (TILE.slab // TILE.unit)
    return page, outer, first, lane, length, across


@triton.jit
def first_of_group(TILE: tl.constexpr):
    """True in one place of each group and lane."""
    row = tl.arange(0, TILE.rows)[:, None, None, None]
    return (row == 0) & (tl.arange(0, TILE.steps)[None, None, :, None] == 0)


@triton.jit
def tile_group(batch, TILE: tl.constexpr):
    return batch * TILE.groups + tl.arange(0, TILE.groups)[None, :, None, None]


@triton.jit
def tile_positions(batch, first, length, TILE: tl.constexpr):
    """Positions ``[rows, groups, steps, 1]``, and which of them exist and are not repeated.

    Positions beyond a group repeat its last one, groups beyond the page its last one.
    """
    group = tile_group(batch, TILE)
    row = tl.arange(0, TILE.rows)[:, None, None, None]
    row += TILE.rows * tl.arange(0, TILE.steps)[None, None, :, None]
    repeated = (row >= TILE.group) | (group * TILE.group >= TILE.page)
    row = tl.minimum(row, TILE.group - 1)
    group = tl.minimum(group, TILE.page // TILE.group - 1)
    position = first + group * TILE.group + row
    return position, (position < length) & (repeated == 0)


@triton.jit
def tensor_ptr(row_ptr, outer, TILE: tl.constexpr):
    """To the lanes of an outer index of the chunk."""
    ptr = load_field(row_ptr, 0).to(tl.pointer_type(TILE.bits_type))
    return ptr + outer.to(tl.int64) * (load_field(row_ptr, 1) // TILE.unit)


@triton.jit
def tensor_offset(position, lane, TILE: tl.constexpr):
    """Of a lane, from the first one of its outer index. Below 2**31."""
    if TILE.by_token:
        return position + lane * TILE.inner
    else:
        return position * (TILE.inner // TILE.unit) + lane


@triton.jit
def payload_ptr(row_ptr, field: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """To the stream whose offset the field holds; lanes of 16 bits an element, or of 8."""
    address = load_field(row_ptr, 4) + load_field(row_ptr, field)
    if WIDE:
        return address.to(tl.pointer_type(TILE.bits_type))
    else:
        return address.to(tl.pointer_type(TILE.bytes_type))


@triton.jit
def align_residual(nbytes):
    return (nbytes + _RESIDUAL_ALIGNMENT - 1) // _RESIDUAL_ALIGNMENT * _RESIDUAL_ALIGNMENT
