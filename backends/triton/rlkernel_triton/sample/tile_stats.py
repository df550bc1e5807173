"""The pass over the logits: what every group of a row adds up to, read once.

Per group of GROUP tokens: its best logit and the sum of exp(x / T) relative to a power of two (`group_reference`), side
by side, on request the moment of the entropy; on rows without a filter a lower bound of the least time of its tokens
(common.gumbel_noise). The maxima certify the candidates of the filters. Per program: how many tokens there are.

A thread holds a fourth of a group, and no thread waits for another but where a group holds what is not
finite. A sum is one of a group, in the order of common.group_sums: it depends neither on the batch nor on
TILES_PER_PROGRAM, so neither do the bits. A row with +inf is
uniform over its +inf tokens: a group whose best is +inf counts and sums those alone.
Bytes of a row: V s read once; 12 of 64 tokens written, 16 with an entropy.

Legend: N rows · V vocabulary · S = ceil(V / TILE) tiles a row · G = TILE / GROUP groups a tile. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LARGEST, LN2, LOG2E, scaled_less, tree_sum
from rlkernel_triton.common.group_sums import quarters_sum, reference
from rlkernel_triton.common.gumbel_noise import arrival_bounds
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import (
    HELD_INFINITY,
    HELD_NAN,
    MAX_FLOAT,
    draw_floor,
    logits_at,
    parameter,
    pdl_trigger,
    rounded_product,
    slot_of,
)


@triton.jit
def counts_offset(S, G: tl.constexpr):
    """Where in a row of the workspace the counts of programs stand, int32: behind (best, sum) of S * G groups."""
    return 2 * S * G


@triton.jit
def moments_offset(S, G: tl.constexpr):
    """Where the moments of groups stand."""
    return 2 * S * G + S


@triton.jit
def scratch_offset(S, G: tl.constexpr):
    """Where scratch of `select_and_sample` and `exact_sample` begins, at an even number; without filters, of bounds."""
    return (3 * S * G + S + 1) // 2 * 2


@triton.jit
def as_int32_pointer(work):
    """The same memory as int32."""
    return work.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def has_filter(entry, top_k, top_p, min_p, V, K: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """Whether a filter is on in this row. K, P, M: `EACH` of the parameter, or -2 where there is none."""
    on = V < 0
    if K > -2:
        value = parameter(top_k, entry, K)
        on = on | ((value > 0) & (value < V))
    if P > -2:
        on = on | (parameter(top_p, entry, P).to(tl.float32) < 1.0)
    if M > -2:
        on = on | (parameter(min_p, entry, M).to(tl.float32) > 0.0)
    return on


@triton.jit
def group_reference(best, s):
    """What the weights of a group are relative to, as a logarithm: `reference`, or its best where that is too large."""
    return tl.where(tl.abs(best * s) < LARGEST, reference(best, s), best * s)


@triton.jit
def group_shift(best, top, s):
    """Logarithm of the factor of a group's weights beside those of the best logit of the row, whose weight is 1."""
    exact = 0.0 - scaled_less(top, s, reference(best, s))
    rough = tl.where(best == top, 0.0, (best - top) * s)
    return tl.where(tl.maximum(tl.abs(top * s), tl.abs(best * s)) < LARGEST, exact, rough)


@triton.jit
def from_reference(v, best, r, s):
    """v * s relative to r; to the best itself where that is too large."""
    exact = scaled_less(v, s, r[:, None])
    rough = tl.where(v == best[:, None], 0.0, (v - best[:, None]) * s)
    return tl.where((tl.abs(best * s) < LARGEST)[:, None], exact, rough)


@triton.jit
def moment_term(w, y):
    """w * y, 0 where nothing weighs."""
    return tl.where(w > 0.0, rounded_product(w, y), 0.0)


