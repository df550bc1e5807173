"""Kernels of lm_head_sample@1: what a row keeps of a slab of logits, and the draw at the end.

`draw_slab` reads a slab of columns while it lies in the cache. Of every 64 tokens a row keeps the best logit, the sum
of exponentials, and the token that wins the race among them with its logit. `draw_row` joins them.

The race: with E = -ln(1 - u) the token with the least E exp(-logit / T) is the one whose y + g is largest. Times are
told to some 1e-5 of themselves, relative to the best logit of the 64; where two are nearer than that, E and the logits
decide in float64. A block of 2048 tokens where that is so, where a logit is not finite, or at temperature 0, is looked
at again with care. What is kept depends neither on slabs nor on blocks: groups of 64 begin at multiples of 64, and the
winner of winners is the same however a row is cut.

Legend: N rows · V vocabulary · S groups of V · P blocks of a row. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import cap
from rlkernel_triton.common.gumbel_noise import early, exponential, exponential_of, uniform, words_of
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.sample.results import request
from rlkernel_triton.sample.rows import LARGEST, MOST, floor_of, in_pairs, parameter, times
from rlkernel_triton.sample.rows import place_of as slot_of
from rlkernel_triton.sample.tile_stats import HELD_INFINITY, HELD_NAN

NEVER: tl.constexpr = tl.constexpr(-float("inf"))
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
GROUP: tl.constexpr = tl.constexpr(64)  # tokens whose sum is one
QUARTER: tl.constexpr = tl.constexpr(16)  # of a group, that are looked at together
GROUPS: tl.constexpr = tl.constexpr(32)  # of a program
BLOCK: tl.constexpr = tl.constexpr(2048)  # their tokens
MARK: tl.constexpr = tl.constexpr(63)  # the bits of a time that say whose it is
NEAR: tl.constexpr = tl.constexpr(256)  # in a time's last bits: above every rounding of two of them, and the mark
CLOSE: tl.constexpr = tl.constexpr(1.0 + 2.0**-13)  # the same of groups whose times are told relative to one logit
BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # comes after every time, and is none
# Of `groups` [N, S, 4] fp32: best logit, sum of exponentials, time and logit of the token that wins, whose place is in
# the last bits of the time. Of `raw_groups`, before the edits: best logit, sum, logit of that token. Of `blocks`
# [2, N, P] int32:
COUNT: tl.constexpr = tl.constexpr(0)  # tokens that can be drawn, and what `HELD_` say
LAST: tl.constexpr = tl.constexpr(1)  # the last token that can be drawn


@triton.jit
def logits_at(
    x, column, width, none, softcap, allowed, first, HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr
):  # fmt: skip
    """Logits of columns of a row of a slab, under cap and mask; `none` right of the slab. NaN stays."""
    v = tl.load(x + column, mask=column < width, other=none)
    if HAS_CAP:
        v = tl.where(column < width, cap(v, softcap), none)
    if HAS_ALLOWED:
        word = tl.load(allowed + ((first + column) >> 5), mask=column < width, other=-1)
        v = tl.where((((word >> ((first + column) & 31)) & 1) != 0) | (v != v), v, NEVER)
    return v


@triton.jit
def quarters(
    x, of_group, width, none, softcap, allowed, first, HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr
):  # fmt: skip
    """Logits of groups [GROUPS] in four parts [GROUPS, 16], so that a thread holds several of each group."""
    c = of_group[:, None] + tl.arange(0, QUARTER)[None, :]
    v0 = logits_at(x, c, width, none, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    v1 = logits_at(x, c + 16, width, none, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    v2 = logits_at(x, c + 32, width, none, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    v3 = logits_at(x, c + 48, width, none, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    return v0, v1, v2, v3


@triton.jit
def best_of(v0, v1, v2, v3):
    """[GROUPS] the best logit of each group."""
    return tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), 1)


@triton.jit
def summed(y0, y1, y2, y3):
    """[GROUPS] sums of 2 ** y, in one order."""
    return in_pairs((tl.exp2(y0) + tl.exp2(y1)) + (tl.exp2(y2) + tl.exp2(y3)))


@triton.jit
def from_best(v, best, s):
    """(v - best) * s, 0 where they are equal infinities."""
    return tl.where(v == best[:, None], 0.0, (v - best[:, None]) * s)


@triton.jit
def careful_sum(v0, v1, v2, v3, s):
    """(best, sum) of groups that may hold NaN and infinities; of others the bits of the sum without care."""
    v0 = tl.where(v0 != v0, NEVER, v0)
    v1 = tl.where(v1 != v1, NEVER, v1)
    v2 = tl.where(v2 != v2, NEVER, v2)
    v3 = tl.where(v3 != v3, NEVER, v3)
    best = best_of(v0, v1, v2, v3)
    total = summed(from_best(v0, best, s), from_best(v1, best, s), from_best(v2, best, s), from_best(v3, best, s))
    return best, tl.where(best > NEVER, total, 0.0)


@triton.jit
def keep(into, row, S, g, inside, column, a, b, c, d):
    """Store four numbers of groups g from where they are: a thread that holds columns 0 to 3 stores them."""
    values = tl.where(column == 0, a[:, None], tl.where(column == 1, b[:, None], c[:, None]))
    values = tl.where(column == 3, d[:, None], values)
    tl.store(into + (row * S + g)[:, None] * 4 + column, values, mask=inside[:, None] & (column < 4))


@triton.jit
def time_of(key):
    """The time in the high half of a key."""
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def key_of(e, v, s, near):
    """When a token arrives in the race, ln(E) - (v - near) / T in float64, so that no cut of a row decides a tie.

    near: any finite logit that is not far from the best ones.
    """
    v = tl.where(v == float("inf"), near, v)
    return tl.log(e.to(tl.float64)) - (v.to(tl.float64) - near.to(tl.float64)) * (s.to(tl.float64) * LN2)


@triton.jit
def finite(v):
    """v, or 0 for an infinity."""
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def logarithm(x, QUICK: tl.constexpr):
    """log2(x), to 3e-6 of itself where x is below 15 / 16. QUICK: on NVIDIA's by its instruction, not by a series."""
    if QUICK:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def arrivals(y, own, turn, block, column, noise_stream, QUICK: tl.constexpr):
    """[GROUPS, 16] times E * 2 ** -y as int32, with a token's column in the last bits. block: [GROUPS, 4]."""
    words = tl.reshape(words_of(own, turn, block, noise_stream), [GROUPS, QUARTER])
    near_one = -LN2 * logarithm(uniform(words ^ 0xFFFFFFFF), QUICK)
    e = tl.where(words < 0x10000000, early(uniform(words)), near_one)
    return ((e * tl.exp2(-y)).to(tl.int32, bitcast=True) & (-1 - MARK)) | column


