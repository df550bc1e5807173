"""group_filter@1 in plain torch."""

from __future__ import annotations

import torch

from rlkernel_common.moments import variance
from rlkernel_core.spec.group_filter import GroupFilterCall, GroupFilterResult
from rlkernel_torch.advantage.groups import Groups
from rlkernel_torch.advantage.outcome import Deviations, count_distinct


@torch.no_grad()
def group_filter(call: GroupFilterCall) -> GroupFilterResult:
    """See `rlkernel_core.spec.group_filter.GroupFilterCall`."""
    rewards = call.rewards
    rewards = rewards.detach()
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    columns = rewards[:, None] if rewards.dim() == 1 else rewards
    groups = Groups.of(call.group, columns.shape[0], columns.device)
    chosen = torch.ones_like(columns[:, :1].sum(1), dtype=torch.bool) if call.valid is None else call.valid
    passed, members = [], []
    for x in columns.unbind(1):
        member = chosen & x.isfinite()
        members.append(member)
        d = Deviations.of(torch.where(member, x, 0.0), groups, member)
        if call.rule == "std":
            ok = variance(d.m2, d.count, call.ddof).sqrt() > call.threshold
        elif call.rule == "mean":
            ok = (d.mean > call.low) & (d.mean < call.high)
        else:
            ok = count_distinct(groups, d.x, member) > 1
        passed.append(ok & (d.count >= call.min_members))
    votes, counted = torch.stack(passed, 1), torch.stack(members, 1)
    group_keep = votes.any(1) if call.combine == "any" else votes.all(1)
    keep = group_keep & counted.any(1)
    every = torch.ones_like(group_keep)
    head = groups.heads(every)
    return GroupFilterResult(keep, group_keep, (head & group_keep).sum(), keep.sum(), head.sum())
