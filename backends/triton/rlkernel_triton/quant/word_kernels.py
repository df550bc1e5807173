"""x times a 4-bit weight whose words are the operands of matrix instructions; see product_kernels.py.

Legend: M tokens · N rows · K columns of the weight · BN x BM tile of the transposed result · BK columns a step.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import narrowed, widened
from rlkernel_triton.quant.decode_kernels import nested_scales
from rlkernel_triton.quant.product_kernels import added_up, finished
from rlkernel_triton.quant.product_tiles import (
    ended,
    permuted,
    table_bytes,
    table_tile,
    word_indices,
    word_start,
    word_tile,
)


@triton.jit
def decoded_words(
    words, z, s, DTYPE: tl.constexpr, X_TYPE: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr, PERMUTED: tl.constexpr,
    SYMMETRIC: tl.constexpr, FOLD: tl.constexpr, ASM: tl.constexpr, SAME_TYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[16 TN, BK] of DTYPE: codes less zero-points; times scales where FOLD."""
    w = word_tile(words, DTYPE, TN, BK, PERMUTED, SYMMETRIC, ASM)
    if not SYMMETRIC:
        w -= z.to(DTYPE)[:, None]
    if FOLD:
        if SAME_TYPE and not INTERPRETED:  # one rounding of an exact product, in 16 bits
            w *= s.to(DTYPE)[:, None]
        else:
            w = widened(narrowed(w.to(tl.float32) * s[:, None], X_TYPE, INTERPRETED), INTERPRETED).to(DTYPE)
    return w


@triton.jit
def group_scales(
    scale, at, n, group, K, nested_table, nested_absmax, nested_offset, GROUP: tl.constexpr, NESTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 scales of rows n in a group; they stand at `at` of a tiled weight."""
    if NESTED:
        block = n.to(tl.int64) * (K // GROUP) + group
        return nested_scales(scale + at, block, n >= 0, nested_table, nested_absmax, nested_offset)
    return widened(tl.load(scale + at), INTERPRETED)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["tickets"])  # a graph's may start anywhere
def word_product(
    x, x_row, codes, scale, zero, table, nested_table, nested_absmax, nested_offset, y, partial, tickets, bias, xa,
    lora_b, lora_row, lora_rank, lora_scale, residual,
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
    columns = permuted(BK, PERMUTED)
    x_at = x + tile % m_tiles * BM * x_row.to(tl.int64) + k0
    x_at += tl.arange(0, BM)[None, :] * x_row + columns[:, None]
    of_m = (m < M)[None, :]
    row_words = K * 2
    words_at = codes + n0 // 16 * row_words.to(tl.int64)
    words_at += tl.arange(0, TN)[:, None] * row_words + word_indices(BK)[None, :]
    beyond = width // 16 * row_words.to(tl.int64) if PAIR else 0
    acc = tl.zeros((BN, BM), tl.float32)
    other = acc if PAIR else tl.zeros((1, 1), tl.float32)
    row = N.to(tl.int64) if SCALED else 0  # from group to group
    at_group = first // A_GROUP * row + n
    group = first // A_GROUP
    s = group_scales(
        scale, at_group, n, group, K, nested_table, nested_absmax, nested_offset, GROUP, NESTED, INTERPRETED
    )  # fmt: skip
    z, s_value, z_value = s, s, s
    if not SYMMETRIC:
        z = tl.load(zero + at_group)
    if PAIR:
        s_value = group_scales(
            scale, at_group + width, n + width, group, K, nested_table, nested_absmax, nested_offset, GROUP, NESTED,
            INTERPRETED,
        )  # fmt: skip
        if not SYMMETRIC:
            z_value = tl.load(zero + at_group + width)
    bytes_ = 0
    if TABLE and ASM:
        bytes_ = (
            table_bytes(table, 0, False, DTYPE), table_bytes(table, 4, False, DTYPE),
            table_bytes(table, 8, False, DTYPE), table_bytes(table, 12, False, DTYPE),
            table_bytes(table, 0, True, DTYPE), table_bytes(table, 4, True, DTYPE),
            table_bytes(table, 8, True, DTYPE), table_bytes(table, 12, True, DTYPE),
        )  # fmt: skip
    for step in tl.range(0, steps, num_stages=STAGES):
        at = words_at + word_start(BK, k0 + step * BK)
        words = tl.load(at, eviction_policy="evict_first")
        xt = tl.load(x_at + step * BK, mask=of_m, other=0.0)
        if INTERPRETED:
            xt = widened(xt, INTERPRETED)
        # Scales and zero-points are asked for a step ahead: their loads are too small to be pipelined.
        group = (tl.minimum(step + 1, steps - 1) + first) // A_GROUP
        at_group = group * row + n
        if SCALED:
            s_next = group_scales(
                scale, at_group, n, group, K, nested_table, nested_absmax, nested_offset, GROUP, NESTED, INTERPRETED
            )  # fmt: skip
        if not SYMMETRIC:
            z_next = tl.load(zero + at_group)
        if TABLE:
            w = table_tile(words, table, bytes_, DTYPE, X_TYPE, TN, BK, PERMUTED, ASM, INTERPRETED)
        else:
            w = decoded_words(
                words, z, s, DTYPE, X_TYPE, TN, BK, PERMUTED, SYMMETRIC, FOLD, ASM, SAME_TYPE, INTERPRETED
            )  # fmt: skip
        if FOLD:
            acc = ended(tl.dot(w, xt, acc, input_precision="ieee"), acc, step, steps, PERMUTED)
        elif SCALED:
            acc += tl.dot(w, xt, input_precision="ieee") * s[:, None]
        else:
            acc = ended(tl.dot(w, xt, acc, input_precision="ieee"), acc, step, steps, PERMUTED)
        if PAIR:
            words = tl.load(at + beyond, eviction_policy="evict_first")
            if SCALED:
                s_value_next = group_scales(
                    scale, at_group + width, n + width, group, K, nested_table, nested_absmax, nested_offset, GROUP,
                    NESTED, INTERPRETED,
                )  # fmt: skip
            if not SYMMETRIC:
                z_value_next = tl.load(zero + at_group + width)
            if TABLE:
                w = table_tile(words, table, bytes_, DTYPE, X_TYPE, TN, BK, PERMUTED, ASM, INTERPRETED)
            else:
                w = decoded_words(
                    words, z_value, s_value, DTYPE, X_TYPE, TN, BK, PERMUTED, SYMMETRIC, FOLD, ASM, SAME_TYPE,
                    INTERPRETED,
                )  # fmt: skip
            if FOLD:
                other = ended(tl.dot(w, xt, other, input_precision="ieee"), other, step, steps, PERMUTED)
            elif SCALED:
                other += tl.dot(w, xt, input_precision="ieee") * s_value[:, None]
            else:
                other = ended(tl.dot(w, xt, other, input_precision="ieee"), other, step, steps, PERMUTED)
            if SCALED:
                s_value = s_value_next
            if not SYMMETRIC:
                z_value = z_value_next
        if SCALED:
            s = s_next
        if not SYMMETRIC:
            z = z_next
    last = True
    if PARTS > 1:
        acc, other, last = added_up(acc, other, partial, tickets, tile, m_tiles * n_tiles, part, PARTS, PAIR, BN, BM)
    if last:
        finished(
            acc, other, n, m, N, M, y, residual, residual_row, scale, scale, bias, xa, lora_b, lora_row, lora_rank,
            lora_scale, 0 if SCALED or FOLD else 1, False, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION,
            INTERPRETED,
        )  # fmt: skip
