"""Quantising: scales and codes of a weight in one launch (two for one scale in all), in any layout.

The arithmetic is that of `rlkernel_core.quant.grid` and `.nf4`, operation by operation: fp32, rounded to nearest even,
none contracted (launch with `enable_fp_fusion=False`). A scale is found from the bits of |w|, whose order as integers
is that of the numbers with inf and NaN above them all, so what is not finite shows in the maximum.

Legend: N rows · K columns · R x C tile of a program · G groups of a tile's row · g columns of a group.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import float8_code, narrowed, store_bytes
from rlkernel_triton.quant.encode_tiles import (
    EVEN,
    UP,
    early_integers,
    early_scale,
    extremes,
    grouped,
    in_order,
    integer_bits,
    nan_or_larger,
    nearest_code,
    packed,
    paired_bytes,
    ratio_of,
    scale_and_zero,
    size_bits,
    store_words,
    weights,
)

INT4: Final = tl.constexpr(0)
INT8: Final = tl.constexpr(1)
FLOAT8: Final = tl.constexpr(2)
NF4: Final = tl.constexpr(3)
FP4: Final = tl.constexpr(4)


@triton.jit
def encode_groups(
    w, row_stride, column_stride, codes, row_bytes, scale, zero, scale_row, scale_group, cells, largest, N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    FLOAT_ZERO: tl.constexpr = False, ROUNDING: tl.constexpr = 0,
):  # fmt: skip
    """Groups of GROUP columns of a row: integers, nf4 and fp4. Grid: row tiles x column tiles."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    G: tl.constexpr = C // GROUP
    x = grouped(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    low, high, bits = extremes(x, SYMMETRIC, INTERPRETED)
    SCALE: tl.constexpr = scale.dtype.element_ty
    if ROUNDING == EVEN:
        stored, divisor, z = scale_and_zero(
            low, high, bits, largest, SCALE, SYMMETRIC, False, INTERPRETED, FLOAT_ZERO
        )  # fmt: skip
        usable = divisor < float("inf")
    else:
        stored, divisor = early_scale(x, bits, largest, SCALE, ROUNDING == UP, INTERPRETED)
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
            tl.store(zero + at, narrowed(z, SCALE, INTERPRETED), mask=inside)
        else:
            tl.store(zero + at, z.to(tl.uint8), mask=inside)
    if ROUNDING == EVEN:
        ratio = ratio_of(x, divisor[:, None, None], INTERPRETED)
    else:
        ratio = early_integers(x * divisor[:, None, None], ROUNDING)
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
    found = packed(found, BITS, INTEGER, (ELEMENT == NF4 or ELEMENT == FP4) and not TILED)
    if WHOLE:
        found = tl.where(usable[:, None, None], found, NOUGHT * 0x11111111 if ELEMENT == NF4 else 0)
    if INTEGER:
        found += (z_code * (0x11111111 if BITS == 4 else 0x01010101))[:, None, None]
    if ELEMENT == INT8:
        found ^= -2139062144
    store_words(codes, in_order(found, R, C * BITS // 32), row, column, N, K, row_bytes, BITS, TILED, WHOLE, R, C)


@triton.jit
def store_rows(
    x, codes, divisor, usual, z, row, column, N, K, row_bytes, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    LARGEST: tl.constexpr, CAST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Code a tile [R, C] of w / s and write it. `usual`: no divisor is inf."""
    if usual:
        ratio = ratio_of(x, divisor, INTERPRETED)
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
            found = float8_code(ratio, MANTISSA, BIAS, FNUZ, LARGEST).to(tl.uint8)
        tl.store(codes + n * K + k, found, mask=inside)
    else:
        found = integer_bits(ratio, LEAST - z, MOST - z)
        if ELEMENT == INT8:
            tl.store(codes + n * K + k, found.to(tl.int8), mask=inside)
        else:
            found = (found + z.to(tl.int32)) & 15
            if not WHOLE:
                found = tl.where(inside, found, 0)
            store_bytes(codes, paired_bytes(found, R, C), row, column, N, K, row_bytes, TILED, False, WHOLE, R, C)


@triton.jit
def encode_rows(
    w, row_stride, column_stride, codes, row_bytes, scale, zero, largest, partial, N, K, parts,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, POWER: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, FNUZ: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr, CAST: tl.constexpr = False,
):  # fmt: skip
    """A scale per row (ROWS 1: the row is read twice), per R x C block (ROWS 2: once), or one in all (ROWS 0).

    One in all reads `partial`, the largest bits of each of `parts` row tiles, which `largest_bits` wrote.
    CAST: the GPU has an instruction for e4m3fn.
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
        most, least, top = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
        for column in range(0, K, C):
            x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            most = nan_or_larger(most, tl.abs(x))
            if not SYMMETRIC:
                least, top = tl.minimum(least, x), tl.maximum(top, x)
        bits = tl.max(size_bits(most), axis=1)
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
        store_rows(
            x, codes, divisor, usual, z, row, first, N, K, row_bytes, ELEMENT, TILED, LEAST, MOST, MANTISSA, BIAS, FNUZ,
            LARGEST, CAST, WHOLE, INTERPRETED, R, C,
        )  # fmt: skip
    else:
        for column in range(0, K, C):
            x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            store_rows(
                x, codes, divisor, usual, z, row, column, N, K, row_bytes, ELEMENT, TILED, LEAST, MOST, MANTISSA, BIAS,
                FNUZ, LARGEST, CAST, WHOLE, INTERPRETED, R, C,
            )  # fmt: skip


@triton.jit
def largest_bits(
    w, row_stride, column_stride, partial, N, K, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The largest bits of |w| of every tile of R rows."""
    row = tl.program_id(0) * R
    most = tl.zeros((R, C), tl.float32)
    for column in range(0, K, C):
        x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
        most = nan_or_larger(most, tl.abs(x))
    tl.store(partial + tl.program_id(0), tl.max(tl.max(size_bits(most), axis=1), axis=0))
