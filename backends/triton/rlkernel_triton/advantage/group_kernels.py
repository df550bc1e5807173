"""Device code of `advantage` by group: statistics of groups, and what each kind makes of them.

Every sum over a group is taken in fixed point: a value is divided by the power of two below the largest of its group
and summed as a 64-bit integer. Such a sum does not depend on the order of its terms. So a group gets the same bits at
any place of any batch, by size or by ids, from a reduction of registers or from atomics; and it is closer to the true
sum than one in fp32. What is subtracted first is the smallest member, which no order decides either.

Own elements are the sequences that a program writes; columns are those that it compares them with:

    MODE "size"   own [R, C]: C neighbors of each of R groups;  columns: the groups themselves, C at a time
    MODE "pairs"  own [R, 1]: R sequences;  columns: C at a time of all that may be in their groups, compared by id
    MODE "table"  own [R, 1];  no columns: hash_groups_kernel and table_sums_kernel have put statistics into a table

Bytes: rewards in; 4 (advantage) + 1 (invalid) a sequence out, and 8 (count) + 8 (mean, std) + 1 (constant) a reward.

Legend: B sequences · G group size · K rewards of a sequence · P partial moments (n, shift, moved mean, m2) · T time ·
N packed tokens · M slots of the hash table, a power of two.
"""

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.moments import _factor, _merged, _variance

# Terms are below 2 in units of the largest: 2^24 of them times 2^(1 + 37) stay below 2^63. Squares are below 4.
SUM_SCALE: tl.constexpr = tl.constexpr(137438953472.0)  # 2^37
SQUARE_SCALE: tl.constexpr = tl.constexpr(68719476736.0)  # 2^36
INFINITY: tl.constexpr = tl.constexpr(float("inf"))
# Fields of the table, each [B] int64, set after set. The last four (or two) are there for kinds that need them.
COUNT: tl.constexpr = tl.constexpr(0)
HIGH: tl.constexpr = tl.constexpr(1)
LOW: tl.constexpr = tl.constexpr(2)
SUM: tl.constexpr = tl.constexpr(3)
SQUARES: tl.constexpr = tl.constexpr(4)
TOKENS: tl.constexpr = tl.constexpr(5)
WEIGHTED: tl.constexpr = tl.constexpr(6)
NEXT_HIGH: tl.constexpr = tl.constexpr(5)
NEXT_LOW: tl.constexpr = tl.constexpr(6)
HIGHS: tl.constexpr = tl.constexpr(7)
LOWS: tl.constexpr = tl.constexpr(8)


