"""Gradients of hidden states and head from the gradient dz of logits: of all rows at once, or of a block at a time.

Products are torch's: 16-bit operands are multiplied as they are and summed in fp32.

Legend: N rows · n rows of a block · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_common.precision import full_precision

COLUMNS: Final = 8192  # of d_weight that are summed at a time in fp32 where operands are


class Block(NamedTuple):
    """Some rows of a call."""

    rows: slice
    x: Tensor  # [n, D] hidden states, 0 in rows that do not count
    dz: Tensor  # [n, V]


def from_all_rows(
    hidden: Tensor, weight: Tensor, mask: Tensor | None, dz: Tensor, g: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients that are wanted of hidden and weight, from that of all logits where upstream is 1.

    A row's upstream gradient multiplies the row of d_hidden, and the hidden states that d_weight is made of.

    Args:
        hidden: [..., D].
        weight: [V, D].
        mask: [...] rows that count; None: all.
        dz: [N, V].
        g: [N] fp32 upstream gradient.
        wanted: of hidden, of weight.
    """
    d_hidden, d_weight, counted = None, None, None if mask is None else mask.contiguous().view(-1, 1)
    up = g[:, None] if counted is None else torch.where(counted, g[:, None], 0.0)
    if wanted[0]:
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        torch.mul(product(dz, weight), up, out=d_hidden.view(-1, d_hidden.shape[-1]))
    if wanted[1]:
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        x = torch.mul(flat, up, out=torch.empty_like(flat, dtype=dz.dtype))  # in fp32, rounded once
        x = x if counted is None else torch.where(counted, x, 0.0)
        d_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        _write_product(d_weight, dz.T, x)
    return d_hidden, d_weight


def from_blocks(
    hidden: Tensor, weight: Tensor, blocks: Iterable[Block], several: bool, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients that are wanted of hidden and weight, from those of the logits of each block.

    Where there are several blocks, d_weight adds up in fp32: 4 V D bytes.

    Args:
        hidden: [..., D].
        weight: [V, D].
        blocks: every row in one of them.
        several: whether there are more than one, or none.
        wanted: of hidden, of weight.
    """
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
    d_weight: Tensor | None = None
    if wanted[1]:
        made = torch.zeros if several else torch.empty
        d_weight = made(weight.shape, dtype=torch.float32 if several else weight.dtype, device=weight.device)
    for rows, x, dz in blocks:
        if d_hidden is not None:
            _write_product(d_hidden.view(-1, d_hidden.shape[-1])[rows], dz, weight)
        if d_weight is not None and not several:
            _write_product(d_weight, dz.T, x)
        elif d_weight is not None:
            _add_product(d_weight, dz.T, x)
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def gradient_dtype(hidden: Tensor) -> torch.dtype:
    """Of gradients of logits: fp16 has too small a range for them."""
    return torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32


def product(a: Tensor, b: Tensor) -> Tensor:
    """[n, k] @ [k, m] in fp32: 16-bit operands are multiplied as they are where the device sums them in fp32."""
    with full_precision(a):
        if _as_they_are(a, b):
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()


def _as_they_are(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype and a.itemsize == 2


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add [n, k] @ [k, m] to out, fp32."""
    if _as_they_are(a, b):
        with full_precision(a):
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return
    for first in range(0, len(out), COLUMNS):  # operands in fp32 are copies
        part = slice(first, first + COLUMNS)
        out[part] += product(a[part], b)


def _write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """[n, k] @ [k, m], rounded once to the dtype of `out`."""
    if a.dtype == b.dtype == out.dtype:
        with full_precision(a):
            torch.mm(a, b, out=out)
    else:
        out.copy_(product(a, b))
