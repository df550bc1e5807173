"""What a tile of codes stands for; dequantizing from any layout, and moving codes between layouts.

    integers         fl32((q - z) s)
    nf4, fp4         fl32(table[q] a); with nested scales a = fl32(fl32(map[code] b) + offset)
    mxfp4, mxfp8     q 2^(E - 127)
    nvfp4            fl32(q fl32(s g))
    k-quants         fl32(fl32(d sc) q - fl32(dmin mn)), q6_k: fl32(d sc) (q - 32); every product is exact in fp32
    dense            a 16- or 32-bit float as it is: weights that were dequantized before

All are rounded once more, to the type of the result. Launch with `enable_fp_fusion=False`: a product and the sum that
follows it must not be contracted.

Bytes: codes and scales in (N K bits / 8 and a little), 2 or 4 bytes an element out, which decide.

Legend: N rows, of an expert where there are any · K columns · R x C tile of a program.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import (
    DENSE,
    FLOAT8,
    INT8,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    Q5_K,
    Q6_K,
    decode_block_scale,
    decode_e2m1,
    decode_e8m0,
    decode_float8,
    load_bytes,
    round_to,
    store_bytes,
    to_float32,
    unpack_nibbles,
)
from rlkernel_triton.quant.operand_tiles import decode_e2m1_tile, load_e2m1_scales


@triton.jit
def load_nested_scales(codes, block, inside, nested_table, nested_absmax, nested_offset):
    """fp32 scales of nf4 blocks whose scales are quantized."""
    code = tl.load(codes, mask=inside, other=0).to(tl.int32)
    shared = tl.load(nested_absmax + block // 256, mask=inside, other=0.0)
    return tl.load(nested_table + code) * shared + tl.load(nested_offset)


@triton.jit
def load_group_values(
    codes, row_bytes, scale, zero, scale_row, scale_group, table, nested_table, nested_absmax, nested_offset, row,
    column, N, K, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, NESTED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[R, C] fp32: values of rows from `row` on, columns from `column` on, a multiple of C.

    Parts are as in `dequantize_kernel`. GROUP columns and SCALE_ROWS rows share a scale, all where 0; GROUP divides C,
    or C it.
    """
    n = row + tl.arange(0, R)
    k = column + tl.arange(0, C)
    if ELEMENT == INT8 or ELEMENT == FLOAT8:
        there = (n < N)[:, None] & (k < K)[None, :]
        code = tl.load(codes + n.to(tl.int64)[:, None] * K + k[None, :], mask=there, other=0).to(tl.int32)
        value = decode_float8(code, MANTISSA, BIAS, FNUZ) if ELEMENT == FLOAT8 else code.to(tl.float32)
    else:
        code = unpack_nibbles(load_bytes(codes, row, column, N, K, row_bytes, TILED, ELEMENT == NF4, R, C), R, C)
        if ELEMENT == NF4:
            value = tl.load(table + code)
        else:
            value = code.to(tl.float32) - (8.0 if SYMMETRIC else 0.0)
    # Scales of a tile: [R, G], spread over the columns of their groups.
    # Columns of the tile that share a scale.
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
        # Nested scales are counted in the order of the flat weight.
        block = n.to(tl.int64)[:, None] * (K // GROUP) + group[None, :]
        s = load_nested_scales(scale + at, block, inside, nested_table, nested_absmax, nested_offset)
    else:
        s = to_float32(tl.load(scale + at, mask=inside, other=0.0), INTERPRETED)
    value = tl.reshape(value, (R, G, SPAN))
    if not SYMMETRIC:
        value -= tl.load(zero + at, mask=inside, other=0).to(tl.float32)[:, :, None]
    return tl.reshape(value * s[:, :, None], (R, C))


@triton.jit
def dequantize_kernel(
    codes,  # [N, K], two a byte [N, row_bytes], or words of `triton_w4` if TILED
    row_bytes,
    scale,  # strides scale_row and scale_group; shared by GROUP columns and SCALE_ROWS rows, all where 0
    zero,  # as `scale`, unless SYMMETRIC
    scale_row, scale_group,
    table,  # [16] fp32, with NF4
    nested_table,  # [256] fp32, with NESTED
    nested_absmax,  # [blocks / 256] fp32, with NESTED
    nested_offset,  # [1] fp32, with NESTED
    out,  # [N - first, K] out; of a flat weight K - start numbers
    first, N, K,
    start,  # of a flat weight (FLAT, N = 1) the first number that is wanted
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr,
    TILED: tl.constexpr, SYMMETRIC: tl.constexpr, NESTED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    FNUZ: tl.constexpr, INTERPRETED: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """A tile of the weight's rows from `first` on, a multiple of R where TILED."""
    left = 0
    if FLAT:
        left = start // C * C
    column_tiles = tl.cdiv(K - left, C)
    row = first + tl.program_id(0) // column_tiles * R
    column = left + tl.program_id(0) % column_tiles * C
    value = load_group_values(
        codes, row_bytes, scale, zero, scale_row, scale_group, table, nested_table, nested_absmax, nested_offset, row,
        column, N, K, GROUP, SCALE_ROWS, ELEMENT, TILED, SYMMETRIC, NESTED, MANTISSA, BIAS, FNUZ, R, C, INTERPRETED,
    )  # fmt: skip
    n = row + tl.arange(0, R)
    k = column + tl.arange(0, C)
    there = (n < N)[:, None] & (k < K)[None, :]
    at = (n - first).to(tl.int64)[:, None] * K + k[None, :]
    if FLAT:
        there = there & (k >= start)[None, :]
        at = at - start
    tl.store(out + at, round_to(value, out.dtype.element_ty, INTERPRETED), mask=there)


@triton.jit
def repack_kernel(
    source,  # bytes [N, row_bytes], or words of tiles
    target,  # the other of the two, out
    row_bytes, N, K,
    TO_TILES: tl.constexpr, HIGH_FIRST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    FLOATS: tl.constexpr = False,  # the codes are those of `triton_e2m1`
):  # fmt: skip
    """4-bit codes from the canonical layout to tiles, or back."""
    # Which words `load_bytes` and `store_bytes` know: 1 of integers, 2 of floats.
    TILED: tl.constexpr = 2 if FLOATS else 1
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    found = load_bytes(source, row, column, N, K, row_bytes, 0 if TO_TILES else TILED, HIGH_FIRST, R, C)
    store_bytes(target, found, row, column, N, K, row_bytes, TILED if TO_TILES else 0, HIGH_FIRST, True, R, C)


@triton.jit
def spread_blocks(per_block, R: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr):
    """[R, C / SPAN] as [R, C]: the entry of every column's block."""
    return tl.reshape(tl.broadcast_to(per_block[:, :, None], (R, C // SPAN, SPAN)), (R, C))


@triton.jit
def load_high_bits(high, n, k0, N, K, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """[R, C] int32: the bits of codes beyond the fourth, BITS of each."""
    MANY: tl.constexpr = 8 // BITS
    row_bytes = tl.cdiv(K, MANY)
    b = k0 // MANY + tl.arange(0, C // MANY)
    inside = (n < N)[:, None] & (b < row_bytes)[None, :]
    byte = tl.load(high + n.to(tl.int64)[:, None] * row_bytes + b[None, :], mask=inside, other=0).to(tl.int32)
    place = tl.arange(0, MANY) * BITS
    return tl.reshape((byte[:, :, None] >> place[None, None, :]) & ((1 << BITS) - 1), (R, C))


@triton.jit
def load_per_block(part, n, k0, N, K, SPAN: tl.constexpr, C: tl.constexpr):
    """[R, C / SPAN] entries of a part [N, ceil(K / SPAN)]; 0 outside of it."""
    blocks = tl.cdiv(K, SPAN)
    g = k0 // SPAN + tl.arange(0, C // SPAN)
    inside = (n < N)[:, None] & (g < blocks)[None, :]
    return tl.load(part + n.to(tl.int64)[:, None] * blocks + g[None, :], mask=inside, other=0)


@triton.jit
def load_per_super_block(part, n, k0, N, K, SUB: tl.constexpr, C: tl.constexpr):
    """[R, C / SUB] fp32 entries of a part [N, ceil(K / 256)], one for each sub-block of SUB columns."""
    blocks = tl.cdiv(K, 256)
    column = k0 + tl.arange(0, C // SUB) * SUB
    inside = (n < N)[:, None] & (column < K)[None, :]
    at = n.to(tl.int64)[:, None] * blocks + (column // 256)[None, :]
    return tl.load(part + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_block_values(
    codes, high, scale, d, least, dmin, factor, row, n, k0, N, K, FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[R, C] fp32: values of rows n = row .. row + R, columns k0 .. k0 + C; k0 is a multiple of C."""
    k = k0 + tl.arange(0, C)
    inside = (n < N)[:, None] & (k < K)[None, :]
    if FORMAT == DENSE:
        at = n.to(tl.int64)[:, None] * K + k[None, :]
        return to_float32(tl.load(codes + at, mask=inside, other=0.0), INTERPRETED)
    if FORMAT == MXFP8:
        at = n.to(tl.int64)[:, None] * K + k[None, :]
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        s = decode_e8m0(load_per_block(scale, n, k0, N, K, 32, C).to(tl.int32))
        value = decode_float8(code, MANTISSA, BIAS, False)
        return tl.where(inside, value * spread_blocks(s, R, C, 32), 0.0)
    code = unpack_nibbles(load_bytes(codes, row, k0, N, K, (K + 1) // 2, False, False, R, C), R, C)
    if FORMAT == MXFP4 or FORMAT == NVFP4:
        SPAN: tl.constexpr = 32 if FORMAT == MXFP4 else 16
        s = decode_block_scale(load_per_block(scale, n, k0, N, K, SPAN, C).to(tl.int32), FORMAT)
        if FORMAT == NVFP4:
            s *= tl.load(factor)
        value = decode_e2m1(code) * spread_blocks(s, R, C, SPAN)
    else:
        SUB: tl.constexpr = 16 if FORMAT == Q6_K else 32
        if FORMAT == Q5_K:
            code |= load_high_bits(high, n, k0, N, K, 1, R, C) << 4
        elif FORMAT == Q6_K:
            code |= load_high_bits(high, n, k0, N, K, 2, R, C) << 4
        step = load_per_super_block(d, n, k0, N, K, SUB, C) * load_per_block(scale, n, k0, N, K, SUB, C).to(tl.float32)
        if FORMAT == Q6_K:
            value = (code.to(tl.float32) - 32.0) * spread_blocks(step, R, C, SUB)
        else:
            below = load_per_super_block(dmin, n, k0, N, K, SUB, C) * load_per_block(least, n, k0, N, K, SUB, C).to(
                tl.float32
            )
            value = code.to(tl.float32) * spread_blocks(step, R, C, SUB) - spread_blocks(below, R, C, SUB)
    return tl.where(inside, value, 0.0)


@triton.jit
def dequantize_blocks_kernel(
    codes,  # [N, K], or two a byte [N, K / 2]; of DENSE the values
    high,  # [N, K BITS / 8] uint8: codes' bits beyond the fourth, q5_k and q6_k
    scale,  # [N, K / block] bytes
    d,  # [N, K / 256] fp16, k-quants
    least,  # [N, K / 32] uint8, q4_k and q5_k
    dmin,  # [N, K / 256] fp16, q4_k and q5_k
    factor,  # [1] fp32, nvfp4
    out,  # [N - first, K] out
    first, N, K,
    FORMAT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of the weight's rows from `first` on."""
    column_tiles = tl.cdiv(K, C)
    row = first + tl.program_id(0) // column_tiles * R
    k0 = tl.program_id(0) % column_tiles * C
    n, k = row + tl.arange(0, R), k0 + tl.arange(0, C)
    value = load_block_values(
        codes, high, scale, d, least, dmin, factor, row, n, k0, N, K, FORMAT, MANTISSA, BIAS, R, C, INTERPRETED
    )
    at = (n - first).to(tl.int64)[:, None] * K + k[None, :]
    there = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + at, round_to(value, out.dtype.element_ty, INTERPRETED), mask=there)


@triton.jit
def dequantize_e2m1_tiles_kernel(
    codes,  # [N / 16, K / 64, 128] int32
    scale,  # [N / 16, K / 64, 8, B / 2] int32
    factor,  # [1] fp32, nvfp4
    out,  # [N - first, K] out
    first, N, K,
    FORMAT: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """16 rows x C columns of the weight's rows first .. N; `first` is a multiple of 16, K one of C."""
    column_tiles = K // C
    row16 = first // 16 + tl.program_id(0) // column_tiles
    k0 = tl.program_id(0) % column_tiles * C
    one = tl.arange(0, 1)
    words = tl.load(codes + (row16 + one).to(tl.int64)[:, None] * (K * 2) + (k0 * 2 + tl.arange(0, C * 2))[None, :])
    s = load_e2m1_scales(scale, row16, k0, K, FORMAT, 1, C)
    whole = 1.0
    if FORMAT == NVFP4:
        whole = tl.load(factor)
    X_TYPE: tl.constexpr = out.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if INTERPRETED else X_TYPE
    value = decode_e2m1_tile(words, s, whole, FORMAT, X_TYPE, DTYPE, 1, C, False, False, INTERPRETED)
    n, k = row16 * 16 + tl.arange(0, 16), k0 + tl.arange(0, C)
    at = (n - first).to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + at, round_to(value.to(tl.float32), X_TYPE, INTERPRETED), mask=(n < N)[:, None])
