"""A tile of the logits hidden @ weight.T, in registers.

Legend: n rows · D hidden · V vocabulary · BM, BN, BK rows, columns and steps of D of a tile.
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


@triton.jit
def tile_logits(
    x, weight, bias, r, inside, column, D, V, x_stride, head_stride, head_step, scale,
    HAS_BIAS: tl.constexpr, OPERAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BM, BN] of (x @ weight.T + bias) * scale, before the cap; -inf right of V."""
    k = tl.arange(0, BK)
    a = x + r.to(tl.int64)[:, None] * x_stride + k[None, :]
    b = weight + column.to(tl.int64)[None, :] * head_stride + (k * head_step)[:, None]
    there = column < V
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D, BK):
        left = k < D - start
        h = tl.load(a, mask=inside[:, None] & left[None, :], other=0.0).to(OPERAND)
        w = tl.load(b, mask=left[:, None] & there[None, :], other=0.0).to(OPERAND)
        acc = tl.dot(h, w, acc, input_precision="ieee")
        a += BK
        b += BK * head_step
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    return tl.where(there[None, :], acc * scale, float("-inf"))
