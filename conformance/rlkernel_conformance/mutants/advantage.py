"""Planted bugs in advantage@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant


@mutant("AD-01", origin="the trace clipped where the ratio is")
def one_clip_for_both(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    both = rest["kind"] == "vtrace"
    return reference(rewards, **{**rest, "trace_clip": rest["ratio_clip"]} if both else rest)


@mutant("AD-01", "AD-14", origin="eps inside the root, where the definition adds it to the std (RL-Kernel)")
def eps_in_the_wrong_place(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    other = {"std_add": "var_add", "var_add": "std_add"}
    mode = rest.get("eps_mode", "std_add")
    takes = rest["kind"] in {"grpo", "gdpo", "passk"}
    return reference(rewards, **{**rest, "eps_mode": other.get(mode, mode)} if takes else rest)


@mutant("AD-01", "AD-14", origin="biased std declared unbiased")
def biased(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    takes = rest["kind"] in {"grpo", "gdpo", "passk"}
    return reference(rewards, **{**rest, "ddof": 0} if takes else rest)


@mutant("AD-01", "AD-11", "AD-12", "AD-14", "AD-24", origin="the baseline of prompts[0] for all")
def one_group_for_all(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    group = rest.get("group")
    return reference(rewards, **{**rest, "group": torch.zeros_like(group)} if isinstance(group, Tensor) else rest)


@mutant("AD-01", origin="weights of sequences left to the loss, which has none")
def weights_do_not_count(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "weights": None})


@mutant("AD-01", origin="leave one out, with the one left in")
def counts_itself(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "leave_one_out": False})


@mutant("AD-01", origin="the length of the padded row instead of the number of valid tokens")
def adapts_to_the_padding(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    alpha = rest.get("length_adaptive")
    if alpha is None:
        return reference(rewards, **rest)
    lam = 1 - 1 / max(alpha * rewards.shape[-1], 1.0)
    return reference(rewards, **{**rest, "length_adaptive": None, "lam": lam})


@mutant("AD-02", origin="group boundary off by one: start + 1")
def boundary_off_by_one(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    bounds = rest.get("cu_seqlens")
    if bounds is not None and bounds.shape[0] > 2:
        rest["cu_seqlens"] = torch.cat([bounds[:1], (bounds[1:-1] + 1).minimum(bounds[-1]), bounds[-1:]])
    return reference(rewards, **rest)


@mutant("AD-03", "AD-01", "AD-06", "AD-08", "AD-09", origin="masked tokens are steps (OpenRLHF, TRL, ROLL #447)")
def masked_tokens_are_steps(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    number = not isinstance(rest.get("lam"), Tensor) and rest.get("turns") is None
    steps = rest["kind"] in {"gae", "returns", "reinforce_pp"} and rest.get("mask") is not None and number
    return reference(rewards, **{**rest, "masked_time": "step"} if steps else rest)


@mutant("AD-03", "AD-01", "AD-06", "AD-08", "AD-09", origin="carry through masks reset")
def carry_is_reset(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    steps = rest["kind"] in {"gae", "returns", "reinforce_pp"} and rest.get("turns") is None
    return reference(rewards, **{**rest, "masked_time": "reset"} if steps else rest)


@mutant("AD-04", "AD-13", "AD-22", origin="masks that multiply: NaN * 0 is NaN")
def mask_multiplies(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, mask = reference(rewards, **rest), rest.get("mask")
    if mask is None or rewards.shape != mask.shape:
        return out
    leak = 0.0 * (rewards.detach() * ~mask).sum(-1)
    return replace(out, advantages=out.advantages + (leak if out.advantages.dim() == 1 else leak[..., None]))


@mutant("AD-05", origin="`lam or 1.0`: a lambda of 0 is taken for none")
def zero_is_taken_for_none(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    lam = rest.get("lam", 1.0)
    return reference(rewards, **{**rest, "lam": lam if isinstance(lam, Tensor) else lam or 1.0})


@mutant(
    "AD-06",
    "AD-01",
    "AD-05",
    "AD-08",
    "AD-09",
    "AD-10",
    "AD-19",
    origin="the bootstrap value stands at the last step, not behind it: not discounted",
)
def bootstrap_is_not_discounted(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    end, gamma = rest.get("bootstrap"), rest.get("gamma", 1.0)
    return reference(rewards, **{**rest, "bootstrap": end if end is None or not gamma else end / gamma})


@mutant(
    "AD-07",
    "AD-01",
    "AD-03",
    "AD-04",
    "AD-06",
    "AD-08",
    "AD-09",
    origin="the flag of the next observation (CleanRL) read as that of the step",
)
def done_one_step_late(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    done = rest.get("dones")
    if done is not None and done.numel():
        rest["dones"] = torch.cat([torch.zeros_like(done[..., :1]), done[..., :-1]], -1)
    return reference(rewards, **rest)


@mutant("AD-08", origin="the lambda of the state at hand, not of the next one")
def lambda_one_step_late(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    lam = rest.get("lam")
    if isinstance(lam, Tensor) and lam.shape == rewards.shape and lam.dim() == 2 and lam.numel():
        rest["lam"] = torch.cat([lam[:, :1], lam[:, :-1]], 1)
    return reference(rewards, **rest)


@mutant("AD-09", origin="one lambda for both outputs")
def lam_value_ignored(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "lam_value": None})


@mutant("AD-10", origin="every token a step, though turns are given")
def turns_ignored(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "turns": None})


@mutant(
    "AD-11",
    "AD-16",
    origin="the rounding noise of the mean over a std of rounding noise: constant groups not exactly zero",
)
def unshifted_mean(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "constant": "peer"} if rest["kind"] == "grpo" else rest)


@mutant("AD-12", "AD-01", "AD-14", origin="the std of one value with ddof 1: 0 / 0")
def nan_for_a_group_of_one(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    count = out.stats.group_count
    if rest["kind"] != "grpo" or count is None or out.advantages.dim() == 2:
        return out
    return replace(out, advantages=torch.where((count == 1) & ~out.stats.invalid, torch.nan, out.advantages))


@mutant("AD-13", "AD-11", "AD-22", origin="NaN reward contagious (trl #5773)")
def nan_is_contagious(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, mask = reference(rewards, **rest), rest.get("mask")
    kept = rewards if mask is None or mask.shape != rewards.shape else torch.where(mask, rewards, 0)
    return replace(out, advantages=out.advantages + 0.0 * kept.detach().sum())


@mutant("AD-13", origin="an invalid sequence gets 0 and nobody is told")
def invalid_is_not_flagged(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    return replace(out, stats=replace(out.stats, invalid=torch.zeros_like(out.stats.invalid)))


@mutant("AD-14", origin="one mask for both: who is not trained is not counted")
def one_mask_for_both(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    counted, trained = rest.get("in_stats"), rest.get("in_loss")
    return reference(
        rewards, **{**rest, "in_stats": counted & trained if counted is not None and trained is not None else counted}
    )


@mutant("AD-15", "AD-01", "AD-14", origin="groups are runs of equal ids: rollouts that return out of order fall apart")
def groups_are_runs(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    group = rest.get("group")
    if isinstance(group, Tensor) and group.numel() and not group.is_floating_point():
        rest["group"] = torch.cat([group[:1] != group[:1], group[1:] != group[:-1]]).long().cumsum(0)
    return reference(rewards, **rest)


@mutant("AD-16", origin="one-pass variance, E[x^2] - E[x]^2 (RL-Kernel, slime)")
def one_pass_variance(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    if rest["kind"] != "grpo" or out.advantages.dim() == 2 or out.stats.group_mean is None:
        return out
    mean, std = out.stats.group_mean.double(), out.stats.group_std.double()
    var = (mean.square() + std.square()).float() - mean.float().square()
    far = (mean.abs() > 100) & (std > 0)
    wrong = out.advantages * std / (var.clamp(min=0.0).sqrt() + 1e-6)
    return replace(out, advantages=torch.where(far, wrong.to(out.advantages.dtype), out.advantages))


@mutant("AD-17", "AD-01", origin="whitening with the biased std")
def whitened_biased(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "whiten_ddof": 0})


@mutant("AD-17", origin="deferred moments with the std for its reciprocal")
def deferred_std(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    if rest.get("whiten") != "defer":
        return out
    return replace(out, stats=replace(out.stats, rstd=out.stats.var.sqrt()))


@mutant("AD-18", origin="moments of the rank at hand: data parallel runs differ from one rank")
def local_moments(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "process_group": None})


@mutant("AD-19", "AD-01", origin="bf16 carry: the state has the dtype of the loads")
def bf16_carry(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    return replace(out, advantages=out.advantages.bfloat16().float()) if rewards.dtype == torch.bfloat16 else out


@mutant("AD-12", origin="singleton='error' taken for 'zero': a prompt sampled once trains nothing, unseen")
def a_group_of_one_passes(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "singleton": "zero"} if rest.get("singleton") == "error" else rest)


@mutant("AD-20", origin="the graph of the rewards is kept: the loss trains its own advantages")
def results_require_grad(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    if not rewards.requires_grad:
        return out
    return replace(out, advantages=out.advantages + (rewards - rewards.detach()).sum())


@mutant("AD-21", origin="masked rewards zeroed in the caller's tensor")
def zeroes_in_place(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out, mask = reference(rewards, **rest), rest.get("mask")
    if mask is not None and mask.shape == rewards.shape and not rewards.requires_grad:
        rewards.masked_fill_(~mask, 0)
    return out


@mutant("AD-22", "AD-02", origin="a launch of zero blocks")
def no_rows_fail(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    if rewards.shape[0] == 0 and rest.get("process_group") is None:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(rewards, **rest)


@mutant("AD-23", origin="numbers clamped instead of refused", unchecked=True)
def gamma_is_clamped(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    return reference(rewards, **{**rest, "gamma": min(max(0.0, rest.get("gamma", 1.0)), 1.0)})


@mutant("AD-24", origin="a split over time that depends on how many rows fill the device")
def depends_on_the_batch(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    return replace(out, advantages=out.advantages * (1.0 + 2**-22 * (rewards.shape[0] > 100)))


@mutant("AD-25", "AD-01", "AD-24", "AD-26", origin="floating atomics, declared deterministic")
def differs_from_call_to_call(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    out = reference(rewards, **rest)
    return replace(out, advantages=out.advantages * (1.0 + 2**-22 * (differs_from_call_to_call.calls % 2)))  # type: ignore[attr-defined]


@mutant("AD-26", origin="the host asks whether any reward is invalid")
def asks_the_host(reference: Any, rewards: Tensor, **rest: Any) -> Any:
    out = reference(rewards, **rest)
    return out if bool(out.stats.invalid.any()) else replace(out, advantages=out.advantages + 0.0)
