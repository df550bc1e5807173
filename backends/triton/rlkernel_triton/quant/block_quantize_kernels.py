"""Quantizing to the formats of blocks: MX, NVFP4 and the k-quants of GGUF, in any layout.

The arithmetic is that of `rlkernel_core.quant.mx`, `.nvfp4` and `.kquants`, operation by operation. A scale of MX comes
from the bits of the largest |w|, and dividing by a power of two is a product with its inverse, exactly. NVFP4's scale
of all is known only when every weight has been read, so it takes two passes, the second one in the opposite order: what
was read last is in the cache still. A k-quant takes the extremes of a sub-block for its scale and searches for none, so
every step has one right result.

Bytes: the weight once (nvfp4: twice), codes and scales out.

Legend: N rows · K columns · R x C tile of a program · G blocks of a tile's row, of GROUP columns each · B sub-blocks of
a tile, S of which make a super-block.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import decode_float8, encode_float8, encode_magnitude, round_to, to_float32
from rlkernel_triton.quant.quantize_kernels import (
    abs_bits,
    divide,
    group_extremes,
    integer_bits,
    load_groups,
    load_weights,
    pack_codes,
    rint,
    signed_absmax,
    store_words,
    to_row_order,
)


@triton.jit
def mx_scale(
    bits,  # of the largest |w| of a block
    RULE: tl.constexpr,  # 0: floor; 1: rceil; 2: even
    MANTISSA: tl.constexpr,
    TOP: tl.constexpr,  # exponent of the element's largest value
    FRACTION: tl.constexpr,  # bits of its fraction in fp32
):
    """int32 scale bytes E; 255 where a block is not finite."""
    if RULE == 1:
        exponent = (bits >> 23) + ((bits & 0x007FFFFF) > FRACTION).to(tl.int32)
    elif RULE == 2:
        exponent = (bits + (1 << (22 - MANTISSA))) >> 23
    else:
        exponent = bits >> 23
    return tl.where(bits < 0x7F800000, tl.minimum(tl.maximum(exponent - TOP, 0), 254), 255)


@triton.jit
def store_scales(
    scale, found, row, column, N, K, GROUP: tl.constexpr, TILED: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Bytes [R * G] of the blocks of a tile; in the layout `triton_e2m1` those of rows r and r + 8 are neighbors."""
    G: tl.constexpr = C // GROUP
    n, b = row + tl.arange(0, R * G) // G, column // GROUP + tl.arange(0, R * G) % G
    if TILED:
        B: tl.constexpr = 64 // GROUP
        tile = (n // 16).to(tl.int64) * (K // 64) + b // B
        at = ((tile * 8 + n % 8) * B + b % B) * 2 + n % 16 // 8
    else:
        at = n.to(tl.int64) * tl.cdiv(K, GROUP) + b
    tl.store(scale + at, found.to(tl.uint8), mask=(n < N) & (b < tl.cdiv(K, GROUP)))


@triton.jit
def quantize_mx_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    codes,  # out: [N, K] bytes, [N, K / 2] if FOUR, or words of `triton_e2m1` if TILED
    scale,  # [N, K / GROUP] e8m0 bytes out, in the order of tiles if TILED
    N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FOUR: tl.constexpr, TILED: tl.constexpr,
    RULE: tl.constexpr,  # 0: floor, 1: rceil, 2: even
    AWAY: tl.constexpr,  # a tie takes the larger magnitude
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    TOP: tl.constexpr,  # exponent of the element's largest value
    FRACTION: tl.constexpr,  # bits of its fraction in fp32
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """mxfp4 (FOUR bits) and mxfp8. Grid: row tiles x column tiles."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    x = load_groups(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    _, _, bits = group_extremes(x, True, INTERPRETED)
    e = mx_scale(bits, RULE, MANTISSA, TOP, FRACTION)
    store_scales(scale, e, row, column, N, K, GROUP, TILED, R, C)
    inverse = tl.where(e > 253, 0x00400000, (254 - e) << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    # A block that is not finite has codes of 0: what is no larger than 0 has no magnitude, and the sign is left out.
    most = tl.where(e == 255, 0.0, LARGEST)
    sign = tl.where(e == 255, 0, 8 if FOUR else 128)
    size = tl.minimum(tl.abs(x) * inverse[:, None, None], most[:, None, None])
    found = encode_magnitude(size, MANTISSA, BIAS, AWAY)
    found |= (x.to(tl.int32, bitcast=True) >> (28 if FOUR else 24)) & sign[:, None, None]
    store_float_codes(codes, found, row, column, N, K, GROUP, FOUR, TILED, WHOLE, R, C)


@triton.jit
def store_float_codes(
    codes, found, row, column, N, K, GROUP: tl.constexpr, FOUR: tl.constexpr, TILED: tl.constexpr,
    WHOLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Codes of 4 or 8 bits, [B, RUN, 4] as `load_groups` has them."""
    BITS: tl.constexpr = 4 if FOUR else 8
    if not WHOLE:  # the second half of an odd row's last byte
        G: tl.constexpr = C // GROUP
        RUN: tl.constexpr = found.shape[1]
        k = tl.arange(0, RUN)[None, :, None] + tl.arange(0, GROUP // RUN)[None, None, :] * RUN
        k += (tl.arange(0, R * G) % G * GROUP)[:, None, None]
        found = tl.where(column + k < K, found, 0)
    words = to_row_order(pack_codes(found, BITS, False, False), R, C * BITS // 32)
    row_bytes = K // 2 if WHOLE else (K + 1) // 2
    store_words(codes, words, row, column, N, K, row_bytes, BITS, 2 if TILED else 0, WHOLE, R, C)


@triton.jit
def absmax_finite_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    most,  # [1] int32, 0 before: the largest bits, out; [N] if TOKENS
    N, K,
    GROUP: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    TOKENS: tl.constexpr,  # rows are tokens, each on its own
):  # fmt: skip
    """The largest bits of |w| of all blocks that are finite, into `most` [1], which holds 0. Grid: row tiles."""
    row = tl.program_id(0) * R
    found = tl.zeros((R * (C // GROUP),), tl.int32)
    for column in range(0, K, C):
        x = load_weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
        bits = tl.max(abs_bits(tl.reshape(x, (R * (C // GROUP), GROUP))), axis=1)
        found = tl.maximum(found, tl.where(bits < 0x7F800000, bits, 0))
    if TOKENS:
        n = row + tl.arange(0, R)
        tl.store(most + n, tl.max(tl.reshape(found, (R, C // GROUP)), axis=1), mask=n < N)
    else:
        tl.atomic_max(most, tl.max(found, axis=0), sem="relaxed")


@triton.jit
def quantize_nvfp4_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    codes,  # out: [N, K / 2] bytes, or words of `triton_e2m1` if TILED
    scale,  # [N, K / GROUP] e4m3 bytes out, in the order of tiles if TILED
    global_scale,  # [1] fp32 out; [N] if TOKENS
    most,  # [1] or [N] int32: what `absmax_finite_kernel` found
    N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, TILED: tl.constexpr, AWAY: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """nvfp4. `most` holds what `absmax_finite_kernel` found. Grid: row tiles x column tiles, the last ones first."""
    column_tiles = tl.cdiv(K, C)
    # The tile that `absmax_finite_kernel` read last comes first: it is in L2 still.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = program // column_tiles * R
    column = program % column_tiles * C
    BLOCKS: tl.constexpr = R * (C // GROUP)
    x = load_groups(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    _, _, bits = group_extremes(x, True, INTERPRETED)
    if TOKENS:
        n = row + tl.arange(0, BLOCKS) // (C // GROUP)
        top = tl.load(most + n, mask=n < N, other=0).to(tl.float32, bitcast=True)
        factor = _divide_by(top, 2688.0)
        tl.store(global_scale + n, factor, mask=tl.where(column == 0, n, N) < N)
    else:
        one = tl.arange(0, 1)
        top = tl.load(most + one).to(tl.float32, bitcast=True)
        factor = tl.div_rn(top, tl.full((1,), 2688.0, tl.float32))
        if program == 0:
            tl.store(global_scale + one, factor)
    whole = factor * 6.0
    factor += tl.zeros((BLOCKS,), tl.float32)
    finite = bits < 0x7F800000
    ratio = divide(
        tl.where(finite, bits, 0).to(tl.float32, bitcast=True), tl.where(whole > 0, whole, float("inf")), INTERPRETED
    )
    ratio = tl.where(whole > 0, ratio, 0.0)
    byte = tl.where(finite, encode_float8(ratio, 3, 7, False, 448.0), 127)
    store_scales(scale, byte, row, column, N, K, GROUP, TILED, R, C)
    divisor = decode_float8(byte, 3, 7, False) * factor
    usable = finite & (divisor > 0)
    # What is divided by inf has no magnitude, but its sign where it is a number.
    size = divide(x, tl.where(usable, divisor, float("inf"))[:, None, None], INTERPRETED)
    sign = (tl.where(size == size, size, 0.0).to(tl.int32, bitcast=True) >> 28) & 8
    most = tl.where(usable, 6.0, 0.0)
    found = encode_magnitude(tl.minimum(tl.abs(size), most[:, None, None]), 1, 1, AWAY) | sign
    store_float_codes(codes, found, row, column, N, K, GROUP, True, TILED, WHOLE, R, C)


@triton.jit
def _divide_by(x, number):
    return tl.div_rn(x, number + tl.zeros_like(x))


@triton.jit
def _spread_super_blocks(per_super, B: tl.constexpr):
    """[B] of [B / S]: the entry of every sub-block's super-block."""
    S: tl.constexpr = B // per_super.shape[0]
    return tl.reshape(tl.broadcast_to(per_super[:, None], (per_super.shape[0], S)), (B,))


@triton.jit
def _fp16_unit(most, LARGEST: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 of the fp16 unit that integers are multiples of; what is not finite is NaN."""
    unit = to_float32(round_to(_divide_by(most, LARGEST), tl.float16, INTERPRETED), INTERPRETED)
    return tl.where(abs_bits(unit) < 0x7F800000, unit, float("nan"))


@triton.jit
def _integer_multiple(exact, unit, LEAST: tl.constexpr, MOST: tl.constexpr):
    """rint(exact / unit) between two integers as fp32; 0 where the unit is 0 or NaN."""
    ratio = tl.div_rn(exact, tl.where(unit == 0, float("inf"), unit))
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    return tl.minimum(tl.maximum(rint(ratio), LEAST), MOST)


@triton.jit
def _largest_of_sub_blocks(per_sub, M: tl.constexpr, S: tl.constexpr):
    """[M] largest of S numbers that are no smaller than 0; NaN where there is one."""
    return tl.max(tl.reshape(abs_bits(per_sub), (M, S)), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def quantize_kquants_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    codes,  # [N, K / 2] uint8 out: the low four bits
    high,  # [N, K (BITS - 4) / 8] uint8 out: the others
    scale,  # [N, K / SUB] uint8, int8 if SIGNED, out
    least,  # [N, K / SUB] uint8 out, unless SIGNED
    d,  # [N, K / 256] fp16 out: unit of the scales
    dmin,  # [N, K / 256] fp16 out: unit of `least`, unless SIGNED
    N, K,
    SUB: tl.constexpr, BITS: tl.constexpr, SIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """q4_k, q5_k (SUB 32) and q6_k (SUB 16, SIGNED). Grid: row tiles x column tiles; C is a multiple of 256."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    S: tl.constexpr = 256 // SUB
    B: tl.constexpr = R * C // SUB
    TOP: tl.constexpr = (1 << BITS) - 1
    x = load_groups(w, row_stride, column_stride, row, column, N, K, SUB, WHOLE, INTERPRETED, R, C)
    low, top, bits = group_extremes(x, SIGNED, INTERPRETED)
    if SIGNED:
        step = _divide_by(signed_absmax(x, bits), -32.0)
        steps = tl.reshape(step, (B // S, S, 1))
        unit = _fp16_unit(signed_absmax(steps, tl.max(tl.max(abs_bits(steps), axis=2), axis=1)), -128.0, INTERPRETED)
        below = step
    else:
        below = 0.0 - low
        step = _divide_by(top + below, TOP + 0.0)
        step = tl.where(bits > 0x7F800000, float("nan"), step)
        unit = _fp16_unit(_largest_of_sub_blocks(step, B // S, S), 63.0, INTERPRETED)
        lower = _fp16_unit(_largest_of_sub_blocks(below, B // S, S), 63.0, INTERPRETED)
        unit, lower = tl.where(lower == lower, unit, lower), tl.where(unit == unit, lower, unit)
    # What belongs to a super-block, then to a sub-block.
    s = tl.arange(0, B // S)
    n, block = (row + s // (C // 256)).to(tl.int64), column // 256 + s % (C // 256)
    inside = (n < N) & (block < tl.cdiv(K, 256))
    at = n * tl.cdiv(K, 256) + block
    tl.store(d + at, round_to(unit, tl.float16, INTERPRETED), mask=inside)
    if not SIGNED:
        tl.store(dmin + at, round_to(lower, tl.float16, INTERPRETED), mask=inside)
    unit = _spread_super_blocks(unit, B)
    many = _integer_multiple(step, unit, -128.0 if SIGNED else 0.0, 127.0 if SIGNED else 63.0)
    b = tl.arange(0, B)
    G: tl.constexpr = C // SUB
    n, block = (row + b // G).to(tl.int64), column // SUB + b % G
    inside = (n < N) & (block < tl.cdiv(K, SUB))
    at = n * tl.cdiv(K, SUB) + block
    tl.store(scale + at, many.to(tl.int32).to(scale.dtype.element_ty), mask=inside)
    divisor = unit * many
    divisor = tl.where((divisor == 0) | (divisor != divisor), float("inf"), divisor)
    if not SIGNED:
        lower = _spread_super_blocks(lower, B)
        many = _integer_multiple(below, lower, 0.0, 63.0)
        tl.store(least + at, many.to(tl.int32).to(tl.uint8), mask=inside)
        x += (lower * many)[:, None, None]
    ratio = divide(x, divisor[:, None, None], INTERPRETED)
    ZERO: tl.constexpr = 32 if SIGNED else 0
    found = integer_bits(ratio, 0.0 - ZERO, TOP - 0.0 - ZERO, ZERO)
    found = tl.where(divisor[:, None, None] < float("inf"), found & TOP, ZERO)
    RUN: tl.constexpr = found.shape[1]
    k = tl.arange(0, RUN)[None, :, None] + tl.arange(0, SUB // RUN)[None, None, :] * RUN
    if not WHOLE:
        found = tl.where(block[:, None, None] * SUB + k < K, found, 0)
    words = to_row_order(pack_codes(found & 15, 4, False, False), R, C // 8)
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
