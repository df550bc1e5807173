"""8-bit floats: their ranges, and a cast that saturates.

`fn` formats have no infinity, `fnuz` formats neither that nor a negative zero, and a plain cast of a large value gives
NaN or the maximum depending on the torch version; here it is the maximum on all of them.
The byte of an e4m3fnuz number read as e4m3fn is twice as large (its exponent bias is 8, not 7) or NaN; likewise e5m2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Float8:
    """One 8-bit float format."""

    dtype: torch.dtype
    max: float  # largest finite value
    mantissa: int  # stored bits
    smallest: float  # smallest positive (subnormal) value


# OCP OFP8 1.0, tables 1 and 2; fnuz: arXiv 2206.02915.
FLOAT8: Final[Mapping[str, Float8]] = {
    "e4m3fn": Float8(torch.float8_e4m3fn, 448.0, 3, 2.0**-9),
    "e5m2": Float8(torch.float8_e5m2, 57344.0, 2, 2.0**-16),
    "e4m3fnuz": Float8(torch.float8_e4m3fnuz, 240.0, 3, 2.0**-10),
    "e5m2fnuz": Float8(torch.float8_e5m2fnuz, 57344.0, 2, 2.0**-17),
}


def saturating_cast(x: Tensor, element: str) -> Tensor:
    """Round fp32 to the nearest 8-bit float, ties to even; beyond the range the largest finite value; NaN stays NaN."""
    form = FLOAT8[element]
    return x.clamp(-form.max, form.max).to(form.dtype)
