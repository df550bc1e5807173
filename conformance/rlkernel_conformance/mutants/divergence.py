"""Planted bugs in divergence@1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import number_masks, plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.spec.divergence import DivergenceCall

Finish = Callable[[Any, Tensor], Tensor]  # of a record and plain torch's result


def then(change: Finish) -> How:
    """The result, changed."""
    return lambda right, call: change(call, right(call))


def swapped_weights(right: Run, call: Any) -> Any:
    """Beta as the weight of the student."""
    return right(call if call.beta is None else replace(call, beta=1 - call.beta))


def difference_of_sums(right: Run, call: DivergenceCall) -> Any:
    """Cross entropy less entropy, both of which are large."""
    out: Tensor = right(call)
    if call.kind != "forward_kl" or call.teacher_ids is not None or isinstance(call.temperature, Tensor):
        return out
    log_s = torch.log_softmax(call.logits.detach().to(out.dtype) / call.temperature, -1)
    log_t = torch.log_softmax(call.teacher.to(out.dtype) / call.temperature, -1)
    t = log_t.exp()
    less = -(t * log_s).sum(-1) + (t * log_t).sum(-1)
    return out + (less - out.detach())


def drops_the_tail(right: Run, call: DivergenceCall) -> Any:
    V = call.logits.shape[-1]
    whole = V - V % 8 if V > 8 and call.teacher_ids is None else V
    return right(
        replace(call, logits=call.logits[..., :whole], teacher=call.teacher[..., :whole] if whole < V else call.teacher)
    )


def from_zero(call: Any) -> Tensor:
    """Logits held to what exp takes without a maximum subtracted."""
    x: Tensor = call.logits
    return x if x.dtype == torch.float64 else x.clamp(-80, 80)


def clamped(call: Any) -> Tensor:
    """Probabilities with a floor: no log of 0."""
    x: Tensor = call.teacher
    return x if call.teacher_ids is not None else torch.where(x == -torch.inf, x.amax(-1, keepdim=True) - 23, x)


def temperature_of_one_side(right: Run, call: Any) -> Any:
    """The student's alone is divided."""
    return right(
        call
        if call.teacher_ids is not None or call.teacher_temperature is not None
        else replace(call, teacher_temperature=1.0)
    )


def first_of_many(T: Any) -> Any:
    return T.reshape(-1)[:1].expand(T.shape) if isinstance(T, Tensor) and T.numel() else T


def multiplied_mask(right: Run, call: Any) -> Any:
    return right(call) if call.mask is None else right(replace(call, mask=None)) * call.mask


def not_halved(call: Any, out: Tensor) -> Tensor:
    return 2 * out if call.kind == "tv" else out


def without_the_mean(right: Run, call: Any) -> Any:
    """The gradient of reverse KL without what keeps its sum at 0."""
    out: Tensor = right(call)
    if call.kind != "reverse_kl" or not out.requires_grad:
        return out
    s = torch.softmax(call.logits.detach().double() / torch.as_tensor(call.temperature).double().reshape(-1, 1), -1)
    more = ((call.logits - call.logits.detach()).nan_to_num() * s.nan_to_num()).sum(-1)
    return out + (0.05 * more).to(out.dtype)


def constant_teacher(right: Run, call: Any) -> Any:
    """A gradient that is half of what it should be: that of a mixture taken as constant."""
    out: Tensor = right(call)
    return plant.with_gradient_times(out, 0.5) if call.kind == "jsd" else out


def padding_counts(call: Any) -> Any:
    ids = call.teacher_ids
    return ids if ids is None else torch.where(ids == -1, 0, ids)


def no_tail(right: Run, call: DivergenceCall) -> Any:
    """The listed ids alone, renormalized on neither side: what truncated KL is in most trainers."""
    ids = call.teacher_ids
    if (
        ids is None
        or call.kind not in {"forward_kl", "reverse_kl"}
        or bool(((ids < 0) | (ids >= call.logits.shape[-1])).any())
    ):
        return right(call)
    T = call.temperature if isinstance(call.temperature, Tensor) else torch.tensor(float(call.temperature))
    log_s = torch.log_softmax(call.logits.double() / T.double().expand(ids.shape[:-1])[..., None], -1).gather(
        -1, ids.long()
    )
    log_t = call.teacher.double()
    a, b = (log_t, log_s) if call.kind == "forward_kl" else (log_s, log_t)
    found = (a.exp() * (a - b)).sum(-1).to(right(call).dtype)
    return found if call.mask is None else torch.where(call.mask, found, 0.0)


