"""Quantizing to integers, nf4, fp4 and 8-bit floats: scales and codes in one launch (two for one scale in all).

The arithmetic is that of `rlkernel_core.quant.grid` and `.nf4`, operation by operation: fp32, rounded to nearest even,
none contracted (launch with `enable_fp_fusion=False`). A scale is found from the bits of |w|, whose order as integers
is that of the numbers with inf and NaN above them all, so what is not finite shows in the maximum.

Bytes: the weight once by groups and by blocks, twice by rows (the second time mostly from cache); codes and scales out.

Legend: N rows · K columns · R x C tile of a program · G groups of a tile's row · B groups of a tile, of GROUP columns
each · a group is MANY runs of RUN neighbors.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import (
    FLOAT8,
    FP4,
    INT4,
    INT8,
    NF4,
    encode_float8,
    round_to,
    store_bytes,
    store_tiles,
    to_float32,
    words_of_rows,
)

EVEN: Final = tl.constexpr(0)  # how a quotient is rounded to an integer
AWAY: Final = tl.constexpr(1)  # a tie away from zero; the quotient is by the scale before that is rounded
UP: Final = tl.constexpr(2)  # floor(x + 1/2); so is the quotient, and the scale has a sign
_INFINITE: Final = tl.constexpr(0x7F800000)


@triton.jit
def load_weights(
    w, row_stride, column_stride, row, column, N, K, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """[R, C] fp32, 0 outside of the weight; WHOLE: nothing is. Offsets within a tile are below 2^31."""
    n, k = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    zero = tl.zeros((1, 1), tl.int64)
    at = w + ((zero + row) * row_stride + (zero + column) * column_stride) + (n * row_stride + k * column_stride)
    if WHOLE:
        return to_float32(tl.load(at), INTERPRETED)
    return to_float32(tl.load(at, mask=(row + n < N) & (column + k < K), other=0.0), INTERPRETED)


@triton.jit
def abs_bits(x):
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
        scale = ceil_power_of_two(scale)
    wide = to_float32(round_to(scale, SCALE, INTERPRETED), INTERPRETED)
    finite = (bits < _INFINITE) & (abs_bits(wide) < _INFINITE)
    divisor = tl.where(finite & (wide > 0), wide, float("inf"))
    stored = round_to(tl.where(finite, wide, float("nan")), SCALE, INTERPRETED)
    zero = tl.zeros_like(span)
    if not SYMMETRIC:
        ratio = tl.div_rn(tl.abs(low), divisor)
        ratio = tl.where(ratio == ratio, ratio, 0.0)
        if FLOAT_ZERO:
            zero = to_float32(round_to(ratio, SCALE, INTERPRETED), INTERPRETED)
        else:
            zero = tl.minimum(tl.maximum(rint(ratio), 0.0), 15.0)
    return stored, divisor, zero


@triton.jit
def signed_absmax(x, bits):
    """[B] fp32 of [B, RUN, MANY]: the first value of each group that has the largest magnitude, given as its bits."""
    RUN: tl.constexpr = x.shape[1]
    MANY: tl.constexpr = x.shape[2]
    column = tl.arange(0, RUN)[None, :, None] + tl.arange(0, MANY)[None, None, :] * RUN
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    at = tl.where(abs_bits(x) == bits[:, None, None], 2 * column + sign, 2 * RUN * MANY)
    return (bits | (tl.min(tl.min(at, axis=2), axis=1) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale(x, bits, largest, SCALE: tl.constexpr, SIGNED: tl.constexpr, INTERPRETED: tl.constexpr):
    """(the scale as it is stored, what the weights are multiplied by: 0 where it is 0 or NaN) of rows of groups.

    The rules of llama.cpp: 1 / d with d = a / largest before it is rounded. SIGNED: a is the first value of the largest
    magnitude with its sign.
    """
    span = signed_absmax(x, bits) if SIGNED else bits.to(tl.float32, bitcast=True)
    exact = tl.div_rn(span, largest + tl.zeros_like(span))
    wide = to_float32(round_to(exact, SCALE, INTERPRETED), INTERPRETED)
    finite = (bits < _INFINITE) & (abs_bits(wide) < _INFINITE)
    usable = finite & (wide != 0)
    factor = tl.where(usable, tl.div_rn(tl.full(span.shape, 1.0, tl.float32), tl.where(usable, exact, 1.0)), 0.0)
    return round_to(tl.where(finite, wide, float("nan")), SCALE, INTERPRETED), factor


@triton.jit
def round_integers(ratio, ROUNDING: tl.constexpr):
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
def ceil_power_of_two(scale):
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
def divide(x, divisor, INTERPRETED: tl.constexpr):
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
def pack_nibbles(codes, R: tl.constexpr, C: tl.constexpr):
    """[R, C / 2] int32 of [R, C] codes: the even column in the low nibble."""
    even, odd = tl.split(tl.reshape(codes, (R, C // 2, 2)))
    return even | (odd << 4)


@triton.jit
def pack_codes(codes, BITS: tl.constexpr, INTEGER: tl.constexpr, HIGH_FIRST: tl.constexpr):
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
        store_tiles(codes, words_of_rows(words, R, C), row, column, N, K, TILED, WHOLE, R, C)
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
def max_or_nan(a, b):
    """The larger; NaN where there is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def min_or_nan(a, b):
    """The smaller; NaN where there is one."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_run(at, column_stride, column, of_row, K, FIRST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 of neighboring columns, FIRST after those at `at`; 0 outside of the weight."""
    if WHOLE:
        found = tl.load(at + FIRST * column_stride)
    else:
        found = tl.load(at + FIRST * column_stride, mask=of_row & (column + FIRST < K), other=0.0)
    return to_float32(found, INTERPRETED)


