"""Planted bugs in group_filter@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.group_filter import GroupFilterCall, GroupFilterResult


def first_member_before(call: GroupFilterCall) -> int | Tensor:
    if isinstance(call.group, Tensor):
        return call.group
    at = torch.arange(call.rewards.shape[0], device=call.rewards.device)
    return (at - 1).clamp(min=0) // call.group


def unshifted_mean(right: Run, call: GroupFilterCall) -> GroupFilterResult:
    out, size, rewards = right(call), call.group, call.rewards
    if isinstance(size, Tensor) or rewards.dim() == 2 or call.rule != "std" or call.threshold:
        return out
    if call.valid is not None or not rewards.isfinite().all() or call.min_members > size or size < 2:
        return out
    x = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, size)
    spread = ((x - x.cumsum(1)[:, -1:] / size).square().sum(1) > 0).repeat_interleave(size)
    return replace(out, group_keep=spread, keep=spread)


def runs(group: Any) -> Any:
    """Groups numbered by runs of equal ids."""
    if not isinstance(group, Tensor) or not group.numel() or group.is_floating_point():
        return group
    return torch.cat([group[:1] != group[:1], group[1:] != group[:-1]]).long().cumsum(0)


def nan_is_contagious(right: Run, call: GroupFilterCall) -> GroupFilterResult:
    out, group, rewards = right(call), call.group, call.rewards
    if not isinstance(group, Tensor):
        group = torch.arange(rewards.shape[0], device=rewards.device) // group
    bad = rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(1)
    poisoned = ((group[:, None] == group) & bad).any(1)
    return replace(out, keep=out.keep & ~poisoned, group_keep=out.group_keep & ~poisoned)


def largest_id(call: GroupFilterCall, out: GroupFilterResult) -> Any:
    return call.group.max() + 1 if isinstance(call.group, Tensor) and call.group.numel() else out.groups


def within_reach(call: GroupFilterCall, out: GroupFilterResult) -> Tensor:
    N = call.rewards.shape[0]
    return out.keep & (torch.arange(N, device=call.rewards.device) < max(64, N - 4))


BUGS: Final = {
    "biased": Bug("GF-01", "biased std declared unbiased", plant.given(ddof=0)),
    "boundary_off_by_one": Bug(
        "GF-01",
        "group boundary off by one: the first member goes to the group before",
        plant.given(group=first_member_before),
    ),
    "unshifted_mean": Bug("GF-02", "a mean that is summed and divided: 12 times 12.3 has a spread", unshifted_mean),
    "judges_the_sum": Bug(
        "GF-03",
        "rewards added before they are judged (SkyRL #2104)",
        plant.maps(rewards=lambda r: r.sum(1) if r.dim() == 2 else r),
    ),
    "groups_are_runs": Bug(
        "GF-04", "groups are runs of equal ids: rollouts that return out of order fall apart", plant.maps(group=runs)
    ),
    "nan_is_contagious": Bug("GF-05", "one NaN drops its group", nan_is_contagious),
    "counts_ids": Bug("GF-06", "as many groups as the largest id says", plant.returns(groups=largest_id)),
    "counts_sequences": Bug(
        "GF-06", "sequences counted for groups", plant.returns(kept_groups=lambda c, o: o.kept_sequences)
    ),
    "no_sequences_fail": Bug("GF-07", "a launch of zero blocks", plant.fails_if(lambda c: c.rewards.numel() == 0)),
    "cuts_what_is_too_long": plant.lenient(
        "GF-08",
        "sizes never looked at: what is too long is cut",
        lambda c: c if c.valid is None else replace(c, valid=c.valid[: c.rewards.shape[0]]),
    ),
    "replaces_nan_in_place": Bug(
        "GF-09",
        "NaN replaced in the caller's tensor",
        plant.writes(lambda c: c.rewards.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)),
    ),
    "differs_from_call_to_call": Bug(
        "GF-10",
        "a count by atomics that starts from what the last call left",
        plant.alternates(plant.returns(kept_groups=lambda c, o: o.kept_groups + 1)),
    ),
    "drops_the_last_block": Bug(
        "GF-11", "the last block of a large batch is never reached", plant.returns(keep=within_reach)
    ),
    "asks_the_host": Bug("GF-12", "the host asks whether a group is left", plant.reads_back(lambda c, o: o.keep.any())),
}
