"""Around the logits kernel: merging the tiles of a row, and the gradient of its saved logits.

Plain Triton. The tiles of a row are merged in their order, whatever the number of rows.

    y   logit, capped where there is a cap, before scale and temperature        z = y * s2, in base-2 units

Legend: N rows · V vocabulary · D hidden · tiles of BN columns.
"""

import triton
import triton.language as tl

from rlkernel_triton.common.arithmetic import log1p, softplus

LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(-1e30)  # the logits kernel's mark of a logit that takes no part
LEAST_BIAS = -4e29  # finite biases below it are raised to it, apart from FAR; such an id's probability is 0 either way
_BIASED = tl.constexpr(0.9 * LEAST_BIAS)  # logits below it hold a raised bias, or are FAR


@triton.jit(do_not_specialize=["N", "stride"])
def merge_tiles_kernel(
    tops,  # [tiles, stride] largest y of a tile
    sums,  # [tiles, 2, N] sum of 2^(z - top), and of that times z - top, without the chosen id
    chosen,  # [N] y of the chosen id; where it holds a raised bias or is FAR, the logit is stored in its place
    target,  # [N] the chosen id; -1: none
    row_scale,  # [N] s2
    bias,  # [V] fp32 as it was given, where BIAS
    logprob,  # [N] and so are all that follow
    lse,
    entropy,
    lse2,
    mean2,  # the mean of z, weighted by the probabilities
    missed,  # 1 - p of the chosen id, without cancellation
    N,
    tiles,
    stride,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    PART: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Softmax statistics of each row; of a PART of the vocabulary, its partial sums alone. Grid: rows over ROWS.

    A PART stores its largest y in place of the logprob, its two sums in place of lse and entropy, and nothing else.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < N
    s2 = tl.load(row_scale + rows, mask=live, other=1.0)
    M = tl.full([ROWS], FAR, tl.float32)
    S = tl.zeros([ROWS], tl.float32)
    A = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        at = first + tl.arange(0, TILES).to(tl.int64)
        ok = (at < tiles)[:, None] & live[None, :]
        m = tl.load(tops + at[:, None] * stride + rows[None, :], mask=ok, other=FAR)
        where = sums + at[:, None] * (2 * N) + rows[None, :]
        s = tl.load(where, mask=ok, other=0.0)
        a = tl.load(where + N, mask=ok, other=0.0)
        top = tl.maximum(M, tl.max(m, 0))
        d = (m - top[None, :]) * s2[None, :]
        e = tl.exp2(d)
        k = tl.exp2((M - top) * s2)
        A = k * (A + S * ((M - top) * s2)) + tl.sum(e * (a + s * d), 0)
        S = k * S + tl.sum(e * s, 0)
        M = top
    own_id = tl.load(target + rows, mask=live, other=-1)
    has = own_id >= 0
    y = tl.load(chosen + rows, mask=live, other=0.0)
    if BIAS:
        far = live & has & (y < _BIASED)
        of_bias = tl.load(bias + tl.where(far, own_id, 0), mask=far, other=0.0)
        y = tl.where(far, tl.where(y == FAR, -float("inf"), of_bias), y)  # FAR also where the product is -inf
        tl.store(chosen + rows, y, mask=far)
    if PART:
        tl.store(logprob + rows, M, mask=live)
        tl.store(lse + rows, S, mask=live)
        tl.store(entropy + rows, A, mask=live)
        return
    nobody = M <= 0.5 * FAR  # no id but the chosen one takes part
    y = tl.where(has, y, -float("inf"))
    forbidden = y == -float("inf")
    z = tl.where(forbidden, FAR, y * s2)
    beyond = (z == -float("inf")) & (forbidden == 0)  # of a finite logit that base-2 units do not hold
    others = tl.where(nobody, FAR, M * s2)
    S = tl.where(nobody, 0.0, S)
    A = tl.where(nobody, 0.0, A)
    top = tl.where(nobody & (forbidden == 0), z, tl.maximum(others, z))
    k = tl.where(nobody, 0.0, tl.exp2(others - top))
    own = tl.where(forbidden, 0.0, tl.exp2(z - top))
    A = k * (A + S * tl.where(nobody, 0.0, others - top)) + own * tl.where(forbidden | beyond, 0.0, z - top)
    rest = k * S
    total = rest + own
    log_total = tl.where(z >= others, log1p(rest), tl.log(total))
    # No probabilities: every logit is -inf, or one is +inf or NaN. NaN passes through the sums by itself.
    all_forbidden = nobody & forbidden
    infinite = (float("inf") == M) | (y == float("inf"))
    x = tl.where(beyond, others * LN2 - y * (s2 * LN2), (others - z) * LN2) + tl.log(S)
    p = tl.where(nobody, 0.0, tl.where(forbidden, -float("inf"), 0.0 - softplus(x)))
    other = tl.where(nobody, 0.0, tl.where(forbidden, 1.0, 1.0 / (1.0 + tl.exp(-x))))
    nan = float("nan")
    broken = all_forbidden | infinite | (x != x) & ~nobody & ~forbidden | (total != total) | (s2 != s2) | (y != y)
    tl.store(logprob + rows, tl.where(broken | ~has, nan, p), mask=live)
    total_lse = tl.where(s2 != s2, nan, top * LN2 + log_total)
    total_lse = tl.where(all_forbidden, -float("inf"), tl.where(infinite, float("inf"), total_lse))
    tl.store(lse + rows, total_lse, mask=live)
    tl.store(entropy + rows, tl.where(broken, nan, log_total - A / total * LN2), mask=live)
    tl.store(lse2 + rows, tl.where(broken, nan, top + log_total / LN2), mask=live)
    tl.store(mean2 + rows, tl.where(broken, nan, top + A / total), mask=live)
    tl.store(missed + rows, tl.where(broken, nan, other), mask=live)


@triton.jit(do_not_specialize=["N", "stride"])
def coefficient_kernel(
    g_logprob,  # [N] upstream gradients, and so are the next two
    g_lse,
    g_entropy,
    chosen,  # [N] and so are all that follow
    row_scale,
    inverse,  # logit_scale / T
    logprob,
    lse2,
    mean2,
    missed,
    coef,  # [4, stride]: lse2, ca, cb, and the gradient of the chosen id's own entry
    count,  # rows that hold something; the rest gets a gradient of 0 whatever it holds
    N,
    stride,
    cap,
    CAP: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Coefficients of a row from its statistics and upstream gradients: dz = 2^(y s2 - lse2) (ca + cb y)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stored = rows < N
    live = stored
    if COUNTED:
        live = live & (rows < tl.load(count))
    g = tl.load(g_logprob + rows, mask=live, other=0.0)
    q = tl.load(g_lse + rows, mask=live, other=0.0)
    h = tl.load(g_entropy + rows, mask=live, other=0.0) * LN2
    s2 = tl.load(row_scale + rows, mask=live, other=0.0)
    inv = tl.load(inverse + rows, mask=live, other=0.0)
    mean = tl.load(mean2 + rows, mask=live, other=0.0)
    log_p = tl.load(logprob + rows, mask=live, other=0.0)
    y = tl.load(chosen + rows, mask=live, other=0.0)
    tl.store(coef + rows, tl.load(lse2 + rows, mask=live, other=3e38), mask=stored)
    tl.store(coef + stride + rows, (q - g + h * mean) * inv, mask=stored)
    tl.store(coef + 2 * stride + rows, -h * inv * s2, mask=stored)
    p = tl.exp(log_p)
    rise = tl.where(p > 0, p * (q + h * (mean - y * s2)), 0.0)
    own = (rise + g * tl.load(missed + rows, mask=live, other=0.0)) * inv
    if CAP:
        own *= tl.where(y <= 0.5 * FAR, 0.0, 1.0 - y * y * (1.0 / (cap * cap)))
    tl.store(coef + 3 * stride + rows, own, mask=stored)


@triton.jit(do_not_specialize=["top_stride", "stride"])
def saved_kernel(
    saved,  # [N, pitch] fp16(y - tile max), overwritten by its gradient
    tops,  # [tiles, top_stride]
    row_scale,  # [N]
    coef,  # [4, stride]
    count,  # rows that hold something; the rest gets zeros
    V,
    pitch,
    top_stride,
    stride,
    cap,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    LOOP: tl.constexpr,
    CAP: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Saved logits to their gradient, in place; the chosen id's entry becomes 0. Grid: rows, tiles over TILES LOOP."""
    row = tl.program_id(0)
    dead = False
    if COUNTED:
        dead = row >= tl.load(count)
    s2 = tl.load(row_scale + row)
    lse2 = tl.load(coef + row)
    ca = tl.load(coef + stride + row)
    cb = tl.load(coef + 2 * stride + row)
    for i in range(LOOP):
        tiles = (tl.program_id(1) * LOOP + i) * TILES + tl.arange(0, TILES)
        cols = tiles[:, None] * BN + tl.arange(0, BN)[None, :]
        at = saved + row.to(tl.int64) * pitch + cols
        m = tl.load(tops + tiles.to(tl.int64) * top_stride + row, mask=tiles * BN < V, other=0.0)
        stored = tl.load(at, mask=cols < V, other=0.0).to(tl.float16, bitcast=True).to(tl.float32)
        y = tl.where(stored == -float("inf"), FAR, stored + m[:, None])
        dz = tl.exp2(y * s2 - lse2) * (ca + cb * y)
        if CAP:
            dz *= tl.where(y <= 0.5 * FAR, 0.0, 1.0 - y * y * (1.0 / (cap * cap)))
        dz = tl.where(dead, 0.0, dz)
        tl.store(at, dz.to(tl.bfloat16), mask=cols < V)


@triton.jit(do_not_specialize=["N", "first_row", "first", "width"])
def chosen_kernel(
    dz,  # [N, pitch] gradient of a slice of the vocabulary
    target,  # [N]
    own,  # [N] gradient of the chosen id's own entry
    count,
    first_row,
    N,
    pitch,
    first,
    width,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """The chosen id's own entry, where it lies in this slice."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < N
    if COUNTED:
        live = live & (first_row + rows < tl.load(count))
    t = tl.load(target + rows, mask=live, other=-1) - first
    live = live & (t >= 0) & (t < width)
    value = tl.load(own + rows, mask=live, other=0.0)
    tl.store(dz + rows.to(tl.int64) * pitch + t, value.to(tl.bfloat16), mask=live)


@triton.jit(do_not_specialize=["N", "first_row", "width"])
def clear_kernel(
    dz, count, first_row, N, pitch, width, BM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Zeros in the rows of whole tiles of BM that were skipped. Grid: rows over ROWS, columns over COLS."""
    worked = tl.cdiv(tl.maximum(tl.load(count) - first_row, 0), BM) * BM
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS + ROWS > worked:
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
        ok = ((rows >= worked) & (rows < N))[:, None] & (cols < width)[None, :]
        at = dz + rows.to(tl.int64)[:, None] * pitch + cols[None, :]
        tl.store(at, tl.zeros([ROWS, COLS], tl.bfloat16), mask=ok)


@triton.jit
def gather_kernel(x, place, count, out, D, x_stride, out_stride, COLS: tl.constexpr):
    """Rows in the order of `place`, those from `count` on as zeros. Grid: rows of the result, columns over COLS."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    width = tl.where(row < tl.load(count), D, 0)
    source = tl.load(place + row)
    value = tl.load(x + source * x_stride + cols, mask=cols < width, other=0.0)
    tl.store(out + row * out_stride + cols, value, mask=cols < out_stride)


@triton.jit(do_not_specialize=["first_row"])
def scatter_kernel(x, place, count, first_row, out, D, x_stride, COLS: tl.constexpr):
    """Rows back where `place` took them from, in the dtype of the result; rows from `count` on become zeros."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    width = tl.where(first_row + row < tl.load(count), D, 0)
    value = tl.load(x + row * x_stride + cols, mask=cols < width, other=0.0)
    tl.store(out + tl.load(place + row) * D + cols, value.to(out.dtype.element_ty), mask=cols < D)


@triton.jit(do_not_specialize=["N", "V"])
def rows_kernel(
    ids,  # [N] the chosen ids, of any integer type
    T,  # [N] fp32 where EACH
    mask,  # [N] bytes where COUNTED: rows that count
    before,  # [N] where COUNTED: rows that count up to and with each one
    target,  # [N] int32: the chosen id, or -1; this and what follows stand in the order of `place`
    row_scale,  # [N] factor / T
    inverse,  # [N] scale / T
    invalid,  # [N] bytes in the caller's order: the row counts, and its id is out of range
    place,  # [N] where COUNTED: which row of the caller each one is, rows that count first
    position,  # [N] where COUNTED: where each row of the caller stands
    count,  # [1] int32 where COUNTED: rows that count
    V,
    number,  # the temperature of all rows where not EACH
    factor,
    scale,
    N,
    EACH: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Ids, temperatures and the order of the rows as the other kernels read them. Grid: rows over ROWS.

    A temperature that has no meaning becomes NaN; that of a row that does not count becomes 1.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < N
    chosen = tl.load(ids + rows, mask=live, other=-1).to(tl.int64)
    outside = (chosen < 0) | (chosen >= V)
    at = rows.to(tl.int64)
    if EACH:
        t = tl.load(T + rows, mask=live, other=1.0)
        t = tl.where((t > 0) & (t < float("inf")), t, float("nan"))
    else:
        t = tl.zeros([ROWS], tl.float32) + number
    if COUNTED:
        counts = tl.load(mask + rows, mask=live, other=0) != 0
        outside = outside & counts
        chosen = tl.where(counts, chosen, -1)
        t = tl.where(counts, t, 1.0)
        total = tl.load(before + (N - 1))
        ahead = tl.load(before + rows, mask=live, other=0)
        at = tl.where(counts, ahead - 1, total + at - ahead)
        tl.store(position + rows, at, mask=live)
        tl.store(place + at, rows.to(tl.int64), mask=live)
        if tl.program_id(0) == 0:
            tl.store(count, total.to(tl.int32))
    tl.store(invalid + rows, outside.to(tl.int8), mask=live)
    tl.store(target + at, tl.where(outside, -1, chosen).to(tl.int32), mask=live)
    reciprocal = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), t)  # torch divides a number by a tensor in these two steps
    tl.store(row_scale + at, reciprocal * factor, mask=live)
    tl.store(inverse + at, reciprocal * scale, mask=live)


@triton.jit(do_not_specialize=["N"])
def results_kernel(
    logprob,  # [N] in the head's order, and so are the next two
    lse,
    entropy,
    mask,  # [N] bytes where COUNTED
    position,  # [N] where COUNTED
    out_logprob,  # [N] in the caller's order, and so are the next two
    out_lse,
    out_entropy,
    N,
    ENTROPY: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Results in the caller's order, 0 in rows that do not count. Grid: rows over ROWS."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < N
    at = rows.to(tl.int64)
    counts = live
    if COUNTED:
        counts = live & (tl.load(mask + rows, mask=live, other=0) != 0)
        at = tl.load(position + rows, mask=live, other=0)
    tl.store(out_logprob + rows, tl.load(logprob + at, mask=counts, other=0.0), mask=live)
    tl.store(out_lse + rows, tl.load(lse + at, mask=counts, other=0.0), mask=live)
    if ENTROPY:
        tl.store(out_entropy + rows, tl.load(entropy + at, mask=counts, other=0.0), mask=live)


@triton.jit(do_not_specialize=["N", "stride"])
def upstream_kernel(
    g_logprob,  # [N] fp32 in the caller's order where G, and so are the next two
    g_lse,
    g_entropy,
    target,  # [N] the chosen id; -1: none, and no gradient of its log-probability
    place,  # [N] where COUNTED
    count,
    out,  # [3, stride] the three in the head's order
    N,
    stride,
    G: tl.constexpr,
    G_LSE: tl.constexpr,
    G_ENTROPY: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Upstream gradients in the head's order: 0 where none arrives or a row does not count. Grid: rows over ROWS."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < N
    at = rows.to(tl.int64)
    counts = live
    if COUNTED:
        counts = live & (rows < tl.load(count))
        at = tl.load(place + rows, mask=live, other=0)
    none = tl.zeros([ROWS], tl.float32)
    g = none
    if G:
        has = tl.load(target + rows, mask=live, other=-1) >= 0
        g = tl.load(g_logprob + at, mask=counts & has, other=0.0)
    q = none
    if G_LSE:
        q = tl.load(g_lse + at, mask=counts, other=0.0)
    h = none
    if G_ENTROPY:
        h = tl.load(g_entropy + at, mask=counts, other=0.0)
    tl.store(out + rows, g, mask=live)
    tl.store(out + stride + rows, q, mask=live)
    tl.store(out + 2 * stride + rows, h, mask=live)
