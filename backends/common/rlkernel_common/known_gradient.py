"""A scalar whose gradients were made together with it, attached to the autograd graph.

Backward only scales them, in the precision of the scalar, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK: Final = 1 << 18  # numbers that are scaled at a time, where that takes more bits than they have


def attach(
    value: Tensor,
    *gradients: tuple[Tensor | None, Tensor | None],
    by: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None,
) -> Tensor:
    """`value` with the given gradients: pairs of (d value / d tensor, tensor), either of them None where there is none.

    Differentiable once. `by` does what `scaled` does, where a backend has a faster way to the same numbers.
    """
    known, of = zip(*gradients, strict=True)
    attached: Tensor = _Attach.apply(value, by or scaled, *known, *of)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, by: Any, *tensors: Tensor | None) -> Tensor:
        ctx.by = by
        pairs = len(tensors) // 2
        ctx.save_for_backward(*tensors[:pairs])
        ctx.dtypes = tuple(None if x is None else x.dtype for x in tensors[pairs:])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        known = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2 + len(known) :]
        found = (
            ctx.by(gradient, upstream, dtype) if want and gradient is not None else None
            for gradient, dtype, want in zip(known, ctx.dtypes, wanted, strict=True)
        )
        return (None, None, *(None for _ in known), *found)


def scaled(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient` times the 0-dim `upstream`, rounded once, to `dtype`.

    A factor without dimensions takes the dtype of what it multiplies first: 0.3 would be 0.30078 in bfloat16. One with
    a dimension keeps its own, and so does the product.
    """
    factor = upstream.reshape(1)
    out = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    for part, into in zip(torch.split(gradient.reshape(-1), BLOCK), torch.split(out.view(-1), BLOCK), strict=True):
        into.copy_(part * factor)
    return out
