"""Products of a weight that is dequantized to memory, a bounded number of bytes at a time, and multiplied by torch.

Legend: M tokens · K inputs · N rows of the weight, or of an expert · R = N, or N / 2 for a pair · E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_triton.launchers import Plan, piece_of, planned
from rlkernel_triton.quant.dequantize import dequantizer
from rlkernel_triton.quant.epilogue import Epilogue, apply_epilogue
from rlkernel_triton.quant.grouped_lora import add_low_rank

PIECE: Final = 128 << 20  # bytes of a dequantized piece: large enough for a product to fill a GPU
DENSE_EXPERTS: Final = 2 * PIECE  # bytes of experts that are dequantized at once


def dequantized_product(x: Tensor, w: QuantTensor, epilogue: Epilogue, y: Tensor, plan: Plan | None = None) -> None:
    """Pieces of the dequantized weight, multiplied by torch; sums are kept in fp32 where something follows.

    Where low-rank additions of several groups are all that follows, they are what torch adds the product to, in the
    dtype of x: rows of no group get the sums that the product alone has.
    """
    N, K = w.shape
    rows = max(64, piece_of(PIECE, 2) // (K * x.element_size()) // 64 * 64)
    buffer = torch.empty(min(rows, N), K, dtype=x.dtype, device=x.device)
    lora, groups = epilogue.lora, epilogue.groups
    adapted = lora is not None and groups is not None
    plain = y.dtype == x.dtype and (replace(epilogue, lora=None) if adapted else epilogue).empty
    h = y if plain else torch.empty(x.shape[0], N, dtype=torch.float32, device=x.device)
    if plain and lora is not None and groups is not None:
        add_low_rank(x, lora, groups, y, plan)
    for first in range(0, N, rows):
        last = min(first + rows, N)
        piece = dequantized_rows(w, x.dtype, first, last, plan, buffer[: last - first])
        if not plain:
            h[:, first:last] = float32_product(x, piece)
        elif adapted:
            h[:, first:last].addmm_(x, piece.t())
        else:
            torch.mm(x, piece.t(), out=h[:, first:last])
    if plain:
        return
    if epilogue.empty:
        y.copy_(h)
    else:
        apply_epilogue(x, h, epilogue.with_addition(x, plan), y, plan)


def dequantized_rows(
    w: QuantTensor, dtype: torch.dtype, first: int, last: int, plan: Plan | None, out: Tensor | None = None
) -> Tensor:  # -> [last - first, K]
    """Rows of the weight from `first`, a multiple of 16, to `last`."""
    bound = partial(dequantizer, w, dtype, (first, last))
    return planned(plan, f"rows {first}:{last} {dtype}", w.device, bound)(w, out)


def float32_product(x: Tensor, piece: Tensor) -> Tensor:
    """x piece^T in fp32, not rounded to the dtype of x."""
    if x.is_cuda:
        return torch.mm(x, piece.t(), out_dtype=torch.float32)
    return x.float() @ piece.float().t()


def dense_experts(
    w: QuantTensor, experts: int, kind: torch.dtype, plan: Plan | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """(first expert, how many, their rows [n N, K]) for all, a bounded number of bytes at a time."""
    N, K = w.shape[0] // experts, w.shape[1]
    most = max(1, piece_of(DENSE_EXPERTS) // (N * K * kind.itemsize))
    aligned = 16 // gcd(N, 16)  # tiles are read from multiples of 16 rows
    most = max(aligned, most // aligned * aligned)
    for first in range(0, experts, most):
        last = min(first + most, experts)
        yield first, last - first, dequantized_rows(w, kind, first * N, last * N, plan)
