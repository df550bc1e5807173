"""Planted bugs in logprob@1 with a vocabulary that is split over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.spec.listed_ids import flat_ids
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult


def split(call: Any) -> bool:
    """Whether there are other ranks."""
    return call.group is not None and call.group.size() > 1


def of_split(**changes: Any) -> How:
    """Results that differ where there are other ranks."""
    return plant.where(split, plant.returns(**changes))


def of_this_rank(right: Run, call: LogprobCall) -> LogprobResult:
    out, own = right(call), right(replace(call, group=None, ids=torch.zeros_like(call.ids), support=None))
    return replace(out, lse=out.lse + (own.lse - out.lse).detach().nan_to_num())


def entropy_of_this_rank(right: Run, call: LogprobCall) -> LogprobResult:
    out, own = right(call), right(replace(call, group=None, ids=torch.zeros_like(call.ids), support=None))
    if out.entropy is None or own.entropy is None:
        return out
    total = own.entropy.detach().nan_to_num().clone()
    dist.all_reduce(total, group=call.group)
    return replace(out, entropy=out.entropy + (total - out.entropy).detach())


def shifted_ids(call: LogprobCall) -> Tensor:
    ids = flat_ids(call.ids)
    return ids + call.group.rank() * (ids >= 0)  # type: ignore[union-attr]  # it is there


def support_of_a_shard(right: Run, call: LogprobCall) -> LogprobResult:
    if call.support is None:
        return right(call)
    ids = call.support.ids
    shifted = torch.where(ids >= 0, ids + (call.group.rank() > 0), ids)  # type: ignore[union-attr]
    return replace(right(call), logprob=right(replace(call, support=replace(call.support, ids=shifted))).logprob)


def lse_of_ids(out: Any) -> Tensor:
    lse: Tensor = out.lse if out.logprob.dim() == out.lse.dim() else out.lse[..., None]
    return lse


def one_more(right: Run, call: LogprobCall) -> LogprobResult:
    out = right(call)
    dist.all_reduce(out.lse.detach().clone(), op=dist.ReduceOp.MAX, group=call.group)
    return out


class ReducedGradient(torch.autograd.Function):
    """The same numbers, whose gradient is averaged over ranks that have the same one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total / ctx.group.size(), None


def reduced_gradient(call: LogprobCall, out: LogprobResult) -> Tensor:
    reduced: Tensor = ReducedGradient.apply(out.logprob, call.group)  # type: ignore[no-untyped-call]
    return reduced


BUGS: Final = {
    "shards_of_one_size": Bug(
        "LP-31",
        "offsets of shards taken as if all were of one size (verl #3723)",
        plant.where(split, plant.given(ids=shifted_ids)),
    ),
    "gradient_of_every_rank": Bug(
        "LP-31",
        "the upstream gradient, which all ranks have alike, summed over ranks",
        of_split(logprob=lambda c, o: plant.with_gradient_times(o.logprob, c.group.size())),
    ),
    "lse_of_this_rank": Bug("LP-31", "lse of this rank's ids", plant.where(split, of_this_rank)),
    "entropy_of_this_rank": Bug(
        "LP-31", "the sum of the entropies that ranks have alone", plant.where(split, entropy_of_this_rank)
    ),
    "difference_of_a_split_row": Bug(
        "LP-31",
        "z - lse where there are ranks (Megatron, verl)",
        of_split(logprob=lambda c, o: (o.logprob + lse_of_ids(o)) - lse_of_ids(o)),
    ),
    "no_rank_has_it": Bug(
        "LP-31",
        "an id of no rank has the logit 0, as one that lies on another rank has here (Megatron)",
        of_split(logprob=lambda c, o: torch.where(o.invalid, -lse_of_ids(o), o.logprob)),
    ),
    "support_of_a_shard": Bug(
        "LP-31", "kept ids counted from a wrong id on other ranks", plant.where(split, support_of_a_shard)
    ),
    "the_merge_rounds": Bug(
        "LP-32",
        "a merge that rounds, run for one rank as well",
        plant.returns(logprob=lambda c, o: plant.lower(o.logprob, c.group is not None)),
    ),
    "ranks_sum_in_their_own_order": Bug(
        "LP-33",
        "every rank sums its own part first",
        of_split(logprob=lambda c, o: plant.lower(o.logprob, c.group.rank() > 0)),
    ),
    "a_round_for_the_maximum": Bug(
        "LP-34", "the maximum, the sum and the logit of the id in a round each (Megatron)", plant.where(split, one_more)
    ),
    "reduced_gradient": Bug("LP-34", "a collective in the backward pass", of_split(logprob=reduced_gradient)),
}
