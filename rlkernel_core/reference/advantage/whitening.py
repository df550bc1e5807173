"""whiten@1 in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkernel_core.reference.advantage.moments import across_ranks, moments
from rlkernel_core.spec.whiten import WhitenResult, check

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def whiten(
    x: Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    counts: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "var_add",
    shift_mean: bool = True,
    masked_out: str = "zero",
    apply: bool = True,
    process_group: ProcessGroup | None = None,
) -> WhitenResult:
    """See `rlkernel_core.spec.whiten.whiten`."""
    check(
        x,
        mask=mask,
        lengths=lengths,
        counts=counts,
        ddof=ddof,
        eps=eps,
        eps_mode=eps_mode,
        shift_mean=shift_mean,
        masked_out=masked_out,
        apply=apply,
        process_group=process_group,
    )
    x = x.detach()
    x = x if x.dtype == torch.float64 else x.float()
    valid = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    if lengths is not None:
        valid = torch.arange(x.shape[1], device=x.device) < lengths.long()[:, None]
    member = valid & x.isfinite()
    whole = across_ranks(moments(x, member, None if counts is None else counts.reshape(-1)), process_group)
    var = whole.variance(ddof)
    rstd = whole.rstd(ddof, eps, eps_mode)
    y = x
    if apply:
        y = whole.centred(x) * rstd
        y = y if shift_mean else y + whole.mean
    carried = member if masked_out == "zero" else member | ~valid
    return WhitenResult(torch.where(carried, y, 0.0), whole.n, whole.mean, var, rstd)
