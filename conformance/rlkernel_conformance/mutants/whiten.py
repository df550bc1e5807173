"""Planted bugs in whiten@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.whiten import WhitenCall, WhitenResult

OTHER_EPS: Final = {"std_add": "var_add", "var_add": "std_add"}


def unshifted_mean(call: WhitenCall, out: WhitenResult) -> Tensor:
    if not call.x.numel() or not call.mask is call.lengths is call.counts is None:
        return out.y
    x = call.x.to(out.y.dtype)
    mean = x.flatten().cumsum(0)[-1] / x.numel()
    centered = torch.where(x.isfinite(), x - mean, 0.0)
    spread = (centered.square().sum() / max(1, x.numel() - 1) + call.eps).sqrt()
    return torch.where((x == x.flatten()[0]).all(), centered / spread, out.y)


def one_pass_variance(call: WhitenCall, out: WhitenResult) -> Tensor:
    if out.y.dtype == torch.float64:
        return out.y
    square = (out.mean.double().square() + out.var.double()).float()
    var = (square - out.mean.square()).clamp(min=0.0)
    known = (out.mean.abs() > 100) & (out.var > 0)
    return torch.where(known, out.y * (out.var + call.eps).sqrt() / (var + call.eps).sqrt(), out.y)


def carries_a_gradient(right: Run, call: WhitenCall) -> WhitenResult:
    out = right(call)
    if not call.x.requires_grad:
        return out
    return replace(out, y=out.y + torch.where(call.x.isfinite(), 0.0 * call.x, 0.0).to(out.y.dtype))


def mask_multiplies(call: WhitenCall, out: WhitenResult) -> Tensor:
    return out.y if call.mask is None else out.y + 0.0 * (call.x * ~call.mask).sum().to(out.y.dtype)


def nan_is_contagious(call: WhitenCall, out: WhitenResult) -> Tensor:
    kept = call.x if call.mask is None else torch.where(call.mask, call.x, 0.0)
    return out.y + 0.0 * kept.sum().to(out.y.dtype) if call.lengths is None else out.y


def averaged_moments(right: Run, call: WhitenCall) -> WhitenResult:
    group, out = call.process_group, right(call)
    if group is None:
        return out
    mine = right(replace(call, process_group=None))
    var = [torch.empty_like(mine.var) for _ in range(group.size())]
    torch.distributed.all_gather(var, mine.var, group=group)
    return replace(out, var=torch.stack(var).mean())


BUGS: Final = {
    "eps_in_the_wrong_place": Bug(
        "WH-01",
        "eps inside the root where it belongs outside, and outside where inside (RL-Kernel)",
        plant.maps(eps_mode=OTHER_EPS),
    ),
    "biased": Bug("WH-02", "biased std declared unbiased", plant.given(ddof=0)),
    "unshifted_mean": Bug(
        "WH-03",
        "a mean that is summed and divided: 0.1 has another mean than itself (slime: 1 / std = 10500)",
        plant.returns(y=unshifted_mean),
    ),
    "one_pass_variance": Bug(
        "WH-04", "one-pass variance, E[x^2] - E[x]^2 (RL-Kernel)", plant.returns(y=one_pass_variance)
    ),
    "mask_multiplies": Bug("WH-05", "masks that multiply: NaN * 0 is NaN", plant.returns(y=mask_multiplies)),
    "never_carries": Bug(
        "WH-01", "masked values zeroed where they are to be carried", plant.maps(masked_out={"carry": "zero"})
    ),
    "nan_is_contagious": Bug("WH-06", "one NaN whitens all to NaN (trl #5773)", plant.returns(y=nan_is_contagious)),
    "local_moments": Bug(
        "WH-07", "moments of the rank at hand: data parallel runs differ from one rank", plant.ignores("process_group")
    ),
    "averaged_moments": Bug("WH-07", "the mean of the ranks' variances for the variance of all", averaged_moments),
    "counts_ignored": Bug(
        "WH-08", "a sequence counts once, however many tokens it has", plant.maps(counts=lambda x: x.clamp(max=1))
    ),
    "nothing_over_nothing": Bug(
        "WH-09",
        "0 / 0 where nothing is valid",
        plant.returns(mean=lambda c, o: torch.where(o.count > 0, o.mean, torch.nan)),
    ),
    "zeroes_in_place": Bug(
        "WH-10",
        "values that do not count zeroed in the caller's tensor",
        plant.writes(lambda c: None if c.mask is None else c.x.masked_fill_(~c.mask, 0.0)),
    ),
    "negative_eps_is_taken": plant.lenient(
        "WH-11", "a negative eps clamped instead of refused", eps=lambda eps: max(0.0, eps)
    ),
    "is_no_constant": Bug("WH-97", "the result carries a gradient to x", carries_a_gradient),
    "differs_from_call_to_call": plant.nondeterministic("WH-12", "y"),
    "asks_the_host": Bug(
        "WH-13", "the host asks whether there is anything to whiten", plant.reads_back(lambda c, o: o.count)
    ),
}