@triton.jit
def load_groups(
    w, row_stride, column_stride, row, column, N, K, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """[R * G, RUN, 4] fp32 groups of a tile: column k + RUN j of a group at [.., k, j]; 0 outside.

    Four runs of RUN neighbors are joined, so a thread has its part of each, and few threads share a group.
    """
    G: tl.constexpr = C // GROUP
    MANY: tl.constexpr = 4 if GROUP > 16 else 2
    RUN: tl.constexpr = GROUP // MANY
    g = tl.arange(0, R * G)[:, None]
    k = g % G * GROUP + tl.arange(0, RUN)[None, :]
    zero = tl.zeros((1, 1), tl.int64)
    at = w + ((zero + row) * row_stride + (zero + column) * column_stride) + (g // G * row_stride + k * column_stride)
    k, of_row = column + k, row + g // G < N
    x0 = load_run(at, column_stride, k, of_row, K, 0, WHOLE, INTERPRETED)
    x1 = load_run(at, column_stride, k, of_row, K, RUN, WHOLE, INTERPRETED)
    if MANY == 2:
        x = tl.join(x0, x1)
    else:
        x2 = load_run(at, column_stride, k, of_row, K, 2 * RUN, WHOLE, INTERPRETED)
        x3 = load_run(at, column_stride, k, of_row, K, 3 * RUN, WHOLE, INTERPRETED)
        x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (R * G, RUN, 4))
    return x


@triton.jit
def to_row_order(x, R: tl.constexpr, C: tl.constexpr):
    """[R, C] of groups [B, RUN, MANY] of a tile, or fewer columns that each stand for several."""
    return tl.reshape(tl.permute(x, (0, 2, 1)), (R, C))


@triton.jit
def group_extremes(x, SYMMETRIC: tl.constexpr, INTERPRETED: tl.constexpr):
    """(smallest, largest, largest bits of |x|) of groups [B, RUN, MANY]; the first two no numbers if symmetric."""
    if INTERPRETED:
        bits = tl.max(tl.max(abs_bits(x), axis=2), axis=1)
        low = tl.min(tl.min(x, axis=2), axis=1)
        high = tl.max(tl.max(x, axis=2), axis=1)
    elif SYMMETRIC:
        high = tl.reduce(tl.reduce(tl.abs(x), 2, max_or_nan), 1, max_or_nan)
        low = high
        bits = high.to(tl.int32, bitcast=True)
    else:
        high = tl.reduce(tl.reduce(x, 2, max_or_nan), 1, max_or_nan)
        low = tl.reduce(tl.reduce(x, 2, min_or_nan), 1, min_or_nan)
        bits = tl.maximum(abs_bits(low), abs_bits(high))
    return tl.minimum(low, 0.0), tl.maximum(high, 0.0), bits


@triton.jit
def quantize_groups_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    codes,  # out: [N, K] int8, or two codes a byte [N, row_bytes], or words of `triton_w4` if TILED
    row_bytes,
    scale,  # [N, K / GROUP] out, strides scale_row and scale_group
    zero,  # the same of zero-points, unless SYMMETRIC
    scale_row, scale_group,
    cells,  # [2, 64] fp32, see `nearest_code`; with NF4 and FP4
    largest,  # fp32: what the scale's rule divides by
    N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FLOAT_ZERO: tl.constexpr = False,  # zero-points have the type of the scale
    ROUNDING: tl.constexpr = 0,  # EVEN, AWAY or UP
):  # fmt: skip
    """Groups of GROUP columns of a row: integers, nf4 and fp4. Grid: row tiles x column tiles."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    G: tl.constexpr = C // GROUP
    x = load_groups(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    low, high, bits = group_extremes(x, SYMMETRIC, INTERPRETED)
    # Scales are rounded to the type they are stored in before anything is divided by them.
    SCALE: tl.constexpr = scale.dtype.element_ty
    if ROUNDING == EVEN:
        stored, divisor, z = scale_and_zero(
            low, high, bits, largest, SCALE, SYMMETRIC, False, INTERPRETED, FLOAT_ZERO
        )  # fmt: skip
        usable = divisor < float("inf")
    else:
        stored, divisor = inverse_scale(x, bits, largest, SCALE, ROUNDING == UP, INTERPRETED)
        z = low
        usable = divisor != 0
    group = tl.arange(0, R * G)
    n = (row + group // G).to(tl.int64)
    group = column // GROUP + group % G
    inside = (n < N) & (group < tl.cdiv(K, GROUP))
    if WHOLE:
        inside = None
    at = n * scale_row + group.to(tl.int64) * scale_group
    tl.store(scale + at, stored, mask=inside)
    if not SYMMETRIC:
        if FLOAT_ZERO:
            tl.store(zero + at, round_to(z, SCALE, INTERPRETED), mask=inside)
        else:
            tl.store(zero + at, z.to(tl.uint8), mask=inside)
    if ROUNDING == EVEN:
        ratio = divide(x, divisor[:, None, None], INTERPRETED)
    else:
        ratio = round_integers(x * divisor[:, None, None], ROUNDING)
    BITS: tl.constexpr = 8 if ELEMENT == INT8 else 4
    INTEGER: tl.constexpr = ELEMENT == INT4 or ELEMENT == INT8
    # Integers become codes by what is added to them, z: to whole words, once they are packed.
    NOUGHT: tl.constexpr = 0x4B400000 if INTEGER else 7 if ELEMENT == NF4 else 0  # of a group whose scale is 0 or NaN
    Z_CODE: tl.constexpr = 128 if ELEMENT == INT8 else 8
    if INTEGER and (SYMMETRIC or FLOAT_ZERO):
        z_code = tl.zeros_like(bits) + (0 if FLOAT_ZERO else Z_CODE)
    else:
        z_code = z.to(tl.int32)
    if ELEMENT == NF4:
        found = nearest_code(ratio, cells)
    elif ELEMENT == FP4:
        found = nearest_code(tl.abs(ratio), cells) | tl.where(ratio < 0, 8, 0)
    elif FLOAT_ZERO:
        found = integer_bits(ratio + z[:, None, None], LEAST, MOST)
    elif SYMMETRIC:
        found = integer_bits(
            ratio, LEAST + (0.0 if ELEMENT == INT8 else -8.0), MOST + (0.0 if ELEMENT == INT8 else -8.0)
        )
    else:
        found = integer_bits(ratio, LEAST - z[:, None, None], MOST - z[:, None, None])
    if not WHOLE:
        k = tl.arange(0, GROUP // 4)[None, :, None] + tl.arange(0, 4)[None, None, :] * (GROUP // 4)
        found = tl.where(usable[:, None, None], found, NOUGHT)
        outside = (0x4B400000 - z_code)[:, None, None] if INTEGER else 0
        found = tl.where(group[:, None, None] * GROUP + k < K, found, outside)
    found = pack_codes(found, BITS, INTEGER, (ELEMENT == NF4 or ELEMENT == FP4) and not TILED)
    if WHOLE:
        found = tl.where(usable[:, None, None], found, NOUGHT * 0x11111111 if ELEMENT == NF4 else 0)
    if INTEGER:
        found += (z_code * (0x11111111 if BITS == 4 else 0x01010101))[:, None, None]
    if ELEMENT == INT8:
        found ^= -2139062144
    store_words(codes, to_row_order(found, R, C * BITS // 32), row, column, N, K, row_bytes, BITS, TILED, WHOLE, R, C)


@triton.jit
def quantize_tile(
    x, codes, divisor, usual, z, row, column, N, K, row_bytes, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    LARGEST: tl.constexpr, CAST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Code a tile [R, C] of w / s and write it. `usual`: no divisor is inf."""
    if usual:
        ratio = divide(x, divisor, INTERPRETED)
    else:
        ratio = tl.div_rn(x, divisor + tl.zeros_like(x))
        ratio = tl.where(ratio == ratio, ratio, 0.0)
    n, k = (row + tl.arange(0, R)).to(tl.int64)[:, None], column + tl.arange(0, C)[None, :]
    inside = (n < N) & (k < K)
    if WHOLE:
        inside = None
    if ELEMENT == FLOAT8:
        if CAST:
            found = ratio.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            found = encode_float8(ratio, MANTISSA, BIAS, FNUZ, LARGEST).to(tl.uint8)
        tl.store(codes + n * K + k, found, mask=inside)
    else:
        found = integer_bits(ratio, LEAST - z, MOST - z)
        if ELEMENT == INT8:
            tl.store(codes + n * K + k, found.to(tl.int8), mask=inside)
        else:
            found = (found + z.to(tl.int32)) & 15
            if not WHOLE:
                found = tl.where(inside, found, 0)
            store_bytes(codes, pack_nibbles(found, R, C), row, column, N, K, row_bytes, TILED, False, WHOLE, R, C)


