"""After compare.cu: merging the tiles of a row, and the gradient of its logits.

By the chain rule, a row's KL is that of the masses of its tiles, plus for each tile its mass times the KL within it.
With w, v and center as in compare.cu, A w and B v the probabilities of student and teacher (A and B are factors of the
tile), KL the row's and T the student's temperature:

    reverse_kl   dz = A w (log(w / v) - center + (center + log(A / B) - KL)) / T
    forward_kl   dz = ((A - B) w + B (w - v)) / T

Both forms keep their digits where the two sides nearly agree.

Legend: N rows · V vocabulary · tiles of BN columns.
"""

import triton
import triton.language as tl

from rlkernel_triton.common.arithmetic import LN2
from rlkernel_triton.divergence.kernels import log_total
from rlkernel_triton.divergence.running_kl import conditional_kl, share
from rlkernel_triton.divergence.terms import term_and_derivative

NONE = tl.constexpr(float("-inf"))
UNSHIFT = tl.constexpr(1 / 32768)  # compare.cu keeps exponentials times 2^15
SUMS = tl.constexpr(7)  # of a row and tile


@triton.jit
def tile_masses(top, total, best, scale):
    """Masses of tiles in units of 2^(best scale): 0 in a tile whose logits are all -inf."""
    return tl.where(top == NONE, 0.0, total * tl.exp2((top - best[None, :]) * scale[None, :]))


@triton.jit
def add_masses(best, sums, top, total, scale):
    """(best, sums) of a row with more tiles."""
    new = tl.maximum(best, tl.max(top, 0))
    down = tl.where(best == NONE, 0.0, tl.exp2((best - new) * scale))
    return new, sums * down + tl.sum(tile_masses(top, total, new, scale), 0)


@triton.jit
def log_factors(top, best, log, scale):
    """Base-2 logarithms of the factors that turn 2^(x - top) into probabilities: -inf in a tile without mass."""
    return tl.where(top == NONE, NONE, (top - best[None, :]) * scale[None, :] - log[None, :])


