"""What the filters keep of a row, from its candidates: the groups with the largest maxima hold the best tokens.

The n groups with the largest maxima (ties: lower group first) contain the n first tokens of the order: each of these
groups supplies a token at or above the n-th maximum, and a token elsewhere comes after all of them. So n groups are
read again instead of the row, and what is decided among the first n, or strictly above the n-th maximum, is exact.
Where a filter keeps more, `exact_sample` searches the row.

A threshold need not be the n-th value: any that lets between n and K through will do, and is found in a few steps.
Legend: K groups at most · C candidates at most · GP groups, padded. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LOG2E
from rlkernel_triton.common.gumbel_noise import gumbel_noise
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import (
    MAX_FLOAT,
    MAX_INT32,
    MIN_KEY,
    NO_KEY,
    draw_floor,
    from_order_key,
    key_id,
    key_value,
    logits_at,
    order_key,
    rank_key,
)

WEIGHT_UNITS: tl.constexpr = tl.constexpr(
    2.0**48
)  # of a weight, at most 1: so sums of candidates are exact in any order
COMPARED: tl.constexpr = tl.constexpr(64)  # candidates that all others are compared with at a time
NO_ID: tl.constexpr = tl.constexpr(1 << 30)  # an id behind every vocabulary
ONE_TOKEN: tl.constexpr = tl.constexpr(1 << 56)  # a count beside a sum of weights


@triton.jit
def as_int64_pointer(pointer):
    """The same memory as int64."""
    return pointer.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def pack_key(order, ids):
    """`rank_key` of `order_key` logits."""
    return (order.to(tl.int64) << 32) | (ids ^ MAX_INT32)


@triton.jit
def select_threshold(key, low, held, high, n, most, TRIALS: tl.constexpr):
    """(a value with at least n of the int32 keys at or above it, at most `most` where ties allow that; how many).

    A step tries TRIALS values, whose counts share a number.

    Args:
        key: keys; those that do not count are MIN_KEY.
        low: at least n keys are at or above it.
        held: how many are.
        high: fewer than n keys are at or above it.
        n: how many are wanted.
        most: how many are welcome.
        TRIALS: 4; with 32768 keys and more 2; or 1, with the least registers.
    """
    BITS: tl.constexpr = 16 if key.shape[0] < 32768 else 32
    while high - low > 1:
        part = tl.maximum(((high - low) * (64 // (TRIALS + 1))) >> 6, 1)
        votes = tl.zeros([key.shape[0]], tl.int64 if TRIALS > 1 else tl.int32)
        for i in tl.static_range(TRIALS):
            trial = tl.minimum(low + (i + 1) * part, high - 1)
            if TRIALS == 1:
                votes += (key >= trial.to(tl.int32)).to(tl.int32)
            else:
                votes += tl.where(key >= trial.to(tl.int32), tl.full((), 1, tl.int64) << (BITS * i), 0)
        counts = tl.sum(votes, 0)
        start = low
        end = high
        for i in tl.static_range(TRIALS):
            trial = tl.minimum(start + (i + 1) * part, end - 1)
            count = (counts >> (BITS * i)) & ((1 << (BITS - 1)) - 1)
            enough = count >= n
            low = tl.where(enough, trial, low)
            held = tl.where(enough, count.to(tl.int32), held)
            fits = enough & (count <= most)
            high = tl.where(enough, tl.where(fits, trial + 1, high), tl.minimum(high, trial))
    return low.to(tl.int32), held


@triton.jit
def group_tokens(
    x, i, V, top, some, scratch, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(ids, `order_key` logits) of the i-th tokens of the groups listed in scratch; MIN_KEY where none can be drawn."""
    read = i // GROUP < some
    ids = tl.load(scratch + i // GROUP, mask=read, other=0) * GROUP + i % GROUP
    v = logits_at(x, ids, read & (ids < V), column_stride, allowed, HAS_ALLOWED, UNIT)
    v = tl.where(v != v, -float("inf"), v)
    return ids, tl.where(v > draw_floor(top), order_key(v), MIN_KEY)


@triton.jit
def store_tokens(into, at, here, v, ids):
    """Store those of [L, W] tokens that are here, each line from its `at` [L] on; where each line has come to."""
    until = tl.cumsum(here, 1)
    tl.store(into + at[:, None] + until - 1, rank_key(v, ids), mask=here != 0)
    return at + tl.sum(here, 1)


@triton.jit
def raise_threshold(
    x, V, top, tau, found, some, scratch, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(a higher value than tau, how many tokens of the groups stand above it, how many of them are stored, at most C).

    Of ties at that value the first are stored. Threads hold what they compare a few at a time, and read it again.
    """
    i = tl.arange(0, K * GROUP)
    _, order = group_tokens(x, i, V, top, some, scratch, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
    bar, _ = select_threshold(order, tau.to(tl.int64), found, order_key(top).to(tl.int64) + 1, C // 2, C, 1)
    greater = tl.sum((order > bar).to(tl.int32), 0)
    held = tl.minimum(tl.sum((order >= bar).to(tl.int32), 0), C)
    PART: tl.constexpr = K * GROUP if K * GROUP < 512 else 512  # noqa: FURB136 a constant of the compiler
    before = tl.full((), 0, tl.int32)
    ties = tl.full((), 0, tl.int32)
    for start in range(0, K * GROUP, PART):
        j = start + tl.arange(0, PART)
        ids, now = group_tokens(x, j, V, top, some, scratch, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
        both = (now > bar).to(tl.int32) + ((now == bar).to(tl.int32) << 16)
        until = tl.cumsum(both, 0)
        tied = ties + (until >> 16)
        at = before + (until & 0xFFFF) + tl.minimum(tied, C - greater) - 1
        there = (now > bar) | ((now == bar) & (tied <= C - greater))
        tl.store(as_int64_pointer(scratch + K) + at, pack_key(now, ids), mask=there)
        whole = tl.sum(both, 0)
        before += whole & 0xFFFF
        ties += whole >> 16
    return bar, greater, held


@triton.jit
def gather_candidates(
    x, V, top, least,
    n,  # at most K
    groups,  # how many there are
    group_best,  # [GP] maxima of this row
    scratch,  # [K + 4 * C] int32 of this row
    column_stride, allowed,
    HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(how many candidates there are, how many of them are certain).

    The candidates are the first tokens of the order, at most C, among those of the groups that are read. They are in
    scratch[K:], `pack_key`, in no order.
    """
    GP: tl.constexpr = group_best.shape[0]
    g = tl.arange(0, GP)
    key = tl.where(g < groups, order_key(group_best), MIN_KEY)
    least = order_key(least).to(tl.int64)
    high = tl.where(groups > K, order_key(top).to(tl.int64) + 1, least + 1)
    tau, some = select_threshold(key, least, groups, high, n, K, 4 if GP < 32768 else 2)
    # Ties at the threshold beyond K are left out: `room` is how many of them are not.
    HALF: tl.constexpr = 16 if GP < 32768 else 32
    LOW: tl.constexpr = (1 << HALF) - 1
    room = some * 0 + K
    missed = some > K
    if missed:
        room = K - tl.sum((key > tau).to(tl.int32), 0)
        some = some * 0 + K
    # One scan for both: groups above it in the low half of a number, groups at it in the high half.
    above = (key > tau).to(tl.int32 if GP < 32768 else tl.int64)
    level = (key == tau).to(tl.int32 if GP < 32768 else tl.int64)
    rank = tl.cumsum(above + (level << HALF), 0)
    chosen = (key > tau) | ((key == tau) & (rank >> HALF <= room))
    tl.store(scratch + (rank & LOW) + tl.minimum(rank >> HALF, room) - 1, g, mask=chosen)
    tl.debug_barrier()
    # A thread has a fourth of a group, in four parts: it counts, and stores what it holds.
    W: tl.constexpr = GROUP // 16
    i = tl.arange(0, 4 * K)
    read = i >> 2 < some
    of_group = tl.where(read, tl.load(scratch + (i >> 2), mask=read, other=0) * GROUP, NO_ID)
    ids0 = (of_group + (i & 3) * W)[:, None] + tl.arange(0, W)[None, :]
    ids1, ids2, ids3 = ids0 + 4 * W, ids0 + 8 * W, ids0 + 12 * W
    v0 = logits_at(x, ids0, ids0 < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v1 = logits_at(x, ids1, ids1 < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v2 = logits_at(x, ids2, ids2 < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v3 = logits_at(x, ids3, ids3 < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    bar = from_order_key(tau)
    h0 = ((v0 >= bar) & (v0 > draw_floor(top))).to(tl.int32)
    h1 = ((v1 >= bar) & (v1 > draw_floor(top))).to(tl.int32)
    h2 = ((v2 >= bar) & (v2 > draw_floor(top))).to(tl.int32)
    h3 = ((v3 >= bar) & (v3 > draw_floor(top))).to(tl.int32)
    each = tl.sum((h0 + h1) + (h2 + h3), 1)
    found = tl.sum(each, 0)
    greater = found
    if found <= C:
        at = tl.cumsum(each, 0) - each
        at = store_tokens(as_int64_pointer(scratch + K), at, h0, v0, ids0)
        at = store_tokens(as_int64_pointer(scratch + K), at, h1, v1, ids1)
        at = store_tokens(as_int64_pointer(scratch + K), at, h2, v2, ids2)
        store_tokens(as_int64_pointer(scratch + K), at, h3, v3, ids3)
    else:
        tau, greater, found = raise_threshold(
            x, V, top, tau, found, some, scratch, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP, K, C
        )
    certain = found
    # Where ties of the last group's maximum were left out, the first K tokens and all above that maximum are certain.
    if missed:
        if from_order_key(tau) == bar:
            h0 = ((v0 > bar) & (v0 > draw_floor(top))).to(tl.int32)
            h1 = ((v1 > bar) & (v1 > draw_floor(top))).to(tl.int32)
            h2 = ((v2 > bar) & (v2 > draw_floor(top))).to(tl.int32)
            h3 = ((v3 > bar) & (v3 > draw_floor(top))).to(tl.int32)
            greater = tl.sum(tl.sum((h0 + h1) + (h2 + h3), 1), 0)
            certain = tl.minimum(greater, found)
        certain = tl.maximum(tl.minimum(K, found), certain)
    tl.debug_barrier()
    return found, certain


@triton.jit
def fixed_weight(key, top, T):
    """What a candidate weighs beside the best token, in WEIGHT_UNITS."""
    v = key_value(key)
    y = tl.where(v == top, 0.0, (v - top) * tl.minimum(LOG2E / T, MAX_FLOAT))
    return tl.where(key == NO_KEY, 0, (tl.exp2(y) * WEIGHT_UNITS).to(tl.int64))


@triton.jit
def filter_candidates(
    scratch, found, certain, top, T, tokens, Z, k, p, m, seed, step, noise_stream, ORDER: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What the filters keep of a row, by its candidates, and which of these wins.

    The rank of a candidate is how many come before it; it needs no sort, and neither does the mass before it.
    Args: found candidates in scratch[K:], the first `certain` of which are the first of the row; T, tokens, Z of the
    row; k <= 0, p not < 1 and m not > 0 are off.
    Returns: how many are kept, or more than `certain` where the candidates do not tell; the winner, as `rank_key` of
    its score; the last that is kept, as `pack_key`; their mass in WEIGHT_UNITS; of each candidate whether it is kept,
    and y.
    """
    c = tl.arange(0, C)
    key = tl.load(as_int64_pointer(scratch + K) + c, mask=c < found, other=NO_KEY)
    v = key_value(key)
    y = tl.where(c < found, tl.where(v == top, 0.0, (v - top) / T), -float("inf"))
    w = fixed_weight(key, top, T)
    # How many come before it and what they weigh share a number. Others are read: computed again, they cost more.
    tl.store(as_int64_pointer(scratch + K) + C + c, w + ONE_TOKEN)
    ids = key_id(key)
    score = rank_key(y + gumbel_noise(seed, step, ids, noise_stream), ids)
    before = tl.zeros([C], tl.int64)
    tl.debug_barrier()
    for start in range(0, found, COMPARED):
        j = start + tl.arange(0, COMPARED)[:, None]
        other = tl.load(as_int64_pointer(scratch + K) + j, mask=j < found, other=NO_KEY)
        share = tl.load(as_int64_pointer(scratch + K) + C + j, mask=j < found, other=0)
        before += tl.sum(tl.where(other > key[None, :], share, 0), 0)
    rank = (before >> 56).to(tl.int32)
    before = before & (ONE_TOKEN - 1)
    rank = tl.where(c < found, rank, MAX_INT32)
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
    sure = certain >= 0
    inside = c < found
    if p < 1.0:
        some = tl.max(tl.where(rank < left, before + w, 0), 0).to(tl.float32) / WEIGHT_UNITS
        mass = tl.where(left >= tokens, Z, some)
        # In the order "joint" the nucleus is of the whole row, whatever min-p keeps.
        sure = (left <= certain) | (((ORDER == 1) | known_m) & (left == tokens))
        inside = ((before.to(tl.float32) / WEIGHT_UNITS < p * mass) | (rank == 0)) & (rank < left)
    # What is kept is a prefix of the ranks: winner, last one, the mass with it and the nucleus, all in one search.
    keep = inside & (rank < tl.minimum(by_m, by_k))
    who = tl.join(tl.where(keep, score, NO_KEY), tl.where(keep, -key, NO_KEY))
    how = tl.join(tl.where(keep, before + w, 0), tl.where(inside, rank + 1, 0).to(tl.int64))
    who, how = tl.split(tl.max(tl.join(who, how), 0))
    winner, last = tl.split(who)
    in_all, nucleus = tl.split(how)
    by_p = unknown
    if p < 1.0:
        n = tl.maximum(nucleus.to(tl.int32), 1)
        by_p = tl.where((n < certain) | (certain >= tokens) | (left <= certain), n, unknown)
    kept = tl.minimum(tl.minimum(by_m, by_k), tl.minimum(by_p, unknown))
    return tl.where(sure, kept, unknown), winner, -last, in_all, keep, y
