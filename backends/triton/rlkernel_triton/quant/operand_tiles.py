"""4-bit codes in the layouts `triton_w4` and `triton_e2m1` as operands of a matrix instruction.

4-bit integers become 16-bit floats by bits: 0x4300 | q is the bfloat16 128 + q, 0x6400 | q the float16 1024 + q, and
one fused subtraction gives q - 8, exactly. Entries of a table (nf4, fp4) are picked byte by byte in registers. Other
targets than NVIDIA's, and Triton's interpreter, take shifts and casts.

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
from rlkernel_triton.quant.code_tiles import (
    MXFP4,
    decode_block_scale,
    decode_e2m1,
    restore_e2m1_bits,
    round_to,
    to_float32,
)

# A nibble q with the bits of BIAS is the 16-bit float 128 + q or 1024 + q; the multiply-add takes the offset off.
# $0 .. $7 are results, two in a register of 32 bits; $8 is the word, $9 the offset with its sign turned, twice.
_DECODE_EIGHT: Final = """{
        .reg .b32 t, a0, a1, a2, a3, one;
        mov.b32 one, ONE;
        lop3.b32 a0, $8, 0x000f000f, BIAS, 0xea;
        shr.u32 t, $8, 4;
        lop3.b32 a1, t, 0x000f000f, BIAS, 0xea;
        shr.u32 t, $8, 8;
        lop3.b32 a2, t, 0x000f000f, BIAS, 0xea;
        shr.u32 t, $8, 12;
        lop3.b32 a3, t, 0x000f000f, BIAS, 0xea;
        fma.rn.TYPE a0, a0, one, $9;
        fma.rn.TYPE a1, a1, one, $9;
        fma.rn.TYPE a2, a2, one, $9;
        fma.rn.TYPE a3, a3, one, $9;
        mov.b32 {$0,$1}, a0;
        mov.b32 {$2,$3}, a1;
        mov.b32 {$4,$5}, a2;
        mov.b32 {$6,$7}, a3;
        }"""


def _decode_eight(type_: str, one: str, bias: str) -> tl.constexpr:
    return tl.constexpr(_DECODE_EIGHT.replace("TYPE", type_).replace("ONE", one).replace("BIAS", bias))


EIGHT_BFLOAT16: tl.constexpr = _decode_eight("bf16x2", one="0x3f803f80", bias="0x43004300")
EIGHT_FLOAT16: tl.constexpr = _decode_eight("f16x2", one="0x3c003c00", bias="0x64006400")


@triton.jit
def decode_eight_bfloat16(word, offset):
    """Eight bfloat16 of the nibbles of a word, less an offset given as two bfloat16 with their signs turned."""
    return tl.inline_asm_elementwise(
        asm=EIGHT_BFLOAT16, constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r", args=[word, offset],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def decode_eight_float16(word, offset):
    """As `decode_eight_bfloat16`."""
    return tl.inline_asm_elementwise(
        asm=EIGHT_FLOAT16, constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r", args=[word, offset],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def look_up_eight(word, l0, l1, l2, l3, h0, h1, h2, h3):
    """Eight 16-bit floats of a table by the nibbles of a word, in the order of `decode_eight_bfloat16`.

    The table lies in registers: low bytes of entries 4 i .. 4 i + 3 in l_i, high bytes in h_i. Three bits of a code
    pick one of eight bytes, its last one of the two found.
    """
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 s, t, u, a, b, l, h, x0, x1, y0, y1;
        and.b32 s, $8, 0x77777777;
        shr.u32 t, $8, 1;
        lop3.b32 u, t, 0x4444, 0x3210, 0xea;
        prmt.b32 a, $9, $10, s;
        prmt.b32 b, $11, $12, s;
        prmt.b32 l, a, b, u;
        prmt.b32 a, $13, $14, s;
        prmt.b32 b, $15, $16, s;
        prmt.b32 h, a, b, u;
        prmt.b32 x0, l, h, 0x5140;
        prmt.b32 x1, l, h, 0x7362;
        shr.u32 s, s, 16;
        shr.u32 t, t, 16;
        lop3.b32 u, t, 0x4444, 0x3210, 0xea;
        prmt.b32 a, $9, $10, s;
        prmt.b32 b, $11, $12, s;
        prmt.b32 l, a, b, u;
        prmt.b32 a, $13, $14, s;
        prmt.b32 b, $15, $16, s;
        prmt.b32 h, a, b, u;
        prmt.b32 y0, l, h, 0x5140;
        prmt.b32 y1, l, h, 0x7362;
        mov.b32 {$0,$2}, x0;
        mov.b32 {$4,$6}, x1;
        mov.b32 {$1,$3}, y0;
        mov.b32 {$5,$7}, y1;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r",
        args=[word, l0, l1, l2, l3, h0, h1, h2, h3],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_table_bytes(table, FIRST: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """int32: the low or high bytes of entries FIRST .. FIRST + 3 of a table, rounded to a 16-bit DTYPE."""
    found = 0
    for i in tl.static_range(4):
        bits = tl.load(table + FIRST + i).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        found |= ((bits >> (8 if HIGH else 0)) & 255) << (8 * i)
    return found


@triton.jit
def look_up_tile(
    words, table, bytes_, DTYPE: tl.constexpr, X_TYPE: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr,
    PERMUTED: tl.constexpr, ASM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[16 TN, BK] of DTYPE: entries of a table, rounded to X_TYPE; `bytes_` as `look_up_eight` takes them."""
    if ASM:
        l0, l1, l2, l3, h0, h1, h2, h3 = bytes_
        v0, v1, v2, v3, v4, v5, v6, v7 = look_up_eight(words, l0, l1, l2, l3, h0, h1, h2, h3)
        v0, v1 = v0.to(DTYPE, bitcast=True), v1.to(DTYPE, bitcast=True)
        v2, v3 = v2.to(DTYPE, bitcast=True), v3.to(DTYPE, bitcast=True)
        v4, v5 = v4.to(DTYPE, bitcast=True), v5.to(DTYPE, bitcast=True)
        v6, v7 = v6.to(DTYPE, bitcast=True), v7.to(DTYPE, bitcast=True)
    else:
        v0, v1 = (
            _look_up(words, 0, table, DTYPE, X_TYPE, INTERPRETED),
            _look_up(words, 16, table, DTYPE, X_TYPE, INTERPRETED),
        )
        v2, v3 = (
            _look_up(words, 4, table, DTYPE, X_TYPE, INTERPRETED),
            _look_up(words, 20, table, DTYPE, X_TYPE, INTERPRETED),
        )
        v4, v5 = (
            _look_up(words, 8, table, DTYPE, X_TYPE, INTERPRETED),
            _look_up(words, 24, table, DTYPE, X_TYPE, INTERPRETED),
        )
        v6, v7 = (
            _look_up(words, 12, table, DTYPE, X_TYPE, INTERPRETED),
            _look_up(words, 28, table, DTYPE, X_TYPE, INTERPRETED),
        )
    return to_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN, BK, PERMUTED)


