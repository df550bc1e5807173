"""Weights to be quantised as tiles in registers: read, scaled, coded, and written as words.

Legend: N rows · K columns · R x C tile of a program · B groups of a tile, of GROUP columns each · a group is MANY runs
of RUN neighbours.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import narrowed, store_bytes, store_tiles, tile_words, widened

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
def signed_extreme(x, bits):
    """[B] fp32 of [B, RUN, MANY]: the first value of each group that has the largest magnitude, given as its bits."""
    RUN: tl.constexpr = x.shape[1]
    MANY: tl.constexpr = x.shape[2]
    column = tl.arange(0, RUN)[None, :, None] + tl.arange(0, MANY)[None, None, :] * RUN
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    at = tl.where(size_bits(x) == bits[:, None, None], 2 * column + sign, 2 * RUN * MANY)
    return (bits | (tl.min(tl.min(at, axis=2), axis=1) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def early_scale(x, bits, largest, SCALE: tl.constexpr, SIGNED: tl.constexpr, INTERPRETED: tl.constexpr):
    """(the scale as it is stored, what the weights are multiplied by: 0 where it is 0 or NaN) of rows of groups.

    The rules of llama.cpp: 1 / d with d = a / largest before it is rounded. SIGNED: a is the first value of the largest
    magnitude with its sign.
    """
    span = signed_extreme(x, bits) if SIGNED else bits.to(tl.float32, bitcast=True)
    exact = tl.div_rn(span, largest + tl.zeros_like(span))
    wide = widened(narrowed(exact, SCALE, INTERPRETED), INTERPRETED)
    finite = (bits < _INFINITE) & (size_bits(wide) < _INFINITE)
    usable = finite & (wide != 0)
    factor = tl.where(usable, tl.div_rn(tl.full(span.shape, 1.0, tl.float32), tl.where(usable, exact, 1.0)), 0.0)
    return narrowed(tl.where(finite, wide, float("nan")), SCALE, INTERPRETED), factor


@triton.jit
def early_integers(ratio, ROUNDING: tl.constexpr):
    """Integers as fp32; those beyond every code stay beyond, and NaN is anything."""
    if ROUNDING == UP:
        raised = ratio + 0.5
        near = (raised + 12582912.0) - 12582912.0
        return tl.where(near > raised, near - 1.0, near)
    size = tl.abs(ratio)
    near = (size + 12582912.0) - 12582912.0
    near = tl.where(size - near == 0.5, near + 1.0, near)
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
    """x / divisor, correctly rounded where it is no smaller than 2^-100; anything where the divisor is inf.

    One division for a group: r = 1 / d, q = x r, and a fused step of q + r (x - q d), which is the rounded quotient
    where nothing over- or underflows (Markstein 1990); hence both are multiplied by a power of two that makes d a
    number of 2^24. With -x and -r in place of x and r the sums keep the sign of 0.
    """
    if INTERPRETED:  # whose fma rounds twice
        ratio = tl.div_rn(x, divisor + tl.zeros_like(x))
        ratio = tl.where(ratio == ratio, ratio, 0.0)
    else:
        exponent = divisor.to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.minimum(0x7F000000 - exponent, 0x72800000) + (-2147483648 + 0x0C000000)
        power = power.to(tl.float32, bitcast=True)  # less than 0
        d = tl.where(divisor < float("inf"), 0.0 - divisor * power, 1.0)
        r = tl.div_rn(tl.full(d.shape, -1.0, tl.float32), d) + tl.zeros_like(x)
        x *= power
        q = x * r
        ratio = tl.fma(tl.fma(q, d + tl.zeros_like(x), x), r, q)
    return ratio


@triton.jit
def nearest_code(x, cells):
    """int32 codes of x in [-1, 1], by cells of width 1/16 that x falls into by rounding: numbers 0 .. 32 of 64.

    `cells` [2, 64]: a number that lies in the cell, inf where there is none; the code of what is no larger than it,
    and 16 times that of what is larger.
    """
    at = tl.reshape(tl.fma(x, 16.0 + tl.zeros_like(x), 12582928.0).to(tl.int32, bitcast=True) & 63, (x.numel,))
    i = tl.arange(0, 64)
    own = tl.reshape(tl.gather(tl.load(cells + i), at, 0), x.shape)
    codes = tl.reshape(tl.gather(tl.load(cells + 64 + i).to(tl.int32), at, 0), x.shape)
    return tl.where(x > own, codes >> 4, codes) & 15


@triton.jit
def integer_bits(ratio, least, most, ZERO: tl.constexpr = 0):
    """int32: rint(ratio) between two whole numbers, plus an even ZERO, and the bits of 1.5 * 2^23 more.

    Cut first, since the ends are whole; adding 1.5 * 2^23 then rounds, and leaves the integer in the last bits. What is
    added along has to be even, or ties would go to the odd.
    """
    cut = tl.minimum(tl.maximum(ratio, least), most)
    return (cut + (12582912.0 + ZERO)).to(tl.int32, bitcast=True)


@triton.jit
def paired_bytes(codes, R: tl.constexpr, C: tl.constexpr):
    """[R, C / 2] int32 of [R, C] codes: the even column in the low nibble."""
    even, odd = tl.split(tl.reshape(codes, (R, C // 2, 2)))
    return even | (odd << 4)


@triton.jit
def packed(codes, BITS: tl.constexpr, INTEGER: tl.constexpr, HIGH_FIRST: tl.constexpr):
    """[B, RUN * BITS / 32, MANY] int32 words of codes [B, RUN, MANY]; INTEGER: of those of `integer_bits`, added up."""
    PER: tl.constexpr = 32 // BITS
    j = tl.arange(0, PER)[None, None, :, None]
    at = ((j ^ 1) if HIGH_FIRST else j) * BITS
    found = tl.sum(tl.reshape(codes, (codes.shape[0], codes.shape[1] // PER, PER, codes.shape[2])) << at, axis=2)
    if INTEGER:  # what each is too large by, added up modulo 2^32
        found -= 0x3F400000 if BITS == 4 else -1958739968
    return found


@triton.jit
def store_words(
    codes, words, row, column, N, K, row_bytes, BITS: tl.constexpr, TILED: tl.constexpr, WHOLE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Words [R, C * BITS / 32] of codes in the order of columns. WHOLE: the tile lies in the weight, and is aligned."""
    if TILED:
        store_tiles(codes, tile_words(words, R, C), row, column, N, K, TILED, WHOLE, R, C)
    elif WHOLE:
        W: tl.constexpr = C * BITS // 32
        n, at = tl.arange(0, R)[:, None], tl.arange(0, W)[None, :]
        row_words = (row_bytes if BITS == 4 else K) // 4
        first = codes.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * row_words + column * BITS // 32
        tl.store(first + (n * row_words + at), words)
    else:
        bytes_ = (words[:, :, None] >> (8 * tl.arange(0, 4)[None, None, :])) & 255
        bytes_ = tl.reshape(bytes_, (R, C * BITS // 8))
        if BITS == 4:
            store_bytes(codes, bytes_, row, column, N, K, row_bytes, 0, False, WHOLE, R, C)
        else:
            n, k = (row + tl.arange(0, R)).to(tl.int64)[:, None], column + tl.arange(0, C)[None, :]
            tl.store(codes + n * K + k, bytes_.to(codes.dtype.element_ty), mask=(n < N) & (k < K))


@triton.jit
def nan_or_larger(a, b):
    """The larger; NaN where there is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_or_smaller(a, b):
    """The smaller; NaN where there is one."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def run_of(at, column_stride, column, of_row, K, FIRST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 of neighbouring columns, FIRST after those at `at`; 0 outside of the weight."""
    if WHOLE:
        found = tl.load(at + FIRST * column_stride)
    else:
        found = tl.load(at + FIRST * column_stride, mask=of_row & (column + FIRST < K), other=0.0)
    return widened(found, INTERPRETED)


@triton.jit
def grouped(
    w, row_stride, column_stride, row, column, N, K, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """[R * G, RUN, 4] fp32 groups of a tile: column k + RUN j of a group at [.., k, j]; 0 outside.

    Four runs of RUN neighbours are joined, so a thread has its part of each, and few threads share a group.
    """
    G: tl.constexpr = C // GROUP
    MANY: tl.constexpr = 4 if GROUP > 16 else 2
    RUN: tl.constexpr = GROUP // MANY
    g = tl.arange(0, R * G)[:, None]
    k = g % G * GROUP + tl.arange(0, RUN)[None, :]
    zero = tl.zeros((1, 1), tl.int64)
    at = w + ((zero + row) * row_stride + (zero + column) * column_stride) + (g // G * row_stride + k * column_stride)
    k, of_row = column + k, row + g // G < N
    x0 = run_of(at, column_stride, k, of_row, K, 0, WHOLE, INTERPRETED)
    x1 = run_of(at, column_stride, k, of_row, K, RUN, WHOLE, INTERPRETED)
    if MANY == 2:
        x = tl.join(x0, x1)
    else:
        x2 = run_of(at, column_stride, k, of_row, K, 2 * RUN, WHOLE, INTERPRETED)
        x3 = run_of(at, column_stride, k, of_row, K, 3 * RUN, WHOLE, INTERPRETED)
        x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (R * G, RUN, 4))
    return x


@triton.jit
def in_order(x, R: tl.constexpr, C: tl.constexpr):
    """[R, C] of groups [B, RUN, MANY] of a tile, or fewer columns that each stand for several."""
    return tl.reshape(tl.permute(x, (0, 2, 1)), (R, C))


@triton.jit
def extremes(x, SYMMETRIC: tl.constexpr, INTERPRETED: tl.constexpr):
    """(smallest, largest, largest bits of |x|) of groups [B, RUN, MANY]; the first two no numbers if symmetric."""
    if INTERPRETED:
        bits = tl.max(tl.max(size_bits(x), axis=2), axis=1)
        low = tl.min(tl.min(x, axis=2), axis=1)
        high = tl.max(tl.max(x, axis=2), axis=1)
    elif SYMMETRIC:
        high = tl.reduce(tl.reduce(tl.abs(x), 2, nan_or_larger), 1, nan_or_larger)
        low = high
        bits = high.to(tl.int32, bitcast=True)
    else:
        high = tl.reduce(tl.reduce(x, 2, nan_or_larger), 1, nan_or_larger)
        low = tl.reduce(tl.reduce(x, 2, nan_or_smaller), 1, nan_or_smaller)
        bits = tl.maximum(size_bits(low), size_bits(high))
    return tl.minimum(low, 0.0), tl.maximum(high, 0.0), bits