@triton.jit
def marked(time, who):
    """A time with the place of its token in the last bits, as fp32."""
    return ((time.to(tl.int32, bitcast=True) & (-1 - MARK)) | who).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "first", "width", "piece", "N", "S", "P", "allowed_stride", "last_slot", "noise_stream", "seed", "step",
    ]
)  # fmt: skip
def draw_slab(
    slab,  # [N, width] fp32 logits, edited where EDITED
    raw,  # the same before the edits, read where EDITED
    allowed,  # [N, words] int32, read where HAS_ALLOWED
    slot,  # [N], read where HAS_SLOT
    temperature, seed, step,  # numbers, or tensors with one entry, or with one per row or slot
    groups,
    raw_groups,  # written where RAW
    blocks,
    first,  # id of the first column, a multiple of GROUP
    width,
    piece,  # of the row's blocks: the first of this slab
    N, S, P, softcap, allowed_stride, last_slot, noise_stream,
    HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr, EDITED: tl.constexpr, HAS_SLOT: tl.constexpr,
    RAW: tl.constexpr, T_EACH: tl.constexpr, SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr,
    WHOLE: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """A block of a row of a slab. WHOLE: width is a multiple of 16. QUICK: as in `logarithm`."""
    if WHOLE:
        width = width // 16 * 16  # so that the compiler knows
    parts = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    x, before, words = slab + row * width, slab + row * width, slab
    if EDITED:
        before = raw + row * width
    if HAS_ALLOWED:
        words = allowed + row * allowed_stride
    of_group = part * BLOCK + tl.arange(0, GROUPS) * GROUP
    v0, v1, v2, v3 = quarters(x, of_group, width, LOWEST, softcap, words, first, HAS_CAP, HAS_ALLOWED)
    place, _, _ = slot_of(row, slot, last_slot, HAS_SLOT)
    T = parameter(temperature, place, T_EACH).to(tl.float32)
    plain = (T > 0.0) & (T < float("inf"))
    s = tl.minimum(LOG2E / tl.where(plain, T, 1.0), LARGEST)
    own = parameter(seed, place, SEED_EACH).to(tl.int64)
    turn = parameter(step, place, STEP_EACH).to(tl.int64)
    best = best_of(v0, v1, v2, v3)
    y0, y1 = (v0 - best[:, None]) * s, (v1 - best[:, None]) * s
    y2, y3 = (v2 - best[:, None]) * s, (v3 - best[:, None]) * s
    total = summed(y0, y1, y2, y3)
    raw_best, raw_total = best, total
    if RAW and not (EDITED or HAS_ALLOWED):
        z0, z1 = (v0 - best[:, None]) * LOG2E, (v1 - best[:, None]) * LOG2E
        z2, z3 = (v2 - best[:, None]) * LOG2E, (v3 - best[:, None]) * LOG2E
        raw_total = summed(z0, z1, z2, z3)
    sound = tl.sum(((v0 + v1) + (v2 + v3)) * 0.0, 1)  # NaN beside NaN, infinities and the end of the slab
    block = ((first + of_group) >> 2)[:, None] + tl.arange(0, QUARTER // 4)[None, :]
    column = tl.arange(0, QUARTER)[None, :]
    k0 = arrivals(y0, own, turn, block, column, noise_stream, QUICK)
    k1 = arrivals(y1, own, turn, block + 4, column + 16, noise_stream, QUICK)
    k2 = arrivals(y2, own, turn, block + 8, column + 32, noise_stream, QUICK)
    k3 = arrivals(y3, own, turn, block + 12, column + 48, noise_stream, QUICK)
    key = tl.min(tl.minimum(tl.minimum(k0, k1), tl.minimum(k2, k3)), 1)
    limit = key[:, None] + NEAR
    near = ((k0 <= limit).to(tl.int32) + (k1 <= limit).to(tl.int32)) + (
        (k2 <= limit).to(tl.int32) + (k3 <= limit).to(tl.int32)
    )
    doubt = (of_group < width) & ((sound != sound) | (tl.sum(near, 1) != 1))
    who = key & MARK
    time = key.to(tl.float32, bitcast=True)
    some = tl.minimum(BLOCK, width - part * BLOCK)
    last = first + part * BLOCK + some - 1
    if (tl.max(doubt.to(tl.int32), 0) > 0) | (plain == 0) | (RAW and (EDITED or HAS_ALLOWED)):
        v0, v1, v2, v3 = quarters(x, of_group, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
        nan = ((v0 != v0) | (v1 != v1)) | ((v2 != v2) | (v3 != v3))
        best, total = careful_sum(v0, v1, v2, v3, s)
        if RAW:
            v0, v1, v2, v3 = quarters(before, of_group, width, NEVER, softcap, words, first, HAS_CAP, False)
            raw_best, raw_total = careful_sum(v0, v1, v2, v3, LOG2E)
        high = tl.max(best, 0)
        counted = tl.zeros([GROUPS], tl.int32)
        latest = counted - 1
        who = counted
        soonest = counted.to(tl.float64) + float("inf")
        for at in range(0, GROUP, QUARTER):
            c = of_group[:, None] + at + column
            w = logits_at(x, c, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
            w = tl.where(w != w, NEVER, w)
            can = w > floor_of(high)
            counted += tl.sum(can.to(tl.int32), 1)
            latest = tl.maximum(latest, tl.max(tl.where(can, first + c, -1), 1))
            each = exponential(tl.reshape(words_of(own, turn, block + (at >> 2), noise_stream), [GROUPS, QUARTER]))
            told = key_of(each, w, s, finite(best)[:, None])
            told = tl.where(w > floor_of(best)[:, None], told, float("inf"))
            told = tl.where(plain, told, tl.where(w == best[:, None], 0.0, 1.0).to(tl.float64))
            here = tl.min(told, 1)
            of_it = tl.min(tl.where(told == here[:, None], column + at, MARK), 1)
            who = tl.where(here < soonest, of_it, who)
            soonest = tl.minimum(soonest, here)
        some = tl.sum(counted, 0) + tl.where(high == float("inf"), HELD_INFINITY, 0)
        some += tl.max(tl.max(nan.to(tl.int32), 1), 0) * HELD_NAN
        last = tl.max(latest, 0)
        of_who = logits_at(x, of_group + who, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
        behind = tl.where(of_who == best, 0.0, (best - of_who) * s)
        time = marked(exponential_of(own, turn, first + of_group + who, noise_stream) * tl.exp2(behind), who)
    g = (first + of_group) // GROUP
    inside = of_group < width
    of_who = logits_at(x, of_group + who, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
    keep(groups, row, S, g, inside, column, best, total, time, of_who)
    if RAW:
        of_raw = logits_at(before, of_group + who, width, NEVER, softcap, words, first, HAS_CAP, False)
        keep(raw_groups, row, S, g, inside, column, raw_best, raw_total, of_raw, of_raw)
    into = blocks + row * P + piece + part
    tl.store(into + COUNT * N.to(tl.int64) * P, some)
    tl.store(into + LAST * N.to(tl.int64) * P, last)


@triton.jit
def less(a, b):
    """a - b, where equal infinities differ by 0."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit(do_not_specialize=["N", "S", "P", "invalid_token", "last_slot", "noise_stream", "seed", "step"])
def draw_row(
    groups, raw_groups, blocks, spoiled, slot, temperature, seed, step, longs, ints, floats, N, S, P,
    invalid_token, last_slot, noise_stream, HAS_SPOILED: tl.constexpr, HAS_SLOT: tl.constexpr, RAW: tl.constexpr,
    T_EACH: tl.constexpr, SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr, SP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """One row: its groups and blocks joined. spoiled: 1 the logits held NaN, 2 a parameter has no meaning."""
    row = tl.program_id(0).to(tl.int64)
    place, padding, bad, hot, T, nan = request(
        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
    )  # fmt: skip
    own = parameter(seed, place, SEED_EACH).to(tl.int64)
    turn = parameter(step, place, STEP_EACH).to(tl.int64)
    t = tl.arange(0, SP)
    of = groups + row * S * 4
    m = tl.load(of + t * 4, mask=t < S, other=NEVER)
    total = tl.load(of + t * 4 + 1, mask=t < S, other=0.0)
    time = tl.load(of + t * 4 + 2, mask=t < S, other=0.0)
    p = tl.arange(0, PP)
    into = blocks + row * P + p
    n = tl.load(into + COUNT * N.to(tl.int64) * P, mask=p < P, other=0)
    top = tl.max(m, 0)
    live = (t < S) & (m > floor_of(top))
    mass = tl.sum(tl.where(live, times(total, tl.exp(less(m, top) / T)), 0.0), 0)
    can = (p < P) & (((n & HELD_INFINITY) != 0) == (top == float("inf")))
    tokens = tl.sum(tl.where(can, n & (HELD_INFINITY - 1), 0), 0)
    nan = tl.maximum(nan, tl.max(((n & HELD_NAN) != 0).to(tl.int32), 0))
    # Groups whose times are near the first: nearly always one.
    s = tl.minimum(LOG2E / T, LARGEST)
    time = tl.where(hot, t.to(tl.float32), time * tl.exp2(less(top, m) * s))
    able = live & ((hot == 0) | (m == top))
    packed = tl.where(able, (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | t, BEYOND)
    soonest = tl.min(packed, 0)
    limit = time_of(soonest) * tl.where(hot, 1.0, CLOSE)
    least = tl.full((), float("inf"), tl.float64)
    token = tl.full((), MOST, tl.int32)
    group = row * 0
    drawn_x = tl.full((), 0.0, tl.float32)
    while time_of(soonest) <= limit:
        g = soonest & MOST
        x = tl.load(of + g * 4 + 3)
        ids = g.to(tl.int32) * GROUP + (tl.load(of + g * 4 + 2).to(tl.int32, bitcast=True) & MARK)
        key = key_of(exponential_of(own, turn, ids, noise_stream), x, s, finite(top))
        if (key < least) | ((key == least) & (ids < token)):
            least, token, group, drawn_x = key, ids, g, x
        packed = tl.where(packed == soonest, BEYOND, packed)
        soonest = tl.min(packed, 0)
    lp = tl.where(hot, 0.0, less(drawn_x, top) / T + 0.0 - tl.log(mass))  # as in sampling.results
    last = tl.max(tl.where(can, tl.load(into + LAST * N.to(tl.int64) * P, mask=p < P, other=-1), -1), 0)
    infinite = top == float("inf")
    cut = infinite | (hot & (tokens > 1))
    none = bad | (tokens == 0)
    dead = none | padding
    kept = tl.where(hot, tl.minimum(tokens, 1), tokens)
    status = nan * 2 + tl.where(bad, 8, infinite.to(tl.int32) * 4 + (tokens == 0).to(tl.int32))
    tl.store(longs + row, tl.where(dead, invalid_token, token).to(tl.int64))
    tl.store(longs + N + row, tl.where(dead | (cut == 0), -1, tl.where(hot, token, last)).to(tl.int64))
    tl.store(ints + row, tl.where(dead, 0, kept))
    tl.store(ints + N + row, tl.where(padding, 0, status))
    tl.store(floats + row, tl.where(padding, 0.0, tl.where(none, NEVER, lp)))
    tl.store(floats + N + row, tl.where(padding, 0.0, tl.where(none, NEVER, 0.0)))
    threshold = tl.where(none, float("inf"), tl.where(cut, top, NEVER))
    tl.store(floats + 2 * N + row, tl.where(padding, 0.0, threshold))
    if RAW:
        of_raw = raw_groups + row * S * 4
        raw_x = tl.load(of_raw + group * 4 + 2)
        raw_m = tl.load(of_raw + t * 4, mask=t < S, other=NEVER)
        raw_top = tl.max(raw_m, 0)
        raw_z = tl.load(of_raw + t * 4 + 1, mask=t < S, other=0.0)
        raw_mass = tl.sum(tl.where(raw_m > NEVER, times(raw_z, tl.exp(less(raw_m, raw_top))), 0.0), 0)
        raw_lp = less(raw_x, raw_top) - tl.log(raw_mass)
        tl.store(floats + 3 * N + row, tl.where(padding, 0.0, tl.where(none, float("nan"), raw_lp)))
