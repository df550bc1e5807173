"""Kernels of linear_logprob@1: tiles of logits that never leave the registers, and the products of the backward pass.

`head_partial_softmax` multiplies a block of hidden rows with a block of the head and keeps the softmax statistics of
the tile (`common.softmax` says which); `head_dlogits` makes the tile again, or reads saved logits, and writes the
gradient of the logits in 16 bits; `head_matmul` multiplies that with the head, and with hidden states. A row's bits
depend on the row and the head alone: one tile shape per device, every sum in one order, no atomics.

Rows are worked on in blocks, copied together in the order of `index`, which holds those that count first; `count` says
how many. Tiles behind them are skipped without the host knowing.

Bytes, with operands of s bytes, beside operands that the cache serves again: statistics N D s + V D s read, 16 N P
written; gradient of logits the same read, 2 N V written, in blocks; each product 2 N V read, N D s or V D s written.

Legend: N rows of the call · n rows of this block · D hidden · V vocabulary · K listed ids of a row, M of all · r rank
of a low-rank addition to the head · P tiles of V · BM, BN, BK a tile. Tiles are those of the pieces of V
(`rlkernel_common.vocab_parallel`), the last of a piece cut off.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import anchor, cap, row_offset, scaled_less, stored_as, tree_sum, z_of
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.linear_tile import STEP, tile_logits, tile_swizzle
from rlkernel_triton.common.listed_ids import list_of
from rlkernel_triton.common.softmax import LEAST_SHIFT, dlogits, finite_or_zero, row_scales


@triton.jit
def row_at(index, r, inside, HAS_INDEX: tl.constexpr):
    """[BM] the rows at places r of the order."""
    if HAS_INDEX:
        return tl.load(index + r, mask=inside, other=0).to(tl.int64)
    return r.to(tl.int64)


@triton.jit
def tile_softmax(y, scale, MOMENT: tl.constexpr):
    """(top, total, moment), [BM] each, of a tile y [BM, BN]."""
    best = tl.max(y, axis=1)
    top = z_of(best, scale)
    c, t = anchor(best, scale, finite_or_zero(top))
    d = scaled_less(y - c[:, None], scale[:, None], t[:, None])
    e = tl.exp2(d)
    total = tl.sum(e, axis=1)
    moment = total
    if MOMENT:
        moment = tl.sum(e * tl.maximum(d, LEAST_SHIFT), axis=1)
    return top, total, moment


@triton.jit
def tiles_of(V, piece, BN: tl.constexpr):
    """(tiles of a piece, tiles of all pieces) of V columns; the last piece may be short."""
    per = tl.cdiv(piece, BN)
    return per, V // piece * per + tl.cdiv(V % piece, BN)


@triton.jit
def kept_columns(kept, row, column, inside, V, kept_stride):
    """[BM, BN] which columns the rows keep."""
    byte = kept + row[:, None] * kept_stride + (column // 8)[None, :]
    bits = tl.load(byte, mask=inside[:, None] & (column < V)[None, :], other=0)
    return ((bits >> (column % 8)[None, :]) & 1) == 1


@triton.jit(do_not_specialize=["first", "n", "start", "width"])  # bits must not depend on them
def head_partial_softmax(
    x,  # [n, D] hidden states of this block, D contiguous
    weight,  # [V, D]
    bias,  # [V], read where HAS_BIAS
    inner,  # [n, r] fp32 scale times hidden @ A.T of this block, read where HAS_LORA
    factor,  # [V, r] B of LoRA, read where HAS_LORA
    ids,  # [N], counted from the first column of this head
    index,  # [N], read where HAS_INDEX
    count,  # [1], read where HAS_INDEX
    T,  # [N] where HAS_T, else a number
    kept,  # [N, kept_stride] bytes, the bits of the kept ids, read where SUPPORT
    parts,  # [planes, n, P] fp32
    saved_logits,  # [n, V], written where SAVE: capped logits less the largest of their tile
    tile_max,  # [n, P], written where SAVE: that largest
    first, n, D, V, rank, x_stride, head_stride, head_step, factor_stride, factor_step, kept_stride, scale, softcap,
    piece,  # columns after which a tile begins anew
    start, width,  # with PART: columns of this launch, those of whole tiles of one piece
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr,
    SUPPORT: tl.constexpr, MOMENT: tl.constexpr, SAVE: tl.constexpr, OPERAND: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PART: tl.constexpr,  # `weight` has rows start .. start + width of the head alone
):  # fmt: skip
    """Statistics of one tile [BM, BN]; this block has rows first .. first + n of the order of `index`."""
    per, P = tiles_of(V, piece, BN)
    tiles, begins_with = P, 0
    if PART:
        tiles, begins_with = tl.cdiv(width, BN), start
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(n, BM), tiles, GROUP)
    if PART:
        tile += start // piece * per + start % piece // BN
    if HAS_INDEX:
        if first + block * BM >= tl.load(count):  # no row of this tile counts
            return
    r = block * BM + tl.arange(0, BM)
    inside = r < n
    row = row_at(index, first + r, inside, HAS_INDEX)
    begin = tile // per * piece
    stop = tl.minimum(begin + piece, V)
    column = begin + tile % per * BN + tl.arange(0, BN)
    y = tile_logits(
        x, weight, bias, inner, factor, r, inside, column, begins_with, D, stop, rank, x_stride, head_stride,
        head_step, factor_stride, factor_step, scale, HAS_BIAS, HAS_LORA, OPERAND, BM, BN, BK,
    )  # fmt: skip
    if HAS_CAP:
        y = cap(y, softcap)
    if SAVE:  # relative to the largest, so that 16 bits are enough
        largest = finite_or_zero(tl.max(y, axis=1))
        at = r.to(tl.int64)[:, None] * V + column[None, :]
        low = stored_as(y - largest[:, None], saved_logits.dtype.element_ty)
        tl.store(saved_logits + at, low, mask=inside[:, None] & (column < stop)[None, :])
        tl.store(tile_max + r.to(tl.int64) * P + tile, largest, mask=inside)
    z_scale = row_scales(T, row, inside, HAS_T, BM)
    id = tl.load(ids + row, mask=inside, other=-1).to(tl.int64)
    chosen = column[None, :] == tl.where(id < stop, id, -1).to(tl.int32)[:, None]
    plane = n.to(tl.int64) * P
    out = parts + r.to(tl.int64) * P + tile
    tl.store(out, tl.sum(tl.where(chosen, y, 0.0), axis=1), mask=inside)  # the target, 0 in other tiles
    y = tl.where(chosen, float("-inf"), y)  # which is in no sum
    top, total, moment = tile_softmax(y, z_scale, MOMENT)
    tl.store(out + plane, top, mask=inside)
    tl.store(out + 2 * plane, total, mask=inside)
    if MOMENT:
        tl.store(out + 3 * plane, moment, mask=inside)
    if SUPPORT:
        among = kept_columns(kept, row, column, inside, stop, kept_stride)
        top, total, _ = tile_softmax(tl.where(among, y, float("-inf")), z_scale, False)
        tl.store(out + 4 * plane, top, mask=inside)
        tl.store(out + 5 * plane, total, mask=inside)
        top, total, _ = tile_softmax(tl.where(among, float("-inf"), y), z_scale, False)
        tl.store(out + 6 * plane, top, mask=inside)
        tl.store(out + 7 * plane, total, mask=inside)


@triton.jit(do_not_specialize=["K"])
def head_listed_logits(
    hidden,  # [N, D]: row i starts as `row_offset` says, numbers are `stride` apart
    weight,  # [V, D]
    bias,  # [V], read where HAS_BIAS
    all_inner,  # [N, r] fp32 scale times hidden @ A.T, read where HAS_LORA
    factor,  # [V, r] B of LoRA, read where HAS_LORA
    ids,  # [N, K], or [M] where RAGGED, counted from the first column of this head
    offsets,  # [N + 1], read where RAGGED
    mask,  # [N], read where HAS_MASK
    y,  # as the ids, fp32
    K, D, V, rank, inner, outer_stride, inner_stride, stride, head_stride, head_step, factor_stride, factor_step, scale,
    softcap, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, HAS_MASK: tl.constexpr, HAS_CAP: tl.constexpr,
    RAGGED: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Logits under the cap at listed ids of one row, BLOCK at a time, 0 where it is no column; masked rows are left.

    Each reads D numbers of the head: K D s bytes a row, of which the cache serves the ids that rows have in common.
    """
    row = tl.program_id(0)
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            return
    from_row, K = list_of(offsets, row, K, RAGGED)
    for begin in range(tl.program_id(1) * BLOCK, K, tl.num_programs(1) * BLOCK):
        k = begin + tl.arange(0, BLOCK)
        id = tl.load(ids + from_row + k, mask=k < K, other=-1).to(tl.int64)
        there = (id >= 0) & (id < V)
        x0 = hidden + row_offset(row, inner, outer_stride, inner_stride)
        w0 = weight + tl.where(there, id, 0)[:, None] * head_stride
        acc = tl.zeros([BLOCK, BK], tl.float32)  # a sum for each place of a chunk, so that no layout decides the order
        for start in range(0, D, BK):
            at = start + tl.arange(0, BK)
            x = tl.load(x0 + at.to(tl.int64) * stride, mask=at < D, other=0.0).to(tl.float32)
            w = tl.load(w0 + at.to(tl.int64)[None, :] * head_step, mask=there[:, None] & (at < D)[None, :], other=0.0)
            acc += x[None, :] * w.to(tl.float32)
        z = tree_sum(acc)
        if HAS_LORA:
            low = tl.zeros([BLOCK, STEP], tl.float32)
            for start in range(0, rank, STEP):
                at = start + tl.arange(0, STEP)
                u = tl.load(all_inner + row.to(tl.int64) * rank + at, mask=at < rank, other=0.0)
                b0 = factor + tl.where(there, id, 0)[:, None] * factor_stride + at.to(tl.int64)[None, :] * factor_step
                b = tl.load(b0, mask=there[:, None] & (at < rank)[None, :], other=0.0)
                low += u[None, :] * b.to(tl.float32)
            z += tree_sum(low)
        if HAS_BIAS:
            z += tl.load(bias + tl.where(there, id, 0), mask=there, other=0.0).to(tl.float32)
        z = z * scale
        if HAS_CAP:
            z = cap(z, softcap)
        tl.store(y + from_row + k, tl.where(there, z, 0.0), mask=k < K)


