"""Kernels of logprob@1: partial softmax statistics of a row of logits, and the gradient of the logits.

A row is cut into parts of `PART` columns, one program each, so that a few long rows fill a GPU too.
`common.merge_softmax` merges them, and `common.softmax` says what the statistics are. The total of all ids but the
chosen one is added in the order of `common.group_sums`, which `sample` has too; parts depend on V alone and every other
sum is a tree, so a row's bits depend on nothing but the row.

Bytes of a row of V logits of s bytes: forward s V read; backward s V read, s V written. With a support V / 8 more each.

Legend: N rows · V vocabulary · K listed ids of a row, M of all rows · P parts of a row · G groups of a tile · L
lanes of a quarter of them, 8 neighboring columns.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.arithmetic import anchor, cap, row_offset, scaled_less, stored_as, tanh, tree_sum
from rlkernel_triton.common.group_sums import GROUP, SLOTS, STEPS, quarters_sum, reference
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.listed_ids import is_id, list_of
from rlkernel_triton.common.softmax import (
    LEAST_SHIFT,
    dlogits,
    finite_or_zero,
    merge_lanes,
    row_scale,
    update_running,
)
from rlkernel_triton.quant.code_tiles import decode_float8

TILE: Final = GROUP.value * SLOTS.value  # columns read at a time: a group for every slot
PART: Final = TILE * STEPS.value  # columns of a part: 4 programs a row at V = 128256
COLUMNS: Final = 2048  # columns that a program of the gradient takes at a time
# (fewest rows, how often): 1.05 ms at 8192 x 128256, where one 4096 a program takes 1.09; few rows need all programs.
REPEATS: Final = ((0, 1), (256, 16))
STATS_WARPS: Final = 4  # decides no bit; README.md has what was measured
GRADIENT_WARPS: Final = 4

NEIGHBORS: tl.constexpr = tl.constexpr(8)  # columns of a lane: one load of 16 bytes in 16 bits, two in fp32


@triton.jit
def load_logits(at, inside, scale, EIGHT_BITS: tl.constexpr):
    """Logits at pointers, fp32, and any number where not inside; those of 8 bits times the scale of their row.

    EIGHT_BITS: bits of the mantissa of 8-bit floats, 3 (e4m3fn) or 2 (e5m2), given as bytes; 0 for other logits.
    Bytes are decoded by arithmetic on their bits: not every GPU has instructions for it, nor has the interpreter.
    """
    x = tl.load(at, mask=inside, other=0)
    if EIGHT_BITS:
        y = decode_float8(x.to(tl.int32), EIGHT_BITS, 7 if EIGHT_BITS == 3 else 15, False) * scale
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def logits_scale(scales, row, EIGHT_BITS: tl.constexpr):
    """The scale of a row of 8-bit logits, NaN where it has no meaning; any number for other logits."""
    s = 1.0
    if EIGHT_BITS:
        s = tl.load(scales + row)
        s = tl.where((s > 0.0) & (s < float("inf")), s, float("nan"))
    return s


@triton.jit
def logits_at(x, at, stride, V, logit_scale, softcap, HAS_CAP: tl.constexpr, EIGHT_BITS: tl.constexpr):
    """Logits of a row at some columns, fp32; -inf beyond the vocabulary."""
    if EIGHT_BITS:
        y = load_logits(x + at.to(tl.int64) * stride, at < V, logit_scale, EIGHT_BITS)
        y = tl.where(at < V, y, float("-inf"))
    else:
        y = tl.load(x + at.to(tl.int64) * stride, mask=at < V, other=float("-inf")).to(tl.float32)
    if HAS_CAP:
        y = cap(y, softcap)
    return y


@triton.jit
def update_support(kept_top, kept_total, lost_top, lost_total, y, bits, byte, V, scale):
    """The running statistics of the kept ids and of the others, with [LANES, 8] more; a lane has a byte of the bits."""
    byte_bits = tl.load(bits + byte, mask=byte * NEIGHBORS < V, other=0)
    among = ((byte_bits[:, None] >> tl.arange(0, NEIGHBORS)[None, :]) & 1) == 1
    inside = tl.where(among, y, float("-inf"))
    outside = tl.where(among, float("-inf"), y)
    kept_top, kept_total, _, _, _, _ = update_running(kept_top, kept_total, inside, scale)
    lost_top, lost_total, _, _, _, _ = update_running(lost_top, lost_total, outside, scale)
    return kept_top, kept_total, lost_top, lost_total


@triton.jit(do_not_specialize=["N"])  # bits must not depend on it
def partial_softmax(
    logits,  # [N, V]: row i starts as `row_offset` says, columns are `stride` apart
    scales,  # [N] of logits of 8 bits, which come as bytes, read where EIGHT_BITS
    ids,  # [N] chosen ids
    mask,  # [N], read where HAS_MASK
    T,  # [N] where HAS_T, else a number
    softcap,
    kept,  # [N, kept_stride] bytes, the bits of the kept ids, read where SUPPORT
    parts,  # [planes, N, P] fp32
    N, V, inner, outer_stride, inner_stride, stride, kept_stride,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr, SUPPORT: tl.constexpr, MOMENT: tl.constexpr,
    EIGHT_BITS: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Statistics of one part of one row; those of a masked row are not written."""
    row, part = tl.program_id(0), tl.program_id(1)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            return
    GROUPS: tl.constexpr = TILE // GROUP
    QUARTER: tl.constexpr = GROUP // 4  # as in `sample`: a thread holds most of it, and threads exchange little
    LANES: tl.constexpr = GROUPS * (QUARTER // NEIGHBORS)
    scale, times = row_scale(T, row, HAS_T), logits_scale(scales, row, EIGHT_BITS)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    id = tl.load(ids + row).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, QUARTER)[None, :]
    start = part * PART
    stop = tl.minimum(start + PART, V)
    # Slots keep totals, and lanes of 8 columns what the support needs; they are merged once, at the end.
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    moment = tl.zeros([GROUPS], tl.float32)
    kept_top = tl.full([LANES], float("-inf"), tl.float32)
    kept_total = tl.zeros([LANES], tl.float32)
    lost_top = tl.full([LANES], float("-inf"), tl.float32)
    lost_total = tl.zeros([LANES], tl.float32)
    for first in range(start, stop, TILE):
        y0 = logits_at(x0, first + column, stride, V, times, softcap, HAS_CAP, EIGHT_BITS)
        y1 = logits_at(x0, first + column + QUARTER, stride, V, times, softcap, HAS_CAP, EIGHT_BITS)
        y2 = logits_at(x0, first + column + 2 * QUARTER, stride, V, times, softcap, HAS_CAP, EIGHT_BITS)
        y3 = logits_at(x0, first + column + 3 * QUARTER, stride, V, times, softcap, HAS_CAP, EIGHT_BITS)
        if (id >= first) & (id < first + TILE):  # in one tile of the row; elsewhere nothing is compared
            own = (id - first).to(tl.int32)
            y0 = tl.where(column == own, float("-inf"), y0)
            y1 = tl.where(column + QUARTER == own, float("-inf"), y1)
            y2 = tl.where(column + 2 * QUARTER == own, float("-inf"), y2)
            y3 = tl.where(column + 3 * QUARTER == own, float("-inf"), y3)
        most = tl.max(tl.maximum(tl.maximum(y0, y1), tl.maximum(y2, y3)), 1)
        r = reference(most, scale)
        c, t = anchor(most, scale, finite_or_zero(r))
        c, t = c[:, None], t[:, None]
        d0, d1 = scaled_less(y0 - c, scale, t), scaled_less(y1 - c, scale, t)
        d2, d3 = scaled_less(y2 - c, scale, t), scaled_less(y3 - c, scale, t)
        e0, e1, e2, e3 = tl.exp2(d0), tl.exp2(d1), tl.exp2(d2), tl.exp2(d3)
        here = quarters_sum(e0, e1, e2, e3)
        new_top = tl.maximum(top, r)
        at_top = finite_or_zero(new_top)
        old_shift, new_shift = top - at_top, r - at_top
        old_factor, new_factor = tl.exp2(old_shift), tl.exp2(new_shift)
        if MOMENT:
            # Terms 2^d d move to the new top with their totals.
            more = quarters_sum(
                e0 * tl.maximum(d0, LEAST_SHIFT), e1 * tl.maximum(d1, LEAST_SHIFT), e2 * tl.maximum(d2, LEAST_SHIFT),
                e3 * tl.maximum(d3, LEAST_SHIFT),
            )  # fmt: skip
            old = (moment + total * tl.maximum(old_shift, LEAST_SHIFT)) * old_factor
            moment = old + (more + here * tl.maximum(new_shift, LEAST_SHIFT)) * new_factor
        total = total * old_factor + here * new_factor
        top = new_top
        if SUPPORT:
            lane = tl.arange(0, LANES)
            EACH: tl.constexpr = QUARTER // NEIGHBORS
            byte = first // NEIGHBORS + lane // EACH * (4 * EACH) + lane % EACH  # of a lane of the first quarters
            bits = kept + row.to(tl.int64) * kept_stride
            for quarter in tl.static_range(4):
                y = (y0, y1, y2, y3)[quarter]
                kept_top, kept_total, lost_top, lost_total = update_support(
                    kept_top, kept_total, lost_top, lost_total, tl.reshape(y, [LANES, NEIGHBORS]), bits,
                    byte + quarter * EACH, V, scale,
                )  # fmt: skip
    P = tl.cdiv(V, PART)
    plane = N.to(tl.int64) * P
    one = tl.arange(0, 1)
    out = parts + row.to(tl.int64) * P + part + one
    here = (id >= start) & (id < stop)
    y_id = load_logits(x0 + tl.where(here, id, 0) * stride, True, times, EIGHT_BITS)
    if HAS_CAP:
        y_id = cap(y_id, softcap)
    tl.store(out, tl.where(here, y_id, 0.0) + tl.zeros([1], tl.float32))
    best, some, weight, shift = merge_lanes(tl.reshape(top, [1, GROUPS]), tl.reshape(total, [1, GROUPS]))
    tl.store(out + plane, best)
    tl.store(out + 2 * plane, some)
    if MOMENT:
        moments = (tl.reshape(moment, [1, GROUPS]) + tl.reshape(total, [1, GROUPS]) * shift) * weight
        tl.store(out + 3 * plane, tree_sum(moments))
    if SUPPORT:
        best, some, _, _ = merge_lanes(tl.reshape(kept_top, [1, LANES]), tl.reshape(kept_total, [1, LANES]))
        tl.store(out + 4 * plane, best)
        tl.store(out + 5 * plane, some)
        best, some, _, _ = merge_lanes(tl.reshape(lost_top, [1, LANES]), tl.reshape(lost_total, [1, LANES]))
        tl.store(out + 6 * plane, best)
        tl.store(out + 7 * plane, some)


