"""Dequantising from any layout, and moving codes between layouts.

The value of a code is fl32((q - z) s), or fl32(table[q] a), then rounded once; with nested scales
a = fl32(fl32(map[code] b) + offset), a product and then a sum: launch with `enable_fp_fusion=False`.

Legend: N rows · K columns · R x C tile of a program.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import float8_value, load_bytes, narrowed, pairs, store_bytes, widened
from rlkernel_triton.quant.encode_kernels import FLOAT8, INT8, NF4


@triton.jit
def nested_scales(codes, block, inside, nested_table, nested_absmax, nested_offset):
    """fp32 scales of nf4 blocks whose scales are quantised."""
    code = tl.load(codes, mask=inside, other=0).to(tl.int32)
    shared = tl.load(nested_absmax + block // 256, mask=inside, other=0.0)
    return tl.load(nested_table + code) * shared + tl.load(nested_offset)


@triton.jit
def dequantise(
    codes, row_bytes, scale, zero, scale_row, scale_group, table, nested_table, nested_absmax, nested_offset, out,
    first, N, K, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr,
    TILED: tl.constexpr, SYMMETRIC: tl.constexpr, NESTED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    FNUZ: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of the weight's rows from `first` on, a multiple of R.

    GROUP columns and SCALE_ROWS rows share a scale, all where 0; GROUP divides C, or C it.
    """
    column_tiles = tl.cdiv(K, C)
    row = first + tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    n = row + tl.arange(0, R)
    k = column + tl.arange(0, C)
    if ELEMENT == INT8 or ELEMENT == FLOAT8:
        there = (n < N)[:, None] & (k < K)[None, :]
        code = tl.load(codes + n.to(tl.int64)[:, None] * K + k[None, :], mask=there, other=0).to(tl.int32)
        value = float8_value(code, MANTISSA, BIAS, FNUZ) if ELEMENT == FLOAT8 else code.to(tl.float32)
    else:
        code = pairs(load_bytes(codes, row, column, N, K, row_bytes, TILED, ELEMENT == NF4, R, C), R, C)
        if ELEMENT == NF4:
            value = tl.load(table + code)
        else:
            value = code.to(tl.float32) - (8.0 if SYMMETRIC else 0.0)
    # Scales of a tile: [R, G], spread over the columns of their groups.
    SPAN: tl.constexpr = C if GROUP == 0 or GROUP > C else GROUP
    G: tl.constexpr = C // SPAN
    group = tl.arange(0, G) * 0
    if GROUP > 0:
        group = column // GROUP + tl.arange(0, G)
    inside = (n < N)[:, None] & (group * (GROUP if GROUP > 0 else 1) < K)[None, :]
    scale_n = n
    if SCALE_ROWS == 0:
        scale_n = n * 0
    elif SCALE_ROWS > 1:
        scale_n = n // SCALE_ROWS
    at = scale_n.to(tl.int64)[:, None] * scale_row + group.to(tl.int64)[None, :] * scale_group
    if NESTED:
        block = n.to(tl.int64)[:, None] * (K // GROUP) + group[None, :]
        s = nested_scales(scale + at, block, inside, nested_table, nested_absmax, nested_offset)
    else:
        s = widened(tl.load(scale + at, mask=inside, other=0.0), INTERPRETED)
    value = tl.reshape(value, (R, G, SPAN))
    if not SYMMETRIC:
        value -= tl.load(zero + at, mask=inside, other=0).to(tl.float32)[:, :, None]
    value = tl.reshape(value * s[:, :, None], (R, C))
    there = (n < N)[:, None] & (k < K)[None, :]
    tl.store(
        out + (n - first).to(tl.int64)[:, None] * K + k[None, :],
        narrowed(value, out.dtype.element_ty, INTERPRETED),
        mask=there,
    )


@triton.jit
def move(
    source, target, row_bytes, N, K, TO_TILES: tl.constexpr, HIGH_FIRST: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, FLOATS: tl.constexpr = False,
):  # fmt: skip
    """4-bit codes from the canonical layout to tiles, or back."""
    TILED: tl.constexpr = 2 if FLOATS else 1
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    found = load_bytes(source, row, column, N, K, row_bytes, 0 if TO_TILES else TILED, HIGH_FIRST, R, C)
    store_bytes(target, found, row, column, N, K, row_bytes, TILED if TO_TILES else 0, HIGH_FIRST, True, R, C)
