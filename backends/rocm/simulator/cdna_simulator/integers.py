"""Integer functions that scalar and vector instructions share; words are uint32 or uint64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cdna_simulator.formats import I32, I64, U32, U64

Compute = Callable[..., Any]


def as_signed(x: Any) -> Any:
    """The same bits as signed integers."""
    return x.view(I32 if x.itemsize == 4 else I64)


def signed(compute: Compute) -> Compute:
    """An operation on signed 32-bit words."""
    return lambda *xs: compute(*[np.asarray(x, U32).view(I32) for x in xs]).astype(I32).view(U32)


def shift_amount(x: Any, by: Any) -> Any:
    """The bits of a shift that count for a word."""
    return (by & U32(8 * x.itemsize - 1)).astype(x.dtype)


def shift_left(x: Any, by: Any) -> Any:
    """Zeros move in."""
    return x << shift_amount(x, by)


def shift_right(x: Any, by: Any) -> Any:
    """Zeros move in."""
    return x >> shift_amount(x, by)


def shift_right_signed(x: Any, by: Any) -> Any:
    """The sign moves in."""
    return (as_signed(x) >> as_signed(shift_amount(x, by))).view(x.dtype)


def field(x: Any, at: Any, width: Any) -> Any:
    """`width` bits of 32 from bit `at` on."""
    return ((x >> at).astype(U64) & ((U64(1) << width.astype(U64)) - U64(1))).astype(U32)


def signed_field(x: Any, at: Any, width: Any) -> Any:
    """`width` bits from bit `at` on, sign-extended."""
    kind, bits = x.dtype.type, 8 * x.itemsize
    above = np.minimum(bits - np.minimum(width, U32(bits)), U32(bits - 1)).astype(kind)
    moved = shift_right_signed((x >> at.astype(kind)) << above, above.astype(U32))
    return np.where(width == 0, kind(0), moved)


def bit_reversed(x: Any) -> Any:
    """32 bits, the lowest first."""
    x = np.asarray(x, U32)
    for k, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = ((x >> U32(k)) & U32(mask)) | ((x & U32(mask)) << U32(k))
    return x


def leading_zeros(x: Any) -> Any:
    """Zeros above the highest set bit; -1 if there is none."""
    x, kind = np.asarray(x), x.dtype.type
    bits = 8 * x.itemsize
    filled = x
    for k in (1, 2, 4, 8, 16, 32):
        if k < bits:
            filled = filled | (filled >> kind(k))
    return np.where(x == 0, U32(0xFFFFFFFF), (bits - np.bitwise_count(filled)).astype(U32))


def leading_signs(x: Any) -> Any:
    """Bits at the top that equal the sign; -1 if all do."""
    return leading_zeros(np.where(as_signed(x) < 0, ~x, x))


def first_set(x: Any) -> Any:
    """Position of the lowest set bit; -1 if there is none."""
    x, one = np.asarray(x), x.dtype.type(1)
    return np.where(x == 0, U32(0xFFFFFFFF), np.bitwise_count((x & (~x + one)) - one).astype(U32))


def count(x: Any) -> Any:
    """Set bits."""
    return np.bitwise_count(x).astype(U32)


def high_product(x: Any, y: Any) -> Any:
    """The upper half of a product of 32-bit words."""
    return ((x.astype(U64) * y.astype(U64)) >> U64(32)).astype(U32)


def high_product_signed(x: Any, y: Any) -> Any:
    """The upper half of a product of signed 32-bit words."""
    return ((as_signed(x).astype(I64) * as_signed(y).astype(I64)) >> I64(32)).astype(U32)
