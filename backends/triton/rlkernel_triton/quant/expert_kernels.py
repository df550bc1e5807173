"""x times a weight of 4-bit codes in tiles, folded: scales and codes are multiplied before the product.

mxfp4 and nvfp4 in the layout `triton_e2m1`, int4 in `triton_w4`; alone, or for the rows of several experts in one
launch. As in `product_kernels` the result is transposed, D [N, M] = W [N, K] x^T, and K may be split over programs.

Legend: M tokens · N rows of an expert, or of the weight · K columns · E experts · BN x BM tile of the result.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.block_kernels import expert_of
from rlkernel_triton.quant.code_tiles import narrowed, widened
from rlkernel_triton.quant.float4_tiles import NVFP4, float4_tile, load_scales
from rlkernel_triton.quant.product_kernels import added_up, finished
from rlkernel_triton.quant.product_tiles import ended, permuted, word_indices, word_start, word_tile

INT4: Final = tl.constexpr(7)


@triton.jit
def groups_of(
    scale, zero, row, k0, rows, K, FORMAT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Scales and zero-points of rows row .. row + BN, columns k0 .. k0 + BK, as they are stored."""
    if FORMAT == INT4:
        at = (k0 // GROUP if GROUP > 0 else 0) * rows.to(tl.int64) + row + tl.arange(0, BN)
        s = tl.load(scale + at)
        z = s
        if not SYMMETRIC:
            z = tl.load(zero + at)
    else:
        s = load_scales(scale, row // 16, k0, K, FORMAT, BN // 16, BK)
        z = s
    return s, z


@triton.jit
def tile_values(
    codes, s, z, factor, row, k0, K, FORMAT: tl.constexpr, X_TYPE: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SYMMETRIC: tl.constexpr, PERMUTED: tl.constexpr, ASM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[BN, BK] of DTYPE: weights of rows row .. row + BN, rounded to X_TYPE. `row` is a multiple of 16."""
    TN: tl.constexpr = BN // 16
    words_at = codes + (row // 16 + tl.arange(0, TN)).to(tl.int64)[:, None] * (K * 2)
    words = tl.load(words_at + (word_start(BK, k0) + word_indices(BK))[None, :], eviction_policy="evict_first")
    if FORMAT == INT4:
        w = word_tile(words, DTYPE, TN, BK, PERMUTED, SYMMETRIC, ASM)
        if not SYMMETRIC:
            w -= z.to(DTYPE)[:, None]
        w = w.to(tl.float32) * widened(s, INTERPRETED)[:, None]
        w = widened(narrowed(w, X_TYPE, INTERPRETED), INTERPRETED).to(DTYPE)
    else:
        w = float4_tile(words, s, factor, FORMAT, X_TYPE, DTYPE, TN, BK, PERMUTED, ASM, INTERPRETED)
    return w


@triton.jit(do_not_specialize=["M"])
def tile_product(
    x, x_row, codes, scale, zero, global_scale, ends, y, partial, tickets, bias, xa, lora_b, lora_row, lora_rank,
    lora_scale, residual, residual_row, M, N, K, rows, E, m_tiles, FORMAT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, FACTORED: tl.constexpr, EB: tl.constexpr, PERMUTED: tl.constexpr, ASM: tl.constexpr,
    BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr, RESIDUAL: tl.constexpr, PAIR: tl.constexpr,
    ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """N (half of it for a pair) is a multiple of BN, K of BK * PARTS; `rows` are those of the weight.

    FACTORED: the scale of all (nvfp4) is multiplied before weights are rounded, else after the sum.
    """
    width = N // 2 if PAIR else N
    n_tiles = width // BN
    part = tl.program_id(0) // (m_tiles * n_tiles)
    tile = tl.program_id(0) % (m_tiles * n_tiles)
    n0 = tile // m_tiles * BN
    expert, m0, stop = tile * 0, tile % m_tiles * BM, M
    if EB > 0:
        expert, m0, stop = expert_of(tile % m_tiles, ends, M, E, EB, BM)
    if expert < E:
        X_TYPE: tl.constexpr = x.dtype.element_ty
        DTYPE: tl.constexpr = tl.float32 if INTERPRETED else X_TYPE
        steps = K // BK // PARTS
        above = expert * N
        m = m0 + tl.arange(0, BM)
        n = n0 + tl.arange(0, BN)
        x_at = x + m0.to(tl.int64) * x_row + part * steps * BK
        x_at += tl.arange(0, BM)[None, :] * x_row + permuted(BK, PERMUTED)[:, None]
        of_m = (m < stop)[None, :]
        factor = tl.load(global_scale) if FACTORED else 1.0
        acc = tl.zeros((BN, BM), tl.float32)
        other = acc if PAIR else tl.zeros((1, 1), tl.float32)
        k0 = part * steps * BK
        # Loads too small to be pipelined are asked for a step ahead.
        AHEAD: tl.constexpr = FORMAT == INT4
        if AHEAD:
            s_next, z_next = groups_of(scale, zero, above + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC)
            if PAIR:
                s_other, z_other = groups_of(
                    scale, zero, above + width + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC
                )
        for step in tl.range(0, steps, num_stages=STAGES):
            k0 = (part * steps + step) * BK
            k_next = tl.minimum(k0 + BK, (part * steps + steps - 1) * BK)
            if AHEAD:
                s, z = s_next, z_next
                s_next, z_next = groups_of(scale, zero, above + n0, k_next, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC)
            else:
                s, z = groups_of(scale, zero, above + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC)
            xt = tl.load(x_at + step * BK, mask=of_m, other=0.0)
            if INTERPRETED:
                xt = widened(xt, INTERPRETED)
            w = tile_values(
                codes, s, z, factor, above + n0, k0, K, FORMAT, X_TYPE, DTYPE, BN, BK, SYMMETRIC, PERMUTED, ASM,
                INTERPRETED,
            )  # fmt: skip
            acc = ended(tl.dot(w, xt, acc, input_precision="ieee"), acc, step, steps, PERMUTED)
            if PAIR:
                if AHEAD:
                    s, z = s_other, z_other
                    s_other, z_other = groups_of(
                        scale, zero, above + width + n0, k_next, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC
                    )
                else:
                    s, z = groups_of(scale, zero, above + width + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC)
                w = tile_values(
                    codes, s, z, factor, above + width + n0, k0, K, FORMAT, X_TYPE, DTYPE, BN, BK,
                    SYMMETRIC, PERMUTED, ASM, INTERPRETED,
                )  # fmt: skip
                other = ended(tl.dot(w, xt, other, input_precision="ieee"), other, step, steps, PERMUTED)
        last = True
        if PARTS > 1:
            acc, other, last = added_up(
                acc, other, partial, tickets, tile, m_tiles * n_tiles, part, PARTS, PAIR, BN, BM
            )
        if last:
            finished(
                acc, other, n, m, N, stop, y, residual, residual_row, global_scale, x, bias + above, xa, lora_b,
                lora_row, lora_rank, lora_scale, 2 if FORMAT == NVFP4 and not FACTORED else 0, False, BIAS, RANK,
                WIDE_LORA, RESIDUAL, PAIR, ACTIVATION, INTERPRETED,
            )  # fmt: skip
