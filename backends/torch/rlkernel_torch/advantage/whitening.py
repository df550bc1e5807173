"""whiten@1 in plain torch."""

from __future__ import annotations

import torch

from rlkernel_common.moments import across_ranks, moments
from rlkernel_core.spec.whiten import WhitenCall, WhitenResult


@torch.no_grad()
def whiten(call: WhitenCall) -> WhitenResult:
    """See `rlkernel_core.spec.whiten.WhitenCall`."""
    x = call.x
    x = x.detach()
    x = x if x.dtype == torch.float64 else x.float()
    valid = torch.ones_like(x, dtype=torch.bool) if call.mask is None else call.mask
    if call.lengths is not None:
        valid = torch.arange(x.shape[1], device=x.device) < call.lengths.long()[:, None]
    member = valid & x.isfinite()
    whole = across_ranks(
        moments(x, member, None if call.counts is None else call.counts.reshape(-1)), call.process_group
    )
    var = whole.variance(call.ddof)
    rstd = whole.rstd(call.ddof, call.eps, call.eps_mode)
    y = x
    if call.apply:
        y = whole.centered(x) * rstd
        y = y if call.shift_mean else y + whole.mean
    carried = member if call.masked_out == "zero" else member | ~valid
    return WhitenResult(torch.where(carried, y, 0.0), whole.n, whole.mean, var, rstd)
