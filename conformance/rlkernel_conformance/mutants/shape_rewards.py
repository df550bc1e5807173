"""Planted bugs in shape_rewards@1."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.shape_rewards import ShapedRewards, ShapeRewardsCall

_NORMALIZING: Final = ("normalize", "running", "center", "ddof", "eps", "process_group")


def reversed_k3(right: Run, call: ShapeRewardsCall) -> ShapedRewards:
    back = call.kl == "k3"
    return right(replace(call, logprob=call.ref_logprob, ref_logprob=call.logprob) if back else call)


def clips_last(right: Run, call: ShapeRewardsCall) -> ShapedRewards:
    if call.clip is None or call.normalize == "none":
        return right(call)
    of_norm = {n: getattr(call, n) for n in _NORMALIZING}
    first = right(ShapeRewardsCall(call.rewards, **of_norm))
    defaults = {f.name: f.default for f in fields(call) if f.name in _NORMALIZING}
    return replace(
        right(replace(call, rewards=first.rewards.to(call.rewards.dtype), **defaults)), running=first.running
    )


def on_the_last_column(call: ShapeRewardsCall, out: ShapedRewards) -> Tensor:
    r = out.rewards
    if call.rewards.dim() != 1 or r.dim() != 2 or call.mask is None or not r.shape[1] or call.kl != "none":
        return r
    return torch.cat([torch.zeros_like(r[:, 1:]), r.sum(1, keepdim=True)], 1)


def mask_multiplies(call: ShapeRewardsCall, out: ShapedRewards) -> Tensor:
    absent = call.logprob is None or call.mask is None
    return out.rewards if absent else out.rewards + 0.0 * (call.logprob * ~call.mask)  # type: ignore[operator]


def k3_by_subtraction(call: Any, out: ShapedRewards) -> Tensor:
    if call.kl != "k3" or call.mask is not None or call.cu_seqlens is not None:
        return out.rewards
    d = (call.logprob - call.ref_logprob).to(out.rewards.dtype)
    return out.rewards + call.kl_coef * ((torch.expm1(-d) + d) - (torch.exp(-d) - 1 + d))


def late_limit(call: ShapeRewardsCall) -> int | None:
    absent = call.max_length is None or call.overlong_buffer is None
    return call.max_length if absent else call.max_length + call.overlong_buffer  # type: ignore[operator]


def nan_is_contagious(call: ShapeRewardsCall, out: ShapedRewards) -> Tensor:
    return out.rewards if call.normalize == "none" else out.rewards + 0.0 * call.rewards.sum()


def state_in_place(right: Run, call: ShapeRewardsCall) -> ShapedRewards:
    out, state = right(call), call.running
    if state is not None:
        for name in ("count", "mean", "m2"):
            getattr(state, name).copy_(getattr(out.running, name))
    return out


BUGS: Final = {
    "reversed_k3": Bug("SR-01", "k3 of the other direction: exp(d) - 1 - d", reversed_k3),
    "biased": Bug("SR-01", "biased std declared unbiased", plant.given(ddof=0)),
    "clips_last": Bug("SR-02", "clipped after the normalization", clips_last),
    "reward_on_the_last_column": Bug(
        "SR-03", "on the last column, whatever the mask says there", plant.returns(rewards=on_the_last_column)
    ),
    "mask_multiplies": Bug("SR-04", "masks that multiply: NaN * 0 is NaN", plant.returns(rewards=mask_multiplies)),
    "k3_by_subtraction": Bug("SR-05", "exp(-d) - 1 + d, as it is written", plant.returns(rewards=k3_by_subtraction)),
    "forgets_the_past": Bug("SR-06", "the running state holds the last batch only", plant.ignores("running")),
    "penalty_starts_late": Bug("SR-07", "the penalty starts at max_length", plant.given(max_length=late_limit)),
    "nan_is_contagious": Bug("SR-08", "one NaN in the moments of the batch", plant.returns(rewards=nan_is_contagious)),
    "nan_becomes_zero": Bug(
        "SR-08",
        "NaN replaced by 0: the advantage takes a failed verifier for a wrong answer",
        plant.maps(rewards=lambda r: r.nan_to_num(nan=0.0) if r.dim() == 1 else r),
    ),
    "state_in_place": Bug("SR-09", "a running state that is updated in place", state_in_place),
    "negative_factor_is_taken": plant.lenient("SR-10", "a negative factor taken for a reward", overlong_factor=abs),
    "differs_from_call_to_call": plant.nondeterministic("SR-11", "rewards"),
    "local_moments": Bug(
        "SR-13", "moments of the rank at hand: data parallel runs differ from one rank", plant.ignores("process_group")
    ),
    "asks_the_host": Bug(
        "SR-12",
        "the host reads how many tokens there are",
        plant.reads_back(lambda c, o: None if c.mask is None else c.mask.sum()),
    ),
}