def into_range(call: DivergenceCall) -> Any:
    ids = call.teacher_ids
    return ids if ids is None else ids.long().clamp(-1, call.logits.shape[-1] - 1)


def shared_sum(call: Any, out: Tensor) -> Tensor:
    return out + 0.0 * torch.where(out.isinf(), 0.0, out).sum()


def large(call: Any) -> bool:
    rows = call.logits.shape[:-1]
    return bool(rows.numel() >= 40)


def cut_teacher(call: Any) -> Any:
    """A teacher of a larger vocabulary, cut to the student's."""
    if not isinstance(call.teacher, Tensor) or call.teacher_ids is not None or call.teacher.dim() != 2:
        return call
    return replace(call, teacher=call.teacher[:, : call.logits.shape[-1]])


BUGS: Final = {
    "beta_of_the_student": Bug("DV-01", "beta weighs the student", swapped_weights),
    "difference_of_sums": Bug("DV-02", "cross entropy less entropy: negative near 0", difference_of_sums),
    "drops_columns": Bug("DV-03", "tile of 8 columns, the rest dropped", drops_the_tail),
    "without_the_maximum": Bug("DV-04", "exponentials clamped in place of shifted", plant.given(logits=from_zero)),
    "a_floor_of_probabilities": Bug(
        "DV-05",
        "teacher probabilities clamped at 1e-10: no infinity, and none where it belongs",
        plant.given(teacher=clamped),
    ),
    "temperature_of_one_side": Bug("DV-06", "the temperature on the student alone", temperature_of_one_side),
    "teacher_temperature_ignored": Bug("DV-07", "accepted and ignored", plant.ignores("teacher_temperature")),
    "first_rows_temperature": Bug("DV-08", "the first row's for all", plant.maps(temperature=first_of_many)),
    "multiplied_mask": Bug("DV-09", "masks that multiply: NaN * 0 is NaN", multiplied_mask),
    "tv_is_not_halved": Bug("DV-10", "TV as the L1 distance", then(not_halved)),
    "a_constant_mixture": Bug("DV-11", "half of the gradient of a JSD", constant_teacher),
    "without_the_mean": Bug("DV-12", "a gradient that moves all logits", without_the_mean),
    "another_kernel_for_gradients": Bug(
        "DV-13", "another kernel when gradients are wanted", then(lambda _, out: plant.lower(out, out.requires_grad))
    ),
    "padding_counts": Bug("DV-14", "padding is id 0", plant.given(teacher_ids=padding_counts)),
    "no_tail": Bug("DV-15", "what is not listed left out: negative KL (verl #7856)", no_tail),
    "ids_are_clamped": Bug("DV-16", "ids out of range moved into it", plant.given(teacher_ids=into_range)),
    "shared_sum": Bug("DV-17", "one NaN row poisons the batch", then(shared_sum)),
    "ignores_strides": Bug("DV-18", "a view read as if it were contiguous", plant.ignores_strides("teacher")),
    "no_rows_fail": Bug("DV-19", "a launch of zero blocks", plant.fails_if(lambda c: c.logits.numel() == 0)),
    "scales_in_place": Bug(
        "DV-20", "logits divided by the temperature where they lie", plant.writes(lambda c: c.teacher.mul_(0.5))
    ),
    "depends_on_the_batch": Bug(
        "DV-21", "another kernel for many rows", then(lambda call, out: plant.lower(out, large(call)))
    ),
    "differs_from_call_to_call": Bug(
        "DV-22", "floating atomics, declared deterministic", plant.alternates(then(lambda _, out: plant.lower(out)))
    ),
    "reads_a_value": plant.reads_a_value("DV-23", lambda c: c.logits),
    "cuts_the_teacher": plant.lenient("DV-24", "a teacher of another vocabulary is cut", cut_teacher),
    "anonymous_errors": plant.anonymous_errors("DV-24"),
    **number_masks.OF_DIVERGENCES,
}
