"""The sum of 2^z over a row in the one order of `logprob` and `sample`, so that both state one number for one token.

    group  64 ids. Its terms are 2^(z - r), z - r rounded once: z = y log2(e) / T of a logit y, and r the smallest
           integer that no z of the group is above. Four neighbors are added, then the quarters, then the rest as a tree
    slot   groups SLOTS apart, STEPS of them, one after the other
    row    slots as a tree of neighbors; what is missing is 0

From group to group sums are brought to one reference by powers of two, which round nothing: their bits do not depend
on what a kernel takes for the reference on the way. What is lost below 2^-126 changes no bit of a sum whose largest
term is above 1/2. The chosen id is in no sum.

Legend: R rows of groups · W ids of a quarter. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LN2, MAX_FLOAT, less_top, softplus, tree_sum, z_of
from rlkernel_triton.common.language import tl, triton

GROUP: tl.constexpr = tl.constexpr(64)  # ids
SLOTS: tl.constexpr = tl.constexpr(64)  # groups side by side
STEPS: tl.constexpr = tl.constexpr(8)  # groups of a slot


@triton.jit
def neighbors_sum(x):
    """[R, W / 4] of [R, W]: four neighbors."""
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]), 3), 2)


@triton.jit
def quarters_sum(a, b, c, d):
    """[R] sums of groups, from their four quarters [R, W]."""
    return tree_sum((neighbors_sum(a) + neighbors_sum(b)) + (neighbors_sum(c) + neighbors_sum(d)))


@triton.jit
def reference(best, scale):
    """The smallest integer that best * scale is not above."""
    return tl.ceil(z_of(best, scale))


@triton.jit
def log_odds_against(total, top, target, scale):
    """ln((1 - p) / p) of the chosen id: of its logit, and of the total of the others relative to 2^top."""
    gap = (tl.log2(total) - less_top(target, scale, top)) * LN2
    beyond = (tl.abs(target * scale) == float("inf")) & (tl.abs(target) < float("inf")) & (tl.abs(top) < MAX_FLOAT)
    return tl.where(beyond, top * LN2 - target * (scale * LN2), gap)


@triton.jit
def log_probability(total, top, target, scale):
    """ln p of the chosen id: its logit, and the total of the others relative to 2^top."""
    return 0.0 - softplus(log_odds_against(total, top, target, scale))
