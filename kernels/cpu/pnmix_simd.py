"""Decoding PN-Mix on 32 channels at once (code: kernels/reference/pnmix.py)."""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvz.kernels.cpu.lynx_simd import VF, Pair, Vectors
from kvz.kernels.cpu.simd import I32, I64, LANES, V8, V16

#: Blocks ask for no special instruction.
USE_VECTORS = not os.environ.get("KVZ_NO_SIMD")
#: Channels of a block.
BLOCK = LANES
OCTET = 8
#: One byte for each channel, 8 of them in a word.
_VQ = ir.VectorType(I64, LANES // 8)
_LOWEST_BITS = 0x0101010101010101


def _words(value: int) -> ir.Constant:
    return ir.Constant(_VQ, [value] * _VQ.count)


def _splat(builder: ir.IRBuilder, vector: ir.VectorType, value: ir.Value) -> ir.Value:
    lanes = ir.Constant(vector, ir.Undefined)
    for lane in range(vector.count):
        lanes = builder.insert_element(lanes, value, I32(lane))
    return lanes


def _no_codes(e: Vectors) -> list[ir.Value]:
    """Codes of 8 tokens, all zero."""
    codes = [cgutils.alloca_once(e.builder, _VQ) for _ in range(OCTET)]
    for code in codes:
        e.builder.store(_words(0), code)
    return codes


def _add_planes(
    e: Vectors, codes: list[ir.Value], first: ir.Value, count: ir.Value, array: str, at: ir.Value
) -> None:
    """Set bits ``first ...`` of the codes of 8 tokens from ``count`` planes of ``array``."""
    b = e.builder
    with cgutils.for_range(b, count) as loop:
        row = b.add(at, b.mul(loop.index, e.value("channels")))
        plane = e.load(array, row, _VQ)
        place = _splat(b, _VQ, b.add(first, loop.index))
        for token, code in enumerate(codes):
            bits = b.and_(b.lshr(plane, _words(token)), _words(_LOWEST_BITS))
            b.store(b.or_(b.load(code), b.shl(bits, place)), code)


def _store_values(e: Vectors, code: ir.Value, start: Pair, step: Pair, at: ir.Value) -> None:
    """Values of one token's codes to ``data[at:]``."""
    b = e.builder
    words = e.split(b.zext(b.bitcast(b.load(code), V8), V16))
    values = [
        b.fadd(z, b.fmul(s, b.sitofp(word, VF)))
        for z, s, word in zip(start, step, words, strict=True)
    ]
    e.store(e.floats_to_bf16(Pair(*values)), "data", at)


@intrinsic
def decode_block(
    typing_context: Any,
    low: Any,
    low_at: Any,
    low_bits: Any,
    high: Any,
    high_bits: Any,
    column: Any,
    start: Any,
    step: Any,
    scale_at: Any,
    data: Any,
    data_at: Any,
    channels: Any,
) -> Any:
    """Channels ``column ...`` of 8 tokens, scales of each channel.

    ``low`` and ``high`` hold ``low_bits`` and ``high_bits - low_bits`` planes, each of all
    ``channels``. Starts and steps must be finite.
    """
    names = "low low_at low_bits high high_bits column start step scale_at data data_at channels"

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Vectors(context, builder, sig, args, names)
        column, low_bits = e.value("column"), e.value("low_bits")
        codes = _no_codes(e)
        low_at = builder.add(e.value("low_at"), column)
        _add_planes(e, codes, ir.Constant(I64, 0), low_bits, "low", low_at)
        count = builder.sub(e.value("high_bits"), low_bits)
        _add_planes(e, codes, low_bits, count, "high", column)
        scale_at = builder.add(e.value("scale_at"), column)
        starts, steps = (e.load_floats(name, scale_at) for name in ("start", "step"))
        at = builder.add(e.value("data_at"), column)
        for code in codes:
            _store_values(e, code, starts, steps, at)
            at = builder.add(at, e.value("channels"))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(low, i64, i64, high, i64, i64, start, step, i64, data, i64, i64), codegen


@intrinsic
def decode_row_block(
    typing_context: Any,
    planes: Any,
    planes_at: Any,
    bits: Any,
    column: Any,
    start: Any,
    step: Any,
    scale_at: Any,
    scale_stride: Any,
    data: Any,
    data_at: Any,
    channels: Any,
) -> Any:
    """The same with scales of each token, ``scale_stride`` apart."""
    names = "planes planes_at bits column start step scale_at scale_stride data data_at channels"

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Vectors(context, builder, sig, args, names)
        codes = _no_codes(e)
        planes_at = builder.add(e.value("planes_at"), e.value("column"))
        _add_planes(e, codes, ir.Constant(I64, 0), e.value("bits"), "planes", planes_at)
        scale_at = e.value("scale_at")
        at = builder.add(e.value("data_at"), e.value("column"))
        for code in codes:
            scales = [
                _splat(builder, VF, e.load(name, scale_at, VF.element))
                for name in ("start", "step")
            ]
            starts, steps = (Pair(scale, scale) for scale in scales)
            _store_values(e, code, starts, steps, at)
            scale_at = builder.add(scale_at, e.value("scale_stride"))
            at = builder.add(at, e.value("channels"))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(planes, i64, i64, i64, start, step, i64, i64, data, i64, i64), codegen
