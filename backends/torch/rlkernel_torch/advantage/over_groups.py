"""Kinds that give one advantage per sequence, by the rewards of its group (and remax, by its greedy rollout)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlkernel_common.moments import Moments, across_ranks, moments, variance
from rlkernel_torch.advantage.call import Estimate, Prepared
from rlkernel_torch.advantage.groups import Groups
from rlkernel_torch.advantage.outcome import Deviations, Rule, estimate


def over_groups(call: Prepared) -> Estimate:
    """Advantages [B]."""
    if call["kind"] == "gdpo":
        return _per_reward(call)
    x = call.rewards
    if call.extent.token_rewards and call.layout is not None:
        x = call.layout.totals(call.layout.rows(x))
    if call["kind"] == "remax":
        a = x - call["baseline"]
        return Estimate(a, ~a.isfinite())
    ok = _ok(x, call["valid_range"])
    d = _deviations(call, x, ok)
    a = _estimated(call, d)
    if call["kind"] == "gpg":
        # sequences / sequences with a non-zero reward, over all ranks: one over the share of the latter
        share = across_ranks(moments((x != 0).to(x.dtype), d.member), call["process_group"]).mean
        a = a / torch.where(share > 0, share, 1.0)
    if call["kind"] == "gigpo":
        a = a + call["step_weight"] * _among_equal_states(call, ok)
    return Estimate(a, ~ok, raw=_raw(call, torch.where(x.isfinite(), x, 0.0)), stats=_stats(call, d))


def _ok(x: Tensor, valid_range: tuple[float, float] | None) -> Tensor:
    ok = x.isfinite()
    return ok if valid_range is None else ok & (x >= valid_range[0]) & (x <= valid_range[1])


def _rule(call: Prepared) -> Rule:
    names = (
        "scale", "ddof", "eps", "eps_mode", "min_std", "low_std", "singleton", "constant", "leave_one_out",
    )  # fmt: skip
    return Rule(**{n: call[n] for n in names})


def _groups(call: Prepared) -> Groups:
    return Groups.of(call["group"], call.extent.sequences, call.rewards.device)


def _deviations(call: Prepared, x: Tensor, ok: Tensor) -> Deviations:
    member = ok & call.chosen("in_stats")
    return Deviations.of(torch.where(ok, x, 0.0), _groups(call), member, shifted=call["constant"] == "zero")


def _estimated(call: Prepared, d: Deviations) -> Tensor:
    batch: Moments | None = None
    if call["scale"] == "batch":
        batch = across_ranks(moments(d.x, d.member), call["process_group"])
    return estimate(call["kind"], d, _rule(call), lengths=call.tokens_per_sequence(), batch=batch)


def _raw(call: Prepared, x: Tensor) -> Tensor | None:
    return x if call["invalid"] == "raw" else None


def _stats(call: Prepared, d: Deviations) -> dict[str, Tensor]:
    return {
        "group_count": d.count.to(torch.int64),
        "group_mean": torch.where(d.count > 0, d.mean, 0.0),
        "group_std": variance(d.m2, d.count, call["ddof"]).sqrt(),
        "constant": d.constant(),
    }


def _per_reward(call: Prepared) -> Estimate:
    """GDPO: every reward normalized on its own, then summed; a reward that is not finite counts for nothing."""
    rewards = call.rewards
    weights = rewards.new_ones(rewards.shape[1]) if call["reward_weights"] is None else call["reward_weights"]
    a = raw = rewards.new_zeros(rewards.shape[0])
    invalid = torch.ones_like(a, dtype=torch.bool)
    columns: list[dict[str, Tensor]] = []
    for x, weight in zip(rewards.unbind(1), weights.unbind(), strict=True):
        ok = _ok(x, call["valid_range"])
        d = _deviations(call, x, ok)
        a = a + weight * torch.where(ok, _estimated(call, d), 0.0)
        raw = raw + weight * torch.where(x.isfinite(), x, 0.0)
        invalid = invalid & ~ok
        columns.append(_stats(call, d))
    stats = {n: torch.stack([c[n] for c in columns], 1) for n in columns[0]} if columns else {}
    return Estimate(a, invalid, raw=_raw(call, raw), stats=stats)


def _among_equal_states(call: Prepared, ok: Tensor) -> Tensor:
    """GiGPO's step advantage: against the steps of the group that were taken in the same state; alone gives 0."""
    x = call["step_rewards"]
    valid = ok & x.isfinite()
    group = _groups(call).ids[0]
    d = Deviations.of(
        torch.where(valid, x, 0.0),
        Groups(group, call["anchor"]),
        valid & call.chosen("in_stats"),
        shifted=call["constant"] == "zero",
    )
    rule = replace(_rule(call), singleton="zero")
    batch: Moments | None = None
    if call["scale"] == "batch":
        batch = across_ranks(moments(d.x, d.member), call["process_group"])
    return torch.where(valid, estimate("grpo", d, rule, lengths=None, batch=batch), 0.0)
