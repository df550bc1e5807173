"""advantage@1 of kind "grpo": (x - mean) / std within groups of one size.

The contract, clause by clause, is `rlkernel_core.spec.advantage`; `AD` clauses of other kinds are not claimed.
B: sequences. M: groups. G: members of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rlkernel_core.spec.advantage import AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_checks import check
from torch import Tensor

from .scale import factor, variance

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def advantage(
    rewards: Tensor,  # [B], or [B, T] per token
    *,
    kind: str,
    group: int | Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    lam_value: float | Tensor | None = None,
    length_adaptive: float | None = None,
    bootstrap: Tensor | None = None,
    dones: Tensor | None = None,
    done_index: str = "after",
    turns: Tensor | None = None,
    ratio: Tensor | None = None,
    ratio_clip: float | None = 1.0,
    trace_clip: float | None = 1.0,
    q_values: Tensor | None = None,
    baseline: Tensor | None = None,
    in_stats: Tensor | None = None,
    in_loss: Tensor | None = None,
    valid_range: tuple[float, float] | None = None,
    weights: Tensor | None = None,
    reward_weights: Tensor | None = None,
    step_rewards: Tensor | None = None,
    anchor: Tensor | None = None,
    step_weight: float = 1.0,
    logprob: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    leave_one_out: bool = False,
    scale: str = "auto",
    ddof: int = 1,
    eps: float = 1e-6,
    eps_mode: str = "std_add",
    min_std: float = 0.0,
    low_std: str = "zero",
    singleton: str = "zero",
    constant: str = "zero",
    invalid: str = "zero",
    masked_time: str = "skip",
    masked_out: str = "zero",
    whiten: str = "auto",
    whiten_level: str = "auto",
    whiten_ddof: int = 1,
    whiten_eps: float = 1e-8,
    whiten_eps_mode: str = "var_add",
    process_group: ProcessGroup | None = None,
    reward_level: str = "auto",
    output: str = "auto",
) -> AdvantageResult:
    """Take the operator's parameters, all of them: calls that need a feature which is not claimed do not come here."""
    extent = check(locals())
    x = rewards.float()
    if extent.token_rewards:
        x = x.sum(1)
    x = x.view(-1, group)  # [M, G]
    member = x.isfinite()
    n = member.sum(1, keepdim=True)
    # The first member is subtracted before anything is summed: a constant group gives exactly 0.
    shift = _first(x, member)
    away = torch.where(member, x - shift, 0.0)
    equal = ((away == 0) | ~member).all(1, keepdim=True) & (n > 0)
    moved = away.sum(1, keepdim=True) / n.clamp(min=1)
    away = torch.where(member, away - moved, 0.0)
    var = variance(away.square().sum(1, keepdim=True), n, ddof)
    scaled = away if scale == "none" else torch.where(var > 0, away * factor(var, eps, eps_mode), 0.0)
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
    found = advantage(torch.tensor([1.0, 3.0], device=device), kind="grpo", group=2, ddof=0, eps=0.0)
    if any(abs(f - e) > 1e-5 for f, e in zip(found.advantages.tolist(), [-1.0, 1.0], strict=True)):
        raise ValueError(f"advantages of rewards 1 and 3 are {found.advantages.tolist()}")