@triton.jit
def power_of_two_below(x):
    """The power of two at or below |x|, and its inverse; both are normal numbers."""
    e = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    e = tl.minimum(tl.maximum(e, 1), 253)
    return (e << 23).to(tl.float32, bitcast=True), ((254 - e) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _token_scale(tokens):
    """The scale of a sum of `tokens` terms below 2 that keeps it below 2^62, at most SUM_SCALE, and its inverse."""
    e = (tokens.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # tokens < 2^(e + 1)
    b = tl.minimum(60 - e, 37)
    return ((127 + b) << 23).to(tl.float32, bitcast=True), ((127 - b) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_fixed_point(x, scale, member):
    """Terms of a sum in fixed point; 0 where they do not count."""
    return tl.where(member, x * scale, 0.0).to(tl.int64)


@triton.jit
def _shift_and_unit(count, low, high, peer):
    """What is subtracted before anything is summed, and the unit of the sum of what is left."""
    low, high = tl.where(count > 0, low, 0.0), tl.where(count > 0, high, 0.0)
    shift = tl.where(peer != 0, 0.0, low)
    unit, inverse = power_of_two_below(tl.maximum(tl.abs(high - shift), tl.abs(low - shift)))
    return low, high, shift, unit, inverse


@triton.jit
def _moved_mean(total, count, unit):
    """Mean of value - shift."""
    n = tl.maximum(count, 1).to(tl.float32)
    return tl.div_rn(total.to(tl.float32), n) * (1.0 / SUM_SCALE) * unit


@triton.jit
def _deviation_unit(low, high, shift, moved):
    """The unit of the sum of squared deviations: of the largest of them."""
    return power_of_two_below(tl.maximum(tl.abs((high - shift) - moved), tl.abs((low - shift) - moved)))


@triton.jit
def load_reward(
    rewards, steps, in_stats, at, there, k, K, low, high,
    SECOND: tl.constexpr, RANGE: tl.constexpr, IN_STATS: tl.constexpr,
):  # fmt: skip
    """A reward (0 where it is not finite), whether it is valid, and whether it counts. SECOND: that of the step."""
    x = tl.load(rewards + at * K + k, mask=there, other=0).to(tl.float32)
    finite = there & (tl.abs(x) < INFINITY)
    ok = finite
    if RANGE:
        ok = ok & (x >= low) & (x <= high)
    if SECOND:
        x = tl.load(steps + at, mask=there, other=0).to(tl.float32)
        finite = tl.abs(x) < INFINITY
        ok = ok & finite
    member = ok
    if IN_STATS:
        member = member & (tl.load(in_stats + at, mask=there, other=0) != 0)
    x = tl.where(finite & (x != 0), x, 0.0)  # one of the two zeros: smallest and largest know no order of them
    return x, ok, member


@triton.jit
def load_tokens(lengths, at, there, limit, LENGTHS: tl.constexpr):
    """int64 tokens of a sequence. LENGTHS: "each", "bounds" of packed sequences, "same", "none" for one each."""
    if LENGTHS == "each":
        return tl.minimum(tl.maximum(tl.load(lengths + at, mask=there, other=0).to(tl.int64), 0), limit)
    if LENGTHS == "bounds":
        start = tl.load(lengths + at, mask=there, other=0).to(tl.int64)
        end = tl.load(lengths + at + 1, mask=there, other=0).to(tl.int64)
        start, end = tl.maximum(start, 0), tl.maximum(end, 0)
        return tl.maximum(tl.minimum(end, limit) - tl.minimum(start, limit), 0)
    if LENGTHS == "same":
        return tl.where(there, limit + tl.zeros_like(at), 0)
    return tl.where(there, 1 + tl.zeros_like(at), 0)


@triton.jit
def load_group_id(ids, at, there, G, IDS: tl.constexpr):
    """Id of the group of a sequence."""
    if IDS:
        return tl.load(ids + at, mask=there, other=0).to(tl.int64)
    return at // G


@triton.jit
def _load_columns(
    rewards, steps, in_stats, ids, anchor, name, state, first, c, until, k, K, G, low, high,
    MODE: tl.constexpr, IDS: tl.constexpr, SECOND: tl.constexpr, RANGE: tl.constexpr, IN_STATS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """C columns from the c-th on: rewards, which of them count in the group of an own element, and where they stand."""
    m = c + tl.arange(0, C)[None, :]
    at = first + m  # [R, C] of groups by size; [1, C] in pairs
    if MODE == "size":
        there = (m < G) & (at < until)
    else:
        there = at < until
    x, _, member = load_reward(rewards, steps, in_stats, at, there, k, K, low, high, SECOND, RANGE, IN_STATS)
    if MODE == "pairs":
        member = member & (load_group_id(ids, at, there, G, IDS) == name)  # [R, C]
        if SECOND:
            member = member & (tl.load(anchor + at, mask=there, other=0).to(tl.int64) == state)
    return x, member, at, there


@triton.jit
def _to_rank(x):
    """A positive integer that grows with x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483649


@triton.jit
def _from_rank(rank):
    """The number of a rank."""
    bits = (rank - 2147483649).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _field(table, field, owner, B, there):
    """A field of the table, of the group that `owner` stands for."""
    return tl.load(table + field * B + owner, mask=there, other=0)


@triton.jit
def _field_range(table, owner, B, there):
    """Count, smallest and largest member of a group in the table; smallest and largest mean nothing without one."""
    count = _field(table, COUNT, owner, B, there).to(tl.int32)
    high = _from_rank(_field(table, HIGH, owner, B, there))
    return count, _from_rank(4294967298 - _field(table, LOW, owner, B, there)), high


@triton.jit
def _statistics(
    rewards, steps, in_stats, ids, anchor, lengths, table, owner, own, own_there, first, until, width,
    k, K, G, limit, B, low, high, peer,
    MODE: tl.constexpr, IDS: tl.constexpr, SECOND: tl.constexpr, RANGE: tl.constexpr, IN_STATS: tl.constexpr,
    OPO: tl.constexpr, EXTREMES: tl.constexpr, LENGTHS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of the group of each own element, [R, 1]: count, shift, moved mean, m2, lowest, highest, and what kinds need.

    `a` and `b` are: tokens and weighted moved mean (OPO); second smallest and second largest member (EXTREMES).
    """
    if MODE == "table":
        count, lowest, highest = _field_range(table, owner, B, own_there)
        lowest, highest, shift, unit, inverse = _shift_and_unit(count, lowest, highest, peer)
        total = _field(table, SUM, owner, B, own_there)
        a, b = lowest, highest
        if OPO:
            tokens, weighted = _field(table, TOKENS, owner, B, own_there), _field(table, WEIGHTED, owner, B, own_there)
        if EXTREMES:
            lows, highs = _field(table, LOWS, owner, B, own_there), _field(table, HIGHS, owner, B, own_there)
            next_low = _from_rank(4294967298 - _field(table, NEXT_LOW, owner, B, own_there))
            next_high = _from_rank(_field(table, NEXT_HIGH, owner, B, own_there))
        moved = _moved_mean(total, count, unit)
        unit2, inverse2 = _deviation_unit(lowest, highest, shift, moved)
        squares = _field(table, SQUARES, owner, B, own_there)
    else:
        name, state = own, own
        if MODE == "pairs":
            name = load_group_id(ids, own, own_there, G, IDS)  # [R, 1]
            if SECOND:
                state = tl.load(anchor + own, mask=own_there, other=0).to(tl.int64)
        count = tl.zeros((R, 1), tl.int32)
        highest = tl.full((R, 1), -INFINITY, tl.float32)
        lowest = tl.full((R, 1), INFINITY, tl.float32)
        tokens = tl.zeros((R, 1), tl.int64)
        for c in range(0, width, C):
            x, member, at, there = _load_columns(
                rewards, steps, in_stats, ids, anchor, name, state, first, c, until, k, K, G, low, high,
                MODE, IDS, SECOND, RANGE, IN_STATS, C,
            )  # fmt: skip
            count += tl.sum(member.to(tl.int32), 1, keep_dims=True)
            highest = tl.maximum(highest, tl.max(tl.where(member, x, -INFINITY), 1, keep_dims=True))
            lowest = tl.minimum(lowest, tl.min(tl.where(member, x, INFINITY), 1, keep_dims=True))
            if OPO:
                L = load_tokens(lengths, at, there, limit, LENGTHS)
                tokens += tl.sum(tl.where(member, L, 0), 1, keep_dims=True)
        lowest, highest, shift, unit, inverse = _shift_and_unit(count, lowest, highest, peer)
        total = tl.zeros((R, 1), tl.int64)
        weighted = tl.zeros((R, 1), tl.int64)
        lows, highs = tl.zeros((R, 1), tl.int32), tl.zeros((R, 1), tl.int32)
        next_low = tl.full((R, 1), INFINITY, tl.float32)
        next_high = tl.full((R, 1), -INFINITY, tl.float32)
        for c in range(0, width, C):
            x, member, at, there = _load_columns(
                rewards, steps, in_stats, ids, anchor, name, state, first, c, until, k, K, G, low, high,
                MODE, IDS, SECOND, RANGE, IN_STATS, C,
            )  # fmt: skip
            away = (x - shift) * inverse
            total += tl.sum(to_fixed_point(away, SUM_SCALE, member), 1, keep_dims=True)
            if OPO:
                L = load_tokens(lengths, at, there, limit, LENGTHS)
                scale, _ = _token_scale(tokens)
                weighted += tl.sum(to_fixed_point(away, scale, member) * L, 1, keep_dims=True)
            if EXTREMES:
                lows += tl.sum((member & (x == lowest)).to(tl.int32), 1, keep_dims=True)
                highs += tl.sum((member & (x == highest)).to(tl.int32), 1, keep_dims=True)
                above, below = member & (x > lowest), member & (x < highest)
                next_low = tl.minimum(next_low, tl.min(tl.where(above, x, INFINITY), 1, keep_dims=True))
                next_high = tl.maximum(next_high, tl.max(tl.where(below, x, -INFINITY), 1, keep_dims=True))
        moved = _moved_mean(total, count, unit)
        unit2, inverse2 = _deviation_unit(lowest, highest, shift, moved)
        squares = tl.zeros((R, 1), tl.int64)
        for c in range(0, width, C):
            x, member, at, there = _load_columns(
                rewards, steps, in_stats, ids, anchor, name, state, first, c, until, k, K, G, low, high,
                MODE, IDS, SECOND, RANGE, IN_STATS, C,
            )  # fmt: skip
            dev = ((x - shift) - moved) * inverse2
            squares += tl.sum(to_fixed_point(dev * dev, SQUARE_SCALE, member), 1, keep_dims=True)
        a, b = lowest, highest
    m2 = squares.to(tl.float32) * (1.0 / SQUARE_SCALE) * unit2 * unit2
    if OPO:
        _, back = _token_scale(tokens)
        a = tokens.to(tl.float32)
        b = tl.div_rn(weighted.to(tl.float32), tl.maximum(a, 1.0)) * back * unit
    if EXTREMES:
        a = tl.where(lows > 1, lowest, next_low)
        b = tl.where(highs > 1, highest, next_high)
    return count, shift, moved, m2, lowest, highest, a, b


@triton.jit
def _scale_deviation(dev, var, eps, eps_mode, min_std, center, peer):
    """Deviations over a standard deviation; where that is low 0, or undivided (`center`)."""
    scaled = dev * _factor(var, eps, eps_mode)
    low = tl.sqrt_rn(var) <= min_std
    unguarded = (peer != 0) & (min_std == 0) & (center == 0)
    return tl.where(low & (unguarded == 0), tl.where(center != 0, dev, 0.0), scaled)


@triton.jit
def _advantage(
    x, member, count, shift, moved, m2, lowest, highest, a, b, batch_var, share,
    ddof, eps, eps_mode, min_std, center, raw_alone, peer,
    KIND: tl.constexpr, SCALE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Advantage of own elements by a kind; x is 0 where it is invalid."""
    n = count.to(tl.float32)
    others = n - member.to(tl.float32)  # members besides the element itself
    grown = tl.div_rn(n, tl.maximum(others, 1.0))  # n / (n - 1) of a member
    away = x - shift
    dev = away - moved
    var = _variance(m2, n, ddof)
    if SCALE == "batch":
        var = batch_var
    elif OTHERS:
        without = tl.maximum(tl.where(member, m2 - dev * dev * grown, m2), 0.0)
        # Without one of the smallest the least is the next one; so too at the other end.
        least = tl.where(member & (x == lowest), a, lowest)
        most = tl.where(member & (x == highest), b, highest)
        var = tl.where((others < 2) | (least == most), 0.0, _variance(without, others, ddof))
    if KIND == "passk":
        dev = tl.where(member & (x == highest), highest - b, 0.0)  # 0 in a tie
    elif KIND == "rloo" or OTHERS:
        dev = tl.where(member, dev * grown, dev)
    elif KIND == "opo":
        dev = tl.where(a > 0, away - b, dev)
    raw = x
    if KIND == "maxrl":
        mean = (shift + moved) + eps
        result = tl.where(mean == 0, 0.0, tl.div_rn(dev, tl.where(mean == 0, 1.0, mean)))
    elif SCALE == "none":
        result = dev
    else:
        result = _scale_deviation(dev, var, eps, eps_mode, min_std, center, peer)
        raw = x * _factor(tl.full((1, 1), 1.0, tl.float32), eps, eps_mode)
    if KIND == "passk":
        result = tl.where(count < 2, 0.0, result)
    else:
        result = tl.where(count < 2, tl.where((count > 0) & (raw_alone != 0), raw, 0.0), result)
    if KIND == "gpg":
        result = tl.div_rn(result, tl.where(share > 0, share, 1.0))
    return result


@triton.jit(
    do_not_specialize=["B", "G", "K", "P", "limit", "ddof", "eps_mode", "center", "raw_alone", "raw_invalid", "peer"]
)
def group_kernel(
    rewards,  # [B, K] real
    steps,  # [B] real: gigpo
    ids,  # [B] integer, with IDS
    anchor,  # [B] integer: gigpo
    in_stats,  # [B] bool, with IN_STATS
    in_loss,  # [B] bool, with IN_LOSS
    weights,  # [B] floating, with WEIGHTS
    reward_weights,  # [K] real, with REWARD_WEIGHTS
    lengths,  # [B] integer, or bounds [B + 1], see LENGTHS
    batch,  # [K (2 of gigpo), P, 4] fp32: moments of the rewards of the batch, with SCALE "batch" or KIND "gpg"
    table,  # [sets, fields, B] int64, with MODE "table"
    owner,  # [B] int32: the sequence that stands for the group in the table
    owner2,  # [B] int32: the same for steps in equal states
    adv,  # [B] fp32, out
    invalid,  # [B] bool, out
    group_count,  # [B, K] int64, out
    group_mean,  # [B, K] fp32, out
    group_std,  # [B, K] fp32, out
    constant,  # [B, K] bool, out
    partial,  # [programs, 4] fp32, out: moments of the advantages, with MOMENTS
    B, G, K, P,
    limit,  # i64, largest length
    low, high, ddof, eps, eps_mode, min_std, center, raw_alone, raw_invalid, peer, step_weight,
    KIND: tl.constexpr, MODE: tl.constexpr, IDS: tl.constexpr, SCALE: tl.constexpr, OTHERS: tl.constexpr,
    RANGE: tl.constexpr, IN_STATS: tl.constexpr, IN_LOSS: tl.constexpr, WEIGHTS: tl.constexpr,
    REWARD_WEIGHTS: tl.constexpr, LENGTHS: tl.constexpr, FIELDS: tl.constexpr,
    MOMENTS: tl.constexpr,  # "none"; "first": they are merged and applied later; "defer": only written
    TOKENS_COUNT: tl.constexpr,  # moments are over tokens, not sequences
    R: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Advantages and statistics of the own elements of a program."""
    program = tl.program_id(0).to(tl.int64)
    B, G, K = B.to(tl.int64), G.to(tl.int64), K.to(tl.int64)
    if MODE == "size":
        chunks = tl.cdiv(G, C)  # of a group; with several, R is 1
        first = (program // chunks * R + tl.arange(0, R)[:, None]) * G  # [R, 1]
        m = program % chunks * C + tl.arange(0, C)[None, :]
        own = first + m  # [R, C]
        own_there = (m < G) & (own < B)
        until, width = B, G
    else:
        own = program * R + tl.arange(0, R)[:, None]  # [R, 1]
        own_there = own < B
        first, until = program * 0, B  # all sequences
        if not IDS:  # those of the groups of the own elements
            first = program * R // G * G
            until = tl.minimum(tl.cdiv((program + 1) * R, G) * G, B)
        width = until - first
    OPO: tl.constexpr = KIND == "opo"
    EXTREMES: tl.constexpr = OTHERS or KIND == "passk"
    mine, mine2 = own, own
    if MODE == "table":
        mine = tl.load(owner + own, mask=own_there, other=0).to(tl.int64)
    a = tl.zeros(own.shape, tl.float32)
    raw = a
    bad = own_there
    for k in range(K):
        count, shift, moved, m2, lowest, highest, more, further = _statistics(
            rewards, steps, in_stats, ids, anchor, lengths, table + k * FIELDS * B, mine, own, own_there, first, until,
            width, k, K, G, limit, B, low, high, peer,
            MODE, IDS, False, RANGE, IN_STATS, OPO, EXTREMES, LENGTHS, R, C,
        )  # fmt: skip
        batch_var, share = tl.zeros((1, 1), tl.float32), 1.0
        if SCALE == "batch" or KIND == "gpg":
            bn, bs, bd, bq = _merged(batch + k * P * 4, P, SIZE)
            batch_var, share = batch_var + _variance(bq, bn, ddof), bs + bd
        x, ok, member = load_reward(
            rewards, steps, in_stats, own, own_there, k, K, low, high, False, RANGE, IN_STATS
        )  # fmt: skip
        made = _advantage(
            tl.where(ok, x, 0.0), member, count, shift, moved, m2, lowest, highest, more, further, batch_var, share,
            ddof, eps, eps_mode, min_std, center, raw_alone, peer, KIND, SCALE, OTHERS,
        )  # fmt: skip
        out = own * K + k
        blank = tl.zeros(own.shape, tl.int32)  # statistics are [R, 1]
        tl.store(group_count + out, (count + blank).to(tl.int64), mask=own_there)
        tl.store(group_mean + out, tl.where(count + blank > 0, shift + moved, 0.0), mask=own_there)
        std = tl.sqrt_rn(_variance(m2, count.to(tl.float32), ddof))
        tl.store(group_std + out, std + blank.to(tl.float32), mask=own_there)
        tl.store(constant + out, ((count > 0) & (lowest == highest)) & (blank == 0), mask=own_there)
        weight = 1.0
        if REWARD_WEIGHTS:
            weight = tl.load(reward_weights + k).to(tl.float32)
        a += weight * tl.where(ok, made, 0.0)
        raw += weight * x
        bad = bad & (ok == 0)
    if KIND == "gigpo":
        if MODE == "table":
            mine2 = tl.load(owner2 + own, mask=own_there, other=0).to(tl.int64)
        count, shift, moved, m2, lowest, highest, more, further = _statistics(
            rewards, steps, in_stats, ids, anchor, lengths, table + FIELDS * B, mine2, own, own_there, first, until,
            width, 0, K, G, limit, B, low, high, peer,
            MODE, IDS, True, RANGE, IN_STATS, False, False, LENGTHS, R, C,
        )  # fmt: skip
        batch_var, share = tl.zeros((1, 1), tl.float32), 1.0
        if SCALE == "batch":
            bn, bs, bd, bq = _merged(batch + P * 4, P, SIZE)
            batch_var += _variance(bq, bn, ddof)
        x, ok, member = load_reward(rewards, steps, in_stats, own, own_there, 0, K, low, high, True, RANGE, IN_STATS)
        made = _advantage(
            tl.where(ok, x, 0.0), member, count, shift, moved, m2, lowest, highest, more, further, batch_var, share,
            ddof, eps, eps_mode, min_std, center, 0, peer, "grpo", SCALE, False,
        )  # fmt: skip
        a += tl.where(bad, 0.0, step_weight * tl.where(ok, made, 0.0))
    chosen = own_there
    if IN_LOSS:
        chosen = chosen & (tl.load(in_loss + own, mask=own_there, other=0) != 0)
    if MOMENTS != "none":
        counted = chosen & (bad == 0)
        if IN_STATS:
            counted = counted & (tl.load(in_stats + own, mask=own_there, other=0) != 0)
        times = tl.where(
            counted, load_tokens(lengths, own, own_there, limit, LENGTHS if TOKENS_COUNT else "none"), 0
        ).to(tl.float32)
        counted = times > 0
        n = tl.sum(tl.sum(times, 1), 0)
        least = tl.min(tl.min(tl.where(counted, a, INFINITY), 1), 0)
        least = tl.where(n > 0, least, 0.0)
        away = tl.where(counted, a - least, 0.0)
        mean = tl.div_rn(tl.sum(tl.sum(times * away, 1), 0), tl.maximum(n, 1.0))
        left = tl.where(counted, away - mean, 0.0)
        tl.store(partial + program * 4, n)
        tl.store(partial + program * 4 + 1, least)
        tl.store(partial + program * 4 + 2, mean)
        tl.store(partial + program * 4 + 3, tl.sum(tl.sum(times * left * left, 1), 0))
    a = tl.where(bad, tl.where(raw_invalid != 0, raw, 0.0), a)
    if MOMENTS != "first":
        a = tl.where(chosen, a, 0.0)
        if WEIGHTS:
            weight = tl.load(weights + own, mask=own_there, other=0).to(tl.float32)
            a = tl.where(weight == 0, 0.0, a * weight)
    tl.store(adv + own, a, mask=own_there)
    tl.store(invalid + own, bad, mask=own_there)


@triton.jit
def _hash(name, state, SECOND: tl.constexpr):
    """A number that spreads ids, all 64 bits of it; multiplication wraps."""
    h = name * 0x1E3779B97F4A7C15
    if SECOND:
        h = (h ^ (h >> 29)) + state * 0x2545F4914F6CDD1D
    h = (h ^ (h >> 32)) * 0x3F51AFD7ED558CCD
    return h ^ (h >> 32)


@triton.jit(do_not_specialize=["B", "G", "K", "limit", "last"])
def hash_groups_kernel(
    rewards, steps, ids, anchor, in_stats, lengths,  # as group_kernel
    slots,  # [M] int32, 0: nobody; else 1 + the sequence that stands for a group
    table,  # [K or 1, fields, B] int64, zeros
    owner,  # [B] int32, out
    B, G, K, limit, last, low, high,
    IDS: tl.constexpr, SECOND: tl.constexpr, RANGE: tl.constexpr, IN_STATS: tl.constexpr, OPO: tl.constexpr,
    LENGTHS: tl.constexpr, FIELDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Find who stands for the group of each sequence; count, smallest and largest by atomics.

    Open addressing: who comes first to a free slot of the hash table stands for its group. That is chance, and nothing
    but the place of the statistics depends on it. `last` is M - 1, M >= 2 B, so that a free slot is always found.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < B
    B = B.to(tl.int64)
    name, state = load_group_id(ids, at, there, G, IDS), at
    if SECOND:
        state = tl.load(anchor + at, mask=there, other=0).to(tl.int64)
    slot = _hash(name, state, SECOND) & last
    mine = tl.where(there, -1, 0).to(tl.int64)
    while tl.min(mine, 0) < 0:
        searching = mine < 0
        # Where the search is over, the slot is compared with a number that it never holds, and stays as it is.
        expected = tl.where(searching, 0, -1).to(tl.int32)
        found = tl.atomic_cas(slots + slot, expected, (at + 1).to(tl.int32))
        candidate = tl.where(found == 0, at, found.to(tl.int64) - 1)
        same = searching & (load_group_id(ids, candidate, searching, G, IDS) == name)
        if SECOND:
            same = same & (tl.load(anchor + candidate, mask=searching, other=0).to(tl.int64) == state)
        mine = tl.where(same, candidate, mine)
        slot = tl.where(searching & (same == 0), (slot + 1) & last, slot)
    tl.store(owner + at, mine.to(tl.int32), mask=there)
    for k in range(1 if SECOND else K):
        x, _, member = load_reward(rewards, steps, in_stats, at, there, k, K, low, high, SECOND, RANGE, IN_STATS)
        to = table + k * FIELDS * B + mine
        tl.atomic_add(to + COUNT * B, tl.full((SIZE,), 1, tl.int64), mask=member, sem="relaxed")
        tl.atomic_max(to + HIGH * B, _to_rank(x), mask=member, sem="relaxed")
        tl.atomic_max(to + LOW * B, 4294967298 - _to_rank(x), mask=member, sem="relaxed")
        if OPO:
            L = load_tokens(lengths, at, there, limit, LENGTHS)
            tl.atomic_add(to + TOKENS * B, L, mask=member, sem="relaxed")


@triton.jit(do_not_specialize=["B", "K", "limit", "peer"])
def table_sums_kernel(
    rewards, steps, in_stats, lengths, table, owner,  # as group_kernel and hash_groups_kernel
    B, K, limit, low, high, peer,
    SECOND: tl.constexpr, RANGE: tl.constexpr, IN_STATS: tl.constexpr, OPO: tl.constexpr, EXTREMES: tl.constexpr,
    LENGTHS: tl.constexpr, FIELDS: tl.constexpr, SQUARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add to the table what needs the smallest and largest of a group: sums, second extremes; SQUARE: m2."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < B
    B = B.to(tl.int64)
    mine = tl.load(owner + at, mask=there, other=0).to(tl.int64)
    for k in range(1 if SECOND else K):
        x, _, member = load_reward(rewards, steps, in_stats, at, there, k, K, low, high, SECOND, RANGE, IN_STATS)
        of = table + k * FIELDS * B
        count, lowest, highest = _field_range(of, mine, B, there)
        lowest, highest, shift, unit, inverse = _shift_and_unit(count, lowest, highest, peer)
        away = x - shift
        to = of + mine
        if SQUARE:
            moved = _moved_mean(_field(of, SUM, mine, B, there), count, unit)
            _, inverse2 = _deviation_unit(lowest, highest, shift, moved)
            dev = (away - moved) * inverse2
            tl.atomic_add(to + SQUARES * B, to_fixed_point(dev * dev, SQUARE_SCALE, member), mask=member, sem="relaxed")
        else:
            tl.atomic_add(to + SUM * B, to_fixed_point(away * inverse, SUM_SCALE, member), mask=member, sem="relaxed")
            if OPO:
                scale, _ = _token_scale(_field(of, TOKENS, mine, B, there))
                L = load_tokens(lengths, at, there, limit, LENGTHS)
                term = to_fixed_point(away * inverse, scale, member) * L
                tl.atomic_add(to + WEIGHTED * B, term, mask=member, sem="relaxed")
            if EXTREMES:
                one = tl.full((SIZE,), 1, tl.int64)
                tl.atomic_add(to + LOWS * B, one, mask=member & (x == lowest), sem="relaxed")
                tl.atomic_add(to + HIGHS * B, one, mask=member & (x == highest), sem="relaxed")
                low_rank = 4294967298 - _to_rank(x)
                tl.atomic_max(to + NEXT_LOW * B, low_rank, mask=member & (x > lowest), sem="relaxed")
                tl.atomic_max(to + NEXT_HIGH * B, _to_rank(x), mask=member & (x < highest), sem="relaxed")
