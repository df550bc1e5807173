"""Planted bugs in the terms of policy_loss@1, most of them seen in released code. Batches: policy_loss_layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant, policy_loss_layouts
from rlkernel_core.spec.policy_loss import KINDS, LossResult

__all__ = ["policy_loss_layouts"]  # the mutants of both modules are registered together


def value_of(one: LossResult, gradient_of: LossResult) -> LossResult:
    """The value and statistics of one loss with the gradient of another."""
    loss = gradient_of.loss + (one.loss - gradient_of.loss).detach()
    return replace(one, loss=loss)


def silent(out: LossResult) -> LossResult:
    """The loss with a gradient of zeros."""
    return replace(out, loss=out.loss.detach() + 0.0 * out.loss)


@mutant(
    "PL-01",
    "PL-04",
    "PL-05",
    "PL-06",
    "PL-07",
    "PL-11",
    "PL-12",
    "PL-13",
    "PL-16",
    "PL-17",
    "PL-19",
    "PL-20",
    "PL-21",
    "PL-22",
    "PL-23",
    "PL-24",
    origin="the loss summed in 16 bits",
)
def half_precision_sum(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return replace(out, loss=out.loss + (out.loss.bfloat16().to(out.loss.dtype) - out.loss).detach())


@mutant(
    "PL-02",
    "PL-04",
    "PL-16",
    "PL-17",
    "PL-18",
    "PL-19",
    "PL-20",
    "PL-21",
    "PL-22",
    "PL-23",
    "PL-24",
    origin="the KL term is reported and not differentiated",
)
def kl_without_gradient(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return out if rest.get("ref_logprob") is None else value_of(out, reference(*args, **{**rest, "kl_coef": 0.0}))


@mutant("PL-03", origin="torch.min shares the gradient of a tie between its arguments")
def ties_halve_the_gradient(reference: Any, logprob: Tensor, old_logprob: Any, advantages: Any, **rest: Any) -> Any:
    out = reference(logprob, old_logprob, advantages, **rest)
    if old_logprob is None or KINDS[rest["kind"]].surrogate != "clip":
        return out
    tie = (logprob == old_logprob).all()
    return replace(out, loss=torch.where(tie, out.loss.detach() + 0.5 * (out.loss - out.loss.detach()), out.loss))


@mutant(
    "PL-04",
    "PL-01",
    "PL-02",
    "PL-13",
    "PL-16",
    "PL-17",
    "PL-20",
    "PL-21",
    "PL-22",
    "PL-23",
    "PL-24",
    "PL-25",
    origin="sapo's temperatures swapped",
)
def temperatures_swapped(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(
        *args, **{**rest, "tau": (1.05, 1.0)} if rest["kind"] == "sapo" and rest.get("tau") is None else rest
    )


@mutant(
    "PL-04",
    "PL-01",
    "PL-02",
    "PL-13",
    "PL-16",
    "PL-17",
    "PL-20",
    "PL-21",
    "PL-22",
    "PL-23",
    "PL-24",
    "PL-25",
    origin="one divergence for both kinds of dppo",
)
def one_divergence(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "kind": "dppo_tv"} if rest["kind"] == "dppo_kl" else rest)


@mutant("PL-05", "PL-06", "PL-07", "PL-20", "PL-22", origin="one clip range for both sides: clip-higher without effect")
def one_bound(reference: Any, *args: Any, **rest: Any) -> LossResult:
    low = (rest.get("clip") or (0.2,))[0]
    return reference(*args, **{**rest, "clip": (low, low)} if KINDS[rest["kind"]].surrogate == "clip" else rest)


@mutant("PL-06", "PL-09", origin="eps_clip_c accepted and ignored (TritonForge)")
def dual_clip_ignored(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "dual_clip": None})


@mutant("PL-07", "PL-04", "PL-06", "PL-23", origin="the sequence ratio's gradient goes to each token alone")
def a_ratio_of_its_own(reference: Any, *args: Any, **rest: Any) -> LossResult:
    kind, what = rest["kind"], KINDS[rest["kind"]]
    if what.surrogate != "clip" or (rest.get("level") or what.levels[0]) != "sequence":
        return reference(*args, **rest)
    return reference(*args, **{**rest, "kind": "gspo_token", "clip": rest.get("clip") or KINDS[kind].options["clip"]})


@mutant(
    "PL-08",
    "PL-02",
    "PL-03",
    "PL-04",
    "PL-07",
    "PL-20",
    "PL-22",
    "PL-23",
    origin="the detached ratio of gspo_token without the token's own factor",
)
def gspo_token_detached(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return silent(out) if rest["kind"] == "gspo_token" else out


@mutant(
    "PL-19",
    "PL-01",
    "PL-13",
    "PL-16",
    "PL-17",
    "PL-18",
    "PL-20",
    "PL-22",
    "PL-23",
    "PL-24",
    origin="k3 of reference against policy",
)
def kl_the_other_way(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    if rest.get("ref_logprob") is not None and str(rest.get("kl")).startswith("k3"):
        rest["ref_logprob"] = 2 * logprob.detach() - rest["ref_logprob"]
    return reference(logprob, *args, **rest)


@mutant(
    "PL-20",
    "PL-02",
    "PL-04",
    "PL-16",
    "PL-17",
    "PL-18",
    "PL-21",
    "PL-22",
    "PL-23",
    "PL-24",
    origin="the ratio of the KL term detached",
)
def importance_without_gradient(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return value_of(out, reference(*args, **{**rest, "kl_importance": False})) if rest.get("kl_importance") else out


@mutant("PL-21", "PL-09", origin="the bonus aggregated as the policy term, whatever was asked for")
def bonus_with_the_policys_weights(reference: Any, *args: Any, **rest: Any) -> LossResult:
    if rest.get("entropy_aggregate") == "seq_mean_token_sum_norm":
        rest.pop("horizon", None) if rest.get("aggregate") != "seq_mean_token_sum_norm" else None
    return reference(*args, **{**rest, "entropy_aggregate": None, "entropy_denominator": None})


@mutant(
    "PL-22",
    "PL-01",
    "PL-02",
    "PL-09",
    "PL-16",
    "PL-17",
    "PL-20",
    "PL-21",
    "PL-23",
    "PL-24",
    "PL-25",
    origin="truncated weights divided by their mean, unasked",
)
def weights_renormalised(reference: Any, *args: Any, **rest: Any) -> LossResult:
    if rest.get("correction") is not None and rest["kind"] not in {"vespo", "gmpo"}:
        rest["correction"] = replace(rest["correction"], normalize=True)
    return reference(*args, **rest)


@mutant("PL-23", "PL-01", "PL-02", "PL-16", "PL-17", "PL-20", "PL-22", origin="rejected tokens stay in the denominator")
def rejected_tokens_still_count(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    if rest.get("rejection") is None or rest.get("aggregate") == "token_sum" or rest.get("denominator") is not None:
        return out
    return replace(out, loss=out.loss * (1 - out.stats.rejected))


@mutant("PL-24", origin="an unknown log-probability read as 0, that is as certainty")
def unknown_is_certain(reference: Any, *args: Any, **rest: Any) -> LossResult:
    roll = rest.get("rollout_logprob")
    return reference(*args, **rest if roll is None else {**rest, "rollout_logprob": roll.nan_to_num(nan=0.0)})


@mutant("PL-25", origin="the KL estimate with its sign turned")
def kl_of_the_other_sign(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return replace(out, stats=replace(out.stats, approx_kl_k1=-out.stats.approx_kl_k1))


@mutant("PL-25", origin="a statistic that keeps the graph alive")
def a_statistic_with_a_gradient(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return replace(out, stats=replace(out.stats, policy_loss=out.stats.policy_loss + 0.0 * out.loss))


@mutant("PL-26", origin="e^d without a limit")
def unlimited_ratio(reference: Any, *args: Any, **rest: Any) -> LossResult:
    if "log_ratio_limit" in KINDS[rest["kind"]].options and rest.get("log_ratio_limit") is None:
        rest["log_ratio_limit"] = float("inf")
    return reference(*args, **rest)
