"""What the kernels of a row share: its request, the sum of its groups, and its results.

Legend: N rows · S tiles a row of G groups each · GP: groups padded to a power of two. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.sample.rows import (
    LARGEST,
    LN2,
    LOG2E,
    floor_of,
    in_units,
    logits_at,
    of_units,
    parameter,
    place_of,
    times,
)
from rlkernel_triton.sample.tile_stats import HELD_INFINITY, HELD_NAN, as_int32, count_at, moment_at

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
def groups_of(work, S, G: tl.constexpr, GP: tl.constexpr):
    """([GP] best logits of the groups of a row, their sums); -inf and 0 behind the last."""
    g = tl.arange(0, GP)
    there = g < S * G
    return tl.load(work + 2 * g, mask=there, other=-float("inf")), tl.load(work + 2 * g + 1, mask=there, other=0.0)


@triton.jit
def summed(m, z, work, S, per, T, ENTROPY: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr):
    """(best logit, least best, tokens that can be drawn, whether there is NaN, mass, sum of w * y) of a row.

    Args: the best logits m and the sums z of its groups. Sums are exact, of rounded terms.
    """
    WHOLE: tl.constexpr = GP * GROUP
    g = tl.arange(0, GP)
    n = tl.load(as_int32(work) + count_at(S, G) + g, mask=g < tl.cdiv(S, per), other=0)
    top, least = tl.split(tl.max(tl.join(m, tl.where(g < S * G, -m, -float("inf"))), 0))
    live = m > floor_of(top)
    shift = tl.where(live, tl.where(m == top, 0.0, (m - top) * tl.minimum(LOG2E / T, LARGEST)), -float("inf"))
    scale = tl.exp2(shift)
    # NaN counts 2^32; beside +inf the others do not count.
    counts = ((n & HELD_NAN).to(tl.int64) << 2) + tl.where(
        ((n & HELD_INFINITY) != 0) == (top == float("inf")), n & (HELD_INFINITY - 1), 0
    )
    mass, count = tl.split(tl.sum(tl.join(in_units(tl.where(live, z * scale, 0.0), WHOLE), counts), 0))
    tilted = tl.full((), 0.0, tl.float32)
    if ENTROPY:
        h = tl.load(work + moment_at(S, G) + g, mask=g < S * G, other=0.0)
        each = times(scale, h + times(z, tl.where(scale > 0.0, shift * LN2, 0.0)))
        tilted = -of_units(tl.sum(in_units(tl.where(live & (scale > 0.0), -each, 0.0), WHOLE), 0), WHOLE)
    tokens = (count & 0xFFFFFFFF).to(tl.int32)
    return top, -least, tokens, ((count >> 32) > 0).to(tl.int32), of_units(mass, WHOLE), tilted


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
    per,
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
    G: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
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
        raw_m, raw_z = groups_of(raw_work, S, G, GP)
        raw_top, _, _, _, raw_Z, _ = summed(raw_m, raw_z, raw_work, S, per, 1.0, False, G, GROUP, GP)
        r = tl.load(raw + row * raw_row_stride + safe * raw_column_stride).to(tl.float32)
        r = tl.where(r != r, -float("inf"), r)
        r = tl.where(r == raw_top, 0.0, r - raw_top) - tl.log(raw_Z)
        tl.store(floats + RAW_LOGPROB * N + row, tl.where(padding, 0.0, tl.where(nothing, float("nan"), r)))
        if LAWS:
            tl.store(laws + row * 5 + 3, raw_top)
            tl.store(laws + row * 5 + 4, tl.log(raw_Z))
