"""Quantising: scales and codes of a weight in one launch (two for one scale in all), in any layout.

The arithmetic is that of `rlkernel_core.quant.grid` and `.nf4`, operation by operation: fp32, rounded to nearest even,
none contracted (launch with `enable_fp_fusion=False`). A scale is found from the bits of |w|, whose order as integers
is that of the numbers with inf and NaN above them all, so what is not finite shows in the maximum.

Legend: N rows · K columns · R x C tile of a program · G groups of a tile's row · g columns of a group.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from rlkernel_triton.quant.code_tiles import float8_code, narrowed, store_bytes, widened

INT4: Final = tl.constexpr(0)
INT8: Final = tl.constexpr(1)
FLOAT8: Final = tl.constexpr(2)
NF4: Final = tl.constexpr(3)
FP4: Final = tl.constexpr(4)
EVEN: Final = tl.constexpr(0)  # how a quotient is rounded to an integer
AWAY: Final = tl.constexpr(1)  # a tie away from zero; the quotient is by the scale before that is rounded
UP: Final = tl.constexpr(2)  # floor(x + 1/2); so is the quotient, and the scale has a sign
_INFINITE: Final = tl.constexpr(0x7F800000)


@triton.jit
def weights(
    w, row_stride, column_stride, row, column, N, K, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """[R, C] fp32, 0 outside of the weight; WHOLE: nothing is. Offsets within a tile are below 2^31."""
    n, k = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    zero = tl.zeros((1, 1), tl.int64)
    at = w + ((zero + row) * row_stride + (zero + column) * column_stride) + (n * row_stride + k * column_stride)
    if WHOLE:
        return widened(tl.load(at), INTERPRETED)
    return widened(tl.load(at, mask=(row + n < N) & (column + k < K), other=0.0), INTERPRETED)


@triton.jit
def size_bits(x):
    """int32 bits of |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_and_zero(
    low,  # smallest value of a group, or 0; used where asymmetric
    high,
    bits,  # largest bits of |w|
    largest,  # what the scale's rule divides by, fp32
    SCALE: tl.constexpr,  # type of the scale
    SYMMETRIC: tl.constexpr,
    POWER: tl.constexpr,  # the scale rounded up to a power of two
    INTERPRETED: tl.constexpr,
    FLOAT_ZERO: tl.constexpr = False,  # a zero-point has the type of the scale
):
    """(the scale as it is stored, what the codes divide by: inf where it is 0 or NaN, the zero-point as fp32)."""
    if SYMMETRIC:
        span = bits.to(tl.float32, bitcast=True)
    else:
        span = tl.abs(high - low)
    scale = tl.div_rn(span, largest + tl.zeros_like(span))
    if POWER:
        scale = power_above(scale)
    wide = widened(narrowed(scale, SCALE, INTERPRETED), INTERPRETED)
    finite = (bits < _INFINITE) & (size_bits(wide) < _INFINITE)
    divisor = tl.where(finite & (wide > 0), wide, float("inf"))
    stored = narrowed(tl.where(finite, wide, float("nan")), SCALE, INTERPRETED)
    zero = tl.zeros_like(span)
    if not SYMMETRIC:
        ratio = tl.div_rn(tl.abs(low), divisor)
        ratio = tl.where(ratio == ratio, ratio, 0.0)
        if FLOAT_ZERO:
            zero = widened(narrowed(ratio, SCALE, INTERPRETED), INTERPRETED)
        else:
            zero = tl.minimum(tl.maximum(rint(ratio), 0.0), 15.0)
    return stored, divisor, zero


@triton.jit
def early_scale(x, bits, largest, SCALE: tl.constexpr, SIGNED: tl.constexpr, INTERPRETED: tl.constexpr):
    """(the scale as it is stored, what the weights are multiplied by: 0 where it is 0 or NaN) of rows of groups.

    The rules of llama.cpp: 1 / d with d = a / largest before it is rounded. SIGNED: a is the first value of the largest
    magnitude with its sign.
    """
    span = bits
    if SIGNED:
        own = x.to(tl.int32, bitcast=True)
        column = tl.arange(0, x.shape[1])[None, :]
        first = tl.min(tl.where(size_bits(x) == bits[:, None], 2 * column + ((own >> 31) & 1), 2 * x.shape[1]), axis=1)
        span = bits | (first << 31)
    exact = tl.div_rn(span.to(tl.float32, bitcast=True), largest + tl.zeros(span.shape, tl.float32))
    wide = widened(narrowed(exact, SCALE, INTERPRETED), INTERPRETED)
    finite = (bits < _INFINITE) & (size_bits(wide) < _INFINITE)
    usable = finite & (wide != 0)
    factor = tl.where(usable, tl.div_rn(tl.full(span.shape, 1.0, tl.float32), tl.where(usable, exact, 1.0)), 0.0)
    return narrowed(tl.where(finite, wide, float("nan")), SCALE, INTERPRETED), factor


