"""x times a quantised weight in one launch.

The product is transposed, D [N, M] = W [N, K] x^T, so that decoded weights are the operand that matrix instructions
take from registers.

A scale multiplies the sum over its group in fp32, so no weight is rounded (FOLD False); or codes times scales are
rounded to the type of x before the product, as `dequantize` does (FOLD True).

K may be split over programs: partial sums go to memory, and the last program of a tile to arrive adds them up in the
order of their index, whoever comes last; its ticket is 0 again afterwards. No floating atomic.

Legend: M tokens · N rows · K columns of the weight · BN x BM tile of the transposed result · BK columns a step.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import float8_value, load_bytes, narrowed, pairs, widened
from rlkernel_triton.quant.decode_kernels import nested_scales
from rlkernel_triton.quant.encode_kernels import FLOAT8, INT8, NF4
from rlkernel_triton.quant.product_tiles import activated, ended


@triton.jit
def hidden(
    acc, n, m, N, M, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank, lora_scale, ROW_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The product finished: scales of rows and tokens, LoRA, bias. `xa` is [M, lora_rank], contiguous."""
    of_n, of_m = n < N, m < M
    if X_SCALE:
        acc *= tl.load(x_scale + m, mask=of_m, other=0.0)[None, :]
    if ROW_SCALE > 0:  # 1: one a row, 2: one in all
        at = n if ROW_SCALE == 1 else n * 0
        acc *= widened(tl.load(row_scale + at, mask=of_n, other=0.0), INTERPRETED)[:, None]
    if RANK > 0:
        total = tl.zeros_like(acc)
        for first in tl.static_range(0, RANK, 16):
            r = first + tl.arange(0, 16)
            of_r = r < lora_rank
            at = n.to(tl.int64)[:, None] * lora_row + r[None, :]
            b = tl.load(lora_b + at, mask=of_n[:, None] & of_r[None, :], other=0.0)
            at = m.to(tl.int64)[None, :] * lora_rank + r[:, None]
            a = tl.load(xa + at, mask=of_m[None, :] & of_r[:, None], other=0.0)
            if WIDE_LORA:
                b, a = widened(b, INTERPRETED), widened(a, INTERPRETED)
            total = tl.dot(b, a, total, input_precision="ieee")
        acc += lora_scale * total
    if BIAS:
        acc += widened(tl.load(bias + n, mask=of_n, other=0.0), INTERPRETED)[:, None]
    return acc


