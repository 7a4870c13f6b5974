"""Vectors for Lynx: 32 channels at once.

A vector of 32 BF16 values is handled as two vectors of 16 floats, those of even and those of odd
lanes: on a little-endian machine they are the halves of 32-bit words, so no lane ever moves. No
operation needs a special instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from kvz.kernels.cpu.simd import I32, I64, LANES, V16, Emitter, splat

WORDS = LANES // 2
_F32 = ir.FloatType()
VW, VF = ir.VectorType(I32, WORDS), ir.VectorType(_F32, WORDS)
_WIDE = ir.VectorType(_F32, LANES)


def splat_words(value: int) -> ir.Constant:
    return ir.Constant(VW, [value] * WORDS)


def splat_floats(value: float) -> ir.Constant:
    return ir.Constant(VF, [value] * WORDS)


class Pair(NamedTuple):
    """Even and odd lanes."""

    even: ir.Value
    odd: ir.Value


class Vectors(Emitter):
    """Emits the vector operations that encoding and decoding share."""

    def split(self, lanes: ir.Value) -> Pair:
        """Zero-extended even and odd lanes of a V16."""
        words = self.builder.bitcast(lanes, VW)
        return Pair(
            self.builder.and_(words, splat_words(0xFFFF)), self.builder.lshr(words, splat_words(16))
        )

    def join(self, words: Pair) -> ir.Value:
        """The low halves of words as a V16."""
        b = self.builder
        low = b.and_(words.even, splat_words(0xFFFF))
        return b.bitcast(b.or_(low, b.shl(words.odd, splat_words(16))), V16)

    def bf16_to_floats(self, lanes: ir.Value) -> Pair:
        b = self.builder
        words = b.bitcast(lanes, VW)
        even, odd = b.shl(words, splat_words(16)), b.and_(words, splat_words(0xFFFF0000))
        return Pair(b.bitcast(even, VF), b.bitcast(odd, VF))

    def floats_to_bf16(self, values: Pair) -> ir.Value:
        """Rounded to nearest even; there must be no NaN."""
        b = self.builder
        rounded = []
        for value in values:
            bits = b.bitcast(value, VW)
            odd_bit = b.and_(b.lshr(bits, splat_words(16)), splat_words(1))
            rounded.append(b.add(bits, b.add(odd_bit, splat_words(0x7FFF))))
        even = b.lshr(rounded[0], splat_words(16))
        return b.bitcast(b.or_(even, b.and_(rounded[1], splat_words(0xFFFF0000))), V16)

    def store_floats(self, values: Pair, array: str, at: ir.Value) -> None:
        order = [lane // 2 + WORDS * (lane % 2) for lane in range(LANES)]
        mask = ir.Constant(ir.VectorType(I32, LANES), order)
        self.store(self.builder.shuffle_vector(values.even, values.odd, mask), array, at)

    def load_floats(self, array: str, at: ir.Value) -> Pair:
        lanes = self.load(array, at, _WIDE)
        undefined = ir.Constant(_WIDE, ir.Undefined)
        even, odd = (
            self.builder.shuffle_vector(
                lanes, undefined, ir.Constant(VW, list(range(first, LANES, 2)))
            )
            for first in (0, 1)
        )
        return Pair(even, odd)

    def look_up(self, array: str, indices: ir.Value) -> ir.Value:
        """``array[index]`` (int32) of each of 16 words."""
        b = self.builder
        found = ir.Constant(VW, ir.Undefined)
        for lane in range(WORDS):
            index = b.zext(b.extract_element(indices, I32(lane)), I64)
            found = b.insert_element(found, self.load(array, index, I32), I32(lane))
        return found

    def order(self, lanes: ir.Value) -> ir.Value:
        """BF16 bits to integers in the order of their values; its own inverse."""
        b = self.builder
        sign = b.ashr(lanes, splat(15))
        return b.xor(lanes, b.and_(sign, splat(0x7FFF)))

    def call(self, name: str, value: ir.Value) -> ir.Value:
        """A function of LLVM on floats: floor, ceil, fabs."""
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(VF, [VF]), f"llvm.{name}.v{WORDS}f32"
        )
        return self.builder.call(function, [value])

    def smaller(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Of two signed integers, or of each two lanes."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), b, a)

    def row_at(self, token: ir.Value) -> ir.Value:
        """Where the elements start that are coded for ``token``."""
        b = self.builder
        row = self.larger(token, self.value("first_coded"))
        return b.add(self.value("data_at"), b.mul(row, self.value("channels")))

    def all(self, mask: ir.Value) -> ir.Value:
        bits = ir.IntType(mask.type.count)
        return self.builder.icmp_signed("==", self.builder.bitcast(mask, bits), bits(-1))

    @contextmanager
    def tokens(self) -> Iterator[ir.Value]:
        """A loop over ``start ... end - 1``."""
        start, end = self.value("start"), self.value("end")
        with cgutils.for_range_slice(self.builder, start, end, ir.Constant(I64, 1)) as (token, _):
            yield token
