"""Kernels of lm_head_sample@1: slabs of logits, what a row keeps of a slab, and the draw at the end.

`head_logits` writes a slab of columns, from pointers anywhere, and `head_logits_tma` through Hopper's copy engine: both
give a row the same bits, in tiles of any of the shapes of `common.matmul_tiles`, as each sum has one order.
`slab_stats` reads the slab while it lies in the cache. Of every 64 tokens a row keeps the best logit, the sum of
exponentials, and the token with the largest y + g with its logit. `sample_row` merges them.

Gumbel maximum as an exponential race (common.gumbel_noise): with E = -ln(1 - u) the token with the least time
E exp(-logit / T) is the one whose y + g is largest. Times are known to some 1e-5 of themselves, relative to the best
logit of the 64; where two are nearer than that, E and the logits decide in float64. A block of 2048 tokens where that
is so, where a logit is not finite, or at temperature 0, is read again and decided exactly. What is kept depends neither
on slabs nor on blocks: groups of 64 begin at multiples of 64, and the winner of winners is the same however a row is
cut.

Bytes: the head once, V D s, and hidden states once a slab; logits stay in the cache; 16 bytes are kept of 64 tokens.

Legend: N rows · D hidden · V vocabulary · S groups of V · P blocks of a row · width columns of a slab. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LN2, LOG2E, cap, tree_sum
from rlkernel_triton.common.gumbel_noise import exponential, exponential_bound, exponential_noise, philox_words, uniform
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.linear_tile import add_low_rank, tile_logits, tile_swizzle
from rlkernel_triton.common.sampling_rows import (
    HELD_INFINITY,
    HELD_NAN,
    MAX_FLOAT,
    MAX_INT32,
    draw_floor,
    parameter,
    rounded_product,
    row_request,
    slot_of,
)

NEVER: tl.constexpr = tl.constexpr(-float("inf"))
MIN_FLOAT: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
GROUP: tl.constexpr = tl.constexpr(64)  # tokens whose sum is one
QUARTER: tl.constexpr = tl.constexpr(16)  # of a group, that are looked at together
GROUPS: tl.constexpr = tl.constexpr(32)  # of a program
BLOCK: tl.constexpr = tl.constexpr(2048)  # their tokens
MARK: tl.constexpr = tl.constexpr(63)  # the bits of a time that say whose it is
NEAR: tl.constexpr = tl.constexpr(256)  # in a time's last bits: above every rounding of two of them, and the mark
CLOSE: tl.constexpr = tl.constexpr(1.0 + 2.0**-13)  # the same of groups, whose times are relative to one logit
BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # comes after every time, and is none
# Of `groups` [N, S, 4] fp32: best logit, sum of exponentials, time and logit of the token that wins, whose place is in
# the last bits of the time. Of `raw_groups`, before the edits: best logit, sum, logit of that token. Of `blocks`
# [2, N, P] int32:
COUNT: tl.constexpr = tl.constexpr(0)  # tokens that can be drawn, and what `HELD_` say
LAST: tl.constexpr = tl.constexpr(1)  # the last token that can be drawn


@triton.jit(do_not_specialize=["n"])
def head_logits(
    x,  # [n, D] hidden states, D contiguous
    weight,  # [width, D] rows of the head
    bias,  # [width], read where HAS_BIAS
    inner,  # [n, r] fp32 scale times hidden @ A.T, read where HAS_LORA
    factor,  # [width, r] B of LoRA, read where HAS_LORA
    out,  # [n, width] fp32
    n, D, width, rank, x_stride, head_stride, head_step, factor_stride, factor_step, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, HAS_CAP: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of logits."""
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), GROUP)
    r = block * BM + tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    inside = r < n
    y = tile_logits(
        x, weight, bias, inner, factor, r, inside, column, 0, D, width, rank, x_stride, head_stride, head_step,
        factor_stride, factor_step, scale, HAS_BIAS, HAS_LORA, OPERAND, BM, BN, BK,
    )  # fmt: skip
    if HAS_CAP:
        y = cap(y, softcap)
    at = r.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + at, y, mask=inside[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["n", "first"])
