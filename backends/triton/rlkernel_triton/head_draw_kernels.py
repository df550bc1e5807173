"""Kernels of lm_head_sample@1: tiles of the logits, what a row keeps of each of them, and the draw at the end.

`head_draw` multiplies, caps and keeps: a program's logits pass through a piece of memory of its own, which stays in the
cache, since a row is wanted in one place where a product leaves its columns in many. Where torch's formulas edit the
logits first, `head_logits` writes a slab of columns and `draw_slab` keeps what it holds. A row keeps, of tiles of 128
tokens: the best logit and its first token, the token that wins the race among them, sums of exponentials relative to
the best, and a count. `draw_row` joins the tiles in order. Tiles depend neither on slabs nor on programs, so a row's
bits depend on the row alone.

The race: with E = -ln(1 - u) the token with the least E exp(-y) is the one whose y + g is largest.

Legend: N rows · D hidden · V vocabulary · S tiles of V · R rows that are looked at together. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.arithmetic import cap, tree_sum
from rlkernel_triton.head_kernels import place_of, tile_logits
from rlkernel_triton.sampling.noise import exponential, words_of
from rlkernel_triton.sampling.results import request
from rlkernel_triton.sampling.rows import floor_of, parameter, times
from rlkernel_triton.sampling.rows import place_of as slot_of

NEVER: tl.constexpr = tl.constexpr(-float("inf"))
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
STEPS: tl.constexpr = tl.constexpr(7)  # of a sum over a tile of 2 ** 7 tokens
# Planes of `parts` [8, N, S] fp32, the last four where the raw law is asked for, and of `places` [4, N, S] int32.
TOP: tl.constexpr = tl.constexpr(0)  # best logit of the tile
TOTAL: tl.constexpr = tl.constexpr(1)  # sum of exp((x - top) / T)
DRAWN_X: tl.constexpr = tl.constexpr(2)  # logit and E of the token that wins the race
DRAWN_E: tl.constexpr = tl.constexpr(3)
DRAWN_RAW: tl.constexpr = tl.constexpr(4)  # its logit before the edits
BEST_RAW: tl.constexpr = tl.constexpr(5)
RAW_TOP: tl.constexpr = tl.constexpr(6)
RAW_TOTAL: tl.constexpr = tl.constexpr(7)
BEST: tl.constexpr = tl.constexpr(0)
DRAWN: tl.constexpr = tl.constexpr(1)
LAST: tl.constexpr = tl.constexpr(2)  # the last token that can be drawn
COUNT: tl.constexpr = tl.constexpr(3)  # tokens that can be drawn; -1 - count where the logits hold NaN


@triton.jit
def first_of(score, ids, there, V):
    """(the least score of each row, the lowest id that has it)."""
    least = tl.min(tl.where(there, score, float("inf")), 1)
    return least, tl.min(tl.where(there & (score == least[:, None]), ids[None, :], V), 1)


@triton.jit
def value_at(v, ids, at):
    """The value of one id of each row."""
    return tl.sum(tl.where(ids[None, :] == at[:, None], v, 0.0), 1)


@triton.jit
def keep(
    given,  # [R, TILE] logits, which may be NaN; -inf outside
    before,  # the same before the edits
    allowed, allowed_stride, row, first, inside, slot, last_slot, temperature, seed, step, noise_stream,
    parts, places, N, V, S,
    HAS_ALLOWED: tl.constexpr, HAS_SLOT: tl.constexpr, RAW: tl.constexpr, T_EACH: tl.constexpr,
    SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What rows [R] keep of the tile of ids that begins at `first`; stored where `inside`."""
    ids = first + tl.arange(0, TILE)
    place, _, _ = slot_of(row, slot, last_slot, HAS_SLOT)
    T = parameter(temperature, place, T_EACH).to(tl.float32) + tl.zeros([R], tl.float32)
    T = tl.where((T > 0.0) & (T < float("inf")), T, 1.0)
    nan = tl.max((given != given).to(tl.int32), 1)
    v = tl.where(given == given, given, NEVER)
    if HAS_ALLOWED:
        word = tl.load(allowed + row[:, None] * allowed_stride + (ids >> 5)[None, :], mask=(ids < V)[None, :], other=0)
        v = tl.where(((word >> (ids & 31).to(tl.int32)[None, :]) & 1) != 0, v, NEVER)
    top = tl.max(v, 1)
    there = (ids < V)[None, :] & (v > floor_of(top)[:, None])
    best = tl.min(tl.where(there & (v == top[:, None]), ids[None, :], V), 1)
    y = tl.where(v == top[:, None], 0.0, (v - top[:, None]) / T[:, None])
    block = (first >> 2) + tl.arange(0, TILE // 4)[None, :] + tl.zeros([R, 1], tl.int32)
    own = parameter(seed, place, SEED_EACH) + tl.zeros([R], tl.int64)
    count = parameter(step, place, STEP_EACH) + tl.zeros([R], tl.int64)
    words = tl.reshape(words_of(own[:, None], count[:, None], block, noise_stream), [R, TILE])
    e = exponential(words)
    _, drawn = first_of(e * tl.exp2(-y * LOG2E), ids, there, V)  # far below the best it overflows; at the best never
    plane = N.to(tl.int64) * S
    at = row * S + first // TILE
    out = parts + at
    tl.store(out + TOP * plane, top, mask=inside)
    tl.store(out + TOTAL * plane, tree_sum(tl.where(there, tl.exp(y), 0.0), STEPS), mask=inside)
    tl.store(out + DRAWN_X * plane, value_at(tl.where(there, v, 0.0), ids, drawn), mask=inside)
    tl.store(out + DRAWN_E * plane, value_at(e, ids, drawn), mask=inside)
    if RAW:
        raw = tl.where(before == before, before, NEVER)
        raw_top = tl.max(raw, 1)
        z = tl.where(raw == raw_top[:, None], 0.0, raw - raw_top[:, None])
        tl.store(out + DRAWN_RAW * plane, value_at(raw, ids, drawn), mask=inside)
        tl.store(out + BEST_RAW * plane, value_at(raw, ids, best), mask=inside)
        tl.store(out + RAW_TOP * plane, raw_top, mask=inside)
        tl.store(out + RAW_TOTAL * plane, tree_sum(tl.where(raw > NEVER, tl.exp(z), 0.0), STEPS), mask=inside)
    some = tl.sum(there.to(tl.int32), 1)
    into = places + at
    tl.store(into + BEST * plane, best, mask=inside)
    tl.store(into + DRAWN * plane, drawn, mask=inside)
    tl.store(into + LAST * plane, tl.max(tl.where(there, ids[None, :], -1), 1), mask=inside)
    tl.store(into + COUNT * plane, tl.where(nan > 0, -1 - some, some), mask=inside)


@triton.jit(do_not_specialize=["N", "last_slot", "noise_stream", "allowed_stride", "seed", "step"])
def head_draw(
    x,  # [N, D] hidden states, D contiguous
    weight,  # [V, D]
    bias,  # [V], read where HAS_BIAS
    allowed,  # [N, words] int32, read where HAS_ALLOWED
    slot,  # [N], read where HAS_SLOT
    temperature, seed, step,  # numbers, or tensors with one entry, or with one per row or slot
    room,  # [programs, least of N and BM, SPAN] fp32
    parts, places,
    N, D, V, S, x_stride, head_stride, head_step, scale, softcap, allowed_stride, last_slot, noise_stream,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALLOWED: tl.constexpr, HAS_SLOT: tl.constexpr,
    RAW: tl.constexpr, T_EACH: tl.constexpr, SEED_EACH: tl.constexpr, STEP_EACH: tl.constexpr,
    OPERAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every tile of every row, by programs that go on to the next span of columns. SPAN: a multiple of BN and TILE."""
    blocks, spans = tl.cdiv(N, BM), tl.cdiv(V, SPAN)
    here = room + tl.program_id(0).to(tl.int64) * tl.minimum(N, BM) * SPAN
    for work in range(tl.program_id(0), blocks * spans, tl.num_programs(0)):
        block, span = place_of(work, blocks, spans, GROUP)
        of_block = tl.arange(0, BM)
        r = block * BM + of_block
        inside = r < N
        for part in tl.static_range(SPAN // BN):
            along = part * BN + tl.arange(0, BN)
            y = tile_logits(
                x, weight, bias, r, inside, span * SPAN + along, D, V, x_stride, head_stride, head_step, scale,
                HAS_BIAS, OPERAND, BM, BN, BK,
            )  # fmt: skip
            tl.store(here + of_block[:, None] * SPAN + along[None, :], y, mask=inside[:, None])
        tl.debug_barrier()  # other threads of this program read what was written
        rows = tl.minimum(N - block * BM, BM)
        for q in range(tl.cdiv(rows, R) * (SPAN // TILE)):
            of_rows = (q // (SPAN // TILE)) * R + tl.arange(0, R)
            there = of_rows < rows
            of_rows = tl.minimum(of_rows, rows - 1)
            at = (q % (SPAN // TILE)) * TILE
            first = span * SPAN + at
            if first < V:
                given = tl.load(here + of_rows[:, None] * SPAN + (at + tl.arange(0, TILE))[None, :])
                if HAS_CAP:  # here, where a thread holds few of them
                    given = tl.where((first + tl.arange(0, TILE) < V)[None, :], cap(given, softcap), NEVER)
                keep(
                    given, given, allowed, allowed_stride, (block * BM + of_rows).to(tl.int64), first, there, slot,
                    last_slot, temperature, seed, step, noise_stream, parts, places, N, V, S,
                    HAS_ALLOWED, HAS_SLOT, RAW, T_EACH, SEED_EACH, STEP_EACH, R, TILE,
                )  # fmt: skip
        tl.debug_barrier()  # all of it has been read


@triton.jit(do_not_specialize=["n"])
def head_logits(
    x, weight, bias, out, n, D, width, x_stride, head_stride, head_step, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of fp32 logits [n, width] of rows of the head that weight and bias begin with."""
    block, tile = place_of(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), GROUP)
    r = block * BM + tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    inside = r < n
    y = tile_logits(
        x, weight, bias, r, inside, column, D, width, x_stride, head_stride, head_step, scale, HAS_BIAS, OPERAND,
        BM, BN, BK,
    )  # fmt: skip
    if HAS_CAP:
        y = cap(y, softcap)
    at = r.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + at, y, mask=inside[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["first", "N", "last_slot", "noise_stream", "seed", "step"])
def draw_slab(
    slab, raw, slot, temperature, seed, step, parts, places, first, width, N, V, S, last_slot, noise_stream,
    HAS_SLOT: tl.constexpr, RAW: tl.constexpr, T_EACH: tl.constexpr, SEED_EACH: tl.constexpr,
    STEP_EACH: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of R rows, of an edited slab [N, width] whose first id is `first`; raw: the logits before the edits."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = row < N
    row = tl.minimum(row, N - 1)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = row[:, None] * width + column[None, :]
    given = tl.load(slab + at, mask=(column < width)[None, :], other=NEVER)
    before = given
    if RAW:
        before = tl.load(raw + at, mask=(column < width)[None, :], other=NEVER)
    keep(
        given, before, slab, 0, row, first + tl.program_id(1) * TILE, inside, slot, last_slot, temperature, seed, step,
        noise_stream, parts, places, N, V, S, False, HAS_SLOT, RAW, T_EACH, SEED_EACH, STEP_EACH, R, TILE,
    )  # fmt: skip


@triton.jit
def less(a, b):
    """a - b, where equal infinities differ by 0."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit(do_not_specialize=["N", "invalid_token", "last_slot"])
def draw_row(
    parts, places, spoiled, slot, temperature, longs, ints, floats, N, S, invalid_token, last_slot,
    HAS_SPOILED: tl.constexpr, HAS_SLOT: tl.constexpr, RAW: tl.constexpr, T_EACH: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """One row: its tiles joined. spoiled: 1 the logits held NaN, 2 a parameter has no meaning."""
    row = tl.program_id(0).to(tl.int64)
    _, padding, bad, hot, T, nan = request(
        row, slot, last_slot, temperature, spoiled, HAS_SLOT, HAS_SPOILED, T_EACH
    )  # fmt: skip
    t = tl.arange(0, SP)
    inside = t < S
    plane = N.to(tl.int64) * S
    part = parts + row * S + t
    place = places + row * S + t
    m = tl.load(part + TOP * plane, mask=inside, other=NEVER)
    count = tl.load(place + COUNT * plane, mask=inside, other=0)
    nan = tl.maximum(tl.max((count < 0).to(tl.int32), 0), nan)
    count = tl.where(count < 0, -1 - count, count)
    top = tl.max(m, 0)
    live = inside & (m > floor_of(top))
    scale = tl.exp(less(m, top) / T)
    mass = tl.sum(tl.where(live, times(tl.load(part + TOTAL * plane, mask=inside, other=0.0), scale), 0.0), 0)
    tokens = tl.sum(tl.where(live, count, 0), 0)
    x = tl.load(part + DRAWN_X * plane, mask=live, other=NEVER)
    score = less(x, top) / T - tl.log(tl.load(part + DRAWN_E * plane, mask=live, other=1.0))
    most = tl.max(tl.where(live, score, NEVER), 0)
    winner = tl.min(tl.where(live & (score == most), t, SP), 0)  # tiles are in the order of ids
    leader = tl.min(tl.where(live & (m == top), t, SP), 0)
    mine = t == tl.where(hot, leader, winner)
    token = tl.load(place + DRAWN * plane, mask=inside, other=0)
    token = tl.where(hot, tl.load(place + BEST * plane, mask=inside, other=0), token)
    token = tl.sum(tl.where(mine, token, 0), 0)
    y = less(tl.sum(tl.where(mine & live, x, 0.0), 0), top) / T + 0.0  # as in sampling.results
    lp = tl.where(hot, 0.0, y - tl.log(mass))
    last = tl.max(tl.where(live, tl.load(place + LAST * plane, mask=inside, other=-1), -1), 0)
    infinite = top == float("inf")
    cut = infinite | (hot & (tokens > 1))
    none = bad | (tokens == 0)
    dead = none | padding
    kept = tl.where(hot, tl.minimum(tokens, 1), tokens)
    status = nan * 2 + tl.where(bad, 8, infinite.to(tl.int32) * 4 + (tokens == 0).to(tl.int32))
    tl.store(longs + row, tl.where(dead, invalid_token, token).to(tl.int64))
    tl.store(longs + N + row, tl.where(dead | (cut == 0), -1, tl.where(hot, token, last)).to(tl.int64))
    tl.store(ints + row, tl.where(dead, 0, kept))
    tl.store(ints + N + row, tl.where(padding, 0, status))
    tl.store(floats + row, tl.where(padding, 0.0, tl.where(none, NEVER, lp)))
    tl.store(floats + N + row, tl.where(padding, 0.0, tl.where(none, NEVER, 0.0)))
    threshold = tl.where(none, float("inf"), tl.where(cut, top, NEVER))
    tl.store(floats + 2 * N + row, tl.where(padding, 0.0, threshold))
    if RAW:
        raw_x = tl.load(part + DRAWN_RAW * plane, mask=inside, other=0.0)
        raw_x = tl.where(hot, tl.load(part + BEST_RAW * plane, mask=inside, other=0.0), raw_x)
        raw_x = tl.sum(tl.where(mine, raw_x, 0.0), 0)
        raw_m = tl.load(part + RAW_TOP * plane, mask=inside, other=NEVER)
        raw_top = tl.max(raw_m, 0)
        raw_z = tl.load(part + RAW_TOTAL * plane, mask=inside, other=0.0)
        raw_mass = tl.sum(tl.where(raw_m > NEVER, times(raw_z, tl.exp(less(raw_m, raw_top))), 0.0), 0)
        raw_lp = less(raw_x, raw_top) - tl.log(raw_mass)
        tl.store(floats + 3 * N + row, tl.where(padding, 0.0, tl.where(none, float("nan"), raw_lp)))
