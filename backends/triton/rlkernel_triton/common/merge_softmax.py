"""The kernel that joins the parts of a row and says what they mean: log-probability, lse, entropy, kept mass.

Shared by logits, by hidden states and a head, and by the shards of a vocabulary: whoever swept the parts, they are
joined here in their order, as rlkernel_common.row_statistics.softmax_stats does it.

Legend: N rows · P parts of a row · W the next power of two.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.arithmetic import log1p, scaled_less, softplus, tree_sum
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.logprob.kernels import LN2, LOG2E

CELLS: Final = 512  # parts that a program holds: as many rows, of as many parts, as that allows
MOST_ROWS: Final = 32
WARPS: Final = 4
SAVED: Final = 6  # planes kept for the gradient: top, log total, mean, 1 - p, top and log total of the kept


@triton.jit
def joined(parts, at, there, plane, first, LOG: tl.constexpr):
    """(top, total) of [R, W] parts whose planes stand at `first` and after it; also each part's weight and shift."""
    top = tl.load(parts + first * plane + at, mask=there, other=float("-inf"))
    total = tl.load(parts + (first + 1) * plane + at, mask=there, other=0.0)
    best = tl.max(top, axis=1)
    shift = top - tl.where(best == float("-inf"), 0.0, best)[:, None]
    weight = tl.exp2(shift)
    return best, tree_sum(total * weight, LOG), total, weight, tl.maximum(shift, -1000.0)


