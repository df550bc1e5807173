"""Where the rows of a tensor of any leading shape stand: two strides, so that no view is copied.

`logits[:, :-1]` is the usual way to shift a batch, and torch cannot flatten it without a copy of everything.

Legend: C columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Places = tuple[int, int, int, int]  # inner, outer_stride, inner_stride, stride: see `Rows`


class Rows(NamedTuple):
    """Row i of `data` starts at (i // inner) * outer_stride + (i % inner) * inner_stride."""

    data: Tensor  # [..., C]; a copy only where its leading dimensions need more than two strides
    inner: int
    outer_stride: int
    inner_stride: int
    stride: int  # from column to column

    @property
    def places(self) -> Places:
        """What a kernel is told."""
        return self.inner, self.outer_stride, self.inner_stride, self.stride


def rows_of(x: Tensor) -> Rows:
    """The rows of [..., C]."""
    stride = x.stride(-1) if x.shape[-1] > 1 else 1
    dims: list[tuple[int, int]] = []  # (size, stride) of leading dimensions that do not fold into the one after them
    for size, step in reversed(list(zip(x.shape[:-1], x.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if dims and step == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, step))
    if len(dims) > 2:
        return rows_of(x.clone(memory_format=torch.contiguous_format))
    inner, inner_stride = dims[0] if dims else (1, 0)
    outer_stride = dims[1][1] if len(dims) == 2 else 0
    return Rows(x, max(inner, 1), outer_stride, inner_stride, stride)


def places_of(x: Tensor) -> tuple[Places, bool]:
    """Where the rows of tensors like x stand, and whether they must be copied to be contiguous first."""
    like = torch.empty_strided(x.shape, x.stride(), device="meta")
    rows = rows_of(like)
    return rows.places, rows.data is not like
