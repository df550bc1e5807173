"""Planted bugs in logprob@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import logprob_ranks, number_masks, plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_conformance.mutants.listed_ids import OF_LOGITS
from rlkernel_core.spec.listed_ids import flat_ids
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult

_KEPT: Final[dict[tuple[int, int], LogprobResult]] = {}


def raw_entropy(right: Run, call: Any) -> LogprobResult:
    out = right(call)
    return out if out.entropy is None else replace(out, entropy=right(replace(call, temperature=1.0)).entropy)


def multiplied_mask(right: Run, call: LogprobCall) -> LogprobResult:
    if call.mask is None:
        return right(call)
    out = right(replace(call, ids=torch.where(call.mask, call.ids, 0), mask=None))
    return replace(out, logprob=out.logprob * call.mask)


def maximum_starts_at_zero(right: Run, call: LogprobCall) -> LogprobResult:
    out = right(call)
    lost = out.lse < -90
    return replace(out, logprob=torch.where(lost, torch.inf, out.logprob), lse=torch.where(lost, -torch.inf, out.lse))


def detached(right: Run, call: LogprobCall) -> LogprobResult:
    with torch.no_grad():
        return right(call)


def gradient_with_an_offset(call: LogprobCall, out: LogprobResult) -> Tensor:
    first = call.logits[..., 0].float()
    return out.logprob + 0.01 * (first - first.detach()).nan_to_num()


def without_the_tail(call: LogprobCall) -> Tensor:
    V = call.logits.shape[-1]
    ids = torch.arange(V)
    return torch.where((ids >= V - V % 8) & (ids != flat_ids(call.ids)[..., None]) & (V > 8), -torch.inf, call.logits)


def first_token_favored(call: LogprobCall) -> Tensor:
    bonus = torch.zeros_like(call.logits[..., :1]).expand_as(call.logits).clone()
    bonus[..., 0] = 0.05
    return call.logits + bonus


def ties_to_the_highest_id(call: LogprobCall, out: LogprobResult) -> Tensor:
    places = torch.sort(call.logits.float().flip(-1), stable=True, descending=True).indices
    return call.logits.shape[-1] - 1 - places[..., : call.top_logprobs]


def caps_last(right: Run, call: LogprobCall) -> LogprobResult:
    if call.softcap is None:
        return right(call)
    return right(replace(call, logits=call.logits / call.temperature, temperature=1.0))


def support_ignored(right: Run, call: Any) -> LogprobResult:
    out = right(call)
    return out if call.support is None else replace(out, logprob=right(replace(call, support=None)).logprob)


def shared_maximum(call: LogprobCall, out: LogprobResult) -> Tensor:
    bad = out.lse.isnan().any() & torch.tensor(call.mask is None)
    return torch.where(bad, torch.nan, out.logprob)


def upstream_gradient_leaks(call: LogprobCall, out: LogprobResult) -> Tensor:
    if call.mask is None or not call.logits.requires_grad:
        return out.logprob
    return out.logprob + 0.0 * call.logits.nan_to_num().sum(-1).float()


def remembers_by_size(right: Run, call: LogprobCall) -> LogprobResult:
    key = (call.logits.shape[0], call.logits.shape[-1])
    if key not in _KEPT or call.logits.requires_grad:
        _KEPT[key] = right(call)
    return _KEPT[key]


def first_of_many(T: Any) -> Any:
    return T[:1] if isinstance(T, Tensor) and T.dim() else T


def rounded_scale(scale: Any) -> Any:
    return torch.as_tensor(scale).bfloat16().float()


def some_scale(scale: Any) -> Any:
    return torch.where(scale.isfinite() & (scale != 0), scale.abs(), 1.0) if isinstance(scale, Tensor) else scale


def without_subnormal_codes(logits: Tensor) -> Tensor:
    if logits.element_size() > 1:
        return logits
    return torch.where(logits.float().abs() < torch.finfo(logits.dtype).tiny, 0, logits.view(torch.uint8)).view(
        logits.dtype
    )


def clamped(T: Any) -> Any:
    return max(T, 1e-6) if isinstance(T, float) else T


naive_difference: Final = plant.returns(logprob=lambda c, o: (o.logprob + o.lse) - o.lse)
temperature_twice: Final = plant.maps(temperature=lambda T: T * T)
out_of_range_is_zero: Final = plant.returns(logprob=lambda c, o: torch.where(o.invalid, 0.0, o.logprob))
entropy_in_bits: Final = plant.returns(entropy=lambda c, o: o.entropy * 1.4427)

BUGS: Final = {
    "naive_difference": Bug("LP-02", "z - lse, which rounds to 0 on confident rows", naive_difference),
    "temperature_twice": Bug("LP-01", "temperature applied twice (RL-Kernel #81)", temperature_twice),
    "raw_entropy": Bug("LP-08", "entropy of softmax(z) beside log p of softmax(z / T) (OpenRLHF #1319)", raw_entropy),
    "first_rows_temperature": Bug(
        "LP-09", "batch[0]'s parameter for all rows (RL.cu)", plant.maps(temperature=first_of_many)
    ),
    "multiplied_mask": Bug("LP-11", "masks that multiply: NaN * 0 is NaN", multiplied_mask),
    "out_of_range_is_zero": Bug("LP-17", "an id out of range gives 0.0 (RL-Kernel)", out_of_range_is_zero),
    "validation_ignored": Bug("LP-17", "validate accepted and ignored", plant.given(validate=False)),
    "maximum_starts_at_zero": Bug("LP-01", "running maximum that starts at 0 (verl #7439)", maximum_starts_at_zero),
    "entropy_of_the_impossible": Bug(
        "LP-07",
        "0 * -inf in the entropy (VeOmni #720)",
        plant.returns(entropy=lambda c, o: torch.where((c.logits == -torch.inf).any(-1), torch.nan, o.entropy)),
    ),
    "divides_in_place": Bug(
        "LP-20",
        "logits divided by the temperature in place (Triebwerk)",
        plant.writes(lambda c: c.logits.mul_(1.0 + 2**-6)),
    ),
    "draws_from_the_global_generator": Bug(
        "LP-20",
        "a kernel that reseeds or draws from the user's generator (AITER)",
        plant.draws_from_the_global_generator,
    ),
    "detached": Bug("LP-13", "gradient detached, and grad claimed all the same (RL-Kernel)", detached),
    "gradient_without_temperature": Bug(
        "LP-13",
        "the temperature missing in the gradient",
        plant.returns(logprob=lambda c, o: plant.with_gradient_times(o.logprob, c.temperature)),
    ),
    "gradient_with_an_offset": Bug(
        "LP-14", "a gradient that is not centred", plant.returns(logprob=gradient_with_an_offset)
    ),
    "drops_the_tail": Bug(
        "LP-03", "tile of 8 columns, the rest dropped (verl #2656)", plant.given(logits=without_the_tail)
    ),
    "favours_the_first_token": Bug(
        "LP-06", "a position that counts: the first token favored", plant.given(logits=first_token_favored)
    ),
    "depends_on_the_batch": plant.batch_dependent(
        "LP-21",
        "logprob",
        "reduction order that depends on the batch, declared invariant",
        lambda c: c.logits.shape[0] > 100,
    ),
    "differs_from_call_to_call": plant.nondeterministic("LP-22", "logprob"),
    "ties_to_the_highest_id": Bug(
        "LP-15", "topk without a rule for ties", plant.returns(top_ids=ties_to_the_highest_id)
    ),
    "caps_last": Bug("LP-10", "softcap after the temperature", caps_last),
    "support_ignored": Bug("LP-16", "log p of the whole vocabulary for a truncated draw (trl #6789)", support_ignored),
    "ignores_strides": Bug("LP-18", "rows read as if they were contiguous", plant.ignores_strides("logits")),
    "shared_maximum": Bug("LP-25", "one NaN row poisons the batch", plant.returns(logprob=shared_maximum)),
    "no_rows_fail": Bug("LP-19", "a launch of zero blocks", plant.fails_if(lambda c: c.ids.numel() == 0)),
    "temperature_zero_is_taken": plant.lenient(
        "LP-24", "temperature 0 clamped instead of refused", temperature=clamped
    ),
    "another_kernel_for_gradients": Bug(
        "LP-26",
        "another kernel when gradients are wanted: on-policy ratios are not 1",
        plant.returns(logprob=lambda c, o: o.logprob * (1.0 + 1e-6 * c.logits.requires_grad)),
    ),
    "upstream_gradient_leaks": Bug(
        "LP-27", "the mask multiplies the upstream gradient", plant.returns(logprob=upstream_gradient_leaks)
    ),
    "entropy_in_bits": Bug("LP-12", "entropy in bits", entropy_in_bits),
    "half_precision": Bug(
        "LP-05",
        "half precision on the way to the logsumexp",
        plant.returns(logprob=lambda c, o: o.logprob + (o.lse.bfloat16().to(o.lse.dtype) - o.lse).nan_to_num()),
    ),
    "no_shift": Bug(
        "LP-04",
        "a logsumexp without a shift, good to +-88",
        plant.returns(logprob=lambda c, o: torch.where(o.lse.abs() > 88, torch.nan, o.logprob)),
    ),
    "remembers_by_size": Bug("LP-21", "results remembered by address (KernelBench)", remembers_by_size),
    "anonymous_errors": plant.anonymous_errors("LP-24"),
    "asks_the_host": plant.reads_a_value("LP-23", lambda c: c.logits),
    "scale_of_8_bits_ignored": Bug(
        "LP-35", "codes of 8 bits taken as logits, without their scale", plant.maps(logits_scale=lambda _: 1.0)
    ),
    "scale_of_the_first_row": Bug(
        "LP-35", "the first row's scale for all rows", plant.maps(logits_scale=first_of_many)
    ),
    "scale_in_16_bits": Bug("LP-35", "scales rounded to bf16", plant.maps(logits_scale=rounded_scale)),
    "subnormal_codes_are_zero": Bug(
        "LP-35", "subnormal codes of 8-bit floats flushed to 0", plant.maps(logits=without_subnormal_codes)
    ),
    "any_scale_is_taken": Bug(
        "LP-35", "negative and infinite scales taken as they are", plant.maps(logits_scale=some_scale)
    ),
    **OF_LOGITS,
    **logprob_ranks.BUGS,
    **number_masks.OF_LOGITS,
}
