"""The kernel of the rows whose filters keep more than the candidates tell: the exact search, then the draw.

A program takes rows at equal distances, one after the other; where `select_and_sample` answered them all, it ends.
Legend: N rows · V vocabulary. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.gumbel_noise import BOUND_SLACK, exponential, exponential_bound, philox_words, uniform
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import (
    from_order_key,
    order_key,
    parameter,
    pdl_wait,
    rounded_product,
    row_request,
)
from rlkernel_triton.sample.results import PENDING, load_groups, merge_groups, write_results
from rlkernel_triton.sample.threshold_search import block_sum, load_block, search_kept
from rlkernel_triton.sample.tile_stats import scratch_offset

ROWS_AHEAD: tl.constexpr = tl.constexpr(16)  # rows whose marks are read at a time


@triton.jit
def sample_kept(
    x, V, top, T, kept, value, greater, seed, step, noise_stream, column_stride, allowed, HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(the token that wins, the mass of the kept tokens, their sum of w * y, the last kept id at `value`).

    A logarithm is taken in blocks alone where the first terms of its series say that somebody may win.
    """
    mass = tl.zeros([BLOCK // 4], tl.float32)
    moment = tl.zeros([BLOCK // 4], tl.float32)
    ties = tl.full((), 0, tl.int32)
    best = tl.full((), -float("inf"), tl.float32)
    latest = tl.full((), float("inf"), tl.float32)  # exp(-best): who comes later loses
    winner = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    room = kept - greater
    at_value = value.to(tl.int32)
    for start in range(0, V, BLOCK):
        ids, v, there = load_block(x, start, V, top, column_stride, allowed, HAS_ALLOWED, UNIT, BLOCK)
        key = order_key(v)
        tie = there & (key == at_value)
        n = block_sum(tie.to(tl.int32))
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
            moment += tl.sum(tl.where(w > 0.0, rounded_product(w, y), 0.0), 1)
        words = philox_words(seed, step, (start >> 2) + tl.arange(0, BLOCK // 4), noise_stream)
        hit = keep & (exponential_bound(uniform(words)) <= w * latest)
        if block_sum(hit.to(tl.int32)) > 0:
            score = tl.where(keep, y - tl.log(exponential(words)), -float("inf"))
            high = tl.max(tl.max(score, 1), 0)
            if high > best:
                best = high
                latest = tl.exp(-high) * BOUND_SLACK
                winner = tl.min(tl.min(tl.where(score == high, ids, V - 1), 1), 0)
    return winner.to(tl.int64), tl.sum(mass, 0), tl.sum(moment, 0), last.to(tl.int64)


@triton.jit(
    do_not_specialize=[
        "noise_stream", "seed", "step", "top_k", "last_slot", "allowed_stride", "words", "invalid_token", "V", "S", "N",
        "tiles_per_program",
    ]
)  # fmt: skip
def exact_sample(
    x,  # as everything here, of `select_and_sample`
    row_stride, column_stride, V, allowed, allowed_stride, slot, last_slot, temperature, top_k, top_p, min_p, seed,
    step, noise_stream,
    work,  # from `scratch_offset` on, GATHERED fp32 to work in
    words, S, N, tiles_per_program, spoiled, raw, raw_row_stride, raw_column_stride, invalid_token, longs, ints, floats,
    row_stats,
    HAS_ALLOWED: tl.constexpr, HAS_SLOT: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
    HAS_SPOILED: tl.constexpr, T_EACH: tl.constexpr, K_EACH: tl.constexpr, P_EACH: tl.constexpr, M_EACH: tl.constexpr,
    SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr, ORDER: tl.constexpr, KEEP_ALL: tl.constexpr, RAW: tl.constexpr,
    ENTROPY: tl.constexpr, ROW_STATS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr,
    BLOCK: tl.constexpr, GATHERED: tl.constexpr,
    USE_PDL: tl.constexpr,  # launched while `select_and_sample` runs
):  # fmt: skip
    """The rows of a program that were left to the search: every `programs`-th."""
    if WHOLE:
        V = V // 16 * 16
    pdl_wait(USE_PDL)
    programs = tl.num_programs(0)
    for first in range(tl.program_id(0), N, programs * ROWS_AHEAD):
        rows = first + tl.arange(0, ROWS_AHEAD) * programs
        if tl.max(tl.load(ints + PENDING * N + rows, mask=rows < N, other=0), 0) != 0:
            for j in range(ROWS_AHEAD):
                row = (first + j * programs).to(tl.int64)
                if tl.load(ints + PENDING * N + row, mask=row < N, other=0) != 0:
                    entry, padding, bad, greedy, T, nan = row_request(
                        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
                    )
                    at = x + row * row_stride
                    bits = allowed + row * allowed_stride if HAS_ALLOWED else allowed
                    row_work = work + row * words
                    G: tl.constexpr = TILE // GROUP
                    gathered = row_work + scratch_offset(S, G)
                    group_top, group_mass = load_groups(row_work, S, G, GP)
                    top, _, tokens, held_nan, Z, moment = merge_groups(
                        group_top, group_mass, row_work, S, tiles_per_program, T, False, G, GROUP, GP
                    )
                    k = tl.full((), 0, tl.int32)
                    p = tl.full((), 1.0, tl.float32)
                    min_p_bound = tl.full((), 0.0, tl.float32)
                    if K_EACH > -2:
                        k = tl.minimum(parameter(top_k, entry, K_EACH).to(tl.int64), V).to(tl.int32)
                    if P_EACH > -2:
                        p = parameter(top_p, entry, P_EACH).to(tl.float32)
                    if M_EACH > -2:
                        min_p_bound = parameter(min_p, entry, M_EACH).to(tl.float32)
                    kept, value, greater = search_kept(
                        at, V, top, T, tokens, Z, k, p, m=min_p_bound, gathered=gathered, column_stride=column_stride,
                        allowed=bits, ORDER=ORDER, KEEP_ALL=KEEP_ALL, HAS_ALLOWED=HAS_ALLOWED, UNIT=UNIT, BLOCK=BLOCK,
                        GATHERED=GATHERED,
                    )  # fmt: skip
                    winner, mass, moment, last = sample_kept(
                        at, V, top, T, kept, value, greater,
                        seed=parameter(seed, entry, SEED_EACH).to(tl.int64),
                        step=parameter(step, entry, STEP_EACH).to(tl.int64),
                        noise_stream=noise_stream, column_stride=column_stride, allowed=bits, HAS_ALLOWED=HAS_ALLOWED,
                        UNIT=UNIT, ENTROPY=ENTROPY, BLOCK=BLOCK,
                    )  # fmt: skip
                    everything = (kept == tokens) & (top < float("inf"))
                    threshold = tl.where(everything, -float("inf"), from_order_key(value.to(tl.int32)))
                    write_results(
                        row, N, at, column_stride, V, bits, row_work, raw, raw_row_stride, raw_column_stride,
                        raw_work=row_work + N.to(tl.int64) * words, S=S, tiles_per_program=tiles_per_program,
                        invalid_token=invalid_token, longs=longs, ints=ints, floats=floats, row_stats=row_stats,
                        padding=padding, bad=bad, greedy=greedy, nan=nan | held_nan, T=T, top=top, tokens=tokens, Z=Z,
                        winner=winner, kept=kept, kept_mass=mass, moment=moment, threshold=threshold,
                        threshold_id=tl.where(everything, -1, last), was_searched=row >= 0, HAS_ALLOWED=HAS_ALLOWED,
                        UNIT=UNIT, RAW=RAW, ENTROPY=ENTROPY, ROW_STATS=ROW_STATS, G=G, GROUP=GROUP, GP=GP,
                    )  # fmt: skip
