"""Several ids of each row, whose log-probabilities come from one logsumexp: kernels for logits of any origin.

The listed id with the largest logit is the row's chosen id, which the kernels of one id per row take out of the sums,
so that its log-probability keeps its precision where p is near 1. Every other listed id has p <= 1/2, and z - lse loses
nothing there. Backward, those kernels get the sum of the gradients that arrive at the list; then the gradients of the
listed logits, which differ from that, are written in their places. `rlkernel_common.listed_ids` has the formulas.

Lists have K entries each, or, where RAGGED, those between two neighboring offsets; ids, logits and results then lie one
behind the other, and entries beyond the last list are not written.

One program a row. ENTRIES lanes take listed ids in turn and are merged at the end, so K changes no build. Gradients of
repeated ids are added over all K in the order of the list: K^2 comparisons a row.

Bytes of a row, beside those of one id: K ids of 4 or 8, K logits of 4, K results of 5; backward K ids, logits and
gradients, and K of the logits' gradients. Random access makes 32 of each.

Legend: N rows · K listed ids of a row · M those of all rows, N * K where all have as many · n rows of a block.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.arithmetic import LN2, MAX_FLOAT, less_top, stored_as, tree_sum
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.softmax import dlogits, row_scale

ENTRIES: Final = 64  # listed ids taken at a time
WARPS: Final = 2
NO_ID: tl.constexpr = tl.constexpr(-(1 << 61))  # among ids counted from a shard's first, where -1 may be one


@triton.jit
def is_id(x, whole, SHARDED: tl.constexpr):
    """Whether x is an id of the vocabulary; counted from a shard's first where SHARDED."""
    if SHARDED:
        return x > NO_ID
    return (x >= 0) & (x < whole)


@triton.jit
def list_of(offsets, row, K, RAGGED: tl.constexpr):
    """(first entry, entries) of a row's list."""
    first = row.to(tl.int64) * K
    if RAGGED:
        first = tl.load(offsets + row).to(tl.int64)
        K = (tl.load(offsets + row + 1).to(tl.int64) - first).to(tl.int32)
    return first, K