@triton.jit(do_not_specialize=["K"])
def listed_logits(
    logits,  # [N, V], as in `partial_softmax`
    scales,  # the same
    ids,  # [N, K], or [M] where RAGGED
    offsets,  # [N + 1], read where RAGGED
    mask,  # [N], read where HAS_MASK
    softcap,
    y,  # as the ids, fp32
    V, K, inner, outer_stride, inner_stride, stride,
    HAS_MASK: tl.constexpr, HAS_CAP: tl.constexpr, EIGHT_BITS: tl.constexpr, RAGGED: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Logits under the cap at the listed ids of one row; those of a masked row are not written."""
    row = tl.program_id(0)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            return
    x0, times = logits + row_offset(row, inner, outer_stride, inner_stride), logits_scale(scales, row, EIGHT_BITS)
    from_row, K = list_of(offsets, row, K, RAGGED)
    for first in range(0, K, ENTRIES):
        at = from_row + first + tl.arange(0, ENTRIES)
        inside = first + tl.arange(0, ENTRIES) < K
        id = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
        there = is_id(id, V, False)
        x = load_logits(x0 + tl.where(there, id, 0) * stride, there, times, EIGHT_BITS)
        if HAS_CAP:
            x = cap(x, softcap)
        tl.store(y + at, x, mask=inside)


@triton.jit(do_not_specialize=["N"])
def softmax_backward(
    logits,  # [N, V], as in `partial_softmax`
    ids,  # [N] chosen ids
    mask,  # [N], read where HAS_MASK
    invalid,  # [N] int8
    T,  # [N] where HAS_T, else a number
    softcap,
    kept,  # [N, kept_stride] bytes, read where SUPPORT
    saved,  # [6, N] fp32, as `merge_softmax` wrote it
    g,  # [N] fp32 upstream gradient of logprob, read where G; the next three alike
    g_lse, g_entropy, g_mass,
    out,  # [N, V] contiguous
    N, V, inner, outer_stride, inner_stride, stride, kept_stride,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr, SUPPORT: tl.constexpr, G: tl.constexpr,
    G_LSE: tl.constexpr, G_ENTROPY: tl.constexpr, G_MASS: tl.constexpr, COLUMNS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Gradient of REPEATS * COLUMNS columns of one row: one read, one write. A masked row is not read."""
    row = tl.program_id(0)
    to_row = out + row.to(tl.int64) * V
    first = tl.program_id(1) * (REPEATS * COLUMNS)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            for k in range(REPEATS):
                at = first + k * COLUMNS + tl.arange(0, COLUMNS)
                tl.store(to_row + at, tl.zeros([COLUMNS], out.dtype.element_ty), mask=at < V)
            return
    bad = tl.load(invalid + row) != 0
    id = tl.where(bad, -1, tl.load(ids + row).to(tl.int64))  # an id of this row, or -1, which is no column
    scale = row_scale(T, row, HAS_T)
    up, up_lse, up_entropy, up_mass = 0.0, 0.0, 0.0, 0.0
    if G:
        up = tl.where(bad, 0.0, tl.load(g + row))
    if G_LSE:
        up_lse = tl.load(g_lse + row)
    if G_ENTROPY:
        up_entropy = tl.load(g_entropy + row)
    if G_MASS:
        up_mass = tl.where(bad, 0.0, tl.load(g_mass + row))
    kept_top, kept_log_total = 0.0, 0.0
    if SUPPORT:
        kept_top, kept_log_total = tl.load(saved + 4 * N + row), tl.load(saved + 5 * N + row)
    top, log_total = tl.load(saved + row), tl.load(saved + N + row)
    mean, rest = tl.load(saved + 2 * N + row), tl.load(saved + 3 * N + row)
    from_row = logits + row_offset(row, inner, outer_stride, inner_stride)
    for k in range(REPEATS):
        at = first + k * COLUMNS + tl.arange(0, COLUMNS)
        inside = at < V
        among = inside
        if SUPPORT:
            bits = tl.load(kept + row.to(tl.int64) * kept_stride + at // 8, mask=inside, other=0)
            among = ((bits >> (at % 8)) & 1) == 1
        x = tl.load(from_row + at.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
        y = x
        if HAS_CAP:
            y = cap(x, softcap)
        dy = dlogits(
            y, chosen=at == id.to(tl.int32), kept=among, scale=scale, top=top, log_total=log_total, mean=mean,
            rest=rest, kept_top=kept_top, kept_log_total=kept_log_total, g=up, g_lse=up_lse, g_entropy=up_entropy,
            g_mass=up_mass, SUPPORT=SUPPORT, G_ENTROPY=G_ENTROPY,
        )  # fmt: skip
        if HAS_CAP:
            t = tanh(x / softcap)
            dy = dy * (1.0 - t * t)
        tl.store(to_row + at, stored_as(dy, out.dtype.element_ty), mask=inside)
