"""Scaling a gradient that was made together with the value, in the precision of the value, with one rounding."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 1 << 18  # numbers that are scaled at a time, where that takes more bits than they have


def scaled(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient` times the 0-dim `upstream`, rounded once, to `dtype`.

    A factor without dimensions takes the dtype of what it multiplies first: 0.3 would be 0.30078 in bfloat16. One with
    a dimension keeps its own, and so does the product.
    """
    factor = upstream.reshape(1)
    out = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    for part, into in zip(torch.split(gradient.reshape(-1), BLOCK), torch.split(out.view(-1), BLOCK), strict=True):
        into.copy_(part * factor)
    return out
