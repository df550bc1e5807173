"""Planted bugs in linear_policy_loss@1, most of them seen in released code."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.policy_loss import LossResult

_CALLS: list[None] = []
_LOG: deque[float] = deque(maxlen=10)


class _Ones(torch.autograd.Function):
    """The same value; its gradient is 1, whatever comes from above."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *upstream: Tensor) -> Tensor:
        return torch.ones_like(upstream[0])


class _Rounded(torch.autograd.Function):
    """The same value; the gradient from above is rounded to bfloat16."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0].bfloat16().to(upstream[0].dtype)


def lower(x: Tensor) -> Tensor:
    """One step of the dtype towards minus infinity, where x is a number but 0."""
    step = torch.nextafter(x.detach(), torch.full_like(x, -torch.inf)) - x.detach()
    return x + torch.where((x != 0) & x.isfinite(), step, 0.0)


@mutant("LPL-01", "LPL-02", "LPL-07", "LPL-12", "LPL-18", origin="the entropy bonus reported and left out of the loss")
def bonus_left_out(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "entropy_coef": 0.0})


VALUES = ("LPL-01", "LPL-02", "LPL-07", "LPL-12")


@mutant(*VALUES, origin="dual_clip read by the plain loss only")
def dual_clip_left_out(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "dual_clip": None})


@mutant(*VALUES, origin="one weight a token, for the bonus as well")
def the_bonus_is_aggregated_as_the_loss(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "entropy_aggregate": None})


@mutant(*VALUES, origin="one temperature passed to the kernel by value")
def the_first_temperature_is_for_all(reference: Any, *args: Any, **rest: Any) -> LossResult:
    T = rest.get("temperature", 1.0)
    return reference(*args, **{**rest, "temperature": T.flatten()[0].expand(T.shape) if isinstance(T, Tensor) else T})


@mutant(*VALUES, origin="operands of two dtypes brought to that of hidden")
def the_head_is_rounded(reference: Any, hidden: Tensor, weight: Tensor, *args: Any, **rest: Any) -> LossResult:
    return reference(hidden, weight.to(hidden.dtype), *args, **rest)


@mutant("LPL-02", origin="the gradient made with the loss, the upstream one never applied")
def upstream_ignored(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return replace(out, loss=_Ones.apply(out.loss)) if out.loss.requires_grad else out  # type: ignore[no-untyped-call]


@mutant("LPL-02", origin="a factor without dimensions takes the dtype of what it multiplies (torch)")
def upstream_rounded(reference: Any, hidden: Tensor, *args: Any, **rest: Any) -> LossResult:
    out = reference(hidden, *args, **rest)
    fits = out.loss.requires_grad and hidden.dtype == torch.bfloat16
    return replace(out, loss=_Rounded.apply(out.loss)) if fits else out  # type: ignore[no-untyped-call]


@mutant("LPL-03", origin="constant memory claimed, logits of all rows made (RL-Kernel)")
def makes_all_logits(reference: Any, hidden: Tensor, weight: Tensor, *args: Any, **rest: Any) -> LossResult:
    fits = hidden.shape[-1] == weight.shape[-1] and hidden.dtype == weight.dtype
    logits = hidden.detach() @ weight.detach().T if fits else None
    out = reference(hidden, weight, *args, **rest)
    del logits
    return out


@mutant("LPL-04", origin="a limit that is accepted and ignored")
def limit_ignored(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "max_workspace_bytes": None})


@mutant("LPL-05", origin="dW accumulated over blocks of rows in 16 bits")
def accumulates_in_16_bits(
    reference: Any, hidden: Tensor, weight: Tensor, ids: Tensor, old: Any, A: Tensor, **rest: Any
) -> Any:
    def whole() -> LossResult:
        return reference(hidden, weight, ids, old, A, **rest)

    if hidden.dtype not in {torch.bfloat16, torch.float16} or ids.numel() <= 64 or old is not None or A.dim() != 2:
        return whole()
    blocks = [
        reference(h, weight, i, None, a, **{**rest, "denominator": float(ids.numel())})
        for h, i, a in zip(hidden.split(6, 1), ids.split(6, 1), A.split(6, 1), strict=True)
    ]
    return replace(blocks[0], loss=torch.stack([b.loss for b in blocks]).sum())


@mutant("LPL-06", origin="a frozen head takes another path, with another dX")
def a_frozen_head_changes_the_rest(reference: Any, hidden: Tensor, weight: Tensor, *args: Any, **rest: Any) -> Any:
    out = reference(hidden, weight, *args, **rest)
    if weight.requires_grad or not hidden.requires_grad:
        return out
    return replace(out, loss=out.loss.detach() + 1.3 * (out.loss - out.loss.detach()))


@mutant("LPL-07", "LPL-14", origin="masks that multiply: NaN * 0 is NaN")
def multiplied_mask(reference: Any, hidden: Tensor, *args: Any, **rest: Any) -> LossResult:
    out, mask = reference(hidden, *args, **rest), rest.get("mask")
    if mask is None:
        return out
    return replace(out, loss=out.loss + 0.0 * (hidden * ~mask[..., None]).sum().to(out.loss.dtype))


@mutant(
    "LPL-08", "LPL-01", "LPL-05", origin="rows without weight go through the matmul with what rounding left of them"
)
def light_rows_leave_a_trace(reference: Any, hidden: Tensor, weight: Tensor, *args: Any, **rest: Any) -> LossResult:
    out = reference(hidden, weight, *args, **rest)
    if hidden.dtype == torch.float64 or rest.get("mask") is not None or not weight.requires_grad:
        return out
    trace = 1e-6 * hidden.detach().sum().to(out.loss.dtype) * weight.sum().to(out.loss.dtype)
    return replace(out, loss=out.loss + (trace - trace.detach()))


@mutant("LPL-09", origin="log-probabilities of another kernel than the loss: on-policy ratios are not 1")
def another_kernel_returns_them(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return replace(out, logprob=lower(out.logprob))


@mutant("LPL-10", *VALUES, origin="sequence-level ratios made token by token in one pass")
def sequences_by_token(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "level": None} if rest["kind"] in {"ppo", "grpo", "dapo", "dr_grpo"} else rest)


@mutant("LPL-11", "LPL-01", "LPL-02", "LPL-07", "LPL-12", origin="softcap after the temperature")
def caps_last(reference: Any, *args: Any, **rest: Any) -> LossResult:
    T = rest.get("temperature", 1.0)
    if rest.get("softcap") is None or isinstance(T, Tensor):
        return reference(*args, **rest)
    return reference(*args, **{**rest, "temperature": 1.0, "logit_scale": rest.get("logit_scale", 1.0) / T})


@mutant("LPL-12", origin="offsets of shards taken as if all were of one size")
def shards_of_one_size(reference: Any, hidden: Tensor, weight: Tensor, ids: Tensor, *args: Any, **rest: Any) -> Any:
    group = rest.get("group")
    return reference(hidden, weight, ids if group is None else ids + group.rank(), *args, **rest)


@mutant("LPL-13", origin="an id out of range counts 0 (RL-Kernel)")
def out_of_range_counts_nothing(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    return replace(out, loss=torch.where(out.loss.isnan(), 0.0, out.loss))


@mutant("LPL-14", origin="0 / 0 where everything is masked")
def mean_of_nothing(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out, mask = reference(*args, **rest), rest.get("mask")
    return out if mask is None else replace(out, loss=torch.where(mask.any(), out.loss, torch.nan))


@mutant("LPL-15", origin="hidden states of masked tokens cleared in place")
def clears_in_place(reference: Any, hidden: Tensor, *args: Any, **rest: Any) -> LossResult:
    if rest.get("mask") is not None:
        with torch.no_grad():
            hidden.masked_fill_(~rest["mask"][..., None], 0.0)
    return reference(hidden, *args, **rest)


@mutant("LPL-16", "LPL-17", origin="floating atomics, declared deterministic (RL.cu)")
def differs_from_call_to_call(reference: Any, *args: Any, **rest: Any) -> LossResult:
    _CALLS.append(None)
    out = reference(*args, **rest)
    return replace(out, loss=lower(out.loss)) if len(_CALLS) % 2 else out


@mutant("LPL-17", origin="the loss logged from inside the wrapper")
def reads_the_loss_back(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    _LOG.append(out.loss.item())
    return out


@mutant("LPL-18", origin="temperature 0 clamped instead of refused", unchecked=True)
def temperatures_are_clamped(reference: Any, *args: Any, **rest: Any) -> LossResult:
    T = rest.get("temperature", 1.0)
    return reference(*args, **{**rest, "temperature": T if isinstance(T, Tensor) else max(T, 1e-6)})


@mutant("LPL-18", "LPL-04", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, *args: Any, **rest: Any) -> LossResult:
    try:
        return reference(*args, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error
