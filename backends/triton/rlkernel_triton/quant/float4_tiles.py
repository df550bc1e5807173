"""Tiles of e2m1 codes with the scales of their blocks as operands of a matrix instruction.

The layout `triton_e2m1` holds codes as `triton_w4` does but for the bits within a half (see `code_tiles`): tiles of 16
rows x 64 columns of 128 words, word 16 r8 + 4 c4 + ks, so that a word is four columns of rows r8 and r8 + 8, in block
ks of 16 columns. Scales lie beside: int16 [N / 16, K / 64, 8, B], the bytes of rows r8 and r8 + 8 for each of the B
blocks that a scale has in 64 columns (2 of mxfp4, 4 of nvfp4); products read them as words of 32 bits, two blocks each.

The bits of an e2m1 code, moved to where bfloat16 or fp32 has them, are its value times 2^-126, subnormal or not; those
of an e4m3 byte are its value times 2^-120. Every product of a code and a scale is exact in bfloat16.

Legend: N rows · K columns of the weight · TN rows / 16 · BK columns a step.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import float8_value, narrowed, signed, straight, widened
from rlkernel_triton.quant.product_tiles import as_operand

MXFP4: Final = tl.constexpr(0)
NVFP4: Final = tl.constexpr(2)


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
    return float8_value(byte, 3, 7, False)


@triton.jit
def load_scales(scale, row16, k, K, FORMAT: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr):
    """int32 [TN, BK / 8 * V]: scales of `TN` row tiles from `row16` on, columns k .. k + BK, four bytes a word.

    They have the size that asynchronous copies want, so they come with the codes, steps ahead.
    """
    V: tl.constexpr = 1 if FORMAT == MXFP4 else 2
    row = (row16 + tl.arange(0, TN)).to(tl.int64) * (K // 8 * V)
    return tl.load(scale + row[:, None] + (k // 8 * V + tl.arange(0, BK // 8 * V))[None, :])


@triton.jit
def of_blocks(s, FORMAT: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr):
    """Bytes of row r8 in a word's two blocks, and of row r8 + 8, each [TN, BK / 64, 8]; nvfp4's [.., 8, 2]."""
    if FORMAT == MXFP4:
        s = tl.reshape(s, (TN, BK // 64, 8))
    else:
        s = tl.reshape(s, (TN, BK // 64, 8, 2))
    return s & 255, (s >> 16) & 255, (s >> 8) & 255, (s >> 24) & 255


@triton.jit
def to_words(first, second, FORMAT: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr):
    """[TN, BK * 2]: what belongs to each word of codes."""
    both = tl.join(first, second)
    if FORMAT == MXFP4:
        both = both[:, :, :, None, :, None]
    else:
        both = both[:, :, :, None, :, :]
    return tl.reshape(tl.broadcast_to(both, (TN, BK // 64, 8, 4, 2, 2)), (TN, BK * 2))


@triton.jit
def _twice(byte, FORMAT: tl.constexpr):
    """Two bfloat16 of a scale's byte in a word."""
    if FORMAT == MXFP4:
        bits = byte * 0x00800080
        found = tl.where((byte + 1) & 254 == 0, bits | 0x00400040, bits)  # 0: 2^-127 is subnormal; 255: NaN
    else:
        bits = ((byte & 127) << 4) | ((byte & 128) << 8)
        bits = tl.where(byte & 127 == 127, 0x7FC0, bits)
        found = _raised(bits | (bits << 16))
    return found