@triton.jit
def added_up(
    acc, other, partial, tickets, tile, tile_count, part, PARTS: tl.constexpr, PAIR: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """(the sums over all parts of K in the order of the parts, the same of the pair's other half, this is the last)."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    HALVES: tl.constexpr = 2 if PAIR else 1
    start = partial + tile.to(tl.int64) * (HALVES * BN * BM)
    stride = tile_count.to(tl.int64) * (HALVES * BN * BM)
    tl.store(start + part * stride + at, acc)
    if PAIR:
        tl.store(start + part * stride + BN * BM + at, other)
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets + tile, 1, sem="acq_rel")
    last = arrived == PARTS - 1
    if last:
        acc = tl.zeros_like(acc)
        other = tl.zeros_like(other)
        for i in tl.static_range(PARTS):
            acc += tl.load(start + i * stride + at, cache_modifier=".cg")
            if PAIR:
                other += tl.load(start + i * stride + BN * BM + at, cache_modifier=".cg")
        tl.store(tickets + tile, 0)
    return acc, other, last


@triton.jit
def finished(
    acc, other, n, m, N, M, y, residual, residual_row, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank,
    lora_scale, ROW_SCALE: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr,
    WIDE_LORA: tl.constexpr, RESIDUAL: tl.constexpr, PAIR: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Everything after the sum over K, rounded once and written."""
    width = N // 2 if PAIR else N
    acc = hidden(
        acc, n, m, width, M, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank, lora_scale, ROW_SCALE, X_SCALE,
        BIAS, RANK, WIDE_LORA, INTERPRETED,
    )  # fmt: skip
    h = activated(acc, ACTIVATION)
    if PAIR:
        beyond = tl.where(n < width, n + width, N)
        h *= hidden(
            other, beyond, m, N, M, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank, lora_scale, ROW_SCALE,
            X_SCALE, BIAS, RANK, WIDE_LORA, INTERPRETED,
        )  # fmt: skip
    inside = (n < width)[:, None] & (m < M)[None, :]
    if RESIDUAL:
        at = m.to(tl.int64)[None, :] * residual_row + n[:, None]
        h += widened(tl.load(residual + at, mask=inside, other=0.0), INTERPRETED)
    at = m.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(y + at, narrowed(h, y.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def byte_values(
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
        return float8_value(code, MANTISSA, FLOAT_BIAS, FNUZ) if ELEMENT == FLOAT8 else code.to(tl.float32)
    if RAGGED:  # nf4 whose rows start inside a byte
        e = n.to(tl.int64)[:, None] * K + k[None, :]
        byte = tl.load(codes + e // 2, mask=inside, other=0).to(tl.int32)
        code = tl.where(e % 2 == 0, byte >> 4, byte & 15)
    else:
        code = pairs(load_bytes(codes, n0, k0, N, K, row_bytes, False, ELEMENT == NF4, BN, BK), BN, BK)
    if ELEMENT == NF4:
        value = tl.load(table + code)
    elif SYMMETRIC:
        value = code.to(tl.float32) - 8.0
    else:
        at = n.to(tl.int64) * scale_row + (k0 // GROUP if GROUP > 0 else 0) * scale_group
        value = code.to(tl.float32) - tl.load(zero + at, mask=n < N, other=0).to(tl.float32)[:, None]
    return tl.where(inside, value, 0.0)


@triton.jit(do_not_specialize=["M"])
def byte_product(
    x, x_row, x_scale, x_scale_row, codes, row_bytes, scale, zero, scale_row, scale_group, table, nested_table,
    nested_absmax, nested_offset, y, bias, xa, lora_b, lora_row, lora_rank, lora_scale, residual, residual_row, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ELEMENT: tl.constexpr, SYMMETRIC: tl.constexpr, NESTED: tl.constexpr,
    MANTISSA: tl.constexpr, FLOAT_BIAS: tl.constexpr, FNUZ: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr,
    WIDE: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr,
    RESIDUAL: tl.constexpr, PAIR: tl.constexpr, ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr,
    CAST: tl.constexpr = False,
):  # fmt: skip
    """A canonical weight of any shape. BK divides GROUP, or GROUP is 0; nf4 always folds. WIDE multiplies in fp32.

    X_SCALE: 0 none, 1 one a token, 2 one for 128 columns of a token. CAST: e4m3fn, for which the GPU has instructions.
    """
    m_tiles = tl.cdiv(M, BM)
    width = N // 2 if PAIR else N
    n0 = tl.program_id(0) // m_tiles * BN
    X_TYPE: tl.constexpr = x.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if WIDE or INTERPRETED else X_TYPE
    m = tl.program_id(0) % m_tiles * BM + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    other = acc if PAIR else tl.zeros((1, 1), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        at = m.to(tl.int64)[None, :] * x_row + k[:, None]
        xt = tl.load(x + at, mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
        if WIDE or INTERPRETED:
            xt = widened(xt, INTERPRETED)
        for half in tl.static_range(2 if PAIR else 1):
            row = n0 + half * width
            rows = n + half * width
            limit = width if PAIR and half == 0 else N
            w = byte_values(
                codes, row_bytes, table, zero, scale_row, scale_group, row, k0, limit, K, GROUP, ELEMENT, SYMMETRIC,
                MANTISSA, FLOAT_BIAS, FNUZ, RAGGED, CAST, BN, BK,
            )  # fmt: skip
            s = byte_scales(
                scale, scale_row, scale_group, nested_table, nested_absmax, nested_offset, rows, k, k0, limit, K, GROUP,
                SCALE_ROWS, ELEMENT, NESTED, RAGGED, INTERPRETED,
            )  # fmt: skip
            if FOLD:
                w = w * s
                if not WIDE:
                    w = widened(narrowed(w, X_TYPE, INTERPRETED), INTERPRETED)
                product = tl.dot(w.to(DTYPE), xt, input_precision="ieee")
            else:
                product = tl.dot(w.to(DTYPE), xt, input_precision="ieee")
                if GROUP > 0:
                    product *= s
            if X_SCALE == 2:
                product *= tl.load(x_scale + m * x_scale_row + k0 // 128, mask=m < M, other=0.0)[None, :]
            if half == 0:
                acc = ended(acc + product, acc, k0, K)
            else:
                other = ended(other + product, other, k0, K)
    ROW_SCALE: tl.constexpr = 0 if FOLD or GROUP > 0 else (1 if SCALE_ROWS == 1 else 2)
    finished(
        acc, other, n, m, N, M, y, residual, residual_row, scale, x_scale, bias, xa, lora_b, lora_row, lora_rank,
        lora_scale, ROW_SCALE, X_SCALE == 1, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION, INTERPRETED,
    )  # fmt: skip


@triton.jit
def byte_scales(
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
        return nested_scales(scale + at, block, inside, nested_table, nested_absmax, nested_offset)
    return widened(tl.load(scale + at, mask=inside, other=0.0), INTERPRETED)


@triton.jit(do_not_specialize=["M"])
def follow(
    h, y, bias, xa, lora_b, lora_row, lora_rank, lora_scale, residual, residual_row, M, N, BM: tl.constexpr,
    BN: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr, RESIDUAL: tl.constexpr,
    PAIR: tl.constexpr, ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What follows a product that lies in memory, h [M, N] fp32."""
    width = N // 2 if PAIR else N
    n_tiles = tl.cdiv(width, BN)
    m = tl.program_id(0) // n_tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % n_tiles * BN + tl.arange(0, BN)
    inside = (n < width)[:, None] & (m < M)[None, :]
    at = h + m.to(tl.int64)[None, :] * N + n[:, None]
    acc = tl.load(at, mask=inside, other=0.0)
    other = acc
    if PAIR:
        other = tl.load(at + width, mask=inside, other=0.0)
    finished(
        acc, other, n, m, N, M, y, residual, residual_row, h, h, bias, xa, lora_b, lora_row, lora_rank, lora_scale, 0,
        False, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION, INTERPRETED,
    )  # fmt: skip
