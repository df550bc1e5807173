"""Kernels of lm_head_sample@1: logits of a slab of the head, what each row keeps of its tiles, and the draw at the end.

A slab is as many columns of the logits as the caller has room for. `head_logits` writes it, `draw_tile` reads it while
it is in the cache and keeps, for tiles of 1024 tokens: the best logit and its first token, the best noised token, sums
of exponentials relative to the best, and a count. `draw_row` joins the tiles in order. Tiles do not depend on slabs, so
a row's bits depend on the row alone.

Legend: N rows · D hidden · V vocabulary · S tiles of V. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.arithmetic import cap
from rlkernel_triton.head_kernels import place_of, tile_logits
from rlkernel_triton.sampling.noise import gumbel_from
from rlkernel_triton.sampling.rows import floor_of

NEVER: tl.constexpr = tl.constexpr(-float("inf"))
# Planes of `parts` [8, N, S] fp32, and of `places` [4, N, S] int32.
TOP: tl.constexpr = tl.constexpr(0)  # best logit of the tile
TOTAL: tl.constexpr = tl.constexpr(1)  # sum of exp((x - top) / T)
DRAWN_X: tl.constexpr = tl.constexpr(2)  # logit and noise of the best noised token
DRAWN_G: tl.constexpr = tl.constexpr(3)
DRAWN_RAW: tl.constexpr = tl.constexpr(4)  # its logit before the edits
BEST_RAW: tl.constexpr = tl.constexpr(5)
RAW_TOP: tl.constexpr = tl.constexpr(6)
RAW_TOTAL: tl.constexpr = tl.constexpr(7)
BEST: tl.constexpr = tl.constexpr(0)
DRAWN: tl.constexpr = tl.constexpr(1)
LAST: tl.constexpr = tl.constexpr(2)  # the last token that can be drawn
COUNT: tl.constexpr = tl.constexpr(3)  # tokens that can be drawn; -1 - count where the logits hold NaN


@triton.jit(do_not_specialize=["n"])
def head_logits(
    x, weight, bias, out, n, D, width, x_stride, head_stride, head_step, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, OPERAND: tl.constexpr, INTERPRETED: tl.constexpr,
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


@triton.jit
def first_of(score, ids, there, V):
    """(largest score, the lowest id that has it)."""
    most = tl.max(tl.where(there, score, NEVER), 0)
    return most, tl.min(tl.where(there & (score == most), ids, V), 0)


@triton.jit
def value_at(v, ids, at):
    """The value of one id of a tile."""
    return tl.sum(tl.where(ids == at, v, 0.0), 0)


@triton.jit(do_not_specialize=["first", "noise_stream", "allowed_stride", "N"])
def draw_tile(
    slab, raw, allowed, T, seed, step, parts, places, first, width, N, V, S, allowed_stride, noise_stream,
    HAS_ALLOWED: tl.constexpr, EDITED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one row, of a slab [N, width] whose first id is `first`; raw: the logits before the edits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    ids = first + column
    given = tl.load(slab + row * width + column, mask=inside, other=NEVER)
    nan = tl.max((given != given).to(tl.int32), 0)
    v = tl.where(given == given, given, NEVER)
    before = v
    if EDITED:
        before = tl.load(raw + row * width + column, mask=inside, other=NEVER)
        before = tl.where(before == before, before, NEVER)
    if HAS_ALLOWED:
        word = tl.load(allowed + row * allowed_stride + (ids >> 5), mask=inside, other=0)
        v = tl.where(((word >> (ids & 31).to(tl.int32)) & 1) != 0, v, NEVER)
    t = tl.load(T + row)
    top, best = first_of(v, ids, inside, V)
    there = inside & (v > floor_of(top))
    y = tl.where(there, tl.where(v == top, 0.0, (v - top) / t), NEVER)
    at_tile = first + tl.program_id(1) * TILE
    noise = gumbel_from(tl.load(seed + row), tl.load(step + row), at_tile, noise_stream, TILE)
    _, drawn = first_of(y + noise, ids, there, V)
    raw_top = tl.max(before, 0)
    z = tl.where(before == raw_top, 0.0, before - raw_top)
    plane = N.to(tl.int64) * S
    at = row * S + (first // TILE) + tl.program_id(1)
    out = parts + at
    tl.store(out + TOP * plane, top)
    tl.store(out + TOTAL * plane, tl.sum(tl.exp(y), 0))
    tl.store(out + DRAWN_X * plane, value_at(tl.where(there, v, 0.0), ids, drawn))
    tl.store(out + DRAWN_G * plane, value_at(noise, ids, drawn))
    tl.store(out + DRAWN_RAW * plane, value_at(before, ids, drawn))
    tl.store(out + BEST_RAW * plane, value_at(before, ids, best))
    tl.store(out + RAW_TOP * plane, raw_top)
    tl.store(out + RAW_TOTAL * plane, tl.sum(tl.where(before > NEVER, tl.exp(z), 0.0), 0))
    some = tl.sum(there.to(tl.int32), 0)
    into = places + at
    tl.store(into + BEST * plane, best)
    tl.store(into + DRAWN * plane, drawn)
    tl.store(into + LAST * plane, tl.max(tl.where(there, ids, -1), 0))
    tl.store(into + COUNT * plane, tl.where(nan > 0, -1 - some, some))


@triton.jit
def less(a, b):
    """a - b, where equal infinities differ by 0."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit(do_not_specialize=["N", "invalid_token"])
