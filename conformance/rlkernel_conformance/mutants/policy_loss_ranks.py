"""Planted bugs in policy_loss@1 with a batch that is split over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.policy_loss import LossResult


def of_this_rank(call: Any) -> Any:
    """The same call without other ranks."""
    return replace(call, process_group=None)


def split(call: Any) -> bool:
    """Whether there are other ranks."""
    return call.process_group is not None and call.process_group.size() > 1


def normalizes(call: Any) -> bool:
    """Whether correction weights are divided by a mean over ranks."""
    return split(call) and call.correction is not None and call.correction.normalize


def mean_of_ranks(right: Run, call: Any) -> LossResult:
    out = right(of_this_rank(call))
    total = out.loss.detach().clone()
    torch.distributed.all_reduce(total, group=call.process_group)
    mean = total / call.process_group.size()
    return replace(out, loss=out.loss + (mean - out.loss).detach(), stats=right(call).stats)


def loss_of_this_rank(right: Run, call: Any) -> LossResult:
    whole, own = right(call), right(of_this_rank(call))
    return replace(whole, loss=whole.loss + (own.loss - whole.loss).detach())


def statistics_of_this_rank(right: Run, call: Any) -> LossResult:
    return replace(right(call), stats=right(of_this_rank(call)).stats)


def normalized_on_this_rank(right: Run, call: Any) -> LossResult:
    rule = call.correction
    mean = right(of_this_rank(replace(call, correction=replace(rule, normalize=False)))).stats.correction_mean
    out, whole = right(call), right(replace(call, correction=replace(rule, normalize=False))).stats.correction_mean
    factor = torch.where(mean > 0, whole / torch.where(mean > 0, mean, 1.0), 1.0)
    return replace(out, loss=out.loss * factor)


def lower_elsewhere(call: Any, out: LossResult) -> Tensor:
    return out.loss if call.process_group.rank() == 0 else plant.lower(out.loss)


def once_more(right: Run, call: Any) -> LossResult:
    out = right(call)
    torch.distributed.all_reduce(out.stats.tokens.clone(), group=call.process_group)
    return out


class ReducedGradient(torch.autograd.Function):
    """The same number, whose gradient is added up over ranks and divided: right, and one more collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total / ctx.group.size(), None


def reduced_gradient(call: Any, out: LossResult) -> Tensor:
    reduced: Tensor = ReducedGradient.apply(out.loss, call.process_group)  # type: ignore[no-untyped-call]
    return reduced


BUGS: Final = {
    "local_counts": Bug(
        "PL-35", "counts and statistics of the rank at hand: a group without effect", plant.ignores("process_group")
    ),
    "mean_of_ranks": Bug(
        "PL-35",
        "the mean of the ranks' means: those with few tokens weigh too much",
        plant.where(split, mean_of_ranks),
    ),
    "gradient_to_be_summed": Bug(
        "PL-35",
        "a gradient whose sum over ranks is that of the whole, where it is to be averaged",
        plant.where(
            split,
            plant.returns(loss=lambda c, o: plant.with_gradient_times(o.loss, 1 / c.process_group.size())),
        ),
    ),
    "count_over_ranks": Bug(
        "PL-35",
        "a denominator divided by the number of ranks, as callers had to",
        plant.where(split, plant.given(denominator=lambda c: c.denominator and c.denominator / c.process_group.size())),
    ),
    "every_sequence_of_this_rank": Bug(
        "PL-35",
        "all sequences are counted on this rank, where empty ones count",
        plant.where(
            lambda c: split(c) and c.count_empty,
            plant.given(count_empty=False, denominator=lambda c: float(max(c.advantages.shape[0], 1))),
        ),
    ),
    "loss_of_this_rank": Bug(
        "PL-35", "the loss that is returned is this rank's alone", plant.where(split, loss_of_this_rank)
    ),
    "statistics_of_this_rank": Bug(
        "PL-35", "statistics of this rank's tokens", plant.where(split, statistics_of_this_rank)
    ),
    "normalized_on_this_rank": Bug(
        "PL-35",
        "correction weights divided by their mean on this rank",
        plant.where(normalizes, normalized_on_this_rank),
    ),
    "leaves_early": Bug(
        "PL-35",
        "a rank without sequences has loss 0",
        plant.returns(loss=lambda c, o: o.loss * (0.0 if split(c) and c.logprob.shape[0] == 0 else 1.0)),
    ),
    "bits_of_a_rank": Bug(
        "PL-36", "sums joined in an order of each rank", plant.where(split, plant.returns(loss=lower_elsewhere))
    ),
    "a_third_collective": Bug("PL-37", "a statistic reduced on its own", plant.where(split, once_more)),
    "reduced_gradient": Bug(
        "PL-37", "a collective in the backward pass", plant.where(split, plant.returns(loss=reduced_gradient))
    ),
}
