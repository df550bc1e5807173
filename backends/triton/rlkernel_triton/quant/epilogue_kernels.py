"""What follows the sum over K of a product: parts of K added up, scales, LoRA, bias, activation, residual.

K may be split over programs: partial sums go to memory, and the last program of a tile to arrive adds them up in the
order of their index, whoever comes last; its counter is 0 again afterwards. No floating atomic.

Legend: M tokens · N rows of the weight · BN x BM tile of the transposed result.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import tanh
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import round_to, to_float32

ADDED = tl.constexpr(-1)  # for RANK: `xa` [M, lora_rank] fp32 is the low-rank addition itself, lora_rank >= N


@triton.jit
def sigmoid(h):
    """1 / (1 + e^-h)."""
    return 1.0 / (1.0 + tl.exp(-h))


@triton.jit
def activate(h, ACTIVATION: tl.constexpr):
    """An activation of `rlkernel_core.spec.qmatmul.ACTIVATIONS`, of fp32; a pair's is that of its gate."""
    if ACTIVATION == "relu":
        return tl.where(h > 0, h, tl.where(h == h, 0.0, h))
    if ACTIVATION == "silu" or ACTIVATION == "swiglu":
        return h * sigmoid(h)
    if ACTIVATION == "gelu":
        return 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh" or ACTIVATION == "geglu_tanh":
        return 0.5 * h * (1.0 + tanh(0.7978845608028654 * (h + 0.044715 * h * h * h)))
    return h


@triton.jit
def apply_epilogue(
    acc, n, m, N, M, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank, lora_scale, ROW_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The product finished: scales of rows and tokens, LoRA, bias. `xa` is [M, lora_rank], contiguous."""
    of_n, of_m = n < N, m < M
    if X_SCALE:
        acc *= tl.load(x_scale + m, mask=of_m, other=0.0)[None, :]
    if ROW_SCALE > 0:  # 1: one a row, 2: one in all
        at = n if ROW_SCALE == 1 else n * 0
        acc *= to_float32(tl.load(row_scale + at, mask=of_n, other=0.0), INTERPRETED)[:, None]
    if RANK == ADDED:
        at = m.to(tl.int64)[None, :] * lora_rank + n[:, None]
        added = tl.load(xa + at, mask=of_n[:, None] & of_m[None, :], other=0.0)
        acc = tl.where(added == 0, acc, acc + added)  # -0 + 0 would be another number than the product alone
    if RANK > 0:
        # B (x A^T)^T, 16 ranks at a time.
        total = tl.zeros_like(acc)
        for first in tl.static_range(0, RANK, 16):
            r = first + tl.arange(0, 16)
            of_r = r < lora_rank
            at = n.to(tl.int64)[:, None] * lora_row + r[None, :]
            b = tl.load(lora_b + at, mask=of_n[:, None] & of_r[None, :], other=0.0)
            at = m.to(tl.int64)[None, :] * lora_rank + r[:, None]
            a = tl.load(xa + at, mask=of_m[None, :] & of_r[:, None], other=0.0)
            if WIDE_LORA:
                b, a = to_float32(b, INTERPRETED), to_float32(a, INTERPRETED)
            total = tl.dot(b, a, total, input_precision="ieee")
        acc += lora_scale * total
    if BIAS:
        acc += to_float32(tl.load(bias + n, mask=of_n, other=0.0), INTERPRETED)[:, None]
    return acc


@triton.jit
def store_epilogue(
    acc, other, n, m, N, M, y, residual, residual_row, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank,
    lora_scale, ROW_SCALE: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr,
    WIDE_LORA: tl.constexpr, RESIDUAL: tl.constexpr, PAIR: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Everything after the sum over K, rounded once and written."""
    width = N // 2 if PAIR else N
    acc = apply_epilogue(
        acc, n, m, width, M, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank, lora_scale, ROW_SCALE, X_SCALE,
        BIAS, RANK, WIDE_LORA, INTERPRETED,
    )  # fmt: skip
    h = activate(acc, ACTIVATION)
    if PAIR:
        # Rows width .. N of the weight are the pair's second half; N masks what is beyond the first.
        beyond = tl.where(n < width, n + width, N)
        h *= apply_epilogue(
            other, beyond, m, N, M, row_scale, x_scale, bias, xa, lora_b, lora_row, lora_rank, lora_scale, ROW_SCALE,
            X_SCALE, BIAS, RANK, WIDE_LORA, INTERPRETED,
        )  # fmt: skip
    inside = (n < width)[:, None] & (m < M)[None, :]
    if RESIDUAL:
        at = m.to(tl.int64)[None, :] * residual_row + n[:, None]
        h += to_float32(tl.load(residual + at, mask=inside, other=0.0), INTERPRETED)
    at = m.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(y + at, round_to(h, y.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def splitk_reduce(
    acc, other, partial, counters, tile, tile_count, part, PARTS: tl.constexpr, PAIR: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """(the sums over all parts of K in the order of the parts, the same of the pair's other half, this is the last)."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    # This tile's partial sums: [PARTS, tiles, HALVES, BN, BM].
    HALVES: tl.constexpr = 2 if PAIR else 1
    start = partial + tile.to(tl.int64) * (HALVES * BN * BM)
    stride = tile_count.to(tl.int64) * (HALVES * BN * BM)
    tl.store(start + part * stride + at, acc)
    if PAIR:
        tl.store(start + part * stride + BN * BM + at, other)
    # Every thread has stored before the program counts itself.
    tl.debug_barrier()
    # Acquire and release: the last program sees what all others stored before they counted.
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    last = arrived == PARTS - 1
    if last:
        acc = tl.zeros_like(acc)
        other = tl.zeros_like(other)
        # In the order of the parts, so that the bits do not depend on who came last. Not from L1, which may be stale.
        for i in tl.static_range(PARTS):
            acc += tl.load(start + i * stride + at, cache_modifier=".cg")
            if PAIR:
                other += tl.load(start + i * stride + BN * BM + at, cache_modifier=".cg")
        # For the next launch.
        tl.store(counters + tile, 0)
    return acc, other, last


@triton.jit(do_not_specialize=["M"])
def epilogue_kernel(
    h,  # [M, N] fp32
    y,  # [M, width] out; width is N // 2 if PAIR, else N
    bias,  # [N], with BIAS
    xa,  # [M, lora_rank]: x A^T, with RANK
    lora_b,  # [N, lora_rank], rows lora_row apart, with RANK
    lora_row, lora_rank, lora_scale,
    residual,  # [M, width], rows residual_row apart, with RESIDUAL
    residual_row, M, N,
    BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, WIDE_LORA: tl.constexpr,
    RESIDUAL: tl.constexpr, PAIR: tl.constexpr, ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr,
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
    store_epilogue(
        acc, other, n, m, N, M, y, residual, residual_row, h, h, bias, xa, lora_b, lora_row, lora_rank, lora_scale, 0,
        False, BIAS, RANK, WIDE_LORA, RESIDUAL, PAIR, ACTIVATION, INTERPRETED,
    )  # fmt: skip
