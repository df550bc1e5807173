"""x times a weight of 4-bit codes whose words are the operands of matrix instructions.

As in `canonical_product_kernels` the result is transposed, D [N, M] = W [N, K] x^T, and K may be split over programs
(`epilogue_kernels`). `w4_product_kernel` multiplies sums by scales, or folds them into the weight;
`tiled_product_kernel` always folds, and takes the rows of several experts in one launch.

Legend: M tokens · N rows of an expert, or of the weight · K columns · E experts · BN x BM tile of the transposed
result · BK columns a step.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.canonical_product_kernels import expert_of_tile
from rlkernel_triton.quant.code_tiles import NVFP4, W4_INT4, round_to, to_float32
from rlkernel_triton.quant.dequantize_kernels import load_nested_scales
from rlkernel_triton.quant.epilogue_kernels import splitk_reduce, store_epilogue
from rlkernel_triton.quant.operand_tiles import (
    decode_e2m1_tile,
    decode_w4_tile,
    finish_dot,
    load_e2m1_scales,
    load_table_bytes,
    look_up_tile,
    operand_columns,
    word_offsets,
    word_start,
)


@triton.jit
def decode_scaled_w4_tile(
    words, z, s, DTYPE: tl.constexpr, X_TYPE: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr, PERMUTED: tl.constexpr,
    SYMMETRIC: tl.constexpr, FOLD: tl.constexpr, ASM: tl.constexpr, SAME_TYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[16 TN, BK] of DTYPE: codes less zero-points; times scales where FOLD."""
    w = decode_w4_tile(words, DTYPE, TN, BK, PERMUTED, SYMMETRIC, ASM)
    if not SYMMETRIC:
        w -= z.to(DTYPE)[:, None]
    if FOLD:
        if SAME_TYPE and not INTERPRETED:  # one rounding of an exact product, in 16 bits
            w *= s.to(DTYPE)[:, None]
        else:
            w = to_float32(round_to(w.to(tl.float32) * s[:, None], X_TYPE, INTERPRETED), INTERPRETED).to(DTYPE)
    return w


