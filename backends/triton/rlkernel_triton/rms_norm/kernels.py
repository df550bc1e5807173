"""Kernels of rms_norm@1: the rows, their gradient, and that of the weight, in the order of rlkernel_common.fixed_sums.

A row is added onto W running sums, elementwise, and these by neighbors; rows are added by neighbors in blocks of ROWS.
No element's operations depend on how a tile lies in threads. The launches turn the fusing of products with additions
off, divisions and roots round as IEEE 754 has it: so the fp32 numbers are those of plain torch, bit for bit.

Bytes of a row of D values of s bytes: forward s D read and written, twice with a residual; the second read of a row
comes from the cache. Backward 2 s D read, s D written, and 2 s D read for the weight.

Legend: N rows · D width · L rows of a tile · W columns of a tile · C columns of a block of rows.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import row_offset, stored_as, tree_sum
from rlkernel_triton.common.language import tl, triton


@triton.jit
def added(x, residual, here, HAS_RESIDUAL: tl.constexpr, dtype: tl.constexpr):
    """fp32 of what is normalized: x, or its sum with the residual, rounded to their dtype."""
    s = x.to(tl.float32)
    if HAS_RESIDUAL:
        more = tl.load(residual, mask=here, other=0.0).to(tl.float32)
        s = stored_as(s + more, dtype).to(tl.float32)
    return s


@triton.jit(do_not_specialize=["N"])  # bits must not depend on it
def rms_norm_forward(
    x,  # [N, D]: row i starts as `row_offset` says, columns are `stride` apart
    residual,  # [N, D], read where HAS_RESIDUAL
    weight,  # [D]
    y,  # [N, D]
    total,  # [N, D] the sums with the residual, written where HAS_RESIDUAL
    roots,  # [N] fp32, what each row is multiplied with, written where KEEP
    N, inner, outer_stride, inner_stride, stride, D, eps, offset,
    HAS_RESIDUAL: tl.constexpr, KEEP: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """L rows a program, read twice."""
    row = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L)
    lane = tl.arange(0, W)
    x0 = x + row_offset(row, inner, outer_stride, inner_stride)[:, None]
    dense = row[:, None] * D
    squares = tl.zeros([L, W], tl.float32)
    for first in range(0, D, W):
        at = first + lane[None, :]
        here = (row < N)[:, None] & (at < D)
        z = tl.load(x0 + at.to(tl.int64) * stride, mask=here, other=0.0)
        s = added(z, residual + dense + at, here, HAS_RESIDUAL, y.dtype.element_ty)
        squares += s * s
    count = tl.zeros([L], tl.float32) + D
    mean = tl.div_rn(tree_sum(squares), count)
    r = tl.div_rn(tl.full([L], 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    if KEEP:
        tl.store(roots + row, r, mask=row < N)
    for first in range(0, D, W):
        at = first + lane[None, :]
        here = (row < N)[:, None] & (at < D)
        z = tl.load(x0 + at.to(tl.int64) * stride, mask=here, other=0.0)
        s = added(z, residual + dense + at, here, HAS_RESIDUAL, y.dtype.element_ty)
        if HAS_RESIDUAL:
            tl.store(total + dense + at, s.to(total.dtype.element_ty), mask=here)  # s is rounded already
        w = offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
        tl.store(y + dense + at, stored_as(s * r[:, None] * w, y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N"])
def rms_norm_backward(
    s,  # [N, D] what was normalized: row i starts as `row_offset` says, columns are `stride` apart
    weight,  # [D]
    roots,  # [N] fp32
    g,  # [N, D] upstream gradient of y
    g_total,  # [N, D] that of the sums, read where HAS_TOTAL
    d_s,  # [N, D]
    N, inner, outer_stride, inner_stride, stride, D, offset,
    HAS_TOTAL: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """With h = g w': (h - s mean(h s) r^2) r; L rows a program, read twice."""
    row = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L)
    lane = tl.arange(0, W)
    s0 = s + row_offset(row, inner, outer_stride, inner_stride)[:, None]
    dense = row[:, None] * D
    products = tl.zeros([L, W], tl.float32)
    for first in range(0, D, W):
        at = first + lane[None, :]
        here = (row < N)[:, None] & (at < D)
        z = tl.load(s0 + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
        w = offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
        products += tl.load(g + dense + at, mask=here, other=0.0).to(tl.float32) * w * z
    r = tl.load(roots + row, mask=row < N, other=0.0)
    count = tl.zeros([L], tl.float32) + D
    t = tl.div_rn(tree_sum(products), count) * r * r
    for first in range(0, D, W):
        at = first + lane[None, :]
        here = (row < N)[:, None] & (at < D)
        z = tl.load(s0 + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
        w = offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
        h = tl.load(g + dense + at, mask=here, other=0.0).to(tl.float32) * w
        d = (h - z * t[:, None]) * r[:, None]
        if HAS_TOTAL:
            d += tl.load(g_total + dense + at, mask=here, other=0.0).to(tl.float32)
        tl.store(d_s + dense + at, stored_as(d, d_s.dtype.element_ty), mask=here)


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
