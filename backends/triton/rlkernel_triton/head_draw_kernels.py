"""Kernels of lm_head_sample@1: what a row keeps of a slab of logits, and the draw at the end.

`draw_slab` reads a slab of columns while it lies in the cache. A row keeps the best logit and the sum of exponentials
of every 64 tokens, and of every piece of a slab the token that wins the race in it and a count. `draw_row` joins them.

The race: with E = -ln(1 - u) the token with the least ln(E) - logit / T is the one whose y + g is largest. A bound
below every E finds the 64 tokens where it is; among them E itself decides, in float64. Where another one comes near,
where a logit is not finite, or at temperature 0, a piece is looked at again with care. What is kept depends neither on
slabs nor on pieces: groups of 64 begin at multiples of 64, and the winner of winners is the same however a row is cut.

Legend: N rows · V vocabulary · S groups of V · P pieces of a row. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.arithmetic import cap
from rlkernel_triton.sampling.noise import early, exponential, uniform, words_of
from rlkernel_triton.sampling.results import request
from rlkernel_triton.sampling.rows import LARGEST, floor_of, in_pairs, parameter, times
from rlkernel_triton.sampling.rows import place_of as slot_of

NEVER: tl.constexpr = tl.constexpr(-float("inf"))
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
GROUP: tl.constexpr = tl.constexpr(64)  # tokens whose sum is one
GROUPS: tl.constexpr = tl.constexpr(32)  # that are looked at together
BLOCK: tl.constexpr = tl.constexpr(2048)  # their tokens
CHUNK: tl.constexpr = tl.constexpr(512)  # tokens that are looked at together where care is needed
# Planes of `floats` [5, N, P], the last two where the raw law is asked for, and of `ints` [4, N, P].
TOP: tl.constexpr = tl.constexpr(0)  # best logit of the piece; any of them where all are finite and T > 0
DRAWN_X: tl.constexpr = tl.constexpr(1)  # logit and E of the token that wins the race
DRAWN_E: tl.constexpr = tl.constexpr(2)
DRAWN_RAW: tl.constexpr = tl.constexpr(3)  # its logit before the edits
BEST_RAW: tl.constexpr = tl.constexpr(4)
BEST: tl.constexpr = tl.constexpr(0)
DRAWN: tl.constexpr = tl.constexpr(1)
LAST: tl.constexpr = tl.constexpr(2)  # the last token that can be drawn
COUNT: tl.constexpr = tl.constexpr(3)  # tokens that can be drawn; -1 - count where the logits hold NaN


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
    c = of_group[:, None] + tl.arange(0, GROUP // 4)[None, :]
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
def keep(pairs, row, S, first, of_group, width, best, total):
    """Store (best, sum) of groups."""
    side = tl.arange(0, 2)[None, :]
    at = (row * S + (first + of_group) // GROUP)[:, None] * 2 + side
    tl.store(pairs + at, tl.join(best, total), mask=(of_group < width)[:, None] & (side < 2))


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
def number_at(v, ids, at):
    """The value of one id, by its bits."""
    return tl.sum(tl.where(ids == at, v.to(tl.int32, bitcast=True), 0)).to(tl.float32, bitcast=True)


@triton.jit
def earliest(y, own, turn, block, noise_stream):
    """[GROUPS, 16] bounds from below of E * 2 ** -y. block: [GROUPS, 4], of four ids each."""
    u = uniform(tl.reshape(words_of(own, turn, block, noise_stream), [GROUPS, GROUP // 4]))
    return early(u) * tl.exp2(-y)


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
    pairs,  # [N, S, 2] best and sum of every group
    raw_pairs,  # the same of the raw law, written where RAW
    floats, ints,
    first,  # id of the first column, a multiple of GROUP
    width,
    piece,  # of the row: the first of this slab
    N, S, P, softcap, allowed_stride, last_slot, noise_stream,
    HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr, EDITED: tl.constexpr, HAS_SLOT: tl.constexpr,
    RAW: tl.constexpr, T_EACH: tl.constexpr, SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr,
    WHOLE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pieces of BLOCKS blocks of a row, by programs that go on to the next. WHOLE: width is a multiple of 16."""
    if WHOLE:
        width = width // 16 * 16  # so that the compiler knows
    pieces = tl.cdiv(width, BLOCKS * BLOCK)
    for work in range(tl.program_id(0), N * pieces, tl.num_programs(0)):
        row = (work // pieces).to(tl.int64)
        part = work % pieces
        x, before, words = slab + row * width, slab + row * width, slab
        if EDITED:
            before = raw + row * width
        if HAS_ALLOWED:
            words = allowed + row * allowed_stride
        place, _, _ = slot_of(row, slot, last_slot, HAS_SLOT)
        T = parameter(temperature, place, T_EACH).to(tl.float32)
        plain = (T > 0.0) & (T < float("inf"))
        s = tl.minimum(LOG2E / tl.where(plain, T, 1.0), LARGEST)
        own = parameter(seed, place, SEED_EACH).to(tl.int64)
        turn = parameter(step, place, STEP_EACH).to(tl.int64)
        begin = part * (BLOCKS * BLOCK)
        end = tl.minimum(begin + BLOCKS * BLOCK, width)
        start = tl.load(x + begin)  # times are told relative to it
        held = tl.zeros([GROUPS], tl.float32) + float("inf")  # the earliest time of all blocks, in each of their groups
        second = held
        holder = tl.zeros([GROUPS], tl.int32)
        odd = tl.zeros([GROUPS], tl.float32)
        for at in range(begin, end, BLOCK):
            of_group = at + tl.arange(0, GROUPS) * GROUP
            v0, v1, v2, v3 = quarters(x, of_group, width, LOWEST, softcap, words, first, HAS_CAP, HAS_ALLOWED)
            best = best_of(v0, v1, v2, v3)
            y0, y1 = (v0 - best[:, None]) * s, (v1 - best[:, None]) * s
            y2, y3 = (v2 - best[:, None]) * s, (v3 - best[:, None]) * s
            keep(pairs, row, S, first, of_group, width, best, summed(y0, y1, y2, y3))
            if RAW and not (EDITED or HAS_ALLOWED):
                z0, z1 = (v0 - best[:, None]) * LOG2E, (v1 - best[:, None]) * LOG2E
                z2, z3 = (v2 - best[:, None]) * LOG2E, (v3 - best[:, None]) * LOG2E
                keep(raw_pairs, row, S, first, of_group, width, best, summed(z0, z1, z2, z3))
            sound = tl.sum(((v0 + v1) + (v2 + v3)) * 0.0, 1)  # NaN beside NaN, infinities and the end of the slab
            odd += tl.where(of_group < width, sound, 0.0)
            block = ((first + of_group) >> 2)[:, None] + tl.arange(0, GROUP // 16)[None, :]
            t01 = tl.minimum(
                earliest(y0, own, turn, block, noise_stream), earliest(y1, own, turn, block + 4, noise_stream)
            )
            t23 = tl.minimum(
                earliest(y2, own, turn, block + 8, noise_stream), earliest(y3, own, turn, block + 12, noise_stream)
            )
            time = tl.log2(tl.min(tl.minimum(t01, t23), 1)) - (best - start) * s
            time = tl.where(of_group < width, time, float("inf"))
            sooner = time < held
            second = tl.minimum(second, tl.where(sooner, held, time))
            holder = tl.where(sooner, of_group, holder)
            held = tl.where(sooner, time, held)
        # The tokens of the group that may hold the winner, by E itself. Then nothing else may come near.
        soonest = tl.min(held)
        of_one = tl.max(tl.where(held == soonest, holder, 0))
        ids = first + of_one + tl.arange(0, GROUP)
        v = logits_at(x, ids - first, width, LOWEST, softcap, words, first, HAS_CAP, HAS_ALLOWED)
        blocks = ((first + of_one) >> 2) + tl.arange(0, GROUP // 4)
        e = exponential(tl.reshape(words_of(own, turn, blocks, noise_stream), [GROUP]))
        key = tl.where(ids < first + width, key_of(e, v, s, start), float("inf"))
        least = tl.min(key)
        drawn = tl.min(tl.where(key == least, ids, NO_ID))
        drawn_x, drawn_e = number_at(v, ids, drawn), number_at(e, ids, drawn)
        raw_x, best_raw = drawn_x, drawn_x
        bound = (least * (1.0 / LN2)).to(tl.float32)
        bound += 3e-4 + (tl.abs(bound) + tl.abs(soonest)) * 1e-6  # above every rounding of a time
        near = tl.sum((held <= bound).to(tl.int32)) + tl.sum((second <= bound).to(tl.int32))
        high, some, best_id, last = start, end - begin, drawn, drawn
        odd_one = tl.sum(odd)
        if (near != 1) | (plain == 0) | (odd_one != odd_one) | (RAW and (EDITED or HAS_ALLOWED)):
            tl.debug_barrier()  # sums are stored again, by other threads maybe
            high = tl.zeros([], tl.float32) + NEVER
            nan = end * 0
            for at in range(begin, end, CHUNK):
                c = at + tl.arange(0, CHUNK)
                w = logits_at(x, c, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
                nan = tl.maximum(nan, tl.max((w != w).to(tl.int32)))
                high = tl.maximum(high, tl.max(tl.where(w != w, NEVER, w)))
            for at in range(begin, end, BLOCK):
                of_group = at + tl.arange(0, GROUPS) * GROUP
                v0, v1, v2, v3 = quarters(x, of_group, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
                best, total = careful_sum(v0, v1, v2, v3, s)
                keep(pairs, row, S, first, of_group, width, best, total)
                if RAW:
                    v0, v1, v2, v3 = quarters(before, of_group, width, NEVER, softcap, words, first, HAS_CAP, False)
                    best, total = careful_sum(v0, v1, v2, v3, LOG2E)
                    keep(raw_pairs, row, S, first, of_group, width, best, total)
            floor = floor_of(high)
            some, best_id, last = end * 0, end * 0 + NO_ID, end * 0 - 1
            least = tl.zeros([], tl.float64) + float("inf")
            drawn = first + begin
            for at in range(begin, end, CHUNK):
                ids_of_chunk = first + at + tl.arange(0, CHUNK)
                w = logits_at(x, ids_of_chunk - first, width, NEVER, softcap, words, first, HAS_CAP, HAS_ALLOWED)
                w = tl.where(w != w, NEVER, w)
                there = w > floor
                some += tl.sum(there.to(tl.int32))
                last = tl.maximum(last, tl.max(tl.where(there, ids_of_chunk, -1)))
                best_id = tl.minimum(best_id, tl.min(tl.where(there & (w == high), ids_of_chunk, NO_ID)))
                of_chunk = ((first + at) >> 2) + tl.arange(0, CHUNK // 4)
                each = exponential(tl.reshape(words_of(own, turn, of_chunk, noise_stream), [CHUNK]))
                times_of_chunk = tl.where(there, key_of(each, w, s, finite(high)), float("inf"))
                here = tl.min(times_of_chunk)
                if here < least:
                    least = here
                    drawn = tl.min(tl.where(times_of_chunk == here, ids_of_chunk, NO_ID))
                    drawn_x, drawn_e = number_at(w, ids_of_chunk, drawn), number_at(each, ids_of_chunk, drawn)
            some = tl.where(nan > 0, -1 - some, some)
            if RAW:
                raw_x = logits_at(before, drawn - first, width, NEVER, softcap, words, first, HAS_CAP, False)
                of_best = tl.minimum(best_id - first, width - 1)
                best_raw = logits_at(before, of_best, width, NEVER, softcap, words, first, HAS_CAP, False)
        plane = N.to(tl.int64) * P
        out = floats + row * P + piece + part
        tl.store(out + TOP * plane, high)
        tl.store(out + DRAWN_X * plane, drawn_x)
        tl.store(out + DRAWN_E * plane, drawn_e)
        if RAW:
            tl.store(out + DRAWN_RAW * plane, raw_x)
            tl.store(out + BEST_RAW * plane, best_raw)
        into = ints + row * P + piece + part
        tl.store(into + BEST * plane, best_id)
        tl.store(into + DRAWN * plane, drawn)
        tl.store(into + LAST * plane, last)
        tl.store(into + COUNT * plane, some)


@triton.jit
def less(a, b):
    """a - b, where equal infinities differ by 0."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit(do_not_specialize=["N", "S", "P", "invalid_token", "last_slot"])
def draw_row(
    pairs, raw_pairs, of_pieces, ints_of_pieces, spoiled, slot, temperature, longs, ints, floats, N, S, P,
    invalid_token, last_slot, HAS_SPOILED: tl.constexpr, HAS_SLOT: tl.constexpr, RAW: tl.constexpr,
    T_EACH: tl.constexpr, SP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """One row: its groups and pieces joined. spoiled: 1 the logits held NaN, 2 a parameter has no meaning."""
    row = tl.program_id(0).to(tl.int64)
    _, padding, bad, hot, T, nan = request(
        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
    )  # fmt: skip
    t = tl.arange(0, SP)
    pair = pairs + (row * S + t) * 2
    m = tl.load(pair, mask=t < S, other=NEVER)
    top = tl.max(m, 0)
    live = (t < S) & (m > floor_of(top))
    scale = tl.exp(less(m, top) / T)
    mass = tl.sum(tl.where(live, times(tl.load(pair + 1, mask=t < S, other=0.0), scale), 0.0), 0)
    p = tl.arange(0, PP)
    inside = p < P
    plane = N.to(tl.int64) * P
    of = of_pieces + row * P + p
    into = ints_of_pieces + row * P + p
    count = tl.load(into + COUNT * plane, mask=inside, other=0)
    nan = tl.maximum(tl.max((count < 0).to(tl.int32), 0), nan)
    count = tl.where(count < 0, -1 - count, count)
    best = tl.load(of + TOP * plane, mask=inside, other=NEVER)
    can = inside & (best > floor_of(top)) & (count > 0)
    tokens = tl.sum(tl.where(can, count, 0), 0)
    x = tl.load(of + DRAWN_X * plane, mask=can, other=0.0)
    e = tl.load(of + DRAWN_E * plane, mask=can, other=1.0)
    s = tl.minimum(LOG2E / T, LARGEST)
    key = tl.where(can, key_of(e, x, s, finite(top)), float("inf"))
    winner = tl.min(tl.where(can & (key == tl.min(key, 0)), p, PP), 0)  # pieces are in the order of ids
    leader = tl.min(tl.where(can & (best == top), p, PP), 0)
    mine = p == tl.where(hot, leader, winner)
    token = tl.load(into + DRAWN * plane, mask=inside, other=0)
    token = tl.where(hot, tl.load(into + BEST * plane, mask=inside, other=0), token)
    token = tl.sum(tl.where(mine, token, 0), 0)
    y = less(tl.sum(tl.where(mine & can, x, 0.0), 0), top) / T + 0.0  # as in sampling.results
    lp = tl.where(hot, 0.0, y - tl.log(mass))
    last = tl.max(tl.where(can, tl.load(into + LAST * plane, mask=inside, other=-1), -1), 0)
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
        raw_x = tl.load(of + DRAWN_RAW * plane, mask=inside, other=0.0)
        raw_x = tl.where(hot, tl.load(of + BEST_RAW * plane, mask=inside, other=0.0), raw_x)
        raw_x = tl.sum(tl.where(mine, raw_x, 0.0), 0)
        pair = raw_pairs + (row * S + t) * 2
        raw_m = tl.load(pair, mask=t < S, other=NEVER)
        raw_top = tl.max(raw_m, 0)
        raw_z = tl.load(pair + 1, mask=t < S, other=0.0)
        raw_mass = tl.sum(tl.where(raw_m > NEVER, times(raw_z, tl.exp(less(raw_m, raw_top))), 0.0), 0)
        raw_lp = less(raw_x, raw_top) - tl.log(raw_mass)
        tl.store(floats + 3 * N + row, tl.where(padding, 0.0, tl.where(none, float("nan"), raw_lp)))
