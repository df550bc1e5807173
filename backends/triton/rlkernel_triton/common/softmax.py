"""Softmax statistics of a row, from the logits of its ids, and the gradient of what is made of them.

    y      logits under the soft cap, before the temperature    z = y log2(e) / T, so that e^(y / T) = 2^z
    top    the largest z of a set of ids, rounded               d = z - top, in one rounding from y
    total  sum of 2^d over the set                              moment  sum of 2^d d

The chosen id (target) is in no sum: log p = -softplus((top - y_target) / T + log total) never subtracts two large
numbers from each other.

A row is cut into P parts. Statistics of the parts lie in planes [N, P] of fp32, PLANES of them:

    0 target: y of the chosen id, 0 where it lies in another part      1 top    2 total    3 moment: of all other ids
    4 top    5 total: of the kept ids, where there is a support        6 top    7 total: of the dropped ids

Legend: N rows · P parts of a row · L lanes of a tile, 8 neighboring columns each.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.arithmetic import LN2, LOG2E, anchor, less_top, scaled_less, tree_sum, z_of
from rlkernel_triton.common.language import tl, triton

PLANES: Final = {False: 4, True: 8}  # by whether there is a support
# A logit of -inf has d = -inf and 2^d = 0. d is held at this bound, at which 2^d is 0 too, so that no 0 * inf arises.
LEAST_SHIFT: tl.constexpr = tl.constexpr(-1000.0)


@triton.jit
def exp2_scale(t):
    """The factor log2(e) / T; NaN where a temperature has no meaning, so that only its row is spoiled."""
    return LOG2E / tl.where((t > 0.0) & (t < float("inf")), t, float("nan"))


@triton.jit
def row_scale(T, row, HAS_T: tl.constexpr):
    """`exp2_scale` of one row. T: [N] where HAS_T, else a number."""
    if HAS_T:
        t = tl.load(T + row).to(tl.float32)
    else:
        t = T * 1.0
    return exp2_scale(t)


@triton.jit
def row_scales(T, row, inside, HAS_T: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS] `exp2_scale` of a block of rows. T: [N] where HAS_T, else a number."""
    if HAS_T:
        t = tl.load(T + row, mask=inside, other=1.0).to(tl.float32)
    else:
        t = tl.full([ROWS], 1.0, tl.float32) * T
    return exp2_scale(t)


@triton.jit
def finite_or_zero(top):
    """A top that can be subtracted: 0 for that of no ids, -inf, so that no inf - inf arises."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def lane_sum(x):
    """[L] of [L, 8]: the neighbors of each lane, as a tree."""
    return tl.sum(tl.sum(tl.sum(tl.reshape(x, [x.shape[0], 2, 2, 2]), axis=3), axis=2), axis=1)


@triton.jit
def update_running(
    top,  # [L]
    total,  # [L]
    y,  # [L, 8] of the next tile
    scale,
):
    """(top, total) of each lane with a tile's columns; 2^d and d of these; the factor of old sums and its logarithm."""
    best = tl.max(y, axis=1)
    new_top = tl.maximum(top, z_of(best, scale))
    at = finite_or_zero(new_top)
    shift = top - at
    rescale = tl.exp2(shift)
    c, t = anchor(best, scale, at)
    d = scaled_less(y - c[:, None], scale, t[:, None])
    e = tl.exp2(d)
    return new_top, total * rescale + lane_sum(e), e, d, rescale, shift


@triton.jit
def merge_lanes(
    top,  # [R, L]
    total,  # [R, L]
):
    """([R] top, [R] total) over all lanes; the factor and the shift of each lane, [R, L]."""
    best = tl.max(top, axis=1)
    shift = top - finite_or_zero(best)[:, None]
    weight = tl.exp2(shift)
    return best, tree_sum(total * weight), weight, tl.maximum(shift, LEAST_SHIFT)


@triton.jit
def dlogits(
    y,  # logits under the cap, of any shape; the rest broadcasts to it
    chosen,  # whether it is the chosen id
    kept,  # whether the support has it; anything without a support
    scale,
    top,
    log_total,  # log2 of the total with the chosen id
    mean,  # of d under p
    rest,  # 1 - p of the chosen id
    kept_top,
    kept_log_total,
    g,  # upstream gradients of logprob, lse, entropy and log_kept_mass
    g_lse,
    g_entropy,
    g_mass,
    SUPPORT: tl.constexpr,
    G_ENTROPY: tl.constexpr,
):
    """Gradient with respect to y: `rlkernel_common.row_statistics.gradient`, with logarithms of base 2."""
    inverse_T = scale * LN2
    g *= inverse_T
    common = g_lse * inverse_T
    d = less_top(y, scale, top)
    p = tl.exp2(d - log_total)
    if G_ENTROPY:
        g_entropy *= inverse_T * LN2
        common += g_entropy * mean
        common = common - g_entropy * tl.maximum(d, LEAST_SHIFT)
    if SUPPORT:
        g_mass *= inverse_T
        q = tl.exp2(less_top(y, scale, kept_top) - kept_log_total)  # p among the kept ids
        # A forbidden id has none either, also where no kept id has any and the exponent is inf - inf.
        q = tl.where((kept | chosen) & (y != float("-inf")), q, 0.0)
        return p * (common - g_mass) + tl.where(chosen, g_mass * q + g * rest, (g_mass - g) * q)
    return tl.where(chosen, p * common + g * rest, p * (common - g))
