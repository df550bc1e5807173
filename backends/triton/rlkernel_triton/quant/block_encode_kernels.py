"""Quantising to MX and NVFP4: scales of blocks and codes of small floats in one launch, in any layout.

The arithmetic is that of `rlkernel_core.quant.mx` and `.nvfp4`. A scale of MX comes from the bits of the largest |w|,
and dividing by a power of two is a product with its inverse, exactly. NVFP4's scale of all is known only when every
weight has been read, so it takes two passes, the second one in the opposite order: what was read last is in the cache
still.

Legend: N rows · K columns · R x C tile of a program · G blocks of a tile's row, of GROUP columns each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.quant.code_tiles import float8_code, float8_value, magnitude_code, store_bytes
from rlkernel_triton.quant.encode_kernels import paired_bytes, size_bits, weights


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
    """Bytes [R * G] of the blocks of a tile; in the layout `triton_f4` those of rows r and r + 8 are neighbours."""
    G: tl.constexpr = C // GROUP
    n = tl.reshape(row + tl.arange(0, R)[:, None] + tl.zeros((1, G), tl.int32), (R * G,))
    b = tl.reshape(column // GROUP + tl.arange(0, G)[None, :] + tl.zeros((R, 1), tl.int32), (R * G,))
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
    BLOCKS: tl.constexpr = R * (C // GROUP)
    x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
    x = tl.reshape(x, (BLOCKS, GROUP))
    e = power_scale(tl.max(size_bits(x), axis=1), RULE, MANTISSA, TOP, FRACTION)
    store_scales(scale, e, row, column, N, K, GROUP, TILED, R, C)
    inverse = tl.where(e > 253, 0x00400000, (254 - e) << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    # A block that is not finite has codes of 0: what is no larger than 0 has no magnitude, and the sign is left out.
    most = tl.where(e == 255, 0.0, LARGEST)
    sign = tl.where(e == 255, 0, 8 if FOUR else 128)
    size = tl.minimum(size_bits(x).to(tl.float32, bitcast=True) * inverse[:, None], most[:, None])
    found = magnitude_code(size, MANTISSA, BIAS, AWAY)
    found |= (x.to(tl.int32, bitcast=True) >> (28 if FOUR else 24)) & sign[:, None]
    store_small(codes, tl.reshape(found, (R, C)), row, column, N, K, FOUR, TILED, WHOLE, R, C)


@triton.jit
def store_small(
    codes, found, row, column, N, K, FOUR: tl.constexpr, TILED: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Codes of 4 or 8 bits, [R, C]."""
    n, k = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    inside = (row + n < N) & (column + k < K)
    if FOUR:
        if not WHOLE:
            found = tl.where(inside, found, 0)  # the second half of an odd row's last byte
        store_bytes(
            codes, paired_bytes(found, R, C), row, column, N, K, (K + 1) // 2, 2 if TILED else 0, False, WHOLE, R, C
        )
    else:
        at = codes + (row.to(tl.int64) * K + column) + (n.to(tl.int64) * K + k)
        if WHOLE:
            tl.store(at, found.to(tl.uint8))
        else:
            tl.store(at, found.to(tl.uint8), mask=inside)


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
    x = weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
    x = tl.reshape(x, (BLOCKS, GROUP))
    one = tl.arange(0, 1)
    top = tl.load(most + one).to(tl.float32, bitcast=True)
    factor = tl.div_rn(top, tl.full((1,), 2688.0, tl.float32))
    if program == 0:
        tl.store(global_scale + one, factor)
    factor += tl.zeros((BLOCKS,), tl.float32)
    bits = tl.max(size_bits(x), axis=1)
    finite = bits < 0x7F800000
    whole = factor * 6.0
    ratio = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.where(whole > 0, whole, float("inf")))
    byte = tl.where(finite, float8_code(tl.where(finite, ratio, 0.0), 3, 7, False, 448.0), 127)
    store_scales(scale, byte, row, column, N, K, GROUP, TILED, R, C)
    divisor = float8_value(byte, 3, 7, False) * factor
    usual = finite & (divisor > 2.0**-90) & (divisor < 2.0**90)
    if INTERPRETED or tl.min(usual.to(tl.int32), axis=0) == 0:  # whose fma rounds twice
        size, own = divided(x, finite, divisor)
    else:  # one division for a block, see encode_kernels.ratio_of
        reciprocal = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), divisor)[:, None] + tl.zeros_like(x)
        size = size_bits(x).to(tl.float32, bitcast=True)  # cheaper than tl.abs, and found already
        q = size * reciprocal
        size = tl.fma(tl.fma(0.0 - q, divisor[:, None] + tl.zeros_like(x), size), reciprocal, q)
        own = x.to(tl.int32, bitcast=True)
    found = magnitude_code(tl.minimum(size, 6.0), 1, 1, AWAY) | ((own >> 28) & 8)
    store_small(codes, tl.reshape(found, (R, C)), row, column, N, K, True, TILED, WHOLE, R, C)
