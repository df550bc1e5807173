"""Kernels of grouped_linear@1: the products of linear, of rows whose expert is found on the device.

The order of a sum is that of `linear.kernels.chunked_product`: eight chunks of ceil(S / 128) 16 numbers as
`common.chunked_sums` sums them, then bias, and one rounding. What is summed over are S = K inputs in the forward pass,
the N outputs for the gradient of x, and an expert's rows for the gradient of its weight: a number that the device knows
alone, so that the chunk is computed there.

A grid has as many tiles of rows as any `ends` can need. Those of one expert stand side by side. The rows of no expert
are those of one more, of which nothing is loaded and 0 is stored. What is left over stores nothing.

Bytes, with operands of s bytes: s T (K + C) read and written, and s K C of each expert that has rows.

Legend: M rows · E experts · C columns of the result · K columns that are summed over · BM, BN, BK a tile's rows,
columns and steps · EB more than E, a power of two.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import stored_as
from rlkernel_triton.common.chunked_sums import chunked_sums, chunked_sums_tma
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.linear_tile import tile_swizzle


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def rows_of_tile(tile, ends, M, E, EB: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end of its rows) of a tile of BM rows; E are the rows of no expert, beyond is no tile."""
    e = tl.arange(0, EB)
    # Where rows end, never before those of the expert ahead of it; for E at M.
    last = tl.minimum(tl.maximum(tl.load(ends + e, mask=e < E, other=2147483647), 0), M)
    last = tl.associative_scan(last, 0, _maximum)
    first = tl.minimum(tl.maximum(tl.load(ends + e - 1, mask=(e > 0) & (e <= E), other=0), 0), M)
    first = tl.associative_scan(first, 0, _maximum)
    tiles = tl.where(e <= E, (last - first + BM - 1) // BM, 0)
    upto = tl.cumsum(tiles, 0)
    # As many as end before this tile.
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = e == expert
    start = tl.sum(tl.where(mine, first + (tile - (upto - tiles)) * BM, 0), 0)
    return expert, start, tl.sum(tl.where(mine, last, 0), 0)


@triton.jit
def rows_of_expert(expert, ends, M, E, EB: tl.constexpr):
    """(first row, end) of an expert's rows."""
    e = tl.arange(0, EB)
    last = tl.minimum(tl.maximum(tl.load(ends + e, mask=e < E, other=0), 0), M)
    first = tl.max(tl.where(e < expert, last, 0), 0)
    return first, tl.maximum(first, tl.max(tl.where(e <= expert, last, 0), 0))


@triton.jit(do_not_specialize=["M", "m_tiles"])
def grouped_product(
    a,  # [M, K], a_stride from row to row, a_step from column to column
    b,  # [E, K, C], b_expert from expert to expert, b_step from row to row, b_stride from column to column
    ends,  # [E] int32
    bias,  # [E, C] contiguous, read where HAS_BIAS
    out,  # [M, C] contiguous
    M, C, K, E, a_stride, a_step, b_expert, b_step, b_stride,
    chunk,  # columns of a chunk
    m_tiles,  # tiles of rows, as many as any ends need
    HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, OPERAND: tl.constexpr, EB: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert times its matrix, with its bias and rounded; 0 in rows of no expert."""
    block, tile = tile_swizzle(tl.program_id(0), m_tiles, tl.cdiv(C, BN), GROUP)
    expert, first, stop = rows_of_tile(block, ends, M, E, EB, BM)
    if expert <= E:
        m = first + tl.arange(0, BM)
        c = tile * BN + tl.arange(0, BN)
        k = tl.arange(0, BK).to(tl.int64)
        inside, there = (m < stop)[:, None], (c < C)[None, :]
        a0 = a + m.to(tl.int64)[:, None] * a_stride + k[None, :] * a_step
        b0 = b + expert.to(tl.int64) * b_expert + k[:, None] * b_step + c.to(tl.int64)[None, :] * b_stride
        terms = tl.where(expert < E, K, 0)
        last = tl.cdiv(terms, chunk) * tl.cdiv(chunk, BK)
        y = chunked_sums(
            a0, b0, inside, there, 0, last, terms, chunk, a_step, b_step, WHOLE, False, OPERAND, BM, BN, BK
        )
        _store(y, bias, out, m, c, inside & there, expert, C, E, HAS_BIAS)


@triton.jit
def _store(y, bias, out, m, c, here, expert, C, E, HAS_BIAS: tl.constexpr):
    """Write y [BM, BN] with the bias of an expert, if it is one, rounded."""
    if HAS_BIAS:
        left = tl.where(expert < E, C - c, 0)
        y += tl.load(bias + expert.to(tl.int64) * C + c, mask=left > 0, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(out + at, stored_as(y, out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["M", "m_tiles"])
def grouped_product_tma(
    a,  # descriptor of a [M, K], blocks [BM, BK]
    b,  # descriptor of [E C, K], blocks [BN, BK] where TURNED; else of [E K, C], blocks [BK, BN]
    ends,  # [E] int32
    bias,  # [E, C] contiguous, read where HAS_BIAS
    out,  # [M, C] contiguous
    M, C, K, E,
    chunk,  # whole steps, and K whole chunks
    m_tiles,  # tiles of rows, as many as any ends need
    HAS_BIAS: tl.constexpr, TURNED: tl.constexpr, NESTED: tl.constexpr, EB: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of `grouped_product`; the copy engine brings rows and columns of neighbors too, which are not stored."""
    block, tile = tile_swizzle(tl.program_id(0), m_tiles, tl.cdiv(C, BN), GROUP)
    expert, first, stop = rows_of_tile(block, ends, M, E, EB, BM)
    if expert <= E:
        terms = tl.where(expert < E, K, 0)
        if TURNED:
            y = chunked_sums_tma(a, b, first, expert * C + tile * BN, 0, terms, chunk, True, NESTED, BM, BN, BK)
        else:
            y = chunked_sums_tma(a, b, first, expert * K, tile * BN, terms, chunk, False, NESTED, BM, BN, BK)
        m = first + tl.arange(0, BM)
        c = tile * BN + tl.arange(0, BN)
        _store(y, bias, out, m, c, (m < stop)[:, None] & (c < C)[None, :], expert, C, E, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def grouped_outer(
    a,  # [M, N], a_stride from row to row, a_step from column to column
    b,  # [M, C], b_stride from row to row, b_step from column to column
    ends,  # [E] int32
    out,  # [E, N, C] contiguous
    M, N, C, E, a_stride, a_step, b_stride, b_step,
    GRAIN: tl.constexpr, CHUNKS: tl.constexpr, OPERAND: tl.constexpr, EB: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of a^T @ b over the rows of one expert, in the order of linear over so many rows; 0 where it has none."""
    blocks, tiles = tl.cdiv(N, BM), tl.cdiv(C, BN)
    expert, place = tl.program_id(0) // (blocks * tiles), tl.program_id(0) % (blocks * tiles)
    first, stop = rows_of_expert(expert, ends, M, E, EB)
    block, tile = tile_swizzle(place, blocks, tiles, GROUP)
    n = block * BM + tl.arange(0, BM)
    c = tile * BN + tl.arange(0, BN)
    row = first + tl.arange(0, BK).to(tl.int64)
    inside, there = (n < N)[:, None], (c < C)[None, :]
    a0 = a + n.to(tl.int64)[:, None] * a_step + row[None, :] * a_stride
    b0 = b + row[:, None] * b_stride + c.to(tl.int64)[None, :] * b_step
    rows = stop - first
    chunk = GRAIN * tl.cdiv(tl.maximum(rows, 1), CHUNKS * GRAIN)
    last = tl.cdiv(rows, chunk) * tl.cdiv(chunk, BK)
    y = chunked_sums(a0, b0, inside, there, 0, last, rows, chunk, a_stride, b_stride, False, False, OPERAND, BM, BN, BK)
    at = (expert.to(tl.int64) * N + n)[:, None] * C + c[None, :]
    tl.store(out + at, stored_as(y, out.dtype.element_ty), mask=inside & there)


@triton.jit(do_not_specialize=["M"])
def expert_sums(
    a,  # [M, C] contiguous
    ends,  # [E] int32
    out,  # [E, C] contiguous
    M, C, E, EB: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """W columns of the sum of an expert's rows: every R-th row from top to bottom, then a tree over R."""
    expert = tl.program_id(0)
    first, stop = rows_of_expert(expert, ends, M, E, EB)
    c = tl.program_id(1) * W + tl.arange(0, W)
    acc = tl.zeros([R, W], tl.float32)
    for start in range(first, stop, R):
        m = start + tl.arange(0, R)
        here = (m < stop)[:, None] & (c < C)[None, :]
        acc += tl.load(a + m.to(tl.int64)[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(out + expert.to(tl.int64) * C + c, stored_as(tl.sum(acc, 0), out.dtype.element_ty), mask=c < C)
