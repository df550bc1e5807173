"""Device code of `advantage` by group around the groups.

Token-level rewards summed, moments of a batch, whitening, and the advantage of a sequence written to its tokens.

Legend: B sequences · K rewards of a sequence · P partial moments (n, shift, moved mean, m2) · T time · N packed tokens.
"""

from rlkernel_triton.advantage.group_kernels import INFINITY, SUM_SCALE, load_reward, power_of_two_below, to_fixed_point
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.moments import _factor, _merged, _variance
from rlkernel_triton.common.sequences import sequence_bounds


@triton.jit(do_not_specialize=["sequences"])
def sequence_sums_kernel(
    rewards,  # token-level real, with SUM
    mask,  # token-level u8, with MASK
    ends,  # [B] integer, with ENDS
    bounds,  # [B + 1] integer, with PACKED
    totals,  # [B] fp32, out, with SUM: NaN where a token that counts is not finite
    counts,  # [B] int64, out: tokens that count
    T, sequences,
    SUM_UP: tl.constexpr, MASK: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sum and number of the tokens of a sequence that count; reads them twice, once from DRAM if they fit a cache."""
    row = tl.program_id(0).to(tl.int64)
    start, count, _ = sequence_bounds(row, sequences, T, ends, bounds, ENDS, PACKED)
    valid = tl.zeros((SIZE,), tl.int32)
    largest = tl.zeros((SIZE,), tl.float32)
    for c in range(0, count, SIZE):
        t = c + tl.arange(0, SIZE)
        inside = t < count
        if MASK:
            inside = inside & (tl.load(mask + start + t, mask=inside, other=0) != 0)
        valid += inside.to(tl.int32)
        if SUM_UP:
            x = tl.abs(tl.load(rewards + start + t, mask=inside, other=0).to(tl.float32))
            largest = tl.maximum(largest, tl.where(x == x, x, INFINITY))  # NaN is larger than all, too
    tl.store(counts + row, tl.sum(valid.to(tl.int64), 0))
    if SUM_UP:
        most = tl.max(largest, 0, keep_dims=True)  # [1]: the interpreter cannot see a scalar's bits
        unit, inverse = power_of_two_below(most)
        total = tl.zeros((SIZE,), tl.int64)
        for c in range(0, count, SIZE):
            t = c + tl.arange(0, SIZE)
            inside = t < count
            if MASK:
                inside = inside & (tl.load(mask + start + t, mask=inside, other=0) != 0)
            x = tl.load(rewards + start + t, mask=inside, other=0).to(tl.float32)
            total += to_fixed_point(x * inverse, SUM_SCALE, inside & (most < INFINITY))
        whole = tl.sum(total, 0, keep_dims=True).to(tl.float32) * (1.0 / SUM_SCALE) * unit
        tl.store(totals + row + tl.arange(0, 1), tl.where(most < INFINITY, whole, float("nan")))


@triton.jit(do_not_specialize=["B", "K", "programs"])
def batch_moments_kernel(
    rewards, steps, in_stats,  # as group_kernel
    partial,  # [K (2 of gigpo), programs, 4] fp32, out
    B, K, programs, low, high,
    NONZERO: tl.constexpr,  # moments of x != 0 in place of x
    STEPS: tl.constexpr, RANGE: tl.constexpr, IN_STATS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Moments of SIZE rewards that count, of reward k = program_id(1); with STEPS the second are those of the steps."""
    program, k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = program * SIZE + tl.arange(0, SIZE)
    there = at < B
    if STEPS:
        x, _, member = load_reward(rewards, steps, in_stats, at, there, 0, K, low, high, False, RANGE, IN_STATS)
        x2, _, member2 = load_reward(rewards, steps, in_stats, at, there, 0, K, low, high, True, RANGE, IN_STATS)
        x, member = tl.where(k == 1, x2, x), (member & (k == 0)) | (member2 & (k == 1))
    else:
        x, _, member = load_reward(rewards, steps, in_stats, at, there, k, K, low, high, False, RANGE, IN_STATS)
    if NONZERO:
        x = (x != 0).to(tl.float32)
    n = tl.sum(member.to(tl.float32), 0)
    least = tl.where(n > 0, tl.min(tl.where(member, x, INFINITY), 0), 0.0)
    away = tl.where(member, x - least, 0.0)
    mean = tl.div_rn(tl.sum(away, 0), tl.maximum(n, 1.0))
    left = tl.where(member, away - mean, 0.0)
    to = partial + (k * programs + program) * 4
    tl.store(to, n)
    tl.store(to + 1, least)
    tl.store(to + 2, mean)
    tl.store(to + 3, tl.sum(left * left, 0))


@triton.jit(do_not_specialize=["B", "P", "ddof", "eps_mode"])
def whiten_groups_kernel(
    adv,  # [B] fp32, in and out
    invalid,  # [B] bool
    in_loss,  # [B] bool, with IN_LOSS
    weights,  # [B] floating, with WEIGHTS
    partial,  # [P, 4] fp32
    scalars,  # [4] fp32, out: count, mean, variance, factor
    B, P, ddof, eps, eps_mode,
    APPLY: tl.constexpr,  # off: only the scalars
    IN_LOSS: tl.constexpr, WEIGHTS: tl.constexpr, SIZE: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the moments (each program all of them: they are few) and whiten SIZE advantages; 12 bytes each."""
    program = tl.program_id(0).to(tl.int64)
    n, s, d, q = _merged(partial, P, MERGED)
    var = _variance(q, n, ddof)
    rstd = tl.where(n > 0, _factor(var, eps, eps_mode), 0.0)
    if program == 0:
        tl.store(scalars, n)
        tl.store(scalars + 1, s + d)
        tl.store(scalars + 2, var)
        tl.store(scalars + 3, rstd)
    if APPLY:
        at = program * SIZE + tl.arange(0, SIZE)
        there = at < B
        a = tl.load(adv + at, mask=there, other=0)
        bad = tl.load(invalid + at, mask=there, other=1) != 0
        a = tl.where(bad, a, ((a - s) - d) * rstd)
        if IN_LOSS:
            a = tl.where(tl.load(in_loss + at, mask=there, other=0) != 0, a, 0.0)
        if WEIGHTS:
            weight = tl.load(weights + at, mask=there, other=0).to(tl.float32)
            a = tl.where(weight == 0, 0.0, a * weight)
        tl.store(adv + at, a, mask=there)


@triton.jit(do_not_specialize=["sequences", "chunks", "steps"])
def broadcast_kernel(
    adv,  # [B] fp32
    out,  # token-level fp32, out
    mask,  # token-level u8, with MASK
    ends,  # [B] integer, with ENDS
    bounds,  # [B + 1] integer, with PACKED
    T, sequences, chunks,
    steps,  # of the search: the bits of `sequences`
    MASK: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The advantage of its sequence at every token that counts, 0 at the others; 4 bytes a token, 5 with a mask."""
    program = tl.program_id(0).to(tl.int64)
    T = T + tl.zeros((), tl.int64)
    if PACKED:
        at = program * SIZE + tl.arange(0, SIZE)
        inside = at < T
        # The first sequence that ends behind the token, by bisection.
        left = tl.zeros((SIZE,), tl.int64)
        right = left + sequences
        for _ in range(steps):
            middle = (left + right) // 2
            open_ = left < right
            end = tl.load(bounds + 1 + middle, mask=open_, other=0).to(tl.int64)
            left, right = tl.where(open_ & (end <= at), middle + 1, left), tl.where(open_ & (end > at), middle, right)
        valid = inside & (left < sequences) & (at >= tl.load(bounds).to(tl.int64))
        row = left
    else:
        row = program // chunks + tl.zeros((SIZE,), tl.int64)
        t = program % chunks * SIZE + tl.arange(0, SIZE)
        at = row * T + t
        inside = t < T
        valid = inside
        if ENDS:
            valid = valid & (t < tl.load(ends + row, mask=inside, other=0).to(tl.int64))
    if MASK:
        valid = valid & (tl.load(mask + at, mask=inside, other=0) != 0)
    tl.store(out + at, tl.load(adv + row, mask=valid, other=0), mask=inside)
