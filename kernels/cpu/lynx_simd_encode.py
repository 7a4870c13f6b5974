"""Encoding Lynx on 32 channels of each half at once (code: kernels/reference/lynx.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvz.kernels.cpu.lynx_plain import (
    BUCKET_SHIFT,
    MAX_ORDERED,
    MIN_SCALE,
    NUM_BUCKETS,
    WIDEN,
)
from kvz.kernels.cpu.lynx_simd import VF, VW, Pair, Vectors, splat_floats, splat_words
from kvz.kernels.cpu.simd import V8, V16, splat

#: Adding it to a float from 0 to 2^22 rounds to an integer, to nearest even, in the lowest bits.
_ROUNDER = float(1 << 23)


class _Range:
    """Running ordered minimum and maximum of 32 channels."""

    def __init__(self, e: Vectors) -> None:
        self._e = e
        self._low = cgutils.alloca_once(e.builder, V16)
        self._high = cgutils.alloca_once(e.builder, V16)
        e.builder.store(splat(0x7FFF), self._low)
        e.builder.store(splat(-0x8000), self._high)

    def add(self, low: ir.Value, high: ir.Value) -> None:
        b = self._e.builder
        b.store(self._e.smaller(low, b.load(self._low)), self._low)
        b.store(self._e.larger(high, b.load(self._high)), self._high)

    def ends(self) -> tuple[ir.Value, ir.Value]:
        return self._e.builder.load(self._low), self._e.builder.load(self._high)


@intrinsic
def group_range(
    typing_context: Any,
    data: Any,
    data_at: Any,
    start: Any,
    end: Any,
    first_coded: Any,
    channels: Any,
    low: Any,
    high: Any,
    at: Any,
) -> Any:
    """Ordered minimum and maximum of 32 channels over tokens ``start ... end - 1``."""
    names = "data data_at start end first_coded channels low high at"

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Vectors(context, builder, sig, args, names)
        seen = _Range(e)
        with e.tokens() as token:
            lanes = e.order(e.load("data", e.row_at(token), V16))
            seen.add(lanes, lanes)
        for ordered, array in zip(seen.ends(), ("low", "high"), strict=True):
            e.store(ordered, array, e.value("at"))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(data, i64, i64, i64, i64, i64, low, high, i64), codegen


@intrinsic
def page_parameters(
    typing_context: Any,
    low: Any,
    high: Any,
    num_groups: Any,
    channels: Any,
    column: Any,
    pages: Any,
    page_at: Any,
    minimum: Any,
    reciprocal: Any,
) -> Any:
    """Minimum and scale of 32 channels from the ranges of the groups; whether they can be coded."""
    names = "low high num_groups channels column pages page_at minimum reciprocal"

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Vectors(context, builder, sig, args, names)
        b = e.builder
        column = e.value("column")
        seen = _Range(e)
        with cgutils.for_range(b, e.value("num_groups")) as loop:
            at = b.add(b.mul(loop.index, e.value("channels")), column)
            seen.add(e.load("low", at, V16), e.load("high", at, V16))
        low, high = seen.ends()
        # the order holds for infinities and NaN too: they lie at the ends
        within = b.and_(
            b.icmp_signed(">=", low, splat(-MAX_ORDERED)),
            b.icmp_signed("<", high, splat(MAX_ORDERED)),
        )
        usable = e.all(within)
        minimum_bits = e.order(low)
        minima, maxima = e.bf16_to_floats(minimum_bits), e.bf16_to_floats(e.order(high))
        scales, reciprocals = [], []
        for least, most in zip(minima, maxima, strict=True):
            spread = b.fmul(b.fsub(most, least), splat_floats(float(WIDEN)))
            rounded = b.add(b.bitcast(spread, VW), splat_words(0xFFFF))
            divisor = b.bitcast(b.and_(rounded, splat_words(0xFFFF0000)), VF)
            constant = b.fcmp_ordered("==", divisor, splat_floats(0))
            large = b.fcmp_ordered(">=", divisor, splat_floats(float(MIN_SCALE)))
            usable = b.and_(usable, e.all(b.or_(constant, large)))
            quotient = b.fdiv(splat_floats(65536), divisor)
            scales.append(b.lshr(rounded, splat_words(16)))
            reciprocals.append(b.select(constant, splat_floats(0), quotient))
        at = b.add(e.value("page_at"), column)
        e.store(minimum_bits, "pages", at)
        e.store(e.join(Pair(*scales)), "pages", b.add(at, e.value("channels")))
        e.store_floats(minima, "minimum", column)
        e.store_floats(Pair(*reciprocals), "reciprocal", column)
        return usable

    i64 = types.int64
    return types.boolean(low, high, i64, i64, i64, pages, i64, minimum, reciprocal), codegen


class _Coding(NamedTuple):
    """Turns elements into codes: the units ``(x - minimum) * reciprocal``, less ``shift``, times
    ``factor``; ``offset`` and ``step`` (integers) are what is stored of a group."""

    minimum: ir.Value
    reciprocal: ir.Value
    offset: ir.Value
    step: ir.Value
    shift: ir.Value
    factor: ir.Value

    def linear(self, e: Vectors, elements: ir.Value) -> ir.Value:
        """The code in the low byte; at most 255, see the module kernels/cpu/lynx.py."""
        b = e.builder
        rest = b.fsub(_units(b, elements, self.minimum, self.reciprocal), self.shift)
        return b.bitcast(b.fadd(b.fmul(rest, self.factor), splat_floats(_ROUNDER)), VW)

    def companded(self, e: Vectors, elements: ir.Value) -> ir.Value:
        b = e.builder
        rest = b.fsub(_units(b, elements, self.minimum, self.reciprocal), self.shift)
        scaled = b.fmul(e.call("fabs", rest), self.factor)
        bucket = b.lshr(b.bitcast(scaled, VW), splat_words(BUCKET_SHIFT))
        last = splat_words(NUM_BUCKETS - 1)
        bucket = b.select(b.icmp_unsigned("<", bucket, last), bucket, last)
        magnitude = e.look_up("buckets", bucket)
        threshold = b.bitcast(e.look_up("thresholds", magnitude), VF)
        beyond = b.zext(b.fcmp_ordered("<=", threshold, scaled), VW)
        code = b.add(b.add(magnitude, beyond), splat_words(7))
        complement = b.select(
            b.fcmp_ordered("<", rest, splat_floats(0)), splat_words(0xF0), splat_words(0)
        )
        return b.xor(code, complement)


def _units(
    b: ir.IRBuilder, elements: ir.Value, minimum: ir.Value, reciprocal: ir.Value
) -> ir.Value:
    return b.fmul(b.fsub(elements, minimum), reciprocal)


def _totals(e: Vectors, column: ir.Value, minima: Pair, reciprocals: Pair) -> Pair:
    """Sums of the units of 32 channels, each rounded down: below 2^31 in a group of 2^15 tokens."""
    b = e.builder
    totals = [cgutils.alloca_once(b, VW) for _ in range(2)]
    for total in totals:
        b.store(splat_words(0), total)
    with e.tokens() as token:
        elements = e.bf16_to_floats(e.load("data", b.add(e.row_at(token), column), V16))
        for total, *lanes in zip(totals, elements, minima, reciprocals, strict=True):
            b.store(b.add(b.load(total), b.fptosi(_units(b, *lanes), VW)), total)
    return Pair(*(b.load(total) for total in totals))


def _linear_parameters(e: Vectors, low: ir.Value, high: ir.Value) -> tuple[ir.Value, ...]:
    """Offset, shift, step and factor from the least and greatest units."""
    b = e.builder
    offset = e.call("floor", b.fmul(low, splat_floats(1 / 256)))
    shift = b.fmul(offset, splat_floats(256))
    step = e.call("ceil", b.fdiv(b.fsub(high, shift), splat_floats(255)))
    step = b.select(b.fcmp_ordered("<", step, splat_floats(255)), step, splat_floats(255))
    return b.fptosi(offset, VW), shift, step, _inverse(b, step)


def _companded_parameters(
    e: Vectors, low: ir.Value, high: ir.Value, total: ir.Value
) -> tuple[ir.Value, ...]:
    b = e.builder
    count = b.trunc(b.sub(e.value("end"), e.value("start")), VW.element)
    counts = ir.Constant(VW, ir.Undefined)
    for lane in range(VW.count):
        counts = b.insert_element(counts, count, VW.element(lane))
    half = b.mul(counts, splat_words(256))
    offset = b.udiv(b.add(b.add(total, total), half), b.add(half, half))
    shift = b.fmul(b.sitofp(offset, VF), splat_floats(256))
    below, above = (e.call("fabs", b.fsub(end, shift)) for end in (low, high))
    reach = b.select(b.fcmp_ordered("<", below, above), above, below)
    step = e.call("ceil", b.fmul(reach, splat_floats(1 / 256)))
    return offset, shift, step, b.fmul(_inverse(b, step), splat_floats(1 / 256))


def _inverse(b: ir.IRBuilder, step: ir.Value) -> ir.Value:
    is_zero = b.fcmp_ordered("==", step, splat_floats(0))
    return b.select(is_zero, splat_floats(0), b.fdiv(splat_floats(1), step))


def _group_coding(e: Vectors, column: ir.Value, linear: bool) -> list[_Coding]:
    """Compute and store offset and step of 32 channels; what codes their even and odd lanes."""
    b = e.builder
    at = b.add(e.value("range_at"), column)
    ends = [e.bf16_to_floats(e.order(e.load(name, at, V16))) for name in ("low", "high")]
    minima, reciprocals = (e.load_floats(name, column) for name in ("minimum", "reciprocal"))
    totals = None if linear else _totals(e, column, minima, reciprocals)
    codings = []
    for lane, (minimum, reciprocal) in enumerate(zip(minima, reciprocals, strict=True)):
        low, high = (_units(b, end[lane], minimum, reciprocal) for end in ends)
        if totals is None:
            offset, shift, step, factor = _linear_parameters(e, low, high)
        else:
            offset, shift, step, factor = _companded_parameters(e, low, high, totals[lane])
        step = b.fptosi(step, VW)
        codings.append(_Coding(minimum, reciprocal, offset, step, shift, factor))
    at = b.add(e.value("group_at"), column)
    for values in (Pair(*(c.offset for c in codings)), Pair(*(c.step for c in codings))):
        e.store(b.trunc(e.join(values), V8), "groups", at)
        at = b.add(at, e.value("channels"))
    return codings


def _encode_group(linear: bool) -> Any:
    names = (
        "data data_at start end first_coded channels half column low high range_at minimum"
        " reciprocal thresholds buckets groups group_at anchors residuals packed_at"
    )

    @intrinsic
    def encode_group(
        typing_context: Any,
        data: Any,
        data_at: Any,
        start: Any,
        end: Any,
        first_coded: Any,
        channels: Any,
        half: Any,
        column: Any,
        low: Any,
        high: Any,
        range_at: Any,
        minimum: Any,
        reciprocal: Any,
        thresholds: Any,
        buckets: Any,
        groups: Any,
        group_at: Any,
        anchors: Any,
        residuals: Any,
        packed_at: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Vectors(context, builder, sig, args, names)
            b = e.builder
            column = e.value("column")
            columns = (column, b.add(column, e.value("half")))
            codings = [_group_coding(e, column, linear) for column in columns]
            with e.tokens() as token:
                codes = []
                for column, coding in zip(columns, codings, strict=True):
                    lanes = e.load("data", b.add(e.row_at(token), column), V16)
                    elements = e.bf16_to_floats(lanes)
                    even, odd = (
                        c.linear(e, x) if linear else c.companded(e, x)
                        for c, x in zip(coding, elements, strict=True)
                    )
                    codes.append(e.join(Pair(even, odd)))
                lower, upper = codes
                anchor = b.or_(b.lshr(lower, splat(4)), b.and_(upper, splat(0xF0)))
                residual = b.or_(b.and_(lower, splat(15)), b.shl(upper, splat(4)))
                row = b.sub(token, e.value("start"))
                at = b.add(e.value("packed_at"), b.mul(row, e.value("half")))
                at = b.add(at, e.value("column"))
                e.store(b.trunc(anchor, V8), "anchors", at)
                e.store(b.trunc(residual, V8), "residuals", at)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(
            data, i64, i64, i64, i64, i64, i64, i64, low, high, i64, minimum, reciprocal,
            thresholds, buckets, groups, i64, anchors, residuals, i64,
        ), codegen  # fmt: skip

    return encode_group


#: Offsets, steps and codes of channels ``column ...`` and ``column + half ...`` of the tokens
#: ``start ... end - 1``, which are one group. No two thresholds may lie in one bucket.
encode_linear = _encode_group(linear=True)
encode_companded = _encode_group(linear=False)
