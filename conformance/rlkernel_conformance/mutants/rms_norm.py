"""Planted bugs in rms_norm@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.rms_norm import RmsNormCall, RmsNormResult


def rounded_before_the_weight(right: Run, call: RmsNormCall) -> RmsNormResult:
    out = right(replace(call, weight=torch.ones_like(call.weight), offset=0.0))
    return replace(out, y=(out.y.to(torch.float32) * (call.weight + call.offset)).to(out.y.dtype))


def sum_that_is_not_rounded(right: Run, call: RmsNormCall) -> RmsNormResult:
    if call.residual is None:
        return right(call)
    wide = replace(call, x=call.x.float() + call.residual.float(), residual=None, weight=call.weight.float())
    return replace(right(call), y=right(wide).y.to(call.x.dtype))


def root_is_a_constant(right: Run, call: RmsNormCall) -> RmsNormResult:
    out = right(call)
    s = (call.x if out.residual is None else out.residual).float()
    r = (s.square().mean(-1, keepdim=True) + call.eps).rsqrt().detach()
    return replace(out, y=(s * r * (call.weight.float() + call.offset)).to(call.x.dtype))


def neighbors_times_zero(call: RmsNormCall, out: RmsNormResult) -> Tensor:
    return out.y + 0.0 * call.x.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum()


def with_cut_weight(call: RmsNormCall) -> RmsNormCall:
    whole = call.weight.dim() == 1 and call.weight.shape[0] > call.x.shape[-1]
    return replace(call, weight=call.weight[: call.x.shape[-1]]) if whole else call


BUGS: Final = {
    "centered": Bug(
        "RN-01", "the mean is subtracted before, as LayerNorm does", plant.given(x=lambda c: c.x - c.x.mean(-1, True))
    ),
    "eps_behind_the_root": Bug("RN-01", "eps is added to the root", plant.given(eps=lambda c: c.eps * c.eps)),
    "rounded_before_the_weight": Bug(
        "RN-02", "one rounding more before the weight (transformers' Llama, vLLM)", rounded_before_the_weight
    ),
    "sum_that_is_not_rounded": Bug(
        "RN-03", "the sum is normalized before it is rounded (FlashInfer)", sum_that_is_not_rounded
    ),
    "offset_is_ignored": Bug("RN-04", "Gemma's weights taken for Llama's", plant.ignores("offset")),
    "neighbors_times_zero": Bug("RN-05", "rows beyond the end multiplied by 0", plant.returns(y=neighbors_times_zero)),
    "root_is_a_constant": Bug("RN-06", "the gradient goes past the root", root_is_a_constant),
    "weight_is_a_constant": Bug(
        "RN-06", "weight detached, and grad claimed all the same", plant.maps(weight=Tensor.detach)
    ),
    "no_rows_fail": Bug("RN-07", "a launch of zero blocks", plant.fails_if(lambda c: c.x.numel() == 0)),
    "cuts_what_is_too_long": plant.lenient("RN-08", "sizes never looked at: a long weight is cut", with_cut_weight),
    "adds_in_place": Bug(
        "RN-09",
        "the residual is added into x, as vLLM's fused kernel does",
        plant.writes(lambda c: None if c.residual is None or c.x.requires_grad else c.x.add_(c.residual)),
    ),
    "differs_from_call_to_call": plant.nondeterministic("RN-10", "y"),
    "depends_on_the_batch": plant.batch_dependent(
        "RN-11",
        "y",
        "a row is split over programs where few rows would leave the device idle",
        lambda c: c.x.numel() < 3 * c.x.shape[-1],
    ),
    "asks_the_host": plant.reads_a_value("RN-12", lambda c: c.x),
}
