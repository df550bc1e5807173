"""Formats of blocks in the canonical layout: what a tile of codes stands for, dequantising, and products of any shape.

    mxfp4, mxfp8   q 2^(E - 127)
    nvfp4          fl32(q fl32(s g))
    k-quants       fl32(fl32(d sc) q - fl32(dmin mn)), q6_k: fl32(d sc) (q - 32); every product is exact in fp32
    dense          a 16- or 32-bit float as it is: weights that were dequantised before

One function decodes; a format is a branch of it. Launch with `enable_fp_fusion=False` where bits are promised.

Legend: M tokens · N rows, of an expert where there are any · K columns · R x C or BN x BK a tile · E experts.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import float8_value, load_bytes, narrowed, pairs, widened
from rlkernel_triton.quant.float4_tiles import block_scale, e2m1_value, power_of_two
from rlkernel_triton.quant.product_kernels import finished
from rlkernel_triton.quant.product_tiles import ended

MXFP4: Final = tl.constexpr(0)
MXFP8: Final = tl.constexpr(1)
NVFP4: Final = tl.constexpr(2)
Q4_K: Final = tl.constexpr(3)
Q5_K: Final = tl.constexpr(4)
Q6_K: Final = tl.constexpr(5)
DENSE: Final = tl.constexpr(6)


@triton.jit
def spread(per_block, R: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr):
    """[R, C / SPAN] as [R, C]: the entry of every column's block."""
    return tl.reshape(tl.broadcast_to(per_block[:, :, None], (R, C // SPAN, SPAN)), (R, C))


@triton.jit
def high_bits(high, n, k0, N, K, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """[R, C] int32: the bits of codes beyond the fourth, BITS of each."""
    MANY: tl.constexpr = 8 // BITS
    row_bytes = tl.cdiv(K, MANY)
    b = k0 // MANY + tl.arange(0, C // MANY)
    inside = (n < N)[:, None] & (b < row_bytes)[None, :]
    byte = tl.load(high + n.to(tl.int64)[:, None] * row_bytes + b[None, :], mask=inside, other=0).to(tl.int32)
    place = tl.arange(0, MANY) * BITS
    return tl.reshape((byte[:, :, None] >> place[None, None, :]) & ((1 << BITS) - 1), (R, C))


@triton.jit
def per_block(part, n, k0, N, K, SPAN: tl.constexpr, C: tl.constexpr):
    """[R, C / SPAN] entries of a part [N, ceil(K / SPAN)]; 0 outside of it."""
    blocks = tl.cdiv(K, SPAN)
    g = k0 // SPAN + tl.arange(0, C // SPAN)
    inside = (n < N)[:, None] & (g < blocks)[None, :]
    return tl.load(part + n.to(tl.int64)[:, None] * blocks + g[None, :], mask=inside, other=0)


@triton.jit
def per_super(part, n, k0, N, K, SUB: tl.constexpr, C: tl.constexpr):
    """[R, C / SUB] fp32 entries of a part [N, ceil(K / 256)], one for each sub-block of SUB columns."""
    blocks = tl.cdiv(K, 256)
    column = k0 + tl.arange(0, C // SUB) * SUB
    inside = (n < N)[:, None] & (column < K)[None, :]
    at = n.to(tl.int64)[:, None] * blocks + (column // 256)[None, :]
    return tl.load(part + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def block_values(
    codes, high, scale, d, least, dmin, factor, row, n, k0, N, K, FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[R, C] fp32: values of rows n = row .. row + R, columns k0 .. k0 + C; k0 is a multiple of C."""
    k = k0 + tl.arange(0, C)
    inside = (n < N)[:, None] & (k < K)[None, :]
    if FORMAT == DENSE:
        at = n.to(tl.int64)[:, None] * K + k[None, :]
        return widened(tl.load(codes + at, mask=inside, other=0.0), INTERPRETED)
    if FORMAT == MXFP8:
        at = n.to(tl.int64)[:, None] * K + k[None, :]
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        s = power_of_two(per_block(scale, n, k0, N, K, 32, C).to(tl.int32))
        value = float8_value(code, MANTISSA, BIAS, False)
        return tl.where(inside, value * spread(s, R, C, 32), 0.0)
    code = pairs(load_bytes(codes, row, k0, N, K, (K + 1) // 2, False, False, R, C), R, C)
    if FORMAT == MXFP4 or FORMAT == NVFP4:
        SPAN: tl.constexpr = 32 if FORMAT == MXFP4 else 16
        s = block_scale(per_block(scale, n, k0, N, K, SPAN, C).to(tl.int32), FORMAT)
        if FORMAT == NVFP4:
            s *= tl.load(factor)
        value = e2m1_value(code) * spread(s, R, C, SPAN)
    else:
        SUB: tl.constexpr = 16 if FORMAT == Q6_K else 32
        if FORMAT == Q5_K:
            code |= high_bits(high, n, k0, N, K, 1, R, C) << 4
        elif FORMAT == Q6_K:
            code |= high_bits(high, n, k0, N, K, 2, R, C) << 4
        step = per_super(d, n, k0, N, K, SUB, C) * per_block(scale, n, k0, N, K, SUB, C).to(tl.float32)
        if FORMAT == Q6_K:
            value = (code.to(tl.float32) - 32.0) * spread(step, R, C, SUB)
        else:
            below = per_super(dmin, n, k0, N, K, SUB, C) * per_block(least, n, k0, N, K, SUB, C).to(tl.float32)
            value = code.to(tl.float32) * spread(step, R, C, SUB) - spread(below, R, C, SUB)
    return tl.where(inside, value, 0.0)


@triton.jit
def dequantise_blocks(
    codes, high, scale, d, least, dmin, factor, out, first, N, K, FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of the weight's rows from `first` on."""
    column_tiles = tl.cdiv(K, C)
    row = first + tl.program_id(0) // column_tiles * R
    k0 = tl.program_id(0) % column_tiles * C
    n, k = row + tl.arange(0, R), k0 + tl.arange(0, C)
    value = block_values(
        codes, high, scale, d, least, dmin, factor, row, n, k0, N, K, FORMAT, MANTISSA, BIAS, R, C, INTERPRETED
    )
    at = (n - first).to(tl.int64)[:, None] * K + k[None, :]
    there = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + at, narrowed(value, out.dtype.element_ty, INTERPRETED), mask=there)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def expert_of(tile, ends, M, E, EB: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end of its rows) of a tile of BM rows; an expert of E or more: there is no such tile.

    Tiles are counted expert by expert, ceil(rows / BM) each. EB: E at most, a power of two.
    """
    e = tl.arange(0, EB)
    last = tl.minimum(tl.maximum(tl.load(ends + e, mask=e < E, other=0), 0), M)
    last = tl.associative_scan(last, 0, _larger)
    first = tl.minimum(tl.maximum(tl.load(ends + e - 1, mask=(e > 0) & (e <= E), other=0), 0), M)
    first = tl.associative_scan(first, 0, _larger)
    tiles = tl.where(e < E, (last - first + BM - 1) // BM, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = e == expert
    before = tl.sum(tl.where(mine, upto - tiles, 0), 0)
    start = tl.sum(tl.where(mine, first, 0), 0) + (tile - before) * BM
    return expert, start, tl.sum(tl.where(mine, last, 0), 0)


@triton.jit(do_not_specialize=["M"])
def block_product(
    x, x_row, codes, high, scale, d, least, dmin, factor, ends, first_expert, y, bias, xa, lora_b, lora_row, lora_rank,
    lora_scale, residual, residual_row, M, N, K, E, m_tiles, FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    FLOAT_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EB: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr,
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
        expert, m0, stop = expert_of(tile, ends, M, E + first_expert, EB, BM)
        expert -= first_expert
    if (expert >= 0) & (expert < E):
        X_TYPE: tl.constexpr = x.dtype.element_ty
        DTYPE: tl.constexpr = tl.float32 if WIDE or INTERPRETED else X_TYPE
        m = m0 + tl.arange(0, BM)
        n = n0 + tl.arange(0, BN)
        above = expert * N
        acc = tl.zeros((BN, BM), tl.float32)
        other = acc if PAIR else tl.zeros((1, 1), tl.float32)
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            k = k0 + tl.arange(0, BK)
            at = m.to(tl.int64)[None, :] * x_row + k[:, None]
            xt = tl.load(x + at, mask=(m < stop)[None, :] & (k < K)[:, None], other=0.0)
            if WIDE or INTERPRETED:
                xt = widened(xt, INTERPRETED)
            for half in tl.static_range(2 if PAIR else 1):
                row = above + n0 + half * width
                limit = above + (width if PAIR and half == 0 else N)
                w = block_values(
                    codes, high, scale, d, least, dmin, factor, row, row + tl.arange(0, BN), k0, limit, K, FORMAT,
                    MANTISSA, FLOAT_BIAS, BN, BK, INTERPRETED,
                )  # fmt: skip
                if not WIDE:
                    w = widened(narrowed(w, X_TYPE, INTERPRETED), INTERPRETED)
                if half == 0:
                    total = tl.dot(w.to(DTYPE), xt, acc, input_precision="ieee")
                    acc = total if FORMAT == DENSE else ended(total, acc, k0, K)
                else:
                    total = tl.dot(w.to(DTYPE), xt, other, input_precision="ieee")
                    other = total if FORMAT == DENSE else ended(total, other, k0, K)
        finished(
            acc, other, n, m, N, stop, y, residual, residual_row, x, x, bias + (above + first_expert * N), xa, lora_b,
            lora_row, lora_rank, lora_scale, 0, False, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION, INTERPRETED,
        )  # fmt: skip
