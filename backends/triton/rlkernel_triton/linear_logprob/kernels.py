"""Kernels of linear_logprob@1: tiles of logits in registers, swept or turned into a gradient where they are.

`tile_logits` multiplies a block of hidden rows with a block of the head, with fp32 accumulators that never leave the
registers: `head_sweep` keeps statistics of each tile (logprob/kernels.py says which), `head_gradient` writes the
gradient of the logits in 16 bits for the products that follow, `saved_gradient` the same from logits that were kept.
A row's bits depend on the row and the head alone: one tile shape per device, every sum in one order, no atomics.

Rows are worked on in blocks, copied together in the order of `index`, which holds those that count first; `count` says
how many. Blocks of tiles behind them are skipped without the host knowing.

Legend: n rows of this call · D hidden · V vocabulary · P tiles of V.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import cap, scaled_less, stored_as
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.logprob.kernels import LOG2E, dlogits


@triton.jit
def place_of(pid, blocks, tiles, GROUP: tl.constexpr):
    """(block of rows, tile of columns): blocks in groups, so that a tile of the head serves several from the cache."""
    group = pid // (GROUP * tiles)
    first = group * GROUP
    size = tl.minimum(blocks - first, GROUP)
    within = pid % (GROUP * tiles)
    return first + within % size, within // size


@triton.jit
def row_of(index, r, inside, HAS_INDEX: tl.constexpr):
    """The row that stands at place r."""
    if HAS_INDEX:
        return tl.load(index + r, mask=inside, other=0).to(tl.int64)
    return r.to(tl.int64)


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


@triton.jit
def scales_of(T, row, inside, HAS_T: tl.constexpr, BM: tl.constexpr):
    """[BM] of log2(e) / T; NaN where a temperature has no meaning."""
    if HAS_T:
        t = tl.load(T + row, mask=inside, other=1.0).to(tl.float32)
    else:
        t = tl.full([BM], 1.0, tl.float32) * T
    return LOG2E / tl.where((t > 0.0) & (t < float("inf")), t, float("nan"))


@triton.jit
def sums(y, scale, MOMENT: tl.constexpr, INTERPRETED: tl.constexpr):
    """(top, total, moment) of every row of a tile."""
    top = tl.max(y, axis=1) * scale
    at = tl.where(top == float("-inf"), 0.0, top)
    d = scaled_less(y, scale[:, None], at[:, None], INTERPRETED)
    e = tl.exp2(d)
    total = tl.sum(e, axis=1)
    moment = total
    if MOMENT:
        moment = tl.sum(e * tl.maximum(d, -1000.0), axis=1)  # e is 0 where the bound matters
    return top, total, moment


@triton.jit
def kept_columns(kept, row, column, inside, V, kept_stride):
    """[BM, BN] which columns the rows keep."""
    byte = kept + row[:, None] * kept_stride + (column // 8)[None, :]
    bits = tl.load(byte, mask=inside[:, None] & (column < V)[None, :], other=0)
    return ((bits >> (column % 8)[None, :]) & 1) == 1


@triton.jit(do_not_specialize=["first", "n"])  # bits must not depend on them
def head_sweep(
    x,  # [n, D] hidden states of this block, D contiguous
    weight,  # [V, D]
    bias,  # [V], read where HAS_BIAS
    ids,  # [N], counted from the first column of this head
    index,  # [N], read where HAS_INDEX
    count,  # [1], read where HAS_INDEX
    T,  # [N] where HAS_T, else a number
    kept,  # [N, bytes of V bits], read where SUPPORT
    parts,  # [planes, n, P]
    saved,  # [n, V], written where SAVE: capped logits less the largest of their tile
    peaks,  # [n, P], written where SAVE: that largest
    first,
    n,
    D,
    V,
    x_stride,
    head_stride,
    head_step,
    kept_stride,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_T: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SUPPORT: tl.constexpr,
    MOMENT: tl.constexpr,
    SAVE: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Statistics of one tile: rows first .. first + n of the order of `index`."""
    P = tl.cdiv(V, BN)
    block, tile = place_of(tl.program_id(0), tl.cdiv(n, BM), P, GROUP)
    if HAS_INDEX:
        if first + block * BM >= tl.load(count):
            return
    r = block * BM + tl.arange(0, BM)
    inside = r < n
    row = row_of(index, first + r, inside, HAS_INDEX)
    column = tile * BN + tl.arange(0, BN)
    y = tile_logits(
        x, weight, bias, r, inside, column, D, V, x_stride, head_stride, head_step, scale, HAS_BIAS, OPERAND,
        BM, BN, BK,
    )  # fmt: skip
    if HAS_CAP:
        y = cap(y, softcap)
    if SAVE:
        peak = tl.max(y, axis=1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        at = r.to(tl.int64)[:, None] * V + column[None, :]
        low = stored_as(y - peak[:, None], saved.dtype.element_ty, INTERPRETED)
        tl.store(saved + at, low, mask=inside[:, None] & (column < V)[None, :])
        tl.store(peaks + r.to(tl.int64) * P + tile, peak, mask=inside)
    z = scales_of(T, row, inside, HAS_T, BM)
    id = tl.load(ids + row, mask=inside, other=-1).to(tl.int64)
    chosen = column[None, :] == tl.where(id < V, id, -1).to(tl.int32)[:, None]
    plane = n.to(tl.int64) * P
    out = parts + r.to(tl.int64) * P + tile
    tl.store(out, tl.sum(tl.where(chosen, y, 0.0), axis=1), mask=inside)
    y = tl.where(chosen, float("-inf"), y)
    top, total, moment = sums(y, z, MOMENT, INTERPRETED)
    tl.store(out + plane, top, mask=inside)
    tl.store(out + 2 * plane, total, mask=inside)
    if MOMENT:
        tl.store(out + 3 * plane, moment, mask=inside)
    if SUPPORT:
        among = kept_columns(kept, row, column, inside, V, kept_stride)
        top, total, _ = sums(tl.where(among, y, float("-inf")), z, False, INTERPRETED)
        tl.store(out + 4 * plane, top, mask=inside)
        tl.store(out + 5 * plane, total, mask=inside)
        top, total, _ = sums(tl.where(among, float("-inf"), y), z, False, INTERPRETED)
        tl.store(out + 6 * plane, top, mask=inside)
        tl.store(out + 7 * plane, total, mask=inside)


@triton.jit(do_not_specialize=["first", "n", "N", "start"])
def head_gradient(
    x,  # [n, D] hidden states of this block, D contiguous
    weight,  # [V, D]
    bias,  # [V], read where HAS_BIAS
    ids,  # [N], counted from the first column of this head
    index,  # [N], read where HAS_INDEX
    count,  # [1], read where HAS_INDEX
    invalid,  # [N]
    T,  # [N] where HAS_T, else a number
    kept,  # [N, bytes of V bits], read where SUPPORT
    rows,  # [6, N] as `law` wrote it
    g,  # [N] upstream gradients
    g_lse,
    g_entropy,
    g_mass,
    saved,  # [N, V], read where SAVED instead of a product
    peaks,  # [N, peaks of V]
    out,  # [n, width]
    first,
    n,
    N,
    start,
    width,
    D,
    V,
    x_stride,
    head_stride,
    head_step,
    kept_stride,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_T: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SUPPORT: tl.constexpr,
    G: tl.constexpr,
    G_LSE: tl.constexpr,
    G_ENTROPY: tl.constexpr,
    G_MASS: tl.constexpr,
    SAVED: tl.constexpr,
    PEAK: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Gradient of hidden @ weight.T in the columns start .. start + width, times what the bias and scale make of it."""
    block, tile = place_of(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), GROUP)
    r = block * BM + tl.arange(0, BM)
    at = tile * BN + tl.arange(0, BN)
    to = out + r.to(tl.int64)[:, None] * width + at[None, :]
    inside = r < n
    written = inside[:, None] & (at < width)[None, :]
    if HAS_INDEX:
        inside = inside & (first + r < tl.load(count))
        if first + block * BM >= tl.load(count):
            tl.store(to, tl.zeros([BM, BN], out.dtype.element_ty), mask=written)
            return
    row = row_of(index, first + r, inside, HAS_INDEX)
    column = start + at
    if SAVED:
        place = (first + r).to(tl.int64)
        low = tl.load(saved + place[:, None] * V + column[None, :], mask=written, other=0.0).to(tl.float32)
        peak = peaks + place[:, None] * tl.cdiv(V, PEAK) + (column // PEAK)[None, :]
        y = low + tl.load(peak, mask=written, other=0.0)
    else:
        y = tile_logits(
            x, weight, bias, r, inside, column, D, V, x_stride, head_stride, head_step, scale, HAS_BIAS, OPERAND,
            BM, BN, BK,
        )  # fmt: skip
        if HAS_CAP:
            y = cap(y, softcap)
    z = scales_of(T, row, inside, HAS_T, BM)
    bad = tl.load(invalid + row, mask=inside, other=0) != 0
    id = tl.load(ids + row, mask=inside, other=-1).to(tl.int64)
    chosen = column[None, :] == tl.where(bad | (id >= V), -1, id).to(tl.int32)[:, None]
    none = z * 0.0
    up, up_lse, up_entropy, up_mass = none, none, none, none
    if G:
        up = tl.where(bad, 0.0, tl.load(g + row, mask=inside, other=0.0))
    if G_LSE:
        up_lse = tl.load(g_lse + row, mask=inside, other=0.0)
    if G_ENTROPY:
        up_entropy = tl.load(g_entropy + row, mask=inside, other=0.0)
    if G_MASS:
        up_mass = tl.where(bad, 0.0, tl.load(g_mass + row, mask=inside, other=0.0))
    kept_top, kept_log_total, among = none, none, chosen
    if SUPPORT:
        kept_top = tl.load(rows + 4 * N + row, mask=inside, other=0.0)
        kept_log_total = tl.load(rows + 5 * N + row, mask=inside, other=0.0)
        among = kept_columns(kept, row, column, inside, V, kept_stride)
    top, log_total = tl.load(rows + row, mask=inside, other=0.0), tl.load(rows + N + row, mask=inside, other=0.0)
    mean = tl.load(rows + 2 * N + row, mask=inside, other=0.0)
    rest = tl.load(rows + 3 * N + row, mask=inside, other=0.0)
    dx = dlogits(
        y, chosen, among, z[:, None], top[:, None], log_total[:, None], mean[:, None], rest[:, None],
        kept_top[:, None], kept_log_total[:, None], up[:, None], up_lse[:, None], up_entropy[:, None],
        up_mass[:, None], SUPPORT, G_ENTROPY, INTERPRETED,
    )  # fmt: skip
    if HAS_CAP:
        bend = tl.maximum(y / softcap, -1.0)  # tanh(x / c); a forbidden id is -inf
        dx = dx * (1.0 - bend * bend)
    dx = tl.where(inside[:, None], dx * scale, 0.0)
    tl.store(to, stored_as(dx, out.dtype.element_ty, INTERPRETED), mask=written)


@triton.jit(do_not_specialize=["first"])  # that M and K are multiples of 16 is what lets loads be wide
def product(
    a,  # [M, K], a_stride from row to row, a_step from column to column
    b,  # [K, C], b_stride from row to row, b_step from column to column
    count,  # [1], read where LIMIT: how many rows count, of which this block's start at `first`
    out,  # [M, C] contiguous
    first,
    M,
    C,
    K,
    a_stride,
    a_step,
    b_stride,
    b_step,
    LIMIT: tl.constexpr,  # "none", "rows" where M runs over rows, "sum" where K does
    ADD: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out = a @ b, or out += a @ b where ADD: the sum goes on where it stopped, so cutting K changes no bit."""
    block, tile = place_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(C, BN), GROUP)
    end = K
    if LIMIT != "none":
        counted = tl.maximum(tl.load(count) - first, 0).to(tl.int32)
        if LIMIT == "rows":
            if block * BM >= counted:
                return
        else:
            end = tl.minimum(K, counted)
    m = block * BM + tl.arange(0, BM)
    c = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside, there = m < M, c < C
    to = out + m.to(tl.int64)[:, None] * C + c[None, :]
    written = inside[:, None] & there[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    if ADD:
        acc = tl.load(to, mask=written, other=0.0)
    x0 = a + m.to(tl.int64)[:, None] * a_stride + k.to(tl.int64)[None, :] * a_step
    w0 = b + k.to(tl.int64)[:, None] * b_stride + c.to(tl.int64)[None, :] * b_step
    for start in range(0, end, BK):
        left = k < end - start
        x = tl.load(x0, mask=inside[:, None] & left[None, :], other=0.0).to(OPERAND)
        w = tl.load(w0, mask=left[:, None] & there[None, :], other=0.0).to(OPERAND)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x0 += BK * a_step
        w0 += BK * b_stride
    tl.store(to, stored_as(acc, out.dtype.element_ty, INTERPRETED), mask=written)
