"""Merge the groups of a row, find what the filters keep of it and draw, one program a row.

Rows whose filters keep more than the candidates tell are left to `exact_sample`, which is marked in the results.
Results of a row depend on the row alone: what programs add up here are integers, whose sums have no order.
Legend: N rows · V vocabulary · S tiles a row of G groups each · GP: S * G padded to a power of two.
Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LOG2E
from rlkernel_triton.common.gumbel_noise import BOUND_SLACK, gumbel_noise
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import (
    MAX_FLOAT,
    MAX_INT32,
    NO_KEY,
    draw_floor,
    from_fixed,
    key_id,
    key_value,
    logits_at,
    parameter,
    pdl_trigger,
    pdl_wait,
    rank_key,
    rounded_product,
    row_request,
    to_fixed,
)
from rlkernel_triton.sample.candidates import WEIGHT_UNITS, filter_candidates, gather_candidates
from rlkernel_triton.sample.results import PENDING, load_groups, merge_groups, write_results
from rlkernel_triton.sample.tile_stats import as_int32_pointer, group_shift, scratch_offset

NO_TIME: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # comes after every time, and is none


@triton.jit
def group_best(
    x, V, group, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr
):
    """(ids of a group, where the best logit stands among them)."""
    ids = group * GROUP + tl.arange(0, GROUP)
    return ids, logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT) == top


@triton.jit
def first_best_id(
    x, V, group_top, groups, top, column_stride, allowed,
    HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The lowest id of the best logit: it is in the first group that has it."""
    g = tl.arange(0, group_top.shape[0])
    first = tl.min(tl.where(group_top == top, g, groups - 1), 0)
    ids, best = group_best(x, V, first, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
    return tl.min(tl.where(best, ids, V - 1), 0).to(tl.int64)


@triton.jit
def last_best_id(
    x, V, group_top, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr
):
    """The highest id of the best logit."""
    last = tl.max(tl.where(group_top == top, tl.arange(0, group_top.shape[0]), 0), 0)
    ids, best = group_best(x, V, last, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
    return tl.max(tl.where(best, ids, -1), 0).to(tl.int64)


@triton.jit
def noised_scores(
    x, ids, there, top, T, seed, step, noise_stream, column_stride, allowed,
    HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """`rank_key` noised scores of ids, NOTHING where no token can be drawn."""
    v = logits_at(x, ids, there, column_stride, allowed, HAS_ALLOWED, UNIT)
    y = tl.where(v == top, 0.0, (v - top) / T)
    score = rank_key(y + gumbel_noise(seed, step, ids, noise_stream), ids)
    return tl.where(there & (v > draw_floor(top)), score, NO_KEY)


@triton.jit
def gumbel_argmax(
    x, V, group_top, bounds, groups, top, T, seed, step, noise_stream, column_stride, allowed,
    HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The token that wins without a filter: the best of the groups whose bound is not above the time of the best.

    Nearly always that is one group, the one whose bound is the least.
    """
    g = tl.arange(0, group_top.shape[0])
    live = (g < groups) & (group_top > draw_floor(top))
    later = tl.exp2(-group_shift(group_top, top, tl.minimum(LOG2E / T, MAX_FLOAT)))
    time = tl.where(live, bounds * later, float("inf"))
    key = (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | g
    key = tl.where(live, key, NO_TIME)
    first = tl.min(key, 0)
    best = tl.full((), NO_KEY, tl.int64)
    until = tl.full((), float("inf"), tl.float32)
    while (first >> 32).to(tl.int32).to(tl.float32, bitcast=True) <= until:
        ids = (first & MAX_INT32).to(tl.int32) * GROUP + tl.arange(0, GROUP)
        score = noised_scores(
            x, ids, ids < V, top, T, seed, step, noise_stream, column_stride, allowed, HAS_ALLOWED, UNIT
        )  # fmt: skip
        best = tl.maximum(best, tl.max(score, 0))
        until = tl.exp2(-key_value(best) * LOG2E) * BOUND_SLACK
        key = tl.where(key == first, NO_TIME, key)
        first = tl.min(key, 0)
    return tl.minimum(key_id(best), V - 1)  # within the row, even where somebody writes to it meanwhile


@triton.jit(
    do_not_specialize=[
        "noise_stream", "seed", "step", "top_k", "last_slot", "allowed_stride", "words", "invalid_token", "V", "S", "N",
        "tiles_per_program",
    ]
)  # fmt: skip
def select_and_sample(
    x,  # [N, V] logits
    row_stride, column_stride, V,
    allowed,  # [N, allowed_stride] int32 bits, read where HAS_ALLOWED
    allowed_stride,
    slot,  # [N] int64: the entry of the parameters, -1 for padding; read where HAS_SLOT
    last_slot,
    temperature,  # as every parameter: a number, or a tensor of one entry, or of one a row or slot
    top_k, top_p, min_p, seed, step, noise_stream,
    work,  # [N, words] of `tile_stats`; from `scratch_offset` on, K + 4 * C int32 to work in
    words, S, N,
    tiles_per_program,  # tiles a program of `tile_stats`
    spoiled,  # [N] int32: 1 the logits held NaN, 2 the edits or their parameters have no meaning
    raw,  # [N, V] logits before the edits
    raw_row_stride, raw_column_stride, invalid_token,
    longs,  # out, as in `write_results`
    ints, floats, row_stats,
    HAS_ALLOWED: tl.constexpr, HAS_SLOT: tl.constexpr,
    UNIT: tl.constexpr,  # column_stride is 1
    WHOLE: tl.constexpr,  # V is a multiple of 16
    HAS_SPOILED: tl.constexpr, T_EACH: tl.constexpr, K_EACH: tl.constexpr, P_EACH: tl.constexpr, M_EACH: tl.constexpr,
    SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr,
    ORDER: tl.constexpr,  # 0 "topk_topp", 1 "joint", 2 "topp_topk"
    KEEP_ALL: tl.constexpr,  # ties at the threshold are kept
    SEARCH: tl.constexpr,  # rows may be left to a search
    RAW: tl.constexpr, ENTROPY: tl.constexpr, ROW_STATS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,  # groups that are read again
    C: tl.constexpr,  # candidates
    USE_PDL: tl.constexpr,  # launched while `tile_stats` runs, and `exact_sample` while this does
):  # fmt: skip
    """One row: its results, from its tiles."""
    if WHOLE:
        V = V // 16 * 16
    FREE: tl.constexpr = K_EACH == -2 and P_EACH == -2 and M_EACH == -2  # no row has a filter
    row = tl.program_id(0).to(tl.int64)
    entry, padding, bad, greedy, T, nan = row_request(
        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
    )
    noise_seed = parameter(seed, entry, SEED_EACH).to(tl.int64)
    noise_step = parameter(step, entry, STEP_EACH).to(tl.int64)
    x += row * row_stride
    raw_work = work + (N.to(tl.int64) + row) * words
    work += row * words
    counts = as_int32_pointer(work)
    if HAS_ALLOWED:
        allowed += row * allowed_stride
    G: tl.constexpr = TILE // GROUP
    k = tl.full((), 0, tl.int32)
    p = tl.full((), 1.0, tl.float32)
    m_bound = tl.full((), 0.0, tl.float32)
    if K_EACH > -2:
        wanted = parameter(top_k, entry, K_EACH).to(tl.int64)
        k = tl.where((wanted > 0) & (wanted < V), wanted, 0).to(tl.int32)
    if P_EACH > -2:
        p = parameter(top_p, entry, P_EACH).to(tl.float32)
    if M_EACH > -2:
        m_bound = parameter(min_p, entry, M_EACH).to(tl.float32)
    pdl_wait(USE_PDL)
    pdl_trigger(USE_PDL)
    group_top, group_mass = load_groups(work, S, G, GP)
    g = tl.arange(0, GP)
    bounds = group_top
    if FREE:
        bounds = tl.load(work + scratch_offset(S, G) + g, mask=g < S * G, other=0.0)
    filters = (k > 0) | (p < 1.0) | (m_bound > 0.0)
    top, least, tokens, held_nan, Z, moment = merge_groups(
        group_top, group_mass, work, S, tiles_per_program, T, ENTROPY, G, GROUP, GP
    )
    nan = nan | held_nan
    kept, mass = tokens, Z
    winner = tl.full((), 0, tl.int64)
    threshold = tl.full((), -float("inf"), tl.float32)
    threshold_id = tl.full((), -1, tl.int64)
    search = row < 0
    free = row < 0
    if (bad == 0) & (tokens > 0) & (padding == 0):
        if greedy:
            winner = first_best_id(x, V, group_top, S * G, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
            kept = tl.minimum(tokens, 1)
            mass = tl.full((), 1.0, tl.float32)
            moment = tl.full((), 0.0, tl.float32)
            everything = (tokens == 1) & (top < float("inf"))
            threshold = tl.where(everything, threshold, top)
            threshold_id = tl.where(everything, threshold_id, winner)
        else:
            free = filters == 0
            if not FREE:
                if filters:
                    if KEEP_ALL:
                        search = row >= 0
                    else:
                        search = k > K
                        if search == 0:
                            scratch = counts + scratch_offset(S, G)
                            found, certain = gather_candidates(
                                x, V, top, least, tl.where(k > 0, k, K - K // 4), S * G, group_top, scratch,
                                column_stride, allowed, HAS_ALLOWED, UNIT, GROUP, K, C,
                            )  # fmt: skip
                            kept, best, last, in_all, keep, y = filter_candidates(
                                scratch, found, certain, top, T, tokens, Z, k, p, m_bound, noise_seed, noise_step,
                                noise_stream, ORDER, K, C,
                            )  # fmt: skip
                            search = (kept > certain) & (certain < tokens)
                            winner = tl.minimum(key_id(best), V - 1)
                            mass = in_all.to(tl.float32) / WEIGHT_UNITS
                            if ENTROPY:
                                w = tl.where(keep, tl.exp(y), 0.0)
                                each = to_fixed(tl.where(w > 0.0, -rounded_product(w, y), 0.0), C)
                                moment = -from_fixed(tl.sum(each, 0), C)
                            everything = (kept == tokens) & (top < float("inf"))
                            threshold = tl.where(everything, threshold, key_value(last))
                            threshold_id = tl.where(everything, threshold_id, key_id(last))
        if free:
            if not FREE:
                bounds = tl.load(work + scratch_offset(S, G) + g, mask=g < S * G, other=0.0)
            winner = gumbel_argmax(
                x, V, group_top, bounds, S * G, top, T, noise_seed, noise_step, noise_stream, column_stride, allowed,
                HAS_ALLOWED, UNIT, GROUP,
            )  # fmt: skip
            if top == float("inf"):
                threshold = top
                threshold_id = last_best_id(x, V, group_top, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
    if SEARCH:
        tl.store(ints + PENDING * N + row, search.to(tl.int32))
    write_results(
        row, N, x, column_stride, V, allowed, work, raw, raw_row_stride, raw_column_stride, raw_work, S,
        tiles_per_program, invalid_token, longs, ints, floats, row_stats, padding, bad, greedy, nan, T, top, tokens, Z,
        winner, kept, kept_mass=mass, moment=moment, threshold=threshold, threshold_id=threshold_id,
        was_searched=row < 0,
        HAS_ALLOWED=HAS_ALLOWED, UNIT=UNIT, RAW=RAW, ENTROPY=ENTROPY, ROW_STATS=ROW_STATS, G=G, GROUP=GROUP, GP=GP,
    )  # fmt: skip
