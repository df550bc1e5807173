"""Arithmetic that kernels share: starts of rows, sums in an order that no layout decides, log1p, tanh, rounding casts.

Triton decides how elements lie in threads, by the alignment of the pointers that it loads from among other things, and
a plain `tl.sum` adds in the order of that layout. So the bits of a sum could depend on where in memory a row starts. A
tree of sums of two elements has one order: a + b = b + a.

Legend: L rows of a block · W width, a power of two.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LARGEST: tl.constexpr = tl.constexpr(4194304.0)  # a z beyond it has no fp32 number near enough to be taken relative to
MAX_FLOAT: tl.constexpr = tl.constexpr(3.4028234663852886e38)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)  # as common.host says it to host code


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride):
    """Where a row of [outer, inner, C] (`row_layout`) starts; everything in int64, as N C may exceed 2^31."""
    row = row.to(tl.int64)
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def tree_sum(
    x,  # [L, W], W at most 2^16
):
    """[L]: neighbors are added until one number a row is left."""
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def scaled_less(y, scale, top):
    """The difference y * scale - top in one rounding, so that a shift of a whole row by 1e5 changes nothing."""
    if INTERPRETED:  # whose fma rounds twice
        return (y.to(tl.float64) * scale - top).to(tl.float32)
    return tl.fma(y, scale, -top)


@triton.jit
def z_of(y, scale):
    """y * scale; that of a finite y is finite."""
    return tl.where(tl.abs(y) < float("inf"), tl.minimum(tl.maximum(y * scale, -MAX_FLOAT), MAX_FLOAT), y * scale)


@triton.jit
def anchor(best, scale, top):
    """(c, t) with which `scaled_less(y - c, scale, t)` is y * scale - top for no y above best.

    (0, top), unless best is at the top, and the top so large that it is rounded by more than terms differ: (best, 0).
    Logits that are masked by a number, as -1e10 is one, are so.
    """
    far = (tl.abs(top) >= LARGEST) & (tl.abs(best) < float("inf")) & (z_of(best, scale) == top)
    return tl.where(far, best, 0.0), tl.where(far, 0.0, top)


@triton.jit
def less_top(y, scale, top):
    """y * scale - top of any y and top: in one rounding, or in two where the top is rounded by more than that."""
    return tl.where(tl.abs(top) < LARGEST, scaled_less(y, scale, top), z_of(y, scale) - top)


@triton.jit
def log1p(u):
    """log(1 + u) for u >= 0 to 4e-7 relative, where log(1 + u) itself would lose a small u."""
    t = u / (2.0 + u)  # log(1 + u) = 2 atanh(t), and t <= 0.2 where the series is used
    s = t * t
    series = 2.0 * t * (1.0 + s * (1.0 / 3 + s * (1.0 / 5 + s * (1.0 / 7 + s * (1.0 / 9 + s * (1.0 / 11))))))
    return tl.where(u < 0.5, series, tl.log(1.0 + u))


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(u):
    """Hyperbolic tangent, to 1e-7 absolute and 1e-6 relative."""
    s = u * u  # |u| < 0.25: the series, which keeps a small u
    series = u * (1.0 - s * (1.0 / 3 - s * (2.0 / 15 - s * (17.0 / 315 - s * (62.0 / 2835)))))
    size = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(u)) + 1.0)
    return tl.where(s < 0.0625, series, tl.where(u < 0, -size, size))


@triton.jit
def cap(x, softcap):
    """The soft cap c tanh(x / c); a forbidden id, -inf, stays forbidden."""
    return tl.where(x == float("-inf"), x, softcap * tanh(x / softcap))


@triton.jit
def stored_as(x, dtype: tl.constexpr):
    """fp32 to the nearest value of a type; Triton's interpreter would cut bf16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, up.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
