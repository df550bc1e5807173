"""Rows of a tensor of any leading shape, read block by block so that no layout is ever copied whole.

`logits[:, :-1]` is the usual way to shift a batch, and torch cannot flatten it without a copy of everything.

Legend: N rows · C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def free_rows(x: Tensor) -> Tensor:
    """Flatten x to [N, C] where that is a view; otherwise leave it, [..., C]."""
    if x.dim() == 1:
        return x[None]
    return x.reshape(-1, x.shape[-1]) if x.is_contiguous() else x


def take(x: Tensor, which: slice | Tensor) -> Tensor:
    """Some rows of x, [n, C], counted over all its leading dimensions."""
    if x.dim() == 2:
        return x[which]
    row = torch.arange(which.start, which.stop, device=x.device) if isinstance(which, slice) else which
    return x[places(x, row)]


def places(x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """Where rows of x, counted over all its leading dimensions, stand in each of these."""
    place = []
    for size in reversed(x.shape[:-1]):
        place.append(row % size)
        row = row // size
    return tuple(reversed(place))


def shaped(x: Tensor, rows: torch.Size) -> Tensor:
    """[N] numbers as results, which autograd takes for no view, so that they may be changed in place."""
    result: Tensor = torch.ops.aten._unsafe_view(x, rows)  # noqa: SLF001 as torch.reshape's own gradients do
    return result
