"""Kernels of rope@1: heads of q and k, their gradients, those of weights, in the order of rlkernel_common.fixed_sums.

A head is added onto W running sums and these by neighbors, as in rms_norm; a rotated number is a product, a product and
their sum, each rounded. The launches turn the fusing of products with additions off, divisions and roots round as IEEE
754 has it: so the fp32 numbers are those of plain torch, bit for bit, wherever an element lies.

The other number of a pair is read where it lies, again, from the cache: no element needs another thread's.

Bytes of a head of D values of s bytes: forward s D read and written; backward the same of the gradients, and s D more
read where the head was normalized, and 2 s D for its weight. A row of the table is read once a head, from the cache.

Legend: T tokens · H heads of a token · N = T H heads · D width of a head · P positions · R rotary width · L heads of a
tile · W columns of a tile · C columns of a block of heads.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import row_offset, stored_as, tree_sum
from rlkernel_triton.common.language import tl, triton


@triton.jit
def position_of(positions, token, T, P):
    """The position of tokens, and whether the table has it; 0 and not where there is no such token."""
    position = tl.load(positions + token, mask=token < T, other=0).to(tl.int64)
    known = (position >= 0) & (position < P) & (token < T)
    return tl.where(known, position, 0), known


@triton.jit
def partner_of(at, R, INTERLEAVED: tl.constexpr):
    """Of columns below R: the other of the pair, the place of their angle, and whether they are the first."""
    if INTERLEAVED:
        first = at % 2 == 0
        angle = at // 2
        partner = tl.where(first, at + 1, at - 1)
    else:
        first = at < R // 2
        angle = tl.where(first, at, at - R // 2)
        partner = tl.where(first, at + R // 2, at - R // 2)
    return partner, angle, first


@triton.jit
def turned(x, other, table, position, known, at, angle, minus, R):
    """x c -+ other s, each product rounded, for columns below R; x beyond."""
    here = known & (at < R)
    row = table + position * R + angle
    cos = tl.load(row, mask=here, other=0.0)
    sin = tl.load(row + R // 2, mask=here, other=0.0)
    return tl.where(at < R, x * cos + tl.where(minus, -other, other) * sin, x)


@triton.jit
def rotate(
    block,  # of L heads
    x, weight, y, roots,  # of q or of k, see `rope_forward`
    positions, table,
    T, H, inner, outer_stride, inner_stride, head_stride, stride, D, P, R, eps, offset,
    NORM: tl.constexpr, KEEP: tl.constexpr, INTERLEAVED: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """L heads, read twice where they are normalized."""
    row = block.to(tl.int64) * L + tl.arange(0, L)
    token = row // H
    position, known = position_of(positions, token, T, P)
    x0 = x + (row_offset(token, inner, outer_stride, inner_stride) + row % H * head_stride)[:, None]
    lane = tl.arange(0, W)
    r = tl.full([L], 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([L, W], tl.float32)
        for start in range(0, D, W):
            at = start + lane[None, :]
            s = tl.load(x0 + at.to(tl.int64) * stride, mask=(token < T)[:, None] & (at < D), other=0.0).to(tl.float32)
            squares += s * s
        count = tl.zeros([L], tl.float32) + D
        mean = tl.div_rn(tree_sum(squares), count)
        r = tl.div_rn(r, tl.sqrt_rn(mean + eps))
        if KEEP:
            tl.store(roots + row, r, mask=token < T)
    for start in range(0, D, W):
        at = start + lane[None, :]
        partner, angle, first = partner_of(at, R, INTERLEAVED)
        here = (token < T)[:, None] & (at < D)
        z = tl.load(x0 + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
        other = tl.load(x0 + partner.to(tl.int64) * stride, mask=here & (at < R), other=0.0).to(tl.float32)
        if NORM:
            w = offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
            z = z * r[:, None] * w
            w = offset + tl.load(weight + partner, mask=at < R, other=0.0).to(tl.float32)
            other = other * r[:, None] * w
        z = turned(z, other, table, position[:, None], known[:, None], at, angle, first, R)
        z = tl.where(known[:, None], z, float("nan"))
        tl.store(y + row[:, None] * D + at, stored_as(z, y.dtype.element_ty), mask=here)


@triton.jit
def rotate_back(
    block,
    x, weight, roots, g, d_x,  # of q or of k, see `rope_backward`
    positions, table,
    T, H, inner, outer_stride, inner_stride, head_stride, stride, D, P, R, offset,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """With v the gradient rotated back and h = v w': (h - x mean(h x) r^2) r for normalized heads, v for others."""
    row = block.to(tl.int64) * L + tl.arange(0, L)
    token = row // H
    position, known = position_of(positions, token, T, P)
    x0 = x + (row_offset(token, inner, outer_stride, inner_stride) + row % H * head_stride)[:, None]
    g0 = g + row[:, None] * D
    lane = tl.arange(0, W)
    r = tl.full([L], 1.0, tl.float32)
    t = tl.zeros([L], tl.float32)
    if NORM:
        products = tl.zeros([L, W], tl.float32)
        for start in range(0, D, W):
            at = start + lane[None, :]
            partner, angle, first = partner_of(at, R, INTERLEAVED)
            here = (token < T)[:, None] & (at < D)
            v = tl.load(g0 + at, mask=here, other=0.0).to(tl.float32)
            other = tl.load(g0 + partner, mask=here & (at < R), other=0.0).to(tl.float32)
            v = turned(v, other, table, position[:, None], known[:, None], at, angle, first == 0, R)
            z = tl.load(x0 + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
            products += v * (offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)) * z
        r = tl.load(roots + row, mask=token < T, other=0.0)
        count = tl.zeros([L], tl.float32) + D
        t = tl.div_rn(tree_sum(products), count) * r * r
    for start in range(0, D, W):
        at = start + lane[None, :]
        partner, angle, first = partner_of(at, R, INTERLEAVED)
        here = (token < T)[:, None] & (at < D)
        v = tl.load(g0 + at, mask=here, other=0.0).to(tl.float32)
        other = tl.load(g0 + partner, mask=here & (at < R), other=0.0).to(tl.float32)
        d = turned(v, other, table, position[:, None], known[:, None], at, angle, first == 0, R)
        if NORM:
            z = tl.load(x0 + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
            h = d * (offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32))
            d = (h - z * t[:, None]) * r[:, None]
        d = tl.where(known[:, None], d, 0.0)
        tl.store(d_x + row[:, None] * D + at, stored_as(d, d_x.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["T", "q_blocks"])  # bits must not depend on them
def rope_forward(
    q,  # [T, HQ, D]: token i starts as `row_offset` says, heads are `q_head_stride` apart, columns `q_stride`
    k,  # [T, HK, D], likewise
    positions,  # [T]
    table,  # [P, R] fp32: R / 2 cosines and R / 2 sines a position
    q_weight, k_weight,  # [D], read where NORM_Q, NORM_K
    q_out, k_out,  # [T, HQ, D], [T, HK, D]
    q_roots, k_roots,  # [T, HQ], [T, HK] fp32, what each head is multiplied with, written where NORM_Q, NORM_K and KEEP
    T, q_blocks,
    q_inner, q_outer_stride, q_inner_stride, q_head_stride, q_stride,
    k_inner, k_outer_stride, k_inner_stride, k_head_stride, k_stride,
    HQ, HK, D, P, R, eps, offset,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr, KEEP: tl.constexpr, INTERLEAVED: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """L heads of q a program; after `q_blocks` of them, L heads of k."""
    block = tl.program_id(0)
    if block < q_blocks:
        rotate(
            block, q, q_weight, q_out, q_roots, positions, table, T, HQ, q_inner, q_outer_stride, q_inner_stride,
            q_head_stride, q_stride, D, P, R, eps, offset, NORM_Q, KEEP, INTERLEAVED, L, W,
        )  # fmt: skip
    else:
        rotate(
            block - q_blocks, k, k_weight, k_out, k_roots, positions, table, T, HK, k_inner, k_outer_stride,
            k_inner_stride, k_head_stride, k_stride, D, P, R, eps, offset, NORM_K, KEEP, INTERLEAVED, L, W,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "q_blocks"])
def rope_backward(
    q, k,  # as in `rope_forward`, read where NORM_Q, NORM_K
    positions, table, q_weight, k_weight, q_roots, k_roots,
    g_q, g_k,  # [T, HQ, D], [T, HK, D] upstream gradients
    d_q, d_k,  # [T, HQ, D], [T, HK, D]
    T, q_blocks,
    q_inner, q_outer_stride, q_inner_stride, q_head_stride, q_stride,
    k_inner, k_outer_stride, k_inner_stride, k_head_stride, k_stride,
    HQ, HK, D, P, R, offset,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr, INTERLEAVED: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """L heads of q a program; after `q_blocks` of them, L heads of k."""
    block = tl.program_id(0)
    if block < q_blocks:
        rotate_back(
            block, q, q_weight, q_roots, g_q, d_q, positions, table, T, HQ, q_inner, q_outer_stride, q_inner_stride,
            q_head_stride, q_stride, D, P, R, offset, NORM_Q, INTERLEAVED, L, W,
        )  # fmt: skip
    else:
        rotate_back(
            block - q_blocks, k, k_weight, k_roots, g_k, d_k, positions, table, T, HK, k_inner, k_outer_stride,
            k_inner_stride, k_head_stride, k_stride, D, P, R, offset, NORM_K, INTERLEAVED, L, W,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def weight_gradient(
    x,  # [T, H, D] as in `rope_forward`: q or k
    positions, table,
    roots,  # [T, H] fp32
    g,  # [T, H, D]
    sums,  # [N / ROWS, D] fp32
    T, H, inner, outer_stride, inner_stride, head_stride, stride, D, P, R,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum of v x r over a block of heads, v the gradient rotated back, for C columns a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    at = tl.program_id(1) * C + tl.arange(0, C)[:, None]
    token = row // H
    here = (token < T) & (at < D)
    position, known = position_of(positions, token, T, P)
    partner, angle, first = partner_of(at, R, INTERLEAVED)
    v = tl.load(g + row * D + at, mask=here, other=0.0).to(tl.float32)
    other = tl.load(g + row * D + partner, mask=here & (at < R), other=0.0).to(tl.float32)
    v = turned(v, other, table, position, known, at, angle, first == 0, R)
    x0 = x + row_offset(token, inner, outer_stride, inner_stride) + row % H * head_stride
    z = tl.load(x0 + at.to(tl.int64) * stride, mask=here, other=0.0).to(tl.float32)
    r = tl.load(roots + row, mask=token < T, other=0.0)
    p = tl.where(known, v * (z * r), 0.0)
    column = tl.program_id(1) * C + tl.arange(0, C)
    tl.store(sums + tl.program_id(0).to(tl.int64) * D + column, tree_sum(p), mask=column < D)
