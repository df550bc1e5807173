"""Planted bugs in whiten@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant


@mutant(
    "WH-01",
    "WH-04",
    "WH-05",
    "WH-06",
    "WH-07",
    origin="eps inside the root where it belongs outside, and outside where inside (RL-Kernel)",
)
def eps_in_the_wrong_place(reference: Any, x: Tensor, **rest: Any) -> Any:
    other = {"std_add": "var_add", "var_add": "std_add"}
    mode = rest.get("eps_mode", "var_add")
    return reference(x, **{**rest, "eps_mode": other.get(mode, mode)})


@mutant("WH-02", "WH-01", "WH-04", "WH-05", "WH-06", "WH-07", "WH-11", origin="biased std declared unbiased")
def biased(reference: Any, x: Tensor, **rest: Any) -> Any:
    return reference(x, **{**rest, "ddof": 0})


@mutant(
    "WH-03",
    "WH-01",
    origin="a mean that is summed and divided: 0.1 has another mean than itself (slime: 1 / std = 10500)",
)
def unshifted_mean(reference: Any, x: Tensor, **rest: Any) -> Any:
    out = reference(x, **rest)
    if not x.numel() or any(rest.get(n) is not None for n in ("mask", "lengths", "counts")):
        return out
    x = x.to(out.y.dtype)
    mean = x.flatten().cumsum(0)[-1] / x.numel()
    centred = torch.where(x.isfinite(), x - mean, 0.0)
    spread = (centred.square().sum() / max(1, x.numel() - 1) + rest.get("eps", 1e-8)).sqrt()
    constant = (x == x.flatten()[0]).all()
    return replace(out, y=torch.where(constant, centred / spread, out.y))


@mutant("WH-04", origin="one-pass variance, E[x^2] - E[x]^2 (RL-Kernel)")
def one_pass_variance(reference: Any, x: Tensor, **rest: Any) -> Any:
    out = reference(x, **rest)
    if out.y.dtype == torch.float64:
        return out
    square = (out.mean.double().square() + out.var.double()).float()
    var = (square - out.mean.square()).clamp(min=0.0)
    known = (out.mean.abs() > 100) & (out.var > 0)
    wrong = out.y * (out.var + rest.get("eps", 1e-8)).sqrt() / (var + rest.get("eps", 1e-8)).sqrt()
    return replace(out, y=torch.where(known, wrong, out.y))


@mutant("WH-05", origin="masks that multiply: NaN * 0 is NaN")
def mask_multiplies(reference: Any, x: Tensor, **rest: Any) -> Any:
    out = reference(x, **rest)
    return out if rest.get("mask") is None else replace(out, y=out.y + 0.0 * (x * ~rest["mask"]).sum().to(out.y.dtype))


@mutant("WH-01", origin="masked values zeroed where they are to be carried")
def never_carries(reference: Any, x: Tensor, **rest: Any) -> Any:
    return reference(x, **{**rest, "masked_out": "zero"} if rest.get("masked_out") == "carry" else rest)


@mutant("WH-06", "WH-09", origin="one NaN whitens all to NaN (trl #5773)")
def nan_is_contagious(reference: Any, x: Tensor, **rest: Any) -> Any:
    out = reference(x, **rest)
    kept = x if rest.get("mask") is None else torch.where(rest["mask"], x, 0.0)
    return replace(out, y=out.y + 0.0 * kept.sum().to(out.y.dtype)) if rest.get("lengths") is None else out


@mutant("WH-07", origin="moments of the rank at hand: data parallel runs differ from one rank")
def local_moments(reference: Any, x: Tensor, **rest: Any) -> Any:
    return reference(x, **{**rest, "process_group": None})


@mutant("WH-07", origin="the mean of the ranks' variances for the variance of all")
def averaged_moments(reference: Any, x: Tensor, **rest: Any) -> Any:
    group = rest.get("process_group")
    out = reference(x, **rest)
    if group is None:
        return out
    mine = reference(x, **{**rest, "process_group": None})
    var = [torch.empty_like(mine.var) for _ in range(group.size())]
    torch.distributed.all_gather(var, mine.var, group=group)
    return replace(out, var=torch.stack(var).mean())


@mutant("WH-08", "WH-01", "WH-04", origin="a sequence counts once, however many tokens it has")
def counts_ignored(reference: Any, x: Tensor, **rest: Any) -> Any:
    counts = rest.get("counts")
    return reference(x, **{**rest, "counts": None if counts is None else counts.clamp(max=1)})


@mutant("WH-09", "WH-01", origin="0 / 0 where nothing is valid")
def nothing_over_nothing(reference: Any, x: Tensor, **rest: Any) -> Any:
    out = reference(x, **rest)
    return replace(out, mean=torch.where(out.count > 0, out.mean, torch.nan))


@mutant("WH-10", origin="values that do not count zeroed in the caller's tensor")
def zeroes_in_place(reference: Any, x: Tensor, **rest: Any) -> Any:
    out = reference(x, **rest)
    if rest.get("mask") is not None:
        x.masked_fill_(~rest["mask"], 0.0)
    return out


@mutant("WH-11", origin="a negative eps clamped instead of refused", unchecked=True)
def negative_eps_is_taken(reference: Any, x: Tensor, **rest: Any) -> Any:
    return reference(x, **{**rest, "eps": max(0.0, rest.get("eps", 1e-8))})


@mutant("WH-12", "WH-01", "WH-04", "WH-13", origin="floating atomics, declared deterministic")
def differs_from_call_to_call(reference: Any, x: Tensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    out = reference(x, **rest)
    return replace(out, y=out.y * (1.0 + 2**-22 * (differs_from_call_to_call.calls % 2)))  # type: ignore[attr-defined]


@mutant("WH-13", origin="the host asks whether there is anything to whiten")
def asks_the_host(reference: Any, x: Tensor, **rest: Any) -> Any:
    out = reference(x, **rest)
    return replace(out, y=torch.zeros_like(out.y)) if int(out.count) == 0 else out
