"""Merge the partial softmax statistics of rows, and say what they mean: log-probability, lse, entropy, kept mass.

Whoever computed the parts (logits, hidden states and a head, the shards of a vocabulary), they are merged here in their
order, as rlkernel_common.row_statistics.law does it. `common.softmax` says what the statistics are. A row reads 16
bytes a part (32 with a support) and writes about 40: nothing beside the logits that were read for it.

Legend: N rows · P parts of a row · W the next power of two · R rows of a program.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.arithmetic import LN2, LOG2E, MAX_FLOAT, less_top, log1p, softplus, tree_sum, z_of
from rlkernel_triton.common.group_sums import log_odds_against
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.softmax import LEAST_SHIFT, finite_or_zero, merge_lanes, row_scales

# Speed only: bits do not depend on them.
PARTS_PER_PROGRAM: Final = 512  # as many rows, of as many parts, as that allows
MOST_ROWS: Final = 32
WARPS: Final = 4
SAVED_PLANES: Final = 6  # [N] each for the gradient: top, log total, mean, 1 - p, top and log total of the kept


@triton.jit
def load_merged(parts, at, there, plane, first):
    """(top, total) [R] of [R, W] parts, from plane `first` and the next; totals, factors and shifts of the parts."""
    tops = tl.load(parts + first * plane + at, mask=there, other=float("-inf"))
    totals = tl.load(parts + (first + 1) * plane + at, mask=there, other=0.0)
    top, total, weight, shift = merge_lanes(tops, totals)
    return top, total, totals, weight, shift


@triton.jit
def load_moment(parts, at, there, plane, totals, weight, shift):
    """[R] moment of all parts: each is moved from its own top to the common one."""
    moments = tl.load(parts + 3 * plane + at, mask=there, other=0.0)
    return tree_sum((moments + totals * shift) * weight)


@triton.jit(do_not_specialize=["n", "N", "P", "first", "per", "pieces"])  # bits must not depend on them
def merge_tiles(
    parts,  # [planes, n, P] of places first .. first + n in the order of `index`
    index,  # [N] row at each place, read where HAS_INDEX
    count,  # [1] places that count, read where HAS_INDEX
    out,  # [planes, N, pieces]
    first, n, N, P,
    per,  # tiles of a piece; the last piece may have fewer, or none
    pieces,
    HAS_INDEX: tl.constexpr, SUPPORT: tl.constexpr, MOMENT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge the tiles of one piece of ROWS rows into one part each, at the place of the row."""
    piece = tl.program_id(1)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < n
    if HAS_INDEX:
        inside = inside & (first + r < tl.load(count))
        row = tl.load(index + first + r, mask=inside, other=0).to(tl.int64)
    else:
        row = (first + r).to(tl.int64)
    tile = tl.arange(0, WIDTH)
    there = inside[:, None] & ((tile < per) & (tile < P - piece * per))[None, :]
    at = r.to(tl.int64)[:, None] * P + (piece * per + tile)[None, :]
    plane = n.to(tl.int64) * P
    to, merged = out + row * pieces + piece, N.to(tl.int64) * pieces
    # The target lies in one part, and is 0 in the others.
    tl.store(to, tree_sum(tl.load(parts + at, mask=there, other=0.0)), mask=inside)
    top, total, totals, weight, shift = load_merged(parts, at, there, plane, 1)
    tl.store(to + merged, top, mask=inside)
    tl.store(to + 2 * merged, total, mask=inside)
    if MOMENT:
        tl.store(to + 3 * merged, load_moment(parts, at, there, plane, totals, weight, shift), mask=inside)
    if SUPPORT:
        top, total, _, _, _ = load_merged(parts, at, there, plane, 4)
        tl.store(to + 4 * merged, top, mask=inside)
        tl.store(to + 5 * merged, total, mask=inside)
        top, total, _, _, _ = load_merged(parts, at, there, plane, 6)
        tl.store(to + 6 * merged, top, mask=inside)
        tl.store(to + 7 * merged, total, mask=inside)


@triton.jit
def add_target(top, total, target, scale):
    """The sums with the chosen id among them: top, log2 of the total, and what else the mean needs."""
    own_top = z_of(target, scale)
    best = tl.maximum(top, own_top)
    safe = finite_or_zero(best)
    shift, own = top - safe, less_top(target, scale, safe)
    factor, weight = tl.exp2(shift), tl.exp2(own)
    scaled = total * factor
    # where the chosen id is the largest its weight is 1 but for a rounding, and log1p keeps what the others add
    log_total = tl.where(own_top >= top, own + log1p(scaled / weight) * LOG2E, tl.log2(scaled + weight))
    log_total = tl.where((best == float("-inf")) & (total == 0.0), float("-inf"), log_total)  # NaN stays NaN
    return best, log_total, scaled, weight, tl.maximum(shift, LEAST_SHIFT), tl.maximum(own, LEAST_SHIFT), factor


