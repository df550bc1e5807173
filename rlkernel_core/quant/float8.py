"""8-bit floats: their ranges, and a cast that saturates.

`fn` formats have no infinity, `fnuz` formats neither that nor a negative zero, and a plain cast of a large value gives
NaN or the maximum depending on the torch version; here it is the maximum on all of them.
The byte of an e4m3fnuz number read as e4m3fn is twice as large (its exponent bias is 8, not 7) or NaN; likewise e5m2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class SmallFloat:
    """One format of floats that fit into a byte."""

    dtype: torch.dtype  # of stored codes
    max: float  # largest finite value
    mantissa: int  # stored bits
    smallest: float  # smallest positive (subnormal) value

    @property
    def largest_exponent(self) -> int:
        """The p of max = m 2^p, 1 <= m < 2."""
        return math.frexp(self.max)[1] - 1

    @property
    def largest_fraction(self) -> float:
        """The m of max = m 2^p, 1 <= m < 2."""
        return 2 * math.frexp(self.max)[0]


# OCP OFP8 1.0, tables 1 and 2; fnuz: arXiv 2206.02915.
FLOAT8: Final[Mapping[str, SmallFloat]] = {
    "e4m3fn": SmallFloat(torch.float8_e4m3fn, 448.0, 3, 2.0**-9),
    "e5m2": SmallFloat(torch.float8_e5m2, 57344.0, 2, 2.0**-16),
    "e4m3fnuz": SmallFloat(torch.float8_e4m3fnuz, 240.0, 3, 2.0**-10),
    "e5m2fnuz": SmallFloat(torch.float8_e5m2fnuz, 57344.0, 2, 2.0**-17),
}


def saturating_cast(x: Tensor, element: str) -> Tensor:
    """Round fp32 to the nearest 8-bit float, ties to even; beyond the range the largest finite value; NaN stays NaN."""
    form = FLOAT8[element]
    return x.clamp(-form.max, form.max).to(form.dtype)


def error_of(exact: Tensor, scale: Tensor, form: SmallFloat) -> Tensor:
    """How far the nearest value times its scale may be from a weight, in float64.

    Half a step, and what lies beyond the largest value; 2^-22 |w| covers the fp32 operations.
    """
    beyond = (exact.abs() - form.max * scale).clamp(min=0)
    step = torch.maximum(exact.abs() * 2.0**-form.mantissa, form.smallest * scale)
    return torch.maximum(step / 2, beyond) + exact.abs() * 2.0**-22