@triton.jit(do_not_specialize=["N", "K"])  # bits must not depend on them
def choose_listed(
    ids,  # [M]
    offsets,  # [N + 1], read where RAGGED
    mask,  # [N], read where HAS_MASK
    y,  # [M] fp32 logits under the cap
    chosen,  # [N] int64
    N, K, whole,
    HAS_MASK: tl.constexpr, RAGGED: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The listed id with the largest logit, the first of equals; -1 where a row lists none, or is masked."""
    row = tl.program_id(0)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            tl.store(chosen + row, tl.full([], -1, tl.int64))
            return
    from_row, K = list_of(offsets, row, K, RAGGED)
    lane = tl.arange(0, ENTRIES)
    best = tl.full([ENTRIES], float("-inf"), tl.float32)
    place = tl.full([ENTRIES], 0x7FFFFFFF, tl.int32)  # in the list, of each lane's best; this one: it has none
    for first in range(0, K, ENTRIES):
        at = first + lane
        there = (at < K) & is_id(tl.load(ids + from_row + at, mask=at < K, other=0).to(tl.int64), whole, False)
        key = tl.load(y + from_row + at, mask=there, other=float("-inf"))
        key = tl.where(key == key, key, float("-inf"))  # NaN makes its row NaN, whichever id is chosen
        better = there & ((key > best) | (place == 0x7FFFFFFF))
        best, place = tl.where(better, key, best), tl.where(better, at, place)
    found = tl.min(tl.where(best == tl.max(best, axis=0), place, 0x7FFFFFFF), axis=0)
    none = found == 0x7FFFFFFF
    id = tl.load(ids + from_row + found, mask=none == 0, other=-1).to(tl.int64)
    tl.store(chosen + row, tl.where(none, -1, id))


@triton.jit
def log_share(y, scale, top, log_total):
    """ln p of ids, from their logits y and their row's scale, top and log2 of the total."""
    size = tl.where(tl.abs(top) < MAX_FLOAT, tl.abs(y * scale), 0.0)
    beyond = (size == float("inf")) & (tl.abs(y) < float("inf"))  # of a finite logit that base-2 units do not hold
    by_y = y * (scale * LN2) - (top + log_total) * LN2
    return tl.where(beyond, by_y, (less_top(y, scale, top) - log_total) * LN2)


@triton.jit(do_not_specialize=["N", "K"])
def listed_logprobs(
    ids,  # [M]
    offsets,  # [N + 1], read where RAGGED
    mask,  # [N], read where HAS_MASK
    T,  # [N] where HAS_T, else a number
    chosen,  # [N] int64
    y,  # [M] fp32 logits under the cap
    value,  # [N] fp32 ln p of the chosen ids, as `merge_softmax` wrote it
    saved,  # [6, N] fp32, the same
    logprob,  # [M] fp32
    invalid,  # [M] int8
    N, K, whole,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, RAGGED: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Results of the listed ids of one row: 0 for padding, NaN for an invalid id; a masked row has zeros."""
    row = tl.program_id(0)
    counted = row >= 0
    if HAS_MASK:
        counted = tl.load(mask + row) != 0
    scale = row_scale(T, row, HAS_T)
    top, log_total = tl.load(saved + row), tl.load(saved + N + row)
    own, best = tl.load(value + row), tl.load(chosen + row)
    from_row, K = list_of(offsets, row, K, RAGGED)
    for first in range(0, K, ENTRIES):
        at = first + tl.arange(0, ENTRIES)
        id = tl.load(ids + from_row + at, mask=at < K, other=0).to(tl.int64)
        there = (at < K) & is_id(id, whole, False)
        of_id = log_share(tl.load(y + from_row + at, mask=there, other=0.0), scale, top, log_total)
        x = tl.where(id == best, own, of_id)
        x = tl.where(there, x, tl.where(id == -1, 0.0, float("nan")))
        tl.store(logprob + from_row + at, tl.where(counted, x, 0.0), mask=at < K)
        tl.store(invalid + from_row + at, (counted & (id != -1) & (there == 0)).to(tl.int8), mask=at < K)


@triton.jit(do_not_specialize=["N", "K"])
def listed_gradient(
    ids,  # [M], counted from the first of this shard where SHARDED
    offsets,  # [N + 1], read where RAGGED
    mask,  # [N], read where HAS_MASK
    T,  # [N] where HAS_T, else a number
    chosen,  # [N] int64, counted as the ids are
    y,  # [M] fp32 logits under the cap
    saved,  # [6, N] fp32, as `merge_softmax` wrote it
    g,  # [M] fp32 upstream gradient of logprob
    g_lse, g_entropy,  # [N] fp32, read where G_LSE, G_ENTROPY
    sums,  # [N] fp32: of g over the listed ids
    values,  # [M] fp32
    logit_scale, softcap,
    N, K, whole,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr, SHARDED: tl.constexpr, G_LSE: tl.constexpr,
    G_ENTROPY: tl.constexpr, RAGGED: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The gradient of the logit of each listed id, before the cap and the scale; a repeated id has one number."""
    row = tl.program_id(0)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            return
    scale = row_scale(T, row, HAS_T)
    up_lse, up_entropy = 0.0, 0.0
    if G_LSE:
        up_lse = tl.load(g_lse + row)
    if G_ENTROPY:
        up_entropy = tl.load(g_entropy + row)
    top, log_total = tl.load(saved + row), tl.load(saved + N + row)
    mean, rest = tl.load(saved + 2 * N + row), tl.load(saved + 3 * N + row)
    best = tl.load(chosen + row)
    from_row, K = list_of(offsets, row, K, RAGGED)
    every = tl.zeros([ENTRIES], tl.float32)
    for first in range(0, K, ENTRIES):
        at = first + tl.arange(0, ENTRIES)
        id = tl.load(ids + from_row + at, mask=at < K, other=0).to(tl.int64)
        there = is_id(id, whole, SHARDED) & (at < K)
        every += tl.load(g + from_row + at, mask=there, other=0.0)
        own = tl.zeros([ENTRIES], tl.float32)
        others = tl.zeros([ENTRIES], tl.float32)
        for j in range(K):  # in the order of the list, so that a repeated id gets the same bits at each place
            id_j = tl.load(ids + from_row + j).to(tl.int64)
            if is_id(id_j, whole, SHARDED):
                g_j = tl.load(g + from_row + j)
                own += tl.where(id == id_j, g_j, 0.0)
                others += tl.where(id == id_j, 0.0, g_j)
        logit = tl.load(y + from_row + at, mask=there, other=0.0)
        left = tl.where(id == best, rest, 1.0 - tl.exp2(less_top(logit, scale, top) - log_total))  # 1 - p
        dy = dlogits(
            logit, chosen=there, kept=there, scale=scale, top=top, log_total=log_total, mean=mean, rest=left,
            kept_top=0.0, kept_log_total=0.0, g=own, g_lse=up_lse - others, g_entropy=up_entropy, g_mass=0.0,
            SUPPORT=False, G_ENTROPY=G_ENTROPY,
        )  # fmt: skip
        if HAS_CAP:
            t = tl.maximum(logit / softcap, -1.0)  # tanh(x / c); a forbidden id is -inf
            dy = dy * (1.0 - t * t)
        tl.store(values + from_row + at, dy * logit_scale, mask=there)
    total = tree_sum(tl.reshape(every, [1, ENTRIES]))
    tl.store(sums + row + tl.arange(0, 1), total)


@triton.jit(do_not_specialize=["K", "first", "start", "width"])
def put_listed(
    ids,  # [M], counted as in `listed_gradient`
    offsets,  # [N + 1], read where RAGGED
    mask,  # [N], read where HAS_MASK
    index,  # [N] row at each place, read where HAS_INDEX
    count,  # [1] places that count, read where HAS_INDEX
    values,  # [M] fp32
    out,  # [n, width] columns start .. start + width of the gradient of places first .. first + n
    first, start, width, K, whole,
    HAS_MASK: tl.constexpr, HAS_INDEX: tl.constexpr, SHARDED: tl.constexpr, RAGGED: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the listed ids among these columns; places that do not count are left."""
    r = tl.program_id(0)
    row = (first + r).to(tl.int64)
    if HAS_INDEX:
        if first + r >= tl.load(count):
            return
        row = tl.load(index + row).to(tl.int64)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            return
    to = out + r.to(tl.int64) * width
    from_row, K = list_of(offsets, row, K, RAGGED)
    for k in range(0, K, ENTRIES):
        at = k + tl.arange(0, ENTRIES)
        id = tl.load(ids + from_row + at, mask=at < K, other=0).to(tl.int64)
        column = id - start
        here = is_id(id, whole, SHARDED) & (at < K) & (column >= 0) & (column < width)
        dx = tl.load(values + from_row + at, mask=here, other=0.0)
        tl.store(to + tl.where(here, column, 0), stored_as(dx, out.dtype.element_ty), mask=here)
