"""Planted bugs in policy_loss@1, most of them seen in released code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant, policy_loss_ranks
from rlkernel_conformance.mutants.affine_suffix_scan import moved_starts
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.policy_kinds import KINDS
from rlkernel_core.spec.policy_loss import SPEC, LossResult, PolicyLossCall


def backward_of(wanted: Callable[[Any], Any], **changes: Any) -> How:
    """Value and statistics of some calls with the gradient of those with other arguments."""

    def how(right: Run, call: Any) -> LossResult:
        out = right(call)
        if not wanted(call):
            return out
        other = right(replace(call, **changes))
        return replace(out, loss=other.loss + (out.loss - other.loss).detach())

    return how


def gradient_times(factor: float, wanted: Callable[[Any], Any]) -> How:
    """Some calls with a gradient that is multiplied by a factor."""
    return plant.returns(loss=lambda c, o: plant.with_gradient_times(o.loss, factor) if wanted(c) else o.loss)


def half_precision(call: PolicyLossCall, out: LossResult) -> Tensor:
    return out.loss + (out.loss.bfloat16().to(out.loss.dtype) - out.loss).detach()


def on_a_tie(call: PolicyLossCall) -> Any:
    clipped = call.old_logprob is not None and KINDS[call.kind].surrogate == "clip"
    return clipped and (call.logprob == call.old_logprob).all()


def clips_a_sequence(call: PolicyLossCall) -> bool:
    kind = KINDS[call.kind]
    return kind.surrogate == "clip" and (call.level or kind.levels[0]) == "sequence"


def reversed_reference(call: PolicyLossCall) -> Tensor | None:
    if call.ref_logprob is None or not str(call.kl).startswith("k3"):
        return call.ref_logprob
    return 2 * call.logprob.detach() - call.ref_logprob


def bonus_with_the_policys_weights(right: Run, call: Any) -> LossResult:
    horizon = call.horizon
    if call.entropy_aggregate == "seq_mean_token_sum_norm" and call.aggregate != "seq_mean_token_sum_norm":
        horizon = None
    return right(replace(call, entropy_aggregate=None, entropy_denominator=None, horizon=horizon))


def rejected_tokens_count(call: PolicyLossCall, out: LossResult) -> Tensor:
    whole = call.rejection is None or call.aggregate == "token_sum" or call.denominator is not None
    return out.loss if whole or out.stats.rejected is None else out.loss * (1 - out.stats.rejected)


def without_a_foreign_correction(call: Any) -> Any:
    try:
        SPEC.check(call)  # type: ignore[misc]
    except ArgumentError as error:
        if error.argument.startswith("correction") and call.kind in {"vespo", "gmpo"}:
            return replace(call, correction=None)
    return call


def own_token_mean(call: PolicyLossCall) -> bool:
    return call.aggregate == "token_mean" and call.denominator is None and call.logprob.numel() > 0


def starts_up_to_the_end(call: Any) -> Any:
    starts = call.cu_seqlens
    if starts is None or len(starts) < 2:
        return starts
    return torch.cat([starts[:-1], torch.full_like(starts[:1], call.logprob.numel())])


def first_advantage(call: PolicyLossCall) -> Tensor:
    A = call.advantages
    return A[:1].expand(A.shape) if A.shape[0] and A.shape != call.logprob.shape else A


def multiplied_mask(call: PolicyLossCall, out: LossResult) -> Tensor:
    if call.mask is None:
        return out.loss
    return out.loss + (0.0 * (call.logprob * ~call.mask).sum()).to(out.loss.dtype)


def mean_of_nothing(call: Any, out: LossResult) -> Tensor:
    return out.loss if call.mask is None else torch.where(call.mask.any(), out.loss, torch.nan)


def constants_detached(call: Any) -> Any:
    given = call.as_dict()
    free = {n: x.detach() for n, x in given.items() if isinstance(x, Tensor) and n not in {"logprob", "entropy"}}
    return replace(call, **free)


class OnceMore(torch.autograd.Function):
    """The same number, whose gradient is that of a sum of it, whatever comes in."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *upstream: Tensor) -> Tensor:
        return torch.ones_like(upstream[0])


