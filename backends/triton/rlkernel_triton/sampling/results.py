"""What the kernels of a row share: its request, the sum of its tiles, and its results.

Legend: N rows · S tiles a row · SP = S padded to a power of two. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel_triton.sampling.rows import floor_of, in_pairs, logits_at, parameter, place_of, times
from rlkernel_triton.sampling.stream import BEST, COUNT, MOMENT, TOTAL, as_int32

# Rows of the results: [., N] each.
TOKEN: tl.constexpr = tl.constexpr(0)  # of int64
THRESHOLD_ID: tl.constexpr = tl.constexpr(1)
KEPT: tl.constexpr = tl.constexpr(0)  # of int32
STATUS: tl.constexpr = tl.constexpr(1)
PENDING: tl.constexpr = tl.constexpr(2)
LOGPROB: tl.constexpr = tl.constexpr(0)  # of fp32
LOG_KEPT_MASS: tl.constexpr = tl.constexpr(1)
THRESHOLD: tl.constexpr = tl.constexpr(2)
RAW_LOGPROB: tl.constexpr = tl.constexpr(3)
ENTROPY_OF: tl.constexpr = tl.constexpr(4)


@triton.jit
def request(
    row, slot, last_slot, temperature, spoiled, HAS_SLOT: tl.constexpr, HAS_SPOILED: tl.constexpr, T_EACH: tl.constexpr
):
    """(place of the parameters, padding, without meaning, greedy, T or 1, whether the logits held NaN)."""
    place, padding, foreign = place_of(row, slot, last_slot, HAS_SLOT)
    T = parameter(temperature, place, T_EACH).to(tl.float32)
    sound = (T >= 0.0) & (T < float("inf"))
    bad = foreign | (sound == 0)
    nan = row.to(tl.int32) * 0
    if HAS_SPOILED:
        flags = tl.load(spoiled + row)
        bad = bad | ((flags & 2) != 0)
        nan = flags & 1
    greedy = (T == 0.0) & (bad == 0)
    return place, padding, bad, greedy, tl.where(greedy | bad, 1.0, T), nan


@triton.jit
def joined(x):
    """The sum of the tiles of a row, [SP]."""
    return tl.sum(in_pairs(tl.reshape(x, [1, x.shape[0]])), 0)


@triton.jit
def summed(work, S, T, ENTROPY: tl.constexpr, SP: tl.constexpr):
    """(best logit, tokens that can be drawn, their mass, their sum of w * y, whether there is NaN) of the row."""
    t = tl.arange(0, SP)
    m = tl.load(work + BEST * S + t, mask=t < S, other=-float("inf"))
    n = tl.load(as_int32(work) + COUNT * S + t, mask=t < S, other=0)
    z = tl.load(work + TOTAL * S + t, mask=t < S, other=0.0)
    nan = tl.max((n < 0).to(tl.int32), 0)
    n = tl.where(n < 0, -1 - n, n)
    top = tl.max(m, 0)
    live = m > floor_of(top)
    shift = tl.where(live, tl.where(m == top, 0.0, (m - top) / T), -float("inf"))
    scale = tl.exp(shift)
    Z = joined(tl.where(live, times(z, scale), 0.0))
    tilted = tl.full((), 0.0, tl.float32)
    if ENTROPY:
        h = tl.load(work + MOMENT * S + t, mask=t < S, other=0.0)
        each = times(scale, h + times(z, tl.where(scale > 0.0, shift, 0.0)))
        tilted = joined(tl.where(live & (scale > 0.0), each, 0.0))
    return top, tl.sum(tl.where(live, n, 0), 0), Z, tilted, nan


@triton.jit
def summed_raw(work, S, SP: tl.constexpr):
    """(best logit of the row, sum of exp(x - best)) of the raw law."""
    t = tl.arange(0, SP)
    m = tl.load(work + BEST * S + t, mask=t < S, other=-float("inf"))
    z = tl.load(work + TOTAL * S + t, mask=t < S, other=0.0)
    top = tl.max(m, 0)
    y = tl.where(m == top, 0.0, m - top)
    return top, joined(tl.where(m > -float("inf"), times(z, tl.exp(y)), 0.0))


@triton.jit
def settle(
    row,
    N,
    x,
    column_stride,
    allowed,
    raw,
    raw_row_stride,
    raw_column_stride,
    raw_work,  # [words] of the raw law of this row
    S,
    invalid_token,
    longs,  # out [2, N] int64
    ints,  # out [., N] int32
    floats,  # out [., N] fp32
    laws,  # out [N, 5] fp32: best logit, T, log of the kept weights, best raw logit, log of the raw weights
    padding,
    bad,
    greedy,
    nan,
    T,
    top,
    tokens,
    Z,
    winner,
    kept,
    mass,
    tilted,
    cut,
    cut_id,
    searched,
    HAS_ALLOWED: tl.constexpr,
    UNIT: tl.constexpr,
    RAW: tl.constexpr,
    ENTROPY: tl.constexpr,
    LAWS: tl.constexpr,
    SP: tl.constexpr,
):
    """Store the results of a row."""
    nothing = bad | (tokens == 0)
    dead = nothing | padding
    safe = tl.where(dead, 0, winner).to(tl.int64)
    v = logits_at(x, safe, dead == 0, column_stride, allowed, HAS_ALLOWED, UNIT)
    y = tl.where(v == top, 0.0, (v - top) / T) + 0.0  # a quotient ends in a product: `times` says why
    log_mass = tl.log(mass)
    lp = tl.where(greedy, 0.0, y - log_mass)
    held = tl.where(greedy | (kept == tokens), 0.0, tl.minimum(tl.log(mass / Z), 0.0))
    tl.store(longs + TOKEN * N + row, tl.where(dead, invalid_token, safe))
    tl.store(longs + THRESHOLD_ID * N + row, tl.where(dead, -1, cut_id))
    tl.store(floats + LOGPROB * N + row, tl.where(padding, 0.0, tl.where(nothing, -float("inf"), lp)))
    tl.store(floats + LOG_KEPT_MASS * N + row, tl.where(padding, 0.0, tl.where(nothing, -float("inf"), held)))
    tl.store(floats + THRESHOLD * N + row, tl.where(padding, 0.0, tl.where(nothing, float("inf"), cut)))
    told = nan * 2 + tl.where(bad, 0, (top == float("inf")).to(tl.int32) * 4)
    told += tl.where(bad, 8, (tokens == 0).to(tl.int32)) + tl.where(searched, 32, 0)
    tl.store(ints + KEPT * N + row, tl.where(dead, 0, kept))
    tl.store(ints + STATUS * N + row, tl.where(padding, 0, told))
    if ENTROPY:
        e = tl.where(greedy, 0.0, log_mass - (tilted / mass + 0.0))
        e = tl.where(nothing, float("nan"), tl.maximum(e, 0.0))
        tl.store(floats + ENTROPY_OF * N + row, tl.where(padding, 0.0, e))
    if LAWS:
        tl.store(laws + row * 5, top)
        tl.store(laws + row * 5 + 1, T)
        tl.store(laws + row * 5 + 2, log_mass)
    if RAW:
        raw_top, raw_Z = summed_raw(raw_work, S, SP)
        r = tl.load(raw + row * raw_row_stride + safe * raw_column_stride).to(tl.float32)
        r = tl.where(r != r, -float("inf"), r)
        r = tl.where(r == raw_top, 0.0, r - raw_top) - tl.log(raw_Z)
        tl.store(floats + RAW_LOGPROB * N + row, tl.where(padding, 0.0, tl.where(nothing, float("nan"), r)))
        if LAWS:
            tl.store(laws + row * 5 + 3, raw_top)
            tl.store(laws + row * 5 + 4, tl.log(raw_Z))
