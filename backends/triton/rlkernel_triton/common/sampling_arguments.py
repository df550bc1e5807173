"""Parameters of a draw as host code passes them: a number, or a tensor of one entry for all or one a row or slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flat(x: Tensor) -> Tensor:
    """[n] contiguous; the bits of unsigned 64-bit numbers as signed ones, which torch can index."""
    x = x.view(torch.int64) if x.dtype is torch.uint64 else x
    return x if x.dim() == 1 and x.is_contiguous() else x.reshape(-1).contiguous()


def as_int64(number: int | Tensor) -> int | Tensor:
    """The bits of an unsigned 64-bit number as a signed one; a tensor holds them so already."""
    return number - 2**64 if isinstance(number, int) and number >= 2**63 else number


def each_of(x: Any) -> int:
    """The `EACH` of a parameter."""
    if isinstance(x, Tensor):
        return int(x.shape[0] != 1)
    return -2 if x is None else -1