@triton.jit
def _raised(pair):
    """Two bfloat16 in a word, times 2^120."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 up, no;
        mov.b32 up, 0x7b807b80;
        mov.b32 no, 0x80008000;
        fma.rn.bf16x2 $0, $1, up, no;
        }""",
        constraints="=r,r",
        args=[pair],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _eight(word, low, high):
    """Eight bfloat16 of a word's codes times the scales of its two rows, each twice in a word."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 m, a0, a1, a2, a3, up, no;
        mov.b32 up, 0x7e807e80;
        mov.b32 no, 0x80008000;
        and.b32 a0, $8, 0x81c081c0;
        shl.b32 m, $8, 3;
        and.b32 a1, m, 0x81c081c0;
        shl.b32 m, $8, 6;
        and.b32 a2, m, 0x81c081c0;
        shl.b32 m, $8, 1;
        and.b32 a3, m, no;
        shr.u32 m, $8, 5;
        lop3.b32 a3, m, 0x01000100, a3, 0xea;
        shr.u32 m, $8, 4;
        lop3.b32 a3, m, 0x00c000c0, a3, 0xea;
        fma.rn.bf16x2 a0, a0, up, no;
        fma.rn.bf16x2 a1, a1, up, no;
        fma.rn.bf16x2 a2, a2, up, no;
        fma.rn.bf16x2 a3, a3, up, no;
        fma.rn.bf16x2 a0, a0, $9, no;
        fma.rn.bf16x2 a1, a1, $10, no;
        fma.rn.bf16x2 a2, a2, $9, no;
        fma.rn.bf16x2 a3, a3, $10, no;
        mov.b32 {$0,$1}, a0;
        mov.b32 {$2,$3}, a1;
        mov.b32 {$4,$5}, a2;
        mov.b32 {$6,$7}, a3;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        args=[word, low, high],
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
    low0, low1, high0, high1 = of_blocks(scales, FORMAT, TN, BK)
    if ASM:
        low = to_words(_twice(low0, FORMAT), _twice(low1, FORMAT), FORMAT, TN, BK)
        high = to_words(_twice(high0, FORMAT), _twice(high1, FORMAT), FORMAT, TN, BK)
        v0, v1, v2, v3, v4, v5, v6, v7 = _eight(words, low, high)
    else:
        low = to_words(block_scale(low0, FORMAT), block_scale(low1, FORMAT), FORMAT, TN, BK) * factor
        high = to_words(block_scale(high0, FORMAT), block_scale(high1, FORMAT), FORMAT, TN, BK) * factor
        words = straight(words)
        v0 = _one(words, low, 0, X_TYPE, DTYPE, INTERPRETED)
        v1 = _one(words, low, 16, X_TYPE, DTYPE, INTERPRETED)
        v2 = _one(words, high, 4, X_TYPE, DTYPE, INTERPRETED)
        v3 = _one(words, high, 20, X_TYPE, DTYPE, INTERPRETED)
        v4 = _one(words, low, 8, X_TYPE, DTYPE, INTERPRETED)
        v5 = _one(words, low, 24, X_TYPE, DTYPE, INTERPRETED)
        v6 = _one(words, high, 12, X_TYPE, DTYPE, INTERPRETED)
        v7 = _one(words, high, 28, X_TYPE, DTYPE, INTERPRETED)
    return as_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN, BK, PERMUTED)


@triton.jit
def dequantise_tiles(
    codes, scale, factor, out, first, N, K, FORMAT: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """16 rows x C columns of the weight's rows first .. N; `first` is a multiple of 16, K one of C."""
    column_tiles = K // C
    row16 = first // 16 + tl.program_id(0) // column_tiles
    k0 = tl.program_id(0) % column_tiles * C
    one = tl.arange(0, 1)
    words = tl.load(codes + (row16 + one).to(tl.int64)[:, None] * (K * 2) + (k0 * 2 + tl.arange(0, C * 2))[None, :])
    s = load_scales(scale, row16, k0, K, FORMAT, 1, C)
    whole = 1.0
    if FORMAT == NVFP4:
        whole = tl.load(factor)
    X_TYPE: tl.constexpr = out.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if INTERPRETED else X_TYPE
    value = float4_tile(words, s, whole, FORMAT, X_TYPE, DTYPE, 1, C, False, False, INTERPRETED)
    n, k = row16 * 16 + tl.arange(0, 16), k0 + tl.arange(0, C)
    at = (n - first).to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + at, narrowed(value.to(tl.float32), X_TYPE, INTERPRETED), mask=(n < N)[:, None])
