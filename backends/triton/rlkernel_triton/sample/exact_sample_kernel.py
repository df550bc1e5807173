"""The kernel of the rows whose filters keep more than the candidates tell: the exact search, then the draw.

A program takes rows at equal distances, one after the other; where `finish` answered them all it ends at once.
Legend: N rows · V vocabulary. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.gumbel_noise import SLACK, early, exponential, uniform, words_of
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.sample.results import PENDING, groups_of, request, settle, summed
from rlkernel_triton.sample.rows import ordered, parameter, times, unordered, waited
from rlkernel_triton.sample.threshold_search import block_of, kept_by_search, total
from rlkernel_triton.sample.tile_stats import scratch_at

AHEAD: tl.constexpr = tl.constexpr(16)  # rows whose marks are read at a time


@triton.jit
def drawn(
    x, V, top, T, kept, value, greater, seed, step, noise_stream, column_stride, allowed, HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(the token that wins, the mass of the kept tokens, their sum of w * y, the last kept id at `value`).

    A logarithm is taken in blocks alone where the first terms of its series say that somebody may win.
    """
    mass = tl.zeros([BLOCK // 4], tl.float32)
    tilted = tl.zeros([BLOCK // 4], tl.float32)
    ties = tl.full((), 0, tl.int32)
    best = tl.full((), -float("inf"), tl.float32)
    latest = tl.full((), float("inf"), tl.float32)  # exp(-best): who comes later loses
    winner = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    room = kept - greater
    at_value = value.to(tl.int32)
    for start in range(0, V, BLOCK):
        ids, v, there = block_of(x, start, V, top, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK)
        key = ordered(v)
        tie = there & (key == at_value)
        n = total(tie.to(tl.int32))
        if ties + n > room:
            each = tl.sum(tie.to(tl.int32), 1)
            before = ties + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(tie.to(tl.int32), 1)
            tie = tie & (before <= room)
        ties += n
        if n > 0:
            last = tl.maximum(last, tl.max(tl.max(tl.where(tie, ids, -1), 1), 0))
        keep = (there & (key > at_value)) | tie
        y = tl.where(keep, tl.where(v == top, 0.0, (v - top) / T), -float("inf"))
        w = tl.exp(y)
        mass += tl.sum(w, 1)
        if ENTROPY:
            tilted += tl.sum(tl.where(w > 0.0, times(w, y), 0.0), 1)
        words = words_of(seed, step, (start >> 2) + tl.arange(0, BLOCK // 4), noise_stream)
        hit = keep & (early(uniform(words)) <= w * latest)
        if total(hit.to(tl.int32)) > 0:
            score = tl.where(keep, y - tl.log(exponential(words)), -float("inf"))
            high = tl.max(tl.max(score, 1), 0)
            if high > best:
                best = high
                latest = tl.exp(-high) * SLACK
                winner = tl.min(tl.min(tl.where(score == high, ids, V - 1), 1), 0)
    return winner.to(tl.int64), tl.sum(mass, 0), tl.sum(tilted, 0), last.to(tl.int64)


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
        "N",
        "per",
    ]
)
def searched(
    x,  # as everything here, of `finish.finish`
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
    work,  # from `scratch_at` on, FEW fp32 to work in
    words,
    S,
    N,
    per,
    spoiled,
    raw,
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
    RAW: tl.constexpr,
    ENTROPY: tl.constexpr,
    LAWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    EDGE: tl.constexpr,  # launched while `finish` runs
):
    """The rows of a program that were left to the search: every `programs`-th."""
    if WHOLE:
        V = V // 16 * 16
    waited(EDGE)
    programs = tl.num_programs(0)
    for first in range(tl.program_id(0), N, programs * AHEAD):
        ahead = first + tl.arange(0, AHEAD) * programs
        if tl.max(tl.load(ints + PENDING * N + ahead, mask=ahead < N, other=0), 0) != 0:
            for j in range(AHEAD):
                row = (first + j * programs).to(tl.int64)
                if tl.load(ints + PENDING * N + row, mask=row < N, other=0) != 0:
                    place, padding, bad, greedy, T, nan = request(
                        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
                    )
                    at = x + row * row_stride
                    bits = allowed + row * allowed_stride if HAS_ALLOWED else allowed
                    sums = work + row * words
                    G: tl.constexpr = TILE // GROUP
                    few = sums + scratch_at(S, G)
                    m, z = groups_of(sums, S, G, GP)
                    top, _, tokens, held_nan, Z, tilted = summed(m, z, sums, S, per, T, False, G, GROUP, GP)
                    k = tl.full((), 0, tl.int32)
                    p = tl.full((), 1.0, tl.float32)
                    low = tl.full((), 0.0, tl.float32)
                    if K_EACH > -2:
                        k = tl.minimum(parameter(top_k, place, K_EACH).to(tl.int64), V).to(tl.int32)
                    if P_EACH > -2:
                        p = parameter(top_p, place, P_EACH).to(tl.float32)
                    if M_EACH > -2:
                        low = parameter(min_p, place, M_EACH).to(tl.float32)
                    kept, value, greater = kept_by_search(
                        at,
                        V,
                        top,
                        T,
                        tokens,
                        Z,
                        k,
                        p,
                        low,
                        few,
                        column_stride,
                        bits,
                        ORDER,
                        KEEP_ALL,
                        HAS_ALLOWED,
                        UNIT,
                        BLOCK,
                        FEW,
                    )
                    winner, mass, tilted, last = drawn(
                        at,
                        V,
                        top,
                        T,
                        kept,
                        value,
                        greater,
                        parameter(seed, place, SEED_EACH).to(tl.int64),
                        parameter(step, place, STEP_EACH).to(tl.int64),
                        noise_stream,
                        column_stride,
                        bits,
                        HAS_ALLOWED,
                        UNIT,
                        ENTROPY,
                        BLOCK,
                    )
                    everything = (kept == tokens) & (top < float("inf"))
                    cut = tl.where(everything, -float("inf"), unordered(value.to(tl.int32)))
                    settle(
                        row,
                        N,
                        at,
                        column_stride,
                        bits,
                        raw,
                        raw_row_stride,
                        raw_column_stride,
                        sums + N.to(tl.int64) * words,
                        S,
                        per,
                        invalid_token,
                        longs,
                        ints,
                        floats,
                        laws,
                        padding,
                        bad,
                        greedy,
                        nan | held_nan,
                        T,
                        top,
                        tokens,
                        Z,
                        winner,
                        kept,
                        mass,
                        tilted,
                        cut,
                        tl.where(everything, -1, last),
                        row >= 0,
                        HAS_ALLOWED,
                        UNIT,
                        RAW,
                        ENTROPY,
                        LAWS,
                        G,
                        GROUP,
                        GP,
                    )
