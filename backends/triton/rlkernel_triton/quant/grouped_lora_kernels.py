"""A low-rank addition of its own for each group of rows: t = a b_g, then scale t c_g.

Groups are found on the device, as in `grouped_linear`. The first product sums over thousands of numbers for a few
columns: its sum is split into parts, each in a program of its own, and the second product adds these in their order.
What a row gets depends on its own group alone; rows of no group get 0.

Bytes, with operands of s bytes: s M S of a, s S R of each group that has rows, 4 PARTS M R written and read, s R C of
each group, and M C of the result.

Legend: M rows · G groups · S numbers of a long sum · R rank · C columns of the result · BM, BR, BC, BK tile sizes of
rows, ranks, columns and steps · EB more than G, a power of two.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.grouped_linear.kernels import rows_of_tile
from rlkernel_triton.quant.code_tiles import round_to, to_float32
from rlkernel_triton.quant.operand_tiles import finish_dot


@triton.jit(do_not_specialize=["M", "m_tiles"])
def low_rank_in(
    a,  # [M, S], rows a_row apart
    b,  # [G, S, R] with strides b_group, b_step and b_rank
    ends,  # [G] int32
    out,  # [PARTS, M, R] fp32
    M, S, R, G, a_row, b_group, b_step, b_rank,
    m_tiles,  # tiles of rows, as many as any ends need
    PARTS: tl.constexpr,  # divides the steps of S
    OPERAND: tl.constexpr,  # type that a and b are multiplied in: theirs, or fp32
    INTERPRETED: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One part of the sum over S, for a tile of rows and a tile of ranks; 0 in rows of no group."""
    tile, part = tl.program_id(0) % m_tiles, tl.program_id(0) // m_tiles
    group, first, stop = rows_of_tile(tile, ends, M, G, EB, BM)
    if group <= G:
        m, r = first + tl.arange(0, BM), tl.program_id(1) * BR + tl.arange(0, BR)
        of_m, of_r = (m < stop)[:, None], (r < R)[None, :]
        a_at = a + m.to(tl.int64)[:, None] * a_row
        b_at = b + group.to(tl.int64) * b_group + r.to(tl.int64)[None, :] * b_rank
        steps = tl.cdiv(S, BK) // PARTS
        last = tl.where(group < G, (part + 1) * steps, 0)  # there is no matrix of group G, whose rows are of no group
        acc = tl.zeros((BM, BR), tl.float32)
        for step in range(part * steps, last):
            k = step * BK + tl.arange(0, BK)
            x = tl.load(a_at + k[None, :], mask=of_m & (k < S)[None, :], other=0.0)
            w = tl.load(b_at + k.to(tl.int64)[:, None] * b_step, mask=of_r & (k < S)[:, None], other=0.0)
            if OPERAND == tl.float32:
                x, w = to_float32(x, INTERPRETED), to_float32(w, INTERPRETED)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        at = out + (part * M + m).to(tl.int64)[:, None] * R + r[None, :]
        tl.store(at, acc, mask=of_m & of_r)


@triton.jit(do_not_specialize=["M", "m_tiles"])
def low_rank_out(
    t,  # [PARTS, M, R] fp32, as `low_rank_in` writes it
    c,  # [G, R, C] with strides c_group, c_rank and c_column
    ends,  # [G] int32
    out,  # [M, C] contiguous
    M, C, R, G, c_group, c_rank, c_column, scale, m_tiles,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,  # type that t and c are multiplied in: that of c, which t is rounded to, or fp32
    INTERPRETED: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of scale t c_g; 0 in rows of no group."""
    tile, column = tl.program_id(0) % m_tiles, tl.program_id(0) // m_tiles * BC
    group, first, stop = rows_of_tile(tile, ends, M, G, EB, BM)
    if group <= G:
        m, n = first + tl.arange(0, BM), column + tl.arange(0, BC)
        of_m, of_n = (m < stop)[:, None], (n < C)[None, :]
        ranks = tl.where(group < G, R, 0)
        c_at = c + group.to(tl.int64) * c_group + n.to(tl.int64)[None, :] * c_column
        acc = tl.zeros((BM, BC), tl.float32)
        for start in range(0, ranks, BR):
            r = start + tl.arange(0, BR)
            of_r = r < ranks
            left = tl.zeros((BM, BR), tl.float32)
            for part in tl.static_range(PARTS):
                at = t + (part * M + m).to(tl.int64)[:, None] * R + r[None, :]
                left += tl.load(at, mask=of_m & of_r[None, :], other=0.0)
            right = tl.load(c_at + r.to(tl.int64)[:, None] * c_rank, mask=of_r[:, None] & of_n, other=0.0)
            if OPERAND == tl.float32:
                right = to_float32(right, INTERPRETED)
            else:
                left = left.to(OPERAND)
            acc = finish_dot(tl.dot(left, right, acc, input_precision="ieee"), acc, start, ranks)
        at = out + m.to(tl.int64)[:, None] * C + n[None, :]
        tl.store(at, round_to(scale * acc, out.dtype.element_ty, INTERPRETED), mask=of_m & of_n)
