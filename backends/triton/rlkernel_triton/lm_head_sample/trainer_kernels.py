"""Kernels of draws that state the bits of linear_logprob@1: its sums of a tile beside the logits that are drawn from.

`head_logits_and_sums` writes a slab of logits, and of each tile of linear_logprob the statistics of all its columns: by
the functions and in the tiles of `linear_logprob.kernels.head_partial_softmax`, so with its bits. The drawn id is in no
sum there. Once it is known, `drawn_tile_sums` multiplies the one tile again that has it, once for all rows of a block
that drew from it, and writes its statistics without the id. Then the parts of a row are merged as linear_logprob's, and
`state_trainer_bits` puts the result into what the draw states.

Bytes: beside those of `head_logits` 12 of each tile and law, and BN D s of the head for a row that drew from a tile of
its own.

Legend: n rows · D hidden · V vocabulary · P tiles of V, those of the pieces of V, the last of a piece cut off · r rank
of a low-rank addition · width columns of a slab · BM, BN, BK a tile. Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import cap
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.linear_tile import tile_logits, tile_swizzle
from rlkernel_triton.common.softmax import row_scales
from rlkernel_triton.linear_logprob.kernels import tile_softmax, tiles_of
from rlkernel_triton.sample.results import with_sum


@triton.jit
def tile_of_column(column, piece, per, BN: tl.constexpr):
    """The tile that has a column."""
    return column // piece * per + column % piece // BN


@triton.jit
def tile_columns(tile, piece, per, V, BN: tl.constexpr):
    """([BN] columns of a tile, the first one behind its piece)."""
    begin = tile // per * piece
    return begin + tile % per * BN + tl.arange(0, BN), tl.minimum(begin + piece, V)


@triton.jit
def store_sums(y, target, z_scale, sums, plane, inside):
    """Statistics of a tile y [BM, BN], in planes: the target, the largest and the sum of all other columns."""
    top, total, _ = tile_softmax(y, z_scale, False)
    tl.store(sums, target, mask=inside)
    tl.store(sums + plane, top, mask=inside)
    tl.store(sums + 2 * plane, total, mask=inside)


@triton.jit(do_not_specialize=["n", "first"])  # bits must not depend on them
def head_logits_and_sums(
    x,  # [n, D] hidden states, D contiguous
    weight,  # [V, D]
    bias,  # [V], read where HAS_BIAS
    inner,  # [n, r] fp32 scale times hidden @ A.T, read where HAS_LORA
    factor,  # [V, r] B of LoRA, read where HAS_LORA
    T,  # [n] where HAS_T, else a number; read where LAW
    out,  # [n, width] fp32 logits under the cap
    sums,  # [3, n, P] fp32 at temperature T, written where LAW
    raw_sums,  # the same at temperature 1, written where RAW
    n, D, V, rank, x_stride, head_stride, head_step, factor_stride, factor_step, scale, softcap,
    piece,  # columns after which a tile begins anew
    raw_T,  # 1, a number as T may be one
    first, width,  # columns that are written; a tile that has others too is computed with the slab of these again
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr, LAW: tl.constexpr,
    RAW: tl.constexpr, OPERAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of those that have columns first .. first + width."""
    per, P = tiles_of(V, piece, BN)
    begin = tile_of_column(first, piece, per, BN)
    tiles = tile_of_column(first + width - 1, piece, per, BN) - begin + 1
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(n, BM), tiles, GROUP)
    tile += begin
    column, stop = tile_columns(tile, piece, per, V, BN)
    r = block * BM + tl.arange(0, BM)
    inside = r < n
    y = tile_logits(
        x, weight, bias, inner, factor, r, inside, column, 0, D, stop, rank, x_stride, head_stride, head_step,
        factor_stride, factor_step, scale, HAS_BIAS, HAS_LORA, OPERAND, BM, BN, BK,
    )  # fmt: skip
    if HAS_CAP:
        y = cap(y, softcap)
    written = (column < stop) & (column >= first) & (column < first + width)
    to = out + r.to(tl.int64)[:, None] * width + (column - first)[None, :]
    tl.store(to, y, mask=inside[:, None] & written[None, :])
    plane, at = n.to(tl.int64) * P, r.to(tl.int64) * P + tile
    none = tl.zeros([BM], tl.float32)
    if LAW:
        z_scale = row_scales(T, r, inside, HAS_T, BM)
        store_sums(y, none, z_scale, sums + at, plane, inside)
    if RAW:
        raw_scale = row_scales(raw_T, r, inside, False, BM)
        store_sums(y, none, raw_scale, raw_sums + at, plane, inside)


