"""What advantage and whiten share: the factor that scales by a standard deviation."""

from __future__ import annotations

import torch
from torch import Tensor


def variance(m2: Tensor, count: Tensor, ddof: int) -> Tensor:
    """Sum of squared deviations over count - ddof; 0 where there are too few values."""
    free = count - ddof
    return torch.where(free > 0, m2 / free.clamp(min=1), 0.0)


def factor(var: Tensor, eps: float, mode: str) -> Tensor:
    """1 / std with eps where `mode` says; 0 where it would be infinite."""
    std = var.sqrt()
    below = {
        "std_add": std + eps,
        "var_add": (var + eps).sqrt(),
        "var_clamp": var.clamp(min=eps).sqrt(),
        "threshold": torch.where(std > eps, std, 0.0),
    }[mode]
    return torch.where(below > 0, 1.0 / torch.where(below > 0, below, 1.0), 0.0)