def draw_row(
    parts, places, T, greedy, flags, longs, ints, floats, N, S, invalid_token, SP: tl.constexpr,
):  # fmt: skip
    """One row: its tiles joined. flags: 1 the logits held NaN, 2 a parameter has no meaning, 4 padding."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, SP)
    inside = t < S
    plane = N.to(tl.int64) * S
    part = parts + row * S + t
    place = places + row * S + t
    m = tl.load(part + TOP * plane, mask=inside, other=NEVER)
    count = tl.load(place + COUNT * plane, mask=inside, other=0)
    temperature = tl.load(T + row)
    flag = tl.load(flags + row)
    hot = tl.load(greedy + row) != 0
    nan = tl.maximum(tl.max((count < 0).to(tl.int32), 0), flag & 1)
    count = tl.where(count < 0, -1 - count, count)
    top = tl.max(m, 0)
    live = inside & (m > floor_of(top))
    scale = tl.exp(less(m, top) / temperature)
    mass = tl.sum(tl.where(live, tl.load(part + TOTAL * plane, mask=inside, other=0.0) * scale, 0.0), 0)
    tokens = tl.sum(tl.where(live, count, 0), 0)
    x = tl.load(part + DRAWN_X * plane, mask=live, other=NEVER)
    score = less(x, top) / temperature + tl.load(part + DRAWN_G * plane, mask=live, other=0.0)
    most = tl.max(tl.where(live, score, NEVER), 0)
    winner = tl.min(tl.where(live & (score == most), t, SP), 0)  # tiles are in the order of ids
    leader = tl.min(tl.where(live & (m == top), t, SP), 0)
    chosen = tl.where(hot, leader, winner)
    mine = t == chosen
    token = tl.load(place + DRAWN * plane, mask=inside, other=0)
    token = tl.where(hot, tl.load(place + BEST * plane, mask=inside, other=0), token)
    token = tl.sum(tl.where(mine, token, 0), 0)
    y = less(tl.sum(tl.where(mine & live, x, 0.0), 0), top) / temperature
    lp = tl.where(hot, 0.0, y - tl.log(mass))
    raw_x = tl.load(part + DRAWN_RAW * plane, mask=inside, other=0.0)
    raw_x = tl.where(hot, tl.load(part + BEST_RAW * plane, mask=inside, other=0.0), raw_x)
    raw_x = tl.sum(tl.where(mine, raw_x, 0.0), 0)
    raw_m = tl.load(part + RAW_TOP * plane, mask=inside, other=NEVER)
    raw_top = tl.max(raw_m, 0)
    raw_z = tl.load(part + RAW_TOTAL * plane, mask=inside, other=0.0)
    raw_mass = tl.sum(tl.where(raw_m > NEVER, raw_z * tl.exp(less(raw_m, raw_top)), 0.0), 0)
    last = tl.max(tl.where(live, tl.load(place + LAST * plane, mask=inside, other=-1), -1), 0)
    infinite = top == float("inf")
    cut = infinite | (hot & (tokens > 1))
    bad = (flag & 2) != 0
    padding = (flag & 4) != 0
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
    raw_lp = less(raw_x, raw_top) - tl.log(raw_mass)
    tl.store(floats + 3 * N + row, tl.where(padding, 0.0, tl.where(none, float("nan"), raw_lp)))
