"""Kernels of glu@1: elementwise, with the exponential of rlkernel_common.exact_functions.

The launches turn the fusing of products with additions off, and divisions round as IEEE 754 has it: so the fp32
numbers are those of plain torch, bit for bit, wherever an element lies.

Bytes of a row of D results of s bytes: forward 2 s D read, s D written; backward 3 s D read, 2 s D written.

Legend: N rows · D width of the result · W columns of a program.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import row_offset, stored_as
from rlkernel_triton.common.language import tl, triton


@triton.jit
def power(k):
    """2^k for a whole k from -126 to 127."""
    return ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """e^x for x <= 0; the coefficients are those of `exact_functions.SERIES`."""
    x = tl.maximum(x, -104.0)  # e^-104 rounds to 0
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - k * 0.693145751953125) - k * 1.4286068203094172e-06
    p = r * 0.0 + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    half = tl.floor(k * 0.5)
    return p * power(half) * power(k - half)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    e = exp(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0, e), 1.0 + e)


@triton.jit
def normal_cdf(x):
    """Phi(x); the coefficients are those of `exact_functions.ERFC`."""
    z = tl.abs(x) * 0.7071067811865476
    t = tl.div_rn(z * 0.0 + 1.0, 1.0 + 0.5 * z)
    p = t * 0.0 + 0.17087277
    p = p * t - 0.82215223
    p = p * t + 1.48851587
    p = p * t - 1.13520398
    p = p * t + 0.27886807
    p = p * t - 0.18628806
    p = p * t + 0.09678418
    p = p * t + 0.37409196
    p = p * t + 1.00002368
    p = p * t - 1.26551223
    tail = 0.5 * (t * exp(tl.minimum(p - z * z, 0.0)))
    return tl.where(x >= 0, 1.0 - tail, tail)


@triton.jit
def cdf(g, ACTIVATION: tl.constexpr):
    """What a gate is multiplied with."""
    if ACTIVATION == "gelu":
        p = normal_cdf(g)
    elif ACTIVATION == "silu":
        p = sigmoid(g)
    else:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        p = sigmoid(1.5957691216057308 * (g + 0.044715 * (g * g * g)))
    return p


@triton.jit
def derivative(g, ACTIVATION: tl.constexpr):
    """Of the activation; beyond +-110 it is 0 or 1, and no cube overflows before."""
    g = tl.where(g != g, g, tl.minimum(tl.maximum(g, -110.0), 110.0))
    p = cdf(g, ACTIVATION)
    if ACTIVATION == "gelu":
        d = p + g * (exp(-0.5 * (g * g)) * 0.3989422804014327)
    else:
        q = g * (p * (1.0 - p))
        if ACTIVATION == "gelu_tanh":
            q = q * (1.5957691216057308 * (1.0 + 0.134145 * (g * g)))
        d = p + q
    return d


@triton.jit
def glu_forward(
    x,  # [N, 2 D]: row i starts as `row_offset` says, columns are `stride` apart
    y,  # [N, D]
    inner, outer_stride, inner_stride, stride, D,
    ACTIVATION: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """W columns of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * W + tl.arange(0, W)
    x0 = x + row_offset(row, inner, outer_stride, inner_stride)
    gate = tl.load(x0 + at.to(tl.int64) * stride, mask=at < D, other=0.0).to(tl.float32)
    up = tl.load(x0 + (at.to(tl.int64) + D) * stride, mask=at < D, other=0.0).to(tl.float32)
    z = gate * cdf(gate, ACTIVATION) * up
    tl.store(y + row * D + at, stored_as(z, y.dtype.element_ty), mask=at < D)


@triton.jit
def glu_backward(
    x,  # as in `glu_forward`
    g,  # [N, D]
    d_x,  # [N, 2 D]
    inner, outer_stride, inner_stride, stride, D,
    ACTIVATION: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients g up act'(gate) and g act(gate)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * W + tl.arange(0, W)
    x0 = x + row_offset(row, inner, outer_stride, inner_stride)
    gate = tl.load(x0 + at.to(tl.int64) * stride, mask=at < D, other=0.0).to(tl.float32)
    up = tl.load(x0 + (at.to(tl.int64) + D) * stride, mask=at < D, other=0.0).to(tl.float32)
    wide = tl.load(g + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    d_gate = wide * up * derivative(gate, ACTIVATION)
    d_up = wide * (gate * cdf(gate, ACTIVATION))
    out = d_x + row * 2 * D + at
    tl.store(out, stored_as(d_gate, d_x.dtype.element_ty), mask=at < D)
    tl.store(out + D, stored_as(d_up, d_x.dtype.element_ty), mask=at < D)
