"""Sums of torch tensors in one order, as elementwise additions: the same bits on every device, alone or in any batch.

    lanes   a row is added onto LANES running sums of 0, its columns in order; neighbors of these are then added until
            one number is left: (0 + 1) + (2 + 3), ...
    tree    neighbors in blocks of BLOCK rows are added until a row a block is left, and blocks of these again; what a
            block lacks is 0

Kernels that add so have these bits too, where every product is rounded before it is added (no fused multiply-add) and
divisions and roots are those of IEEE 754. An implementation that adds in these orders names them `sums` = ORDER.

Legend: N rows · W width.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LANES: Final = 1024  # running sums of a row; fewer for narrow rows, where those that are left out are 0
BLOCK: Final = 64  # rows; a power of two
ORDER: Final = f"lanes{LANES}/tree{BLOCK}/f32"


def lanes_of(width: int) -> int:
    """How many running sums a row of a width has: the next power of two, at most `LANES`."""
    return min(LANES, 1 << max(width - 1, 0).bit_length())


def lane_sum(x: Tensor) -> Tensor:  # [..., W] -> [...]
    """Sum over the last dimension by lanes."""
    width = x.shape[-1]
    lanes = lanes_of(width)
    total = x.new_zeros(*x.shape[:-1], lanes)
    for start in range(0, width, lanes):
        total += _filled(x[..., start : start + lanes], lanes)
    return _neighbors(total)


def lane_mean(x: Tensor) -> Tensor:  # [..., W] -> [...]
    """Mean over the last dimension; over a tensor, since a GPU would multiply with the reciprocal of a number."""
    total = lane_sum(x)
    return total / torch.full_like(total, x.shape[-1])


def inverse_rms(x: Tensor, eps: float) -> Tensor:  # [..., W] -> [...]
    """1 / sqrt(mean(x^2) + eps) over the last dimension, with the root and the division of IEEE 754."""
    # Torch's own fp32 root is off by a step now and then; one of float64 rounds to the IEEE root, whatever its error.
    root = torch.sqrt((lane_mean(x * x) + eps).double()).to(x.dtype)
    return torch.ones_like(root) / root


def row_sum(x: Tensor) -> Tensor:  # [N, W] -> [W]
    """Sum over the rows by a tree."""
    x = x.t()
    if not x.shape[-1]:
        return x.new_zeros(x.shape[0])
    while True:
        blocks = -(-x.shape[-1] // BLOCK)
        x = _neighbors(_filled(x, blocks * BLOCK).reshape(-1, blocks, BLOCK))
        if blocks == 1:
            return x[:, 0]


def _neighbors(x: Tensor) -> Tensor:  # [..., W], W a power of two -> [...]
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _filled(x: Tensor, width: int) -> Tensor:
    """[..., W] filled up with zeros to a width."""
    missing = width - x.shape[-1]
    return x if not missing else torch.cat([x, x.new_zeros(*x.shape[:-1], missing)], -1)
