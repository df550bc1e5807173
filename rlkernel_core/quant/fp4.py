"""FP4 of bitsandbytes: blocks and double quantization as `nf4` has them, a table of 4-bit floats instead.

A code is a sign bit and three bits that stand for 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4 in this order. That is not the
e2m1 of the OCP formats (`mxfp4`, `nvfp4`), whose codes are in ascending order and whose values are others.

Quantize: x = w / a in fp32; the magnitude is the nearest to |x|, a tie takes the lower; the sign bit is set where
x < 0, so a small negative value has the code 8, which stands for 0 as code 0 does.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant.nf4 import NF4, nearest

_MAGNITUDES: Final = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # times 1 / 12
TABLE: Final = tuple(sign * m / 12 for sign in (1, -1) for m in _MAGNITUDES)


class FP4(NF4):
    """The codec; `Codec` says what each method promises."""

    table = TABLE
    widest_gap = 1 / 3

    def code(self, ratio: Tensor, table: Tensor) -> Tensor:
        """Nearest magnitude, and a sign."""
        ascending, codes = table[:8].sort()  # on the device: a copy from the host would be a synchronization
        found = codes.to(torch.uint8).index_select(0, nearest(ratio.abs(), ascending).int())
        return found | ((ratio < 0).to(torch.uint8) << 3)


CODEC: Final = FP4()
