"""The KL of p from q in one read, as running sums of lanes; rows are merged by the chain rule of the KL.

A lane sums over its columns, with w = 2^(x - top) of p and v = 2^(y - top of q), tops those of what it has seen:

    W = sum w    V = sum v    term = sum w log(w / v) - w + v    moment = sum w log(w / v)

No term is negative. The KL of the lane's conditional distributions is term / W - (r - 1 - log r), r = V / W, which
keeps its digits where r is near 1, as it is where p and q nearly agree; elsewhere it is moment / W + log r. The KL of a
row is that of the masses of its lanes, and for each lane its mass times its own KL.

A lane has 8 neighboring columns of each of the K strips of a tile, so that its sums are moved to other tops once in 8 K
columns.

Legend: L lanes · K strips of a tile.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LN2, anchor, scaled_less, z_of
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.softmax import finite_or_zero, lane_sum
from rlkernel_triton.divergence.terms import kl_term, times_log


@triton.jit
def tile_sum(x):
    """[L] of [K, L, 8]: strips are added, then the neighbors of each lane."""
    return lane_sum(tl.sum(x, axis=0))


@triton.jit
def update_top(
    top,  # [L]
    y,  # [K, L, 8] logits of the next tile
    scale,
):
    """The top of each lane with a tile's columns; 2^d and d of these; the factor of old sums and its logarithm."""
    best = tl.max(tl.max(y, axis=0), axis=1)
    new_top = tl.maximum(top, z_of(best, scale))
    at = finite_or_zero(new_top)
    shift = top - at
    c, t = anchor(best, scale, at)
    d = scaled_less(y - c[None, :, None], scale, t[None, :, None])
    return new_top, tl.exp2(d), d, tl.exp2(shift), shift


@triton.jit
def update_running_kl(
    top,  # [L] of p
    total,  # [L] W
    q_top,  # [L]
    q_total,  # [L] V
    term,  # [L]
    moment,  # [L]
    x,  # [K, L, 8] logits of p of the next tile
    y,  # [K, L, 8] of q
    scale,
    q_scale,
):
    """(top, total, q_top, q_total, term, moment) with a tile's columns."""
    new_top, w, log_w, down, shift = update_top(top, x, scale)
    new_q_top, v, log_v, q_down, q_shift = update_top(q_top, y, q_scale)
    # Other tops multiply all w by `down` and all v by `q_down`: what this does to the sums of earlier tiles.
    old = total * down
    moved = kl_term(old, shift, total * q_down, q_shift) + (q_total - total) * (q_down - down)
    term = tl.where(term < float("inf"), term * down + moved, term)
    moment = moment * down + times_log(old, shift, q_shift)
    total, q_total = old + tile_sum(w), q_total * q_down + tile_sum(v)
    term += tile_sum(kl_term(w, log_w, v, log_v))
    moment += tile_sum(times_log(w, log_w, log_v))
    return new_top, total, new_q_top, q_total, term, moment


@triton.jit
def conditional_kl(total, q_total, term, moment):
    """The KL of p from q within each lane, 0 in one where p has no mass."""
    some = tl.where(total == 0.0, 1.0, total)
    log_r = tl.log2(q_total / some)
    near = term - kl_term(some, 0.0, q_total, log_r)
    kl = tl.where(tl.abs(log_r) < 0.25, near, moment + some * (log_r * LN2)) / some
    kl = tl.where(kl < 0.0, 0.0, kl)
    kl = tl.where(term == float("inf"), term, kl)
    return tl.where(total == 0.0, 0.0, kl)


@triton.jit
def share(mass, kl):
    """The product mass kl; an infinite KL stays one where the mass is below the least number."""
    return tl.where(kl == float("inf"), kl, mass * kl)
