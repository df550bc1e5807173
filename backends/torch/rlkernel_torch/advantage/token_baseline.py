"""Optimal token baseline: the one kind whose statistics are per (group, time).

    G_t = sum of r from t on,  W_t = sum up to t of (1 - 2 pi + sum pi^2),  over valid tokens
    b_t = sum_j G_j,t W_j,t / (sum_j W_j,t + eps) over the members j that have a valid token at t
    A_t = G_t - b_t;  b = 0 for a group of one

W estimates the squared norm of the score, so b minimizes the variance of the gradient at time t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_torch.advantage.call import Estimate, Prepared
from rlkernel_torch.advantage.groups import Groups
from rlkernel_torch.advantage.layout import inclusive


def token_baseline(call: Prepared) -> Estimate:
    """Advantages and returns as rows [B, T]."""
    layout = call.layout
    if layout is None:
        raise RuntimeError("otb was let through without tokens")
    rewards, outcome = call.rewards, None
    if not call.extent.token_rewards:
        last, _ = layout.last()
        outcome, rewards = rewards, torch.where(last, layout.spread(rewards), 0.0)
    bad = ~(rewards.isfinite() & call["logprob"].isfinite() & call["sum_pi_squared"].isfinite()) & layout.valid
    invalid = bad.any(-1)
    if outcome is not None:
        invalid = invalid | ~outcome.isfinite()
    layout = layout.only(layout.valid & ~invalid[:, None])
    ones = torch.ones_like(rewards)
    togo = layout.select(inclusive(layout, ones, rewards))
    score = 1.0 - 2.0 * call["logprob"].exp() + call["sum_pi_squared"]
    # The running sum is the suffix sum of the reversed row.
    norm = inclusive(layout.only(layout.valid.flip(-1)), ones, score.flip(-1)).flip(-1)
    member = ~invalid & call.chosen("in_stats")
    norm = torch.where(layout.valid & member[:, None], norm, 0.0)
    groups = Groups.of(call["group"], call.extent.sequences, rewards.device)
    weight = _columns(groups, norm) + call["eps"]  # 0 where eps is, and no member has a score
    baseline = _columns(groups, togo * norm) / torch.where(weight == 0, 1.0, weight)
    members = groups.total(member.to(torch.int64))
    baseline = torch.where(members[:, None] > 1, baseline, 0.0)
    return Estimate(layout.select(togo - baseline), invalid, togo, stats={"group_count": members})


def _columns(groups: Groups, x: Tensor) -> Tensor:  # [B, T] -> [B, T]
    """Sum over the group in every column."""
    return groups.total(x.transpose(0, 1)).transpose(0, 1)
