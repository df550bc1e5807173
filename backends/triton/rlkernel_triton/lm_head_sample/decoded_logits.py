"""Slabs of logits of a quantized head, whose codes are decoded inside the product.

A program reads the codes of 64 rows of the head once for 32 rows of hidden states, so that few rows wait for the codes
alone: V D bits / 8 bytes and the scales, and nothing of the head is written. There is one shape of tile for any number
of rows, so a row's bits depend on the row alone; many rows decode the head once for every 32 of them.

Legend: n rows · D hidden · V rows of the head · width columns of a slab · r rank of a low-rank addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_triton.common.arithmetic import cap
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.linear_tile import add_low_rank, dot_of_decoded, tile_swizzle
from rlkernel_triton.common.matmul_tiles import Tile
from rlkernel_triton.launchers import Launcher
from rlkernel_triton.quant.formats import EXACT
from rlkernel_triton.quant.weight_tiles import load_weight_values, tile_constants, tile_parts

TILE: Final = Tile(32, 64, 64, 4, 2)


@triton.jit(do_not_specialize=["n", "start"])
def decoded_head_logits(
    x,  # [n, D] hidden states, D contiguous
    codes, p1, p2, p3, p4, p5, p6,  # of the head [V, D], as `tile_parts` has them
    bias,  # [V], read where HAS_BIAS
    inner,  # [n, r] fp32 scale times hidden @ A.T, read where HAS_LORA
    factor,  # [V, r] B of LoRA, read where HAS_LORA
    out,  # [n, width] fp32
    n, D, V,
    start,  # row of the head that is the first column, a multiple of 64
    width, rank, x_stride, row_bytes, scale_row, scale_group, factor_stride, factor_step, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, HAS_CAP: tl.constexpr, OPERAND: tl.constexpr, KIND: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, NESTED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A tile of logits; BLOCKS blocks of rows are neighbors, so that the cache serves them a tile of the head."""
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), BLOCKS)
    r = block * BM + tl.arange(0, BM)
    at = tile * BN + tl.arange(0, BN)
    inside, there = r < n, at < width
    row = start + tile * BN
    k = tl.arange(0, BK)
    a = x + r.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, D, BK):
        h = tl.load(a, mask=inside[:, None] & (k < D - begin)[None, :], other=0.0).to(OPERAND)
        w = load_weight_values(
            codes, p1, p2, p3, p4, p5, p6, row_bytes, scale_row, scale_group, row, begin, V, D, KIND, FORMAT, GROUP,
            SCALE_ROWS, ELEMENT, TILED, SYMMETRIC, NESTED, MANTISSA, BIAS, FNUZ, BN, BK, INTERPRETED,
        )  # fmt: skip
        w = tl.trans(tl.where((k < D - begin)[None, :], w, 0.0))  # a table has numbers right of D
        if OPERAND == tl.float32:
            acc = tl.dot(h, w, acc, input_precision="ieee")
        else:
            acc = dot_of_decoded(h, w, acc)
        a += BK
    if HAS_LORA:
        acc = add_low_rank(
            acc, inner, factor, r, inside, start + at, there, rank, factor_stride, factor_step, OPERAND
        )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + start + at, mask=there, other=0.0).to(tl.float32)[None, :]
    y = acc * scale
    if HAS_CAP:
        y = cap(y, softcap)
    tl.store(out + r.to(tl.int64)[:, None] * width + at[None, :], y, mask=inside[:, None] & there[None, :])


def bind_decoded_logits(launcher: Launcher, w: QuantTensor, N: int, **fixed: Any) -> Callable[..., None]:
    """What writes slabs of logits of heads like w, of which no value is read.

    It takes hidden states [N, D], a head, bias, inner product and B of LoRA, out, first column and width.

    Args:
        launcher: what binds the kernel.
        w: the head [V, D].
        N: rows.
        fixed: what `decoded_head_logits` is bound with beside sizes of the tile and what the format says.
    """
    launch = launcher.bind(
        decoded_head_logits, num_warps=TILE.num_warps, num_stages=TILE.num_stages, options=EXACT, n=N, V=w.shape[0],
        **fixed, **tile_constants(w), BM=TILE.BM, BN=TILE.BN, BK=TILE.BK, BLOCKS=TILE.GROUP,
    )  # fmt: skip

    def run(
        x: Tensor, w: QuantTensor, bias: Tensor | None, low_rank: tuple[Tensor | None, Tensor | None], out: Tensor,
        first: int, width: int,
    ) -> None:  # fmt: skip
        grid = (triton.cdiv(N, TILE.BM) * triton.cdiv(width, TILE.BN), 1, 1)
        launch(grid, x, *tile_parts(w), bias, *low_rank, out, first, width)

    return run
