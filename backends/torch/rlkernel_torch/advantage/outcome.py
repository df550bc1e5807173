"""Kinds with one number per sequence: its reward against those of its group.

Statistics are shifted: the first member of a group is subtracted before anything is summed, so that a constant group
has deviations of exactly 0 and a large offset costs no precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_common.moments import Moments, reciprocal, variance
from rlkernel_torch.advantage.groups import Groups, order_by


@dataclass(frozen=True)
class Rule:
    """How deviations are scaled, and what happens to groups that cannot be."""

    scale: str = "none"  # "group" | "batch" | "none"
    ddof: int = 1
    eps: float = 1e-6
    eps_mode: str = "std_add"
    min_std: float = 0.0
    low_std: str = "zero"
    singleton: str = "zero"
    constant: str = "zero"
    leave_one_out: bool = False


@dataclass(frozen=True)
class Deviations:
    """Rewards against their groups; all [B]."""

    groups: Groups
    x: Tensor  # finite where member
    member: Tensor  # bool: counts in the statistics
    count: Tensor  # members of the group
    shift: Tensor  # what was subtracted before summing
    moved_mean: Tensor  # mean of x - shift
    dev: Tensor  # x - mean
    m2: Tensor

    @classmethod
    def of(cls, x: Tensor, groups: Groups, member: Tensor, *, shifted: bool = True) -> Deviations:
        """Two passes over the members of each group."""
        count = groups.total(member.to(x.dtype))
        shift = groups.first(x, member) if shifted else torch.zeros_like(x)
        moved = x - shift
        moved_mean = groups.total(torch.where(member, moved, 0.0)) / count.clamp(min=1.0)
        dev = moved - moved_mean
        m2 = groups.total(torch.where(member, dev, 0.0).square())
        return cls(groups, x, member, count, shift, moved_mean, dev, m2)

    @property
    def mean(self) -> Tensor:
        """Mean of the members."""
        return self.shift + self.moved_mean

    @property
    def others(self) -> Tensor:
        """How many members the group has besides this sequence."""
        return self.count - self.member.to(self.x.dtype)

    def from_others(self) -> Tensor:
        """Distance from the mean of the other members: n / (n - 1) times the deviation of a member."""
        return torch.where(self.member, self.dev * (self.count / self.others.clamp(min=1.0)), self.dev)

    def others_variance(self, ddof: int) -> Tensor:
        """Variance of the other members; exactly 0 where they are all equal."""
        without = self.m2 - self.dev.square() * (self.count / self.others.clamp(min=1.0))
        m2 = torch.where(self.member, without, self.m2).clamp(min=0.0)
        return torch.where(_others_equal(self), 0.0, variance(m2, self.others, ddof))

    def constant(self) -> Tensor:
        """All members have the same reward."""
        low, high = _extremes(self)
        return (self.count > 0) & (low[0] == high[0])


def estimate(kind: str, d: Deviations, rule: Rule, *, lengths: Tensor | None, batch: Moments | None) -> Tensor:
    """Advantage of each sequence by a kind over groups; singletons by the rule, the rest of the policy is elsewhere."""
    alone = d.count < 2
    if kind == "passk":
        best, second, winner = d.groups.best_two(d.x, d.member)
        return torch.where(winner & ~alone, _scaled(best - second, d, rule, batch), 0.0)
    if kind == "rloo" or rule.leave_one_out:
        dev = d.from_others()
    elif kind == "opo":
        dev = _length_weighted(d, lengths)
    else:
        dev = d.dev
    if kind == "maxrl":
        mean = d.mean + rule.eps
        scaled = torch.where(mean == 0, 0.0, dev / torch.where(mean == 0, 1.0, mean))
        raw = d.x
    else:
        scaled = _scaled(dev, d, rule, batch)
        raw = d.x if rule.scale == "none" else d.x * reciprocal(torch.ones_like(d.x), rule.eps, rule.eps_mode)
    lone = raw if rule.singleton == "raw" else torch.zeros_like(raw)
    return torch.where(alone, torch.where(d.count > 0, lone, 0.0), scaled)


def _scaled(dev: Tensor, d: Deviations, rule: Rule, batch: Moments | None) -> Tensor:
    if rule.scale == "none":
        return dev
    if batch is not None:
        var = batch.variance(rule.ddof).expand_as(dev)
    elif rule.leave_one_out:
        var = d.others_variance(rule.ddof)
    else:
        var = variance(d.m2, d.count, rule.ddof)
    scaled = dev * reciprocal(var, rule.eps, rule.eps_mode)
    low = var.sqrt() <= rule.min_std
    if rule.constant == "peer" and rule.min_std == 0.0 and rule.low_std == "zero":
        return scaled
    return torch.where(low, dev if rule.low_std == "center" else 0.0, scaled)


def _length_weighted(d: Deviations, lengths: Tensor | None) -> Tensor:
    """Distance from sum(L x) / sum(L) over the members of the group."""
    weight = torch.where(d.member, torch.ones_like(d.x) if lengths is None else lengths.to(d.x.dtype), 0.0)
    tokens = d.groups.total(weight)
    moved = torch.where(d.member, d.x - d.shift, 0.0)
    mean = d.groups.total(weight * moved) / torch.where(tokens > 0, tokens, 1.0)
    return torch.where(tokens > 0, (d.x - d.shift) - mean, d.dev)


def _extremes(d: Deviations) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(smallest, second smallest) and (largest, second largest) of the members of each group."""
    high, high_next, _ = d.groups.best_two(d.x, d.member)
    low, low_next, _ = d.groups.best_two(-d.x, d.member)
    return (-low, -low_next), (high, high_next)


def _others_equal(d: Deviations) -> Tensor:
    """The members other than this sequence all have one reward."""
    (low, low_next), (high, high_next) = _extremes(d)
    # Without one of the smallest the least is the next one; so too at the other end.
    least = torch.where(d.member & (d.x == low), low_next, low)
    most = torch.where(d.member & (d.x == high), high_next, high)
    return (d.others < 2) | (least == most)


def count_distinct(groups: Groups, x: Tensor, member: Tensor) -> Tensor:  # [B] int64
    """How many different values the members of each group have."""
    key = torch.where(member, x, torch.inf)
    order = order_by(*groups.ids, key)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = key[order][1:] != key[order][:-1]
    for ids in groups.ids:
        new[1:] |= ids[order][1:] != ids[order][:-1]
    return groups.total(new[torch.argsort(order)].logical_and(member).to(torch.int64))