@triton.jit
def quantize_rows_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    codes,  # out, as in `quantize_groups_kernel`, or bytes of 8-bit floats
    row_bytes,
    scale,  # [N] (ROWS 1), [N / R, K / C] (ROWS 2) or [1] (ROWS 0), out
    zero,  # [N] uint8 out, unless SYMMETRIC
    largest,  # fp32: what the scale's rule divides by
    partial,  # [parts] int32, with ROWS 0: what `absmax_kernel` wrote
    N, K, parts,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    POWER: tl.constexpr,  # scales are powers of two
    LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    LARGEST: tl.constexpr,  # of the 8-bit float
    PARTS: tl.constexpr,  # parts at most, a power of two
    WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, CAST: tl.constexpr = False,
):  # fmt: skip
    """A scale per row (ROWS 1: the row is read twice), per R x C block (ROWS 2: once), or one in all (ROWS 0).

    One in all reads `partial`, the largest bits of each of `parts` row tiles, which `absmax_kernel` wrote.
    CAST: the GPU has an instruction for e4m3fn.
    """
    row = tl.program_id(0) * R
    first = tl.program_id(1) * C
    if ROWS == 2:
        x = load_weights(w, row_stride, column_stride, row, first, N, K, WHOLE, INTERPRETED, R, C)
        bits = tl.max(tl.max(abs_bits(x), axis=1), axis=0)
        low, high = bits.to(tl.float32), bits.to(tl.float32)
    elif ROWS == 0:
        at = tl.arange(0, PARTS)
        bits = tl.max(tl.load(partial + at, mask=at < parts, other=0), axis=0)
        low, high = bits.to(tl.float32), bits.to(tl.float32)
    else:
        # Compared element by element, reduced once: a reduction in the loop costs as much as the loads.
        most, least, top = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
        for column in range(0, K, C):
            x = load_weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            most = max_or_nan(most, tl.abs(x))
            if not SYMMETRIC:
                least, top = tl.minimum(least, x), tl.maximum(top, x)
        bits = tl.max(abs_bits(most), axis=1)
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
        usual = tl.min((divisor < float("inf")).to(tl.int32), axis=0) == 1
        divisor, z = divisor[:, None], z[:, None]
    else:
        usual = divisor < float("inf")
        divisor, z = divisor + tl.zeros((1, 1), tl.float32), z + tl.zeros((1, 1), tl.float32)
    if ROWS == 2:
        quantize_tile(
            x, codes, divisor, usual, z, row, first, N, K, row_bytes, ELEMENT, TILED, LEAST, MOST, MANTISSA, BIAS, FNUZ,
            LARGEST, CAST, WHOLE, INTERPRETED, R, C,
        )  # fmt: skip
    else:
        for column in range(0, K, C):
            x = load_weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            quantize_tile(
                x, codes, divisor, usual, z, row, column, N, K, row_bytes, ELEMENT, TILED, LEAST, MOST, MANTISSA, BIAS,
                FNUZ, LARGEST, CAST, WHOLE, INTERPRETED, R, C,
            )  # fmt: skip


@triton.jit
def absmax_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    partial,  # [row tiles] int32 out
    N, K,
    WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The largest bits of |w| of every tile of R rows."""
    row = tl.program_id(0) * R
    most = tl.zeros((R, C), tl.float32)
    for column in range(0, K, C):
        x = load_weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
        most = max_or_nan(most, tl.abs(x))
    tl.store(partial + tl.program_id(0), tl.max(tl.max(abs_bits(most), axis=1), axis=0))
