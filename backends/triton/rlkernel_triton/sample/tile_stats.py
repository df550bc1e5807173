"""The pass over the logits: what every group of a row adds up to, read once.

Per group of GROUP tokens: its best logit and the sum of exp((x - best) / T), side by side, and on request the moment of
the entropy; on rows without a filter a bound below the time at which its first token arrives in the race. The maxima
certify the candidates of the filters. Per program: how many tokens there are.

A thread holds a fourth of a group, and no thread waits for another but where a group holds what is not
finite. A sum is one of a group: it depends neither on the batch nor on PER, so neither do the bits. A row with +inf is
uniform over its +inf tokens: a group whose best is +inf counts and sums those alone.
Legend: N rows · V vocabulary · S = ceil(V / TILE) tiles a row · G = TILE / GROUP groups a tile. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import scaled_less
from rlkernel_triton.common.gumbel_noise import earliest
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.sample.rows import (
    INTERPRETED,
    LARGEST,
    LN2,
    LOG2E,
    floor_of,
    followed,
    in_pairs,
    logits_at,
    parameter,
    place_of,
    times,
)

HELD_NAN: tl.constexpr = tl.constexpr(1 << 30)  # in the count of a program
HELD_INFINITY: tl.constexpr = tl.constexpr(1 << 29)  # its count is one of +inf


@triton.jit
def count_at(S, G: tl.constexpr):
    """Where in a row of the workspace the counts of programs stand, int32: behind (best, sum) of S * G groups."""
    return 2 * S * G


@triton.jit
def moment_at(S, G: tl.constexpr):
    """Where the moments of groups stand."""
    return 2 * S * G + S


@triton.jit
def scratch_at(S, G: tl.constexpr):
    """Where the memory for `finish` and `searched` begins, a multiple of two numbers; without a filter, the times."""
    return (3 * S * G + S + 1) // 2 * 2


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
def tilt(w, y):
    """w * y, 0 where nothing weighs."""
    return tl.where(w > 0.0, times(w, y), 0.0)


@triton.jit(
    do_not_specialize=["noise_stream", "seed", "step", "top_k", "last_slot", "allowed_stride", "words", "V", "S", "N"]
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
    N,
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
    EDGE: tl.constexpr,  # `finish` is launched while this runs
):
    """PER tiles of a row."""
    followed(EDGE)
    FREE: tl.constexpr = K_EACH == -2 and P_EACH == -2 and M_EACH == -2  # no row has a filter
    G: tl.constexpr = TILE // GROUP
    ROWS: tl.constexpr = PER * G
    if WHOLE:
        V = V // 16 * 16  # so that the compiler knows
    row = (tl.program_id(2).to(tl.int64) * tl.num_programs(1)) + tl.program_id(1)
    part = tl.program_id(0)
    if row >= N:
        return
    x += row * row_stride
    work += row * words
    counts = as_int32(work)
    first = part * (PER * TILE)
    if HAS_ALLOWED:
        allowed += row * allowed_stride
    QUARTER: tl.constexpr = GROUP // 4
    ids = first + tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, QUARTER)[None, :]
    v0 = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    ids += QUARTER
    v1 = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    ids += QUARTER
    v2 = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    ids += QUARTER
    v3 = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    T = 1.0
    if not RAW:
        place, _, _ = place_of(row, slot, last_slot, HAS_SLOT)
        T = parameter(temperature, place, T_EACH).to(tl.float32)
        filters = filtered(place, top_k, top_p, min_p, V, K_EACH, P_EACH, M_EACH)
        greedy = T == 0.0
        T = tl.where(greedy, 1.0, T)
        noise_seed = row
        noise_step = row
        if FREE:  # nearly sure to be asked for, and on their way from here on
            noise_seed = parameter(seed, place, SEED_EACH).to(tl.int64)
            noise_step = parameter(step, place, STEP_EACH).to(tl.int64)
    s = tl.minimum(LOG2E / T, LARGEST)
    best = tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), 1)
    # (v - best) * s in one rounding, but for a residue of the whole group that the sum is rid of.
    less = best * s
    residue = scaled_less(best, s, less, INTERPRETED)
    y0 = scaled_less(v0, s, less[:, None], INTERPRETED)
    y1 = scaled_less(v1, s, less[:, None], INTERPRETED)
    y2 = scaled_less(v2, s, less[:, None], INTERPRETED)
    y3 = scaled_less(v3, s, less[:, None], INTERPRETED)
    w0 = tl.exp2(y0)
    w1 = tl.exp2(y1)
    w2 = tl.exp2(y2)
    w3 = tl.exp2(y3)
    # NaN where there is NaN or an infinity, and where a product overflows.
    odd = tl.fma((v0 + v1) + (v2 + v3), 0.0, (w0 + w1) + (w2 + w3))
    raised = in_pairs(odd)
    rest = tl.exp2(-residue)
    total = times(raised, rest)
    moment = total
    if ENTROPY:
        h = in_pairs((times(w0, y0) + times(w1, y1)) + (times(w2, y2) + times(w3, y3)))
        moment = times(times(h - times(residue, raised), rest), LN2)
    n = tl.minimum(PER * TILE, V - first)
    if tl.max((total != total).to(tl.int32), 0) > 0:
        nan = ((v0 != v0) | (v1 != v1)) | ((v2 != v2) | (v3 != v3))
        v0 = tl.where(v0 != v0, -float("inf"), v0)
        v1 = tl.where(v1 != v1, -float("inf"), v1)
        v2 = tl.where(v2 != v2, -float("inf"), v2)
        v3 = tl.where(v3 != v3, -float("inf"), v3)
        best = tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), 1)
        high = tl.max(best, 0)
        floor = floor_of(high)
        each = ((v0 > floor).to(tl.int32) + (v1 > floor).to(tl.int32)) + (
            (v2 > floor).to(tl.int32) + (v3 > floor).to(tl.int32)
        )
        n = tl.sum(tl.sum(each, 1), 0)
        n += tl.where(high == float("inf"), HELD_INFINITY, 0)
        n += tl.max(tl.max(nan.to(tl.int32), 1), 0) * HELD_NAN
        residue = tl.zeros([ROWS], tl.float32)
        y0 = tl.where(v0 == best[:, None], 0.0, (v0 - best[:, None]) * s)
        y1 = tl.where(v1 == best[:, None], 0.0, (v1 - best[:, None]) * s)
        y2 = tl.where(v2 == best[:, None], 0.0, (v2 - best[:, None]) * s)
        y3 = tl.where(v3 == best[:, None], 0.0, (v3 - best[:, None]) * s)
        w0 = tl.exp2(y0)
        w1 = tl.exp2(y1)
        w2 = tl.exp2(y2)
        w3 = tl.exp2(y3)
        safe = in_pairs((w0 + w1) + (w2 + w3))
        if ENTROPY:
            h = in_pairs((tilt(w0, y0) + tilt(w1, y1)) + (tilt(w2, y2) + tilt(w3, y3)))
            moment = tl.where(total == total, moment, tl.where(best > -float("inf"), times(h, LN2), 0.0))
        total = tl.where(total == total, total, tl.where(best > -float("inf"), safe, 0.0))
    g = part * ROWS + tl.arange(0, ROWS)
    side = tl.arange(0, 2)[None, :]
    tl.store(work + 2 * g[:, None] + side, tl.join(best, total), mask=(g < S * G)[:, None] & (side < 2))
    tl.store(counts + count_at(S, G) + part, n)
    if not RAW:
        if ENTROPY:
            tl.store(work + moment_at(S, G) + g, moment, mask=g < S * G)
        if (not filters) & (not greedy):
            if not FREE:
                noise_seed = parameter(seed, place, SEED_EACH).to(tl.int64)
                noise_step = parameter(step, place, STEP_EACH).to(tl.int64)
            of_four = ((first >> 2) + tl.arange(0, ROWS) * (GROUP // 4))[:, None] + tl.arange(0, QUARTER // 4)[None, :]
            t0 = earliest(y0, noise_seed, noise_step, of_four, noise_stream)
            t1 = earliest(y1, noise_seed, noise_step, of_four + QUARTER // 4, noise_stream)
            t2 = earliest(y2, noise_seed, noise_step, of_four + QUARTER // 2, noise_stream)
            t3 = earliest(y3, noise_seed, noise_step, of_four + (QUARTER // 4) * 3, noise_stream)
            time = tl.min(tl.minimum(tl.minimum(t0, t1), tl.minimum(t2, t3)), 1)
            tl.store(work + scratch_at(S, G) + g, time * tl.exp2(residue), mask=g < S * G)
