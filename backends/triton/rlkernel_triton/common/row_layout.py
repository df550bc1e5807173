"""Where the rows of a tensor of any leading shape stand, and one temperature a row.

`logits[:, :-1]` is the usual way to shift a batch, and torch cannot flatten it without a copy of everything. Two
strides say where the rows of such a view stand.

Legend: N rows · C columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowLayout(NamedTuple):
    """Row i starts at (i // inner) * outer_stride + (i % inner) * inner_stride: kernels take these by name."""

    inner: int
    outer_stride: int
    inner_stride: int
    stride: int  # from column to column


class Rows(NamedTuple):
    """Rows of a tensor."""

    data: Tensor  # [..., C]; a copy only where its leading dimensions need more than two strides
    layout: RowLayout


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
    # One row steps as rows of its length do: a build that took its stride for a multiple of 16 would read more at a
    # time and sum in another order than the same row of a batch.
    step = x.shape[-1] * stride
    inner, inner_stride = dims[0] if dims else (1, step)
    outer_stride = dims[1][1] if len(dims) == 2 else 0 if dims else step
    return Rows(x, RowLayout(max(inner, 1), outer_stride, inner_stride, stride))


def layout_of(x: Tensor) -> tuple[RowLayout, bool]:
    """Where the rows of tensors like x stand, and whether they must be copied to be contiguous first."""
    like = torch.empty_strided(x.shape, x.stride(), device="meta")
    rows = rows_of(like)
    return rows.layout, rows.data is not like


def per_row(temperature: float | Tensor, rows: torch.Size) -> float | Tensor:
    """A number for all rows, or [N]."""
    if not isinstance(temperature, Tensor):
        return float(temperature)
    return temperature.to(torch.float32).expand(rows).reshape(-1).contiguous()


def is_per_row(temperature: float | Tensor, rows: torch.Size) -> bool:
    """Whether a tensor of temperatures is one number a row already, as kernels read it."""
    T = temperature
    return isinstance(T, Tensor) and T.dtype == torch.float32 and T.shape == rows and T.is_contiguous()
