"""The autograd node of `rlkernel.sequence_parallel.gather_rows`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GatheredRows(torch.autograd.Function):
    """All ranks' rows; backward the sum over the ranks of the gradients of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[n, ...] -> [R n, ...]."""
        ctx.group = group
        out = x.new_empty((group.size(), *x.shape))
        dist.all_gather(list(out.unbind()), x.contiguous(), group=group)
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """[R n, ...] parts -> [n, ...]."""
        R = ctx.group.size()
        parts = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(parts, grad.contiguous(), group=ctx.group)
        parts = parts.view(R, len(grad) // R, *grad.shape[1:])
        total = parts[0].to(torch.float64 if grad.dtype == torch.float64 else torch.float32)
        for part in parts[1:]:
            total = total + part
        return total.to(grad.dtype), None