@triton.jit(do_not_specialize=["N", "P", "whole"])  # bits must not depend on N
def merge_softmax(
    parts,  # [planes, N, P] fp32
    ids,  # [N] chosen ids
    mask,  # [N], read where HAS_MASK
    bad_kept,  # [N] whether a row's support holds an id that is none, read where SUPPORT
    T,  # [N] where HAS_T, else a number
    logprob,  # [N] fp32 results: ln p of the chosen id
    lse,  # [N]
    entropy,  # [N], written where MOMENT
    mass,  # [N] ln of the mass that the support keeps, written where SUPPORT
    invalid,  # [N] int8
    saved,  # [6, N] fp32, for the gradient
    N, P,
    whole,  # size of the whole vocabulary
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, SUPPORT: tl.constexpr, MOMENT: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Results of ROWS rows; a masked row has zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    counted = inside
    if HAS_MASK:
        counted = inside & (tl.load(mask + row, mask=inside, other=0) != 0)
    scale = row_scales(T, row, counted, HAS_T, ROWS)
    id = tl.load(ids + row, mask=counted, other=0).to(tl.int64)
    nowhere = (id < 0) | (id >= whole)
    bad = counted & nowhere
    if SUPPORT:
        bad = bad | (counted & (tl.load(bad_kept + row, mask=counted, other=0) != 0))
    column = tl.arange(0, WIDTH)
    there = counted[:, None] & (column < P)[None, :]
    at = row.to(tl.int64)[:, None] * P + column[None, :]
    plane = N.to(tl.int64) * P
    # The target lies in one part, and is 0 in the others.
    target = tree_sum(tl.load(parts + at, mask=there, other=0.0))
    target = tl.where(nowhere, float("-inf"), target)
    top, total, totals, weight, shift = load_merged(parts, at, there, plane, 1)
    best, log_total, scaled, own_weight, moved, own, factor = add_target(top, total, target, scale)
    broken = best == float("inf")  # +inf has no softmax
    log_total = tl.where(broken, float("nan"), log_total)
    # A top that z cannot hold is known by the chosen id: lse = y / T - ln p.
    by_target = target * (scale * LN2) + softplus(log_odds_against(total, top, target, scale))
    beyond = (tl.abs(best) == MAX_FLOAT) & (tl.abs(target) < float("inf"))
    whole_lse = tl.where(beyond, by_target, (best + log_total) * LN2)
    tl.store(lse + row, tl.where(counted, tl.where(broken, best, whole_lse), 0.0), mask=inside)
    tl.store(saved + row, best, mask=inside)
    tl.store(saved + N + row, log_total, mask=inside)
    if MOMENT:
        moment = load_moment(parts, at, there, plane, totals, weight, shift)
        mean = ((moment + total * moved) * factor + own * own_weight) / (scaled + own_weight)
        tl.store(saved + 2 * N + row, mean, mask=inside)
        tl.store(entropy + row, tl.where(counted, (log_total - mean) * LN2, 0.0), mask=inside)  # H = ln total - E[d]
    if SUPPORT:
        top, total, _, _, _ = load_merged(parts, at, there, plane, 4)  # logprob below is that among the kept ids
        lost_top, lost_total, _, _, _ = load_merged(parts, at, there, plane, 6)
        kept_top, kept_log_total, _, _, _, _, _ = add_target(top, total, target, scale)
        tl.store(saved + 4 * N + row, kept_top, mask=inside)
        tl.store(saved + 5 * N + row, kept_log_total, mask=inside)
        # ln(kept / (kept + lost)) = -softplus(ln(lost / kept))
        lost = (lost_top - kept_top + tl.log2(lost_total) - kept_log_total) * LN2
        value = tl.where(bad | broken, float("nan"), 0.0 - softplus(lost))
        tl.store(mass + row, tl.where(counted, value, 0.0), mask=inside)
    gap = log_odds_against(total, top, target, scale)
    value = tl.where(bad | broken, float("nan"), 0.0 - softplus(gap))
    tl.store(logprob + row, tl.where(counted, value, 0.0), mask=inside)
    tl.store(saved + 3 * N + row, 1.0 / (1.0 + tl.exp(-gap)), mask=inside)  # 1 - p without cancelling
    tl.store(invalid + row, bad.to(tl.int8), mask=inside)


def rows_per_program(width: int) -> int:
    """How many rows a program merges, of parts padded to `width`."""
    return max(1, min(MOST_ROWS, PARTS_PER_PROGRAM // width))
