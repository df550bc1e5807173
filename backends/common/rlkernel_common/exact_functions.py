"""exp, the sigmoid and the normal distribution function of torch tensors from IEEE operations alone.

Libraries' exponentials differ in their last bit, and torch's own silu and gelu on a CPU give an element other bits in
the middle of a tensor than at its end. These are additions, products and divisions in one order, each rounded: the same
bits on every device, and in kernels that do the same (without fusing a product with its addition). Of fp32 the error is
about 1e-7, in the tails of `normal_cdf` 1e-5. Float64 takes torch's own functions.

An implementation that computes so names it `sums` = ARITHMETIC.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

ARITHMETIC: Final = "exp7/f32"
LOG2E: Final = 1.4426950408889634
LN2_HIGH: Final = 0.693145751953125  # 16 bits: its products with |k| < 256 are exact
LN2_LOW: Final = 1.4286068203094172e-06
LEAST: Final = -104.0  # e^-104 rounds to 0
# Of e^r, |r| <= ln(2) / 2: the series to the seventh power errs by 6e-9.
SERIES: Final = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
# erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z / 2): relative error 1.2e-7 (Numerical Recipes, 6.2).
ERFC: Final = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def exp(x: Tensor) -> Tensor:
    """e^x for x <= 0."""
    if x.dtype == torch.float64:
        return torch.exp(x)
    x = x.clamp_min(LEAST)
    k = torch.floor(x * LOG2E + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    half = torch.floor(k * 0.5)
    return _series(r, SERIES) * _power(half) * _power(k - half)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), in which nothing overflows or cancels."""
    e = exp(-x.abs())
    return torch.where(x >= 0, torch.ones_like(e), e) / (1.0 + e)


def normal_cdf(x: Tensor) -> Tensor:
    """Phi(x), the standard normal distribution function."""
    if x.dtype == torch.float64:
        wide: Tensor = torch.special.erfc(x * -math.sqrt(0.5))
        return wide * 0.5
    z = x.abs() * math.sqrt(0.5)
    t = torch.ones_like(z) / (1.0 + 0.5 * z)
    tail = 0.5 * (t * exp((_series(t, ERFC) - z * z).clamp_max(0.0)))
    return torch.where(x >= 0, 1.0 - tail, tail)


def _series(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """A polynomial by Horner's rule."""
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = p * x + c
    return p


def _power(k: Tensor) -> Tensor:
    """2^k for a whole k from -126 to 127."""
    return ((k.to(torch.int32) + 127) << 23).view(torch.float32)
