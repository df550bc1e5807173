"""Kernels of verify@1: whose draft a row holds, whether it passes, where a request stops, and what stands in its place.

`sample`'s kernels give every row its distribution and a token of stream 0; these do the rest. Probabilities are
compared in float64, made from the row's best logit, its temperature and the logarithm of its kept weights; only one row
a request is searched for a replacement, and nothing but the device knows which.

Bytes: of each draft row one logit and one draft probability; with draft logits all K V of them once; of one row a
request, all V of both.

Legend: B requests · K drafts · M = K + B rows · V vocabulary · S tiles of V. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import parameter

# Columns of `row_stats`: `sample.results.write_results` writes them.
TOP: tl.constexpr = tl.constexpr(0)
T: tl.constexpr = tl.constexpr(1)
LOG_MASS: tl.constexpr = tl.constexpr(2)
RAW_TOP: tl.constexpr = tl.constexpr(3)
RAW_MASS: tl.constexpr = tl.constexpr(4)
ACCEPT: tl.constexpr = tl.constexpr(2)  # noise streams, rlkernel_core.spec.sampling.STREAMS
RESIDUAL: tl.constexpr = tl.constexpr(3)
NO_MASS: tl.constexpr = tl.constexpr(-float("inf"))


@triton.jit(do_not_specialize=["step", "M", "K"])
def row_requests(
    cu_draft,  # [B + 1] where the drafts of each request begin
    draft_ids,  # [K]
    step,  # a number, or [B]
    rows,  # out [4, M] int64: request, drafts before it, draft (-1: none), noise step
    M,
    K,
    STEP_EACH: tl.constexpr,
    R: tl.constexpr,  # rows at a time
):
    """One request: what its rows, one more than its drafts, hold."""
    i = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_draft + i).to(tl.int64)
    last = tl.load(cu_draft + i + 1).to(tl.int64)
    base = parameter(step, i, STEP_EACH).to(tl.int64)
    for start in range(0, last - first + 1, R):
        j = start + tl.arange(0, R).to(tl.int64)
        row = first + i + j
        inside = (j <= last - first) & (row >= 0) & (row < M)
        drafted = inside & (j < last - first) & (first + j < K)
        draft = tl.load(draft_ids + first + j, mask=drafted, other=0).to(tl.int64)
        draft = tl.where(drafted, draft, -1)  # -1 of an unsigned dtype would be an id
        tl.store(rows + row, i + tl.zeros_like(j), mask=inside)
        tl.store(rows + M + row, j, mask=inside)
        tl.store(rows + 2 * M + row, draft, mask=inside)
        tl.store(rows + 3 * M + row, base + j, mask=inside)


@triton.jit
def philox_words(seed, step, block, stream: tl.constexpr):
    """Four random words of blocks of four ids, of one request."""
    zero = block * 0
    low = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, block, low, high, zero + stream)


@triton.jit
def uniform(seed, step, ids, stream: tl.constexpr):
    """float64 (word + 1/2) / 2^32 of ids."""
    a, b, c, d = philox_words(seed, step, (ids >> 2).to(tl.uint32), stream)
    j = ids & 3
    word = tl.where(j == 0, a, tl.where(j == 1, b, tl.where(j == 2, c, d)))
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def logit(x, ids, inside, column_stride, allowed, HAS_ALLOWED: tl.constexpr):
    """fp32 logits of ids; -inf outside, at NaN and where the bitmask says no."""
    v = tl.load(x + ids.to(tl.int64) * column_stride, mask=inside, other=NO_MASS).to(tl.float32)
    v = tl.where(v == v, v, NO_MASS)
    if HAS_ALLOWED:
        word = tl.load(allowed + (ids >> 5), mask=inside, other=0)
        v = tl.where(((word >> (ids & 31).to(tl.int32)) & 1) != 0, v, NO_MASS)
    return v


@triton.jit
def probability(v, ids, stats, threshold, threshold_id):
    """float64 p of ids with logits v under the row's distribution: 0 for what it does not keep."""
    top = tl.load(stats + TOP)
    keep = (v > NO_MASS) & ((v > threshold) | ((v == threshold) & (ids <= threshold_id)))
    y = tl.where(v == top, 0.0, (v.to(tl.float64) - top.to(tl.float64)) / tl.load(stats + T).to(tl.float64))
    return tl.where(keep, tl.exp(tl.where(keep, y, 0.0) - tl.load(stats + LOG_MASS).to(tl.float64)), 0.0)


