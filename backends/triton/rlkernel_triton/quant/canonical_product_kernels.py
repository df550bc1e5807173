"""x times a weight in its canonical layout, of any shape, in one launch.

The product is transposed, D [N, M] = W [N, K] x^T, so that decoded weights are the operand that matrix instructions
take from registers.

A scale multiplies the sum over its group in fp32, so no weight is rounded (FOLD False); or codes times scales are
rounded to the type of x before the product, as `dequantize` does (FOLD True, and formats of blocks always).

Legend: M tokens · N rows, of an expert where there are any · K columns of the weight · BN x BM tile of the transposed
result · BK columns a step · E experts.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import (
    DENSE,
    FLOAT8,
    INT8,
    NF4,
    decode_float8,
    load_bytes,
    round_to,
    to_float32,
    unpack_nibbles,
)
from rlkernel_triton.quant.dequantize_kernels import load_block_values, load_nested_scales
from rlkernel_triton.quant.epilogue_kernels import store_epilogue
from rlkernel_triton.quant.operand_tiles import finish_dot


@triton.jit
def load_canonical_values(
    codes, row_bytes, table, zero, scale_row, scale_group, n0, k0, N, K, GROUP: tl.constexpr, ELEMENT: tl.constexpr,
    SYMMETRIC: tl.constexpr, MANTISSA: tl.constexpr, FLOAT_BIAS: tl.constexpr, FNUZ: tl.constexpr, RAGGED: tl.constexpr,
    CAST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BN, BK] fp32: codes less zero-points, or table values, of a canonical weight; 0 outside of it."""
    n = n0 + tl.arange(0, BN)
    k = k0 + tl.arange(0, BK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ELEMENT == INT8 or ELEMENT == FLOAT8:
        code = tl.load(codes + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0)
        if CAST:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        code = code.to(tl.int32)
        return decode_float8(code, MANTISSA, FLOAT_BIAS, FNUZ) if ELEMENT == FLOAT8 else code.to(tl.float32)
    if RAGGED:  # nf4 whose rows start inside a byte
        e = n.to(tl.int64)[:, None] * K + k[None, :]
        byte = tl.load(codes + e // 2, mask=inside, other=0).to(tl.int32)
        code = tl.where(e % 2 == 0, byte >> 4, byte & 15)
    else:
        code = unpack_nibbles(load_bytes(codes, n0, k0, N, K, row_bytes, False, ELEMENT == NF4, BN, BK), BN, BK)
    if ELEMENT == NF4:
        value = tl.load(table + code)
    elif SYMMETRIC:
        value = code.to(tl.float32) - 8.0
    else:
        at = n.to(tl.int64) * scale_row + (k0 // GROUP if GROUP > 0 else 0) * scale_group
        value = code.to(tl.float32) - tl.load(zero + at, mask=n < N, other=0).to(tl.float32)[:, None]
    return tl.where(inside, value, 0.0)


@triton.jit
def load_canonical_scales(
    scale, scale_row, scale_group, nested_table, nested_absmax, nested_offset, n, k, k0, N, K, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ELEMENT: tl.constexpr, NESTED: tl.constexpr, RAGGED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 scales of a step, [BN, 1], or [BN, BK] for nf4 whose blocks go on from row to row."""
    if RAGGED:
        block = (n.to(tl.int64)[:, None] * K + k[None, :]) // GROUP
        inside = (n < N)[:, None] & (k < K)[None, :]
        at = block
    else:
        group = k0 // GROUP if GROUP > 0 else 0
        rows = n
        if SCALE_ROWS == 0:
            rows = n * 0
        elif SCALE_ROWS > 1:
            rows = n // SCALE_ROWS
        at = (rows.to(tl.int64) * scale_row + group * scale_group)[:, None]
        block = (n.to(tl.int64) * (K // GROUP if GROUP > 0 else 1) + group)[:, None]
        inside = (n < N)[:, None]
    if NESTED:
        return load_nested_scales(scale + at, block, inside, nested_table, nested_absmax, nested_offset)
    return to_float32(tl.load(scale + at, mask=inside, other=0.0), INTERPRETED)


@triton.jit(do_not_specialize=["M"])
def canonical_product_kernel(
    x,  # [M, K], rows x_row apart
    x_row,
    x_scale,  # [M, ..] fp32, rows x_scale_row apart, with X_SCALE
    x_scale_row,
    codes,  # [N, K], or two a byte [N, row_bytes]
    row_bytes,
    scale,  # strides scale_row and scale_group; shared by GROUP columns and SCALE_ROWS rows, all where 0
    zero,  # as `scale`, unless SYMMETRIC
    scale_row, scale_group,
    table,  # [16] fp32, with NF4
    nested_table,  # [256] fp32, with NESTED
    nested_absmax,  # [blocks / 256] fp32, with NESTED
    nested_offset,  # [1] fp32, with NESTED
    y,  # [M, width] out; width is N // 2 if PAIR, else N
    bias,  # [N], with BIAS
    xa,  # [M, lora_rank]: x A^T, with RANK
    lora_b,  # [N, lora_rank], rows lora_row apart, with RANK
    lora_row, lora_rank, lora_scale,
    residual,  # [M, width], rows residual_row apart, with RESIDUAL
    residual_row, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ELEMENT: tl.constexpr, SYMMETRIC: tl.constexpr, NESTED: tl.constexpr,
    MANTISSA: tl.constexpr, FLOAT_BIAS: tl.constexpr, FNUZ: tl.constexpr,
    RAGGED: tl.constexpr,  # nf4 whose blocks go on from row to row
    FOLD: tl.constexpr, WIDE: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr,
    WIDE_LORA: tl.constexpr, RESIDUAL: tl.constexpr, PAIR: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERPRETED: tl.constexpr, CAST: tl.constexpr = False,
):  # fmt: skip
    """A canonical weight of any shape. BK divides GROUP, or GROUP is 0; nf4 always folds. WIDE multiplies in fp32.

    X_SCALE: 0 none, 1 one a token, 2 one for 128 columns of a token. CAST: e4m3fn, for which the GPU has instructions.
    """
    m_tiles = tl.cdiv(M, BM)
    width = N // 2 if PAIR else N
    # Neighboring programs share rows of the weight, which they find in L2.
    n0 = tl.program_id(0) // m_tiles * BN
    X_TYPE: tl.constexpr = x.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if WIDE or INTERPRETED else X_TYPE
    m = tl.program_id(0) % m_tiles * BM + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    other = acc if PAIR else tl.zeros((1, 1), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        # x^T [BK, BM]; rows of the weight are decoded to [BN, BK] below.
        at = m.to(tl.int64)[None, :] * x_row + k[:, None]
        xt = tl.load(x + at, mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
        if WIDE or INTERPRETED:
            xt = to_float32(xt, INTERPRETED)
        # The gate's rows, and those of the value, `width` further down.
        for half in tl.static_range(2 if PAIR else 1):
            row = n0 + half * width
            rows = n + half * width
            limit = width if PAIR and half == 0 else N
            w = load_canonical_values(
                codes, row_bytes, table, zero, scale_row, scale_group, row, k0, limit, K, GROUP, ELEMENT, SYMMETRIC,
                MANTISSA, FLOAT_BIAS, FNUZ, RAGGED, CAST, BN, BK,
            )  # fmt: skip
            s = load_canonical_scales(
                scale, scale_row, scale_group, nested_table, nested_absmax, nested_offset, rows, k, k0, limit, K, GROUP,
                SCALE_ROWS, ELEMENT, NESTED, RAGGED, INTERPRETED,
            )  # fmt: skip
            if FOLD:
                w = w * s
                if not WIDE:
                    w = to_float32(round_to(w, X_TYPE, INTERPRETED), INTERPRETED)
                product = tl.dot(w.to(DTYPE), xt, input_precision="ieee")
            else:
                product = tl.dot(w.to(DTYPE), xt, input_precision="ieee")
                if GROUP > 0:
                    product *= s
            if X_SCALE == 2:
                product *= tl.load(x_scale + m * x_scale_row + k0 // 128, mask=m < M, other=0.0)[None, :]
            if half == 0:
                acc = finish_dot(acc + product, acc, k0, K)
            else:
                other = finish_dot(other + product, other, k0, K)
    # Scales of rows, or one in all, wait for the whole sum.
    ROW_SCALE: tl.constexpr = 0 if FOLD or GROUP > 0 else (1 if SCALE_ROWS == 1 else 2)
    store_epilogue(
        acc, other, n, m, N, M, y, residual, residual_row, scale, x_scale, bias, xa, lora_b, lora_row, lora_rank,
        lora_scale, ROW_SCALE, X_SCALE == 1, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def expert_of_tile(tile, ends, M, E, EB: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end of its rows) of a tile of BM rows; an expert of E or more: there is no such tile.

    Tiles are counted expert by expert, ceil(rows / BM) each. EB: E at most, a power of two.
    """
    # Where each expert's rows end, never before those of the expert ahead of it.
    e = tl.arange(0, EB)
    last = tl.minimum(tl.maximum(tl.load(ends + e, mask=e < E, other=0), 0), M)
    last = tl.associative_scan(last, 0, _maximum)
    first = tl.minimum(tl.maximum(tl.load(ends + e - 1, mask=(e > 0) & (e <= E), other=0), 0), M)
    first = tl.associative_scan(first, 0, _maximum)
    # Tiles up to each expert; the tile's expert is the number of experts that end before it.
    tiles = tl.where(e < E, (last - first + BM - 1) // BM, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = e == expert
    before = tl.sum(tl.where(mine, upto - tiles, 0), 0)
    start = tl.sum(tl.where(mine, first, 0), 0) + (tile - before) * BM
    return expert, start, tl.sum(tl.where(mine, last, 0), 0)


@triton.jit(do_not_specialize=["M"])
def block_product_kernel(
    x,  # [M, K], rows x_row apart
    x_row,
    codes,  # [E N, K], or two a byte; of DENSE the values
    high,  # [N, K BITS / 8] uint8: codes' bits beyond the fourth, q5_k and q6_k
    scale,  # [N, K / block] bytes
    d,  # [N, K / 256] fp16, k-quants
    least,  # [N, K / 32] uint8, q4_k and q5_k
    dmin,  # [N, K / 256] fp16, q4_k and q5_k
    factor,  # [1] fp32, nvfp4
    x_scale,  # [M] fp32, with X_SCALE
    ends,  # [first_expert + E] integer, with EB: one past each expert's last row of x
    first_expert,
    y,  # [M, width] out; width is N // 2 if PAIR, else N
    bias,  # [N], with BIAS
    xa,  # [M, lora_rank]: x A^T, with RANK
    lora_b,  # [N, lora_rank], rows lora_row apart, with RANK
    lora_row, lora_rank, lora_scale,
    residual,  # [M, width], rows residual_row apart, with RESIDUAL
    residual_row, M, N, K, E, m_tiles,
    FORMAT: tl.constexpr, MANTISSA: tl.constexpr, FLOAT_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
    EB: tl.constexpr,  # experts at most, a power of two; 0: no experts
    WIDE: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr,
    RESIDUAL: tl.constexpr, PAIR: tl.constexpr, ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """x times a weight of any shape, its values rounded to the type of x (WIDE: not rounded, multiplied in fp32).

    `codes` and the other parts are those of experts from `first_expert` on, of which there are E where EB > 0.
    """
    width = N // 2 if PAIR else N
    tile = tl.program_id(0) % m_tiles
    n0 = tl.program_id(0) // m_tiles * BN
    expert, m0, stop = tile * 0, tile * BM, M
    if EB > 0:
        expert, m0, stop = expert_of_tile(tile, ends, M, E + first_expert, EB, BM)
        expert -= first_expert
    if (expert >= 0) & (expert < E):
        X_TYPE: tl.constexpr = x.dtype.element_ty
        DTYPE: tl.constexpr = tl.float32 if WIDE or INTERPRETED else X_TYPE
        m = m0 + tl.arange(0, BM)
        n = n0 + tl.arange(0, BN)
        # The expert's first row among the weight's.
        above = expert * N
        acc = tl.zeros((BN, BM), tl.float32)
        other = acc if PAIR else tl.zeros((1, 1), tl.float32)
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            k = k0 + tl.arange(0, BK)
            at = m.to(tl.int64)[None, :] * x_row + k[:, None]
            xt = tl.load(x + at, mask=(m < stop)[None, :] & (k < K)[:, None], other=0.0)
            if WIDE or INTERPRETED:
                xt = to_float32(xt, INTERPRETED)
            for half in tl.static_range(2 if PAIR else 1):
                row = above + n0 + half * width
                limit = above + (width if PAIR and half == 0 else N)
                w = load_block_values(
                    codes, high, scale, d, least, dmin, factor, row, row + tl.arange(0, BN), k0, limit, K, FORMAT,
                    MANTISSA, FLOAT_BIAS, BN, BK, INTERPRETED,
                )  # fmt: skip
                if not WIDE:
                    w = to_float32(round_to(w, X_TYPE, INTERPRETED), INTERPRETED)
                if half == 0:
                    total = tl.dot(w.to(DTYPE), xt, acc, input_precision="ieee")
                    acc = total if FORMAT == DENSE else finish_dot(total, acc, k0, K)
                else:
                    total = tl.dot(w.to(DTYPE), xt, other, input_precision="ieee")
                    other = total if FORMAT == DENSE else finish_dot(total, other, k0, K)
        store_epilogue(
            acc, other, n, m, N, stop, y, residual, residual_row, x, x_scale, bias + (above + first_expert * N), xa,
            lora_b, lora_row, lora_rank, lora_scale, 0, X_SCALE, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION,
            INTERPRETED,
        )  # fmt: skip