def upstream_ignored(right: Run, call: PolicyLossCall) -> LossResult:
    out = right(call)
    small = call.logprob.numel() < 100
    if not small or not out.loss.requires_grad:
        return out
    return replace(out, loss=OnceMore.apply(out.loss))  # type: ignore[no-untyped-call]


def bound_beside_an_importance(call: Any) -> Any:
    rule = call.rejection
    strict = rule is not None and call.kl_importance and rule.statistic == "k2" and rule.high is not None
    return replace(rule, high=rule.high * (1 - 1e-3)) if strict else rule


def first_sequences(call: Any) -> Tensor | None:
    B = call.logprob.shape[0]
    if call.logprob.dim() < 2 or B <= 65536:
        return call.mask
    kept = torch.arange(B, device=call.logprob.device)[:, None] < 65536
    return kept.expand(call.logprob.shape) if call.mask is None else call.mask & kept


BUGS: Final = {
    # two options at a time, and sizes of real batches
    "upstream_ignored": Bug("PL-97", "a backward pass that takes every gradient for that of a sum", upstream_ignored),
    "bound_beside_an_importance": Bug(
        "PL-97",
        "< for <= in a rejection, where a KL term is weighed by importance",
        plant.given(rejection=bound_beside_an_importance),
    ),
    "first_sequences": Bug("PL-98", "sequences counted in 16 bits", plant.given(mask=first_sequences)),
    # terms of the loss
    "half_precision_sum": Bug("PL-01", "the loss summed in 16 bits", plant.returns(loss=half_precision)),
    "kl_without_gradient": Bug(
        "PL-02",
        "the KL term is reported and not differentiated",
        backward_of(lambda c: c.ref_logprob is not None, kl_coef=0.0),
    ),
    "ties_halve_the_gradient": Bug(
        "PL-03", "torch.min shares the gradient of a tie between its arguments", gradient_times(0.5, on_a_tie)
    ),
    "temperatures_swapped": Bug(
        "PL-04",
        "sapo's temperatures swapped",
        plant.where(lambda c: c.kind == "sapo" and c.tau is None, plant.given(tau=(1.05, 1.0))),
    ),
    "one_divergence": Bug("PL-04", "one divergence for both kinds of dppo", plant.maps(kind={"dppo_kl": "dppo_tv"})),
    "one_bound": Bug(
        "PL-05",
        "one clip range for both sides: clip-higher without effect",
        plant.where(
            lambda c: KINDS[c.kind].surrogate == "clip", plant.given(clip=lambda c: (c.clip or (0.2,))[:1] * 2)
        ),
    ),
    "dual_clip_ignored": Bug("PL-06", "eps_clip_c accepted and ignored (TritonForge)", plant.ignores("dual_clip")),
    "a_ratio_of_its_own": Bug(
        "PL-07",
        "the sequence ratio's gradient goes to each token alone",
        plant.where(
            clips_a_sequence,
            plant.given(kind="gspo_token", clip=lambda c: c.clip or KINDS[c.kind].options["clip"], level=None),
        ),
    ),
    "gspo_token_detached": Bug(
        "PL-08",
        "the detached ratio of gspo_token without the token's own factor",
        gradient_times(0.0, lambda c: c.kind == "gspo_token"),
    ),
    "kl_the_other_way": Bug("PL-19", "k3 of reference against policy", plant.given(ref_logprob=reversed_reference)),
    "importance_without_gradient": Bug(
        "PL-20", "the ratio of the KL term detached", backward_of(lambda c: c.kl_importance, kl_importance=False)
    ),
    "bonus_with_the_policys_weights": Bug(
        "PL-21", "the bonus aggregated as the policy term, whatever was asked for", bonus_with_the_policys_weights
    ),
    "weights_renormalized": Bug(
        "PL-22",
        "truncated weights divided by their mean, unasked",
        plant.where(
            lambda c: c.kind not in {"vespo", "gmpo"}, plant.maps(correction=lambda x: replace(x, normalize=True))
        ),
    ),
    "rejected_tokens_still_count": Bug(
        "PL-23", "rejected tokens stay in the denominator", plant.returns(loss=rejected_tokens_count)
    ),
    "unknown_is_certain": Bug(
        "PL-24",
        "an unknown log-probability read as 0, that is as certainty",
        plant.maps(rollout_logprob=lambda x: x.nan_to_num(nan=0.0)),
    ),
    "kl_of_the_other_sign": Bug(
        "PL-25",
        "the KL estimate with its sign turned",
        plant.returns(stats=lambda c, o: replace(o.stats, approx_kl_k1=-o.stats.approx_kl_k1)),
    ),
    "a_statistic_with_a_gradient": Bug(
        "PL-25",
        "a statistic that keeps the graph alive",
        plant.returns(stats=lambda c, o: replace(o.stats, policy_loss=o.stats.policy_loss + 0.0 * o.loss)),
    ),
    "unlimited_ratio": Bug(
        "PL-26",
        "e^d without a limit",
        plant.where(
            lambda c: "log_ratio_limit" in KINDS[c.kind].options and c.log_ratio_limit is None,
            plant.given(log_ratio_limit=torch.inf),
        ),
    ),
    # batches, masks, layouts, ranks and arguments
    "limit_ignored": Bug("PL-09", "a parameter that is accepted and has no effect", plant.ignores("log_ratio_limit")),
    "foreign_corrections_dropped": plant.lenient(
        "PL-10", "a correction that a kind cannot have is dropped", without_a_foreign_correction
    ),
    "global_count_ignored": Bug("PL-11", "the denominator of a rank is its own count", plant.ignores("denominator")),
    "padding_counts": Bug(
        "PL-12",
        "the mean over all positions of the padded batch",
        plant.where(own_token_mean, plant.given(denominator=lambda c: float(c.logprob.numel()))),
    ),
    "empty_sequences_always_count": Bug(
        "PL-13",
        "the mean over all sequences, the empty ones too (verl)",
        plant.where(
            lambda c: str(c.aggregate).startswith("seq_") and c.denominator is None, plant.given(count_empty=True)
        ),
    ),
    "mean_of_nothing": Bug("PL-14", "0 / 0 where everything is masked", plant.returns(loss=mean_of_nothing)),
    "multiplied_mask": Bug("PL-15", "masks that multiply: NaN * 0 is NaN", plant.returns(loss=multiplied_mask)),
    "starts_off_by_one": Bug(
        "PL-16", "sequence starts of a packed batch off by one", plant.maps(cu_seqlens=moved_starts)
    ),
    "the_tail_counts": Bug(
        "PL-17",
        "padding at the end of a packed batch belongs to its last sequence",
        plant.given(cu_seqlens=starts_up_to_the_end),
    ),
    "on_policy_without_gradient": Bug(
        "PL-18",
        "without old log-probabilities the ratio is the constant 1",
        gradient_times(0.0, lambda c: c.old_logprob is None),
    ),
    "ignores_strides": Bug("PL-27", "rows read as if they were contiguous", plant.ignores_strides("logprob")),
    "first_advantage_for_all": Bug(
        "PL-28", "batch[0]'s advantage for all sequences", plant.given(advantages=first_advantage)
    ),
    "no_tokens_fail": Bug("PL-29", "a launch of zero blocks", plant.fails_if(lambda c: c.logprob.numel() == 0)),
    "clears_in_place": Bug(
        "PL-30",
        "masked log-probabilities cleared in place",
        plant.writes_first(lambda c: None if c.mask is None else c.logprob.masked_fill_(~c.mask, 0.0)),
    ),
    "constants_detached": plant.lenient("PL-31", "constants detached without a word", constants_detached),
    "differs_from_call_to_call": plant.nondeterministic("PL-32", "loss"),
    "reads_the_loss_back": Bug(
        "PL-33", "a statistic logged from inside the kernel's wrapper", plant.reads_back(lambda c, o: o.loss.detach())
    ),
    "denominators_are_clamped": plant.lenient(
        "PL-34",
        "a denominator clamped instead of refused",
        denominator=lambda n: max(n, 1.0) if isinstance(n, float) else n,
    ),
    "anonymous_errors": plant.anonymous_errors("PL-34"),
    "padded_length_of_a_rank": plant.lenient(
        "PL-34",
        "the horizon of a split batch is the length to which a rank is padded",
        lambda call: (
            replace(call, horizon=float(call.logprob.shape[-1]))
            if call.process_group is not None and call.kind == "dr_grpo" and call.horizon is None
            else call
        ),
    ),
    **policy_loss_ranks.BUGS,
}
