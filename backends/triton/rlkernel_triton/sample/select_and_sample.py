"""The end of a draw, one program a row: add the groups up, find what the filters keep, draw, and say under which law.

Rows whose filters keep more than the candidates tell are left to `search.py`, which is marked in the results.
Results of a row depend on the row alone: what programs add up here are integers, whose sums have no order.
Legend: N rows · V vocabulary · S tiles a row of G groups each · GP: S * G padded to a power of two.
Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.gumbel_noise import SLACK, gumbel
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.sample.candidates import UNITS, gather, kept_of
from rlkernel_triton.sample.results import PENDING, groups_of, request, settle, summed
from rlkernel_triton.sample.rows import (
    LARGEST,
    LOG2E,
    MOST,
    NOTHING,
    floor_of,
    followed,
    id_of,
    in_units,
    logits_at,
    of_units,
    parameter,
    ranked,
    times,
    value_of,
    waited,
)
from rlkernel_triton.sample.tile_stats import as_int32, scratch_at

BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # comes after every time, and is none


@triton.jit
def of_group(
    x, V, group, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr
):
    """(ids of a group, where the best logit stands among them)."""
    ids = group * GROUP + tl.arange(0, GROUP)
    return ids, logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT) == top


@triton.jit
def first_best(
    x, V, m, groups, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr
):
    """The lowest id of the best logit: it is in the first group that has it."""
    g = tl.arange(0, m.shape[0])
    first = tl.min(tl.where(m == top, g, groups - 1), 0)
    ids, best = of_group(x, V, first, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
    return tl.min(tl.where(best, ids, V - 1), 0).to(tl.int64)


@triton.jit
def last_best(x, V, m, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr):
    """The highest id of the best logit."""
    last = tl.max(tl.where(m == top, tl.arange(0, m.shape[0]), 0), 0)
    ids, best = of_group(x, V, last, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
    return tl.max(tl.where(best, ids, -1), 0).to(tl.int64)


@triton.jit
def score_of(
    x,
    ids,
    there,
    top,
    T,
    seed,
    step,
    noise_stream,
    column_stride,
    allowed,
    HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """`ranked` noised scores of ids, NOTHING where no token can be drawn."""
    v = logits_at(x, ids, there, column_stride, allowed, HAS_ALLOWED, UNIT)
    y = tl.where(v == top, 0.0, (v - top) / T)
    score = ranked(y + gumbel(seed, step, ids, noise_stream), ids)
    return tl.where(there & (v > floor_of(top)), score, NOTHING)


@triton.jit
def winner_of(
    x, V, m, times_of_groups, groups, top, T, seed, step, noise_stream, column_stride, allowed,
    HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The token that wins without a filter: the best of the groups whose bound is not above the time of the best.

    Nearly always that is one group, the one whose bound is the least.
    """
    g = tl.arange(0, m.shape[0])
    live = (g < groups) & (m > floor_of(top))
    later = tl.exp2(tl.where(m == top, 0.0, (top - m) * tl.minimum(LOG2E / T, LARGEST)))
    time = tl.where(live, times_of_groups * later, float("inf"))
    key = (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | g
    key = tl.where(live, key, BEYOND)
    first = tl.min(key, 0)
    best = tl.full((), NOTHING, tl.int64)
    until = tl.full((), float("inf"), tl.float32)
    while (first >> 32).to(tl.int32).to(tl.float32, bitcast=True) <= until:
        ids = (first & MOST).to(tl.int32) * GROUP + tl.arange(0, GROUP)
        score = score_of(
            x, ids, ids < V, top, T, seed, step, noise_stream, column_stride, allowed, HAS_ALLOWED, UNIT
        )  # fmt: skip
        best = tl.maximum(best, tl.max(score, 0))
        until = tl.exp2(-value_of(best) * LOG2E) * SLACK
        key = tl.where(key == first, BEYOND, key)
        first = tl.min(key, 0)
    return tl.minimum(id_of(best), V - 1)  # within the row, even where somebody writes to it meanwhile


@triton.jit(
    do_not_specialize=[
        "noise_stream",
        "seed",
        "step",
        "top_k",
        "last_slot",
        "allowed_stride",
        "words",
        "invalid_token",
        "V",
        "S",
        "per",
        "N",
    ]
)
def finish(
    x,  # [N, V] logits
    row_stride,
    column_stride,
    V,
    allowed,
    allowed_stride,
    slot,
    last_slot,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    step,
    noise_stream,
    work,  # [N, words] of `stream.tiles`; from `scratch_at` on, K + 4 * C int32 to work in
    words,
    S,
    N,
    per,  # tiles a program of `stream.tiles`
    spoiled,  # [N] int32: 1 the logits held NaN, 2 the edits or their parameters have no meaning
    raw,  # [N, V] logits before the edits
    raw_row_stride,
    raw_column_stride,
    invalid_token,
    longs,
    ints,
    floats,
    laws,
    HAS_ALLOWED: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_SPOILED: tl.constexpr,
    T_EACH: tl.constexpr,
    K_EACH: tl.constexpr,
    P_EACH: tl.constexpr,
    M_EACH: tl.constexpr,
    SEED_EACH: tl.constexpr,
    STEP_EACH: tl.constexpr,
    ORDER: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    SEARCH: tl.constexpr,  # rows may be left to a search
    RAW: tl.constexpr,
    ENTROPY: tl.constexpr,
    LAWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    EDGE: tl.constexpr,  # launched while `stream.tiles` runs, and `searched` while this does
):
    """One row: its results, from its tiles."""
    if WHOLE:
        V = V // 16 * 16
    FREE: tl.constexpr = K_EACH == -2 and P_EACH == -2 and M_EACH == -2  # no row has a filter
    row = tl.program_id(0).to(tl.int64)
    place, padding, bad, greedy, T, nan = request(
        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
    )
    noise_seed = parameter(seed, place, SEED_EACH).to(tl.int64)
    noise_step = parameter(step, place, STEP_EACH).to(tl.int64)
    x += row * row_stride
    raw_work = work + (N.to(tl.int64) + row) * words
    work += row * words
    counts = as_int32(work)
    if HAS_ALLOWED:
        allowed += row * allowed_stride
    G: tl.constexpr = TILE // GROUP
    k = tl.full((), 0, tl.int32)
    p = tl.full((), 1.0, tl.float32)
    low = tl.full((), 0.0, tl.float32)
    if K_EACH > -2:
        wanted = parameter(top_k, place, K_EACH).to(tl.int64)
        k = tl.where((wanted > 0) & (wanted < V), wanted, 0).to(tl.int32)
    if P_EACH > -2:
        p = parameter(top_p, place, P_EACH).to(tl.float32)
    if M_EACH > -2:
        low = parameter(min_p, place, M_EACH).to(tl.float32)
    waited(EDGE)
    followed(EDGE)
    m, z = groups_of(work, S, G, GP)
    g = tl.arange(0, GP)
    arrivals = m
    if FREE:
        arrivals = tl.load(work + scratch_at(S, G) + g, mask=g < S * G, other=0.0)
    filters = (k > 0) | (p < 1.0) | (low > 0.0)
    top, least, tokens, held_nan, Z, tilted = summed(m, z, work, S, per, T, ENTROPY, G, GROUP, GP)
    nan = nan | held_nan
    kept, mass = tokens, Z
    winner = tl.full((), 0, tl.int64)
    cut = tl.full((), -float("inf"), tl.float32)
    cut_id = tl.full((), -1, tl.int64)
    search = row < 0
    free = row < 0
    if (bad == 0) & (tokens > 0) & (padding == 0):
        if greedy:
            winner = first_best(x, V, m, S * G, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
            kept = tl.minimum(tokens, 1)
            mass = tl.full((), 1.0, tl.float32)
            tilted = tl.full((), 0.0, tl.float32)
            everything = (tokens == 1) & (top < float("inf"))
            cut = tl.where(everything, cut, top)
            cut_id = tl.where(everything, cut_id, winner)
        else:
            free = filters == 0
            if not FREE:
                if filters:
                    if KEEP_ALL:
                        search = row >= 0
                    else:
                        search = k > K
                        if search == 0:
                            scratch = counts + scratch_at(S, G)
                            found, certain = gather(
                                x, V, top, least, tl.where(k > 0, k, K - K // 4), S * G, m, scratch, column_stride,
                                allowed, HAS_ALLOWED, UNIT, GROUP, K, C,
                            )  # fmt: skip
                            kept, best, last, in_all, keep, y = kept_of(
                                scratch, found, certain, top, T, tokens, Z, k, p, low, noise_seed, noise_step,
                                noise_stream, ORDER, K, C,
                            )  # fmt: skip
                            search = (kept > certain) & (certain < tokens)
                            winner = tl.minimum(id_of(best), V - 1)
                            mass = in_all.to(tl.float32) / UNITS
                            if ENTROPY:
                                w = tl.where(keep, tl.exp(y), 0.0)
                                each = in_units(tl.where(w > 0.0, -times(w, y), 0.0), C)
                                tilted = -of_units(tl.sum(each, 0), C)
                            everything = (kept == tokens) & (top < float("inf"))
                            cut = tl.where(everything, cut, value_of(last))
                            cut_id = tl.where(everything, cut_id, id_of(last))
        if free:
            if not FREE:
                arrivals = tl.load(work + scratch_at(S, G) + g, mask=g < S * G, other=0.0)
            winner = winner_of(
                x, V, m, arrivals, S * G, top, T, noise_seed, noise_step, noise_stream, column_stride, allowed,
                HAS_ALLOWED, UNIT, GROUP,
            )  # fmt: skip
            if top == float("inf"):
                cut = top
                cut_id = last_best(x, V, m, top, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP)
    if SEARCH:
        tl.store(ints + PENDING * N + row, search.to(tl.int32))
    settle(
        row, N, x, column_stride, allowed, raw, raw_row_stride, raw_column_stride, raw_work, S, per, invalid_token,
        longs, ints, floats, laws, padding, bad, greedy, nan, T, top, tokens, Z, winner, kept, mass, tilted, cut,
        cut_id, row < 0, HAS_ALLOWED, UNIT, RAW, ENTROPY, LAWS, G, GROUP, GP,
    )  # fmt: skip
