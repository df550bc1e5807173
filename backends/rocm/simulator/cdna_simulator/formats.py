"""Number formats: bf16, the 8-, 6- and 4-bit floats, and a multiply-add that rounds once.

fp8 comes in two flavours with the same bits and other values: FNUZ (gfx942) has an exponent bias one larger and no
negative zero, whose code is its only NaN; OCP (gfx950 and later) is the one that other vendors have.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I32, I64, F32, F64 = np.int32, np.int64, np.float32, np.float64


class SmallFloat(NamedTuple):
    """A float of few bits. Sources: OCP 8-bit floating point 1.0, OCP microscaling 1.0, AMD's CDNA3 ISA."""

    bits: int
    mantissa: int
    bias: int
    codes: str  # what the special codes mean: "fnuz", "e4m3", "ieee" (infinities and NaN), "finite"

    @property
    def exponent(self) -> int:
        """Bits of the exponent."""
        return self.bits - 1 - self.mantissa


FP8: Final = {True: SmallFloat(8, 3, 8, "fnuz"), False: SmallFloat(8, 3, 7, "e4m3")}  # by FNUZ
BF8: Final = {True: SmallFloat(8, 2, 16, "fnuz"), False: SmallFloat(8, 2, 15, "ieee")}
FP6, BF6, FP4 = SmallFloat(6, 3, 1, "finite"), SmallFloat(6, 2, 3, "finite"), SmallFloat(4, 1, 1, "finite")


@cache
def values(form: SmallFloat) -> Array:
    """Value of every code, float32."""
    codes = np.arange(1 << form.bits)
    sign = np.where(codes >> (form.bits - 1), -1.0, 1.0)
    e = (codes >> form.mantissa) & ((1 << form.exponent) - 1)
    m = (codes & ((1 << form.mantissa) - 1)) / (1 << form.mantissa)
    x = sign * np.where(e == 0, np.ldexp(m, 1 - form.bias), np.ldexp(1 + m, e - form.bias))
    top = (1 << form.exponent) - 1
    if form.codes == "fnuz":
        x[1 << (form.bits - 1)] = np.nan
    elif form.codes == "e4m3":
        x[[0x7F, 0xFF]] = np.nan
    elif form.codes == "ieee":
        x = np.where(e == top, np.where(m == 0, sign * np.inf, np.nan), x)
    return x.astype(F32)


def encode(x: Array, form: SmallFloat, *, saturate: bool) -> Array:
    """Codes of x, uint32: nearest, ties to even.

    What overflows becomes the largest value where `saturate`, else NaN (or infinity, where the format has one).
    """
    table = values(form)[: 1 << (form.bits - 1)].astype(F64)
    finite = np.flatnonzero(np.isfinite(table))
    magnitudes = table[finite]
    a = np.abs(x.astype(F64))
    high = np.clip(np.searchsorted(magnitudes, a), 1, len(finite) - 1)
    below, above = a - magnitudes[high - 1], magnitudes[high] - a
    nearest = np.where((below < above) | ((below == above) & (high % 2 == 1)), high - 1, high)
    top = magnitudes[-1]
    beyond = a >= top + (top - magnitudes[-2]) / 2
    sign = np.where(np.signbit(x), 1 << (form.bits - 1), 0)
    code = np.where(a > top, len(finite) - 1, nearest) | sign
    if form.codes == "fnuz":
        code = np.where(code == 1 << (form.bits - 1), 0, code)
        nan: Any = 1 << (form.bits - 1)
    else:
        nan = sign | 0x7F
    if not saturate:
        code = np.where(beyond, sign | 0x7C if form.codes == "ieee" else nan, code)
    return np.where(np.isnan(x), nan, code).astype(U32)


def to_bf16(x: Array) -> Array:
    """Bits of x as bf16, uint32: nearest, ties to even; NaN stays quiet."""
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded)


def from_bf16(bits: Array) -> Array:
    """Value of the low half of every word."""
    return (bits << U32(16)).view(F32)


def to_f16(x: Array) -> Array:
    """Bits of x as f16, uint32."""
    return x.astype(np.float16).view(U16).astype(U32)


def from_f16(bits: Array) -> Array:
    """Value of the low half of every word."""
    return bits.astype(U16).view(np.float16).astype(F32)


def unpack(words: Array, bits: int) -> Array:
    """Elements of `bits` bits packed into words, lowest first: [..., n] uint32 -> [..., 32 n / bits]."""
    if bits in {8, 16, 32}:
        return np.ascontiguousarray(words).view({8: U8, 16: U16, 32: U32}[bits])
    flat = np.unpackbits(np.ascontiguousarray(words).view(U8), axis=-1, bitorder="little")
    fields = flat.reshape(*words.shape[:-1], -1, bits)
    return fields @ (1 << np.arange(bits))


def fma(a: Array, b: Array, c: Array) -> Array:
    """The sum a b + c in float32, rounded once.

    The product of two float32 is exact in float64, the sum is rounded there, and the last rounding can differ from a
    single one only where that sum lies exactly between two float32 (or is below their normal range): such sums are
    rounded to odd first (Boldo and Melquiond, 2008).
    """
    p, c64 = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    s = np.asarray(p + c64)
    between = ((s.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)) | (np.abs(s) < 2.0**-125)
    if between.any():
        t = s - p
        lost = (p - (s - t)) + (c64 - t)
        tiny = np.where(np.signbit(lost), -(2.0**-1074), 2.0**-1074)
        odd = np.where((s == 0) & (lost != 0), tiny, _to_odd(s, lost))
        s = np.where(between & np.isfinite(s), odd, s)
    return s.astype(F32)


def _to_odd(s: Array, lost: Array) -> Array:
    """A float64 sum, given what its rounding lost, rounded to odd: the last bit says that something was lost."""
    away = np.signbit(lost) == np.signbit(s)
    nudged = np.where(away, s.view(U64) + U64(1), s.view(U64) - U64(1)).view(F64)
    return np.where((lost != 0) & ((s.view(U64) & U64(1)) == 0), nudged, s)


def _sum(a: Array, b: Array) -> tuple[Array, Array]:
    """A sum and what its rounding lost (Knuth's TwoSum)."""
    s = a + b
    back = s - a
    return s, (a - (s - back)) + (b - back)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """A product and what its rounding lost (Dekker's, on Veltkamp's halves)."""
    p, split = a * b, F64(2**27 + 1)
    ah, bh = (split * x - (split * x - x) for x in (a, b))
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fma64(a: Array, b: Array, c: Array) -> Array:
    """The sum a b + c in float64, rounded once (Boldo and Melquiond, 2008); twice beyond 2 ** 990 or so."""
    a, b, c = (np.asarray(x, F64) for x in (a, b, c))
    p, lost = _product(a, b)
    t, low = _sum(c, lost)
    v, mid = _sum(p, t)
    z, rest = _sum(low, mid)
    r = v + _to_odd(z, rest)
    return np.where(np.isfinite(r), r, a * b + c)
