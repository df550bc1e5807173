"""Quantising to the k-quants of GGUF in one launch: scales of sub-blocks that are integers, codes, their high bits.

The arithmetic is that of `rlkernel_core.quant.kquants`, operation by operation: it takes the extremes of a sub-block
for its scale and searches for none, so every step has one right result.

Legend: N rows · K columns · R x C tile of a program · B sub-blocks of a tile, S of which make a super-block.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import narrowed, widened
from rlkernel_triton.quant.encode_tiles import (
    extremes,
    grouped,
    in_order,
    integer_bits,
    packed,
    ratio_of,
    rint,
    signed_extreme,
    size_bits,
    store_words,
)


@triton.jit
def _over(x, number):
    return tl.div_rn(x, number + tl.zeros_like(x))


@triton.jit
def _of_supers(per_super, B: tl.constexpr):
    """[B] of [B / S]: the entry of every sub-block's super-block."""
    S: tl.constexpr = B // per_super.shape[0]
    return tl.reshape(tl.broadcast_to(per_super[:, None], (per_super.shape[0], S)), (B,))


@triton.jit
def _unit(most, LARGEST: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 of the fp16 unit that integers are multiples of; what is not finite is NaN."""
    unit = widened(narrowed(_over(most, LARGEST), tl.float16, INTERPRETED), INTERPRETED)
    return tl.where(size_bits(unit) < 0x7F800000, unit, float("nan"))


@triton.jit
def _multiple(exact, unit, LEAST: tl.constexpr, MOST: tl.constexpr):
    """rint(exact / unit) between two integers as fp32; 0 where the unit is 0 or NaN."""
    ratio = tl.div_rn(exact, tl.where(unit == 0, float("inf"), unit))
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    return tl.minimum(tl.maximum(rint(ratio), LEAST), MOST)


@triton.jit
def encode_supers(
    w, row_stride, column_stride, codes, high, scale, least, d, dmin, N, K, SUB: tl.constexpr, BITS: tl.constexpr,
    SIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """q4_k, q5_k (SUB 32) and q6_k (SUB 16, SIGNED). Grid: row tiles x column tiles; C is a multiple of 256."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    S: tl.constexpr = 256 // SUB
    B: tl.constexpr = R * C // SUB
    TOP: tl.constexpr = (1 << BITS) - 1
    x = grouped(w, row_stride, column_stride, row, column, N, K, SUB, WHOLE, INTERPRETED, R, C)
    low, top, bits = extremes(x, SIGNED, INTERPRETED)
    if SIGNED:
        step = _over(signed_extreme(x, bits), -32.0)
        steps = tl.reshape(step, (B // S, S, 1))
        unit = _unit(signed_extreme(steps, tl.max(tl.max(size_bits(steps), axis=2), axis=1)), -128.0, INTERPRETED)
        below = step
    else:
        below = 0.0 - low
        step = _over(top + below, TOP + 0.0)
        step = tl.where(bits > 0x7F800000, float("nan"), step)
        unit = _unit(_most(step, B // S, S), 63.0, INTERPRETED)
        lower = _unit(_most(below, B // S, S), 63.0, INTERPRETED)
        unit, lower = tl.where(lower == lower, unit, lower), tl.where(unit == unit, lower, unit)
    # What belongs to a super-block, then to a sub-block.
    s = tl.arange(0, B // S)
    n, block = (row + s // (C // 256)).to(tl.int64), column // 256 + s % (C // 256)
    inside = (n < N) & (block < tl.cdiv(K, 256))
    at = n * tl.cdiv(K, 256) + block
    tl.store(d + at, narrowed(unit, tl.float16, INTERPRETED), mask=inside)
    if not SIGNED:
        tl.store(dmin + at, narrowed(lower, tl.float16, INTERPRETED), mask=inside)
    unit = _of_supers(unit, B)
    many = _multiple(step, unit, -128.0 if SIGNED else 0.0, 127.0 if SIGNED else 63.0)
    b = tl.arange(0, B)
    G: tl.constexpr = C // SUB
    n, block = (row + b // G).to(tl.int64), column // SUB + b % G
    inside = (n < N) & (block < tl.cdiv(K, SUB))
    at = n * tl.cdiv(K, SUB) + block
    tl.store(scale + at, many.to(tl.int32).to(scale.dtype.element_ty), mask=inside)
    divisor = unit * many
    divisor = tl.where((divisor == 0) | (divisor != divisor), float("inf"), divisor)
    if not SIGNED:
        lower = _of_supers(lower, B)
        many = _multiple(below, lower, 0.0, 63.0)
        tl.store(least + at, many.to(tl.int32).to(tl.uint8), mask=inside)
        x += (lower * many)[:, None, None]
    ratio = ratio_of(x, divisor[:, None, None], INTERPRETED)
    ZERO: tl.constexpr = 32 if SIGNED else 0
    found = integer_bits(ratio, 0.0 - ZERO, TOP - 0.0 - ZERO, ZERO)
    found = tl.where(divisor[:, None, None] < float("inf"), found & TOP, ZERO)
    RUN: tl.constexpr = found.shape[1]
    k = tl.arange(0, RUN)[None, :, None] + tl.arange(0, SUB // RUN)[None, None, :] * RUN
    if not WHOLE:
        found = tl.where(block[:, None, None] * SUB + k < K, found, 0)
    words = in_order(packed(found & 15, 4, False, False), R, C // 8)
    store_words(codes, words, row, column, N, K, K // 2 if WHOLE else (K + 1) // 2, 4, 0, WHOLE, R, C)
    if BITS > 4:
        # 32 high bits of a sub-block: one of 32 codes, or two of 16.
        EXTRA: tl.constexpr = BITS - 4
        word = tl.sum(tl.sum((found >> 4) << (k * EXTRA), axis=2), axis=1)
        if WHOLE:
            tl.store(high.to(tl.pointer_type(tl.int32)) + at, word)
        else:
            j = tl.arange(0, 4)[None, :]
            row_bytes = (K * EXTRA + 7) // 8
            place = block[:, None] * 4 + j
            tl.store(
                high + n[:, None] * row_bytes + place,
                (word[:, None] >> (8 * j)).to(tl.uint8),
                mask=(n < N)[:, None] & (place < row_bytes),
            )


@triton.jit
def _most(per_sub, M: tl.constexpr, S: tl.constexpr):
    """[M] largest of S numbers that are no smaller than 0; NaN where there is one."""
    return tl.max(tl.reshape(size_bits(per_sub), (M, S)), axis=1).to(tl.float32, bitcast=True)