@triton.jit(do_not_specialize=["n", "N", "P", "first"])  # bits must not depend on them
def join(
    parts,  # [planes, n, P] of places first .. first + n in the order of `index`
    index,  # [N], read where HAS_INDEX
    count,  # [1], read where HAS_INDEX
    out,  # [planes, N]
    first,
    n,
    N,
    P,
    HAS_INDEX: tl.constexpr,
    SUPPORT: tl.constexpr,
    MOMENT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG: tl.constexpr,
):
    """Join the tiles of some rows into one part each, at the place of the row."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < n
    if HAS_INDEX:
        inside = inside & (first + r < tl.load(count))
        row = tl.load(index + first + r, mask=inside, other=0).to(tl.int64)
    else:
        row = (first + r).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = inside[:, None] & (column < P)[None, :]
    at = r.to(tl.int64)[:, None] * P + column[None, :]
    plane = n.to(tl.int64) * P
    tl.store(out + row, tree_sum(tl.load(parts + at, mask=there, other=0.0), LOG), mask=inside)
    top, total, totals, weight, shift = joined(parts, at, there, plane, 1, LOG)
    tl.store(out + N + row, top, mask=inside)
    tl.store(out + 2 * N + row, total, mask=inside)
    if MOMENT:
        moments = tl.load(parts + 3 * plane + at, mask=there, other=0.0)
        tl.store(out + 3 * N + row, tree_sum((moments + totals * shift) * weight, LOG), mask=inside)
    if SUPPORT:
        top, total, _, _, _ = joined(parts, at, there, plane, 4, LOG)
        tl.store(out + 4 * N + row, top, mask=inside)
        tl.store(out + 5 * N + row, total, mask=inside)
        top, total, _, _, _ = joined(parts, at, there, plane, 6, LOG)
        tl.store(out + 6 * N + row, top, mask=inside)
        tl.store(out + 7 * N + row, total, mask=inside)


@triton.jit
def with_target(top, total, target, scale, INTERPRETED: tl.constexpr):
    """The sums with the chosen id among them: top, log of the total, and what else the mean needs."""
    best = tl.maximum(top, target * scale)
    safe = tl.where(best == float("-inf"), 0.0, best)
    shift, own = top - safe, scaled_less(target, scale, safe, INTERPRETED)
    factor, weight = tl.exp2(shift), tl.exp2(own)
    scaled = total * factor
    # where the chosen id is the largest its weight is 1 but for a rounding, and log1p keeps what the others add
    log_total = tl.where(target * scale >= top, own + log1p(scaled / weight) * LOG2E, tl.log2(scaled + weight))
    log_total = tl.where((best == float("-inf")) & (total == 0.0), float("-inf"), log_total)  # NaN stays NaN
    return best, log_total, scaled, weight, tl.maximum(shift, -1000.0), tl.maximum(own, -1000.0), factor


@triton.jit(do_not_specialize=["N", "P", "whole"])  # bits must not depend on N
def law(
    parts,  # [planes, N, P]
    ids,  # [N]
    mask,  # [N], read where HAS_MASK
    bad_kept,  # [N], read where SUPPORT
    T,  # [N] where HAS_T, else a number
    logprob,  # [N] results
    lse,
    entropy,
    mass,
    invalid,
    saved,  # [6, N]
    N,
    P,
    whole,  # size of the whole vocabulary
    HAS_MASK: tl.constexpr,
    HAS_T: tl.constexpr,
    SUPPORT: tl.constexpr,
    MOMENT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Results of some rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    counted = inside
    if HAS_MASK:
        counted = inside & (tl.load(mask + row, mask=inside, other=0) != 0)
    if HAS_T:
        t = tl.load(T + row, mask=counted, other=1.0).to(tl.float32)
    else:
        t = tl.full([ROWS], 1.0, tl.float32) * T
    z = LOG2E / tl.where((t > 0.0) & (t < float("inf")), t, float("nan"))
    id = tl.load(ids + row, mask=counted, other=0).to(tl.int64)
    nowhere = (id < 0) | (id >= whole)
    bad = counted & nowhere
    if SUPPORT:
        bad = bad | (counted & (tl.load(bad_kept + row, mask=counted, other=0) != 0))
    column = tl.arange(0, WIDTH)
    there = counted[:, None] & (column < P)[None, :]
    at = row.to(tl.int64)[:, None] * P + column[None, :]
    plane = N.to(tl.int64) * P
    target = tree_sum(tl.load(parts + at, mask=there, other=0.0), LOG)
    target = tl.where(nowhere, float("-inf"), target)
    top, total, totals, weight, shift = joined(parts, at, there, plane, 1, LOG)
    best, log_total, scaled, own_weight, moved, own, scale = with_target(top, total, target, z, INTERPRETED)
    broken = best == float("inf")  # +inf has no softmax
    log_total = tl.where(broken, float("nan"), log_total)
    tl.store(lse + row, tl.where(counted, tl.where(broken, best, (best + log_total) * LN2), 0.0), mask=inside)
    tl.store(saved + row, best, mask=inside)
    tl.store(saved + N + row, log_total, mask=inside)
    if MOMENT:
        moments = tl.load(parts + 3 * plane + at, mask=there, other=0.0)
        moment = tree_sum((moments + totals * shift) * weight, LOG)
        mean = ((moment + total * moved) * scale + own * own_weight) / (scaled + own_weight)
        tl.store(saved + 2 * N + row, mean, mask=inside)
        tl.store(entropy + row, tl.where(counted, (log_total - mean) * LN2, 0.0), mask=inside)
    if SUPPORT:
        top, total, _, _, _ = joined(parts, at, there, plane, 4, LOG)
        lost_top, lost_total, _, _, _ = joined(parts, at, there, plane, 6, LOG)
        kept_top, kept_log_total, _, _, _, _, _ = with_target(top, total, target, z, INTERPRETED)
        tl.store(saved + 4 * N + row, kept_top, mask=inside)
        tl.store(saved + 5 * N + row, kept_log_total, mask=inside)
        lost = (lost_top - kept_top + tl.log2(lost_total) - kept_log_total) * LN2
        value = tl.where(bad | broken, float("nan"), 0.0 - softplus(lost))
        tl.store(mass + row, tl.where(counted, value, 0.0), mask=inside)
    gap = (tl.log2(total) - scaled_less(target, z, top, INTERPRETED)) * LN2
    value = tl.where(bad | broken, float("nan"), 0.0 - softplus(gap))
    tl.store(logprob + row, tl.where(counted, value, 0.0), mask=inside)
    tl.store(saved + 3 * N + row, 1.0 / (1.0 + tl.exp(-gap)), mask=inside)  # 1 - p without cancelling
    tl.store(invalid + row, bad.to(tl.int8), mask=inside)


def rows_of_a_program(width: int) -> int:
    """How many rows a program joins; speed only, bits do not depend on it."""
    return max(1, min(MOST_ROWS, CELLS // width))