def head_logits_tma(
    x,  # descriptor of hidden states [n, D], blocks [BM, BK]
    weight,  # descriptor of the head [V, D], blocks [BN, BK]
    bias,  # [V], read where HAS_BIAS
    inner,  # [n, r] fp32 scale times hidden @ A.T, read where HAS_LORA
    factor,  # [V, r] B of LoRA, read where HAS_LORA
    out,  # [n, width] fp32
    n, D, first, width, rank, factor_stride, factor_step, scale,
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The same of columns first .. first + width, with operands that the copy engine brings: zeros outside of them."""
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), GROUP)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D, BK):
        acc = tl.dot(x.load([block * BM, start]), weight.load([first + tile * BN, start]).T, acc)
    r = block * BM + tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    there = column < width
    if HAS_LORA:
        acc = add_low_rank(
            acc, inner, factor, r, r < n, first + column, there, rank, factor_stride, factor_step, tl.bfloat16
        )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + first + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = r.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + at, acc * scale, mask=(r < n)[:, None] & there[None, :])


@triton.jit
def slab_logits(
    x, column, width, undefined, softcap, allowed, first, HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr
):  # fmt: skip
    """Logits of columns of a row of a slab, under cap and mask; `undefined` right of the slab. NaN stays."""
    v = tl.load(x + column, mask=column < width, other=undefined)
    if HAS_CAP:
        v = tl.where(column < width, cap(v, softcap), undefined)
    if HAS_ALLOWED:
        word = tl.load(allowed + ((first + column) >> 5), mask=column < width, other=-1)
        v = tl.where((((word >> ((first + column) & 31)) & 1) != 0) | (v != v), v, NEVER)
    return v


@triton.jit
def load_quarters(
    x, of_group, width, undefined, softcap, allowed, first, HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr
):  # fmt: skip
    """Logits of groups [GROUPS] in four parts [GROUPS, 16], so that a thread holds several of each group."""
    c = of_group[:, None] + tl.arange(0, QUARTER)[None, :]
    v0 = slab_logits(x, c, width, undefined, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    v1 = slab_logits(x, c + 16, width, undefined, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    v2 = slab_logits(x, c + 32, width, undefined, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    v3 = slab_logits(x, c + 48, width, undefined, softcap, allowed, first, HAS_CAP, HAS_ALLOWED)
    return v0, v1, v2, v3


@triton.jit
def best_of(v0, v1, v2, v3):
    """[GROUPS] the best logit of each group."""
    return tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), 1)


@triton.jit
def group_sums(y0, y1, y2, y3):
    """[GROUPS] sums of 2 ** y, in one order."""
    return tree_sum((tl.exp2(y0) + tl.exp2(y1)) + (tl.exp2(y2) + tl.exp2(y3)))


@triton.jit
def from_best(v, best, s):
    """(v - best) * s, 0 where they are equal infinities."""
    return tl.where(v == best[:, None], 0.0, (v - best[:, None]) * s)


@triton.jit
def sums_of_any(v0, v1, v2, v3, s):
    """(best, sum) of groups that may hold NaN and infinities; of others the bits of the sum without care."""
    v0 = tl.where(v0 != v0, NEVER, v0)
    v1 = tl.where(v1 != v1, NEVER, v1)
    v2 = tl.where(v2 != v2, NEVER, v2)
    v3 = tl.where(v3 != v3, NEVER, v3)
    best = best_of(v0, v1, v2, v3)
    total = group_sums(from_best(v0, best, s), from_best(v1, best, s), from_best(v2, best, s), from_best(v3, best, s))
    return best, tl.where(best > NEVER, total, 0.0)


@triton.jit
def store_groups(into, row, S, g, inside, column, a, b, c, d):
    """Store four numbers of groups g from where they are: a thread that holds columns 0 to 3 stores them."""
    values = tl.where(column == 0, a[:, None], tl.where(column == 1, b[:, None], c[:, None]))
    values = tl.where(column == 3, d[:, None], values)
    tl.store(into + (row * S + g)[:, None] * 4 + column, values, mask=inside[:, None] & (column < 4))


@triton.jit
def key_time(key):
    """The time in the high half of a key."""
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def time_key(e, v, s, near):
    """The logarithm of a token's time, ln(E) - (v - near) / T in float64, so that no cut of a row decides a tie.

    near: any finite logit that is not far from the best ones.
    """
    v = tl.where(v == float("inf"), near, v)
    return tl.log(e.to(tl.float64)) - (v.to(tl.float64) - near.to(tl.float64)) * (s.to(tl.float64) * LN2)


@triton.jit
def finite_or_zero(v):
    """v, or 0 for an infinity."""
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def log2(x, APPROX_LOG2: tl.constexpr):
    """Log to base 2, to 3e-6 of itself where x is below 15 / 16. APPROX_LOG2: by NVIDIA's instruction, not a series."""
    if APPROX_LOG2:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def arrival_times(y, noise_seed, noise_step, block, column, noise_stream, APPROX_LOG2: tl.constexpr):
    """[GROUPS, 16] times E * 2 ** -y as int32, with a token's column in the last bits. block: [GROUPS, 4]."""
    words = tl.reshape(philox_words(noise_seed, noise_step, block, noise_stream), [GROUPS, QUARTER])
    near_one = -LN2 * log2(uniform(words ^ 0xFFFFFFFF), APPROX_LOG2)
    e = tl.where(words < 0x10000000, exponential_bound(uniform(words)), near_one)
    return ((e * tl.exp2(-y)).to(tl.int32, bitcast=True) & (-1 - MARK)) | column


@triton.jit
def with_winner(time, who):
    """A time with the place of its token in the last bits, as fp32."""
    return ((time.to(tl.int32, bitcast=True) & (-1 - MARK)) | who).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "first", "width", "first_block", "N", "S", "P", "allowed_stride", "last_slot", "noise_stream", "seed", "step",
    ]
)  # fmt: skip
def slab_stats(
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
    first_block,  # of the row's blocks: the first of this slab
    N, S, P, softcap, allowed_stride, last_slot, noise_stream,
    HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr, EDITED: tl.constexpr, HAS_SLOT: tl.constexpr,
    RAW: tl.constexpr, T_EACH: tl.constexpr, SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr,
    WHOLE: tl.constexpr, APPROX_LOG2: tl.constexpr,
):  # fmt: skip
    """A block of a row of a slab. WHOLE: width is a multiple of 16. APPROX_LOG2: as in `log2`."""
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
    v0, v1, v2, v3 = load_quarters(x, of_group, width, MIN_FLOAT, softcap, words, first, HAS_CAP, HAS_ALLOWED)
    entry, _, _ = slot_of(row, slot, last_slot, HAS_SLOT)
    T = parameter(temperature, entry, T_EACH).to(tl.float32)
    plain = (T > 0.0) & (T < float("inf"))
    s = tl.minimum(LOG2E / tl.where(plain, T, 1.0), MAX_FLOAT)
    noise_seed = parameter(seed, entry, SEED_EACH).to(tl.int64)
    noise_step = parameter(step, entry, STEP_EACH).to(tl.int64)
    best = best_of(v0, v1, v2, v3)
    y0, y1 = (v0 - best[:, None]) * s, (v1 - best[:, None]) * s
    y2, y3 = (v2 - best[:, None]) * s, (v3 - best[:, None]) * s
    total = group_sums(y0, y1, y2, y3)
    raw_best, raw_total = best, total
    if RAW and not (EDITED or HAS_ALLOWED):
        z0, z1 = (v0 - best[:, None]) * LOG2E, (v1 - best[:, None]) * LOG2E
        z2, z3 = (v2 - best[:, None]) * LOG2E, (v3 - best[:, None]) * LOG2E
        raw_total = group_sums(z0, z1, z2, z3)
    sound = tl.sum(((v0 + v1) + (v2 + v3)) * 0.0, 1)  # NaN beside NaN, infinities and the end of the slab
    block = ((first + of_group) >> 2)[:, None] + tl.arange(0, QUARTER // 4)[None, :]
    column = tl.arange(0, QUARTER)[None, :]
    k0 = arrival_times(y0, noise_seed, noise_step, block, column, noise_stream, APPROX_LOG2)
    k1 = arrival_times(y1, noise_seed, noise_step, block + 4, column + 16, noise_stream, APPROX_LOG2)
    k2 = arrival_times(y2, noise_seed, noise_step, block + 8, column + 32, noise_stream, APPROX_LOG2)
    k3 = arrival_times(y3, noise_seed, noise_step, block + 12, column + 48, noise_stream, APPROX_LOG2)
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
        v0, v1, v2, v3 = load_quarters(x, of_group, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
        nan = ((v0 != v0) | (v1 != v1)) | ((v2 != v2) | (v3 != v3))
        best, total = sums_of_any(v0, v1, v2, v3, s)
        if RAW:
            v0, v1, v2, v3 = load_quarters(before, of_group, width, NEVER, softcap, words, first, HAS_CAP, False)
            raw_best, raw_total = sums_of_any(v0, v1, v2, v3, LOG2E)
        high = tl.max(best, 0)
        counted = tl.zeros([GROUPS], tl.int32)
        latest = counted - 1
        who = counted
        soonest = counted.to(tl.float64) + float("inf")
        for at in range(0, GROUP, QUARTER):
            c = of_group[:, None] + at + column
            w = slab_logits(x, c, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
            w = tl.where(w != w, NEVER, w)
            can = w > draw_floor(high)
            counted += tl.sum(can.to(tl.int32), 1)
            latest = tl.maximum(latest, tl.max(tl.where(can, first + c, -1), 1))
            each = exponential(
                tl.reshape(philox_words(noise_seed, noise_step, block + (at >> 2), noise_stream), [GROUPS, QUARTER])
            )
            times = time_key(each, w, s, finite_or_zero(best)[:, None])
            times = tl.where(w > draw_floor(best)[:, None], times, float("inf"))
            times = tl.where(plain, times, tl.where(w == best[:, None], 0.0, 1.0).to(tl.float64))
            here = tl.min(times, 1)
            of_it = tl.min(tl.where(times == here[:, None], column + at, MARK), 1)
            who = tl.where(here < soonest, of_it, who)
            soonest = tl.minimum(soonest, here)
        some = tl.sum(counted, 0) + tl.where(high == float("inf"), HELD_INFINITY, 0)
        some += tl.max(tl.max(nan.to(tl.int32), 1), 0) * HELD_NAN
        last = tl.max(latest, 0)
        of_who = slab_logits(x, of_group + who, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
        behind = tl.where(of_who == best, 0.0, (best - of_who) * s)
        time = with_winner(
            exponential_noise(noise_seed, noise_step, first + of_group + who, noise_stream) * tl.exp2(behind), who
        )
    g = (first + of_group) // GROUP
    inside = of_group < width
    of_who = slab_logits(x, of_group + who, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
    store_groups(groups, row, S, g, inside, column, best, total, time, of_who)
    if RAW:
        of_raw = slab_logits(before, of_group + who, width, NEVER, softcap, words, first, HAS_CAP, False)
        store_groups(raw_groups, row, S, g, inside, column, raw_best, raw_total, of_raw, of_raw)
    into = blocks + row * P + first_block + part
    tl.store(into + COUNT * N.to(tl.int64) * P, some)
    tl.store(into + LAST * N.to(tl.int64) * P, last)


@triton.jit
def difference(a, b):
    """a - b, where equal infinities differ by 0."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit(do_not_specialize=["N", "S", "P", "invalid_token", "last_slot", "noise_stream", "seed", "step"])
def sample_row(
    groups, raw_groups, blocks, spoiled, slot, temperature, seed, step, longs, ints, floats, N, S, P, invalid_token,
    last_slot, noise_stream, HAS_SPOILED: tl.constexpr, HAS_SLOT: tl.constexpr, RAW: tl.constexpr, T_EACH: tl.constexpr,
    SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr, S_PADDED: tl.constexpr, P_PADDED: tl.constexpr,
):  # fmt: skip
    """One row: its groups and blocks merged. spoiled: 1 the logits held NaN, 2 a parameter has no meaning."""
    row = tl.program_id(0).to(tl.int64)
    entry, padding, bad, greedy, T, nan = row_request(
        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
    )  # fmt: skip
    noise_seed = parameter(seed, entry, SEED_EACH).to(tl.int64)
    noise_step = parameter(step, entry, STEP_EACH).to(tl.int64)
    t = tl.arange(0, S_PADDED)
    of = groups + row * S * 4
    m = tl.load(of + t * 4, mask=t < S, other=NEVER)
    total = tl.load(of + t * 4 + 1, mask=t < S, other=0.0)
    time = tl.load(of + t * 4 + 2, mask=t < S, other=0.0)
    p = tl.arange(0, P_PADDED)
    into = blocks + row * P + p
    n = tl.load(into + COUNT * N.to(tl.int64) * P, mask=p < P, other=0)
    top = tl.max(m, 0)
    live = (t < S) & (m > draw_floor(top))
    mass = tl.sum(tl.where(live, rounded_product(total, tl.exp(difference(m, top) / T)), 0.0), 0)
    can = (p < P) & (((n & HELD_INFINITY) != 0) == (top == float("inf")))
    tokens = tl.sum(tl.where(can, n & (HELD_INFINITY - 1), 0), 0)
    nan = tl.maximum(nan, tl.max(((n & HELD_NAN) != 0).to(tl.int32), 0))
    # Groups whose times are near the first: nearly always one.
    s = tl.minimum(LOG2E / T, MAX_FLOAT)
    time = tl.where(greedy, t.to(tl.float32), time * tl.exp2(difference(top, m) * s))
    able = live & ((greedy == 0) | (m == top))
    packed = tl.where(able, (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | t, BEYOND)
    soonest = tl.min(packed, 0)
    limit = key_time(soonest) * tl.where(greedy, 1.0, CLOSE)
    least = tl.full((), float("inf"), tl.float64)
    token = tl.full((), MAX_INT32, tl.int32)
    group = row * 0
    drawn_x = tl.full((), 0.0, tl.float32)
    while key_time(soonest) <= limit:
        g = soonest & MAX_INT32
        x = tl.load(of + g * 4 + 3)
        ids = g.to(tl.int32) * GROUP + (tl.load(of + g * 4 + 2).to(tl.int32, bitcast=True) & MARK)
        key = time_key(exponential_noise(noise_seed, noise_step, ids, noise_stream), x, s, finite_or_zero(top))
        if (key < least) | ((key == least) & (ids < token)):
            least, token, group, drawn_x = key, ids, g, x
        packed = tl.where(packed == soonest, BEYOND, packed)
        soonest = tl.min(packed, 0)
    logprob = tl.where(greedy, 0.0, difference(drawn_x, top) / T + 0.0 - tl.log(mass))  # as in sample.results
    last = tl.max(tl.where(can, tl.load(into + LAST * N.to(tl.int64) * P, mask=p < P, other=-1), -1), 0)
    infinite = top == float("inf")
    cut = infinite | (greedy & (tokens > 1))
    undefined = bad | (tokens == 0)
    no_token = undefined | padding
    kept = tl.where(greedy, tl.minimum(tokens, 1), tokens)
    status = nan * 2 + tl.where(bad, 8, infinite.to(tl.int32) * 4 + (tokens == 0).to(tl.int32))
    tl.store(longs + row, tl.where(no_token, invalid_token, token).to(tl.int64))
    tl.store(longs + N + row, tl.where(no_token | (cut == 0), -1, tl.where(greedy, token, last)).to(tl.int64))
    tl.store(ints + row, tl.where(no_token, 0, kept))
    tl.store(ints + N + row, tl.where(padding, 0, status))
    tl.store(floats + row, tl.where(padding, 0.0, tl.where(undefined, NEVER, logprob)))
    tl.store(floats + N + row, tl.where(padding, 0.0, tl.where(undefined, NEVER, 0.0)))
    threshold = tl.where(undefined, float("inf"), tl.where(cut, top, NEVER))
    tl.store(floats + 2 * N + row, tl.where(padding, 0.0, threshold))
    if RAW:
        of_raw = raw_groups + row * S * 4
        raw_x = tl.load(of_raw + group * 4 + 2)
        raw_m = tl.load(of_raw + t * 4, mask=t < S, other=NEVER)
        raw_top = tl.max(raw_m, 0)
        raw_z = tl.load(of_raw + t * 4 + 1, mask=t < S, other=0.0)
        raw_mass = tl.sum(tl.where(raw_m > NEVER, rounded_product(raw_z, tl.exp(difference(raw_m, raw_top))), 0.0), 0)
        raw_lp = difference(raw_x, raw_top) - tl.log(raw_mass)
        tl.store(floats + 3 * N + row, tl.where(padding, 0.0, tl.where(undefined, float("nan"), raw_lp)))