@triton.jit
def early_integers(ratio, ROUNDING: tl.constexpr):
    """Integers as fp32, NaN as 0; those beyond every code stay beyond."""
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    if ROUNDING == UP:
        raised = ratio + 0.5
        near = rint(raised)
        return tl.where(near > raised, near - 1.0, near)
    near = rint(tl.abs(ratio))
    near = tl.where(tl.abs(ratio) - near == 0.5, near + 1.0, near)
    return tl.where(ratio < 0, 0.0 - near, near)


@triton.jit
def power_above(scale):
    """The least power of two that is no smaller; 0, inf and NaN stay."""
    bits = scale.to(tl.int32, bitcast=True)
    normal = bits >= 0x00800000
    up = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    # Subnormal ones are made normal first.
    raised = (scale * 8388608.0).to(tl.int32, bitcast=True)
    below = ((raised + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True) * (1.0 / 8388608.0)
    return tl.where((bits == 0) | (bits >= 0x7F800000), scale, tl.where(normal, up, below))


@triton.jit
def rint(x):
    """Nearest integer, ties to even, of numbers below 2^22; larger ones are cut to 2^20, which is beyond every code."""
    x = tl.minimum(tl.maximum(x, -1048576.0), 1048576.0)
    return (x + 12582912.0) - 12582912.0


@triton.jit
def ratio_of(x, divisor, INTERPRETED: tl.constexpr):
    """x / divisor correctly rounded where it is no smaller than 2^-30, and 0 for NaN.

    One division for a group: r = 1 / d, q = x r, and a fused step of q + r (x - q d), which is the rounded quotient
    where nothing over- or underflows (Markstein 1990). A tile with another divisor takes the division.
    """
    if INTERPRETED:  # whose fma rounds twice
        ratio = tl.div_rn(x, divisor + tl.zeros_like(x))
        ratio = tl.where(ratio == ratio, ratio, 0.0)
    else:
        usual = (divisor > 2.0**-90) & (divisor < 2.0**90)
        if tl.min(tl.reshape(usual.to(tl.int32), (usual.numel,))) == 1:
            reciprocal = tl.div_rn(1.0 + tl.zeros_like(divisor), divisor)
            q = x * reciprocal
            ratio = tl.fma(tl.fma(-q, divisor + tl.zeros_like(x), x), reciprocal + tl.zeros_like(x), q)
        else:
            ratio = tl.div_rn(x, divisor + tl.zeros_like(x))
            ratio = tl.where(ratio == ratio, ratio, 0.0)
    return ratio


@triton.jit
def nearest_of_table(x, middles):
    """Number of the 15 midpoints of the nf4 table that are below x: a search of four steps."""
    m0, m1, m2, m3 = tl.load(middles), tl.load(middles + 1), tl.load(middles + 2), tl.load(middles + 3)
    m4, m5, m6, m7 = tl.load(middles + 4), tl.load(middles + 5), tl.load(middles + 6), tl.load(middles + 7)
    m8, m9, m10, m11 = tl.load(middles + 8), tl.load(middles + 9), tl.load(middles + 10), tl.load(middles + 11)
    m12, m13, m14 = tl.load(middles + 12), tl.load(middles + 13), tl.load(middles + 14)
    a = x > m7
    b = x > tl.where(a, m11, m3)
    c = x > tl.where(a, tl.where(b, m13, m9), tl.where(b, m5, m1))
    low = tl.where(b, tl.where(c, m6, m4), tl.where(c, m2, m0))
    high = tl.where(b, tl.where(c, m14, m12), tl.where(c, m10, m8))
    d = x > tl.where(a, high, low)
    return a.to(tl.int32) * 8 + b.to(tl.int32) * 4 + c.to(tl.int32) * 2 + d.to(tl.int32)


@triton.jit
def nearest_of_fp4(x, middles):
    """fp4 codes: the number of the 7 midpoints of ascending magnitudes below |x|, as the code of that; a sign."""
    m0, m1, m2, m3 = tl.load(middles), tl.load(middles + 1), tl.load(middles + 2), tl.load(middles + 3)
    m4, m5, m6 = tl.load(middles + 4), tl.load(middles + 5), tl.load(middles + 6)
    size = tl.abs(x)
    a = size > m3
    b = size > tl.where(a, m5, m1)
    c = size > tl.where(a, tl.where(b, m6, m4), tl.where(b, m2, m0))
    place = a.to(tl.int32) * 4 + b.to(tl.int32) * 2 + c.to(tl.int32)
    return place ^ ((place & 2) << 1) | tl.where(x < 0, 8, 0)


@triton.jit
def integer_codes(ratio, zero, LEAST: tl.constexpr, MOST: tl.constexpr):
    """int32: rint(w / s) + z between two numbers.

    Cut first, since the ends are integers; adding 1.5 * 2^23 then rounds, and leaves the integer in the last bits.
    """
    cut = tl.minimum(tl.maximum(ratio, LEAST - zero), MOST - zero)
    return (cut + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + zero.to(tl.int32)


@triton.jit
def paired_bytes(codes, R: tl.constexpr, C: tl.constexpr):
    """[R, C / 2] int32 of [R, C] codes: the even column in the low nibble."""
    even, odd = tl.split(tl.reshape(codes, (R, C // 2, 2)))
    return even | (odd << 4)


@triton.jit
def store_codes(
    codes, ratio, zero, row, column, N, K, row_bytes, middles, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Code a tile of w / s and write it."""
    n = (row + tl.arange(0, R)).to(tl.int64)[:, None]
    k = column + tl.arange(0, C)[None, :]
    inside = (n < N) & (k < K)  # all true where WHOLE, which the compiler cannot know
    if WHOLE:
        inside = None
    if ELEMENT == INT8:
        tl.store(
            codes + n * K + k, integer_codes(ratio, tl.zeros((1, 1), tl.float32), LEAST, MOST).to(tl.int8), mask=inside
        )
    elif ELEMENT == FLOAT8:
        found = float8_code(ratio, MANTISSA, BIAS, FNUZ, LARGEST)
        tl.store(codes + n * K + k, found.to(tl.uint8), mask=inside)
    elif ELEMENT == NF4 or ELEMENT == FP4:
        found = nearest_of_table(ratio, middles) if ELEMENT == NF4 else nearest_of_fp4(ratio, middles)
        if not WHOLE:
            found = tl.where(inside, found, 0)
        store_bytes(codes, paired_bytes(found, R, C), row, column, N, K, row_bytes, TILED, True, WHOLE, R, C)
    else:
        found = integer_codes(ratio, zero, LEAST, MOST)
        if not WHOLE:
            found = tl.where(inside, found, 0)
        store_bytes(codes, paired_bytes(found, R, C), row, column, N, K, row_bytes, TILED, False, WHOLE, R, C)


@triton.jit
def encode_groups(
    w, row_stride, column_stride, codes, row_bytes, scale, zero, scale_row, scale_group, middles, largest, N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    FLOAT_ZERO: tl.constexpr = False, ROUNDING: tl.constexpr = 0,
):  # fmt: skip
    """Groups of GROUP columns of a row: integers, nf4 and fp4. Grid: row tiles x column tiles."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    G: tl.constexpr = C // GROUP
    x = tl.reshape(weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C), (R * G, GROUP))
    bits = tl.max(size_bits(x), axis=1)
    low, high = bits.to(tl.float32), bits.to(tl.float32)
    if not SYMMETRIC:
        low, high = tl.minimum(tl.min(x, axis=1), 0.0), tl.maximum(tl.max(x, axis=1), 0.0)
    SCALE: tl.constexpr = scale.dtype.element_ty
    if ROUNDING == EVEN:
        stored, divisor, z = scale_and_zero(
            low, high, bits, largest, SCALE, SYMMETRIC, False, INTERPRETED, FLOAT_ZERO
        )  # fmt: skip
    else:
        stored, divisor = early_scale(x, bits, largest, SCALE, ROUNDING == UP, INTERPRETED)
        z = low
    n = tl.reshape((row + tl.arange(0, R)).to(tl.int64)[:, None] + tl.zeros((1, G), tl.int64), (R * G,))
    group = tl.reshape(column // GROUP + tl.arange(0, G)[None, :] + tl.zeros((R, 1), tl.int32), (R * G,))
    inside = (n < N) & (group < tl.cdiv(K, GROUP))
    at = n * scale_row + group.to(tl.int64) * scale_group
    tl.store(scale + at, stored, mask=inside)
    if not SYMMETRIC:
        if FLOAT_ZERO:
            tl.store(zero + at, narrowed(z, SCALE, INTERPRETED), mask=inside)
        else:
            tl.store(zero + at, z.to(tl.uint8), mask=inside)
    if ROUNDING == EVEN:
        ratio = ratio_of(x, divisor[:, None], INTERPRETED)
    else:
        ratio = early_integers(x * divisor[:, None], ROUNDING)
    if SYMMETRIC:
        zeros = tl.full((1, 1), 8.0, tl.float32)
    elif FLOAT_ZERO:
        zeros = tl.zeros((1, 1), tl.float32)
        ratio += z[:, None]
    else:
        zeros = tl.reshape(z[:, None] + tl.zeros_like(ratio), (R, C))
    store_codes(
        codes, tl.reshape(ratio, (R, C)), zeros, row, column, N, K, row_bytes, middles, ELEMENT, TILED, LEAST, MOST, 0,
        0, False, 0.0, WHOLE, R, C,
    )  # fmt: skip


@triton.jit
def encode_rows(
    w, row_stride, column_stride, codes, row_bytes, scale, zero, largest, partial, N, K, parts,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, POWER: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, FNUZ: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A scale per row (ROWS 1: the row is read twice), per R x C block (ROWS 2: once), or one in all (ROWS 0).

    One in all reads `partial`, the largest bits of each of `parts` row tiles, which `largest_bits` wrote.
    """
    row = tl.program_id(0) * R
    first = tl.program_id(1) * C
    if ROWS == 2:
        x = weights(w, row_stride, column_stride, row, first, N, K, WHOLE, INTERPRETED, R, C)
        bits = tl.max(tl.max(size_bits(x), axis=1), axis=0)
        low, high = bits.to(tl.float32), bits.to(tl.float32)
    elif ROWS == 0:
        at = tl.arange(0, PARTS)
        bits = tl.max(tl.load(partial + at, mask=at < parts, other=0), axis=0)
        low, high = bits.to(tl.float32), bits.to(tl.float32)
    else:
        # Compared element by element, reduced once: a reduction in the loop costs as much as the loads.
        most, least, top = tl.zeros((R, C), tl.int32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
        for column in range(0, K, C):
            x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            most = tl.maximum(most, size_bits(x))
            if not SYMMETRIC:
                least, top = tl.minimum(least, x), tl.maximum(top, x)
        bits = tl.max(most, axis=1)
        low, high = bits.to(tl.float32), bits.to(tl.float32)
        if not SYMMETRIC:
            low, high = tl.min(least, axis=1), tl.max(top, axis=1)
    SCALE: tl.constexpr = scale.dtype.element_ty
    stored, divisor, z = scale_and_zero(low, high, bits, largest, SCALE, SYMMETRIC, POWER, INTERPRETED)
    if ROWS == 2:
        tl.store(scale + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), stored)
    elif ROWS == 0:
        if tl.program_id(0) == 0:
            tl.store(scale, stored)
    else:
        n = row + tl.arange(0, R)
        tl.store(scale + n, stored, mask=n < N)
        if not SYMMETRIC:
            tl.store(zero + n, z.to(tl.uint8), mask=n < N)
    if ELEMENT == INT4 and SYMMETRIC:
        z += 8.0
    if ROWS == 1:
        divisor, z = divisor[:, None], z[:, None]
    else:
        divisor, z = divisor + tl.zeros((1, 1), tl.float32), z + tl.zeros((1, 1), tl.float32)
    if ROWS == 2:
        ratio = ratio_of(x, divisor, INTERPRETED)
        store_codes(
            codes, ratio, z, row, first, N, K, row_bytes, codes, ELEMENT, TILED, LEAST, MOST, MANTISSA, BIAS, FNUZ,
            LARGEST, WHOLE, R, C,
        )  # fmt: skip
    else:
        for column in range(0, K, C):
            x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            ratio = ratio_of(x, divisor, INTERPRETED)
            store_codes(
                codes, ratio, z, row, column, N, K, row_bytes, codes, ELEMENT, TILED, LEAST, MOST, MANTISSA, BIAS,
                FNUZ, LARGEST, WHOLE, R, C,
            )  # fmt: skip


@triton.jit
def largest_bits(
    w, row_stride, column_stride, partial, N, K, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The largest bits of |w| of every tile of R rows."""
    row = tl.program_id(0) * R
    most = tl.zeros((R, C), tl.int32)
    for column in range(0, K, C):
        x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
        most = tl.maximum(most, size_bits(x))
    tl.store(partial + tl.program_id(0), tl.max(tl.max(most, axis=1), axis=0))
