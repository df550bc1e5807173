"""Planted bugs in linear_divergence@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_conformance.mutants.divergence import first_of_many, multiplied_mask, shared_sum, swapped_weights, then
from rlkernel_core.spec.linear_divergence import LinearDivergenceCall

_NARROW: Final = {torch.bfloat16, torch.float16}


def without_nan(call: LinearDivergenceCall, out: Tensor) -> Tensor:
    """0 in rows whose student's logits are all -inf."""
    lost = (call.hidden.detach().double() @ call.weight.detach().double().T < -torch.finfo(torch.float32).max).all(-1)
    return torch.where(lost, 0.0, out)


def rounded_logits(right: Run, call: LinearDivergenceCall) -> Any:
    if call.hidden.dtype not in _NARROW or call.hidden.requires_grad or call.weight.requires_grad:
        return right(call)
    logits = (call.hidden.float() @ call.weight.float().T).to(call.hidden.dtype)
    return right(replace(call, hidden=logits, weight=torch.eye(call.weight.shape[0], dtype=call.hidden.dtype)))


def drops_the_tail(right: Run, call: LinearDivergenceCall) -> Any:
    V = call.weight.shape[0]
    if V <= 8 or V % 8 == 0 or call.teacher_ids is not None or call.teacher_weight is not None:
        return right(call)
    whole = V - V % 8
    return right(replace(call, weight=call.weight[:whole], teacher=call.teacher[..., :whole]))


def keeps_the_logits(right: Run, call: LinearDivergenceCall) -> Any:
    """Logits of all rows are made beside the result and kept for the backward pass."""
    out = right(call)
    if call.hidden.dtype in _NARROW or not call.hidden.requires_grad or call.mask is not None:
        return out
    logits = call.hidden @ call.weight.T
    return out + (0.0 * logits.square().nan_to_num().sum(-1)).to(out.dtype)


def larger_head(call: LinearDivergenceCall) -> Tensor | None:
    """The teacher's head, one percent too large."""
    w = call.teacher_weight
    return w if w is None else 1.01 * w


def mean_gradient(call: LinearDivergenceCall) -> Tensor:
    w, N = call.weight, call.hidden.shape[:-1].numel()
    return plant.with_gradient_times(w, 1 / N) if N > 1 and w.requires_grad else w


def accumulates_in_16_bits(right: Run, call: LinearDivergenceCall) -> Any:
    N = call.hidden.shape[0] if call.hidden.dim() == 2 else 0
    if call.hidden.dtype not in _NARROW or N <= 64 or call.teacher_ids is not None or call.mask is not None:
        return right(call)
    rows = zip(call.hidden.split(16), call.teacher.split(16), strict=True)
    return torch.cat([right(replace(call, hidden=h, teacher=t)) for h, t in rows])


def frozen_head(call: Any) -> bool:
    return call.hidden.requires_grad and not call.weight.requires_grad


def another_when_frozen(call: Any, out: Tensor) -> Tensor:
    return plant.with_gradient_times(out, 1.05) if frozen_head(call) else out


def forgets_upstream_where_saved(call: LinearDivergenceCall, out: Tensor) -> Tensor:
    return plant.with_upstream(out, torch.ones_like) if call.backward == "save" and out.requires_grad else out


def into_range(call: LinearDivergenceCall) -> Any:
    ids = call.teacher_ids
    return ids if ids is None else ids.long().clamp(-1, call.weight.shape[0] - 1)


def cut_teacher(call: LinearDivergenceCall) -> Any:
    if not isinstance(call.teacher_weight, Tensor) or call.teacher_weight.dim() != 2:
        return call
    return replace(call, teacher_weight=call.teacher_weight[: call.weight.shape[0]])


BUGS: Final = {
    "beta_of_the_student": Bug("LD-01", "beta weighs the student", swapped_weights),
    "rounded_logits": Bug("LD-02", "logits stored in the dtype of hidden", rounded_logits),
    "drops_columns": Bug("LD-03", "tile of 8 columns, the rest dropped", drops_the_tail),
    "keeps_the_logits": Bug("LD-04", "constant memory claimed, logits kept", keeps_the_logits),
    "another_teacher": Bug("LD-05", "the teacher's head is scaled", plant.given(teacher_weight=larger_head)),
    "first_rows_temperature": Bug("LD-06", "the first row's for all", plant.maps(temperature=first_of_many)),
    "multiplied_mask": Bug("LD-07", "masks that multiply: NaN * 0 is NaN", multiplied_mask),
    "a_mean_gradient": Bug("LD-08", "d_weight as a mean over rows", plant.given(weight=mean_gradient)),
    "accumulates_in_16_bits": Bug("LD-09", "d_weight summed over blocks in 16 bits", accumulates_in_16_bits),
    "a_frozen_head_changes_the_rest": Bug("LD-10", "another path, with another d_hidden", then(another_when_frozen)),
    "another_kernel_for_gradients": Bug(
        "LD-11", "another kernel when gradients are wanted", then(lambda _, out: plant.lower(out, out.requires_grad))
    ),
    "shared_sum": Bug("LD-12", "one NaN row poisons the batch", then(shared_sum)),
    "no_law_is_no_divergence": Bug(
        "LD-12", "a largest logit of -inf taken for 0, so that a row without a law has a divergence", then(without_nan)
    ),
    "ignores_strides": Bug("LD-13", "a tied head read as if it were contiguous", plant.ignores_strides("weight")),
    "no_rows_fail": Bug("LD-14", "a launch of zero blocks", plant.fails_if(lambda c: c.hidden.numel() == 0)),
    "scales_in_place": Bug("LD-15", "a teacher scaled where it lies", plant.writes(lambda c: c.teacher.mul_(0.5))),
    "depends_on_the_batch": Bug(
        "LD-16",
        "another kernel for many rows",
        then(lambda call, out: plant.lower(out, call.hidden.shape[:-1].numel() >= 40)),
    ),
    "differs_from_call_to_call": Bug(
        "LD-17", "floating atomics, declared deterministic", plant.alternates(then(lambda _, out: plant.lower(out)))
    ),
    "reads_a_value": plant.reads_a_value("LD-18", lambda c: c.hidden),
    "cuts_the_teacher": plant.lenient("LD-19", "a teacher of a larger vocabulary is cut", cut_teacher),
    "anonymous_errors": plant.anonymous_errors("LD-19"),
    "what_is_saved_forgets_upstream": Bug(
        "LD-20", "gradients of a sum, whatever comes in (Liger's fused losses)", then(forgets_upstream_where_saved)
    ),
    "saved_values_are_rounded": Bug(
        "LD-20",
        "another kernel, with other bits, where gradients are kept",
        then(lambda call, out: plant.lower(out, call.backward == "save")),
    ),
    "ids_are_clamped": Bug("LD-21", "ids out of range moved into it", plant.given(teacher_ids=into_range)),
}
