"""The quick way to what a row keeps: the groups with the largest maxima hold the best tokens, certified.

The n groups with the largest maxima (ties: lower group first) contain the n first tokens of the order: each of these
groups supplies a token at or above the n-th maximum, and a token elsewhere comes after all of them. So n groups are
read again instead of the row, and what is decided among the first n, or strictly above the n-th maximum, is exact.
Where a filter keeps more, the row is searched (`search.py`).

A threshold need not be the n-th value: any that lets between n and K through will do, and is found in a few steps.
Legend: K groups at most · C candidates at most · GP groups, padded. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.rows import LOWEST, MOST, NOTHING, floor_of, logits_at, ordered, value_of

AT_ONCE: tl.constexpr = tl.constexpr(32)  # candidates that all others are compared with at a time


@triton.jit
def threshold(key, low, high, n, most):
    """A value with at least n of the int32 keys at or above it, and at most `most` where ties allow that.

    Args:
        key: keys; those that do not count are LOWEST.
        low: at least n keys are at or above it.
        high: fewer than n keys are at or above it.
        n: how many are wanted.
        most: how many are welcome.
    """
    while high - low > 1:
        trial = low + ((high - low) >> 1)
        count = tl.sum((key >= trial.to(tl.int32)).to(tl.int32), 0)
        low = tl.where(count >= n, trial, low)
        high = tl.where(count < n, trial, tl.where(count <= most, low + 1, high))
    return low.to(tl.int32)


@triton.jit
def first_of(key, low, most):
    """Which keys are at or above `low`; of those that are at it, the first, so that there are at most `most`."""
    above = key > low
    tie = key == low
    return above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= most - tl.sum(above.to(tl.int32), 0)))


@triton.jit
def gather(
    x,
    V,
    top,
    n,  # at most K
    groups,  # how many there are
    group_best,  # [groups] of this row
    scratch,  # [K + 2 * C] int32 of this row
    column_stride,
    allowed,
    HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
):
    """(how many candidates there are, how many of them are certain); their ids are in scratch[K:], in no order, their
    `ordered` logits behind.

    The candidates are the first tokens of the order, at most C, among those of the groups that are read.
    """
    g = tl.arange(0, GP)
    best = tl.load(group_best + g, mask=g < groups, other=-float("inf"))
    key = tl.where(g < groups, ordered(best), LOWEST)
    least = tl.min(tl.where(g < groups, key, 0x7FFFFFFF), 0).to(tl.int64)
    tau = threshold(key, least, tl.where(groups > K, ordered(top).to(tl.int64) + 1, least + 1), n, K)
    chosen = first_of(key, tau, K) & (g < groups)
    tl.store(scratch + tl.cumsum(chosen.to(tl.int32), 0) - 1, g, mask=chosen)
    some = tl.sum(chosen.to(tl.int32), 0)
    missed = tl.sum(((key >= tau) & (g < groups)).to(tl.int32), 0) > some
    tl.debug_barrier()
    r = tl.arange(0, K)
    read = r < some
    # Hidden from the compiler that these ids stand together, so that one layout serves the loads and the scatter.
    lane = tl.arange(0, GROUP) ^ (V < 0).to(tl.int32)
    ids = tl.load(scratch + r, mask=read, other=0)[:, None] * GROUP + lane[None, :]
    v = logits_at(x, ids, read[:, None] & (ids < V), column_stride, allowed, HAS_ALLOWED, UNIT)
    v = tl.where(v != v, -float("inf"), v)
    order = ordered(v)
    there = (v > floor_of(top)) & (order >= tau)
    each = tl.sum(there.to(tl.int32), 1)
    found = tl.sum(each, 0)
    bar = tau
    if found > C:
        flat = tl.reshape(tl.where(there, order, LOWEST), [K * GROUP])
        bar = threshold(flat, tau.to(tl.int64), ordered(top).to(tl.int64) + 1, C // 2, C)
        there = tl.reshape(first_of(flat, bar, C) & (flat > LOWEST), [K, GROUP])
        each = tl.sum(there.to(tl.int32), 1)
    at = (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(there.to(tl.int32), 1) - 1
    tl.store(scratch + K + at, ids, mask=there & (at < C))
    tl.store(scratch + K + C + at, order, mask=there & (at < C))
    surely = tl.sum(tl.sum((there & (order > tau)).to(tl.int32), 1), 0)
    tl.debug_barrier()
    held = tl.sum(each, 0)
    # Where ties of the last group's maximum were left out, the first K tokens and all above that maximum are certain.
    return held, tl.where(missed, tl.maximum(tl.minimum(K, held), surely), held)


@triton.jit
def candidate(scratch, c, found, K: tl.constexpr, C: tl.constexpr):
    """int64 of `ranked` of the candidates c, NOTHING behind the last."""
    ids = tl.load(scratch + K + c, mask=c < found, other=0)
    order = tl.load(scratch + K + C + c, mask=c < found, other=0)
    return tl.where(c < found, (order.to(tl.int64) << 32) | (ids ^ MOST), NOTHING)


@triton.jit
def kept_of(scratch, found, certain, top, T, tokens, Z, k, p, m, ORDER: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """(how many tokens the filters keep, or more than `certain` where the candidates do not tell; keys, y and places).

    The place of a candidate is how many come before it; it needs no sort, and neither does the mass before it.
    Args: found candidates in scratch[K:], the first `certain` of which are the first of the row; T, tokens, Z of the
    row; k <= 0, p not < 1 and m not > 0 are off.
    """
    c = tl.arange(0, C)
    key = candidate(scratch, c, found, K, C)
    v = value_of(key)
    y = tl.where(c < found, tl.where(v == top, 0.0, (v - top) / T), -float("inf"))
    w = tl.exp(y)
    place = c * 0
    before = tl.zeros([C], tl.float32)
    for start in range(0, C, AT_ONCE):
        j = start + tl.arange(0, AT_ONCE)
        other = candidate(scratch, j, found, K, C)
        u = value_of(other)
        share = tl.where(j < found, tl.exp(tl.where(u == top, 0.0, (u - top) / T)), 0.0)
        earlier = other[None, :] > key[:, None]
        place += tl.sum(earlier.to(tl.int32), 1)
        before += tl.sum(tl.where(earlier, share[None, :], 0.0), 1)
    unknown = tokens + C
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
        mass = tl.where(left >= tokens, Z, tl.sum(tl.where(place < left, w, 0.0), 0))
        sure = (left <= certain) | (known_m & (left == tokens))
        n = tl.maximum(tl.sum(((before < p * mass) & (place < left) & (c < found)).to(tl.int32), 0), 1)
        by_p = tl.where((n < certain) | (certain >= tokens) | (left <= certain), n, unknown)
    kept = tl.minimum(tl.minimum(by_m, by_k), tl.minimum(by_p, unknown))
    return tl.where(sure, kept, unknown), key, y, tl.where(c < found, place, MOST)
