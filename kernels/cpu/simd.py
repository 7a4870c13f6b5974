"""Explicit 32-lane vector operations for the numba kernels.

LLVM vectors are written through :func:`numba.extending.intrinsic`, because LLVM's own vectoriser
gives up on the compressed streams: where a byte goes depends on how many went before it. The IR is
portable; it is *fast* only where bytes can be expanded and compressed in one instruction
(AVX-512 VBMI2), so the kernels take it only if :data:`HAVE_SIMD` says so and otherwise run their
plain loops. Both paths write the same bytes.

Offsets are counted in elements of the array that they index. Loads and stores are unaligned.
"""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 32
#: Bytes that a compressing store may write past the data it was asked to write.
STORE_SLACK = LANES

HAVE_SIMD = bool(llvm.get_host_cpu_features().get("avx512vbmi2")) and not os.environ.get(
    "KVZ_NO_SIMD"
)

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
V8, V16, MASK = (ir.VectorType(ty, LANES) for ty in (I8, I16, I1))


def splat(value: int, ty: ir.VectorType = V16) -> ir.Constant:
    return ir.Constant(ty, [value] * LANES)


class Emitter:
    """Emits vector IR for the body of one intrinsic whose arguments have the given names."""

    def __init__(self, context: Any, builder: ir.IRBuilder, sig: Any, args: Any, names: str):
        self.builder = builder
        self._context = context
        self._arguments = {
            name: (ty, value) for name, ty, value in zip(names.split(), sig.args, args, strict=True)
        }

    def value(self, name: str) -> ir.Value:
        return self._arguments[name][1]

    def pointer(self, array: str, offset: ir.Value, ty: ir.Type) -> ir.Value:
        """Pointer of element type ``ty`` to ``array[offset]``."""
        array_type, value = self._arguments[array]
        data = self._context.make_array(array_type)(self._context, self.builder, value).data
        return self.builder.bitcast(self.builder.gep(data, [offset]), ty.as_pointer())

    def load(self, array: str, offset: ir.Value, ty: ir.Type) -> ir.Value:
        instruction = self.builder.load(self.pointer(array, offset, ty))
        instruction.align = 1
        return instruction

    def store(self, value: ir.Value, array: str, offset: ir.Value) -> None:
        instruction = self.builder.store(value, self.pointer(array, offset, value.type))
        instruction.align = 1

    def broadcast(self, array: str, offset: ir.Value) -> ir.Value:
        """``array[offset]`` (uint16) in all lanes."""
        b = self.builder
        undefined = ir.Constant(V16, ir.Undefined)
        lane0 = b.insert_element(undefined, self.load(array, offset, I16), ir.Constant(I32, 0))
        all_from_lane0 = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return b.shuffle_vector(lane0, undefined, all_from_lane0)

    def mask(self, bits: ir.Value) -> ir.Value:
        """A uint32 as 32 lanes of one bit."""
        return self.builder.bitcast(bits, MASK)

    def expand(self, array: str, offset: ir.Value, mask: ir.Value) -> ir.Value:
        """Consecutive bytes from ``array[offset:]`` into the lanes of ``mask``, zero elsewhere."""
        signature = ir.FunctionType(V8, [I8.as_pointer(), MASK, V8])
        function = cgutils.get_or_insert_function(
            self.builder.module, signature, "llvm.masked.expandload.v32i8"
        )
        pointer = self.pointer(array, offset, I8)
        return self.builder.call(function, [pointer, mask, splat(0, V8)])

    def compress(self, value: ir.Value, mask: ir.Value) -> ir.Value:
        """The lanes of ``mask`` moved together to the front."""
        signature = ir.FunctionType(V8, [V8, MASK, V8])
        function = cgutils.get_or_insert_function(
            self.builder.module, signature, "llvm.experimental.vector.compress.v32i8"
        )
        return self.builder.call(function, [value, mask, splat(0, V8)])

    def shift(self, value: ir.Value, left: int) -> ir.Value:
        """Shift left by ``left``, or right where it is negative."""
        if left < 0:
            return self.builder.lshr(value, splat(-left))
        return self.builder.shl(value, splat(left))

    def bits(self, value: ir.Value, left: int, mask: int) -> ir.Value:
        return self.builder.and_(self.shift(value, left), splat(mask))

    def row(self, offset: ir.Value, stride: ir.Value, index: int) -> ir.Value:
        return self.builder.add(offset, self.builder.mul(stride, ir.Constant(I64, index)))

    def split_bf16(self, bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """BF16 lanes to (sign and mantissa as bytes, exponent in 16-bit lanes)."""
        b = self.builder
        sign_mantissa = b.or_(self.bits(bits, -8, 0x80), b.and_(bits, splat(0x7F)))
        return b.trunc(sign_mantissa, V8), self.bits(bits, -7, 0xFF)

    def spread_sign_mantissa(self, packed: ir.Value) -> ir.Value:
        """Sign-mantissa bytes to BF16 lanes with exponent zero."""
        b = self.builder
        wide = b.zext(packed, V16)
        return b.or_(b.and_(wide, splat(0x7F)), self.shift(b.and_(wide, splat(0x80)), 8))


@intrinsic
def popcount(typing_context: Any, word: Any) -> Any:
    """Number of set bits of a uint32, as int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.ctpop(args[0]), I64)

    return types.int64(types.uint32), codegen


@intrinsic
def load_word(typing_context: Any, array: Any, offset: Any) -> Any:
    """uint32 from the four bytes at ``array[offset:offset + 4]`` (uint8), little endian."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return Emitter(context, builder, sig, args, "array offset").load("array", args[1], I32)

    return types.uint32(array, types.int64), codegen


@intrinsic
def store_word(typing_context: Any, word: Any, array: Any, offset: Any) -> Any:
    """The four bytes of a uint32 to ``array[offset:offset + 4]`` (uint8), little endian."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        Emitter(context, builder, sig, args, "word array offset").store(args[0], "array", args[2])
        return context.get_dummy_value()

    return types.void(types.uint32, array, types.int64), codegen


@intrinsic
def compress_store(
    typing_context: Any, source: Any, source_at: Any, mask: Any, target: Any, target_at: Any
) -> Any:
    """``source[source_at + i]`` of every set bit i of ``mask`` to ``target[target_at:]``, in order.

    Writes :data:`STORE_SLACK` bytes whatever the mask; those after the selected ones are zero.
    """
    names = "source source_at mask target target_at"

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(context, builder, sig, args, names)
        lanes = e.load("source", e.value("source_at"), V8)
        e.store(e.compress(lanes, e.mask(e.value("mask"))), "target", e.value("target_at"))
        return context.get_dummy_value()

    return types.void(source, types.int64, types.uint32, target, types.int64), codegen
