"""Exact threshold search for top-k, top-p and min-p, among the 2^32 values that a logit can have.

Every filter keeps a prefix of the order, so it is a count, and ends at a value: that of the c-th token, or the one at
which a mass is reached. A pass over the row measures what lies above eight values at once, and so narrows an interval
of them; when few tokens are left in it, they are gathered and compared without the row. The first pass asks at values
that a sample of the row suggests. One row is one program, and after the first pass its logits come from the cache.
Sums run over fixed blocks in order: their bits depend on the row alone.

A value is an `order_key` int32, held as int64. Legend: V vocabulary · top the best logit of the row. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import draw_floor, from_order_key, logits_at, order_key, softmax_weight

MINUS_INFINITY_KEY: tl.constexpr = tl.constexpr(-2139095041)  # -inf as `order_key`
SAMPLE_CHUNK: tl.constexpr = tl.constexpr(64)  # tokens of the sample that stand together
SAMPLE_MARGIN: tl.constexpr = tl.constexpr(0.015)  # of the measure, either side of what the sample suggests


@triton.jit
def load_block(
    x, start, V, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(ids, logits, which can be drawn), [BLOCK / 4, 4] each, of the block of the row at x that begins at `start`."""
    ids = start + tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    v = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v = tl.where(v != v, -float("inf"), v)
    return ids, v, v > draw_floor(top)


