"""Planted bugs in group_filter@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant


@mutant("GF-01", origin="biased std declared unbiased")
def biased(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "ddof": 0})


@mutant(
    "GF-01",
    "GF-05",
    "GF-06",
    "GF-08",
    "GF-11",
    origin="group boundary off by one: the first member goes to the group before",
)
def boundary_off_by_one(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    group = rest["group"]
    if isinstance(group, Tensor):
        return reference(rewards, **rest)
    at = torch.arange(rewards.shape[0], device=rewards.device)
    return reference(rewards, **{**rest, "group": (at - 1).clamp(min=0) // group})


@mutant("GF-02", origin="a mean that is summed and divided: 12 times 12.3 has a spread")
def unshifted_mean(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, size = reference(rewards, **rest), rest["group"]
    if isinstance(size, Tensor) or rewards.dim() == 2 or rest.get("rule", "std") != "std" or rest.get("threshold"):
        return out
    x = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, size)
    spread = ((x - x.cumsum(1)[:, -1:] / size).square().sum(1) > 0).repeat_interleave(size)
    whole = rest.get("valid") is None and bool(rewards.isfinite().all()) and rest.get("min_members", 1) <= size
    return replace(out, group_keep=spread, keep=spread) if whole and size > 1 else out


@mutant("GF-03", "GF-01", "GF-05", origin="rewards added before they are judged (SkyRL #2104)")
def judges_the_sum(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards.sum(1) if rewards.dim() == 2 else rewards, **rest)


@mutant(
    "GF-04",
    "GF-01",
    "GF-05",
    "GF-06",
    "GF-08",
    origin="groups are runs of equal ids: rollouts that return out of order fall apart",
)
def groups_are_runs(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    group = rest["group"]
    if isinstance(group, Tensor) and group.numel():
        new = torch.cat([group[:1] != group[:1], group[1:] != group[:-1]])
        rest["group"] = new.long().cumsum(0)
    return reference(rewards, **rest)


@mutant("GF-05", origin="one NaN drops its group")
def nan_is_contagious(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, group = reference(rewards, **rest), rest["group"]
    if not isinstance(group, Tensor):
        group = torch.arange(rewards.shape[0], device=rewards.device) // group
    bad = rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(1)
    poisoned = ((group[:, None] == group) & bad).any(1)
    return replace(out, keep=out.keep & ~poisoned, group_keep=out.group_keep & ~poisoned)


@mutant("GF-06", origin="as many groups as the largest id says")
def counts_ids(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, group = reference(rewards, **rest), rest["group"]
    return replace(out, groups=group.max() + 1) if isinstance(group, Tensor) and group.numel() else out


@mutant("GF-06", origin="sequences counted for groups")
def counts_sequences(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    return replace(out, kept_groups=out.kept_sequences)


@mutant("GF-07", origin="a launch of zero blocks")
def no_sequences_fail(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    if rewards.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(rewards, **rest)


@mutant("GF-08", origin="sizes never looked at: what is too long is cut", unchecked=True)
def cuts_what_is_too_long(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    valid = rest.get("valid")
    return reference(rewards, **{**rest, "valid": None if valid is None else valid[: rewards.shape[0]]})


@mutant("GF-09", "GF-05", origin="NaN replaced in the caller's tensor")
def replaces_nan_in_place(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    rewards.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return out


@mutant("GF-10", "GF-06", "GF-07", "GF-12", origin="a count by atomics that starts from what the last call left")
def differs_from_call_to_call(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    out = reference(rewards, **rest)
    return replace(out, kept_groups=out.kept_groups + differs_from_call_to_call.calls % 2)  # type: ignore[attr-defined]


@mutant("GF-11", origin="the last block of a large batch is never reached")
def drops_the_last_block(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    reached = torch.arange(rewards.shape[0], device=rewards.device) < max(64, rewards.shape[0] - 4)
    return replace(out, keep=out.keep & reached)


@mutant("GF-12", origin="the host asks whether a group is left")
def asks_the_host(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    return out if bool(out.keep.any()) else replace(out, keep=torch.zeros_like(out.keep))
