"""Tiles of e2m1 codes with the scales of their blocks as operands of a matrix instruction.

The layout `triton_f4` holds codes as `triton_w4` does (see `code_tiles`): tiles of 16 rows x 64 columns of 128 words,
word 16 r8 + 4 c4 + ks, so that a word is four columns of rows r8 and r8 + 8, in block ks of 16 columns. Scales lie
beside: int16 [N / 16, K / 64, 8, B], the bytes of rows r8 and r8 + 8 for each of the B blocks that a scale has in 64
columns (2 of mxfp4, 4 of nvfp4).

The bits of an e2m1 code, moved to where bfloat16 or fp32 has them, are its value times 2^-126, subnormal or not; those
of an e4m3 byte are its value times 2^-120. Every product of a code and a scale is exact in bfloat16.

Legend: N rows · K columns of the weight · TN rows / 16 · BK columns a step.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from rlkernel_triton.quant.code_tiles import float8_value, narrowed, widened

MXFP4: Final = tl.constexpr(0)
NVFP4: Final = tl.constexpr(2)


@triton.jit
def signed(value, code, SIGN: tl.constexpr):
    """fp32 magnitudes with the sign bit of int32 codes; -0 too, which triton 3.6 loses: it negates by 0 - x."""
    return (value.to(tl.int32, bitcast=True) | tl.where(code & SIGN != 0, -2147483648, 0)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_value(code):
    """fp32 of codes 0..15, given as int32."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * (2.0**126)
    return signed(value, code, 8)


