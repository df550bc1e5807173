"""The pass over the logits: what every tile of a row adds up to, read once.

Per tile of TILE tokens: its best logit, how many tokens there are, the sum of exp((x - best) / T) and, on request, the
moment of the entropy; the maxima of its groups of GROUP tokens, which certify the candidates of the filters. On rows
without a filter every program also leaves the token that wins the race among its own.

A sum is one of groups, then one of the groups of a tile: neither depends on the batch or on PER, so neither do the
bits. A row with +inf is uniform over its +inf tokens: a tile whose best is +inf counts and sums those alone.
Legend: N rows · V vocabulary · S = ceil(V / TILE) tiles a row · G = TILE / GROUP groups a tile. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.noise import SLACK, early, late, uniform, words_of
from rlkernel_triton.sampling.rows import LARGEST, MOST, floor_of, in_pairs, logits_at, parameter, place_of, times

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Numbers of a row of the workspace: S of each, then S * G maxima of groups, then what `finish` and `searched` need.
BEST: tl.constexpr = tl.constexpr(0)
TOTAL: tl.constexpr = tl.constexpr(1)
COUNT: tl.constexpr = tl.constexpr(2)  # int32; -1 - count where the tile holds NaN
WINNER: tl.constexpr = tl.constexpr(3)  # int32, one a program; -1: its race is not decided
MOMENT: tl.constexpr = tl.constexpr(4)
GROUPS: tl.constexpr = tl.constexpr(5)


@triton.jit
def as_int32(work):
    """The same memory as int32."""
    return work.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def filtered(place, top_k, top_p, min_p, V, K: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """Whether a filter is on in this row. K, P, M: `EACH` of the parameter, or -2 where there is none."""
    on = V < 0
    if K > -2:
        value = parameter(top_k, place, K)
        on = on | ((value > 0) & (value < V))
    if P > -2:
        on = on | (parameter(top_p, place, P).to(tl.float32) < 1.0)
    if M > -2:
        on = on | (parameter(min_p, place, M).to(tl.float32) > 0.0)
    return on


@triton.jit
def race(v, ids, best, s, seed, step, first, noise_stream, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The id in the block [first, first + ROWS * GROUP) that wins it, or -1 where that is too close to tell.

    No difference is told beside +inf.
    """
    block = (first >> 2) + tl.arange(0, ROWS)[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
    u = uniform(tl.reshape(words_of(seed, step, block, noise_stream), [ROWS, GROUP]))
    time = early(u) * tl.exp2((best - v) * s)
    soonest = tl.min(tl.reshape(time, [ROWS * GROUP]), 0)
    at = tl.reshape(tl.where(time == soonest, ids, MOST), [ROWS * GROUP])
    who = tl.min(at, 0)
    own = tl.max(tl.reshape(tl.where(time == soonest, u, 0.0), [ROWS * GROUP]), 0)
    next_one = tl.min(tl.reshape(tl.where(ids == who, float("inf"), time), [ROWS * GROUP]), 0)
    close = (next_one <= soonest * (late(own) / early(own)) * SLACK) | (best == float("inf"))
    return tl.where(close, -1, who)


@triton.jit(
    do_not_specialize=["noise_stream", "seed", "step", "top_k", "last_slot", "allowed_stride", "words", "V", "S"]
)
def tiles(
    x,  # [N, V] logits
    row_stride,
    column_stride,
    V,
    allowed,  # [N, words] int32
    allowed_stride,
    slot,  # [N]
    last_slot,
    temperature,  # as every parameter: a number, or a tensor
    top_k,
    top_p,
    min_p,
    seed,
    step,
    noise_stream,
    work,  # out [N, words] fp32, some of it read as int32
    words,
    S,
    HAS_ALLOWED: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr,  # V is a multiple of 16
    T_EACH: tl.constexpr,
    K_EACH: tl.constexpr,
    P_EACH: tl.constexpr,
    M_EACH: tl.constexpr,
    SEED_EACH: tl.constexpr,
    STEP_EACH: tl.constexpr,
    RAW: tl.constexpr,  # T = 1 and nothing but best and total
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,  # tiles a program, a power of two
):
    """PER tiles of a row."""
    G: tl.constexpr = TILE // GROUP
    ROWS: tl.constexpr = PER * G
    if WHOLE:
        V = V // 16 * 16  # so that the compiler knows
    parts = tl.cdiv(S, PER)
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    x += row * row_stride
    work += row * words
    counts = as_int32(work)
    first = part * (PER * TILE)
    ids = first + tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if HAS_ALLOWED:
        allowed += row * allowed_stride
    raw = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    T = 1.0
    if not RAW:
        place, _, _ = place_of(row, slot, last_slot, HAS_SLOT)
        T = parameter(temperature, place, T_EACH).to(tl.float32)
        filters = filtered(place, top_k, top_p, min_p, V, K_EACH, P_EACH, M_EACH)
        greedy = T == 0.0
        T = tl.where(greedy, 1.0, T)
    s = tl.minimum(LOG2E / T, LARGEST)
    v = raw
    t = part * PER + tl.arange(0, PER)
    n = t * 0 + TILE
    nan = t * 0
    odd = tl.sum(tl.reshape(raw * 0.0, [ROWS * GROUP]), 0)
    if odd != odd:  # there is NaN or an infinity
        nan = tl.max(tl.reshape(tl.max((raw != raw).to(tl.int32), 1), [PER, G]), 1)
        v = tl.where(raw != raw, -float("inf"), raw)
        high = tl.max(tl.reshape(tl.max(v, 1), [PER, G]), 1)
        high = tl.reshape(tl.broadcast_to(high[:, None], [PER, G]), [ROWS])[:, None]
        n = tl.sum(tl.reshape(tl.sum((v > floor_of(high)).to(tl.int32), 1), [PER, G]), 1)
    of_group = tl.max(v, 1)
    best = tl.max(tl.reshape(of_group, [PER, G]), 1)
    top = tl.reshape(tl.broadcast_to(best[:, None], [PER, G]), [ROWS])[:, None]
    y = (v - top) * s
    w = tl.exp2(y)
    total = in_pairs(tl.reshape(in_pairs(w), [PER, G]))
    # An infinite best has no differences: +inf counts its like, and -inf counts nothing.
    total = tl.where(best < float("inf"), tl.where(best > -float("inf"), total, 0.0), n.to(tl.float32))
    tl.store(work + BEST * S + t, best, mask=t < S)
    tl.store(work + TOTAL * S + t, total, mask=t < S)
    if not RAW:
        tl.store(counts + COUNT * S + t, tl.where(nan > 0, -1 - n, n), mask=t < S)
        if ENTROPY:
            h = in_pairs(tl.reshape(in_pairs(tl.where(w > 0.0, times(w, y * LN2), 0.0)), [PER, G]))
            h = tl.where((best < float("inf")) & (best > -float("inf")), h, 0.0)
            tl.store(work + MOMENT * S + t, h, mask=t < S)
        if K_EACH > -2 or P_EACH > -2 or M_EACH > -2:
            g = part * ROWS + tl.arange(0, ROWS)
            tl.store(work + GROUPS * S + g, of_group, mask=g < S * G)
        if (not filters) & (not greedy):
            who = race(
                v,
                ids,
                tl.max(best, 0),
                s,
                parameter(seed, place, SEED_EACH).to(tl.int64),
                parameter(step, place, STEP_EACH).to(tl.int64),
                first,
                noise_stream,
                ROWS,
                GROUP,
            )
            tl.store(counts + WINNER * S + part, who)
