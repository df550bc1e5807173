"""Kernels of rms_norm@1: the rows, their gradient, and that of the weight, in the order of rlkernel_common.fixed_sums.

A row is added onto W running sums, elementwise, and these by neighbors; rows are added by neighbors in blocks of ROWS.
No element's operations depend on how a tile lies in threads. The launches turn the fusing of products with additions
off, divisions and roots round as IEEE 754 has it: so the fp32 numbers are those of plain torch, bit for bit.

Bytes of a row of D values of s bytes: forward s D read and written, twice with a residual. Backward 2 s D read, s D
written, and 2 s D read for the weight. Rows of many tiles are read twice, the second time from the cache.

Legend: N rows · D width · L rows of a tile · W columns of a tile ·
HELD tiles of a row that stay in registers · C columns of a block of rows.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import row_offset, stored_as, tree_sum
from rlkernel_triton.common.language import tl, triton


@triton.jit
def normalized(x, residual, at, here, stride, HAS_RESIDUAL: tl.constexpr, dtype: tl.constexpr):
    """fp32 of what is normalized: x, or its sum with the residual, rounded to their dtype."""
    s = tl.load(x + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        more = tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        s = stored_as(s + more, dtype).to(tl.float32)
    return s


@triton.jit
def write_normalized(s, r, weight, y, total, at, here, D, offset, HAS_RESIDUAL: tl.constexpr):
    """The sum with the residual, and y."""
    if HAS_RESIDUAL:
        tl.store(total + at, s.to(total.dtype.element_ty), mask=here)  # s is rounded already
    w = offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(y + at, stored_as(s * r[:, None] * w, y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N"])  # bits must not depend on it
def rms_norm_forward(
    x,  # [N, D]: row i starts as `row_offset` says, columns are `stride` apart
    residual,  # [N, D], read where HAS_RESIDUAL
    weight,  # [D]
    y,  # [N, D]
    total,  # [N, D] the sums with the residual, written where HAS_RESIDUAL
    roots,  # [N] fp32, what each row is multiplied with, written where KEEP
    N, inner, outer_stride, inner_stride, stride, D, eps, offset,
    HAS_RESIDUAL: tl.constexpr, KEEP: tl.constexpr, HELD: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """L rows a program, read once where they are HELD tiles, else twice."""
    row = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L)
    lane = tl.arange(0, W)[None, :]
    there = (row < N)[:, None]
    x0 = x + row_offset(row, inner, outer_stride, inner_stride)[:, None]
    dense = row[:, None] * D
    dtype: tl.constexpr = y.dtype.element_ty
    squares = tl.zeros([L, W], tl.float32)
    held = ()
    for i in tl.static_range(HELD):
        at = i * W + lane
        s = normalized(x0, residual + dense, at, there & (at < D), stride, HAS_RESIDUAL, dtype)
        squares += s * s
        held += (s,)
    for first in range(HELD * W, D, W):
        at = first + lane
        s = normalized(x0, residual + dense, at, there & (at < D), stride, HAS_RESIDUAL, dtype)
        squares += s * s
    count = tl.zeros([L], tl.float32) + D
    mean = tl.div_rn(tree_sum(squares), count)
    r = tl.div_rn(tl.full([L], 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    if KEEP:
        tl.store(roots + row, r, mask=row < N)
    for i in tl.static_range(HELD):
        at = i * W + lane
        write_normalized(held[i], r, weight, y + dense, total + dense, at, there & (at < D), D, offset, HAS_RESIDUAL)
    for first in range(HELD * W, D, W):
        at = first + lane
        s = normalized(x0, residual + dense, at, there & (at < D), stride, HAS_RESIDUAL, dtype)
        write_normalized(s, r, weight, y + dense, total + dense, at, there & (at < D), D, offset, HAS_RESIDUAL)


@triton.jit
def upstream(s, weight, g, at, here, stride, D, offset):
    """fp32 of s, and g w'."""
    z = tl.load(s + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
    w = offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    return z, tl.load(g + at, mask=here, other=0.0).to(tl.float32) * w


@triton.jit
def write_gradient(z, h, t, r, g_total, d_s, at, here, HAS_TOTAL: tl.constexpr):
    """(h - s t) r, and what arrives at the sum."""
    d = (h - z * t[:, None]) * r[:, None]
    if HAS_TOTAL:
        d += tl.load(g_total + at, mask=here, other=0.0).to(tl.float32)
    tl.store(d_s + at, stored_as(d, d_s.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N"])
def rms_norm_backward(
    s,  # [N, D] what was normalized: row i starts as `row_offset` says, columns are `stride` apart
    weight,  # [D]
    roots,  # [N] fp32
    g,  # [N, D] upstream gradient of y
    g_total,  # [N, D] that of the sums, read where HAS_TOTAL
    d_s,  # [N, D]
    N, inner, outer_stride, inner_stride, stride, D, offset,
    HAS_TOTAL: tl.constexpr, HELD: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """With h = g w': (h - s mean(h s) r^2) r; L rows a program, read once where they are HELD tiles, else twice."""
    row = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L)
    lane = tl.arange(0, W)[None, :]
    there = (row < N)[:, None]
    s0 = s + row_offset(row, inner, outer_stride, inner_stride)[:, None]
    dense = row[:, None] * D
    products = tl.zeros([L, W], tl.float32)
    held = ()
    for i in tl.static_range(HELD):
        at = i * W + lane
        z, h = upstream(s0, weight, g + dense, at, there & (at < D), stride, D, offset)
        products += h * z
        held += (z, h)
    for first in range(HELD * W, D, W):
        at = first + lane
        z, h = upstream(s0, weight, g + dense, at, there & (at < D), stride, D, offset)
        products += h * z
    r = tl.load(roots + row, mask=row < N, other=0.0)
    count = tl.zeros([L], tl.float32) + D
    t = tl.div_rn(tree_sum(products), count) * r * r
    for i in tl.static_range(HELD):
        at = i * W + lane
        z, h = held[2 * i], held[2 * i + 1]
        write_gradient(z, h, t, r, g_total + dense, d_s + dense, at, there & (at < D), HAS_TOTAL)
    for first in range(HELD * W, D, W):
        at = first + lane
        z, h = upstream(s0, weight, g + dense, at, there & (at < D), stride, D, offset)
        write_gradient(z, h, t, r, g_total + dense, d_s + dense, at, there & (at < D), HAS_TOTAL)


@triton.jit(do_not_specialize=["N"])
def weight_gradient(
    s,  # [N, D] as in `rms_norm_backward`
    roots,  # [N] fp32
    g,  # [N, D]
    sums,  # [N / ROWS, D] fp32
    N, inner, outer_stride, inner_stride, stride, D,
    ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum of g s r over a block of rows, for C columns a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    at = tl.program_id(1) * C + tl.arange(0, C)[:, None]
    here = (row < N) & (at < D)
    s0 = s + row_offset(row, inner, outer_stride, inner_stride)
    z = tl.load(s0 + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
    r = tl.load(roots + row, mask=row < N, other=0.0)
    p = tl.load(g + row * D + at, mask=here, other=0.0).to(tl.float32) * (z * r)
    column = tl.program_id(1) * C + tl.arange(0, C)
    tl.store(sums + tl.program_id(0).to(tl.int64) * D + column, tree_sum(p), mask=column < D)


@triton.jit(do_not_specialize=["N"])
def sum_of_blocks(
    parts,  # [N, D] fp32
    sums,  # [N / ROWS, D] fp32
    N, D,
    ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum of a block of rows, for C columns a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    at = tl.program_id(1) * C + tl.arange(0, C)[:, None]
    p = tl.load(parts + row * D + at, mask=(row < N) & (at < D), other=0.0)
    column = tl.program_id(1) * C + tl.arange(0, C)
    tl.store(sums + tl.program_id(0).to(tl.int64) * D + column, tree_sum(p), mask=column < D)