@triton.jit(do_not_specialize=["first", "n", "N", "start"])
def head_dlogits(
    x,  # [n, D] hidden states of this block, D contiguous
    weight,  # [V, D]
    bias,  # [V], read where HAS_BIAS
    inner,  # [n, r] fp32 scale times hidden @ A.T of this block, read where HAS_LORA
    factor,  # [V, r] B of LoRA, read where HAS_LORA
    ids,  # [N], counted from the first column of this head
    index,  # [N], read where HAS_INDEX
    count,  # [1], read where HAS_INDEX
    invalid,  # [N] int8
    T,  # [N] where HAS_T, else a number
    kept,  # [N, kept_stride] bytes, the bits of the kept ids, read where SUPPORT
    stats,  # [6, N] fp32, as `merge_softmax` wrote it
    g,  # [N] fp32 upstream gradient of logprob, read where G; the next three alike
    g_lse, g_entropy, g_mass,
    saved_logits,  # [N, V], read where FROM_SAVED in place of a product
    tile_max,  # [N, tiles of at most MAX_OF columns]: what was subtracted from them
    out,  # [n, width]
    first, n, N, start, width, D, V, rank, x_stride, head_stride, head_step, factor_stride, factor_step, kept_stride,
    scale, softcap,
    piece,  # columns after which a tile of the saved logits begins anew
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr,
    SUPPORT: tl.constexpr, G: tl.constexpr, G_LSE: tl.constexpr, G_ENTROPY: tl.constexpr, G_MASS: tl.constexpr,
    FROM_SAVED: tl.constexpr, MAX_OF: tl.constexpr, OPERAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
    PART: tl.constexpr,  # `weight` has rows start .. start + width of the head alone
):  # fmt: skip
    """Gradient of hidden @ weight.T in the columns start .. start + width, times what the bias and scale make of it."""
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(width, BN), GROUP)
    r = block * BM + tl.arange(0, BM)
    at = tile * BN + tl.arange(0, BN)
    to = out + r.to(tl.int64)[:, None] * width + at[None, :]
    inside = r < n
    written = inside[:, None] & (at < width)[None, :]
    if HAS_INDEX:
        inside = inside & (first + r < tl.load(count))
        if first + block * BM >= tl.load(count):  # no row of this tile counts
            tl.store(to, tl.zeros([BM, BN], out.dtype.element_ty), mask=written)
            return
    row = row_at(index, first + r, inside, HAS_INDEX)
    column = start + at
    if FROM_SAVED:
        saved_row = (first + r).to(tl.int64)
        low = tl.load(saved_logits + saved_row[:, None] * V + column[None, :], mask=written, other=0.0).to(tl.float32)
        per, tiles = tiles_of(V, piece, MAX_OF)
        largest = tile_max + saved_row[:, None] * tiles + (column // piece * per + column % piece // MAX_OF)[None, :]
        y = low + tl.load(largest, mask=written, other=0.0)
    else:
        begins_with, stop = 0, V
        if PART:
            begins_with, stop = start, tl.minimum(V, start + width)
        y = tile_logits(
            x, weight, bias, inner, factor, r, inside, column, begins_with, D, stop, rank, x_stride, head_stride,
            head_step, factor_stride, factor_step, scale, HAS_BIAS, HAS_LORA, OPERAND, BM, BN, BK,
        )  # fmt: skip
        if HAS_CAP:
            y = cap(y, softcap)
    z_scale = row_scales(T, row, inside, HAS_T, BM)
    bad = tl.load(invalid + row, mask=inside, other=0) != 0
    id = tl.load(ids + row, mask=inside, other=-1).to(tl.int64)
    chosen = column[None, :] == tl.where(bad | (id >= V), -1, id).to(tl.int32)[:, None]  # -1 is no column
    none = z_scale * 0.0
    up, up_lse, up_entropy, up_mass = none, none, none, none
    if G:
        up = tl.where(bad, 0.0, tl.load(g + row, mask=inside, other=0.0))
    if G_LSE:
        up_lse = tl.load(g_lse + row, mask=inside, other=0.0)
    if G_ENTROPY:
        up_entropy = tl.load(g_entropy + row, mask=inside, other=0.0)
    if G_MASS:
        up_mass = tl.where(bad, 0.0, tl.load(g_mass + row, mask=inside, other=0.0))
    kept_top, kept_log_total, among = none, none, chosen
    if SUPPORT:
        kept_top = tl.load(stats + 4 * N + row, mask=inside, other=0.0)
        kept_log_total = tl.load(stats + 5 * N + row, mask=inside, other=0.0)
        among = kept_columns(kept, row, column, inside, V, kept_stride)
    top, log_total = tl.load(stats + row, mask=inside, other=0.0), tl.load(stats + N + row, mask=inside, other=0.0)
    mean = tl.load(stats + 2 * N + row, mask=inside, other=0.0)
    rest = tl.load(stats + 3 * N + row, mask=inside, other=0.0)
    dy = dlogits(
        y, chosen=chosen, kept=among, scale=z_scale[:, None], top=top[:, None], log_total=log_total[:, None],
        mean=mean[:, None], rest=rest[:, None], kept_top=kept_top[:, None], kept_log_total=kept_log_total[:, None],
        g=up[:, None], g_lse=up_lse[:, None], g_entropy=up_entropy[:, None], g_mass=up_mass[:, None],
        SUPPORT=SUPPORT, G_ENTROPY=G_ENTROPY,
    )  # fmt: skip
    if HAS_CAP:
        t = tl.maximum(y / softcap, -1.0)  # tanh(x / c); a forbidden id is -inf
        dy = dy * (1.0 - t * t)
    dy = tl.where(inside[:, None], dy * scale, 0.0)
    tl.store(to, stored_as(dy, out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["first"])  # that M and K are multiples of 16 is what lets loads be wide
def head_matmul(
    a,  # [M, K], a_stride from row to row, a_step from column to column
    b,  # [K, C], b_stride from row to row, b_step from column to column
    count,  # [1], read where LIMIT: how many rows count, of which this block's start at `first`
    out,  # [M, C] contiguous
    first, M, C, K, a_stride, a_step, b_stride, b_step,
    LIMIT: tl.constexpr,  # "none", "rows" where M runs over rows, "sum" where K does
    ADD: tl.constexpr, OPERAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = a @ b, or out += a @ b where ADD: the sum goes on where it stopped, so cutting K changes no bit."""
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(C, BN), GROUP)
    end = K
    if LIMIT != "none":
        counted = tl.maximum(tl.load(count) - first, 0).to(tl.int32)
        if LIMIT == "rows":
            if block * BM >= counted:
                return
        else:
            end = tl.minimum(K, counted)
    m = block * BM + tl.arange(0, BM)
    c = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside, there = m < M, c < C
    to = out + m.to(tl.int64)[:, None] * C + c[None, :]
    written = inside[:, None] & there[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    if ADD:
        acc = tl.load(to, mask=written, other=0.0)
    # Products of fp32 that are added in one chain: in a sum over a vocabulary a longer one loses its small terms beside
    # its large sum. Slices of K are multiples of it, so cutting K changes no bit. (Triton turns `acc += dot` into one
    # chain again.)
    CHAIN: tl.constexpr = 64
    part = tl.zeros([BM, BN], tl.float32)
    x0 = a + m.to(tl.int64)[:, None] * a_stride + k.to(tl.int64)[None, :] * a_step
    w0 = b + k.to(tl.int64)[:, None] * b_stride + c.to(tl.int64)[None, :] * b_step
    for start in range(0, end, BK):
        left = k < end - start
        x = tl.load(x0, mask=inside[:, None] & left[None, :], other=0.0).to(OPERAND)
        w = tl.load(w0, mask=left[:, None] & there[None, :], other=0.0).to(OPERAND)
        if OPERAND == tl.float32:
            part = tl.dot(x, w, part, input_precision="ieee")
            if (start + BK) % CHAIN == 0:
                acc += part
                part = tl.zeros([BM, BN], tl.float32)
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
        x0 += BK * a_step
        w0 += BK * b_stride
    if OPERAND == tl.float32:
        acc += part
    tl.store(to, stored_as(acc, out.dtype.element_ty), mask=written)