@triton.jit
def _look_up(words, SHIFT: tl.constexpr, table, DTYPE: tl.constexpr, X_TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    found = round_to(tl.load(table + ((words >> SHIFT) & 15)), X_TYPE, INTERPRETED)
    return to_float32(found, INTERPRETED).to(DTYPE)


@triton.jit
def word_offsets(BK: tl.constexpr):
    """[BK * 2]: where the words of BK columns stand from the first of them on."""
    i = tl.arange(0, BK * 2)
    if BK == 32:  # two words of the four of a thread
        return i // 2 * 4 + i % 2
    return i


@triton.jit
def word_start(BK: tl.constexpr, k):
    """Where the words of columns k .. k + BK start, k a multiple of BK."""
    if BK == 32:
        return k // 64 * 128 + k % 64 // 32 * 2
    return k * 2


@triton.jit
def operand_columns(BK: tl.constexpr, PERMUTED: tl.constexpr):
    """[BK]: the column of the weight that a product takes at each place.

    `mma.sync` wants four neighbors along K in a thread where a word holds two; any order along K gives the same sum,
    so the other operand is permuted instead.
    """
    i = tl.arange(0, BK)
    if PERMUTED:  # i = 32 ch + 16 kh + 4 c4 + 2 ii + p
        return i // 32 * 32 + i // 2 % 2 * 16 + i // 16 % 2 * 8 + i // 4 % 4 * 2 + i % 2
    return i


@triton.jit
def decode_w4_tile(
    words,  # [TN, BK * 2] int32
    DTYPE: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    PERMUTED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ASM: tl.constexpr,
):
    """[16 TN, BK] of DTYPE: q - 8 (symmetric), or q."""
    if ASM and DTYPE == tl.bfloat16:
        offset = tl.full(words.shape, -1022835960 if SYMMETRIC else -1023360256, tl.int32)  # -136 or -128, twice
        v0, v1, v2, v3, v4, v5, v6, v7 = decode_eight_bfloat16(words, offset)
    elif ASM and DTYPE == tl.float16:
        offset = tl.full(words.shape, -469179384 if SYMMETRIC else -469703680, tl.int32)  # -1032 or -1024, twice
        v0, v1, v2, v3, v4, v5, v6, v7 = decode_eight_float16(words, offset)
    else:
        v0, v1 = _integer_value(words, 0, DTYPE, SYMMETRIC), _integer_value(words, 16, DTYPE, SYMMETRIC)
        v2, v3 = _integer_value(words, 4, DTYPE, SYMMETRIC), _integer_value(words, 20, DTYPE, SYMMETRIC)
        v4, v5 = _integer_value(words, 8, DTYPE, SYMMETRIC), _integer_value(words, 24, DTYPE, SYMMETRIC)
        v6, v7 = _integer_value(words, 12, DTYPE, SYMMETRIC), _integer_value(words, 28, DTYPE, SYMMETRIC)
    return to_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN, BK, PERMUTED)


