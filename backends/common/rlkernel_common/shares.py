"""Two numbers that add up to a third, to the bit: what a draw says of its law and of the mass that was kept.

Legend: N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def with_sum(logprob: Tensor, log_kept: Tensor, whole: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
    """Both numbers changed in their last bits, so that their sum rounds to `whole`.

    The smaller one stays, and the larger is what is left: an error of its own last bits. Where their sum lies halfway
    between two numbers, and rounds to the other one, the smaller one gives up one unit in its last place.

    Args:
        logprob: [N] fp32 or float64, <= 0, as the next two.
        log_kept: [N] whose sum with `logprob` is `whole` but for roundings.
        whole: [N] of the same dtype.
        alone: [N] bool, whether no other token was kept, so that `logprob` is 0 and stays it.
    """
    first = (log_kept >= logprob) & ~alone
    small = torch.maximum(torch.where(first, log_kept, logprob), whole) + 0.0  # -0 becomes 0
    between = (whole - small) + small != whole
    nearer = (small.view(_BITS[small.dtype]) - 1).view(small.dtype)
    small = torch.where(between, nearer, small)
    large = whole - small
    return torch.where(first, large, small), torch.where(first, small, large)
