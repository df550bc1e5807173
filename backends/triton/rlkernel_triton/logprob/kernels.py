"""Kernels of logprob@1: sweep a row of logits for its statistics, join them, and the gradient.

    y      capped logits, before the temperature        z = y log2(e) / T, so that e^(y / T) = 2^z
    top    the largest z of a set of ids, rounded       d = z - top, in one rounding from y
    total  sum of 2^d over the set                      moment  sum of 2^d d

A row is cut into parts of `PART` columns, one program each, so that a few long rows fill a GPU too. The chosen id is
left out of all sums, as log p = -softplus((top - y_id) / T + log total) never subtracts two large numbers. Parts depend
on V alone and every sum is a tree (arithmetic.py), so a row's bits depend on nothing but the row.

Statistics of a part, one [N, P] plane each: TARGET y of the chosen id, 0 where it lies in another part; then TOP, TOTAL
and MOMENT of all other ids; where there is a support TOP and TOTAL of the kept ones, and of the dropped ones.

Legend: N rows · V vocabulary · P parts of a row · L lanes of a tile, K neighbouring columns each.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.arithmetic import cap, scaled_less, stored_as, tanh, tree_sum
from rlkernel_triton.common.language import tl, triton

PART: Final = 32768  # columns of a part: 4 programs a row at V = 128256
TILE: Final = 1024  # columns read at a time; 0.50 ms at 8192 x 128256 on an H200, where 2048 on 4 warps takes 0.52
PLANES: Final = {False: 4, True: 8}  # by whether there is a support
COLUMNS: Final = 2048  # columns that a program of the gradient takes at a time
# (fewest rows, how often): 1.05 ms at 8192 x 128256, where one 4096 a program takes 1.09; few rows need all programs.
REPEATS: Final = ((0, 1), (256, 16))
SWEEP_WARPS: Final = 2
GRADIENT_WARPS: Final = 4
LOG_LANES: Final = (TILE // 8).bit_length() - 1

NEIGHBOURS: tl.constexpr = tl.constexpr(8)  # columns of a lane: one load of 16 bytes in 16 bits, two in fp32
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def scale_of(T, row, HAS_T: tl.constexpr):
    """log2(e) / T of a row; NaN where the temperature has no meaning, so that only that row is spoiled."""
    if HAS_T:
        t = tl.load(T + row).to(tl.float32)
    else:
        t = T * 1.0
    return LOG2E / tl.where((t > 0.0) & (t < float("inf")), t, float("nan"))


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride):
    """Where a row of [outer, inner, V] starts; everything in int64, as N V may exceed 2^31."""
    row = row.to(tl.int64)
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def fold(top, total, y, scale, INTERPRETED: tl.constexpr):
    """A tile's columns into a running (top, total), per lane. Also 2^d and d, and what the old sums were scaled by."""
    new = tl.maximum(top, tl.max(y, axis=1) * scale)
    at = tl.where(new == float("-inf"), 0.0, new)  # nothing yet: no inf - inf
    shift = top - at
    again = tl.exp2(shift)
    d = scaled_less(y, scale, at[:, None], INTERPRETED)
    e = tl.exp2(d)
    more = tl.sum(tl.sum(tl.sum(tl.reshape(e, [e.shape[0], 2, 2, 2]), axis=3), axis=2), axis=1)  # a tree
    return new, total * again + more, e, d, again, shift


@triton.jit
def together(top, total, LOG: tl.constexpr):
    """Lanes [1, L] to one (top, total), [1]; also the weight and shift of each lane."""
    best = tl.max(top, axis=1)
    at = tl.where(best == float("-inf"), 0.0, best)
    shift = top - at[:, None]
    weight = tl.exp2(shift)
    return best, tree_sum(total * weight, LOG), weight, tl.maximum(shift, -1000.0)


