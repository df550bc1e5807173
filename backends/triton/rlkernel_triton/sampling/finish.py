"""The end of a draw, one program a row: add the tiles up, find what the filters keep, draw, and say under which law.

Rows whose filters keep more than the candidates tell are left to `search.py`, which is marked in the results.
Results of a row depend on the row alone: tiles are merged in order, and sums have fixed shapes.
Legend: N rows · V vocabulary · S tiles a row · SP = S padded to a power of two. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.candidates import gather, kept_of
from rlkernel_triton.sampling.noise import gumbel
from rlkernel_triton.sampling.results import PENDING, request, settle, summed
from rlkernel_triton.sampling.rows import NOTHING, floor_of, id_of, logits_at, parameter, ranked, times, value_of
from rlkernel_triton.sampling.stream import BEST, GROUPS, WINNER, as_int32, filtered


@triton.jit
def first_best(
    x,
    V,
    work,
    S,
    top,
    column_stride,
    allowed,
    HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    SP: tl.constexpr,
):
    """The lowest id of the best logit: it is in the first tile that has it."""
    t = tl.arange(0, SP)
    m = tl.load(work + BEST * S + t, mask=t < S, other=-float("inf"))
    tile = tl.min(tl.where((m == top) & (t < S), t, S - 1), 0)
    ids = tile * TILE + tl.arange(0, TILE)
    v = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
    return tl.min(tl.where(v == top, ids, V - 1), 0).to(tl.int64)


@triton.jit
def last_best(
    x, V, work, S, top, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr
):
    """The highest id of the best logit, tile by tile."""
    last = tl.full((), -1, tl.int32)
    for tile in range(S):
        if tl.load(work + BEST * S + tile) == top:
            ids = tile * TILE + tl.arange(0, TILE)
            v = logits_at(x, ids, ids < V, column_stride, allowed, HAS_ALLOWED, UNIT)
            last = tl.max(tl.where(v == top, ids, -1), 0)
    return last.to(tl.int64)


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
    x, V, counts, S, per, top, T, seed, step, noise_stream, column_stride, allowed,
    HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """The token that wins without a filter: the best of the programs' winners, and of all tokens of undecided ones."""
    parts = tl.cdiv(S, per)
    c = tl.arange(0, SP)
    ids = tl.load(counts + WINNER * S + c, mask=c < parts, other=V)
    there = (ids >= 0) & (ids < V)
    best = tl.max(
        score_of(x, ids, there, top, T, seed, step, noise_stream, column_stride, allowed, HAS_ALLOWED, UNIT), 0
    )
    if tl.min(ids, 0) < 0:
        for part in range(parts):
            if tl.load(counts + WINNER * S + part) < 0:
                for start in range(part * per * TILE, (part + 1) * per * TILE, TILE):
                    all_of = start + tl.arange(0, TILE)
                    score = score_of(
                        x,
                        all_of,
                        all_of < V,
                        top,
                        T,
                        seed,
                        step,
                        noise_stream,
                        column_stride,
                        allowed,
                        HAS_ALLOWED,
                        UNIT,
                    )
                    best = tl.maximum(best, tl.max(score, 0))
    return id_of(best)


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
    work,  # [N, words] of `stream.tiles`; behind the groups, K + 2 * C int32 to work in
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
    SP: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
):
    """One row: its results, from its tiles."""
    if WHOLE:
        V = V // 16 * 16
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
    top, tokens, Z, tilted, held_nan = summed(work, S, T, ENTROPY, SP)
    nan = nan | held_nan
    kept, mass = tokens, Z
    winner = tl.full((), 0, tl.int64)
    cut = tl.full((), -float("inf"), tl.float32)
    cut_id = tl.full((), -1, tl.int64)
    search = row < 0
    free = row < 0
    if (bad == 0) & (tokens > 0) & (padding == 0):
        if greedy:
            winner = first_best(x, V, work, S, top, column_stride, allowed, HAS_ALLOWED, UNIT, TILE, SP)
            kept = tl.minimum(tokens, 1)
            mass = tl.full((), 1.0, tl.float32)
            tilted = tl.full((), 0.0, tl.float32)
            everything = (tokens == 1) & (top < float("inf"))
            cut = tl.where(everything, cut, top)
            cut_id = tl.where(everything, cut_id, winner)
        else:
            filters = filtered(place, top_k, top_p, min_p, V, K_EACH, P_EACH, M_EACH)
            if K_EACH > -2 or P_EACH > -2 or M_EACH > -2:
                if filters:
                    k = tl.full((), 0, tl.int32)
                    p = tl.full((), 1.0, tl.float32)
                    low = tl.full((), 0.0, tl.float32)
                    if K_EACH > -2:
                        k = tl.minimum(parameter(top_k, place, K_EACH).to(tl.int64), V).to(tl.int32)
                    if P_EACH > -2:
                        p = parameter(top_p, place, P_EACH).to(tl.float32)
                    if M_EACH > -2:
                        low = parameter(min_p, place, M_EACH).to(tl.float32)
                    if KEEP_ALL:
                        search = row >= 0
                    else:
                        search = k > K
                        if search == 0:
                            scratch = counts + GROUPS * S + S * (TILE // GROUP)
                            found, certain = gather(
                                x, V, top, tl.where(k > 0, k, K - K // 4), S * (TILE // GROUP), work + GROUPS * S,
                                scratch, column_stride, allowed, HAS_ALLOWED, UNIT, GROUP, GP, K, C,
                            )  # fmt: skip
                            kept, key, y, order = kept_of(
                                scratch, found, certain, top, T, tokens, Z, k, p, low, ORDER, K, C
                            )
                            search = (kept > certain) & (certain < tokens)
                            keep = order < kept
                            w = tl.where(keep, tl.exp(y), 0.0)
                            mass = tl.sum(w, 0)
                            if ENTROPY:
                                tilted = tl.sum(tl.where(w > 0.0, times(w, y), 0.0), 0)
                            ids = id_of(key)
                            score = ranked(y + gumbel(noise_seed, noise_step, ids, noise_stream), ids)
                            winner = id_of(tl.max(tl.where(keep, score, NOTHING), 0))
                            everything = (kept == tokens) & (top < float("inf"))
                            last = tl.max(tl.where(order == kept - 1, key, NOTHING), 0)
                            cut = tl.where(everything, cut, value_of(last))
                            cut_id = tl.where(everything, cut_id, id_of(last))
                else:
                    free = row >= 0
            else:
                free = row >= 0
        if free:
            winner = winner_of(
                x, V, counts, S, per, top, T, noise_seed, noise_step, noise_stream, column_stride, allowed, HAS_ALLOWED,
                UNIT, TILE, SP,
            )  # fmt: skip
            if top == float("inf"):
                cut = top
                cut_id = last_best(x, V, work, S, top, column_stride, allowed, HAS_ALLOWED, UNIT, TILE)
    if SEARCH:
        tl.store(ints + PENDING * N + row, search.to(tl.int32))
    settle(
        row, N, x, column_stride, allowed, raw, raw_row_stride, raw_column_stride, raw_work, S, invalid_token,
        longs, ints, floats, laws, padding, bad, greedy, nan, T, top, tokens, Z, winner, kept, mass, tilted, cut,
        cut_id, row < 0, HAS_ALLOWED, UNIT, RAW, ENTROPY, LAWS, SP,
    )  # fmt: skip
