"""Kernels of divergence@1: a KL reads a row of both sides once forward, JSD and TV twice, first for its softmax.

One program a row forward: lanes of eight neighboring columns keep sums of their own, and are merged as a tree. So a
row's bits depend on nothing but the row.

Bytes of a row of V logits of s and s_t bytes: forward (s + s_t) V read, JSD and TV 2 (s + s_t) V; backward (s + s_t) V
read, s V written. With a list of K ids forward s V and V / 8 read; backward s V read, s V written.

Legend: N rows · V vocabulary · K listed ids · L lanes of a tile, 8 neighboring columns each.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.arithmetic import LN2, LOG2E, less_top, row_offset, stored_as, tree_sum
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.softmax import merge_lanes, row_scale, update_running
from rlkernel_triton.divergence.running_kl import conditional_kl, share, tile_sum, update_running_kl, update_top
from rlkernel_triton.divergence.terms import term_and_derivative

TILE: Final = 2048  # columns read at a time
COLUMNS: Final = 2048  # columns that a program of the gradient takes at a time
REPEATS: Final = ((0, 1), (256, 8))  # (fewest rows, how often): few rows need all programs
ENTRIES: Final = 64  # listed ids taken at a time
ROW_WARPS: Final = 8
GRADIENT_WARPS: Final = 4
SAVED: Final = 6  # planes [N] that the gradient reads

NEIGHBORS: tl.constexpr = tl.constexpr(8)  # columns of a lane: one load of 16 bytes in 16 bits, two in fp32


@triton.jit
def log_total(top, total):
    """log2 of a softmax's total; NaN where its largest logit is none that a softmax has."""
    return tl.where((top > float("-inf")) & (top < float("inf")), tl.log2(total), float("nan"))


@triton.jit
def merged(top, total, LANES: tl.constexpr):
    """(top, total) of all lanes: numbers, as a tensor of one would have its layout spread to what it meets."""
    best, some, _, _ = merge_lanes(tl.reshape(top, [1, LANES]), tl.reshape(total, [1, LANES]))
    return tl.sum(best, axis=0), tl.sum(some, axis=0)


@triton.jit
def ordered_sum(x, W: tl.constexpr):
    """The sum of [W] as a tree: a number."""
    return tl.sum(tree_sum(tl.reshape(x, [1, W])), axis=0)


