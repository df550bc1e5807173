"""Kernels that write slabs of an output head's logits: from pointers anywhere, and by Hopper's copy engine.

Both give a row the same bits, in tiles of any of the shapes of head_tiles: one product, one order of its sum.

Legend: n rows of this call · D hidden · V vocabulary · width columns of the slab. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import cap
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.linear_logprob.kernels import place_of, tile_logits


@triton.jit(do_not_specialize=["n"])
def head_logits(
    x,  # [n, D] hidden states, D contiguous
    weight,  # [width, D] rows of the head
    bias,  # [width], read where HAS_BIAS
    out,  # [n, width] fp32
    n, D, width, x_stride, head_stride, head_step, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of logits."""
    block, tile = place_of(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), GROUP)
    r = block * BM + tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    inside = r < n
    y = tile_logits(
        x, weight, bias, r, inside, column, D, width, x_stride, head_stride, head_step, scale, HAS_BIAS, OPERAND,
        BM, BN, BK,
    )  # fmt: skip
    if HAS_CAP:
        y = cap(y, softcap)
    at = r.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + at, y, mask=inside[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["n", "first"])
def described_logits(
    x,  # descriptor of hidden states [n, D], blocks [BM, BK]
    weight,  # descriptor of the head [V, D], blocks [BN, BK]
    bias,  # [V], read where HAS_BIAS
    out,  # [n, width] fp32
    n, D, first, width, scale,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same of columns first .. first + width, with operands that the copy engine brings: zeros outside of them."""
    block, tile = place_of(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), GROUP)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D, BK):
        acc = tl.dot(x.load([block * BM, start]), weight.load([first + tile * BN, start]).T, acc)
    r = block * BM + tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    there = column < width
    if HAS_BIAS:
        acc += tl.load(bias + first + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = r.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + at, acc * scale, mask=(r < n)[:, None] & there[None, :])
