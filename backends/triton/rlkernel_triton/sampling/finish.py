"""The end of a draw, one program a row: add the tiles up, find what the filters keep, draw, and say under which law.

Results of a row depend on the row alone: tiles are merged in order, candidates are sorted, sums have fixed shapes.
Legend: N rows · V vocabulary · S tiles a row · SP = S padded to a power of two. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.candidates import gather, kept_by_candidates
from rlkernel_triton.sampling.noise import gumbel
from rlkernel_triton.sampling.rows import (
    MOST,
    NOTHING,
    floor_of,
    id_of,
    logits_at,
    parameter,
    place_of,
    ranked,
    unordered,
    value_of,
)
from rlkernel_triton.sampling.search import block_of, kept_by_search
from rlkernel_triton.sampling.stream import filtered


@triton.jit
def merged(best, total, S, SP: tl.constexpr):
    """(best logit of the row, sum of exp(x - best), which tiles count) of the raw law."""
    t = tl.arange(0, SP)
    m = tl.load(best + t, mask=t < S, other=-float("inf"))
    z = tl.load(total + t, mask=t < S, other=0.0)
    top = tl.max(m, 0)
    y = tl.where(m == top, 0.0, m - top)
    return top, tl.sum(tl.where(m > -float("inf"), z * tl.exp(y), 0.0), 0)


@triton.jit(
    do_not_specialize=["noise_stream", "V", "seed_number", "step_number", "k_number", "last_slot", "invalid_token"]
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
    best,
    best_id,
    count,
    total,
    moment,
    group_best,
    winners,
    S,
    scratch,  # [N, 2 * C] int64
    spoiled,  # [N] int32: 1 the logits held NaN, 2 the edits or their parameters have no meaning
    raw,  # [N, V] logits before the edits
    raw_row_stride,
    raw_column_stride,
    raw_best,
    raw_total,
    invalid_token,
    token,  # out [N] int64, as everything below: [N]
    logprob,
    log_kept_mass,
    kept_count,
    status,
    threshold,
    threshold_id,
    raw_logprob,
    entropy,
    laws,  # out [N, 5] fp32: best logit, T, log of the kept weights, best raw logit, log of the raw weights
    HAS_ALLOWED: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    HAS_SPOILED: tl.constexpr,
    T_EACH: tl.constexpr,
    K_EACH: tl.constexpr,
    P_EACH: tl.constexpr,
    M_EACH: tl.constexpr,
    SEED_EACH: tl.constexpr,
    STEP_EACH: tl.constexpr,
    ORDER: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    RAW: tl.constexpr,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SP: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its results, from its tiles."""
    row = tl.program_id(0).to(tl.int64)
    place, padding, foreign = place_of(row, slot, last_slot, HAS_SLOT)
    T = parameter(temperature, temperature_number, place, T_EACH).to(tl.float32)
    sound = (T >= 0.0) & (T < float("inf"))
    bad = foreign | (sound == 0)
    flags = row.to(tl.int32) * 0
    if HAS_SPOILED:
        flags = tl.load(spoiled + row)
    bad = bad | ((flags & 2) != 0)
    greedy = (T == 0.0) & (bad == 0)
    T = tl.where(greedy | bad, 1.0, T)
    noise_seed = parameter(seed, seed_number, place, SEED_EACH).to(tl.int64)
    noise_step = parameter(step, step_number, place, STEP_EACH).to(tl.int64)
    x += row * row_stride
    allowed += row * allowed_stride

    t = tl.arange(0, SP)
    m = tl.load(best + row * S + t, mask=t < S, other=-float("inf"))
    first = tl.load(best_id + row * S + t, mask=t < S, other=MOST)
    n = tl.load(count + row * S + t, mask=t < S, other=0)
    z = tl.load(total + row * S + t, mask=t < S, other=0.0)
    nan = tl.max((n < 0).to(tl.int32), 0) | (flags & 1)
    n = tl.where(n < 0, -1 - n, n)
    top = tl.max(m, 0)
    live = m > floor_of(top)
    shift = tl.where(live, tl.where(m == top, 0.0, (m - top) / T), -float("inf"))
    scale = tl.exp(shift)
    Z = tl.sum(tl.where(live, z * scale, 0.0), 0)
    tokens = tl.sum(tl.where(live, n, 0), 0)
    nothing = bad | (tokens == 0)
    best_token = tl.min(tl.where(m == top, first, MOST), 0).to(tl.int64)

    kept = tokens
    mass = Z
    tilted = tl.full((), 0.0, tl.float32)  # sum of w * y over the kept
    if ENTROPY:
        h = tl.load(moment + row * S + t, mask=t < S, other=0.0)
        tilted = tl.sum(tl.where(live & (scale > 0.0), scale * (h + z * tl.where(scale > 0.0, shift, 0.0)), 0.0), 0)
    winner = best_token
    cut = tl.full((), -float("inf"), tl.float32)
    cut_id = tl.full((), -1, tl.int64)
    searched = tl.full((), 0, tl.int32)
    if (nothing == 0) & (padding == 0):
        filters = filtered(place, top_k, k_number, top_p, p_number, min_p, m_number, V, K_EACH, P_EACH, M_EACH)
        if greedy:
            kept = tl.minimum(tokens, 1)
            mass = tl.full((), 1.0, tl.float32)
            tilted = tl.full((), 0.0, tl.float32)
            everything = (tokens == 1) & (top < float("inf"))
            cut = tl.where(everything, cut, top)
            cut_id = tl.where(everything, cut_id, best_token)
        else:
            search = top == float("inf")
            if (filters == 0) & (search == 0):
                c = tl.arange(0, 2 * SP)
                ids = tl.load(winners + row * S * 2 + c, mask=c < 2 * S, other=-1).to(tl.int64)
                there = (ids >= 0) & (ids < V)
                v = logits_at(x, ids, there, column_stride, allowed, HAS_ALLOWED)
                there = there & (v > -float("inf"))
                y = tl.where(v == top, 0.0, (v - top) / T)
                score = ranked(y + gumbel(noise_seed, noise_step, ids, noise_stream), ids)
                winner = id_of(tl.max(tl.where(there, score, NOTHING), 0))
            if filters | search:
                k = tl.full((), 0, tl.int32)
                p = tl.full((), 1.0, tl.float32)
                low = tl.full((), 0.0, tl.float32)
                if K_EACH > -2:
                    k = tl.minimum(parameter(top_k, k_number, place, K_EACH).to(tl.int64), V).to(tl.int32)
                if P_EACH > -2:
                    p = parameter(top_p, p_number, place, P_EACH).to(tl.float32)
                if M_EACH > -2:
                    low = parameter(min_p, m_number, place, M_EACH).to(tl.float32)
                if K_EACH > -2 or P_EACH > -2 or M_EACH > -2:
                    if KEEP_ALL:
                        search = search | filters
                    else:
                        search = search | (k > K)
                        if search == 0:
                            at, found, certain = gather(
                                x,
                                V,
                                top,
                                tl.where(k > 0, k, K),
                                S * (TILE // GROUP),
                                group_best + row * S * (TILE // GROUP),
                                scratch + row * 2 * C,
                                column_stride,
                                allowed,
                                HAS_ALLOWED,
                                GROUP,
                                GP,
                                K,
                                C,
                            )
                            c = tl.arange(0, C)
                            v = value_of(at)
                            ids = id_of(at)
                            y = tl.where(c < found, tl.where(v == top, 0.0, (v - top) / T), -float("inf"))
                            kept = kept_by_candidates(y, certain, tokens, Z, k, p, low, ORDER, C)
                            search = (kept > certain) & (certain < tokens)
                            if search == 0:
                                keep = c < kept
                                w = tl.where(keep, tl.exp(y), 0.0)
                                mass = tl.sum(w, 0)
                                tilted = tl.sum(tl.where(w > 0.0, w * y, 0.0), 0)
                                score = ranked(y + gumbel(noise_seed, noise_step, ids, noise_stream), ids)
                                winner = id_of(tl.max(tl.where(keep, score, NOTHING), 0))
                                last = tl.min(tl.where(keep, at, 0x7FFFFFFFFFFFFFFF), 0)
                                cut = tl.where(kept == tokens, cut, value_of(last))
                                cut_id = tl.where(kept == tokens, cut_id, id_of(last))
                if search:
                    searched += 1
                    kept, value, greater = kept_by_search(
                        x, V, top, T, tokens, Z, k, p, low, column_stride, allowed, ORDER, KEEP_ALL, HAS_ALLOWED, BLOCK
                    )
                    ties = tl.full((), 0, tl.int32)
                    mass = tl.full((), 0.0, tl.float32)
                    tilted = tl.full((), 0.0, tl.float32)
                    at_best = tl.full((), NOTHING, tl.int64)
                    last_tie = tl.full((), -1, tl.int64)
                    for start in range(0, V, BLOCK):
                        ids, v, there = block_of(x, start, V, top, column_stride, allowed, HAS_ALLOWED, BLOCK)
                        key = (ranked(v, ids) >> 32).to(tl.int64)
                        tie = there & (key == value)
                        inside = tie & (tl.cumsum(tie.to(tl.int32), 0) + ties <= kept - greater)
                        keep = (there & (key > value)) | inside
                        y = tl.where(keep, tl.where(v == top, 0.0, (v - top) / T), -float("inf"))
                        w = tl.exp(y)
                        mass += tl.sum(w, 0)
                        tilted += tl.sum(tl.where(w > 0.0, w * y, 0.0), 0)
                        score = ranked(y + gumbel(noise_seed, noise_step, ids, noise_stream), ids)
                        at_best = tl.maximum(at_best, tl.max(tl.where(keep, score, NOTHING), 0))
                        last_tie = tl.maximum(last_tie, tl.max(tl.where(inside, ids, -1), 0))
                        ties += tl.sum(tie.to(tl.int32), 0)
                    winner = id_of(at_best)
                    everything = (kept == tokens) & (top < float("inf"))
                    cut = tl.where(everything, -float("inf"), unordered(value.to(tl.int32)))
                    cut_id = tl.where(everything, -1, last_tie)

    dead = nothing | padding
    safe = tl.where(dead, 0, winner)
    v = logits_at(x, safe, dead == 0, column_stride, allowed, HAS_ALLOWED)
    y = tl.where(v == top, 0.0, (v - top) / T)
    log_mass = tl.log(mass)
    lp = tl.where(greedy, 0.0, y - log_mass)
    held = tl.where(greedy | (kept == tokens), 0.0, tl.minimum(tl.log(mass / Z), 0.0))
    tl.store(token + row, tl.where(dead, invalid_token, safe))
    tl.store(logprob + row, tl.where(padding, 0.0, tl.where(nothing, -float("inf"), lp)))
    tl.store(log_kept_mass + row, tl.where(padding, 0.0, tl.where(nothing, -float("inf"), held)))
    tl.store(kept_count + row, tl.where(dead, 0, kept))
    told = nan * 2 + tl.where(bad, 0, (top == float("inf")).to(tl.int32) * 4)
    told += tl.where(bad, 8, (tokens == 0).to(tl.int32)) + tl.where(searched > 0, 32, 0)
    tl.store(status + row, tl.where(padding, 0, told))
    tl.store(threshold + row, tl.where(padding, 0.0, tl.where(nothing, float("inf"), cut)))
    tl.store(threshold_id + row, tl.where(dead, -1, cut_id))
    if ENTROPY:
        e = tl.where(greedy, 0.0, log_mass - tilted / mass)
        tl.store(entropy + row, tl.where(padding, 0.0, tl.where(nothing, float("nan"), tl.maximum(e, 0.0))))
    tl.store(laws + row * 5, top)
    tl.store(laws + row * 5 + 1, T)
    tl.store(laws + row * 5 + 2, log_mass)
    if RAW:
        raw_top, raw_Z = merged(raw_best + row * S, raw_total + row * S, S, SP)
        r = tl.load(raw + row * raw_row_stride + safe * raw_column_stride).to(tl.float32)
        r = tl.where(r != r, -float("inf"), r)
        r = tl.where(r == raw_top, 0.0, r - raw_top) - tl.log(raw_Z)
        tl.store(raw_logprob + row, tl.where(padding, 0.0, tl.where(nothing, float("nan"), r)))
        tl.store(laws + row * 5 + 3, raw_top)
        tl.store(laws + row * 5 + 4, tl.log(raw_Z))
