"""Planted bugs in shape_rewards@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.spec.shape_rewards import ShapedRewards


@mutant("SR-01", "SR-02", "SR-04", "SR-05", origin="k3 of the other direction: exp(d) - 1 - d")
def reversed_k3(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    if rest.get("kl") == "k3":
        rest["logprob"], rest["ref_logprob"] = rest["ref_logprob"], rest["logprob"]
    return reference(rewards, **rest)


@mutant("SR-01", "SR-02", "SR-04", "SR-08", "SR-13", origin="biased std declared unbiased")
def biased(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "ddof": 0})


@mutant("SR-02", "SR-04", "SR-08", origin="clipped after the normalisation")
def clips_last(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    if rest.get("clip") is None or rest.get("normalize", "none") == "none":
        return reference(rewards, **rest)
    names = ("normalize", "running", "center", "ddof", "eps", "process_group")
    first = reference(rewards, **{n: rest[n] for n in names if n in rest})
    other = {n: x for n, x in rest.items() if n not in names}
    return replace(reference(first.rewards.to(rewards.dtype), **other), running=first.running)


@mutant("SR-03", origin="on the last column, whatever the mask says there")
def reward_on_the_last_column(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    if rewards.dim() != 1 or out.rewards.dim() != 2 or rest.get("mask") is None or not out.rewards.shape[1]:
        return out
    x = out.rewards.sum(1)
    only = rest.get("kl", "none") == "none"
    return replace(out, rewards=torch.cat([torch.zeros_like(out.rewards[:, 1:]), x[:, None]], 1)) if only else out


@mutant("SR-04", origin="masks that multiply: NaN * 0 is NaN")
def mask_multiplies(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, lp, mask = reference(rewards, **rest), rest.get("logprob"), rest.get("mask")
    return out if lp is None or mask is None else replace(out, rewards=out.rewards + 0.0 * (lp * ~mask))


@mutant("SR-05", origin="exp(-d) - 1 + d, as it is written")
def k3_by_subtraction(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    if rest.get("kl") != "k3" or rest.get("mask") is not None or rest.get("cu_seqlens") is not None:
        return out
    d = (rest["logprob"] - rest["ref_logprob"]).to(out.rewards.dtype)
    naive = torch.exp(-d) - 1 + d
    exact = torch.expm1(-d) + d
    return replace(out, rewards=out.rewards + rest["kl_coef"] * (exact - naive))


@mutant("SR-06", origin="the running state holds the last batch only")
def forgets_the_past(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "running": None})


@mutant("SR-07", "SR-01", "SR-02", "SR-04", "SR-08", origin="the penalty starts at max_length")
def penalty_starts_late(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    limit, buffer = rest.get("max_length"), rest.get("overlong_buffer")
    if limit is None or buffer is None:
        return reference(rewards, **rest)
    return reference(rewards, **{**rest, "max_length": limit + buffer})


@mutant("SR-08", origin="one NaN in the moments of the batch")
def nan_is_contagious(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    return out if rest.get("normalize", "none") == "none" else replace(out, rewards=out.rewards + 0.0 * rewards.sum())


@mutant("SR-08", origin="NaN replaced by 0: the advantage takes a failed verifier for a wrong answer")
def nan_becomes_zero(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards.nan_to_num(nan=0.0) if rewards.dim() == 1 else rewards, **rest)


@mutant("SR-09", origin="a running state that is updated in place")
def state_in_place(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, state = reference(rewards, **rest), rest.get("running")
    if state is not None:
        for name in ("count", "mean", "m2"):
            getattr(state, name).copy_(getattr(out.running, name))
    return out


@mutant("SR-10", origin="a negative factor taken for a reward", unchecked=True)
def negative_factor_is_taken(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "overlong_factor": abs(rest.get("overlong_factor", 1.0))})


@mutant(
    "SR-11",
    "SR-01",
    "SR-02",
    "SR-03",
    "SR-06",
    "SR-07",
    "SR-12",
    "SR-13",
    origin="floating atomics, declared deterministic",
)
def differs_from_call_to_call(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    out: ShapedRewards = reference(rewards, **rest)
    return replace(out, rewards=out.rewards * (1.0 + 2**-22 * (differs_from_call_to_call.calls % 2)))  # type: ignore[attr-defined]


@mutant("SR-13", origin="moments of the rank at hand: data parallel runs differ from one rank")
def local_moments(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "process_group": None})


@mutant("SR-12", origin="the host reads how many tokens there are")
def asks_the_host(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    mask = rest.get("mask")
    if mask is not None and int(mask.sum()) == 0:
        rest["kl_coef"] = rest.get("kl_coef", 0.0)
    return reference(rewards, **rest)
