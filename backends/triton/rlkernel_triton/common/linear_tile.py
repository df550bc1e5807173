"""A tile of the logits hidden @ weight.T, in registers, and of a low-rank addition to the head.

Legend: n rows · D hidden · V vocabulary · r rank of the addition · BM, BN, BK rows, columns and steps of D of a tile.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton


@triton.jit
def tile_swizzle(pid, blocks, tiles, GROUP: tl.constexpr):
    """(block of rows, tile of columns): blocks in groups, so that a tile of the head serves several from the cache."""
    group = pid // (GROUP * tiles)
    first = group * GROUP
    size = tl.minimum(blocks - first, GROUP)
    within = pid % (GROUP * tiles)
    return first + within % size, within // size


STEP: tl.constexpr = tl.constexpr(16)  # of the rank: the least that a matrix instruction takes


@triton.jit
def add_low_rank(acc, inner, factor, r, inside, column, there, rank, factor_stride, factor_step, OPERAND: tl.constexpr):
    """acc + inner @ factor.T [BM, BN]; inner [n, r] fp32 contiguous, factor [V, r].

    Beside operands of 16 bits each number of fp32 or fp16 is two of bf16, of which the second holds what the first
    rounded: three products, two where factor is bf16, and 16 bits of each number count.
    """
    for start in range(0, rank, STEP):
        k = start + tl.arange(0, STEP)
        left = k < rank
        a = tl.load(
            inner + r.to(tl.int64)[:, None] * rank + k[None, :], mask=inside[:, None] & left[None, :], other=0.0
        )
        at = column.to(tl.int64)[None, :] * factor_stride + (k * factor_step)[:, None]
        b = tl.load(factor + at, mask=left[:, None] & there[None, :], other=0.0).to(tl.float32)
        if OPERAND == tl.float32:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        else:
            a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
            acc = tl.dot((a - a_high.to(tl.float32)).to(tl.bfloat16), b_high, acc)
            if factor.dtype.element_ty != tl.bfloat16:
                acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.bfloat16), acc)
            acc = tl.dot(a_high, b_high, acc)
    return acc


@triton.jit
def dot_of_decoded(h, w, acc):
    """acc + h @ w of fp32 numbers w beside h of 16 bits.

    Each w is two numbers of bf16, of which the second holds what the first rounded, and so is each h of fp16: 16 bits
    of a number count. An infinity is the first of the two alone.
    """
    w_high = w.to(tl.bfloat16)
    w_low = w - w_high.to(tl.float32)
    w_low = tl.where(w_low == w_low, w_low, 0.0).to(tl.bfloat16)
    if h.dtype == tl.bfloat16:
        h_high = h
    else:
        h_high = h.to(tl.float32).to(tl.bfloat16)
        h_low = h.to(tl.float32) - h_high.to(tl.float32)
        acc = tl.dot(tl.where(h_low == h_low, h_low, 0.0).to(tl.bfloat16), w_high, acc)
    acc = tl.dot(h_high, w_low, acc)
    return tl.dot(h_high, w_high, acc)


@triton.jit
def tile_logits(
    x, weight, bias, inner, factor, r, inside, column, first, D, V, rank, x_stride, head_stride, head_step,
    factor_stride, factor_step, scale, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BM, BN] of (x @ weight.T + inner @ factor.T + bias) * scale, before the cap; -inf right of V.

    `weight` begins with row `first` of the head. Where it is a decoded head beside operands of 16 bits it is of fp32.
    """
    k = tl.arange(0, BK)
    a = x + r.to(tl.int64)[:, None] * x_stride + k[None, :]
    b = weight + (column - first).to(tl.int64)[None, :] * head_stride + (k * head_step)[:, None]
    there = column < V
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D, BK):
        left = k < D - start
        h = tl.load(a, mask=inside[:, None] & left[None, :], other=0.0).to(OPERAND)
        w = tl.load(b, mask=left[:, None] & there[None, :], other=0.0)
        if OPERAND != tl.float32 and weight.dtype.element_ty == tl.float32:
            acc = dot_of_decoded(h, w, acc)
        else:
            acc = tl.dot(h, w.to(OPERAND), acc, input_precision="ieee")
        a += BK
        b += BK * head_step
    if HAS_LORA:
        acc = add_low_rank(
            acc, inner, factor, r, inside, column, there, rank, factor_stride, factor_step, OPERAND
        )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    return tl.where(there[None, :], acc * scale, float("-inf"))