@triton.jit(do_not_specialize=["N"])
def merge_tiles_kernel(
    sums,  # [tiles, SUMS, N] as compare.cu wrote them; with SAVE the first two of a tile become what the gradient reads
    scale,  # [N] student's logits times this are in base-2 units
    t_scale,  # [N] the teacher's
    mask,  # [N] where HAS_MASK: rows that count
    values,  # [N] divergences
    rows_back,  # [2, N] where SAVE: the student's 1/T, NaN where there is no gradient, and the KL
    N,
    tiles,
    HAS_MASK: tl.constexpr,
    KIND: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The divergence of each row. Grid: rows over ROWS. A row's tiles are merged in their order, whatever N is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < N
    s2, t2 = tl.load(scale + row, mask=live, other=1.0), tl.load(t_scale + row, mask=live, other=1.0)
    best = tl.full([ROWS], NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    t_best = tl.full([ROWS], NONE, tl.float32)
    t_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        ok = (tile < tiles)[:, None] & live[None, :]
        at = sums + tile.to(tl.int64)[:, None] * (SUMS * N) + row[None, :]
        m, s = tl.load(at, mask=ok, other=NONE), tl.load(at + N, mask=ok, other=0.0)
        best, total = add_masses(best, total, m, s, s2)
        m, s = tl.load(at + 2 * N, mask=ok, other=NONE), tl.load(at + 3 * N, mask=ok, other=0.0)
        t_best, t_total = add_masses(t_best, t_total, m, s, t2)
    log, t_log = log_total(best, total), log_total(t_best, t_total)
    value = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        ok = (tile < tiles)[:, None] & live[None, :]
        at = sums + tile.to(tl.int64)[:, None] * (SUMS * N) + row[None, :]
        m, total_s = tl.load(at, mask=ok, other=NONE), tl.load(at + N, mask=ok, other=0.0)
        of_s = log_factors(m, best, log, s2)
        m, total_t = tl.load(at + 2 * N, mask=ok, other=NONE), tl.load(at + 3 * N, mask=ok, other=0.0)
        of_t = log_factors(m, t_best, t_log, t2)
        term, moment = tl.load(at + 4 * N, mask=ok, other=0.0), tl.load(at + 5 * N, mask=ok, other=0.0)
        log_s = tl.where(of_s == NONE, NONE, of_s + tl.log2(total_s))
        log_t = tl.where(of_t == NONE, NONE, of_t + tl.log2(total_t))
        one, u = term_and_derivative(log_s, log_t, 0.0, 0.0, 0.0, KIND)
        if KIND == "reverse_kl":
            within = share(tl.exp2(log_s), conditional_kl(total_s, total_t, term, moment))
        else:
            within = share(tl.exp2(log_t), conditional_kl(total_t, total_s, term, moment))
        value += tl.sum(one + within, 0)
        mean += tl.sum(u + within, 0)
        if SAVE:
            if KIND == "reverse_kl":
                tl.store(at, tl.exp2(of_s), mask=ok)
                center = tl.load(at + 6 * N, mask=ok, other=0.0)
                tl.store(at + N, tl.where(of_s == NONE, 0.0, (of_s - of_t + center) * LN2), mask=ok)
            else:
                tl.store(at, tl.exp2(of_s) - tl.exp2(of_t), mask=ok)
                tl.store(at + N, tl.exp2(of_t), mask=ok)
    value = tl.where((log == log) & (t_log == t_log), value, float("nan"))  # all logits of a side are -inf
    if SAVE:
        tl.store(rows_back + row, tl.where(value < float("inf"), s2 * LN2, float("nan")), mask=live)
        tl.store(rows_back + N + row, mean, mask=live)
    if HAS_MASK:
        value = tl.where(tl.load(mask + row, mask=live, other=0) != 0, value, 0.0)
    tl.store(values + row, value, mask=live)


@triton.jit
def in_order(x, TILES: tl.constexpr, BN: tl.constexpr):
    """[TILES, BN] by id: compare.cu keeps id 8 j + 2 q + e of 32 at 8 q + 2 j + e."""
    return tl.reshape(tl.permute(tl.reshape(x, [TILES * (BN // 32), 4, 4, 2]), (0, 2, 1, 3)), [TILES, BN])


@triton.jit(do_not_specialize=["N"])
def gradient_kernel(
    first,  # [n, tiles BN] fp16, as compare.cu kept them
    second,  # the same
    sums,  # [tiles, SUMS, N], as `merge_tiles_kernel` left it
    rows_back,  # [2, N]
    mask,  # [N] where HAS_MASK
    g,  # [N] fp32 upstream gradient
    dz,  # [n, pitch] the gradient
    N, V, pitch, kept_pitch,
    HAS_MASK: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits. Grid: rows, tiles over TILES LOOP."""
    row = tl.program_id(0)
    counts = True
    if HAS_MASK:
        counts = tl.load(mask + row) != 0
    up, mean = tl.load(g + row) * tl.load(rows_back + row) * UNSHIFT, tl.load(rows_back + N + row)
    for i in range(LOOP):
        tile = (tl.program_id(1) * LOOP + i) * TILES + tl.arange(0, TILES)
        here = tile * BN < V
        at = sums + tile.to(tl.int64) * (SUMS * N) + row
        of_first, of_second = tl.load(at, mask=here, other=0.0)[:, None], tl.load(at + N, mask=here, other=0.0)[:, None]
        column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
        kept = row.to(tl.int64) * kept_pitch + column
        a = tl.load(first + kept, mask=here[:, None], other=0.0).to(tl.float32)
        b = tl.load(second + kept, mask=here[:, None], other=0.0).to(tl.float32)
        if KIND == "reverse_kl":
            b = b * LN2 + (of_second - mean)
        out = of_first * a * b if KIND == "reverse_kl" else of_first * a + of_second * b
        out = in_order(tl.where(counts, out * up, 0.0), TILES, BN)
        tl.store(dz + row.to(tl.int64) * pitch + column, out.to(tl.bfloat16), mask=column < V)