@triton.jit(do_not_specialize=["n"])
def drawn_tile_sums(
    x, weight, bias, inner, factor,
    ids,  # [n] int64 drawn ids
    counts,  # [n] int32, 0 where none was drawn
    T, sums, raw_sums,
    n, D, V, rank, x_stride, head_stride, head_step, factor_stride, factor_step, scale, softcap, piece, raw_T,
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr, LAW: tl.constexpr,
    RAW: tl.constexpr, OPERAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile that has a row's id, without it. Other arguments are those of `head_logits_and_sums`."""
    own = tl.program_id(0)
    if tl.load(counts + own) <= 0:
        return
    per, P = tiles_of(V, piece, BN)
    tile = tile_of_column(tl.load(ids + own).to(tl.int32), piece, per, BN)
    r = own // BM * BM + tl.arange(0, BM)
    inside = r < n
    there = inside & (tl.load(counts + r, mask=inside, other=0) > 0)
    id = tl.where(there, tl.load(ids + r, mask=there, other=0).to(tl.int32), -1)
    from_it = there & (tile_of_column(tl.where(there, id, 0), piece, per, BN) == tile)
    if tl.min(tl.where(from_it, r, own), 0) < own:  # the first of these rows computes it
        return
    column, stop = tile_columns(tile, piece, per, V, BN)
    y = tile_logits(
        x, weight, bias, inner, factor, r, inside, column, 0, D, stop, rank, x_stride, head_stride, head_step,
        factor_stride, factor_step, scale, HAS_BIAS, HAS_LORA, OPERAND, BM, BN, BK,
    )  # fmt: skip
    if HAS_CAP:
        y = cap(y, softcap)
    chosen = column[None, :] == tl.where(id < stop, id, -1)[:, None]
    target = tl.sum(tl.where(chosen, y, 0.0), axis=1)
    y = tl.where(chosen, float("-inf"), y)
    plane, at = n.to(tl.int64) * P, r.to(tl.int64) * P + tile
    if LAW:
        z_scale = row_scales(T, r, inside, HAS_T, BM)
        store_sums(y, target, z_scale, sums + at, plane, from_it)
    if RAW:
        raw_scale = row_scales(raw_T, r, inside, False, BM)
        store_sums(y, target, raw_scale, raw_sums + at, plane, from_it)


@triton.jit(do_not_specialize=["N"])
def state_trainer_bits(
    law,  # [N] fp32 log-probabilities of linear_logprob at the temperature, read where LAW
    raw,  # the same at temperature 1, read where RAW
    counts,  # [N] int32 tokens kept; 0 where none was drawn
    logprob,  # [N] fp32, changed where LAW
    log_kept,  # [N] fp32, changed where LAW
    raw_logprob,  # [N] fp32, changed where RAW
    N, LAW: tl.constexpr, RAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logprob + log_kept become `law`, and raw_logprob `raw`, where these are finite: a greedy row has no law."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + i, mask=i < N, other=0)
    drawn = (i < N) & (count > 0)
    if LAW:
        whole = tl.load(law + i, mask=drawn, other=float("-inf"))
        sound = drawn & (whole > float("-inf"))
        p, kept = with_sum(
            tl.load(logprob + i, mask=sound, other=0.0), tl.load(log_kept + i, mask=sound, other=0.0), whole, count == 1
        )
        tl.store(logprob + i, p, mask=sound)
        tl.store(log_kept + i, kept, mask=sound)
    if RAW:
        value = tl.load(raw + i, mask=drawn, other=float("-inf"))
        tl.store(raw_logprob + i, value, mask=drawn & (value > float("-inf")))
