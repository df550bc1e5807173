"""whiten@1: values to mean 0 and variance 1, with a mask.

The contract, clause by clause, is `rlkernel_core.spec.whiten`.
"""

from __future__ import annotations

import torch
from rlkernel_core.spec.whiten import WhitenCall, WhitenResult
from torch import Tensor

from .scale import factor, variance


@torch.no_grad()
def whiten(call: WhitenCall) -> WhitenResult:
    """Whitened values of a call that the manifest covers; others do not come here."""
    x = call.x.float()
    member = x.isfinite() if call.mask is None else call.mask & x.isfinite()
    n = member.sum().float()
    # The first member is subtracted before anything is summed: a constant gives exactly 0, an offset costs nothing.
    shift = _first(x, member)
    away = torch.where(member, x - shift, 0.0)
    moved = away.sum() / n.clamp(min=1)
    away = torch.where(member, away - moved, 0.0)
    var = variance(away.square().sum(), n, call.ddof)
    rstd = torch.where(n > 0, factor(var, call.eps, call.eps_mode), 0.0)
    mean = shift + moved
    y = x
    if call.apply:
        y = away * rstd if call.shift_mean else away * rstd + mean
    return WhitenResult(torch.where(member, y, 0.0), n, mean, var, rstd)


def _first(x: Tensor, member: Tensor) -> Tensor:  # -> []
    """The first member, 0 without one."""
    if not x.numel():
        return x.new_zeros(())
    at = member.reshape(-1).to(torch.int8).argmax(keepdim=True)
    return torch.where(member.any(), x.reshape(-1)[at][0], 0.0)


def self_test(device: str) -> None:
    """Raise unless 1 and 3 become -1 and 1 on this device."""
    found = whiten(WhitenCall(torch.tensor([1.0, 3.0], device=device), ddof=0, eps=0.0)).y.tolist()
    if any(abs(f - e) > 1e-5 for f, e in zip(found, [-1.0, 1.0], strict=True)):
        raise ValueError(f"whiten of [1, 3] is {found}")
