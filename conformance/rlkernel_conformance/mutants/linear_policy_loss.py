"""Planted bugs in linear_policy_loss@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_conformance.mutants.linear_logprob import caps_last, factor_detached, frozen_head, shifted_shards
from rlkernel_conformance.mutants.logprob import clamped
from rlkernel_conformance.mutants.policy_loss import mean_of_nothing
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.policy_loss import LossResult


def ignored(call: LinearPolicyLossCall, out: LossResult) -> Tensor:
    return plant.with_upstream(out.loss, torch.ones_like) if out.loss.requires_grad else out.loss


def rounded(call: LinearPolicyLossCall, out: LossResult) -> Tensor:
    if not out.loss.requires_grad or call.hidden.dtype != torch.bfloat16:
        return out.loss
    return plant.with_upstream(out.loss, lambda g: g.bfloat16().to(g.dtype))


def first_temperature(T: Any) -> Any:
    return T.flatten()[0].expand(T.shape) if isinstance(T, Tensor) else T


def makes_all_logits(right: Run, call: LinearPolicyLossCall) -> LossResult:
    fits = call.hidden.shape[-1] == call.weight.shape[-1] and call.hidden.dtype == call.weight.dtype
    logits = call.hidden.detach() @ call.weight.detach().T if fits else None
    out = right(call)
    del logits
    return out


def accumulates_in_16_bits(right: Run, call: LinearPolicyLossCall) -> LossResult:
    narrow, N = call.hidden.dtype in {torch.bfloat16, torch.float16}, call.ids.numel()
    if not narrow or N <= 64 or call.old_logprob is not None or call.advantages.dim() != 2:
        return right(call)
    columns = zip(*(x.split(6, 1) for x in (call.hidden, call.ids, call.advantages)), strict=True)
    blocks = [
        right(replace(call, hidden=hidden, ids=ids, advantages=A, denominator=float(N))) for hidden, ids, A in columns
    ]
    return replace(blocks[0], loss=torch.stack([b.loss for b in blocks]).sum())


def multiplied_mask(call: LinearPolicyLossCall, out: LossResult) -> Tensor:
    if call.mask is None:
        return out.loss
    return out.loss + 0.0 * (call.hidden * ~call.mask[..., None]).sum().to(out.loss.dtype)


def light_rows_leave_a_trace(call: LinearPolicyLossCall, out: LossResult) -> Tensor:
    if call.hidden.dtype == torch.float64 or call.mask is not None or not call.weight.requires_grad:
        return out.loss
    trace = 1e-6 * call.hidden.detach().sum().to(out.loss.dtype) * call.weight.sum().to(out.loss.dtype)
    return out.loss + (trace - trace.detach())


def level_by_token(call: LinearPolicyLossCall) -> str | None:
    return None if call.kind in {"ppo", "grpo", "dapo", "dr_grpo"} else call.level


BUGS: Final = {
    "bonus_left_out": Bug(
        "LPL-01", "the entropy bonus reported and left out of the loss", plant.given(entropy_coef=0.0)
    ),
    "dual_clip_left_out": Bug("LPL-01", "dual_clip read by the plain loss only", plant.ignores("dual_clip")),
    "the_bonus_is_aggregated_as_the_loss": Bug(
        "LPL-01", "one weight a token, for the bonus as well", plant.ignores("entropy_aggregate")
    ),
    "the_first_temperature_is_for_all": Bug(
        "LPL-01", "one temperature passed to the kernel by value", plant.maps(temperature=first_temperature)
    ),
    "the_head_is_rounded": Bug(
        "LPL-01",
        "operands of two dtypes brought to that of hidden",
        plant.given(weight=lambda c: c.weight.to(c.hidden.dtype)),
    ),
    "upstream_ignored": Bug(
        "LPL-02", "the gradient made with the loss, the upstream one never applied", plant.returns(loss=ignored)
    ),
    "upstream_rounded": Bug(
        "LPL-02",
        "a factor without dimensions takes the dtype of what it multiplies (torch)",
        plant.returns(loss=rounded),
    ),
    "makes_all_logits": Bug("LPL-03", "constant memory claimed, logits of all rows made (RL-Kernel)", makes_all_logits),
    "limit_ignored": Bug("LPL-04", "a limit that is accepted and ignored", plant.ignores("max_workspace_bytes")),
    "accumulates_in_16_bits": Bug("LPL-05", "dW accumulated over blocks of rows in 16 bits", accumulates_in_16_bits),
    "a_frozen_head_changes_the_rest": Bug(
        "LPL-06",
        "a frozen head takes another path, with another dX",
        plant.returns(loss=lambda c, o: plant.with_gradient_times(o.loss, 1.3 if frozen_head(c) else 1.0)),
    ),
    "multiplied_mask": Bug("LPL-07", "masks that multiply: NaN * 0 is NaN", plant.returns(loss=multiplied_mask)),
    "light_rows_leave_a_trace": Bug(
        "LPL-08",
        "rows without weight go through the matmul with what rounding left of them",
        plant.returns(loss=light_rows_leave_a_trace),
    ),
    "another_kernel_returns_them": Bug(
        "LPL-09",
        "log-probabilities of another kernel than the loss: on-policy ratios are not 1",
        plant.returns(logprob=lambda c, o: plant.lower(o.logprob)),
    ),
    "sequences_by_token": Bug(
        "LPL-10", "sequence-level ratios made token by token in one pass", plant.given(level=level_by_token)
    ),
    "caps_last": Bug("LPL-11", "softcap after the temperature", caps_last),
    "shards_of_one_size": Bug(
        "LPL-12", "offsets of shards taken as if all were of one size", plant.given(ids=shifted_shards)
    ),
    "out_of_range_counts_nothing": Bug(
        "LPL-13",
        "an id out of range counts 0 (RL-Kernel)",
        plant.returns(loss=lambda c, o: torch.where(o.loss.isnan(), 0.0, o.loss)),
    ),
    "mean_of_nothing": Bug("LPL-14", "0 / 0 where everything is masked", plant.returns(loss=mean_of_nothing)),
    "clears_in_place": Bug(
        "LPL-15",
        "hidden states of masked tokens cleared in place",
        plant.writes_first(lambda c: None if c.mask is None else c.hidden.masked_fill_(~c.mask[..., None], 0.0)),
    ),
    "differs_from_call_to_call": plant.nondeterministic("LPL-16", "loss"),
    "reads_the_loss_back": Bug(
        "LPL-17", "the loss logged from inside the wrapper", plant.reads_back(lambda c, o: o.loss.detach())
    ),
    "temperatures_are_clamped": plant.lenient(
        "LPL-18", "temperature 0 clamped instead of refused", temperature=clamped
    ),
    "anonymous_errors": plant.anonymous_errors("LPL-18"),
    "lora_ignored": Bug("LPL-20", "an adapter of the head accepted and ignored", plant.ignores("lora")),
    "factor_detached": Bug("LPL-20", "no gradient reaches A of an adapter", plant.given(lora=factor_detached)),
    "partial_grad_ignored": Bug("LPL-22", "dX is added up all the same", plant.given(partial_grad=False)),
    "local_counts": Bug("LPL-19", "counts of the rank at hand: a group without effect", plant.ignores("process_group")),
    "gradient_to_be_summed": Bug(
        "LPL-19",
        "gradients whose sum over ranks is that of the whole, where they are to be averaged",
        plant.where(
            lambda c: c.process_group is not None,
            plant.returns(loss=lambda c, o: plant.with_gradient_times(o.loss, 1 / c.process_group.size())),
        ),
    ),
}