@triton.jit
def power_of_two(byte):
    """fp32 2^(E - 127) of e8m0 bytes, given as int32; NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def block_scale(byte, FORMAT: tl.constexpr):
    """fp32 of a scale's byte; nvfp4's without the factor of all."""
    if FORMAT == MXFP4:
        return power_of_two(byte)
    return signed(float8_value(byte & 127, 3, 7, False), byte, 128)


@triton.jit
def load_scales(scale, row16, k, K, FORMAT: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr):
    """[TN, BK * 2] int16, a scale of two rows for every word of `TN` row tiles from `row16` on, columns k .. k + BK."""
    PER: tl.constexpr = 2 if FORMAT == MXFP4 else 4
    j = tl.arange(0, BK * 2)
    at = (j // 128 * 8 + j % 128 // 16) * PER + j % 4 * PER // 4
    row = (row16 + tl.arange(0, TN)).to(tl.int64) * (K // 64 * 8 * PER)
    return tl.load(scale + row[:, None] + (k // 64 * 8 * PER + at)[None, :])


@triton.jit
def _twice(byte, FORMAT: tl.constexpr):
    """Two bfloat16 of a scale's byte in a word; of nvfp4's, times 2^-120."""
    if FORMAT == MXFP4:
        bits = tl.maximum(byte << 7, 0x40)  # 2^-127 is subnormal
        bits = tl.where(byte == 255, 0x7FC0, bits)
    else:
        bits = ((byte & 127) << 4) | ((byte & 128) << 8)
        bits = tl.where(byte & 127 == 127, 0x7FC0, bits)
    return bits | (bits << 16)


@triton.jit
def _eight(word, low, high, factor):
    """Eight bfloat16 of a word's codes times the scales of its two rows; `factor` undoes 2^-120 of both, or is 1."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 m, s, a0, a1, a2, a3, lo, hi, up, no;
        mov.b32 up, 0x7e807e80;
        mov.b32 no, 0x80008000;
        fma.rn.bf16x2 lo, $9, $11, no;
        fma.rn.bf16x2 hi, $10, $11, no;
        shl.b32 m, $8, 6;
        shl.b32 s, $8, 12;
        and.b32 s, s, no;
        lop3.b32 a0, m, 0x01c001c0, s, 0xea;
        shl.b32 m, $8, 2;
        shl.b32 s, $8, 8;
        and.b32 s, s, no;
        lop3.b32 a1, m, 0x01c001c0, s, 0xea;
        shr.u32 m, $8, 2;
        shl.b32 s, $8, 4;
        and.b32 s, s, no;
        lop3.b32 a2, m, 0x01c001c0, s, 0xea;
        shr.u32 m, $8, 6;
        and.b32 s, $8, no;
        lop3.b32 a3, m, 0x01c001c0, s, 0xea;
        fma.rn.bf16x2 a0, a0, up, no;
        fma.rn.bf16x2 a1, a1, up, no;
        fma.rn.bf16x2 a2, a2, up, no;
        fma.rn.bf16x2 a3, a3, up, no;
        fma.rn.bf16x2 a0, a0, lo, no;
        fma.rn.bf16x2 a1, a1, hi, no;
        fma.rn.bf16x2 a2, a2, lo, no;
        fma.rn.bf16x2 a3, a3, hi, no;
        mov.b32 {$0,$1}, a0;
        mov.b32 {$2,$3}, a1;
        mov.b32 {$4,$5}, a2;
        mov.b32 {$6,$7}, a3;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
        args=[word, low, high, factor],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _one(words, s, SHIFT: tl.constexpr, X_TYPE: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    value = narrowed(e2m1_value((words >> SHIFT) & 15) * s, X_TYPE, INTERPRETED)
    return widened(value, INTERPRETED).to(DTYPE)


@triton.jit
def float4_tile(
    words, scales, factor, FORMAT: tl.constexpr, X_TYPE: tl.constexpr, DTYPE: tl.constexpr, TN: tl.constexpr,
    BK: tl.constexpr, PERMUTED: tl.constexpr, ASM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[16 TN, BK] of DTYPE: codes times scales, rounded to X_TYPE; times `factor`, an fp32 number, before the rounding.

    ASM: X_TYPE is bfloat16, and `factor` 1.
    """
    if ASM:
        one = tl.full(words.shape, 0x3F803F80 if FORMAT == MXFP4 else 0x7B807B80, tl.int32)  # 1 or 2^120, twice
        low, high = _twice(scales & 255, FORMAT), _twice((scales >> 8) & 255, FORMAT)
        v0, v1, v2, v3, v4, v5, v6, v7 = _eight(words, low, high, one)
    else:
        low = block_scale(scales & 255, FORMAT) * factor
        high = block_scale((scales >> 8) & 255, FORMAT) * factor
        v0 = _one(words, low, 0, X_TYPE, DTYPE, INTERPRETED)
        v1 = _one(words, low, 16, X_TYPE, DTYPE, INTERPRETED)
        v2 = _one(words, high, 4, X_TYPE, DTYPE, INTERPRETED)
        v3 = _one(words, high, 20, X_TYPE, DTYPE, INTERPRETED)
        v4 = _one(words, low, 8, X_TYPE, DTYPE, INTERPRETED)
        v5 = _one(words, low, 24, X_TYPE, DTYPE, INTERPRETED)
        v6 = _one(words, high, 12, X_TYPE, DTYPE, INTERPRETED)
        v7 = _one(words, high, 28, X_TYPE, DTYPE, INTERPRETED)
    y = tl.join(
        tl.join(tl.join(v0, v4), tl.join(v2, v6)), tl.join(tl.join(v1, v5), tl.join(v3, v7))
    )  # [TN, BK * 2, kh, rh, p]
    TK: tl.constexpr = (BK + 63) // 64
    KS: tl.constexpr = BK // 16 // TK
    if PERMUTED:
        y = tl.reshape(y, (TN, TK, 8, 4, KS // 2, 2, 2, 2, 2))  # tn tk r8 c4 ch ii kh rh p
        y = tl.permute(y, (0, 7, 2, 1, 4, 6, 3, 5, 8))  # tn rh r8 tk ch kh c4 ii p
    else:
        y = tl.reshape(y, (TN, TK, 8, 4, KS, 2, 2, 2))  # tn tk r8 c4 ks kh rh p
        y = tl.permute(y, (0, 6, 2, 1, 4, 5, 3, 7))  # tn rh r8 tk ks kh c4 p
    return tl.reshape(y, (TN * 16, BK))