@triton.jit(
    do_not_specialize=["noise_stream", "seed", "step", "top_k", "last_slot", "allowed_stride", "words", "V", "S", "N"]
)
def tile_stats(
    x,  # [N, V] logits
    row_stride, column_stride, V,
    allowed,  # [N, allowed_stride] int32 bits, read where HAS_ALLOWED
    allowed_stride,
    slot,  # [N] int64: the entry of the parameters, -1 for padding; read where HAS_SLOT
    last_slot,
    temperature,  # as every parameter: a number, or a tensor of one entry, or of one a row or slot
    top_k, top_p, min_p, seed, step, noise_stream,
    work,  # out [N, words] fp32, some of it read as int32: see `counts_offset` and the two after it
    words, S, N,
    HAS_ALLOWED: tl.constexpr, HAS_SLOT: tl.constexpr,
    UNIT: tl.constexpr,  # column_stride is 1
    WHOLE: tl.constexpr,  # V is a multiple of 16
    T_EACH: tl.constexpr,  # of a parameter: -2 not given, -1 a number, 0 one entry for all, 1 one per row or slot
    K_EACH: tl.constexpr, P_EACH: tl.constexpr, M_EACH: tl.constexpr, SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr,
    RAW: tl.constexpr,  # T = 1 and nothing but best and total
    ENTROPY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr,  # tiles a program, a power of two
    USE_PDL: tl.constexpr,  # `select_and_sample` is launched while this runs
):  # fmt: skip
    """TILES_PER_PROGRAM tiles of a row."""
    pdl_trigger(USE_PDL)
    FREE: tl.constexpr = K_EACH == -2 and P_EACH == -2 and M_EACH == -2  # no row has a filter
    G: tl.constexpr = TILE // GROUP
    ROWS: tl.constexpr = TILES_PER_PROGRAM * G
    if WHOLE:
        V = V // 16 * 16  # so that the compiler knows
    row = (tl.program_id(2).to(tl.int64) * tl.num_programs(1)) + tl.program_id(1)
    part = tl.program_id(0)
    if row >= N:
        return
    x += row * row_stride
    work += row * words
    counts = as_int32_pointer(work)
    first = part * (TILES_PER_PROGRAM * TILE)
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
    T = tl.full((), 1.0, tl.float32)
    if not RAW:
        entry, _, _ = slot_of(row, slot, last_slot, HAS_SLOT)
        T = parameter(temperature, entry, T_EACH).to(tl.float32)
        filters = has_filter(entry, top_k, top_p, min_p, V, K_EACH, P_EACH, M_EACH)
        greedy = T == 0.0
        T = tl.where(greedy, 1.0, T)
        noise_seed = row
        noise_step = row
        if FREE:  # nearly sure to be asked for, and on their way from here on
            noise_seed = parameter(seed, entry, SEED_EACH).to(tl.int64)
            noise_step = parameter(step, entry, STEP_EACH).to(tl.int64)
    s = tl.minimum(LOG2E / T, MAX_FLOAT)
    best = tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), 1)
    r = reference(best, s)
    y0 = scaled_less(v0, s, r[:, None])
    y1 = scaled_less(v1, s, r[:, None])
    y2 = scaled_less(v2, s, r[:, None])
    y3 = scaled_less(v3, s, r[:, None])
    w0 = tl.exp2(y0)
    w1 = tl.exp2(y1)
    w2 = tl.exp2(y2)
    w3 = tl.exp2(y3)
    total = quarters_sum(w0, w1, w2, w3)
    # NaN where there is NaN or an infinity, and where no reference is near the best.
    total = tl.fma(quarters_sum(v0, v1, v2, v3), 0.0, tl.where(tl.abs(r) < LARGEST, total, float("nan")))
    moment = total
    if ENTROPY:
        h = tree_sum(
            (rounded_product(w0, y0) + rounded_product(w1, y1)) + (rounded_product(w2, y2) + rounded_product(w3, y3))
        )
        moment = rounded_product(h, LN2)
    n = tl.minimum(TILES_PER_PROGRAM * TILE, V - first)
    if tl.max((total != total).to(tl.int32), 0) > 0:
        nan = ((v0 != v0) | (v1 != v1)) | ((v2 != v2) | (v3 != v3))
        v0 = tl.where(v0 != v0, -float("inf"), v0)
        v1 = tl.where(v1 != v1, -float("inf"), v1)
        v2 = tl.where(v2 != v2, -float("inf"), v2)
        v3 = tl.where(v3 != v3, -float("inf"), v3)
        best = tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), 1)
        high = tl.max(best, 0)
        floor = draw_floor(high)
        each = ((v0 > floor).to(tl.int32) + (v1 > floor).to(tl.int32)) + (
            (v2 > floor).to(tl.int32) + (v3 > floor).to(tl.int32)
        )
        n = tl.sum(tl.sum(each, 1), 0)
        n += tl.where(high == float("inf"), HELD_INFINITY, 0)
        n += tl.max(tl.max(nan.to(tl.int32), 1), 0) * HELD_NAN
        r = group_reference(best, s)
        y0 = from_reference(v0, best, r, s)
        y1 = from_reference(v1, best, r, s)
        y2 = from_reference(v2, best, r, s)
        y3 = from_reference(v3, best, r, s)
        w0 = tl.exp2(y0)
        w1 = tl.exp2(y1)
        w2 = tl.exp2(y2)
        w3 = tl.exp2(y3)
        safe = quarters_sum(w0, w1, w2, w3)
        if ENTROPY:
            h = tree_sum((moment_term(w0, y0) + moment_term(w1, y1)) + (moment_term(w2, y2) + moment_term(w3, y3)))
            moment = tl.where(total == total, moment, tl.where(best > -float("inf"), rounded_product(h, LN2), 0.0))
        total = tl.where(total == total, total, tl.where(best > -float("inf"), safe, 0.0))
    g = part * ROWS + tl.arange(0, ROWS)
    side = tl.arange(0, 2)[None, :]
    tl.store(work + 2 * g[:, None] + side, tl.join(best, total), mask=(g < S * G)[:, None] & (side < 2))
    tl.store(counts + counts_offset(S, G) + part, n)
    if not RAW:
        if ENTROPY:
            tl.store(work + moments_offset(S, G) + g, moment, mask=g < S * G)
        if (not filters) & (not greedy):
            if not FREE:
                noise_seed = parameter(seed, entry, SEED_EACH).to(tl.int64)
                noise_step = parameter(step, entry, STEP_EACH).to(tl.int64)
            of_four = ((first >> 2) + tl.arange(0, ROWS) * (GROUP // 4))[:, None] + tl.arange(0, QUARTER // 4)[None, :]
            t0 = arrival_bounds(y0, noise_seed, noise_step, of_four, noise_stream)
            t1 = arrival_bounds(y1, noise_seed, noise_step, of_four + QUARTER // 4, noise_stream)
            t2 = arrival_bounds(y2, noise_seed, noise_step, of_four + QUARTER // 2, noise_stream)
            t3 = arrival_bounds(y3, noise_seed, noise_step, of_four + (QUARTER // 4) * 3, noise_stream)
            time = tl.min(tl.minimum(tl.minimum(t0, t1), tl.minimum(t2, t3)), 1)
            tl.store(work + scratch_offset(S, G) + g, time, mask=g < S * G)
