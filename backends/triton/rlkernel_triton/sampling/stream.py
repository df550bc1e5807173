"""The pass over the logits: what every tile of a row adds up to, read once.

Per tile of TILE tokens: its best token, how many there are, the sum of exp((x - best) / T) and, on request, the moment
of the entropy; the maxima of its groups of GROUP tokens, which certify the candidates of the filters; and on rows
without a filter the two tokens with the best noised scores. Tiles do not depend on the batch, so neither do the bits.

A row with +inf is uniform over its +inf tokens: a tile whose best is +inf counts and sums those alone.
Legend: N rows · V vocabulary · S = ceil(V / TILE) tiles a row · G = TILE / GROUP groups a tile. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.noise import gumbel_from
from rlkernel_triton.sampling.rows import NOTHING, floor_of, id_of, logits_at, parameter, place_of, ranked


@triton.jit
def filtered(place, top_k, k, top_p, p, min_p, m, V, K: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """Whether a filter is on in this row. K, P, M: `EACH` of the parameter, or -2 where there is none."""
    on = V < 0
    if K > -2:
        value = parameter(top_k, k, place, K)
        on = on | ((value > 0) & (value < V))
    if P > -2:
        on = on | (parameter(top_p, p, place, P).to(tl.float32) < 1.0)
    if M > -2:
        on = on | (parameter(min_p, m, place, M).to(tl.float32) > 0.0)
    return on


@triton.jit(do_not_specialize=["noise_stream", "V", "seed_number", "step_number", "k_number", "last_slot"])
def tiles(
    x,  # [N, V] logits
    row_stride,
    column_stride,
    V,
    allowed,  # [N, words] int32
    allowed_stride,
    slot,  # [N]
    last_slot,
    temperature,
    temperature_number,
    top_k,
    k_number,
    top_p,
    p_number,
    min_p,
    m_number,
    seed,
    seed_number,
    step,
    step_number,
    noise_stream,
    best,  # out [N, S] fp32
    best_id,  # out [N, S] int32
    count,  # out [N, S] int32; -1 - count where the tile holds NaN
    total,  # out [N, S] fp32
    moment,  # out [N, S] fp32
    group_best,  # out [N, S * G] fp32
    winners,  # out [N, S, 2] int32
    S,
    HAS_ALLOWED: tl.constexpr,
    HAS_SLOT: tl.constexpr,
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
    PER: tl.constexpr,  # tiles a program
):
    """PER tiles of a row."""
    row = tl.program_id(0).to(tl.int64)
    if RAW:
        T = 1.0
        place = row
        filters = row < 0
    else:
        place, _, _ = place_of(row, slot, last_slot, HAS_SLOT)
        T = parameter(temperature, temperature_number, place, T_EACH).to(tl.float32)
        filters = filtered(place, top_k, k_number, top_p, p_number, min_p, m_number, V, K_EACH, P_EACH, M_EACH)
    greedy = T == 0.0
    T = tl.where(greedy, 1.0, T)
    x += row * row_stride
    allowed += row * allowed_stride
    for i in tl.static_range(PER):
        tile = tl.program_id(1) * PER + i
        if tile < S:
            first = tile.to(tl.int64) * TILE
            ids = first + tl.arange(0, TILE)
            v = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED)
            nan = tl.max((v != v).to(tl.int32), 0)
            v = tl.where(v != v, -float("inf"), v)
            top = tl.max(v, 0)
            there = v > floor_of(top)
            y = tl.where(there, tl.where(v == top, 0.0, (v - top) / T), -float("inf"))
            w = tl.exp(y)
            at = row * S + tile
            tl.store(best + at, top)
            tl.store(total + at, tl.sum(w, 0))
            if not RAW:
                tl.store(best_id + at, tl.min(tl.where(v == top, ids, V), 0).to(tl.int32))
                n = tl.sum(there.to(tl.int32), 0)
                tl.store(count + at, tl.where(nan > 0, -1 - n, n))
                if ENTROPY:
                    tl.store(moment + at, tl.sum(tl.where(w > 0.0, w * y, 0.0), 0))
                if K_EACH > -2 or P_EACH > -2 or M_EACH > -2:
                    of_groups = tl.max(tl.reshape(v, [TILE // GROUP, GROUP]), 1)
                    tl.store(group_best + at * (TILE // GROUP) + tl.arange(0, TILE // GROUP), of_groups)
                if (not filters) & (not greedy):
                    s = parameter(seed, seed_number, place, SEED_EACH).to(tl.int64)
                    k = parameter(step, step_number, place, STEP_EACH).to(tl.int64)
                    noised = ranked(y + gumbel_from(s, k, first, noise_stream, TILE), ids)
                    noised = tl.where(there, noised, NOTHING)
                    one = tl.max(noised, 0)
                    two = tl.max(tl.where(noised == one, NOTHING, noised), 0)
                    tl.store(winners + at * 2, id_of(one).to(tl.int32))
                    tl.store(winners + at * 2 + 1, id_of(two).to(tl.int32))