@triton.jit
def draft_probability(q, ids, inside, column_stride, top, total, LOGITS: tl.constexpr):
    """float64 q of ids; what is no probability counts as 0."""
    v = tl.load(q + ids.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float64)
    if LOGITS:
        v = tl.exp(v - top) / total
    return tl.where(inside & (v > 0.0), v, 0.0)


@triton.jit(do_not_specialize=["W"])
def partial_draft_softmax(
    q,  # [K, V] logits of the drafts
    row_stride, column_stride, V, W,
    parts,  # out [K, W, 2] float64
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One of W parts of a draft, WIDE tokens: their largest logit and the sum of exp(x - largest). NaN spreads."""
    k = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q += k * row_stride
    top = tl.full([BLOCK], NO_MASS, tl.float32)
    broken = tl.full([BLOCK], 0, tl.int32)
    for start in range(part * WIDE, part * WIDE + WIDE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        v = tl.load(q + ids.to(tl.int64) * column_stride, mask=ids < V, other=NO_MASS).to(tl.float32)
        broken = broken | (v != v).to(tl.int32)
        top = tl.maximum(top, tl.where(v == v, v, NO_MASS))
    highest = tl.max(top, 0)
    peak = tl.where(tl.max(broken, 0) > 0, float("nan"), highest).to(tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(part * WIDE, part * WIDE + WIDE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        v = tl.load(q + ids.to(tl.int64) * column_stride, mask=ids < V, other=NO_MASS).to(tl.float64)
        total += tl.where(v > NO_MASS, tl.exp(tl.where(v > NO_MASS, v - peak, 0.0)), 0.0)
    out = parts + 2 * (k * W + part)
    tl.store(out, peak)
    tl.store(out + 1, tl.sum(total, 0))


@triton.jit(do_not_specialize=["W"])
def merge_draft_softmax(
    parts,  # [K, W, 2] float64
    sums,  # out [K, 2] float64
    W,
    PARTS: tl.constexpr,  # W padded to a power of two
):
    """One draft: the largest of its logits and the sum of exp(x - largest), [K, 2] float64, from its parts."""
    k = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    peaks = tl.load(parts + 2 * (k * W + i), mask=i < W, other=NO_MASS)
    broken = tl.max((peaks != peaks).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(peaks == peaks, peaks, NO_MASS), 0)
    totals = tl.load(parts + 2 * (k * W + i) + 1, mask=i < W, other=0.0)
    scale = tl.where(peaks == peak, 1.0, tl.exp(tl.where(peaks > NO_MASS, peaks - peak, NO_MASS)))
    total = tl.sum(tl.where(totals > 0.0, totals * scale, 0.0), 0)
    tl.store(sums + 2 * k, tl.where(broken, float("nan"), peak))
    tl.store(sums + 2 * k + 1, tl.where(broken | (peak == float("inf")), float("nan"), total))


@triton.jit(do_not_specialize=["seed", "M"])
def accept_drafts(
    rows,  # [4, M] of `row_requests`
    x,  # [M, V] logits
    row_stride, column_stride,
    allowed,  # [M, allowed_stride] int32, read where HAS_ALLOWED
    allowed_stride,
    q,  # [K, V] probabilities of the drafts, or logits where LOGITS
    q_row_stride, q_column_stride,
    sums,  # [K, 2] of `merge_draft_softmax`, read where LOGITS
    seed,  # a number, or [B]
    row_stats,  # [M, 5]
    threshold,  # [M] value and id of the last kept token
    threshold_id,
    accept,  # out [M] int32
    M, V,
    HAS_ALLOWED: tl.constexpr, SEED_EACH: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """One row: whether u q(d) < p(d) for its draft d."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(rows + row)
    draft = tl.load(rows + 2 * M + row)
    passes = row < 0
    if (draft >= 0) & (draft < V):
        source = row - request
        if HAS_ALLOWED:
            allowed += row * allowed_stride
        v = logit(x + row * row_stride, draft, draft >= 0, column_stride, allowed, HAS_ALLOWED)
        p = probability(v, draft, row_stats + 5 * row, tl.load(threshold + row), tl.load(threshold_id + row))
        top = tl.full((), 0.0, tl.float64)
        total = tl.full((), 1.0, tl.float64)
        if LOGITS:
            top = tl.load(sums + 2 * source)
            total = tl.load(sums + 2 * source + 1)
        draft_p = draft_probability(q + source * q_row_stride, draft, draft >= 0, q_column_stride, top, total, LOGITS)
        u = uniform(parameter(seed, request, SEED_EACH).to(tl.int64), tl.load(rows + 3 * M + row), draft, ACCEPT)
        passes = u * draft_p < p
    tl.store(accept + row, passes.to(tl.int32))


@triton.jit(do_not_specialize=["M", "invalid_token"])
def count_accepted(
    rows,  # [4, M] of `row_requests`
    cu_draft,  # [B + 1]
    accept,  # [M] of `accept_drafts`, not read where STRICT
    longs,  # [2, M], [3, M] and [3 to 5, M] results of the sampler, as in `sample.results`
    ints, floats,
    accepted,  # out [B] int32
    M, V, invalid_token,
    STRICT: tl.constexpr,  # a draft is accepted where the sampler drew it
    RAW: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One request: how many drafts it accepts; rows behind the last token are emptied."""
    i = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_draft + i).to(tl.int64)
    count = tl.load(cu_draft + i + 1).to(tl.int64) - first
    least = count
    for start in range(0, count, R):
        j = start + tl.arange(0, R).to(tl.int64)
        row = first + i + j
        inside = j < count
        if STRICT:
            draft = tl.load(rows + 2 * M + row, mask=inside, other=-1)
            passes = (draft >= 0) & (draft < V) & (tl.load(longs + row, mask=inside, other=-2) == draft)
        else:
            passes = tl.load(accept + row, mask=inside, other=0) != 0
        some = tl.load(ints + row, mask=inside, other=0) > 0  # tokens that can be drawn at all
        least = tl.minimum(least, tl.min(tl.where(inside & (passes & some == 0), j, count), 0))
    tl.store(accepted + i, least.to(tl.int32))
    for start in range(0, count + 1, R):
        j = start + tl.arange(0, R).to(tl.int64)
        row = first + i + j
        behind = (j <= count) & (j > least)
        tl.store(longs + row, invalid_token + tl.zeros_like(j), mask=behind)
        zero = tl.zeros([R], tl.int32)
        tl.store(ints + row, zero, mask=behind)
        tl.store(ints + M + row, zero, mask=behind)
        tl.store(floats + row, zero.to(tl.float32), mask=behind)
        tl.store(floats + M + row, zero.to(tl.float32), mask=behind)
        if RAW:
            tl.store(floats + 3 * M + row, zero.to(tl.float32), mask=behind)


@triton.jit
def argmax_lowest_id(score, ids, V):
    """(largest score, the lowest id that has it) of a tile."""
    most = tl.max(score, 0)
    return most, tl.min(tl.where(score == most, ids, V), 0)


@triton.jit(do_not_specialize=["seed", "M", "S"])
def residual_argmax(
    rows,  # as in `accept_drafts`
    cu_draft,
    accepted,  # [B] of `count_accepted`
    x, row_stride, column_stride, allowed, allowed_stride, q, q_row_stride, q_column_stride, sums, seed, row_stats,
    threshold, threshold_id, ints,
    scores,  # out [B, 2, S] float64: best of max(p - q, 0), best of p
    winners,  # out [B, 2, S] int32
    M, V, S,
    HAS_ALLOWED: tl.constexpr, SEED_EACH: tl.constexpr, LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a tile
):  # fmt: skip
    """One tile of the row where a request stopped: the best noised token of max(p - q, 0), and that of p."""
    i = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    first = tl.load(cu_draft + i).to(tl.int64)
    count = tl.load(cu_draft + i + 1).to(tl.int64) - first
    position = tl.load(accepted + i).to(tl.int64)
    row = first + i + position
    if position == count:
        return
    if tl.load(ints + row) == 0:
        return
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    if HAS_ALLOWED:
        allowed += row * allowed_stride
    v = logit(x + row * row_stride, ids, inside, column_stride, allowed, HAS_ALLOWED)
    p = probability(v, ids, row_stats + 5 * row, tl.load(threshold + row), tl.load(threshold_id + row))
    top = tl.full((), 0.0, tl.float64)
    total = tl.full((), 1.0, tl.float64)
    source = first + position
    if LOGITS:
        top = tl.load(sums + 2 * source)
        total = tl.load(sums + 2 * source + 1)
    draft_p = draft_probability(q + source * q_row_stride, ids, inside, q_column_stride, top, total, LOGITS)
    left = p - draft_p
    u = uniform(parameter(seed, i, SEED_EACH).to(tl.int64), tl.load(rows + 3 * M + row), ids, RESIDUAL)
    noise = -tl.log(-tl.log(1.0 - u))  # 1 - u is exact: u has 33 bits
    out = i * 2 * S + tile
    one, at = argmax_lowest_id(tl.where(left > 0.0, tl.log(tl.where(left > 0.0, left, 1.0)) + noise, NO_MASS), ids, V)
    tl.store(scores + out, one)
    tl.store(winners + out, at)
    other, there = argmax_lowest_id(tl.where(p > 0.0, tl.log(tl.where(p > 0.0, p, 1.0)) + noise, NO_MASS), ids, V)
    tl.store(scores + out + S, other)
    tl.store(winners + out + S, there)


@triton.jit(do_not_specialize=["M", "S"])
def write_replacements(
    rows,  # as in `residual_argmax`
    cu_draft, accepted, x, row_stride, column_stride,
    raw,  # [M, V] logits before edits, read where RAW
    raw_row_stride, raw_column_stride, row_stats, scores, winners, longs, ints, floats, M, V, S,
    RAW: tl.constexpr,
    SP: tl.constexpr,  # S padded to a power of two
):  # fmt: skip
    """One row: the accepted draft or the replacement, with its log-probabilities; the row behind all drafts stays."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.load(rows + row)
    position = tl.load(rows + M + row)
    first = tl.load(cu_draft + i).to(tl.int64)
    count = tl.load(cu_draft + i + 1).to(tl.int64) - first
    least = tl.load(accepted + i).to(tl.int64)
    if (position > least) | (position == count):
        return
    if tl.load(ints + row) == 0:
        return
    token = tl.load(rows + 2 * M + row)
    if position == least:
        t = tl.arange(0, SP)
        at = i * 2 * S + t
        score = tl.load(scores + at, mask=t < S, other=NO_MASS)
        if tl.max(score, 0) == NO_MASS:  # p - q has no mass
            at += S
            score = tl.load(scores + at, mask=t < S, other=NO_MASS)
        most = tl.max(score, 0)
        token = tl.min(tl.where(score == most, tl.load(winners + at, mask=t < S, other=V), V), 0).to(tl.int64)
    stats = row_stats + 5 * row
    v = tl.load(x + row * row_stride + token * column_stride).to(tl.float64)
    top = tl.load(stats + TOP).to(tl.float64)
    y = tl.where(v == top, 0.0, (v - top) / tl.load(stats + T).to(tl.float64))
    tl.store(longs + row, token)
    tl.store(floats + row, (y - tl.load(stats + LOG_MASS).to(tl.float64)).to(tl.float32))
    if RAW:
        r = tl.load(raw + row * raw_row_stride + token * raw_column_stride).to(tl.float64)
        r = tl.where(r == r, r, NO_MASS)
        high = tl.load(stats + RAW_TOP).to(tl.float64)
        r = tl.where(r == high, 0.0, r - high) - tl.load(stats + RAW_MASS).to(tl.float64)
        tl.store(floats + 3 * M + row, r.to(tl.float32))
