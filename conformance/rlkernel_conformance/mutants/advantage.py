"""Planted bugs in advantage@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.affine_suffix_scan import moved_starts
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_conformance.mutants.group_filter import runs
from rlkernel_conformance.mutants.whiten import OTHER_EPS
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageResult


def scales_by_std(call: AdvantageCall) -> bool:
    return call.kind in {"grpo", "gdpo", "passk"}


def has_steps(call: AdvantageCall) -> bool:
    return call.kind in {"gae", "returns", "reinforce_pp"} and call.turns is None


def masked_steps(call: AdvantageCall) -> bool:
    return has_steps(call) and call.mask is not None and not isinstance(call.lam, Tensor)


def adapts_to_the_padding(right: Run, call: AdvantageCall) -> AdvantageResult:
    if call.length_adaptive is None:
        return right(call)
    lam = 1 - 1 / max(call.length_adaptive * call.rewards.shape[-1], 1.0)
    return right(replace(call, length_adaptive=None, lam=lam))


def mask_multiplies(call: AdvantageCall, out: AdvantageResult) -> Tensor:
    A, mask = out.advantages, call.mask
    if mask is None or call.rewards.shape != mask.shape:
        return A
    leak = 0.0 * (call.rewards.detach() * ~mask).sum(-1)
    return A + (leak if A.dim() == 1 else leak[..., None])


def one_late(done: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(done[..., :1]), done[..., :-1]], -1)


def late_lambda(call: AdvantageCall) -> float | Tensor:
    lam = call.lam
    each = isinstance(lam, Tensor) and lam.shape == call.rewards.shape and lam.dim() == 2 and lam.numel()
    return torch.cat([lam[:, :1], lam[:, :-1]], 1) if each else lam  # type: ignore[index]


def nan_for_a_group_of_one(call: AdvantageCall, out: AdvantageResult) -> Tensor:
    members = out.stats.group_count
    if call.kind != "grpo" or members is None or out.advantages.dim() == 2:
        return out.advantages
    return torch.where((members == 1) & ~out.stats.invalid, torch.nan, out.advantages)


def nan_is_contagious(call: AdvantageCall, out: AdvantageResult) -> Tensor:
    rewards, mask = call.rewards, call.mask
    kept = rewards if mask is None or mask.shape != rewards.shape else torch.where(mask, rewards, 0)
    return out.advantages + 0.0 * kept.detach().sum()


def one_pass_variance(call: AdvantageCall, out: AdvantageResult) -> Tensor:
    A, stats = out.advantages, out.stats
    if call.kind != "grpo" or A.dim() == 2 or stats.group_mean is None or stats.group_std is None:
        return A
    mean, std = stats.group_mean.double(), stats.group_std.double()
    var = (mean.square() + std.square()).float() - mean.float().square()
    wrong = A * std / (var.clamp(min=0.0).sqrt() + 1e-6)
    return torch.where((mean.abs() > 100) & (std > 0), wrong.to(A.dtype), A)


def bf16_carry(call: AdvantageCall, out: AdvantageResult) -> Tensor:
    return out.advantages.bfloat16().float() if call.rewards.dtype == torch.bfloat16 else out.advantages


def attached(call: AdvantageCall, out: AdvantageResult) -> Tensor:
    rewards = call.rewards
    return out.advantages + (rewards - rewards.detach()).sum() if rewards.requires_grad else out.advantages


def zeroes_the_masked(call: AdvantageCall) -> None:
    mask, rewards = call.mask, call.rewards
    if mask is not None and mask.shape == rewards.shape and not rewards.requires_grad:
        rewards.masked_fill_(~mask, 0)


def forgets_dones_of_turns(call: AdvantageCall) -> bool:
    return call.turns is not None and call.dones is not None


def packed_statistics(call: AdvantageCall) -> bool:
    return call.cu_seqlens is not None and call.in_stats is not None


def many_ids(call: AdvantageCall) -> bool:
    return isinstance(call.group, Tensor) and call.group.numel() > 4096


BUGS: Final = {
    "one_clip_for_both": Bug(
        "AD-01",
        "the trace clipped where the ratio is",
        plant.where(lambda c: c.kind == "vtrace", plant.given(trace_clip=lambda c: c.ratio_clip)),
    ),
    "eps_in_the_wrong_place": Bug(
        "AD-01",
        "eps inside the root, where the definition adds it to the std (RL-Kernel)",
        plant.where(scales_by_std, plant.maps(eps_mode=OTHER_EPS)),
    ),
    "biased": Bug("AD-01", "biased std declared unbiased", plant.where(scales_by_std, plant.given(ddof=0))),
    "one_group_for_all": Bug(
        "AD-01",
        "the baseline of prompts[0] for all",
        plant.maps(group=lambda g: torch.zeros_like(g) if isinstance(g, Tensor) else g),
    ),
    "weights_do_not_count": Bug(
        "AD-01", "weights of sequences left to the loss, which has none", plant.ignores("weights")
    ),
    "counts_itself": Bug("AD-01", "leave one out, with the one left in", plant.ignores("leave_one_out")),
    "adapts_to_the_padding": Bug(
        "AD-01", "the length of the padded row instead of the number of valid tokens", adapts_to_the_padding
    ),
    "boundary_off_by_one": Bug("AD-02", "group boundary off by one: start + 1", plant.maps(cu_seqlens=moved_starts)),
    "masked_tokens_are_steps": Bug(
        "AD-03",
        "masked tokens are steps (OpenRLHF, TRL, ROLL #447)",
        plant.where(masked_steps, plant.given(masked_time="step")),
    ),
    "carry_is_reset": Bug(
        "AD-03", "carry through masks reset", plant.where(has_steps, plant.given(masked_time="reset"))
    ),
    "mask_multiplies": Bug("AD-04", "masks that multiply: NaN * 0 is NaN", plant.returns(advantages=mask_multiplies)),
    "zero_is_taken_for_none": Bug(
        "AD-05",
        "`lam or 1.0`: a lambda of 0 is taken for none",
        plant.maps(lam=lambda x: x if isinstance(x, Tensor) else x or 1.0),
    ),
    "bootstrap_is_not_discounted": Bug(
        "AD-06",
        "the bootstrap value stands at the last step, not behind it: not discounted",
        plant.given(bootstrap=lambda c: c.bootstrap if c.bootstrap is None or not c.gamma else c.bootstrap / c.gamma),
    ),
    "done_one_step_late": Bug(
        "AD-07", "the flag of the next observation (CleanRL) read as that of the step", plant.maps(dones=one_late)
    ),
    "lambda_one_step_late": Bug(
        "AD-08", "the lambda of the state at hand, not of the next one", plant.given(lam=late_lambda)
    ),
    "lam_value_ignored": Bug("AD-09", "one lambda for both outputs", plant.ignores("lam_value")),
    "turns_ignored": Bug("AD-10", "every token a step, though turns are given", plant.ignores("turns")),
    "unshifted_mean": Bug(
        "AD-11",
        "the rounding noise of the mean over a std of rounding noise: constant groups not exactly zero",
        plant.where(lambda c: c.kind == "grpo", plant.given(constant="peer")),
    ),
    "nan_for_a_group_of_one": Bug(
        "AD-12", "the std of one value with ddof 1: 0 / 0", plant.returns(advantages=nan_for_a_group_of_one)
    ),
    "nan_is_contagious": Bug("AD-13", "NaN reward contagious (trl #5773)", plant.returns(advantages=nan_is_contagious)),
    "invalid_is_not_flagged": Bug(
        "AD-13",
        "an invalid sequence gets 0 and nobody is told",
        plant.returns(stats=lambda c, o: replace(o.stats, invalid=torch.zeros_like(o.stats.invalid))),
    ),
    "one_mask_for_both": Bug(
        "AD-14",
        "one mask for both: who is not trained is not counted",
        plant.where(
            lambda c: c.in_loss is not None,
            plant.given(in_stats=lambda c: None if c.in_stats is None else c.in_stats & c.in_loss),
        ),
    ),
    "groups_are_runs": Bug(
        "AD-15", "groups are runs of equal ids: rollouts that return out of order fall apart", plant.maps(group=runs)
    ),
    "one_pass_variance": Bug(
        "AD-16", "one-pass variance, E[x^2] - E[x]^2 (RL-Kernel, slime)", plant.returns(advantages=one_pass_variance)
    ),
    "whitened_biased": Bug("AD-17", "whitening with the biased std", plant.given(whiten_ddof=0)),
    "whitening_has_one_eps": Bug("AD-17", "one place for eps, whatever is asked", plant.ignores("whiten_eps_mode")),
    "deferred_std": Bug(
        "AD-17",
        "deferred moments with the std for its reciprocal",
        plant.returns(stats=lambda c, o: replace(o.stats, rstd=o.stats.var.sqrt()) if c.whiten == "defer" else o.stats),
    ),
    "local_moments": Bug(
        "AD-18", "moments of the rank at hand: data parallel runs differ from one rank", plant.ignores("process_group")
    ),
    "bf16_carry": Bug(
        "AD-19", "bf16 carry: the state has the dtype of the loads", plant.returns(advantages=bf16_carry)
    ),
    "a_group_of_one_passes": Bug(
        "AD-12",
        "singleton='error' taken for 'zero': a prompt sampled once trains nothing, unseen",
        plant.maps(singleton={"error": "zero"}),
    ),
    "results_require_grad": Bug(
        "AD-20",
        "the graph of the rewards is kept: the loss trains its own advantages",
        plant.returns(advantages=attached),
    ),
    "zeroes_in_place": Bug("AD-21", "masked rewards zeroed in the caller's tensor", plant.writes(zeroes_the_masked)),
    "no_rows_fail": Bug(
        "AD-22",
        "a launch of zero blocks",
        plant.fails_if(lambda c: c.rewards.shape[0] == 0 and c.process_group is None),
    ),
    "gamma_is_clamped": plant.lenient(
        "AD-23", "numbers clamped instead of refused", gamma=lambda x: min(max(0.0, x), 1.0)
    ),
    "depends_on_the_batch": plant.batch_dependent(
        "AD-24",
        "advantages",
        "a split over time that depends on how many rows fill the device",
        lambda c: c.rewards.shape[0] > 100,
    ),
    "differs_from_call_to_call": plant.nondeterministic("AD-25", "advantages"),
    "dones_of_turns": Bug(
        "AD-97",
        "a turn is a step, and the end of the episode within it is forgotten",
        plant.where(forgets_dones_of_turns, plant.ignores("dones", "done_index")),
    ),
    "packed_statistics": Bug(
        "AD-97", "packed, who is not counted is counted", plant.where(packed_statistics, plant.ignores("in_stats"))
    ),
    "the_table_is_full": Bug(
        "AD-98",
        "above 4096 ids two groups share a slot of the table",
        plant.where(many_ids, plant.maps(group=lambda g: g // 7919 // 2)),
    ),
    "asks_the_host": Bug(
        "AD-26", "the host asks whether any reward is invalid", plant.reads_back(lambda c, o: o.stats.invalid.any())
    ),
}
