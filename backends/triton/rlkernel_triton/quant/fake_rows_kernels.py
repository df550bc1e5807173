"""A weight rounded to a format and back, a scale for each row, for each block of 128 x 128, or one in all.

The arithmetic is that of `quantize_rows_kernel`, see `fake_quantize_kernels`.

Bytes: `fake_words_kernel` reads the weight once and keeps a block in registers. `fake_rows_kernel` reads it twice; with
a scale for each row or block, the second time mostly from cache. Both write the result once. BACKWARD reads the
gradient besides.

Legend: N rows · K columns · R x C tile of a program.
"""

from __future__ import annotations

from typing import Final

from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant.code_tiles import FLOAT8, round_to, to_float32
from rlkernel_triton.quant.fake_quantize_kernels import is_beyond, nearest_float, whole_between
from rlkernel_triton.quant.quantize_kernels import divide, load_weights, scale_and_zero

PART: Final = tl.constexpr(32)  # rows of a part of a block in `fake_words_kernel`


@triton.jit
def largest_of_four(x):
    """[R, C / 4] uint32: twice the largest bits of |x| of four neighbors, which a thread has loaded together."""
    found = x.to(tl.uint32, bitcast=True) << 1
    return tl.max(tl.reshape(found, (x.shape[0], x.shape[1] // 4, 4)), axis=2)


@triton.jit
def there_and_back(
    x, scale, divisor, z, ELEMENT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, FNUZ: tl.constexpr, LARGEST: tl.constexpr, CAST: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 values of the codes of x.

    A divisor is inf where the scale is NaN, or where the scale is 0 and each quotient rounds to 0.
    """
    ratio = divide(x, divisor, INTERPRETED)
    if ELEMENT == FLOAT8:
        if CAST:
            number = ratio.to(tl.float8e4nv).to(tl.float32)
        else:
            number = nearest_float(ratio, LARGEST, MANTISSA, BIAS, FNUZ, False)
    else:
        number = whole_between(ratio, LEAST - z, MOST - z)
    return number * scale


@triton.jit
def fake_tile(
    x, scale, divisor, z, up, out, row, column, N, K, ELEMENT: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr, LARGEST: tl.constexpr,
    CAST: tl.constexpr, BACKWARD: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write a tile [R, C], or its gradient."""
    if BACKWARD:
        if ELEMENT == FLOAT8:
            end = LARGEST * scale
            cut = is_beyond(x, 0.0 - end, end)
        else:
            cut = is_beyond(x, (LEAST - z) * scale, (MOST - z) * scale)
        value = load_weights(up, K, 1, row, column, N, K, WHOLE, INTERPRETED, R, C)
        value = tl.where(cut, 0.0, value)
    else:
        value = there_and_back(
            x, scale, divisor, z, ELEMENT, LEAST, MOST, MANTISSA, BIAS, FNUZ, LARGEST, CAST, INTERPRETED
        )  # fmt: skip
    n, k = (row + tl.arange(0, R)).to(tl.int64)[:, None], column + tl.arange(0, C)[None, :]
    inside = (n < N) & (k < K)
    if WHOLE:
        inside = None
    tl.store(out + n * K + k, round_to(value, out.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def fake_rows_kernel(
    w,  # [N, K] real, any strides
    row_stride, column_stride,
    up, out,
    largest,  # fp32: what the scale's rule divides by
    partial,  # [parts] int32, with ROWS 0: what `absmax_kernel` wrote
    N, K, parts,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, ELEMENT: tl.constexpr,
    SCALE_TYPE: tl.constexpr, SYMMETRIC: tl.constexpr,
    POWER: tl.constexpr,  # scales are powers of two
    LEAST: tl.constexpr, MOST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    LARGEST: tl.constexpr,  # of the 8-bit float
    PARTS: tl.constexpr,  # parts at most, a power of two
    CAST: tl.constexpr,  # the GPU has an instruction for e4m3fn
    BACKWARD: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A scale per row (ROWS 1), per block of SIDE rows and C columns (ROWS 2), or one in all (ROWS 0).

    Rows and blocks are read twice, tile by tile.
    """
    first = tl.program_id(1) * C
    if ROWS == 2:
        row = tl.program_id(0) * SIDE
        end = tl.minimum(row + SIDE, N)
        most = tl.zeros((R, C // 4), tl.uint32)
        for part in range(row, end, R):
            x = load_weights(w, row_stride, column_stride, part, first, N, K, WHOLE, INTERPRETED, R, C)
            most = tl.maximum(most, largest_of_four(x))
        bits = tl.max((most >> 1).to(tl.int32))
        low, high = bits.to(tl.float32), bits.to(tl.float32)
    elif ROWS == 0:
        at = tl.arange(0, PARTS)
        bits = tl.max(tl.load(partial + at, mask=at < parts, other=0), axis=0)
        low, high = bits.to(tl.float32), bits.to(tl.float32)
        row = tl.program_id(0) * R
    else:
        row = tl.program_id(0) * R
        most, least, top = tl.zeros((R, C // 4), tl.uint32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
        for column in range(0, K, C):
            x = load_weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            most = tl.maximum(most, largest_of_four(x))
            if not SYMMETRIC:
                least, top = tl.minimum(least, x), tl.maximum(top, x)
        bits = tl.max((most >> 1).to(tl.int32), axis=1)
        low, high = bits.to(tl.float32), bits.to(tl.float32)
        if not SYMMETRIC:
            low, high = tl.min(least, axis=1), tl.max(top, axis=1)
    SCALE: tl.constexpr = tl.bfloat16 if SCALE_TYPE == 1 else tl.float16 if SCALE_TYPE == 2 else tl.float32
    stored, divisor, z = scale_and_zero(low, high, bits, largest, SCALE, SYMMETRIC, POWER, INTERPRETED)
    scale = to_float32(stored, INTERPRETED)
    if ROWS == 1:
        scale, divisor, z = scale[:, None], divisor[:, None], z[:, None]
    else:
        one = tl.zeros((1, 1), tl.float32)
        scale, divisor, z = scale + one, divisor + one, z + one
    if ROWS == 2:
        for part in range(row, end, R):
            x = load_weights(w, row_stride, column_stride, part, first, N, K, WHOLE, INTERPRETED, R, C)
            fake_tile(
                x, scale, divisor, z, up, out, part, first, N, K, ELEMENT, LEAST, MOST, MANTISSA, BIAS, FNUZ,
                LARGEST, CAST, BACKWARD, WHOLE, INTERPRETED, R, C,
            )  # fmt: skip
    else:
        for column in range(0, K, C):
            x = load_weights(w, row_stride, column_stride, row, column, N, K, WHOLE, INTERPRETED, R, C)
            fake_tile(
                x, scale, divisor, z, up, out, row, column, N, K, ELEMENT, LEAST, MOST, MANTISSA, BIAS, FNUZ,
                LARGEST, CAST, BACKWARD, WHOLE, INTERPRETED, R, C,
            )  # fmt: skip


@triton.jit
def load_words(at, row, row_words, C: tl.constexpr):
    """[PART, C / 2] uint32 of a block, whose first word is at `at`."""
    n, k = tl.arange(0, PART)[:, None], tl.arange(0, C // 2)[None, :]
    return tl.load(at + ((row + n) * row_words + k))


@triton.jit
def larger_of_words(x, y):
    """uint32: the largest of four |bf16|, two of x and two of y, in bits 17 to 31; lower bits mean nothing."""
    return tl.maximum(tl.maximum(x << 1, x << 17), tl.maximum(y << 1, y << 17))


@triton.jit
def fake_words_kernel(
    w,  # [N, K] bf16, aligned to words, columns beside each other
    row_stride,  # even
    out, largest, K,
    parts,  # C // PART, 4. No constexpr: the compiler would unroll the loop and need the registers of all four at once
    C: tl.constexpr, POWER: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    LARGEST: tl.constexpr, CAST: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """8-bit floats with a scale for each block of C x C, 128 x 128. Grid: (row blocks, column blocks), all whole.

    A block stays in registers as words of two bf16, in four parts of 32 rows: the loop rounds and stores x0, then moves
    the other parts up. Other arguments are those of `fake_rows_kernel`.
    """
    row, first = tl.program_id(0).to(tl.int64) * C, tl.program_id(1) * C
    words = row_stride // 2
    at = w.to(tl.pointer_type(tl.uint32)) + (row * words + first // 2)
    x0 = load_words(at, 0, words, C)
    x1 = load_words(at, PART, words, C)
    x2 = load_words(at, 2 * PART, words, C)
    x3 = load_words(at, 3 * PART, words, C)
    most = tl.maximum(larger_of_words(x0, x1), larger_of_words(x2, x3))
    bits = tl.max((most >> 1).to(tl.int32)) & 0x7FFF0000
    low = bits.to(tl.float32)
    scale, divisor, z = scale_and_zero(low, low, bits, largest, tl.float32, True, POWER, INTERPRETED)
    one = tl.zeros((1, 1), tl.float32)
    scale, divisor, z = scale + one, divisor + one, z + one
    to = out + (row * K + first) + (tl.arange(0, PART)[:, None] * K + tl.arange(0, C)[None, :])
    for _ in range(parts):
        even, odd = (x0 << 16).to(tl.float32, bitcast=True), (x0 & 0xFFFF0000).to(tl.float32, bitcast=True)
        value = there_and_back(
            tl.reshape(tl.join(even, odd), (PART, C)), scale, divisor, z, FLOAT8, 0, 0, MANTISSA, BIAS, FNUZ, LARGEST,
            CAST, INTERPRETED,
        )  # fmt: skip
        tl.store(to, round_to(value, out.dtype.element_ty, INTERPRETED))
        to += PART * K
        x0, x1, x2, x3 = x1, x2, x3, x0
