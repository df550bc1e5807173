"""Planted bugs in linear_logprob@1, most of them seen in released code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import number_masks, plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_conformance.mutants.listed_ids import OF_A_HEAD
from rlkernel_conformance.mutants.logprob import (
    clamped,
    entropy_in_bits,
    first_of_many,
    naive_difference,
    out_of_range_is_zero,
    raw_entropy,
    support_ignored,
    temperature_twice,
)
from rlkernel_core.quant import QuantTensor, dequantize
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.qmatmul import LoRA

_NARROW: Final = {torch.bfloat16, torch.float16}


def nudges(wanted: Callable[[Any, LogprobResult], Any]) -> How:
    """Log-probabilities one step of their dtype lower in some calls or rows."""
    return plant.returns(logprob=lambda c, o: plant.lower(o.logprob, wanted(c, o)))


def logits_in_16_bits(right: Run, call: LinearLogprobCall) -> LogprobResult:
    if call.hidden.dtype not in _NARROW or call.weight.dtype != call.hidden.dtype or call.group:
        return right(call)
    logits = (call.hidden.float() @ call.weight.float().T).to(call.hidden.dtype)
    return right(replace(call, hidden=logits, weight=torch.eye(call.weight.shape[0], dtype=call.hidden.dtype)))


def drops_the_tail(right: Run, call: LinearLogprobCall) -> LogprobResult:
    V = call.weight.shape[0]
    if V <= 8 or call.group:
        return right(call)
    bias = torch.zeros(V, dtype=call.hidden.dtype) if call.bias is None else call.bias
    tail = (torch.arange(V) >= V - V % 8) & ~torch.isin(torch.arange(V), call.ids)
    return right(replace(call, bias=torch.where(tail, -torch.inf, bias)))


def nan_with_a_forbidden_tile(call: LinearLogprobCall, out: LogprobResult) -> Tensor:
    if call.bias is None or call.group is not None:
        return out.logprob
    tiles = torch.nn.functional.pad(call.bias.detach(), (0, -len(call.bias) % 256), value=-torch.inf).view(-1, 256)
    return torch.where((tiles == -torch.inf).all(1).any(), torch.nan, out.logprob)


def caps_last(right: Run, call: Any) -> Any:
    if call.softcap is None or isinstance(call.temperature, Tensor):
        return right(call)
    return right(replace(call, temperature=1.0, logit_scale=call.logit_scale / call.temperature))


def multiplied_mask(right: Run, call: LinearLogprobCall) -> LogprobResult:
    if call.mask is None:
        return right(call)
    out = right(replace(call, ids=torch.where(call.mask, call.ids, 0), mask=None))
    entropy = None if out.entropy is None else out.entropy * call.mask
    return replace(out, logprob=out.logprob * call.mask, entropy=entropy)


def mean_gradient(call: LinearLogprobCall) -> Tensor | None:
    bias, N = call.bias, call.hidden.shape[0]
    if bias is None or not N:
        return bias
    return torch.where(bias.isfinite(), plant.with_gradient_times(bias, 1 / N), bias)


def accumulates_in_16_bits(right: Run, call: LinearLogprobCall) -> LogprobResult:
    if call.hidden.dtype not in _NARROW or call.hidden.shape[0] <= 64 or call.hidden.dim() != 2:
        return right(call)
    rows = zip(call.hidden.split(16), call.ids.split(16), strict=True)
    blocks = [right(replace(call, hidden=hidden, ids=ids)) for hidden, ids in rows]
    parts = {n: [getattr(b, n) for b in blocks] for n in vars(blocks[0])}
    return LogprobResult(**{n: None if p[0] is None else torch.cat(p) for n, p in parts.items()})


def frozen_head(call: Any) -> bool:
    return call.hidden.requires_grad and not call.weight.requires_grad


_MERGED: Final[dict[Any, Any]] = {}


def merges_once(right: Run, call: LinearLogprobCall) -> LogprobResult:
    lora = call.lora
    if lora is None or lora.requires_grad:
        return right(call)
    key = (lora.A.data_ptr(), lora.B.data_ptr(), lora.A.shape, lora.B.shape, lora.A.dtype, lora.scale)
    if key not in _MERGED:
        _MERGED[key] = (lora.A, lora.B, lora.B.clone())  # nobody else gets the addresses
    return right(replace(call, lora=replace(lora, B=_MERGED[key][-1])))


def adapter_in_the_dtype_of_hidden(call: LinearLogprobCall) -> LoRA | None:
    lora, kind = call.lora, call.hidden.dtype
    return lora if lora is None or lora.requires_grad else replace(lora, A=lora.A.to(kind), B=lora.B.to(kind))


def decoded_to_16_bits(weight: Any) -> Any:
    return dequantize(weight, dtype=torch.bfloat16).float() if isinstance(weight, QuantTensor) else weight


def factor_detached(call: Any) -> LoRA | None:
    lora: LoRA | None = call.lora
    if lora is None or not lora.A.requires_grad:
        return lora
    return replace(lora, A=plant.with_gradient_times(lora.A, 0.0))


def part_of_the_factor(call: Any) -> LoRA | None:
    lora: LoRA | None = call.lora
    if lora is None or not lora.A.requires_grad or not call.partial_grad:
        return lora
    return replace(lora, A=plant.with_gradient_times(lora.A, 0.5))


def shifted_shards(call: Any) -> Tensor:
    ids: Tensor = call.ids
    return ids if call.group is None else ids + call.group.rank()


BUGS: Final = {
    "temperature_twice": Bug("LL-01", "temperature applied twice (RL-Kernel #81)", temperature_twice),
    "logits_in_16_bits": Bug("LL-02", "logits stored in the dtype of hidden", logits_in_16_bits),
    "naive_difference": Bug("LL-03", "z - lse, which rounds to 0 on confident rows", naive_difference),
    "drops_the_tail": Bug("LL-04", "tile of 8 columns, the rest dropped (verl #2656)", drops_the_tail),
    "keeps_the_logits": Bug(
        "LL-05",
        "constant memory claimed, logits kept for the backward pass (RL-Kernel)",
        plant.maps(backward={"recompute": "save"}),
    ),
    "saved_logits_are_rounded": Bug(
        "LL-06",
        "logits saved at half their precision",
        plant.returns(
            logprob=lambda c, o: plant.with_gradient_times(o.logprob, 1.002 if c.backward == "save" else 1.0)
        ),
    ),
    "limit_ignored": Bug("LL-07", "a limit that is accepted and ignored", plant.ignores("max_workspace_bytes")),
    "raw_entropy": Bug("LL-08", "entropy of softmax(z) beside log p of softmax(z / T) (OpenRLHF #1319)", raw_entropy),
    "caps_last": Bug("LL-09", "softcap after the temperature", caps_last),
    "forbidden_ids_return_under_a_cap": Bug(
        "LL-10", "a finite number for -inf, which a cap brings back", plant.maps(bias=lambda x: x.clamp(min=-1e4))
    ),
    "a_tile_of_forbidden_ids_is_nan": Bug(
        "LL-10",
        "a tile's largest logit stands for -inf, and its multiple is rounded (our own kernel for Hopper)",
        plant.returns(logprob=nan_with_a_forbidden_tile),
    ),
    "scale_ignored": Bug(
        "LL-11", "logit_scale accepted and ignored", plant.maps(logit_scale=lambda s: 1.0 if s > 0 else s)
    ),
    "first_rows_temperature": Bug(
        "LL-12", "batch[0]'s parameter for all rows (RL.cu)", plant.maps(temperature=first_of_many)
    ),
    "multiplied_mask": Bug("LL-13", "masks that multiply: NaN * 0 is NaN", multiplied_mask),
    "entropy_in_bits": Bug("LL-14", "entropy in bits", entropy_in_bits),
    "support_ignored": Bug("LL-15", "log p of the whole vocabulary for a truncated draw (trl #6789)", support_ignored),
    "bias_gradient_is_a_mean": Bug(
        "LL-16", "the gradient of the bias as a mean over rows", plant.given(bias=mean_gradient)
    ),
    "accumulates_in_16_bits": Bug("LL-17", "dW accumulated over blocks of rows in 16 bits", accumulates_in_16_bits),
    "a_frozen_head_changes_the_rest": Bug(
        "LL-18",
        "a frozen head takes another path, with another dX",
        plant.returns(logprob=lambda c, o: plant.with_gradient_times(o.logprob, 1.05 if frozen_head(c) else 1.0)),
    ),
    "another_kernel_for_gradients": Bug(
        "LL-19",
        "another kernel when gradients are wanted: on-policy ratios are not 1",
        nudges(lambda c, o: o.logprob.requires_grad),
    ),
    "shards_of_one_size": Bug(
        "LL-20", "offsets of shards taken as if all were of one size", plant.given(ids=shifted_shards)
    ),
    "the_merge_rounds": Bug(
        "LL-21", "a merge that rounds, run for one rank as well", nudges(lambda c, o: c.group is not None)
    ),
    "ranks_sum_in_their_own_order": Bug(
        "LL-22", "every rank sums its own part first", nudges(lambda c, o: c.group is not None and c.group.rank() > 0)
    ),
    "out_of_range_is_zero": Bug("LL-23", "an id out of range gives 0.0 (RL-Kernel)", out_of_range_is_zero),
    "ignores_strides": Bug("LL-24", "a tied embedding read as if it were contiguous", plant.ignores_strides("weight")),
    "no_rows_fail": Bug("LL-25", "a launch of zero blocks", plant.fails_if(lambda c: c.hidden.numel() == 0)),
    "draws_from_the_global_generator": Bug(
        "LL-26",
        "a kernel that reseeds or draws from the user's generator (AITER)",
        plant.draws_from_the_global_generator,
    ),
    "depends_on_the_batch": plant.batch_dependent(
        "LL-27",
        "logprob",
        "reduction order that depends on the batch, declared invariant",
        lambda c: c.hidden.shape[0] % 4 == 1,
    ),
    "differs_from_call_to_call": plant.nondeterministic("LL-28", "logprob"),
    "reads_a_value_back": Bug(
        "LL-29", "the largest logit logged from inside the wrapper", plant.reads_back(lambda c, o: o.lse.sum())
    ),
    "temperatures_are_clamped": plant.lenient("LL-30", "temperature 0 clamped instead of refused", temperature=clamped),
    "anonymous_errors": plant.anonymous_errors("LL-30"),
    "joins_by_rank": Bug(
        "LL-32",
        "statistics of a rank are rounded before they are joined: bits depend on how many ranks there are",
        nudges(lambda c, o: c.group is not None and c.group.size() > 1),
    ),
    "shared_maximum": Bug(
        "LL-31",
        "one NaN row poisons the batch: a maximum over the block",
        plant.returns(logprob=lambda c, o: torch.where(o.lse.isnan().any(), torch.nan, o.logprob)),
    ),
    "lora_ignored": Bug("LL-36", "an adapter of the head accepted and ignored", plant.ignores("lora")),
    "lora_scale_lost": Bug("LL-36", "the scale of LoRA lost", plant.maps(lora=lambda x: replace(x, scale=1.0))),
    "adapter_rounded": Bug(
        "LL-36", "adapters of 32 bits rounded to the dtype of hidden", plant.given(lora=adapter_in_the_dtype_of_hidden)
    ),
    "factor_detached": Bug("LL-37", "no gradient reaches A", plant.given(lora=factor_detached)),
    "quantized_head_rounded": Bug(
        "LL-39", "a quantized head decoded to 16 bits", plant.maps(weight=decoded_to_16_bits)
    ),
    "merges_once": Bug("LL-38", "an adapter merged when it is first seen", merges_once),
    "partial_grad_ignored": Bug("LL-44", "dX is added up all the same", plant.given(partial_grad=False)),
    "factor_left_a_part": Bug("LL-44", "dA is left a part of it, too", plant.given(lora=part_of_the_factor)),
    **OF_A_HEAD,
    **number_masks.OF_A_HEAD,
}