@triton.jit(do_not_specialize=["N"])  # bits must not depend on it
def sweep(
    logits,  # [N, V]
    ids,  # [N]
    mask,  # [N], read where HAS_MASK
    T,  # [N] where HAS_T, else a number
    softcap,
    kept,  # [N, bytes of V bits], read where SUPPORT
    parts,  # [planes, N, P] fp32
    N,
    V,
    inner,
    outer_stride,
    inner_stride,
    stride,
    kept_stride,
    HAS_MASK: tl.constexpr,
    HAS_T: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SUPPORT: tl.constexpr,
    MOMENT: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    LOG_LANES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Statistics of one part of one row."""
    row, part = tl.program_id(0), tl.program_id(1)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            return
    LANES: tl.constexpr = TILE // NEIGHBOURS
    scale = scale_of(T, row, HAS_T)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    id = tl.load(ids + row).to(tl.int64)
    lane = tl.arange(0, LANES)
    column = lane[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
    start = part * PART
    stop = tl.minimum(start + PART, V)
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    kept_top = tl.full([LANES], float("-inf"), tl.float32)
    kept_total = tl.zeros([LANES], tl.float32)
    lost_top = tl.full([LANES], float("-inf"), tl.float32)
    lost_total = tl.zeros([LANES], tl.float32)
    for first in range(start, stop, TILE):
        at = first + column
        y = tl.load(x0 + at.to(tl.int64) * stride, mask=at < V, other=float("-inf")).to(tl.float32)
        if HAS_CAP:
            y = cap(y, softcap)
        if (id >= first) & (id < first + TILE):  # in one tile of the row; elsewhere nothing is compared
            y = tl.where(column == (id - first).to(tl.int32), float("-inf"), y)
        new, sum_e, e, d, again, shift = fold(top, total, y, scale, INTERPRETED)
        if MOMENT:
            # e is 0 where d < -150, so the bound changes nothing but 0 * inf
            more = tl.reshape(e * tl.maximum(d, -1000.0), [LANES, 2, 2, 2])
            more = tl.sum(tl.sum(tl.sum(more, axis=3), axis=2), axis=1)
            moment = (moment + total * tl.maximum(shift, -1000.0)) * again + more
        top, total = new, sum_e
        if SUPPORT:
            byte = first // NEIGHBOURS + lane
            bits = tl.load(kept + row.to(tl.int64) * kept_stride + byte, mask=byte * NEIGHBOURS < V, other=0)
            among = ((bits[:, None] >> tl.arange(0, NEIGHBOURS)[None, :]) & 1) == 1
            inside = tl.where(among, y, float("-inf"))
            outside = tl.where(among, float("-inf"), y)
            kept_top, kept_total, _, _, _, _ = fold(kept_top, kept_total, inside, scale, INTERPRETED)
            lost_top, lost_total, _, _, _, _ = fold(lost_top, lost_total, outside, scale, INTERPRETED)
    P = tl.cdiv(V, PART)
    plane = N.to(tl.int64) * P
    one = tl.arange(0, 1)
    out = parts + row.to(tl.int64) * P + part + one
    here = (id >= start) & (id < stop)
    y_id = tl.load(x0 + tl.where(here, id, 0) * stride).to(tl.float32)
    if HAS_CAP:
        y_id = cap(y_id, softcap)
    tl.store(out, tl.where(here, y_id, 0.0) + tl.zeros([1], tl.float32))
    best, some, weight, shift = together(tl.reshape(top, [1, LANES]), tl.reshape(total, [1, LANES]), LOG_LANES)
    tl.store(out + plane, best)
    tl.store(out + 2 * plane, some)
    if MOMENT:
        moments = (tl.reshape(moment, [1, LANES]) + tl.reshape(total, [1, LANES]) * shift) * weight
        tl.store(out + 3 * plane, tree_sum(moments, LOG_LANES))
    if SUPPORT:
        best, some, _, _ = together(tl.reshape(kept_top, [1, LANES]), tl.reshape(kept_total, [1, LANES]), LOG_LANES)
        tl.store(out + 4 * plane, best)
        tl.store(out + 5 * plane, some)
        best, some, _, _ = together(tl.reshape(lost_top, [1, LANES]), tl.reshape(lost_total, [1, LANES]), LOG_LANES)
        tl.store(out + 6 * plane, best)
        tl.store(out + 7 * plane, some)


@triton.jit
def dlogits(
    y,  # capped logits, of any shape; the rest broadcasts to it
    chosen,
    among,
    scale,
    top,
    log_total,
    mean,
    rest,
    kept_top,
    kept_log_total,
    g,
    g_lse,
    g_entropy,
    g_mass,
    SUPPORT: tl.constexpr,
    G_ENTROPY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradient with respect to y: rlkernel_common.row_statistics.gradient, with logarithms of base 2."""
    inverse_T = scale * LN2
    g *= inverse_T
    common = g_lse * inverse_T
    d = scaled_less(y, scale, top, INTERPRETED)
    p = tl.exp2(d - log_total)
    if G_ENTROPY:
        g_entropy *= inverse_T * LN2
        common += g_entropy * mean
        common = common - g_entropy * tl.maximum(d, -1000.0)  # p is 0 where the bound matters
    if SUPPORT:
        g_mass *= inverse_T
        q = tl.exp2(scaled_less(y, scale, kept_top, INTERPRETED) - kept_log_total)
        q = tl.where(among | chosen, q, 0.0)
        return p * (common - g_mass) + tl.where(chosen, g_mass * q + g * rest, (g_mass - g) * q)
    return tl.where(chosen, p * common + g * rest, p * (common - g))


@triton.jit(do_not_specialize=["N"])
def gradient(
    logits,  # [N, V]
    ids,  # [N]
    mask,  # [N], read where HAS_MASK
    invalid,  # [N]
    T,  # [N] where HAS_T, else a number
    softcap,
    kept,  # [N, bytes of V bits], read where SUPPORT
    saved,  # [6, N] as `law` wrote it
    g,  # [N] upstream gradients
    g_lse,
    g_entropy,
    g_mass,
    out,  # [N, V]
    N,
    V,
    inner,
    outer_stride,
    inner_stride,
    stride,
    kept_stride,
    HAS_MASK: tl.constexpr,
    HAS_T: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SUPPORT: tl.constexpr,
    G: tl.constexpr,
    G_LSE: tl.constexpr,
    G_ENTROPY: tl.constexpr,
    G_MASS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REPEATS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradient of some columns of one row: one read, one write. A masked row is not read."""
    row = tl.program_id(0)
    to_row = out + row.to(tl.int64) * V
    first = tl.program_id(1) * (REPEATS * COLUMNS)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            for k in range(REPEATS):
                at = first + k * COLUMNS + tl.arange(0, COLUMNS)
                tl.store(to_row + at, tl.zeros([COLUMNS], out.dtype.element_ty), mask=at < V)
            return
    bad = tl.load(invalid + row) != 0
    id = tl.where(bad, -1, tl.load(ids + row).to(tl.int64))  # valid here, or -1
    scale = scale_of(T, row, HAS_T)
    up, up_lse, up_entropy, up_mass = 0.0, 0.0, 0.0, 0.0
    if G:
        up = tl.where(bad, 0.0, tl.load(g + row))
    if G_LSE:
        up_lse = tl.load(g_lse + row)
    if G_ENTROPY:
        up_entropy = tl.load(g_entropy + row)
    if G_MASS:
        up_mass = tl.where(bad, 0.0, tl.load(g_mass + row))
    kept_top, kept_log_total = 0.0, 0.0
    if SUPPORT:
        kept_top, kept_log_total = tl.load(saved + 4 * N + row), tl.load(saved + 5 * N + row)
    top, log_total = tl.load(saved + row), tl.load(saved + N + row)
    mean, rest = tl.load(saved + 2 * N + row), tl.load(saved + 3 * N + row)
    from_row = logits + row_offset(row, inner, outer_stride, inner_stride)
    for k in range(REPEATS):
        at = first + k * COLUMNS + tl.arange(0, COLUMNS)
        inside = at < V
        among = inside
        if SUPPORT:
            bits = tl.load(kept + row.to(tl.int64) * kept_stride + at // 8, mask=inside, other=0)
            among = ((bits >> (at % 8)) & 1) == 1
        x = tl.load(from_row + at.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
        y = x
        if HAS_CAP:
            y = cap(x, softcap)
        dy = dlogits(
            y, at == id.to(tl.int32), among, scale, top, log_total, mean, rest, kept_top, kept_log_total,
            up, up_lse, up_entropy, up_mass, SUPPORT, G_ENTROPY, INTERPRETED,
        )  # fmt: skip
        if HAS_CAP:
            bend = tanh(x / softcap)
            dy = dy * (1.0 - bend * bend)
        tl.store(to_row + at, stored_as(dy, out.dtype.element_ty, INTERPRETED), mask=inside)
