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

AT_ONCE: tl.constexpr = tl.constexpr(16)  # candidates that all others are compared with at a time


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
def of_groups(
    x, i, V, top, some, scratch, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(ids, `ordered` logits) of the i-th tokens of the groups listed in scratch; LOWEST where none can be drawn."""
    read = i // GROUP < some
    ids = tl.load(scratch + i // GROUP, mask=read, other=0) * GROUP + i % GROUP
    v = logits_at(x, ids, read & (ids < V), column_stride, allowed, HAS_ALLOWED, UNIT)
    v = tl.where(v != v, -float("inf"), v)
    return ids, tl.where(v > floor_of(top), ordered(v), LOWEST)


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
    """(how many candidates there are, how many of them are certain).

    The candidates are the first tokens of the order, at most C, among those of the groups that are read. Their ids are
    in scratch[K:], ascending, and their `ordered` logits behind.
    """
    g = tl.arange(0, GP)
    key = ordered(tl.load(group_best + g, mask=g < groups, other=-float("inf")))
    key = tl.where(g < groups, key, LOWEST)
    least = tl.min(tl.where(g < groups, key, 0x7FFFFFFF), 0).to(tl.int64)
    tau = threshold(key, least, tl.where(groups > K, ordered(top).to(tl.int64) + 1, least + 1), n, K)
    # One scan for both: groups above it in the low half of a number, groups at it in the high half.
    HALF: tl.constexpr = 16 if GP < 32768 else 32
    LOW: tl.constexpr = (1 << HALF) - 1
    above = (key > tau).to(tl.int32 if GP < 32768 else tl.int64)
    level = (key == tau).to(tl.int32 if GP < 32768 else tl.int64)
    place = tl.cumsum(above + (level << HALF), 0)
    every = tl.sum(above + (level << HALF), 0)
    room = K - (every & LOW)
    chosen = (key > tau) | ((key == tau) & (place >> HALF <= room))
    tl.store(scratch + (place & LOW) + tl.minimum(place >> HALF, room) - 1, g, mask=chosen)
    some = tl.minimum((every & LOW) + (every >> HALF), K).to(tl.int32)
    missed = every >> HALF > room
    tl.debug_barrier()
    ALL: tl.constexpr = K * GROUP
    _ids, order = of_groups(
        x, tl.arange(0, ALL), V, top, some, scratch, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP
    )
    found = tl.sum((order >= tau).to(tl.int32), 0)
    bar = tau
    if found > C:
        bar = threshold(order, tau.to(tl.int64), ordered(top).to(tl.int64) + 1, C // 2, C)
    greater = tl.sum((order > bar).to(tl.int32), 0)
    held = tl.minimum(tl.sum((order >= bar).to(tl.int32), 0), C)
    # Again, a few at a time: all at once would hold too many addresses.
    PART: tl.constexpr = ALL if ALL < 1024 else 1024  # noqa: FURB136 a constant of the compiler
    before = tl.full((), 0, tl.int32)
    ties = tl.full((), 0, tl.int32)
    for start in range(0, ALL, PART):
        i = start + tl.arange(0, PART)
        ids, now = of_groups(x, i, V, top, some, scratch, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
        both = (now > bar).to(tl.int32) + ((now == bar).to(tl.int32) << 16)
        until = tl.cumsum(both, 0)
        tied = ties + (until >> 16)
        at = before + (until & 0xFFFF) + tl.minimum(tied, C - greater) - 1
        there = (now > bar) | ((now == bar) & (tied <= C - greater))
        tl.store(scratch + K + at, ids, mask=there)
        tl.store(scratch + K + C + at, now, mask=there)
        whole = tl.sum(both, 0)
        before += whole & 0xFFFF
        ties += whole >> 16
    tl.debug_barrier()
    surely = tl.where(bar > tau, held, tl.minimum(greater, held))
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