@triton.jit(do_not_specialize=["N"])  # bits must not depend on it
def compare_rows(
    logits,  # [N, V]: row i starts as `row_offset` says, columns are `stride` apart
    teacher,  # [N, V], the same with the strides of its own
    mask,  # [N], read where HAS_MASK
    T,  # [N] where HAS_T, else a number
    T_t,  # [N] where HAS_T_T, else a number
    values,  # [N] fp32
    saved,  # [SAVED, N] fp32
    beta, log_beta, log_rest,
    N, V, inner, outer_stride, inner_stride, stride, t_inner, t_outer_stride, t_inner_stride, t_stride,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, HAS_T_T: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The divergence of one row; a masked row is not read."""
    row = tl.program_id(0)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            tl.store(values + row, 0.0)
            return
    BITS: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth + teacher.dtype.element_ty.primitive_bitwidth
    STRIPS: tl.constexpr = 2 if BITS == 64 else 1  # a load is 4 numbers of fp32: so a thread's 8 columns are one lane's
    LANES: tl.constexpr = TILE // (STRIPS * NEIGHBORS)
    scale, t_scale = row_scale(T, row, HAS_T), row_scale(T_t, row, HAS_T_T)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    t0 = teacher + row_offset(row, t_inner, t_outer_stride, t_inner_stride)
    strip = tl.arange(0, STRIPS)[:, None, None] * (LANES * NEIGHBORS)
    column = strip + (tl.arange(0, LANES)[:, None] * NEIGHBORS + tl.arange(0, NEIGHBORS)[None, :])[None, :, :]
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    t_top = tl.full([LANES], float("-inf"), tl.float32)
    t_total = tl.zeros([LANES], tl.float32)
    term = tl.zeros([LANES], tl.float32)
    mean = tl.zeros([LANES], tl.float32)
    for first in range(0, V, TILE):
        at = first + column
        x = tl.load(x0 + at.to(tl.int64) * stride, mask=at < V, other=float("-inf")).to(tl.float32)
        t = tl.load(t0 + at.to(tl.int64) * t_stride, mask=at < V, other=float("-inf")).to(tl.float32)
        if KIND == "forward_kl":
            t_top, t_total, top, total, term, mean = update_running_kl(
                t_top, t_total, top, total, term, mean, t, x, t_scale, scale
            )
        elif KIND == "reverse_kl":
            top, total, t_top, t_total, term, mean = update_running_kl(
                top, total, t_top, t_total, term, mean, x, t, scale, t_scale
            )
        else:
            top, e, _, down, _ = update_top(top, x, scale)
            t_top, e_t, _, t_down, _ = update_top(t_top, t, t_scale)
            total, t_total = total * down + tile_sum(e), t_total * t_down + tile_sum(e_t)
    s_top, s_total = merged(top, total, LANES)
    r_top, r_total = merged(t_top, t_total, LANES)
    s_log, r_log = log_total(s_top, s_total), log_total(r_top, r_total)
    if KIND == "forward_kl" or KIND == "reverse_kl":  # masses of lanes, and what is within each
        log_s, log_t = (top - s_top) + tl.log2(total) - s_log, (t_top - r_top) + tl.log2(t_total) - r_log
        one, u = term_and_derivative(log_s, log_t, beta, log_beta, log_rest, KIND)
        if KIND == "forward_kl":
            term, mean = one + share(tl.exp2(log_t), conditional_kl(t_total, total, term, mean)), u
        else:
            within = share(tl.exp2(log_s), conditional_kl(total, t_total, term, mean))
            term, mean = one + within, u + within
    else:
        for first in range(0, V, TILE):
            at = first + column
            x = tl.load(x0 + at.to(tl.int64) * stride, mask=at < V, other=float("-inf")).to(tl.float32)
            t = tl.load(t0 + at.to(tl.int64) * t_stride, mask=at < V, other=float("-inf")).to(tl.float32)
            log_s = less_top(x, scale, s_top) - s_log
            log_t = less_top(t, t_scale, r_top) - r_log
            one, u = term_and_derivative(log_s, log_t, beta, log_beta, log_rest, KIND)
            term += tile_sum(one)
            mean += tile_sum(u)
    value, mean = ordered_sum(term, LANES), ordered_sum(mean, LANES)
    tl.store(values + row, value)
    tl.store(saved + row, s_top)
    tl.store(saved + N + row, s_log)
    # Without a divergence there is no gradient: NaN spreads from here.
    tl.store(saved + 2 * N + row, tl.where(value < float("inf"), mean, float("nan")))
    tl.store(saved + 3 * N + row, r_top)
    tl.store(saved + 4 * N + row, r_log)


@triton.jit(do_not_specialize=["N"])
def compare_rows_backward(
    logits, teacher, mask, T, T_t,  # as in `compare_rows`
    saved,  # [SAVED, N] fp32, as `compare_rows` wrote it
    g,  # [N] fp32 upstream gradient
    out,  # [N, V] contiguous
    beta, log_beta, log_rest,
    N, V, inner, outer_stride, inner_stride, stride, t_inner, t_outer_stride, t_inner_stride, t_stride,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, HAS_T_T: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr,
    REPEATS: tl.constexpr,
):  # fmt: skip
    """Gradient of REPEATS * COLUMNS columns of one row: one read of both sides, one write."""
    row = tl.program_id(0)
    to_row = out + row.to(tl.int64) * V
    first = tl.program_id(1) * (REPEATS * COLUMNS)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            for k in range(REPEATS):
                at = first + k * COLUMNS + tl.arange(0, COLUMNS)
                tl.store(to_row + at, tl.zeros([COLUMNS], out.dtype.element_ty), mask=at < V)
            return
    scale, t_scale = row_scale(T, row, HAS_T), row_scale(T_t, row, HAS_T_T)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    t0 = teacher + row_offset(row, t_inner, t_outer_stride, t_inner_stride)
    s_top, s_log, mean = tl.load(saved + row), tl.load(saved + N + row), tl.load(saved + 2 * N + row)
    r_top, r_log = tl.load(saved + 3 * N + row), tl.load(saved + 4 * N + row)
    up = tl.load(g + row) * (scale * LN2)
    for k in range(REPEATS):
        at = first + k * COLUMNS + tl.arange(0, COLUMNS)
        inside = at < V
        x = tl.load(x0 + at.to(tl.int64) * stride, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(t0 + at.to(tl.int64) * t_stride, mask=inside, other=float("-inf")).to(tl.float32)
        log_s, log_t = less_top(x, scale, s_top) - s_log, less_top(t, t_scale, r_top) - r_log
        _, u = term_and_derivative(log_s, log_t, beta, log_beta, log_rest, KIND)
        dx = up * (u - tl.exp2(log_s) * mean)
        tl.store(to_row + at, stored_as(dx, out.dtype.element_ty), mask=inside)


@triton.jit
def listed_masses(
    x0,  # the row's logits
    ids,  # [K] of the row, -1: no entry
    log_t,  # [K] fp32 log-probabilities of the teacher; NaN where the list is wrong
    at,  # [ENTRIES] places in the list
    K, stride, scale, top, log,
):  # fmt: skip
    """(ids, log2 of the student's masses, log2 of the teacher's) at some places of a list; -inf where nothing is."""
    id = tl.load(ids + at, mask=at < K, other=-1)
    here = id >= 0
    x = tl.load(x0 + tl.where(here, id, 0) * stride, mask=here, other=float("-inf")).to(tl.float32)
    log_s = tl.where(here, less_top(x, scale, top) - log, float("-inf"))
    return id, log_s, tl.load(log_t + at, mask=at < K, other=float("-inf")) * LOG2E


@triton.jit(do_not_specialize=["N"])
def compare_lists(
    logits,  # as in `compare_rows`
    ids,  # [N, K] int64, -1: no entry
    log_t,  # [N, K] fp32
    log_tail,  # [N] fp32 log of the teacher's tail
    bits,  # [N, row_bytes] the bits of the listed ids
    mask, T, values, saved,
    beta, log_beta, log_rest,
    N, V, K, inner, outer_stride, inner_stride, stride, row_bytes,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The divergence of one row from a list and its tail; a masked row is not read."""
    row = tl.program_id(0)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            tl.store(values + row, 0.0)
            return
    LANES: tl.constexpr = TILE // NEIGHBORS
    scale = row_scale(T, row, HAS_T)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    lane = tl.arange(0, LANES)
    column = lane[:, None] * NEIGHBORS + tl.arange(0, NEIGHBORS)[None, :]
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    rest_top = tl.full([LANES], float("-inf"), tl.float32)
    rest_total = tl.zeros([LANES], tl.float32)
    for first in range(0, V, TILE):
        at = first + column
        x = tl.load(x0 + at.to(tl.int64) * stride, mask=at < V, other=float("-inf")).to(tl.float32)
        top, total, _, _, _, _ = update_running(top, total, x, scale)
        byte = first // NEIGHBORS + lane  # a lane's eight columns are one byte
        some = tl.load(bits + row.to(tl.int64) * row_bytes + byte, mask=byte * NEIGHBORS < V, other=0)
        listed = ((some[:, None] >> tl.arange(0, NEIGHBORS)[None, :]) & 1) == 1
        x = tl.where(listed, float("-inf"), x)
        rest_top, rest_total, _, _, _, _ = update_running(rest_top, rest_total, x, scale)
    s_top, s_total = merged(top, total, LANES)
    r_top, r_total = merged(rest_top, rest_total, LANES)
    s_log, r_log = log_total(s_top, s_total), tl.log2(r_total)
    empty = (r_top == float("-inf")) & (s_log == s_log)
    tail = tl.where(empty, float("-inf"), (r_top - s_top) + r_log - s_log)
    tail_t = tl.load(log_tail + row) * LOG2E
    term = tl.zeros([ENTRIES], tl.float32)
    mean = tl.zeros([ENTRIES], tl.float32)
    from_row = row.to(tl.int64) * K
    for first in range(0, K, ENTRIES):
        at = first + tl.arange(0, ENTRIES)
        _, log_s, log_r = listed_masses(x0, ids + from_row, log_t + from_row, at, K, stride, scale, s_top, s_log)
        one, u = term_and_derivative(log_s, log_r, beta, log_beta, log_rest, KIND)
        term += one
        mean += u
    one, of_tail = term_and_derivative(tail, tail_t, beta, log_beta, log_rest, KIND)
    value = one + ordered_sum(term, ENTRIES)
    mean = of_tail + ordered_sum(mean, ENTRIES)
    tl.store(values + row, value)
    mean = tl.where(value < float("inf"), mean, float("nan"))
    tl.store(saved + row, s_top)
    tl.store(saved + N + row, s_log)
    tl.store(saved + 2 * N + row, mean)
    tl.store(saved + 3 * N + row, r_top)
    tl.store(saved + 4 * N + row, r_log)
    tl.store(saved + 5 * N + row, of_tail - tl.exp2(tail) * mean)


@triton.jit(do_not_specialize=["N"])
def tail_backward(
    logits, mask, T, saved, g, out,  # as in `compare_rows_backward`
    N, V, inner, outer_stride, inner_stride, stride,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, COLUMNS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Gradient of REPEATS * COLUMNS columns of one row as if all were of the tail; `list_backward` corrects it."""
    row = tl.program_id(0)
    to_row = out + row.to(tl.int64) * V
    first = tl.program_id(1) * (REPEATS * COLUMNS)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            for k in range(REPEATS):
                at = first + k * COLUMNS + tl.arange(0, COLUMNS)
                tl.store(to_row + at, tl.zeros([COLUMNS], out.dtype.element_ty), mask=at < V)
            return
    scale = row_scale(T, row, HAS_T)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    top, log = tl.load(saved + 3 * N + row), tl.load(saved + 4 * N + row)
    up = tl.load(g + row) * (scale * LN2) * tl.load(saved + 5 * N + row)
    for k in range(REPEATS):
        at = first + k * COLUMNS + tl.arange(0, COLUMNS)
        inside = at < V
        x = tl.load(x0 + at.to(tl.int64) * stride, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.where(x == float("-inf"), 0.0, tl.exp2(less_top(x, scale, top) - log))
        tl.store(to_row + at, stored_as(up * share, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def list_backward(
    logits, ids, log_t, mask, T, saved, g, out,  # as in `compare_lists` and `tail_backward`
    beta, log_beta, log_rest,
    N, V, K, inner, outer_stride, inner_stride, stride,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, KIND: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Gradient of the listed logits of one row, in place of what `tail_backward` wrote."""
    row = tl.program_id(0)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            return
    scale = row_scale(T, row, HAS_T)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    top, log, mean = tl.load(saved + row), tl.load(saved + N + row), tl.load(saved + 2 * N + row)
    up = tl.load(g + row) * (scale * LN2)
    from_row = row.to(tl.int64) * K
    for first in range(0, K, ENTRIES):
        at = first + tl.arange(0, ENTRIES)
        id, log_s, log_r = listed_masses(x0, ids + from_row, log_t + from_row, at, K, stride, scale, top, log)
        _, u = term_and_derivative(log_s, log_r, beta, log_beta, log_rest, KIND)
        dx = up * (u - tl.exp2(log_s) * mean)
        tl.store(out + row.to(tl.int64) * V + id, stored_as(dx, out.dtype.element_ty), mask=id >= 0)
