"""The quick way to what a row keeps: the groups with the largest maxima hold the best tokens, certified.

The n groups with the largest maxima (ties: lower group first) contain the n first tokens of the order: each of these
groups supplies a token at or above the n-th maximum, and a token elsewhere comes after all of them. So n groups are
read again instead of the row, and what is decided among the first n, or strictly above the n-th maximum, is exact.
Where a filter keeps more, the caller searches (`search.py`).

Legend: K groups at most · C candidates at most · GP groups, padded. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.rows import NOTHING, floor_of, logits_at, ordered, ranked
from rlkernel_triton.sampling.search import LOWEST


@triton.jit
def gather(
    x,
    V,
    top,
    n,
    groups,  # how many there are
    group_best,  # [groups] of this row
    scratch,  # [2 * C] int64 of this row
    column_stride,
    allowed,
    HAS_ALLOWED: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
):
    """(candidates [C] best first, how many there are, how many of them are certain). More than C: none is certain."""
    g = tl.arange(0, GP)
    key = ordered(tl.load(group_best + g, mask=g < groups, other=-float("inf"))).to(tl.int64)
    key = tl.where(g < groups, key, LOWEST)
    tau = tl.full((), LOWEST, tl.int64)
    bit = -tau
    for _ in range(32):
        trial = tau + bit
        tau = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= n, trial, tau)
        bit = bit >> 1
    strict = key > tau
    tie = (key == tau) & (g < groups)
    chosen = strict | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= n - tl.sum(strict.to(tl.int32), 0)))
    tl.store(scratch + tl.cumsum(chosen.to(tl.int32), 0) - 1, g.to(tl.int64), mask=chosen)
    tl.debug_barrier()
    r = tl.arange(0, K)
    read = r < tl.sum(chosen.to(tl.int32), 0)
    ids = tl.load(scratch + r, mask=read, other=0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = logits_at(x, ids, read[:, None] & (ids < V), column_stride, allowed, HAS_ALLOWED)
    v = tl.where(v != v, -float("inf"), v)
    there = v > floor_of(top)
    there = there & (ordered(v).to(tl.int64) >= tau)
    each = tl.sum(there.to(tl.int32), 1)
    at = (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(there.to(tl.int32), 1) - 1
    found = tl.sum(each, 0)
    tl.store(scratch + C + at, ranked(v, ids), mask=there & (at < C))
    tl.debug_barrier()
    c = tl.arange(0, C)
    best = tl.sort(tl.load(scratch + C + c, mask=c < found, other=NOTHING), descending=True)
    surely = tl.sum(((best >> 32) > tau).to(tl.int32) * (c < found).to(tl.int32), 0)
    certain = tl.maximum(tl.minimum(n, found), surely)
    certain = tl.where(tau == LOWEST, found, certain)
    return best, found, tl.where(found > C, 0, certain)


@triton.jit
def kept_by_candidates(
    y,  # [C] of the candidates, best first; -inf behind the last
    certain,
    tokens,
    Z,
    k,
    p,
    m,
    ORDER: tl.constexpr,
    C: tl.constexpr,
):
    """How many tokens the filters keep, or more than `certain` where the candidates do not tell."""
    unknown = tokens + C
    c = tl.arange(0, C)
    w = tl.exp(y)
    before = tl.cumsum(w, 0) - w
    by_m = tokens
    known_m = certain >= 0
    if m > 0.0:
        n = tl.maximum(tl.sum((y >= tl.log(m)).to(tl.int32), 0), 1)
        known_m = (n < certain) | (certain >= tokens)
        by_m = tl.where(known_m, n, unknown)
    by_k = tl.minimum(tl.where(k > 0, k, tokens), tokens)
    left = tokens
    if ORDER == 0:
        left = tl.minimum(by_m, by_k)
    if ORDER == 2:
        left = by_m
    by_p = unknown
    sure = certain >= 0
    if p < 1.0:
        mass = tl.where(left >= tokens, Z, tl.sum(tl.where(c < left, w, 0.0), 0))
        sure = (left <= certain) | (known_m & (left == tokens))
        n = tl.maximum(tl.sum(((before < p * mass) & (c < left) & (y > -float("inf"))).to(tl.int32), 0), 1)
        by_p = tl.where((n < certain) | (certain >= tokens) | (left <= certain), n, unknown)
    kept = tl.minimum(tl.minimum(by_m, by_k), tl.minimum(by_p, unknown))
    return tl.where(sure, kept, unknown)
