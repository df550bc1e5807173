"""A weight rounded to a format and back in one launch, and its clipped gradient: no code is stored.

The arithmetic is that of `quantize_kernels`, `block_quantize_kernels` and `dequantize_kernels`, operation by operation:
fp32, rounded to nearest even, none contracted (launch with `enable_fp_fusion=False`). A group stays in registers from
its scale to its values. BACKWARD: what is written is the upstream gradient, or 0 where the weight is beyond the values
of its group's codes, whose scale is found again.

Bytes: the weight once, twice in `nvfp4`; the result out. BACKWARD reads the gradient besides.

Legend: N rows · K columns · R x C tile of a program · B groups of a tile, of GROUP columns each, in MANY runs of RUN.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.block_quantize_kernels import (
    _divide_by,
    _fp16_unit,
    _integer_multiple,
    _largest_of_sub_blocks,
    _spread_super_blocks,
    mx_scale,
)
from rlkernel_triton.quant.code_tiles import (
    FP4,
    NF4,
    decode_e8m0,
    round_to,
    to_float32,
)
from rlkernel_triton.quant.quantize_kernels import (
    EVEN,
    UP,
    abs_bits,
    divide,
    group_extremes,
    inverse_scale,
    load_groups,
    round_integers,
    scale_and_zero,
    signed_absmax,
)


@triton.jit
def whole_between(ratio, least, most):
    """rint(ratio) between two whole numbers, as fp32; 0 is +0."""
    return (tl.minimum(tl.maximum(ratio, least), most) + 12582912.0) - 12582912.0


@triton.jit
def nearest_float(x, most, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr, AWAY: tl.constexpr):
    """fp32 value of the small float nearest to x, cut at `most`: what `encode_magnitude` makes a code of, decoded.

    Rounds by adding and subtracting a number whose last bit is one step of the small float. Both products are with
    powers of two, so they are exact.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), most)
    binade = tl.maximum(size.to(tl.int32, bitcast=True), (128 - BIAS) << 23) & 0x7F800000  # subnormal: of the smallest
    binade = binade.to(tl.float32, bitcast=True)
    step = tl.full(binade.shape, 2.0**SHIFT, tl.float32)
    found = tl.fma(binade, 0.0 - step, tl.fma(binade, step, size))
    if AWAY:
        half = binade * (0.5 ** (MANTISSA + 1))
        found = tl.where(size - found >= half, found + 2.0 * half, found)
    bits = found.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    if FNUZ:  # no -0
        bits = tl.where(found == 0, 0, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest_value(x, cells):
    """fp32 entries of a table nearest to x in [-1, 1], a tie taking the lower, by cells of width 1/16.

    `cells` [192]: for each of 64 cells the middle of two entries that lies in it, inf where none does; then for each of
    128 cells the entry nearest to an x up to that middle. An x above the middle takes the entry of the next cell.
    """
    at = tl.reshape(tl.fma(x, 16.0 + tl.zeros_like(x), 12582928.0).to(tl.int32, bitcast=True) & 63, (x.numel,))
    own = tl.gather(tl.load(cells + tl.arange(0, 64)), at, 0)
    at += (tl.reshape(x, (x.numel,)) > own).to(tl.int32)
    return tl.reshape(tl.gather(tl.load(cells + 64 + tl.arange(0, 128)), at, 0), x.shape)


@triton.jit
def store_run(at, found, column, of_row, K, FIRST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Neighboring columns, FIRST after those at `at`, rounded once."""
    found = round_to(found, at.dtype.element_ty, INTERPRETED)
    if WHOLE:
        tl.store(at + FIRST, found)
    else:
        tl.store(at + FIRST, found, mask=of_row & (column + FIRST < K))


@triton.jit
def store_groups(
    out, found, row, column, N, K, GROUP: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Groups [B, RUN, MANY] of a tile into [N, K]: the inverse of `load_groups`, whose threads keep what they have."""
    G: tl.constexpr = C // GROUP
    RUN: tl.constexpr = found.shape[1]
    g = tl.arange(0, R * G)[:, None]
    k = g % G * GROUP + tl.arange(0, RUN)[None, :]
    zero = tl.zeros((1, 1), tl.int64)
    at = out + ((zero + row) * K + column) + ((g // G).to(tl.int64) * K + k)
    k, of_row = column + k, row + g // G < N
    if found.shape[2] == 2:
        x0, x1 = tl.split(found)
        store_run(at, x0, k, of_row, K, 0, WHOLE, INTERPRETED)
        store_run(at, x1, k, of_row, K, RUN, WHOLE, INTERPRETED)
    else:
        even, odd = tl.split(tl.reshape(found, (R * G, RUN, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        store_run(at, x0, k, of_row, K, 0, WHOLE, INTERPRETED)
        store_run(at, x1, k, of_row, K, RUN, WHOLE, INTERPRETED)
        store_run(at, x2, k, of_row, K, 2 * RUN, WHOLE, INTERPRETED)
        store_run(at, x3, k, of_row, K, 3 * RUN, WHOLE, INTERPRETED)


@triton.jit
def is_beyond(x, one, other):
    """Where x is outside the interval between two ends, in either order; nowhere if an end is NaN."""
    return (x < tl.minimum(one, other)) | (x > tl.maximum(one, other))


@triton.jit
def finish_groups(
    x, value, one, other, up, out, row, column, N, K, GROUP: tl.constexpr, BACKWARD: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store values of groups; or gradients, cut beyond the ends [B] of a group."""
    if BACKWARD:
        value = load_groups(up, K, 1, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
        value = tl.where(is_beyond(x, one[:, None, None], other[:, None, None]), 0.0, value)
    store_groups(out, value, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)


@triton.jit
def fake_groups_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    up,  # [N, K] upstream gradient, with BACKWARD
    out,  # [N, K] out
    cells,  # [192] fp32, see `nearest_value`; with NF4 and FP4
    largest,  # fp32: what the scale's rule divides by
    N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr,
    SCALE_TYPE: tl.constexpr,  # of the scale: 0 fp32, 1 bf16, 2 fp16
    SYMMETRIC: tl.constexpr, FLOAT_ZERO: tl.constexpr, ROUNDING: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,  # codes less the zero-point where symmetric
    BACKWARD: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Groups of GROUP columns of a row: integers, nf4 and fp4. Grid: row tiles x column tiles."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    x = load_groups(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    low, high, bits = group_extremes(x, SYMMETRIC, INTERPRETED)
    SCALE: tl.constexpr = tl.bfloat16 if SCALE_TYPE == 1 else tl.float16 if SCALE_TYPE == 2 else tl.float32
    if ROUNDING == EVEN:
        stored, divisor, z = scale_and_zero(
            low, high, bits, largest, SCALE, SYMMETRIC, False, INTERPRETED, FLOAT_ZERO
        )  # fmt: skip
        usable = divisor < float("inf")
        ratio = divide(x, divisor[:, None, None], INTERPRETED)
    else:
        stored, divisor = inverse_scale(x, bits, largest, SCALE, ROUNDING == UP, INTERPRETED)
        z = tl.zeros_like(low)
        usable = divisor != 0
        ratio = round_integers(x * divisor[:, None, None], ROUNDING)
    scale = to_float32(stored, INTERPRETED)
    if ELEMENT == NF4:
        number = nearest_value(ratio, cells)
    elif ELEMENT == FP4:
        ratio += 0.0  # no -0
        bits = nearest_value(tl.abs(ratio), cells).to(tl.int32, bitcast=True)
        number = (bits | (ratio.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    elif FLOAT_ZERO:
        number = whole_between(ratio + z[:, None, None], LEAST + 0.0, MOST + 0.0) - z[:, None, None]
    else:
        number = whole_between(ratio, LEAST - z[:, None, None], MOST - z[:, None, None])
    value = tl.where(usable[:, None, None], number, 0.0) * scale[:, None, None]
    finish_groups(
        x, value, (LEAST - z) * scale, (MOST - z) * scale, up, out, row, column, N, K, GROUP, BACKWARD, WHOLE,
        INTERPRETED, R, C,
    )  # fmt: skip


@triton.jit
def fake_mx_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    up, out, N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FOUR: tl.constexpr, RULE: tl.constexpr, AWAY: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    TOP: tl.constexpr,  # exponent of the element's largest value
    FRACTION: tl.constexpr,  # bits of its fraction in fp32
    LARGEST: tl.constexpr, BACKWARD: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """mxfp4 (FOUR bits) and mxfp8. Grid: row tiles x column tiles."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    x = load_groups(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    _, _, bits = group_extremes(x, True, INTERPRETED)
    e = mx_scale(bits, RULE, MANTISSA, TOP, FRACTION)
    inverse = tl.where(e > 253, 0x00400000, (254 - e) << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    scale = decode_e8m0(e)
    most = tl.where(e == 255, 0.0, LARGEST)[:, None, None]
    number = nearest_float(x * inverse[:, None, None], most, MANTISSA, BIAS, False, AWAY)
    end = LARGEST * scale
    finish_groups(
        x, number * scale[:, None, None], 0.0 - end, end, up, out, row, column, N, K, GROUP, BACKWARD, WHOLE,
        INTERPRETED, R, C,
    )  # fmt: skip


@triton.jit
def fake_nvfp4_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    up, out,
    most,  # [1] int32: what `absmax_finite_kernel` found
    N, K,
    GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, AWAY: tl.constexpr, BACKWARD: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """nvfp4. Grid: row tiles x column tiles, the last ones first: what was read last is in L2 still."""
    column_tiles = tl.cdiv(K, C)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = program // column_tiles * R
    column = program % column_tiles * C
    BLOCKS: tl.constexpr = R * (C // GROUP)
    x = load_groups(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    _, _, bits = group_extremes(x, True, INTERPRETED)
    top = tl.load(most + tl.arange(0, 1)).to(tl.float32, bitcast=True)
    factor = tl.div_rn(top, tl.full((1,), 2688.0, tl.float32))
    whole = factor * 6.0
    factor += tl.zeros((BLOCKS,), tl.float32)
    finite = bits < 0x7F800000
    ratio = divide(
        tl.where(finite, bits, 0).to(tl.float32, bitcast=True), tl.where(whole > 0, whole, float("inf")), INTERPRETED
    )
    ratio = tl.where(whole > 0, ratio, 0.0)
    scale = tl.where(finite, nearest_float(ratio, 448.0, 3, 7, False, False), float("nan")) * factor
    usable = finite & (scale > 0)
    size = divide(x, tl.where(usable, scale, float("inf"))[:, None, None], INTERPRETED)
    number = nearest_float(size, tl.where(usable, 6.0, 0.0)[:, None, None], 1, 1, False, AWAY)
    end = 6.0 * scale
    finish_groups(
        x, number * scale[:, None, None], 0.0 - end, end, up, out, row, column, N, K, GROUP, BACKWARD,
        WHOLE, INTERPRETED, R, C,
    )  # fmt: skip


@triton.jit
def fake_kquants_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    up, out, N, K,
    GROUP: tl.constexpr,  # columns of a sub-block
    BITS: tl.constexpr, SIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BACKWARD: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """q4_k, q5_k (GROUP 32) and q6_k (16, SIGNED). Grid: row tiles x column tiles; C is a multiple of 256."""
    column_tiles = tl.cdiv(K, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    S: tl.constexpr = 256 // GROUP
    B: tl.constexpr = R * C // GROUP
    TOP: tl.constexpr = (1 << BITS) - 1
    x = load_groups(w, row_stride, column_stride, row, column, N, K, GROUP, WHOLE, INTERPRETED, R, C)
    low, top, bits = group_extremes(x, SIGNED, INTERPRETED)
    if SIGNED:
        step = _divide_by(signed_absmax(x, bits), -32.0)
        steps = tl.reshape(step, (B // S, S, 1))
        unit = _fp16_unit(signed_absmax(steps, tl.max(tl.max(abs_bits(steps), axis=2), axis=1)), -128.0, INTERPRETED)
    else:
        below = 0.0 - low
        step = _divide_by(top + below, TOP + 0.0)
        step = tl.where(bits > 0x7F800000, float("nan"), step)
        unit = _fp16_unit(_largest_of_sub_blocks(step, B // S, S), 63.0, INTERPRETED)
        lower = _fp16_unit(_largest_of_sub_blocks(below, B // S, S), 63.0, INTERPRETED)
        unit, lower = tl.where(lower == lower, unit, lower), tl.where(unit == unit, lower, unit)
    unit = _spread_super_blocks(unit, B)
    scale = unit * _integer_multiple(step, unit, -128.0 if SIGNED else 0.0, 127.0 if SIGNED else 63.0)
    divisor = tl.where((scale == 0) | (scale != scale), float("inf"), scale)
    if SIGNED:
        shift = tl.zeros_like(scale)
        shifted = x
    else:
        lower = _spread_super_blocks(lower, B)
        shift = lower * _integer_multiple(below, lower, 0.0, 63.0)
        shifted = x + shift[:, None, None]
    ZERO: tl.constexpr = 32 if SIGNED else 0
    number = whole_between(divide(shifted, divisor[:, None, None], INTERPRETED), 0.0 - ZERO, TOP - 0.0 - ZERO)
    number = tl.where(divisor[:, None, None] < float("inf"), number, 0.0)
    value = number * scale[:, None, None]
    one, other = (0.0 - ZERO) * scale, (TOP - 0.0 - ZERO) * scale
    if not SIGNED:
        value -= shift[:, None, None]
        one, other = one - shift, other - shift
    finish_groups(x, value, one, other, up, out, row, column, N, K, GROUP, BACKWARD, WHOLE, INTERPRETED, R, C)
