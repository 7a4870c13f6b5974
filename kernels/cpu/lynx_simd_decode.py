"""Decoding Lynx on 32 channels of each half at once (code: kernels/reference/lynx.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvz.kernels.cpu.lynx_simd import VF, Pair, Vectors, splat_floats, splat_words
from kvz.kernels.cpu.simd import V8, V16, splat


class _Decoding(NamedTuple):
    """Parameters of 16 channels of a group; offset and step are integers."""

    minimum: ir.Value
    scale: ir.Value
    offset: ir.Value
    step: ir.Value

    def linear(self, b: ir.IRBuilder, code: ir.Value) -> ir.Value:
        # exact, so it may be done in floats: integers below 2^17, times a power of two
        step = b.fmul(b.sitofp(self.step, VF), splat_floats(2.0**-16))
        offset = b.fmul(b.sitofp(self.offset, VF), splat_floats(2.0**-8))
        return self._value(b, b.fadd(b.fmul(b.sitofp(code, VF), step), offset))

    def companded(self, b: ir.IRBuilder, level: ir.Value) -> ir.Value:
        number = b.add(b.shl(self.offset, splat_words(16)), b.mul(self.step, level))
        return self._value(b, b.fmul(b.sitofp(number, VF), splat_floats(2.0**-24)))

    def _value(self, b: ir.IRBuilder, fraction: ir.Value) -> ir.Value:
        return b.fadd(self.minimum, b.fmul(self.scale, fraction))


def _group_decoding(e: Vectors, column: ir.Value) -> list[_Decoding]:
    b = e.builder
    page_at = b.add(e.value("page_at"), column)
    group_at = b.add(e.value("group_at"), column)
    minima = e.bf16_to_floats(e.load("pages", page_at, V16))
    scale_bits = e.load("pages", b.add(page_at, e.value("channels")), V16)
    # constant channels keep their bits: -0 times 0 added changes no minimum, not even -0
    constant = b.icmp_unsigned("==", scale_bits, splat(0))
    scales = e.bf16_to_floats(b.select(constant, splat(-0x8000), scale_bits))
    bytes_at = (group_at, b.add(group_at, e.value("channels")))
    offsets, steps = (
        e.split(b.select(constant, splat(0), b.zext(e.load("groups", at, V8), V16)))
        for at in bytes_at
    )
    return [_Decoding(*lanes) for lanes in zip(minima, scales, offsets, steps, strict=True)]


def _midpoint(b: ir.IRBuilder, anchor: ir.Value) -> ir.Value:
    """The code in the middle of an anchor's 16; of the outermost anchors 6 codes further out."""
    middle = b.add(b.shl(anchor, splat(4, V8)), splat(8, V8))
    middle = b.sub(middle, b.lshr(anchor, splat(3, V8)))
    for end, correction in ((0, -6), (15, 6)):
        is_end = b.icmp_unsigned("==", anchor, splat(end, V8))
        middle = b.add(middle, b.select(is_end, splat(correction, V8), splat(0, V8)))
    return middle


def _decode_group(full: bool, linear: bool) -> Any:
    names = (
        "start end channels half column pages page_at groups group_at anchors residuals packed_at"
        " table data data_at"
    )

    @intrinsic
    def decode_group(
        typing_context: Any,
        start: Any,
        end: Any,
        channels: Any,
        half: Any,
        column: Any,
        pages: Any,
        page_at: Any,
        groups: Any,
        group_at: Any,
        anchors: Any,
        residuals: Any,
        packed_at: Any,
        table: Any,
        data: Any,
        data_at: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Vectors(context, builder, sig, args, names)
            b = e.builder
            column = e.value("column")
            columns = (column, b.add(column, e.value("half")))
            decodings = [_group_decoding(e, column) for column in columns]
            four, fifteen = splat(4, V8), splat(15, V8)
            with e.tokens() as token:
                row = b.sub(token, e.value("start"))
                at = b.add(e.value("packed_at"), b.mul(row, e.value("half")))
                at = b.add(at, e.value("column"))
                anchor = e.load("anchors", at, V8)
                if full:
                    residual = e.load("residuals", at, V8)
                    lower = b.or_(b.shl(anchor, four), b.and_(residual, fifteen))
                    upper = b.or_(b.and_(anchor, splat(0xF0, V8)), b.lshr(residual, four))
                else:
                    lower, upper = b.and_(anchor, fifteen), b.lshr(anchor, four)
                    if linear:
                        lower, upper = _midpoint(b, lower), _midpoint(b, upper)
                for column, decoding, code in zip(columns, decodings, (lower, upper), strict=True):
                    words = e.split(b.zext(code, V16))
                    values = [
                        d.linear(b, w) if linear else d.companded(b, e.look_up("table", w))
                        for d, w in zip(decoding, words, strict=True)
                    ]
                    at = b.add(e.value("data_at"), b.mul(token, e.value("channels")))
                    e.store(e.floats_to_bf16(Pair(*values)), "data", b.add(at, column))
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(
            i64, i64, i64, i64, i64, pages, i64, groups, i64, anchors, residuals, i64, table,
            data, i64,
        ), codegen  # fmt: skip

    return decode_group


#: Decode channels ``column ...`` and ``column + half ...`` from both halves of their codes, or from
#: anchors alone. Minima and scales must be finite. ``data_at``: where token 0 lies. The linear ones
#: take ``table`` to be that of the linear code.
decode_linear = _decode_group(full=True, linear=True)
decode_linear_anchor = _decode_group(full=False, linear=True)
decode_by_table = _decode_group(full=True, linear=False)
decode_by_table_anchor = _decode_group(full=False, linear=False)
