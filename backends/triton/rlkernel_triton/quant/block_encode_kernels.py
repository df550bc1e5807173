"""Quantising to MX and NVFP4: scales of blocks and codes of small floats in one launch, in any layout.

The arithmetic is that of `rlkernel_core.quant.mx` and `.nvfp4`. A scale of MX comes from the bits of the largest |w|,
and dividing by a power of two is a product with its inverse, exactly. NVFP4's scale of all is known only when every
weight has been read, so it takes two passes, the second one in the opposite order: what was read last is in the cache
still.

Legend: N rows · K columns · R x C tile of a program · G blocks of a tile's row, of GROUP columns each.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import float8_code, float8_value, magnitude_code
from rlkernel_triton.quant.encode_tiles import (
    extremes,
    grouped,
    in_order,
    packed,
    ratio_of,
    size_bits,
    store_words,
    weights,
)


@triton.jit
def power_scale(
    bits,  # of the largest |w| of a block
    RULE: tl.constexpr,  # 0: floor; 1: rceil; 2: even
    MANTISSA: tl.constexpr,
    TOP: tl.constexpr,  # exponent of the element's largest value
    FRACTION: tl.constexpr,  # bits of its fraction in fp32
):
    """int32 scale bytes E; 255 where a block is not finite."""
    if RULE == 1:
        exponent = (bits >> 23) + ((bits & 0x007FFFFF) > FRACTION).to(tl.int32)
    elif RULE == 2:
        exponent = (bits + (1 << (22 - MANTISSA))) >> 23
    else:
        exponent = bits >> 23
    return tl.where(bits < 0x7F800000, tl.minimum(tl.maximum(exponent - TOP, 0), 254), 255)


@triton.jit
def store_scales(
    scale, found, row, column, N, K, GROUP: tl.constexpr, TILED: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Bytes [R * G] of the blocks of a tile; in the layout `triton_e2m1` those of rows r and r + 8 are neighbours."""
    G: tl.constexpr = C // GROUP
    n, b = row + tl.arange(0, R * G) // G, column // GROUP + tl.arange(0, R * G) % G
    if TILED:
        B: tl.constexpr = 64 // GROUP
        tile = (n // 16).to(tl.int64) * (K // 64) + b // B
        at = ((tile * 8 + n % 8) * B + b % B) * 2 + n % 16 // 8
    else:
        at = n.to(tl.int64) * tl.cdiv(K, GROUP) + b
    tl.store(scale + at, found.to(tl.uint8), mask=(n < N) & (b < tl.cdiv(K, GROUP)))


@triton.jit
def encode_powers(
    w, row_stride, column_stride, codes, scale, N, K, GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    FOUR: tl.constexpr, TILED: tl.constexpr, RULE: tl.constexpr, AWAY: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, TOP: tl.constexpr, FRACTION: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """mxfp4 (FOUR bits) and mxfp8. Grid: row tiles x column tiles."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    x = grouped(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    _, _, bits = extremes(x, True, INTERPRETED)
    e = power_scale(bits, RULE, MANTISSA, TOP, FRACTION)
    store_scales(scale, e, row, column, N, K, GROUP, TILED, R, C)
    inverse = tl.where(e > 253, 0x00400000, (254 - e) << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    # A block that is not finite has codes of 0: what is no larger than 0 has no magnitude, and the sign is left out.
    most = tl.where(e == 255, 0.0, LARGEST)
    sign = tl.where(e == 255, 0, 8 if FOUR else 128)
    size = tl.minimum(tl.abs(x) * inverse[:, None, None], most[:, None, None])
    found = magnitude_code(size, MANTISSA, BIAS, AWAY)
    found |= (x.to(tl.int32, bitcast=True) >> (28 if FOUR else 24)) & sign[:, None, None]
    store_small(codes, found, row, column, N, K, GROUP, FOUR, TILED, WHOLE, R, C)


@triton.jit
def store_small(
    codes, found, row, column, N, K, GROUP: tl.constexpr, FOUR: tl.constexpr, TILED: tl.constexpr,
    WHOLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Codes of 4 or 8 bits, [B, RUN, 4] as `grouped` has them."""
    BITS: tl.constexpr = 4 if FOUR else 8
    if not WHOLE:  # the second half of an odd row's last byte
        G: tl.constexpr = C // GROUP
        RUN: tl.constexpr = found.shape[1]
        k = tl.arange(0, RUN)[None, :, None] + tl.arange(0, GROUP // RUN)[None, None, :] * RUN
        k += (tl.arange(0, R * G) % G * GROUP)[:, None, None]
        found = tl.where(column + k < K, found, 0)
    words = in_order(packed(found, BITS, False, False), R, C * BITS // 32)
    row_bytes = K // 2 if WHOLE else (K + 1) // 2
    store_words(codes, words, row, column, N, K, row_bytes, BITS, 2 if TILED else 0, WHOLE, R, C)


@triton.jit
def largest_finite(
    w, row_stride, column_stride, most, N, K, GROUP: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The largest bits of |w| of all blocks that are finite, into `most` [1], which holds 0. Grid: row tiles."""
    row = tl.program_id(0) * R
    found = tl.zeros((R * (C // GROUP),), tl.int32)
    for column in range(0, K, C):
        x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
        bits = tl.max(size_bits(tl.reshape(x, (R * (C // GROUP), GROUP))), axis=1)
        found = tl.maximum(found, tl.where(bits < 0x7F800000, bits, 0))
    tl.atomic_max(most, tl.max(found, axis=0), sem="relaxed")


@triton.jit
def divided(x, finite, divisor):
    """(|x| over the divisor of its block, the bits of x), both 0 for what is no number."""
    divisor = tl.where(finite & (divisor > 0), divisor, float("inf"))
    size = tl.div_rn(tl.abs(x), divisor[:, None] + tl.zeros_like(x))
    return tl.where(size == size, size, 0.0), tl.where(size == size, x.to(tl.int32, bitcast=True), 0)


@triton.jit
def encode_scaled(
    w, row_stride, column_stride, codes, scale, global_scale, most, N, K, GROUP: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, TILED: tl.constexpr, AWAY: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """nvfp4. `most` holds what `largest_finite` found. Grid: row tiles x column tiles, the last ones first."""
    column_tiles = tl.cdiv(K, C)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = program // column_tiles * R
    column = program % column_tiles * C
    BLOCKS: tl.constexpr = R * (C // GROUP)
    x = grouped(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    _, _, bits = extremes(x, True, INTERPRETED)
    one = tl.arange(0, 1)
    top = tl.load(most + one).to(tl.float32, bitcast=True)
    factor = tl.div_rn(top, tl.full((1,), 2688.0, tl.float32))
    if program == 0:
        tl.store(global_scale + one, factor)
    whole = factor * 6.0
    factor += tl.zeros((BLOCKS,), tl.float32)
    finite = bits < 0x7F800000
    ratio = ratio_of(
        tl.where(finite, bits, 0).to(tl.float32, bitcast=True), tl.where(whole > 0, whole, float("inf")), INTERPRETED
    )
    ratio = tl.where(whole > 0, ratio, 0.0)
    byte = tl.where(finite, float8_code(ratio, 3, 7, False, 448.0), 127)
    store_scales(scale, byte, row, column, N, K, GROUP, TILED, R, C)
    divisor = float8_value(byte, 3, 7, False) * factor
    usable = finite & (divisor > 0)
    # What is divided by inf has no magnitude, but its sign where it is a number.
    size = ratio_of(x, tl.where(usable, divisor, float("inf"))[:, None, None], INTERPRETED)
    sign = (tl.where(size == size, size, 0.0).to(tl.int32, bitcast=True) >> 28) & 8
    most = tl.where(usable, 6.0, 0.0)
    found = magnitude_code(tl.minimum(tl.abs(size), most[:, None, None]), 1, 1, AWAY) | sign
    store_small(codes, found, row, column, N, K, GROUP, True, TILED, WHOLE, R, C)