@triton.jit
def block_sum(x):
    """The sum of a block."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def sampled_quantiles(
    x, V, top, T, share, by_mass, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(logits above which a little more, and a little less, than `share` of the measure of a sample lies)."""
    i = tl.arange(0, BLOCK)
    apart = tl.maximum(V // (BLOCK // SAMPLE_CHUNK), SAMPLE_CHUNK) // 4 * 4
    ids = (i // SAMPLE_CHUNK) * apart + i % SAMPLE_CHUNK
    v = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v = tl.where(v != v, -float("inf"), v)
    there = v > draw_floor(top)
    m = tl.where(by_mass, softmax_weight(v, there, top, T), there.to(tl.float32))
    whole = tl.sum(m, 0)
    key = order_key(v)
    more = tl.full((), MINUS_INFINITY_KEY, tl.int64)
    less = tl.full((), MINUS_INFINITY_KEY, tl.int64)
    bit = tl.full((), 1, tl.int64) << 31
    for _ in range(22):
        a = more + bit
        b = less + bit
        top_key = order_key(top).to(tl.int64)
        over_a = tl.sum(tl.where(key >= tl.minimum(a, top_key).to(tl.int32), m, 0.0), 0)
        over_b = tl.sum(tl.where(key >= tl.minimum(b, top_key).to(tl.int32), m, 0.0), 0)
        more = tl.where((a <= top_key) & (over_a >= (share + SAMPLE_MARGIN) * whole), a, more)
        less = tl.where((b <= top_key) & (over_b >= (share - SAMPLE_MARGIN) * whole), b, less)
        bit = bit >> 1
    least = tl.min(tl.where(there, v, top), 0)
    return tl.maximum(from_order_key(more.to(tl.int32)), least), tl.maximum(from_order_key(less.to(tl.int32)), least)


@triton.jit
def narrow_interval(
    x, V, top, T, goal, by_mass, low, high, more, less, column_stride, allowed, HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(low, high) nearer to each other: the measure at or above `low` reaches the goal, at or above `high` it does not.

    Asks at eight values: evenly spaced logits from `more` to `less` where that is an interval, else evenly between.
    """
    j = tl.arange(0, 8)
    asked = low + (high - low) * (j + 1).to(tl.int64) // 9
    if (less >= more) & (less - more < float("inf")):
        asked = order_key(more + (less - more) * (j.to(tl.float32) / 7.0)).to(tl.int64) + (j == 7).to(tl.int64)
    asked = tl.minimum(tl.maximum(asked, low + 1), high - 1)
    bar = from_order_key(asked.to(tl.int32))[None, None, :]
    over = tl.zeros([BLOCK // 4, 8], tl.float32)
    for start in range(0, V, BLOCK):
        _ids, v, there = load_block(x, start, V, top, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK)
        m = tl.where(by_mass, softmax_weight(v, there, top, T), there.to(tl.float32))
        over += tl.sum(tl.where(v[:, :, None] >= bar, m[:, :, None], 0.0), 1)
    reached = tl.sum(over, 0) >= goal
    return tl.max(tl.where(reached, asked, low), 0), tl.min(tl.where(reached, high, asked), 0)


@triton.jit
def gather_interval(
    x, V, top, T, low, high, gathered, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """(tokens at or above `high`, their mass, tokens in [low, high)); up to GATHERED of their logits in `gathered`."""
    n = tl.zeros([BLOCK // 4], tl.int32)
    mass = tl.zeros([BLOCK // 4], tl.float32)
    some = tl.full((), 0, tl.int32)
    floor = from_order_key(low.to(tl.int32))
    bar = from_order_key((high - 1).to(tl.int32))
    for start in range(0, V, BLOCK):
        _ids, v, there = load_block(x, start, V, top, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK)
        over = there & (v > bar)
        n += tl.sum(over.to(tl.int32), 1)
        mass += tl.sum(softmax_weight(v, over, top, T), 1)
        here = there & (v >= floor) & (v <= bar)
        each = tl.sum(here.to(tl.int32), 1)
        at = some + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(here.to(tl.int32), 1) - 1
        tl.store(gathered + at, v, mask=here & (at < GATHERED))
        some += tl.sum(each, 0)
    tl.debug_barrier()
    return tl.sum(n, 0), tl.sum(mass, 0), some


@triton.jit
def find_threshold(
    x, V, top, T, c, bar, by_mass, tokens, Z, gathered, column_stride, allowed, HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """The largest value with c tokens, or where `by_mass` the mass `bar`, at or above it.

    Returns (value, how many tokens stand above it, their mass, how many stand at it, the weight of one of those).
    """
    goal = tl.where(by_mass, bar, c.to(tl.float32))
    share = goal / tl.where(by_mass, Z, tokens.to(tl.float32))
    more, less = sampled_quantiles(x, V, top, T, share, by_mass, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK)
    low = tl.full((), MINUS_INFINITY_KEY, tl.int64)
    high = order_key(top).to(tl.int64) + 1
    greater = tl.full((), 0, tl.int32)
    above = tl.full((), 0.0, tl.float32)
    some = tl.full((), GATHERED + 1, tl.int32)
    while (some > GATHERED) & (high - low > 1):
        low, high = narrow_interval(
            x, V, top, T, goal, by_mass, low, high, more, less, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK
        )
        more = tl.full((), float("inf"), tl.float32)
        greater, above, some = gather_interval(
            x, V, top, T, low, high, gathered, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK, GATHERED
        )
    f = tl.arange(0, GATHERED)
    v = tl.load(gathered + f, mask=f < some, other=-float("inf"))
    there = f < some
    key = order_key(v)
    w = softmax_weight(v, there, top, T)
    m = tl.where(by_mass, w, there.to(tl.float32))
    base = tl.where(by_mass, above, greater.to(tl.float32))
    value = low
    beyond = high
    while beyond - value > 1:
        trial = value + ((beyond - value) >> 1)
        reached = base + tl.sum(tl.where(key >= trial.to(tl.int32), m, 0.0), 0) >= goal
        value = tl.where(reached, trial, value)
        beyond = tl.where(reached, beyond, trial)
    # Where the sums of a pass and of what it left differ by a rounding, the last token of the interval it is.
    least = tl.min(tl.where(there, key, 0x7FFFFFFF), 0).to(tl.int64)
    value = tl.where((value == low) & (some > 0), least, value)
    over = there & (key > value)
    ties = tl.where(some > GATHERED, some, tl.sum((there & (key == value)).to(tl.int32), 0))
    greater += tl.sum(over.to(tl.int32), 0)
    above += tl.sum(tl.where(over, w, 0.0), 0)
    last = from_order_key(value.to(tl.int32))
    return value, greater, above, ties, tl.exp(tl.where(last == top, 0.0, (last - top) / T))


@triton.jit
def count_at_least(
    x, V, top, T, bar, column_stride, allowed, KEEP_ALL: tl.constexpr, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens have y >= bar; at least the first, with its ties where they are kept."""
    n = tl.zeros([BLOCK // 4], tl.int32)
    for start in range(0, V, BLOCK):
        _ids, v, there = load_block(x, start, V, top, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK)
        good = tl.where(v == top, 0.0, (v - top) / T) >= bar
        if KEEP_ALL:
            good = good | (v == top)
        n += tl.sum((there & good).to(tl.int32), 1)
    return tl.maximum(tl.sum(n, 0), 1)


@triton.jit
def search_kept(
    x, V, top, T,
    tokens,  # that can be drawn
    Z,  # their mass
    k,  # <= 0: off
    p,  # not < 1: off
    m,  # not > 0: off
    gathered,  # [GATHERED] fp32 to work in
    column_stride, allowed,
    ORDER: tl.constexpr,  # 0 "topk_topp", 1 "joint", 2 "topp_topk"
    KEEP_ALL: tl.constexpr, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """(how many tokens are kept, value of the last one, how many stand above it).

    Three searches at most, by one piece of code: of the tokens that the nucleus is cut from, of the nucleus, and of the
    last token that is kept, where neither of the two ended there.
    """
    by_m = tokens
    if m > 0.0:
        by_m = count_at_least(x, V, top, T, tl.log(m), column_stride, allowed, KEEP_ALL, HAS_ALLOWED, UNIT, BLOCK)
        by_m = tl.minimum(by_m, tokens)
    limit = tokens if ORDER == 1 else by_m  # what is left to the filter after min-p
    first = limit
    if ORDER != 2:
        first = tl.where(k > 0, tl.minimum(k, limit), limit)
    mass = Z
    nucleus = tokens
    kept = first
    value = tl.full((), MINUS_INFINITY_KEY, tl.int64)
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
            value, greater, above, ties, one = find_threshold(
                x, V, top, T, c, bar, (stage == 1) & (bar > 0.0), tokens, Z, gathered, column_stride, allowed,
                HAS_ALLOWED, UNIT, BLOCK, GATHERED,
            )  # fmt: skip
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
                kept = tl.minimum(reach, tl.minimum(tl.minimum(by_m, first), nucleus))
        if stage == 1:
            kept = tl.minimum(tl.minimum(by_m, first), nucleus)
            if ORDER == 2:
                kept = tl.where(k > 0, tl.minimum(k, kept), kept)
    return kept, value, greater
