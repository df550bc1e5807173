"""Tiles of packed codes in registers: read from and written to both layouts, and what a code stands for.

Canonical 4-bit codes are bytes [N, K / 2] of two neighbors along K; nf4 is the same with the nibbles swapped. The
layout `triton_w4` holds the fragments of a matrix instruction, so that a product needs no exchange between threads:

    tiles of 16 rows x 64 columns, [N / 16, K / 64], each 128 words of 32 bits, word 16 r8 + 4 c4 + ks;
    the word holds row r8 + 8 rh, column 16 ks + 8 kh + 2 c4 + p in its nibble 4 p + 2 kh + rh  (rh, kh, p in 0, 1).

`(word >> 4 i) & 0x000f000f` is then a pair of neighbors along K, as two 16-bit halves.

Words of 4-bit floats are bent: in each half, sign and magnitude of the four codes stand where one shift brings them to
the sign and the lowest exponents of bfloat16, `(word << 3 i) & 0x81c081c0` for the first three; the last has the bits
that are left, its sign at 14 and its magnitude at 13, 11, 10.

Legend: N rows · K columns of the weight · R x C a tile of it, both powers of two.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton

# What a stored code is.
INT4: Final = tl.constexpr(0)
INT8: Final = tl.constexpr(1)
FLOAT8: Final = tl.constexpr(2)
NF4: Final = tl.constexpr(3)
FP4: Final = tl.constexpr(4)
# Formats of blocks, and what products tell apart beside them.
MXFP4: Final = tl.constexpr(0)
MXFP8: Final = tl.constexpr(1)
NVFP4: Final = tl.constexpr(2)
Q4_K: Final = tl.constexpr(3)
Q5_K: Final = tl.constexpr(4)
Q6_K: Final = tl.constexpr(5)
DENSE: Final = tl.constexpr(6)  # 16- or 32-bit floats as they are
W4_INT4: Final = tl.constexpr(7)  # int4 in the layout `triton_w4`


@triton.jit
def to_float32(x, INTERPRETED: tl.constexpr):
    """fp32 of a 16- or 32-bit float; Triton's interpreter loses subnormal bfloat16 numbers."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 rounded to a type, ties to even; Triton's interpreter would cut bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, up, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def pack_words(
    bytes_,  # [R, C / 2] uint8 as int32, the even column in the low nibble
    R: tl.constexpr,  # a multiple of 16
    C: tl.constexpr,  # a multiple of 64
):
    """[R / 16, C / 64 * 128] int32: the words of a tile."""
    x = tl.reshape(bytes_, (R // 16, 2, 8, C // 64, 4, 2, 4))  # tn rh r8 tk ks kh c4
    x = tl.permute(x, (0, 3, 2, 6, 4, 5, 1))  # tn tk r8 c4 ks kh rh
    x = tl.reshape(x, (R // 16, C * 2, 4))
    at = 4 * tl.arange(0, 4)[None, None, :]
    return tl.sum(((x & 15) << at) | ((x >> 4) << (16 + at)), axis=2)


@triton.jit
def words_of_rows(
    words,  # [R, C / 8] int32: eight neighbors, the first in the lowest nibble
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[R / 16, C / 64 * 128] int32: the words of a tile. Of four words, nibbles, then bytes, change places."""
    x = tl.reshape(words, (R // 16, 2, 8, C // 64, 4, 2))  # tn rh r8 tk ks kh
    upper, lower = tl.split(tl.permute(x, (0, 3, 2, 4, 5, 1)))  # [tn tk r8 ks kh] of rh 0 and 1
    even = (upper & 0x0F0F0F0F) | ((lower << 4) & -252645136)
    odd = ((upper >> 4) & 0x0F0F0F0F) | (lower & -252645136)
    e0, e1 = tl.split(even)
    o0, o1 = tl.split(odd)
    e02 = (e0 & 0x00FF00FF) | ((e1 << 8) & -16711936)
    e13 = ((e0 >> 8) & 0x00FF00FF) | (e1 & -16711936)
    o02 = (o0 & 0x00FF00FF) | ((o1 << 8) & -16711936)
    o13 = ((o0 >> 8) & 0x00FF00FF) | (o1 & -16711936)
    w0, w2 = (e02 & 0xFFFF) | (o02 << 16), ((e02 >> 16) & 0xFFFF) | (o02 & -65536)
    w1, w3 = (e13 & 0xFFFF) | (o13 << 16), ((e13 >> 16) & 0xFFFF) | (o13 & -65536)
    y = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (R // 16, C // 64, 8, 4, 4))  # tn tk r8 ks c4
    return tl.reshape(tl.permute(y, (0, 1, 2, 4, 3)), (R // 16, C * 2))


@triton.jit
def unpack_words(
    words,  # [R / 16, C / 64 * 128] int32
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[R, C / 2] int32 bytes: inverse of `pack_words`."""
    at = 4 * tl.arange(0, 4)[None, None, :]
    x = ((words[:, :, None] >> at) & 15) | (((words[:, :, None] >> (16 + at)) & 15) << 4)
    x = tl.reshape(x, (R // 16, C // 64, 8, 4, 4, 2, 2))  # tn tk r8 c4 ks kh rh
    x = tl.permute(x, (0, 6, 2, 1, 4, 5, 3))  # tn rh r8 tk ks kh c4
    return tl.reshape(x, (R, C // 2))


@triton.jit
def permute_e2m1_bits(words):
    """Words of 4-bit floats from words of codes."""
    found = ((words << 6) & 0x01C001C0) | ((words << 12) & -2147450880) | ((words >> 1) & 0x60386038)
    return found | ((words << 5) & 0x10001000) | ((words >> 8) & 0x00070007) | ((words >> 2) & 0x0E000E00)


@triton.jit
def restore_e2m1_bits(words):
    """Inverse of `permute_e2m1_bits`."""
    found = ((words >> 6) & 0x00070007) | ((words >> 12) & 0x00080008) | ((words << 1) & -1066352528)
    return found | ((words >> 5) & 0x00800080) | ((words << 8) & 0x07000700) | ((words << 2) & 0x38003800)


@triton.jit
def swap_nibbles(bytes_):
    """Nibbles of a byte exchanged."""
    return ((bytes_ & 15) << 4) | (bytes_ >> 4)


@triton.jit
def _word_offsets(row, column, K, R: tl.constexpr, C: tl.constexpr):
    first = (row // 16).to(tl.int64) * (K * 2) + column * 2
    return first + (tl.arange(0, R // 16)[:, None] * (K * 2) + tl.arange(0, C * 2)[None, :])


@triton.jit
def load_bytes(
    codes, row, column, N, K, row_bytes, TILED: tl.constexpr, HIGH_FIRST: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """[R, C / 2] int32: bytes of two codes, the even column in the low nibble; 0 outside of the weight.

    TILED: 1 for words of integers, 2 for those of floats.
    """
    if TILED:
        tiles = row // 16 + tl.arange(0, R // 16)[:, None] < N // 16
        inside = tiles & (column + tl.arange(0, C * 2)[None, :] // 128 * 64 < K)
        words = tl.load(codes + _word_offsets(row, column, K, R, C), mask=inside, other=0)
        return unpack_words(restore_e2m1_bits(words) if TILED == 2 else words, R, C)
    n = row + tl.arange(0, R)
    b = column // 2 + tl.arange(0, C // 2)
    inside = (n < N)[:, None] & (b < (K + 1) // 2)[None, :]
    found = tl.load(codes + n.to(tl.int64)[:, None] * row_bytes + b[None, :], mask=inside, other=0).to(tl.int32)
    if HIGH_FIRST:
        found = swap_nibbles(found)
    return found


@triton.jit
def store_bytes(
    codes, bytes_, row, column, N, K, row_bytes, TILED: tl.constexpr, HIGH_FIRST: tl.constexpr, WHOLE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Inverse of `load_bytes`. WHOLE: the tile lies in the weight."""
    if TILED:
        store_tiles(codes, pack_words(bytes_, R, C), row, column, N, K, TILED, WHOLE, R, C)
    else:
        n, b = tl.arange(0, R)[:, None], tl.arange(0, C // 2)[None, :]
        inside = (row + n < N) & (column // 2 + b < (K + 1) // 2)
        at = codes + row.to(tl.int64) * row_bytes + column // 2 + (n * row_bytes + b)
        found = (swap_nibbles(bytes_) if HIGH_FIRST else bytes_).to(tl.uint8)
        if WHOLE:
            tl.store(at, found)
        else:
            tl.store(at, found, mask=inside)


@triton.jit
def store_tiles(
    codes, words, row, column, N, K, TILED: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Words of tiles, [R / 16, C / 64 * 128]."""
    if TILED == 2:
        words = permute_e2m1_bits(words)
    at = codes + _word_offsets(row, column, K, R, C)
    if WHOLE:
        tl.store(at, words)
    else:
        tiles = row // 16 + tl.arange(0, R // 16)[:, None] < N // 16
        tl.store(at, words, mask=tiles & (column + tl.arange(0, C * 2)[None, :] // 128 * 64 < K))


@triton.jit
def unpack_nibbles(bytes_, R: tl.constexpr, C: tl.constexpr):
    """[R, C] int32 codes of [R, C / 2] bytes."""
    return tl.reshape(tl.join(bytes_ & 15, bytes_ >> 4), (R, C))


@triton.jit
def with_sign(value, code, SIGN: tl.constexpr):
    """fp32 magnitudes with the sign bit of int32 codes; -0 too, which triton 3.6 loses: it negates by 0 - x."""
    return (value.to(tl.int32, bitcast=True) | tl.where(code & SIGN != 0, -2147483648, 0)).to(tl.float32, bitcast=True)


@triton.jit
def decode_float8(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr):
    """fp32 of the byte of an 8-bit float, given as int32; exact, subnormal numbers, inf and NaN included.

    The bits of the magnitude, moved to where fp32 has them, are the value times 2^(BIAS - 127), subnormal or not.
    """
    bits = ((code << 24) >> (MANTISSA + 1)) & (-2147483648 | (127 << (23 - MANTISSA)))
    value = bits.to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    if FNUZ:  # neither -0 nor inf; the byte of -0 is NaN
        value = tl.where(code & 255 == 128, float("nan"), value)
    elif MANTISSA == 3:
        value = tl.where(code & 127 == 127, float("nan"), value)
    else:
        infinite = (bits & -2147483648 | 0x7F800000).to(tl.float32, bitcast=True)
        value = tl.where(code & 127 > 124, float("nan"), tl.where(code & 127 == 124, infinite, value))
    return value


@triton.jit
def encode_magnitude(size, MANTISSA: tl.constexpr, BIAS: tl.constexpr, AWAY: tl.constexpr):
    """int32 code, without a sign, of the small float nearest to `size`, which is not beyond the largest.

    Adding a number whose last bit is a step of the code lets the addition round, ties to even. The number counts the
    steps of the binades below too, so the last bits of the sum are the code. AWAY: a tie takes the larger magnitude.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    binade = tl.maximum(size.to(tl.int32, bitcast=True), (128 - BIAS) << 23) & 0x7F800000  # subnormal: of the smallest
    magic = binade + (binade >> SHIFT) + ((SHIFT << 23) - ((128 - BIAS) << MANTISSA))
    wide = magic.to(tl.float32, bitcast=True)
    total = size + wide
    found = total.to(tl.int32, bitcast=True) & (7 if MANTISSA == 1 else 127)
    if AWAY:
        half = (binade - ((MANTISSA + 1) << 23)).to(tl.float32, bitcast=True)
        found += (size - (total - wide) >= half).to(tl.int32)
    return found


@triton.jit
def encode_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr, LARGEST: tl.constexpr):
    """int32 byte of the nearest 8-bit float, ties to even, saturating; x is no NaN."""
    found = encode_magnitude(tl.minimum(tl.abs(x), LARGEST), MANTISSA, BIAS, False)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    if FNUZ:
        sign = tl.where(found == 0, 0, sign)
    return found | sign


@triton.jit
def decode_e2m1(code):
    """fp32 of codes 0..15, given as int32."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * (2.0**126)
    return with_sign(value, code, 8)


@triton.jit
def decode_e8m0(byte):
    """fp32 2^(E - 127) of e8m0 bytes, given as int32; NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_block_scale(byte, FORMAT: tl.constexpr):
    """fp32 of a scale's byte; nvfp4's without the factor of all."""
    if FORMAT == MXFP4:
        return decode_e8m0(byte)
    return decode_float8(byte, 3, 7, False)
