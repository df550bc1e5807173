"""What the kernels of a row share: its request, the sum of its groups, and its results.

Legend: N rows · S tiles a row of G groups each · GP: groups padded to a power of two. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LARGEST, LN2, LOG2E, anchor, scaled_less, tree_sum
from rlkernel_triton.common.group_sums import SLOTS, STEPS, log_probability, quarters_sum, reference
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import (
    HELD_INFINITY,
    HELD_NAN,
    MAX_FLOAT,
    draw_floor,
    from_fixed,
    logits_at,
    rounded_product,
    to_fixed,
)
from rlkernel_triton.common.softmax import finite_or_zero
from rlkernel_triton.sample.tile_stats import as_int32_pointer, counts_offset, group_shift, moments_offset

# Rows of the results: [., N] each.
TOKEN: tl.constexpr = tl.constexpr(0)  # of int64
THRESHOLD_ID: tl.constexpr = tl.constexpr(1)
KEPT: tl.constexpr = tl.constexpr(0)  # of int32
STATUS: tl.constexpr = tl.constexpr(1)
PENDING: tl.constexpr = tl.constexpr(2)
LOGPROB: tl.constexpr = tl.constexpr(0)  # of fp32
LOG_KEPT_MASS: tl.constexpr = tl.constexpr(1)
THRESHOLD: tl.constexpr = tl.constexpr(2)
RAW_LOGPROB: tl.constexpr = tl.constexpr(3)
ENTROPY_ROW: tl.constexpr = tl.constexpr(4)


@triton.jit
def load_groups(work, S, G: tl.constexpr, GP: tl.constexpr):
    """([GP] best logits of the groups of a row, their sums); -inf and 0 behind the last."""
    g = tl.arange(0, GP)
    there = g < S * G
    return tl.load(work + 2 * g, mask=there, other=-float("inf")), tl.load(work + 2 * g + 1, mask=there, other=0.0)


@triton.jit
def load_best(work, S, G: tl.constexpr, GP: tl.constexpr):
    """[GP] best logits of the groups of a row."""
    g = tl.arange(0, GP)
    return tl.load(work + 2 * g, mask=g < S * G, other=-float("inf"))


@triton.jit
def merge_groups(
    m, z, work, S, tiles_per_program, T, ENTROPY: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr
):
    """(best logit, least best, tokens that can be drawn, whether there is NaN, mass, sum of w * y) of a row.

    Args: the best logits m and the sums z of its groups. Sums are exact, of rounded terms.
    """
    WHOLE: tl.constexpr = GP * GROUP
    g = tl.arange(0, GP)
    n = tl.load(as_int32_pointer(work) + counts_offset(S, G) + g, mask=g < tl.cdiv(S, tiles_per_program), other=0)
    top, least = tl.split(tl.max(tl.join(m, tl.where(g < S * G, -m, -float("inf"))), 0))
    drawable = m > draw_floor(top)
    shift = tl.where(drawable, group_shift(m, top, tl.minimum(LOG2E / T, MAX_FLOAT)), -float("inf"))
    scale = tl.exp2(shift)
    # NaN counts 2^32; beside +inf the others do not count.
    counts = ((n & HELD_NAN).to(tl.int64) << 2) + tl.where(
        ((n & HELD_INFINITY) != 0) == (top == float("inf")), n & (HELD_INFINITY - 1), 0
    )
    mass, count = tl.split(tl.sum(tl.join(to_fixed(tl.where(drawable, z * scale, 0.0), WHOLE), counts), 0))
    moment = tl.full((), 0.0, tl.float32)
    if ENTROPY:
        h = tl.load(work + moments_offset(S, G) + g, mask=g < S * G, other=0.0)
        each = rounded_product(scale, h + rounded_product(z, tl.where(scale > 0.0, shift * LN2, 0.0)))
        moment = -from_fixed(tl.sum(to_fixed(tl.where(drawable & (scale > 0.0), -each, 0.0), WHOLE), 0), WHOLE)
    tokens = (count & 0xFFFFFFFF).to(tl.int32)
    return top, -least, tokens, ((count >> 32) > 0).to(tl.int32), from_fixed(mass, WHOLE), moment


@triton.jit
def total_of_others(
    x, token, V, s, work, m, S, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """(total, its reference) of all tokens but one, in the order of common.group_sums. m: [GP] best logits of groups.

    The group of the token is read again; nothing else is.
    """
    own = token // GROUP
    QUARTER: tl.constexpr = GROUP // 4
    ids = own * GROUP + tl.arange(0, QUARTER)[None, :]
    v0 = other_logits(x, ids, token, V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v1 = other_logits(x, ids + QUARTER, token, V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v2 = other_logits(x, ids + 2 * QUARTER, token, V, column_stride, allowed, HAS_ALLOWED, UNIT)
    v3 = other_logits(x, ids + 3 * QUARTER, token, V, column_stride, allowed, HAS_ALLOWED, UNIT)
    best = tl.max(tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), 1), 0)
    top = reference(tl.maximum(tl.max(tl.where(tl.arange(0, GP) == own, -float("inf"), m), 0), best), s)
    at = finite_or_zero(top)
    r = finite_or_zero(reference(best, s))
    c, t = anchor(best, s, r)
    rest = quarters_sum(
        tl.exp2(scaled_less(v0 - c, s, t)), tl.exp2(scaled_less(v1 - c, s, t)), tl.exp2(scaled_less(v2 - c, s, t)),
        tl.exp2(scaled_less(v3 - c, s, t)),
    )  # fmt: skip
    rest = tl.sum(rest, 0) * tl.exp2(r - at)
    slot = tl.arange(0, GP // STEPS)
    total = tl.zeros([GP // STEPS], tl.float32)
    for k in tl.static_range(STEPS):
        g = slot // SLOTS * (SLOTS * STEPS) + k * SLOTS + slot % SLOTS
        group_top = tl.load(work + 2 * g, mask=g < S * G, other=-float("inf"))
        z = tl.load(work + 2 * g + 1, mask=g < S * G, other=0.0)
        total += tl.where(g == own, rest, z * tl.exp2(reference(group_top, s) - at))
    return tl.sum(tree_sum(tl.reshape(total, [1, GP // STEPS])), 0), top


@triton.jit
def other_logits(x, ids, token, V, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr):
    """Logits of the row at ids but one, NaN as -inf."""
    v = logits_at(x, ids, (ids < V) & (ids != token), column_stride, allowed, HAS_ALLOWED, UNIT)
    return tl.where(v != v, -float("inf"), v)


@triton.jit
def with_sum(logprob, log_kept, whole, alone):
    """(logprob, log_kept) changed in their last bits, so that their sum rounds to `whole`; all are <= 0.

    alone: no other token was kept, so that `logprob` is 0 and stays it.

    The smaller of the two stays but for one unit in its last place, and the larger is what is left: an error of its own
    size's last bits. The unit is taken where the rest would lie between two numbers, and round to the other one.
    """
    first = (log_kept >= logprob) & (alone == 0)
    small = tl.maximum(tl.where(first, log_kept, logprob), whole)
    between = (whole - small) + small != whole
    nearer = (small.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    small = tl.where(between, nearer, small)
    large = whole - small
    return tl.where(first, large, small), tl.where(first, small, large)


@triton.jit
def write_results(
    row, N,
    x,  # [V] logits of this row
    column_stride, V,
    allowed,  # bits of this row
    work,  # [words] of this row
    raw,  # [N, V] logits before the edits
    raw_row_stride, raw_column_stride,
    raw_work,  # [words] of the raw logits of this row
    S, tiles_per_program, invalid_token,
    longs,  # out [2, N] int64
    ints,  # out [3, N] int32
    floats,  # out [3 to 5, N] fp32
    row_stats,  # out [N, 5] fp32: best logit, T, log of the kept weights, best raw logit, log of the raw weights
    padding,  # the row stands for nothing
    bad,  # a parameter has no meaning
    greedy,
    nan,  # the logits held NaN
    T,
    top,  # best logit
    tokens,  # that can be drawn
    Z,  # mass of these: sum of exp((x - top) / T)
    winner,
    kept,  # how many tokens the filters keep
    kept_mass,
    moment,  # sum of w * y of the kept, with y = (x - top) / T
    threshold, threshold_id, was_searched,
    HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, RAW: tl.constexpr, ENTROPY: tl.constexpr, ROW_STATS: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Store the results of a row."""
    undefined = bad | (tokens == 0)
    no_token = undefined | padding
    safe = tl.where(no_token, 0, winner).to(tl.int64)
    v = logits_at(x, safe, no_token == 0, column_stride, allowed, HAS_ALLOWED, UNIT)
    y = tl.where(v == top, 0.0, (v - top) / T) + 0.0  # a quotient ends in a product: `rounded_product` says why
    # Dividing a mass of 1 by powers of two and multiplying it again may change its last bit.
    log_mass = tl.where(kept == 1, 0.0, tl.log(kept_mass))
    logprob = y - log_mass
    logprob = tl.where(greedy | (logprob > 0.0), 0.0, logprob)
    log_kept = tl.where(greedy | (kept == tokens), 0.0, tl.minimum(tl.log(kept_mass / Z), 0.0))
    # What a trainer computes that knows nothing of the filters; it has none beside an infinity.
    s = tl.minimum(LOG2E / T, MAX_FLOAT)
    m = load_best(work, S, G, GP)
    others, others_top = total_of_others(
        x, safe.to(tl.int32), V, s, work, m, S, column_stride, allowed, HAS_ALLOWED, UNIT, G, GROUP, GP
    )
    whole = log_probability(others, others_top, v, s)
    exact_logprob, exact_log_kept = with_sum(logprob, log_kept, whole, kept == 1)
    plain = (greedy == 0) & (tl.abs(top * s) < LARGEST) & (whole > -float("inf"))
    logprob = tl.where(plain, exact_logprob, logprob)
    log_kept = tl.where(plain, exact_log_kept, log_kept)
    tl.store(longs + TOKEN * N + row, tl.where(no_token, invalid_token, safe))
    tl.store(longs + THRESHOLD_ID * N + row, tl.where(no_token, -1, threshold_id))
    tl.store(floats + LOGPROB * N + row, tl.where(padding, 0.0, tl.where(undefined, -float("inf"), logprob)))
    tl.store(floats + LOG_KEPT_MASS * N + row, tl.where(padding, 0.0, tl.where(undefined, -float("inf"), log_kept)))
    tl.store(floats + THRESHOLD * N + row, tl.where(padding, 0.0, tl.where(undefined, float("inf"), threshold)))
    status = nan * 2 + tl.where(bad, 0, (top == float("inf")).to(tl.int32) * 4)
    status += tl.where(bad, 8, (tokens == 0).to(tl.int32)) + tl.where(was_searched, 32, 0)
    tl.store(ints + KEPT * N + row, tl.where(no_token, 0, kept))
    tl.store(ints + STATUS * N + row, tl.where(padding, 0, status))
    if ENTROPY:
        e = tl.where(greedy, 0.0, log_mass - (moment / kept_mass + 0.0))
        e = tl.where(undefined, float("nan"), tl.maximum(e, 0.0))
        tl.store(floats + ENTROPY_ROW * N + row, tl.where(padding, 0.0, e))
    if ROW_STATS:
        tl.store(row_stats + row * 5, top)
        tl.store(row_stats + row * 5 + 1, T)
        tl.store(row_stats + row * 5 + 2, log_mass)
    if RAW:
        raw_m, raw_z = load_groups(raw_work, S, G, GP)
        raw_top, _, _, _, raw_Z, _ = merge_groups(
            raw_m, raw_z, raw_work, S, tiles_per_program, 1.0, False, G, GROUP, GP
        )
        r = tl.load(raw + row * raw_row_stride + safe * raw_column_stride).to(tl.float32)
        r = tl.where(r != r, -float("inf"), r)
        raw_s = tl.full((), LOG2E, tl.float32)
        of_others, its_top = total_of_others(
            raw + row * raw_row_stride, safe.to(tl.int32), V, raw_s, raw_work, raw_m, S, raw_column_stride, allowed,
            False, False, G, GROUP, GP,
        )  # fmt: skip
        exact_r = log_probability(of_others, its_top, r, raw_s)
        r = tl.where(r == raw_top, 0.0, r - raw_top) - tl.log(raw_Z)
        r = tl.where((tl.abs(raw_top * raw_s) < LARGEST) & (exact_r > -float("inf")), exact_r, r)
        tl.store(floats + RAW_LOGPROB * N + row, tl.where(padding, 0.0, tl.where(undefined, float("nan"), r)))
        if ROW_STATS:
            tl.store(row_stats + row * 5 + 3, raw_top)
            tl.store(row_stats + row * 5 + 4, tl.log(raw_Z))
