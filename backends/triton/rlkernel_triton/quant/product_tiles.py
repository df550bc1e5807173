"""Tiles of codes as operands of a matrix instruction, and what follows a product.

4-bit codes become 16-bit floats by bits: 0x4300 | q is the bfloat16 128 + q, 0x6400 | q the float16 1024 + q, and one
fused subtraction gives q - 8, exactly. Other targets, and Triton's interpreter, take shifts and casts.

Legend: M tokens · N rows · K columns of the weight · BN x BM tile of the transposed result · BK columns a step.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import tanh
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import narrowed, widened


@triton.jit
def eight_bfloat16(word, offset):
    """Eight bfloat16 of the nibbles of a word, less an offset given as two bfloat16 with their signs turned."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 t, a0, a1, a2, a3, one;
        mov.b32 one, 0x3f803f80;
        lop3.b32 a0, $8, 0x000f000f, 0x43004300, 0xea;
        shr.u32 t, $8, 4;
        lop3.b32 a1, t, 0x000f000f, 0x43004300, 0xea;
        shr.u32 t, $8, 8;
        lop3.b32 a2, t, 0x000f000f, 0x43004300, 0xea;
        shr.u32 t, $8, 12;
        lop3.b32 a3, t, 0x000f000f, 0x43004300, 0xea;
        fma.rn.bf16x2 a0, a0, one, $9;
        fma.rn.bf16x2 a1, a1, one, $9;
        fma.rn.bf16x2 a2, a2, one, $9;
        fma.rn.bf16x2 a3, a3, one, $9;
        mov.b32 {$0,$1}, a0;
        mov.b32 {$2,$3}, a1;
        mov.b32 {$4,$5}, a2;
        mov.b32 {$6,$7}, a3;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        args=[word, offset],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def eight_float16(word, offset):
    """As `eight_bfloat16`."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 t, a0, a1, a2, a3, one;
        mov.b32 one, 0x3c003c00;
        lop3.b32 a0, $8, 0x000f000f, 0x64006400, 0xea;
        shr.u32 t, $8, 4;
        lop3.b32 a1, t, 0x000f000f, 0x64006400, 0xea;
        shr.u32 t, $8, 8;
        lop3.b32 a2, t, 0x000f000f, 0x64006400, 0xea;
        shr.u32 t, $8, 12;
        lop3.b32 a3, t, 0x000f000f, 0x64006400, 0xea;
        fma.rn.f16x2 a0, a0, one, $9;
        fma.rn.f16x2 a1, a1, one, $9;
        fma.rn.f16x2 a2, a2, one, $9;
        fma.rn.f16x2 a3, a3, one, $9;
        mov.b32 {$0,$1}, a0;
        mov.b32 {$2,$3}, a1;
        mov.b32 {$4,$5}, a2;
        mov.b32 {$6,$7}, a3;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        args=[word, offset],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def eight_of_table(word, l0, l1, l2, l3, h0, h1, h2, h3):
    """Eight 16-bit floats of a table by the nibbles of a word, in the order of `eight_bfloat16`.

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
def table_bytes(table, FIRST: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """int32: the low or high bytes of entries FIRST .. FIRST + 3 of a table, rounded to a 16-bit DTYPE."""
    found = 0
    for i in tl.static_range(4):
        bits = tl.load(table + FIRST + i).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        found |= ((bits >> (8 if HIGH else 0)) & 255) << (8 * i)
    return found


@triton.jit
def table_tile(
    words, table, bytes_, DTYPE: tl.constexpr, X_TYPE: tl.constexpr, TN: tl.constexpr, BK: tl.constexpr,
    PERMUTED: tl.constexpr, ASM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[16 TN, BK] of DTYPE: entries of a table, rounded to X_TYPE; `bytes_` as `eight_of_table` takes them."""
    if ASM:
        l0, l1, l2, l3, h0, h1, h2, h3 = bytes_
        v0, v1, v2, v3, v4, v5, v6, v7 = eight_of_table(words, l0, l1, l2, l3, h0, h1, h2, h3)
        v0, v1 = v0.to(DTYPE, bitcast=True), v1.to(DTYPE, bitcast=True)
        v2, v3 = v2.to(DTYPE, bitcast=True), v3.to(DTYPE, bitcast=True)
        v4, v5 = v4.to(DTYPE, bitcast=True), v5.to(DTYPE, bitcast=True)
        v6, v7 = v6.to(DTYPE, bitcast=True), v7.to(DTYPE, bitcast=True)
    else:
        v0, v1 = (
            _entry(words, 0, table, DTYPE, X_TYPE, INTERPRETED),
            _entry(words, 16, table, DTYPE, X_TYPE, INTERPRETED),
        )
        v2, v3 = (
            _entry(words, 4, table, DTYPE, X_TYPE, INTERPRETED),
            _entry(words, 20, table, DTYPE, X_TYPE, INTERPRETED),
        )
        v4, v5 = (
            _entry(words, 8, table, DTYPE, X_TYPE, INTERPRETED),
            _entry(words, 24, table, DTYPE, X_TYPE, INTERPRETED),
        )
        v6, v7 = (
            _entry(words, 12, table, DTYPE, X_TYPE, INTERPRETED),
            _entry(words, 28, table, DTYPE, X_TYPE, INTERPRETED),
        )
    return as_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN, BK, PERMUTED)


@triton.jit
def _entry(words, SHIFT: tl.constexpr, table, DTYPE: tl.constexpr, X_TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    found = narrowed(tl.load(table + ((words >> SHIFT) & 15)), X_TYPE, INTERPRETED)
    return widened(found, INTERPRETED).to(DTYPE)


@triton.jit
def word_indices(BK: tl.constexpr):
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
def permuted(BK: tl.constexpr, PERMUTED: tl.constexpr):
    """[BK]: the column of the weight that a product takes at each place.

    `mma.sync` wants four neighbours along K in a thread where a word holds two; any order along K gives the same sum,
    so the other operand is permuted instead.
    """
    i = tl.arange(0, BK)
    if PERMUTED:  # i = 32 ch + 16 kh + 4 c4 + 2 ii + p
        return i // 32 * 32 + i // 2 % 2 * 16 + i // 16 % 2 * 8 + i // 4 % 4 * 2 + i % 2
    return i


@triton.jit
def word_tile(
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
        v0, v1, v2, v3, v4, v5, v6, v7 = eight_bfloat16(words, offset)
    elif ASM and DTYPE == tl.float16:
        offset = tl.full(words.shape, -469179384 if SYMMETRIC else -469703680, tl.int32)  # -1032 or -1024, twice
        v0, v1, v2, v3, v4, v5, v6, v7 = eight_float16(words, offset)
    else:
        v0, v1 = _value(words, 0, DTYPE, SYMMETRIC), _value(words, 16, DTYPE, SYMMETRIC)
        v2, v3 = _value(words, 4, DTYPE, SYMMETRIC), _value(words, 20, DTYPE, SYMMETRIC)
        v4, v5 = _value(words, 8, DTYPE, SYMMETRIC), _value(words, 24, DTYPE, SYMMETRIC)
        v6, v7 = _value(words, 12, DTYPE, SYMMETRIC), _value(words, 28, DTYPE, SYMMETRIC)
    return as_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN, BK, PERMUTED)


@triton.jit
def as_operand(v0, v1, v2, v3, v4, v5, v6, v7, TN: tl.constexpr, BK: tl.constexpr, PERMUTED: tl.constexpr):
    """[16 TN, BK] of the values of words [TN, BK * 2], in the order of `eight_bfloat16`."""
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
def _value(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr, SYMMETRIC: tl.constexpr):
    return (((words >> SHIFT) & 15) - (8 if SYMMETRIC else 0)).to(DTYPE)


@triton.jit
def ended(total, before, step, steps, PERMUTED: tl.constexpr = False):
    """A sum that the step has added to, where step < steps, which holds; no step after it begins before it is there.

    Triton lets the matrix instructions of Hopper run on into the next step, which decodes weights into registers that
    they may still read (seen with 3.6 on an H200: 128 x 128 tiles were wrong). What is selected from has to be there.
    PERMUTED: `mma.sync`, which runs on into nothing.
    """
    if not PERMUTED:
        total = tl.where(step < steps, total, before)
    return total


@triton.jit
def sigmoid(h):
    """1 / (1 + e^-h)."""
    return 1.0 / (1.0 + tl.exp(-h))


@triton.jit
def activated(h, ACTIVATION: tl.constexpr):
    """An activation of `rlkernel_core.spec.qmatmul.ACTIVATIONS`, of fp32; a pair's is that of its gate."""
    if ACTIVATION == "relu":
        return tl.where(h > 0, h, tl.where(h == h, 0.0, h))
    if ACTIVATION == "silu" or ACTIVATION == "swiglu":
        return h * sigmoid(h)
    if ACTIVATION == "gelu":
        return 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh" or ACTIVATION == "geglu_tanh":
        return 0.5 * h * (1.0 + tanh(0.7978845608028654 * (h + 0.044715 * h * h * h)))
    return h
