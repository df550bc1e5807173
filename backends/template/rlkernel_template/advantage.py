"""advantage@1 of kind "grpo": (x - mean) / std within groups of one size.

The contract, clause by clause, is `rlkernel_core.spec.advantage`; `AD` clauses of other kinds are not claimed.
B: sequences. M: groups. G: members of a group.
"""

from __future__ import annotations

import torch
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_checks import extent_of
from torch import Tensor

from .scale import factor, variance


@torch.no_grad()
def advantage(call: AdvantageCall) -> AdvantageResult:
    """Advantages of a call that the manifest covers; others do not come here."""
    extent = extent_of(call)
    x = call.rewards.float()
    if extent.token_rewards:
        x = x.sum(1)
    x = x.view(-1, call.group)  # [M, G]
    member = x.isfinite()
    n = member.sum(1, keepdim=True)
    # The first member is subtracted before anything is summed: a constant group gives exactly 0.
    shift = _first(x, member)
    away = torch.where(member, x - shift, 0.0)
    equal = ((away == 0) | ~member).all(1, keepdim=True) & (n > 0)
    moved = away.sum(1, keepdim=True) / n.clamp(min=1)
    away = torch.where(member, away - moved, 0.0)
    var = variance(away.square().sum(1, keepdim=True), n, call.ddof)
    scaled = away if call.scale == "none" else torch.where(var > 0, away * factor(var, call.eps, call.eps_mode), 0.0)
    stats = AdvantageStats(
        invalid=~member.view(-1),
        group_count=_each(n, x),
        group_mean=_each(torch.where(n > 0, shift + moved, 0.0), x),
        group_std=_each(var.sqrt(), x),
        constant=_each(equal, x),
    )
    return AdvantageResult(torch.where(member & (n > 1), scaled, 0.0).view(-1), None, stats)


def _first(x: Tensor, member: Tensor) -> Tensor:  # [M, G], [M, G] -> [M, 1]
    """The first member of each group, 0 without one."""
    if not x.numel():
        return x.new_zeros(x.shape[0], 1)
    first = x.gather(1, member.to(torch.int8).argmax(1, keepdim=True))
    return torch.where(member.any(1, keepdim=True), first, 0.0)


def _each(of_group: Tensor, x: Tensor) -> Tensor:  # [M, 1], [M, G] -> [B]
    """A number of each group for every member."""
    return of_group.expand_as(x).reshape(-1)


def self_test(device: str) -> None:
    """Raise unless 1 and 3 become -1 and 1 on this device."""
    found = advantage(AdvantageCall(torch.tensor([1.0, 3.0], device=device), kind="grpo", group=2, ddof=0, eps=0.0))
    if any(abs(f - e) > 1e-5 for f, e in zip(found.advantages.tolist(), [-1.0, 1.0], strict=True)):
        raise ValueError(f"advantages of rewards 1 and 3 are {found.advantages.tolist()}")
