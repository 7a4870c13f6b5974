"""GAAC on 32 columns of a tile at once (see kernels/reference/gaac.py for the layout)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvz.kernels.cpu.simd import I32, I64, MASK, V8, V16, Emitter, splat

_ROWS = 8


def _select_base(e: Emitter, low: ir.Value, high: ir.Value, bases: list[ir.Value]) -> ir.Value:
    """The base of each lane by its tag ``2 * high + low``; zero for raw groups."""
    b = e.builder
    return b.select(high, b.select(low, splat(0), bases[2]), b.select(low, bases[1], bases[0]))


def _load_bases(e: Emitter) -> list[ir.Value]:
    stride = e.value("base_stride")
    return [e.load("bases", e.row(e.value("base_at"), stride, i), V16) for i in range(3)]


@intrinsic
def encode_columns(
    typing_context: Any,
    data: Any,
    data_at: Any,
    sign_mantissa: Any,
    packed_at: Any,
    columns: Any,
    bases: Any,
    base_at: Any,
    base_stride: Any,
    narrow: Any,
    low: Any,
    group: Any,
    plane2: Any,
    plane3: Any,
    plane_at: Any,
) -> Any:
    """Encode 8 rows of 32 columns at ``data[data_at]``; returns tag bits, low halves in bits 0-31.

    ``bases`` uint16[3 * base_stride]; planes 2 and 3 of all columns go to the scratch arrays.
    """
    names = (
        "data data_at sign_mantissa packed_at columns bases base_at base_stride narrow low group"
        " plane2 plane3 plane_at"
    )

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(context, builder, sig, args, names)
        b = e.builder
        bases = _load_bases(e)
        exponents = []
        spans = [splat(0)] * 3
        for t in range(_ROWS):
            at = e.row(e.value("data_at"), e.value("columns"), t)
            packed, exponent = e.split_bf16(e.load("data", at, V16))
            e.store(packed, "sign_mantissa", e.row(e.value("packed_at"), e.value("columns"), t))
            exponents.append(exponent)
            # all differences are below a power of two exactly when their OR is
            spans = [
                b.or_(span, b.sub(exponent, base)) for span, base in zip(spans, bases, strict=True)
            ]
        fits = [
            b.icmp_unsigned("<", span, splat(size))
            for span, size in zip(spans, (4, 8, 16), strict=True)
        ]
        all_lanes, no_lanes = ir.Constant(MASK, [1] * 32), ir.Constant(MASK, [0] * 32)
        beyond2 = b.not_(b.and_(fits[0], b.select(e.value("narrow"), all_lanes, no_lanes)))
        high = b.and_(beyond2, b.not_(fits[1]))
        raw = b.and_(high, b.not_(fits[2]))
        low = b.or_(b.and_(beyond2, fits[1]), raw)

        base = _select_base(e, low, high, bases)
        low_planes = plane2 = plane3 = splat(0)
        for t, exponent in enumerate(exponents):
            code = b.sub(exponent, base)
            low_planes = b.or_(low_planes, e.shift(b.and_(code, splat(3)), 2 * t))
            plane2 = b.or_(plane2, e.shift(b.and_(code, splat(4)), t - 2))
            plane3 = b.or_(plane3, e.shift(b.and_(code, splat(8)), t - 3))
        e.store(low_planes, "low", e.value("group"))
        e.store(b.trunc(plane2, V8), "plane2", e.value("plane_at"))
        e.store(b.trunc(plane3, V8), "plane3", e.value("plane_at"))
        low64, high64 = (b.zext(b.bitcast(half, I32), I64) for half in (low, high))
        return b.or_(low64, b.shl(high64, ir.Constant(I64, 32)))

    i64 = types.int64
    return types.uint64(
        data, i64, sign_mantissa, i64, i64, bases, i64, i64, types.boolean,
        low, i64, plane2, plane3, i64,
    ), codegen  # fmt: skip


def _decode_columns(narrow: bool) -> Any:
    names = (
        "sign_mantissa packed_at data data_at columns low plane2 group escapes escape2 escape3"
        " tag_low tag_high bases base_at base_stride"
    )

    @intrinsic
    def decode_columns(
        typing_context: Any,
        sign_mantissa: Any,
        packed_at: Any,
        data: Any,
        data_at: Any,
        columns: Any,
        low: Any,
        plane2: Any,
        group: Any,
        escapes: Any,
        escape2: Any,
        escape3: Any,
        tag_low: Any,
        tag_high: Any,
        bases: Any,
        base_at: Any,
        base_stride: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emitter(context, builder, sig, args, names)
            b = e.builder
            tag_low, tag_high = e.mask(e.value("tag_low")), e.mask(e.value("tag_high"))
            low = e.load("low", e.value("group"), V16)
            if narrow:
                plane2 = e.expand("escapes", e.value("escape2"), b.or_(tag_low, tag_high))
            else:
                plane2 = e.load("plane2", e.value("group"), V8)
            plane2 = b.zext(plane2, V16)
            plane3 = b.zext(e.expand("escapes", e.value("escape3"), tag_high), V16)
            base = e.shift(_select_base(e, tag_low, tag_high, _load_bases(e)), 7)
            for t in range(_ROWS):
                at = e.row(e.value("packed_at"), e.value("columns"), t)
                value = e.spread_sign_mantissa(e.load("sign_mantissa", at, V8))
                code = b.or_(e.bits(low, 7 - 2 * t, 0x180), e.bits(plane2, 9 - t, 0x200))
                code = b.or_(code, e.bits(plane3, 10 - t, 0x400))
                at = e.row(e.value("data_at"), e.value("columns"), t)
                e.store(b.or_(value, b.add(code, base)), "data", at)
            return context.get_dummy_value()

        i64, u32 = types.int64, types.uint32
        return types.void(
            sign_mantissa, i64, data, i64, i64, low, plane2, i64,
            escapes, i64, i64, u32, u32, bases, i64, i64,
        ), codegen  # fmt: skip

    return decode_columns


#: Decode 8 rows of 32 columns into ``data[data_at]``; raw groups still lack planes 4-7.
#: ``escape2`` and ``escape3`` are where the columns' planes 2 and 3 start in ``escapes``.
decode_columns_narrow = _decode_columns(narrow=True)
decode_columns_wide = _decode_columns(narrow=False)