@triton.jit
def load_group_scales(
    scale, at, n, group, K, nested_table, nested_absmax, nested_offset, GROUP: tl.constexpr, NESTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 scales of rows n in a group; they stand at `at` of a tiled weight."""
    if NESTED:
        block = n.to(tl.int64) * (K // GROUP) + group
        return load_nested_scales(scale + at, block, n >= 0, nested_table, nested_absmax, nested_offset)
    return to_float32(tl.load(scale + at), INTERPRETED)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["counters"])  # a graph's may start anywhere
def w4_product_kernel(
    x,  # [M, K], rows x_row apart
    x_row,
    codes,  # [N / 16, K / 64, 128] int32
    scale,  # [K / GROUP, N], or [1, N]
    zero,  # as `scale`, unless SYMMETRIC
    table,  # [16] fp32, with NF4
    nested_table,  # [256] fp32, with NESTED
    nested_absmax,  # [blocks / 256] fp32, with NESTED
    nested_offset,  # [1] fp32, with NESTED
    y,  # [M, width] out; width is N // 2 if PAIR, else N
    partial,  # [PARTS, tiles, 2 if PAIR, BN, BM] fp32, with PARTS > 1
    counters,  # [tiles] int32, 0 before and after, with PARTS > 1
    bias,  # [N], with BIAS
    xa,  # [M, lora_rank]: x A^T, with RANK
    lora_b,  # [N, lora_rank], rows lora_row apart, with RANK
    lora_row, lora_rank, lora_scale,
    residual,  # [M, width], rows residual_row apart, with RESIDUAL
    residual_row, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, FOLD: tl.constexpr, PERMUTED: tl.constexpr, ASM: tl.constexpr,
    BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr, RESIDUAL: tl.constexpr, PAIR: tl.constexpr,
    ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr, TABLE: tl.constexpr = False, NESTED: tl.constexpr = False,
):  # fmt: skip
    """A 4-bit weight in the layout `triton_w4`. GROUP 0 is a scale per row. N is a multiple of BN, K of BK * PARTS.

    TABLE: codes stand for entries of a table, rounded to the type of x; FOLD is False.
    """
    m_tiles = tl.cdiv(M, BM)
    width = N // 2 if PAIR else N
    n_tiles = width // BN
    # Programs: parts of K, tiles of N, tiles of M; the last change fastest and share the weight's words in L2.
    part = tl.program_id(0) // (m_tiles * n_tiles)
    tile = tl.program_id(0) % (m_tiles * n_tiles)
    n0 = tile // m_tiles * BN
    TN: tl.constexpr = BN // 16
    X_TYPE: tl.constexpr = x.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if INTERPRETED else X_TYPE
    SCALED: tl.constexpr = GROUP > 0
    SAME_TYPE: tl.constexpr = scale.dtype.element_ty == X_TYPE
    A_GROUP: tl.constexpr = GROUP // BK if SCALED else 1  # steps of a group
    steps = K // BK // PARTS
    first = part * steps
    k0 = first * BK
    m = tile % m_tiles * BM + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    # x^T [BK, BM] in the order of columns in which words decode.
    columns = operand_columns(BK, PERMUTED)
    x_at = x + tile % m_tiles * BM * x_row.to(tl.int64) + k0
    x_at += tl.arange(0, BM)[None, :] * x_row + columns[:, None]
    of_m = (m < M)[None, :]
    # Words of 16 rows of the weight: 128 for 64 columns.
    row_words = K * 2
    words_at = codes + n0 // 16 * row_words.to(tl.int64)
    words_at += tl.arange(0, TN)[:, None] * row_words + word_offsets(BK)[None, :]
    beyond = width // 16 * row_words.to(tl.int64) if PAIR else 0
    acc = tl.zeros((BN, BM), tl.float32)
    other = acc if PAIR else tl.zeros((1, 1), tl.float32)
    # Scales are [K / GROUP, N]: neighboring rows are neighbors in memory.
    row = N.to(tl.int64) if SCALED else 0  # from group to group
    at_group = first // A_GROUP * row + n
    group = first // A_GROUP
    s = load_group_scales(
        scale, at_group, n, group, K, nested_table, nested_absmax, nested_offset, GROUP, NESTED, INTERPRETED
    )  # fmt: skip
    z, s_value, z_value = s, s, s
    if not SYMMETRIC:
        z = tl.load(zero + at_group)
    if PAIR:
        s_value = load_group_scales(
            scale, at_group + width, n + width, group, K, nested_table, nested_absmax, nested_offset, GROUP, NESTED,
            INTERPRETED,
        )  # fmt: skip
        if not SYMMETRIC:
            z_value = tl.load(zero + at_group + width)
    bytes_ = 0
    # The table in eight registers of every thread: low and high bytes of its 16 entries.
    if TABLE and ASM:
        bytes_ = (
            load_table_bytes(table, 0, False, DTYPE), load_table_bytes(table, 4, False, DTYPE),
            load_table_bytes(table, 8, False, DTYPE), load_table_bytes(table, 12, False, DTYPE),
            load_table_bytes(table, 0, True, DTYPE), load_table_bytes(table, 4, True, DTYPE),
            load_table_bytes(table, 8, True, DTYPE), load_table_bytes(table, 12, True, DTYPE),
        )  # fmt: skip
    for step in tl.range(0, steps, num_stages=STAGES):
        at = words_at + word_start(BK, k0 + step * BK)
        # Every word is read once: it need not stay in the cache.
        words = tl.load(at, eviction_policy="evict_first")
        xt = tl.load(x_at + step * BK, mask=of_m, other=0.0)
        if INTERPRETED:
            xt = to_float32(xt, INTERPRETED)
        # Scales and zero-points are asked for a step ahead: their loads are too small to be pipelined.
        group = (tl.minimum(step + 1, steps - 1) + first) // A_GROUP
        at_group = group * row + n
        if SCALED:
            s_next = load_group_scales(
                scale, at_group, n, group, K, nested_table, nested_absmax, nested_offset, GROUP, NESTED, INTERPRETED
            )  # fmt: skip
        if not SYMMETRIC:
            z_next = tl.load(zero + at_group)
        if TABLE:
            w = look_up_tile(words, table, bytes_, DTYPE, X_TYPE, TN, BK, PERMUTED, ASM, INTERPRETED)
        else:
            w = decode_scaled_w4_tile(
                words, z, s, DTYPE, X_TYPE, TN, BK, PERMUTED, SYMMETRIC, FOLD, ASM, SAME_TYPE, INTERPRETED
            )  # fmt: skip
        if FOLD:
            acc = finish_dot(tl.dot(w, xt, acc, input_precision="ieee"), acc, step, steps, PERMUTED)
        elif SCALED:
            acc += tl.dot(w, xt, input_precision="ieee") * s[:, None]
        else:
            acc = finish_dot(tl.dot(w, xt, acc, input_precision="ieee"), acc, step, steps, PERMUTED)
        if PAIR:
            words = tl.load(at + beyond, eviction_policy="evict_first")
            if SCALED:
                s_value_next = load_group_scales(
                    scale, at_group + width, n + width, group, K, nested_table, nested_absmax, nested_offset, GROUP,
                    NESTED, INTERPRETED,
                )  # fmt: skip
            if not SYMMETRIC:
                z_value_next = tl.load(zero + at_group + width)
            if TABLE:
                w = look_up_tile(words, table, bytes_, DTYPE, X_TYPE, TN, BK, PERMUTED, ASM, INTERPRETED)
            else:
                w = decode_scaled_w4_tile(
                    words, z_value, s_value, DTYPE, X_TYPE, TN, BK, PERMUTED, SYMMETRIC, FOLD, ASM, SAME_TYPE,
                    INTERPRETED,
                )  # fmt: skip
            if FOLD:
                other = finish_dot(tl.dot(w, xt, other, input_precision="ieee"), other, step, steps, PERMUTED)
            elif SCALED:
                other += tl.dot(w, xt, input_precision="ieee") * s_value[:, None]
            else:
                other = finish_dot(tl.dot(w, xt, other, input_precision="ieee"), other, step, steps, PERMUTED)
            if SCALED:
                s_value = s_value_next
            if not SYMMETRIC:
                z_value = z_value_next
        if SCALED:
            s = s_next
        if not SYMMETRIC:
            z = z_next
    # Only the last program of a tile to arrive finishes it.
    last = True
    if PARTS > 1:
        acc, other, last = splitk_reduce(
            acc, other, partial, counters, tile, m_tiles * n_tiles, part, PARTS, PAIR, BN, BM
        )
    if last:
        store_epilogue(
            acc, other, n, m, N, M, y, residual, residual_row, scale, scale, bias, xa, lora_b, lora_row, lora_rank,
            lora_scale, 0 if SCALED or FOLD else 1, False, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION,
            INTERPRETED,
        )  # fmt: skip


@triton.jit
def load_tile_scales(
    scale, zero, row, k0, rows, K, FORMAT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Scales and zero-points of rows row .. row + BN, columns k0 .. k0 + BK, as they are stored."""
    if FORMAT == W4_INT4:
        at = (k0 // GROUP if GROUP > 0 else 0) * rows.to(tl.int64) + row + tl.arange(0, BN)
        s = tl.load(scale + at)
        z = s
        if not SYMMETRIC:
            z = tl.load(zero + at)
    else:
        s = load_e2m1_scales(scale, row // 16, k0, K, FORMAT, BN // 16, BK)
        z = s
    return s, z


@triton.jit
def load_tile_values(
    codes, s, z, factor, row, k0, K, FORMAT: tl.constexpr, X_TYPE: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SYMMETRIC: tl.constexpr, PERMUTED: tl.constexpr, ASM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[BN, BK] of DTYPE: weights of rows row .. row + BN, rounded to X_TYPE. `row` is a multiple of 16."""
    TN: tl.constexpr = BN // 16
    words_at = codes + (row // 16 + tl.arange(0, TN)).to(tl.int64)[:, None] * (K * 2)
    words = tl.load(words_at + (word_start(BK, k0) + word_offsets(BK))[None, :], eviction_policy="evict_first")
    if FORMAT == W4_INT4:
        w = decode_w4_tile(words, DTYPE, TN, BK, PERMUTED, SYMMETRIC, ASM)
        if not SYMMETRIC:
            w -= z.to(DTYPE)[:, None]
        w = w.to(tl.float32) * to_float32(s, INTERPRETED)[:, None]
        w = to_float32(round_to(w, X_TYPE, INTERPRETED), INTERPRETED).to(DTYPE)
    else:
        w = decode_e2m1_tile(words, s, factor, FORMAT, X_TYPE, DTYPE, TN, BK, PERMUTED, ASM, INTERPRETED)
    return w


@triton.jit(do_not_specialize=["M"])
def tiled_product_kernel(
    x,  # [M, K], rows x_row apart
    x_row,
    codes,  # [rows / 16, K / 64, 128] int32
    scale,  # [K / GROUP, rows] of int4, else as `load_e2m1_scales`
    zero,  # as `scale`, of int4 unless SYMMETRIC
    global_scale,  # [1] fp32, nvfp4
    x_scale,  # [M] fp32, with X_SCALE
    ends,  # [E] integer, with EB: one past each expert's last row of x
    y,  # [M, width] out; width is N // 2 if PAIR, else N
    partial,  # [PARTS, tiles, 2 if PAIR, BN, BM] fp32, with PARTS > 1
    counters,  # [tiles] int32, 0 before and after, with PARTS > 1
    bias,  # [N], with BIAS
    xa,  # [M, lora_rank]: x A^T, with RANK
    lora_b,  # [N, lora_rank], rows lora_row apart, with RANK
    lora_row, lora_rank, lora_scale,
    residual,  # [M, width], rows residual_row apart, with RESIDUAL
    residual_row, M, N, K,
    rows,  # of the weight
    E,
    m_tiles,  # of BM rows of x, over all experts
    FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, FACTORED: tl.constexpr, EB: tl.constexpr,
    PERMUTED: tl.constexpr, ASM: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr,
    WIDE_LORA: tl.constexpr, RESIDUAL: tl.constexpr, PAIR: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERPRETED: tl.constexpr,
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
        expert, m0, stop = expert_of_tile(tile % m_tiles, ends, M, E, EB, BM)
    if expert < E:
        X_TYPE: tl.constexpr = x.dtype.element_ty
        DTYPE: tl.constexpr = tl.float32 if INTERPRETED else X_TYPE
        steps = K // BK // PARTS
        above = expert * N
        m = m0 + tl.arange(0, BM)
        n = n0 + tl.arange(0, BN)
        x_at = x + m0.to(tl.int64) * x_row + part * steps * BK
        x_at += tl.arange(0, BM)[None, :] * x_row + operand_columns(BK, PERMUTED)[:, None]
        of_m = (m < stop)[None, :]
        factor = tl.load(global_scale) if FACTORED else 1.0
        acc = tl.zeros((BN, BM), tl.float32)
        other = acc if PAIR else tl.zeros((1, 1), tl.float32)
        k0 = part * steps * BK
        # Loads too small to be pipelined are asked for a step ahead.
        AHEAD: tl.constexpr = FORMAT == W4_INT4
        if AHEAD:
            s_next, z_next = load_tile_scales(scale, zero, above + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC)
            if PAIR:
                s_other, z_other = load_tile_scales(
                    scale, zero, above + width + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC
                )
        for step in tl.range(0, steps, num_stages=STAGES):
            k0 = (part * steps + step) * BK
            k_next = tl.minimum(k0 + BK, (part * steps + steps - 1) * BK)
            if AHEAD:
                s, z = s_next, z_next
                s_next, z_next = load_tile_scales(
                    scale, zero, above + n0, k_next, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC
                )
            else:
                s, z = load_tile_scales(scale, zero, above + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC)
            xt = tl.load(x_at + step * BK, mask=of_m, other=0.0)
            if INTERPRETED:
                xt = to_float32(xt, INTERPRETED)
            w = load_tile_values(
                codes, s, z, factor, above + n0, k0, K, FORMAT, X_TYPE, DTYPE, BN, BK, SYMMETRIC, PERMUTED, ASM,
                INTERPRETED,
            )  # fmt: skip
            acc = finish_dot(tl.dot(w, xt, acc, input_precision="ieee"), acc, step, steps, PERMUTED)
            if PAIR:
                if AHEAD:
                    s, z = s_other, z_other
                    s_other, z_other = load_tile_scales(
                        scale, zero, above + width + n0, k_next, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC
                    )
                else:
                    s, z = load_tile_scales(
                        scale, zero, above + width + n0, k0, rows, K, FORMAT, BN, BK, GROUP, SYMMETRIC
                    )
                w = load_tile_values(
                    codes, s, z, factor, above + width + n0, k0, K, FORMAT, X_TYPE, DTYPE, BN, BK,
                    SYMMETRIC, PERMUTED, ASM, INTERPRETED,
                )  # fmt: skip
                other = finish_dot(tl.dot(w, xt, other, input_precision="ieee"), other, step, steps, PERMUTED)
        last = True
        if PARTS > 1:
            acc, other, last = splitk_reduce(
                acc, other, partial, counters, tile, m_tiles * n_tiles, part, PARTS, PAIR, BN, BM
            )
        if last:
            store_epilogue(
                acc, other, n, m, N, stop, y, residual, residual_row, global_scale, x_scale, bias + above, xa, lora_b,
                lora_row, lora_rank, lora_scale, 2 if FORMAT == NVFP4 and not FACTORED else 0, X_SCALE, BIAS, RANK,
                WIDE_LORA, RESIDUAL, PAIR, ACTIVATION, INTERPRETED,
            )  # fmt: skip
