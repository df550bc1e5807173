"""e2m1, the 4-bit float of the OCP formats: a sign bit and the magnitudes 0, 1/2, 1, 3/2, 2, 3, 4, 6.

OCP Microscaling Formats 1.0, section 5.3.3. There is no inf and no NaN; what is beyond 6 becomes 6.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant.float8 import SmallFloat

E2M1: Final = SmallFloat(torch.uint8, 6.0, 1, 0.5)
_MIDDLES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # entry i is between the magnitudes of codes i and i + 1


def encode(x: Tensor, rounding: str) -> Tensor:
    """Codes uint8 of the nearest values of fp32 `x`; a tie takes the even code, or ("away") the larger magnitude."""
    magnitude = x.abs()
    codes = torch.signbit(x).to(torch.uint8) << 3
    for i, middle in enumerate(_MIDDLES):
        up = rounding == "away" or i % 2
        codes += magnitude >= middle if up else magnitude > middle
    return codes


def decode(codes: Tensor) -> Tensor:
    """fp32 values of codes uint8 0..15."""
    index = codes & 7
    doubled = torch.where(index < 4, index, (2 + (index & 1)) << ((index >> 1) - 1).clamp(max=2))
    sign = 1.0 - 2.0 * (codes >> 3).float()
    return doubled.float() * 0.5 * sign
