"""The exact way to what a row keeps, whatever it keeps: search among the 2^32 values that a logit can have.

Every filter keeps a prefix of the order, so it is a count. A search finds the value of the c-th token by 32 passes that
count, or the value at which a mass is reached by 32 passes that add. One row is one program, and after the first pass
its logits come from the cache. Sums run over fixed blocks in order: their bits depend on the row alone.

A value is an `ordered` int32, held as int64. Legend: V vocabulary · top the best logit of the row. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.rows import floor_of, logits_at, ordered, unordered, weight

LOWEST: tl.constexpr = tl.constexpr(-0x80000000)


@triton.jit
def block_of(x, start, V, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr):
    """(ids, logits, which can be drawn) of the block of the row at x that begins at `start`."""
    ids = start + tl.arange(0, BLOCK).to(tl.int64)
    v = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED)
    v = tl.where(v != v, -float("inf"), v)
    return ids, v, v > floor_of(top)


@triton.jit
def found(
    x, V, top, T, c, bar, by_mass, column_stride, allowed, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest value with c tokens, or where `by_mass` the mass `bar`, at or above it.

    Returns (value, how many tokens stand above it, their mass, how many stand at it, the weight of one of those).
    """
    value = tl.full((), LOWEST, tl.int64)
    bit = -value
    for _pass in range(32):
        trial = value + bit
        n = tl.full((), 0, tl.int32)
        mass = tl.full((), 0.0, tl.float32)
        for start in range(0, V, BLOCK):
            _ids, v, there = block_of(x, start, V, top, column_stride, allowed, HAS_ALLOWED, BLOCK)
            over = there & (ordered(v).to(tl.int64) >= trial)
            n += tl.sum(over.to(tl.int32), 0)
            mass += tl.sum(weight(v, over, top, T), 0)
        reached = tl.where(by_mass, (mass >= bar).to(tl.int32), (n >= c).to(tl.int32))
        value = tl.where(reached != 0, trial, value)
        bit = bit >> 1
    greater = tl.full((), 0, tl.int32)
    ties = tl.full((), 0, tl.int32)
    above = tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        _ids, v, there = block_of(x, start, V, top, column_stride, allowed, HAS_ALLOWED, BLOCK)
        key = ordered(v).to(tl.int64)
        over = there & (key > value)
        greater += tl.sum(over.to(tl.int32), 0)
        ties += tl.sum((there & (key == value)).to(tl.int32), 0)
        above += tl.sum(weight(v, over, top, T), 0)
    v = unordered(value.to(tl.int32))
    return value, greater, above, ties, tl.exp(tl.where(v == top, 0.0, (v - top) / T))


@triton.jit
def enough(
    x, V, top, T, bar, column_stride, allowed, KEEP_ALL: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many tokens have y >= bar; at least the first, with its ties where they are kept."""
    n = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        _ids, v, there = block_of(x, start, V, top, column_stride, allowed, HAS_ALLOWED, BLOCK)
        good = tl.where(v == top, 0.0, (v - top) / T) >= bar
        if KEEP_ALL:
            good = good | (v == top)
        n += tl.sum((there & good).to(tl.int32), 0)
    return tl.maximum(n, 1)


@triton.jit
def kept_by_search(
    x,
    V,
    top,
    T,
    tokens,  # that can be drawn
    Z,  # their mass
    k,  # <= 0: off
    p,  # not < 1: off
    m,  # not > 0: off
    column_stride,
    allowed,
    ORDER: tl.constexpr,  # 0 "topk_topp", 1 "joint", 2 "topp_topk"
    KEEP_ALL: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(how many tokens are kept, value of the last one, how many stand above it).

    Three searches at most, by one piece of code: of the law that the nucleus is cut from, of the nucleus, and of the
    last token that is kept, where neither of the two ended there.
    """
    by_m = tokens
    if m > 0.0:
        by_m = enough(x, V, top, T, tl.log(m), column_stride, allowed, KEEP_ALL, HAS_ALLOWED, BLOCK)
        by_m = tl.minimum(by_m, tokens)
    limit = tokens if ORDER == 1 else by_m  # what is left to the filter after min-p
    first = limit
    if ORDER != 2:
        first = tl.where(k > 0, tl.minimum(k, limit), limit)
    mass = Z
    nucleus = tokens
    kept = first
    value = tl.full((), LOWEST, tl.int64)
    greater = tl.full((), 0, tl.int32)
    known = tl.full((), -1, tl.int32)  # how many tokens the last search would keep
    for stage in range(3):
        run = (stage == 2) & (kept != known)
        if ORDER == 1:
            run = run | ((stage == 1) & (p < 1.0))
        else:
            run = run | ((stage < 2) & (p < 1.0) & ((stage == 1) | (first < tokens)))
        if KEEP_ALL and ORDER != 2:
            run = run | ((stage == 0) & (k > 0))
        if run:
            bar = p * mass
            c = tl.where(stage == 0, first, tl.where(stage == 1, 1, kept))
            value, greater, above, ties, one = found(
                x, V, top, T, c, bar, (stage == 1) & (bar > 0.0), column_stride, allowed, HAS_ALLOWED, BLOCK
            )
            # A tie is in the nucleus iff the mass before it is below the bar.
            more = tl.minimum(tl.maximum(tl.ceil((bar - above) / one), 1.0), ties.to(tl.float32)).to(tl.int32)
            reach = greater + tl.where(stage == 1, more, c - greater)
            if KEEP_ALL:
                reach = greater + ties
            known = reach
            if stage == 0:
                first = tl.minimum(reach, limit)
                if ORDER != 1:
                    mass = above + (first - greater).to(tl.float32) * one
            if stage == 1:
                nucleus = tl.maximum(reach, 1)
            if stage == 2:
                kept = tl.minimum(reach, intersected(by_m, first, nucleus))
        if stage == 1:
            kept = intersected(by_m, first, nucleus)
            if ORDER == 2:
                kept = tl.where(k > 0, tl.minimum(k, kept), kept)
    return kept, value, greater


@triton.jit
def intersected(by_m, first, nucleus):
    """Prefixes of one order."""
    return tl.minimum(tl.minimum(by_m, first), nucleus)
