"""SplitZip on 32 elements at once, for a codebook that is a run of 16 consecutive exponents.

Captures of real models have such codebooks, and then a code is one subtraction away from its
exponent (see kernels/reference/splitzip.py for the layout).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvz.kernels.cpu.simd import I8, I16, I32, I64, LANES, V8, V16, Emitter, splat

_HALF8, _HALF16 = ir.VectorType(I8, LANES // 2), ir.VectorType(I16, LANES // 2)


@intrinsic
def encode_run(
    typing_context: Any,
    data: Any,
    data_at: Any,
    sign_mantissa: Any,
    codes: Any,
    at: Any,
    lowest: Any,
) -> Any:
    """Encode ``data[data_at:data_at + 32]`` as elements ``at ...``, ``at`` even.

    Bit i of the result: element i is an escape.

    ``lowest`` uint16[1] is the lowest exponent of the codebook.
    """
    names = "data data_at sign_mantissa codes at lowest"

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(context, builder, sig, args, names)
        at = e.value("at")
        packed, exponent = e.split_bf16(e.load("data", e.value("data_at"), V16))
        e.store(packed, "sign_mantissa", at)
        difference = builder.sub(exponent, e.broadcast("lowest", ir.Constant(I64, 0)))
        known = builder.icmp_unsigned("<", difference, splat(16))
        code = builder.trunc(builder.select(known, difference, splat(0)), V8)
        pairs = builder.bitcast(code, _HALF16)
        high = builder.lshr(pairs, ir.Constant(_HALF16, [4] * (LANES // 2)))
        nibbles = builder.trunc(builder.or_(pairs, high), _HALF8)
        e.store(nibbles, "codes", builder.lshr(at, ir.Constant(I64, 1)))
        return builder.bitcast(builder.not_(known), I32)

    return types.uint32(data, types.int64, sign_mantissa, codes, types.int64, lowest), codegen


@intrinsic
def decode_run(
    typing_context: Any,
    sign_mantissa: Any,
    codes: Any,
    at: Any,
    lowest: Any,
    data: Any,
    data_at: Any,
) -> Any:
    """Decode elements ``at ... at + 31``, ``at`` even, to ``data[data_at]``, escapes aside."""
    names = "sign_mantissa codes at lowest data data_at"

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(context, builder, sig, args, names)
        at = e.value("at")
        nibbles = e.load("codes", builder.lshr(at, ir.Constant(I64, 1)), _HALF8)
        wide = builder.zext(nibbles, _HALF16)
        pairs = builder.or_(wide, builder.shl(wide, ir.Constant(_HALF16, [4] * (LANES // 2))))
        code = builder.and_(builder.bitcast(pairs, V8), splat(15, V8))
        lowest = e.broadcast("lowest", ir.Constant(I64, 0))
        exponent = e.shift(builder.add(builder.zext(code, V16), lowest), 7)
        value = e.spread_sign_mantissa(e.load("sign_mantissa", at, V8))
        e.store(builder.or_(value, exponent), "data", e.value("data_at"))
        return context.get_dummy_value()

    return types.void(sign_mantissa, codes, types.int64, lowest, data, types.int64), codegen
