"""The affine suffix scan y_t = a_t y_{t+1} + b_t in log2(T) steps, and the one sum over segments made from it.

Recursive doubling (Hillis and Steele 1986): after step k each position holds the composition of the 2^k maps that
start there. A window stops at the end of its segment, so the tree of a result depends only on how far its position
is from that end: padded and packed layouts give the same bits, and no value of one segment meets another.
"""

from __future__ import annotations

import torch
from torch import Tensor


def suffix_scan(a: Tensor, b: Tensor, segment: Tensor | None = None) -> Tensor:  # [R, T], [R, T], [T]
    """y_t = a_t y_{t+1} + b_t to the end of the row, or of the run of equal `segment` ids; y = 0 beyond it.

    Positions with a = 1, b = 0 (masked ones) are skipped exactly. Differentiable.
    """
    steps, width = 1, b.shape[-1]
    while steps < width:
        right_a, right_b = a[..., steps:], b[..., steps:]
        if segment is not None:
            same = segment[steps:] == segment[:-steps]
            right_a, right_b = torch.where(same, right_a, 1), torch.where(same, right_b, 0)
        left_a, left_b = a[..., :-steps], b[..., :-steps]
        b = torch.cat([left_b + left_a * right_b, b[..., -steps:]], -1)
        a = torch.cat([left_a * right_a, a[..., -steps:]], -1)
        steps *= 2
    return b