@triton.jit
def to_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN: tl.constexpr, BK: tl.constexpr, PERMUTED: tl.constexpr):
    """[16 TN, BK] of the values of words [TN, BK * 2], in the order of `decode_eight_bfloat16`."""
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


@triton.jit
def _integer_value(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr, SYMMETRIC: tl.constexpr):
    return (((words >> SHIFT) & 15) - (8 if SYMMETRIC else 0)).to(DTYPE)


@triton.jit
def finish_dot(total, before, step, steps, PERMUTED: tl.constexpr = False):
    """A sum that the step has added to, where step < steps, which holds; no step after it begins before it is there.

    Triton lets the matrix instructions of Hopper run on into the next step, which decodes weights into registers that
    they may still read (seen with 3.6 on an H200: 128 x 128 tiles were wrong). What is selected from has to be there.
    PERMUTED: `mma.sync`, which runs on into nothing.
    """
    if not PERMUTED:
        total = tl.where(step < steps, total, before)
    return total


@triton.jit
def load_e2m1_scales(scale, row16, k, K, FORMAT: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr):
    """int32 [TN, BK / 8 * V]: scales of `TN` row tiles from `row16` on, columns k .. k + BK, four bytes a word.

    They have the size that asynchronous copies want, so they come with the codes, steps ahead.
    """
    V: tl.constexpr = 1 if FORMAT == MXFP4 else 2
    row = (row16 + tl.arange(0, TN)).to(tl.int64) * (K // 8 * V)
    return tl.load(scale + row[:, None] + (k // 8 * V + tl.arange(0, BK // 8 * V))[None, :])


@triton.jit
def split_scale_bytes(s, FORMAT: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr):
    """Bytes of row r8 in a word's two blocks, and of row r8 + 8, each [TN, BK / 64, 8]; nvfp4's [.., 8, 2]."""
    if FORMAT == MXFP4:
        s = tl.reshape(s, (TN, BK // 64, 8))
    else:
        s = tl.reshape(s, (TN, BK // 64, 8, 2))
    return s & 255, (s >> 16) & 255, (s >> 8) & 255, (s >> 24) & 255


@triton.jit
def scales_of_words(first, second, FORMAT: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr):
    """[TN, BK * 2]: what belongs to each word of codes."""
    both = tl.join(first, second)
    if FORMAT == MXFP4:
        both = both[:, :, :, None, :, None]
    else:
        both = both[:, :, :, None, :, :]
    return tl.reshape(tl.broadcast_to(both, (TN, BK // 64, 8, 4, 2, 2)), (TN, BK * 2))


@triton.jit
def _scale_pair(byte, FORMAT: tl.constexpr):
    """Two bfloat16 of a scale's byte in a word."""
    if FORMAT == MXFP4:
        bits = byte * 0x00800080
        found = tl.where((byte + 1) & 254 == 0, bits | 0x00400040, bits)  # 0: 2^-127 is subnormal; 255: NaN
    else:
        bits = ((byte & 127) << 4) | ((byte & 128) << 8)
        bits = tl.where(byte & 127 == 127, 0x7FC0, bits)
        found = _times_2_to_120(bits | (bits << 16))
    return found


@triton.jit
def _times_2_to_120(pair):
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
def _decode_eight_e2m1(word, low, high):
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
def _decode_one_e2m1(
    words, s, SHIFT: tl.constexpr, X_TYPE: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr
):
    value = round_to(decode_e2m1((words >> SHIFT) & 15) * s, X_TYPE, INTERPRETED)
    return to_float32(value, INTERPRETED).to(DTYPE)


@triton.jit
def decode_e2m1_tile(
    words, scales, factor, FORMAT: tl.constexpr, X_TYPE: tl.constexpr, DTYPE: tl.constexpr, TN: tl.constexpr,
    BK: tl.constexpr, PERMUTED: tl.constexpr, ASM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[16 TN, BK] of DTYPE: codes times scales, rounded to X_TYPE; times `factor`, an fp32 number, before the rounding.

    ASM: X_TYPE is bfloat16, and `factor` 1.
    """
    low0, low1, high0, high1 = split_scale_bytes(scales, FORMAT, TN, BK)
    if ASM:
        low = scales_of_words(_scale_pair(low0, FORMAT), _scale_pair(low1, FORMAT), FORMAT, TN, BK)
        high = scales_of_words(_scale_pair(high0, FORMAT), _scale_pair(high1, FORMAT), FORMAT, TN, BK)
        v0, v1, v2, v3, v4, v5, v6, v7 = _decode_eight_e2m1(words, low, high)
    else:
        low = (
            scales_of_words(decode_block_scale(low0, FORMAT), decode_block_scale(low1, FORMAT), FORMAT, TN, BK) * factor
        )
        high = (
            scales_of_words(decode_block_scale(high0, FORMAT), decode_block_scale(high1, FORMAT), FORMAT, TN, BK)
            * factor
        )
        words = restore_e2m1_bits(words)
        v0 = _decode_one_e2m1(words, low, 0, X_TYPE, DTYPE, INTERPRETED)
        v1 = _decode_one_e2m1(words, low, 16, X_TYPE, DTYPE, INTERPRETED)
        v2 = _decode_one_e2m1(words, high, 4, X_TYPE, DTYPE, INTERPRETED)
        v3 = _decode_one_e2m1(words, high, 20, X_TYPE, DTYPE, INTERPRETED)
        v4 = _decode_one_e2m1(words, low, 8, X_TYPE, DTYPE, INTERPRETED)
        v5 = _decode_one_e2m1(words, low, 24, X_TYPE, DTYPE, INTERPRETED)
        v6 = _decode_one_e2m1(words, high, 12, X_TYPE, DTYPE, INTERPRETED)
        v7 = _decode_one_e2m1(words, high, 28, X_TYPE, DTYPE, INTERPRETED)
    return to_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN, BK, PERMUTED)
