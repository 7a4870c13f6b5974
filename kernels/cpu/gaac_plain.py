"""GAAC column by column: what the vector path leaves over, and the whole work without it.

Arguments as in kernels/cpu/gaac.py; offsets into flat arrays end in ``_at``.
"""

from __future__ import annotations

from numba import njit, uint8, uint16, uint32, uint64

_ROWS = 8


@njit(nogil=True, cache=True)
def encode_columns_plain(
    data, data_at, sign_mantissa, packed_at, remaining, first, columns, bases, base_at, base_row,
    base_stride, narrow, low, group, plane2, plane3, tags, tag_at, tag_len,
):  # fmt: skip
    """Columns ``first ...`` of the tile at ``data[data_at]``, ``remaining`` elements are left.

    Returns 1 if one of their groups is raw, else 0.
    """
    any_raw = uint64(0)
    for byte in range(first >> 3, tag_len):
        tags[tag_at + byte] = 0
        tags[tag_at + tag_len + byte] = 0
    for c in range(first, columns):
        span2, span3, span4 = uint32(0), uint32(0), uint32(0)
        for r in range(_ROWS):
            cell = r * columns + c
            if cell < remaining:
                bits = uint32(data[data_at + cell])
                sign_mantissa[packed_at + cell] = uint8(((bits >> 8) & 0x80) | (bits & 0x7F))
                exponent = (bits >> uint32(7)) & uint32(0xFF)
                b = base_at + r * base_row + c
                span2 |= uint32(exponent - uint32(bases[b]))
                span3 |= uint32(exponent - uint32(bases[b + base_stride]))
                span4 |= uint32(exponent - uint32(bases[b + 2 * base_stride]))
        if narrow and span2 < 4:
            tag = 0
        elif span3 < 8:
            tag = 1
        elif span4 < 16:
            tag = 2
        else:
            tag = 3
            any_raw = uint64(1)
        tags[tag_at + (c >> 3)] |= uint8((tag & 1) << (c & 7))
        tags[tag_at + tag_len + (c >> 3)] |= uint8((tag >> 1) << (c & 7))
        word, p2, p3 = uint32(0), uint32(0), uint32(0)
        for r in range(_ROWS):
            cell = r * columns + c
            if cell < remaining:
                code = (uint32(data[data_at + cell]) >> uint32(7)) & uint32(0xFF)
                if tag < 3:
                    code -= uint32(bases[base_at + r * base_row + c + tag * base_stride])
                word |= (code & uint32(3)) << uint32(2 * r)
                p2 |= ((code >> uint32(2)) & uint32(1)) << uint32(r)
                p3 |= ((code >> uint32(3)) & uint32(1)) << uint32(r)
        low[group + c] = uint16(word)
        plane2[c] = uint8(p2)
        plane3[c] = uint8(p3)
    return any_raw


@njit(nogil=True, cache=True)
def emit_raw(data, data_at, remaining, columns, tags, tag_at, tag_len, escapes, position):
    """Append planes 4-7 of every raw group."""
    for byte in range(tag_len):
        raw = tags[tag_at + byte] & tags[tag_at + tag_len + byte]
        if raw == 0:
            continue
        for c in range(8 * byte, min(columns, 8 * byte + 8)):
            if (raw >> (c & 7)) & 1:
                for plane in range(4):
                    bits = 0
                    for r in range(_ROWS):
                        cell = r * columns + c
                        if cell < remaining:
                            bits |= ((data[data_at + cell] >> (11 + plane)) & 1) << r
                    escapes[position + plane] = uint8(bits)
                position += 4
    return position


@njit(nogil=True, cache=True)
def decode_columns_plain(
    sign_mantissa, packed_at, data, data_at, remaining, first, columns, low, plane2, group,
    escapes, escape2, escape3, tags, tag_at, tag_len, bases, base_at, base_row, base_stride, narrow,
):  # fmt: skip
    for c in range(first, columns):
        tag_low = (tags[tag_at + (c >> 3)] >> (c & 7)) & 1
        tag_high = (tags[tag_at + tag_len + (c >> 3)] >> (c & 7)) & 1
        tag = tag_low + 2 * tag_high
        word, p2, p3 = uint32(low[group + c]), uint32(0), uint32(0)
        if not narrow:
            p2 = uint32(plane2[group + c])
        elif tag:
            p2 = uint32(escapes[escape2])
            escape2 += 1
        if tag_high:
            p3 = uint32(escapes[escape3])
            escape3 += 1
        for r in range(_ROWS):
            cell = r * columns + c
            if cell < remaining:
                code = (word >> uint32(2 * r)) & uint32(3)
                code |= ((p2 >> uint32(r)) & uint32(1)) << uint32(2)
                code |= ((p3 >> uint32(r)) & uint32(1)) << uint32(3)
                if tag < 3:
                    code += uint32(bases[base_at + r * base_row + c + tag * base_stride])
                packed = uint32(sign_mantissa[packed_at + cell])
                data[data_at + cell] = uint16(
                    ((packed & uint32(0x80)) << uint32(8))
                    | (packed & uint32(0x7F))
                    | (code << uint32(7))
                )


@njit(nogil=True, cache=True)
def add_raw_planes(data, data_at, remaining, columns, tags, tag_at, tag_len, escapes, position):
    for byte in range(tag_len):
        raw = tags[tag_at + byte] & tags[tag_at + tag_len + byte]
        if raw == 0:
            continue
        for c in range(8 * byte, min(columns, 8 * byte + 8)):
            if (raw >> (c & 7)) & 1:
                for r in range(_ROWS):
                    cell = r * columns + c
                    if cell < remaining:
                        for plane in range(4):
                            bit = (uint32(escapes[position + plane]) >> uint32(r)) & uint32(1)
                            data[data_at + cell] |= uint16(bit << uint32(11 + plane))
                position += 4
