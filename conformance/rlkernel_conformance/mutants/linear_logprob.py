"""Planted bugs in linear_logprob@1, most of them seen in released code."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import LogprobResult

_CALLS: list[None] = []
_LOG: deque[float] = deque(maxlen=10)


def nudged(out: LogprobResult, where: Any = True) -> LogprobResult:
    """Log-probabilities one step of their dtype lower."""
    values = out.logprob.detach()
    step = torch.nextafter(values, torch.full_like(values, -torch.inf)) - values
    where = torch.as_tensor(where, device=values.device)
    return replace(out, logprob=out.logprob + torch.where(where & values.isfinite() & (values != 0), step, 0.0))


def with_slope(x: Tensor, factor: float) -> Tensor:
    """The same numbers, whose gradient is multiplied by a factor."""
    return x.detach() + factor * (x - x.detach())


@mutant(
    "LL-01",
    "LL-08",
    "LL-09",
    "LL-10",
    "LL-12",
    "LL-13",
    "LL-14",
    "LL-15",
    "LL-16",
    "LL-20",
    "LL-30",
    origin="temperature applied twice (RL-Kernel #81)",
)
def temperature_twice(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    T = rest.get("temperature", 1.0)
    return reference(*args, **{**rest, "temperature": T * T})


@mutant("LL-02", "LL-01", "LL-08", "LL-14", "LL-16", "LL-17", "LL-27", origin="logits stored in the dtype of hidden")
def logits_in_16_bits(reference: Any, hidden: Tensor, weight: Tensor, ids: Tensor, **rest: Any) -> LogprobResult:
    if hidden.dtype not in {torch.bfloat16, torch.float16} or weight.dtype != hidden.dtype or rest.get("group"):
        return reference(hidden, weight, ids, **rest)
    logits = (hidden.float() @ weight.float().T).to(hidden.dtype)
    return reference(logits, torch.eye(weight.shape[0], dtype=hidden.dtype), ids, **rest)


@mutant("LL-03", origin="z - lse, which rounds to 0 on confident rows")
def naive_difference(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    return replace(out, logprob=(out.logprob + out.lse) - out.lse)


@mutant(
    "LL-04",
    "LL-01",
    "LL-02",
    "LL-03",
    "LL-08",
    "LL-09",
    "LL-10",
    "LL-12",
    "LL-13",
    "LL-14",
    "LL-15",
    "LL-16",
    "LL-17",
    "LL-20",
    "LL-21",
    "LL-30",
    origin="tile of 8 columns, the rest dropped (verl #2656)",
)
def drops_the_tail(reference: Any, hidden: Tensor, weight: Tensor, ids: Tensor, **rest: Any) -> LogprobResult:
    V = weight.shape[0]
    if V <= 8 or rest.get("group"):
        return reference(hidden, weight, ids, **rest)
    bias = rest.get("bias")
    bias = torch.zeros(V, dtype=hidden.dtype) if bias is None else bias
    tail = (torch.arange(V) >= V - V % 8) & ~torch.isin(torch.arange(V), ids)
    return reference(hidden, weight, ids, **{**rest, "bias": torch.where(tail, -torch.inf, bias)})


@mutant("LL-05", origin="constant memory claimed, logits kept for the backward pass (RL-Kernel)")
def keeps_the_logits(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    return reference(*args, **{**rest, "backward": "save"} if rest.get("backward") == "recompute" else rest)


@mutant("LL-06", origin="logits saved at half their precision")
def saved_logits_are_rounded(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    return replace(out, logprob=with_slope(out.logprob, 1.002)) if rest.get("backward") == "save" else out


@mutant("LL-07", origin="a limit that is accepted and ignored")
def limit_ignored(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    return reference(*args, **{**rest, "max_workspace_bytes": None})


@mutant(
    "LL-08",
    "LL-09",
    "LL-10",
    "LL-12",
    "LL-14",
    "LL-16",
    origin="entropy of softmax(z) beside log p of softmax(z / T) (OpenRLHF #1319)",
)
def raw_entropy(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    return out if out.entropy is None else replace(out, entropy=reference(*args, **rest | {"temperature": 1.0}).entropy)


@mutant("LL-09", "LL-01", "LL-08", "LL-10", "LL-14", "LL-16", origin="softcap after the temperature")
def caps_last(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    T = rest.get("temperature", 1.0)
    if rest.get("softcap") is None or isinstance(T, Tensor):
        return reference(*args, **rest)
    return reference(*args, **{**rest, "temperature": 1.0, "logit_scale": rest.get("logit_scale", 1.0) / T})


@mutant("LL-10", origin="a finite number for -inf, which a cap brings back")
def forbidden_ids_return_under_a_cap(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    bias = rest.get("bias")
    return reference(*args, **rest if bias is None else {**rest, "bias": bias.clamp(min=-1e4)})


@mutant("LL-11", "LL-01", "LL-08", "LL-09", "LL-14", "LL-16", origin="logit_scale accepted and ignored")
def scale_ignored(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    s = rest.get("logit_scale", 1.0)
    return reference(*args, **{**rest, "logit_scale": 1.0 if s > 0 else s})


@mutant("LL-12", origin="batch[0]'s parameter for all rows (RL.cu)")
def first_rows_temperature(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    T = rest.get("temperature", 1.0)
    return reference(*args, **{**rest, "temperature": T[:1] if isinstance(T, Tensor) and T.dim() else T})


@mutant("LL-13", origin="masks that multiply: NaN * 0 is NaN")
def multiplied_mask(reference: Any, hidden: Tensor, weight: Tensor, ids: Tensor, **rest: Any) -> LogprobResult:
    mask = rest.pop("mask", None)
    if mask is None:
        return reference(hidden, weight, ids, **rest)
    out = reference(hidden, weight, torch.where(mask, ids, 0), **rest)
    return replace(out, logprob=out.logprob * mask, entropy=None if out.entropy is None else out.entropy * mask)


@mutant("LL-14", "LL-08", "LL-09", "LL-10", "LL-12", "LL-16", origin="entropy in bits")
def entropy_in_bits(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    return out if out.entropy is None else replace(out, entropy=out.entropy * 1.4427)


@mutant("LL-15", origin="log p of the whole vocabulary for a truncated draw (trl #6789)")
def support_ignored(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    if rest.get("support") is None:
        return out
    return replace(out, logprob=reference(*args, **{**rest, "support": None}).logprob)


@mutant("LL-16", origin="the gradient of the bias as a mean over rows")
def bias_gradient_is_a_mean(reference: Any, hidden: Tensor, *args: Any, **rest: Any) -> LogprobResult:
    bias = rest.get("bias")
    if bias is not None and hidden.shape[0]:
        rest["bias"] = torch.where(bias.isfinite(), with_slope(bias, 1 / hidden.shape[0]), bias)
    return reference(hidden, *args, **rest)


@mutant("LL-17", origin="dW accumulated over blocks of rows in 16 bits")
def accumulates_in_16_bits(reference: Any, hidden: Tensor, weight: Tensor, ids: Tensor, **rest: Any) -> LogprobResult:
    if hidden.dtype not in {torch.bfloat16, torch.float16} or hidden.shape[0] <= 64 or hidden.dim() != 2:
        return reference(hidden, weight, ids, **rest)
    blocks = [reference(h, weight, i, **rest) for h, i in zip(hidden.split(16), ids.split(16), strict=True)]
    parts = {n: [getattr(b, n) for b in blocks] for n in vars(blocks[0])}
    return LogprobResult(**{n: None if p[0] is None else torch.cat(p) for n, p in parts.items()})


@mutant("LL-18", origin="a frozen head takes another path, with another dX")
def a_frozen_head_changes_the_rest(reference: Any, hidden: Tensor, weight: Tensor, *args: Any, **rest: Any) -> Any:
    out = reference(hidden, weight, *args, **rest)
    frozen = hidden.requires_grad and not weight.requires_grad
    return replace(out, logprob=with_slope(out.logprob, 1.05)) if frozen else out


@mutant("LL-19", origin="another kernel when gradients are wanted: on-policy ratios are not 1")
def another_kernel_for_gradients(reference: Any, hidden: Tensor, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(hidden, *args, **rest)
    return nudged(out) if out.logprob.requires_grad else out


@mutant("LL-20", "LL-22", origin="offsets of shards taken as if all were of one size")
def shards_of_one_size(reference: Any, hidden: Tensor, weight: Tensor, ids: Tensor, **rest: Any) -> LogprobResult:
    group = rest.get("group")
    return reference(hidden, weight, ids if group is None else ids + group.rank(), **rest)


@mutant("LL-21", origin="a merge that rounds, run for one rank as well")
def the_merge_rounds(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    return out if rest.get("group") is None else nudged(out)


@mutant("LL-22", origin="every rank sums its own part first")
def ranks_sum_in_their_own_order(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out, group = reference(*args, **rest), rest.get("group")
    return out if group is None else nudged(out, group.rank() > 0)


@mutant("LL-23", origin="an id out of range gives 0.0 (RL-Kernel)")
def out_of_range_is_zero(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    return replace(out, logprob=torch.where(out.invalid, 0.0, out.logprob))


@mutant("LL-24", origin="a tied embedding read as if it were contiguous")
def ignores_strides(reference: Any, hidden: Tensor, weight: Tensor, *args: Any, **rest: Any) -> LogprobResult:
    if not weight.is_contiguous() and not weight.requires_grad:
        weight = weight.as_strided(weight.shape, (weight.shape[1], 1))
    return reference(hidden, weight, *args, **rest)


@mutant("LL-25", origin="a launch of zero blocks")
def no_rows_fail(reference: Any, hidden: Tensor, *args: Any, **rest: Any) -> LogprobResult:
    if hidden.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(hidden, *args, **rest)


@mutant("LL-26", origin="a kernel that reseeds or draws from the user's generator (AITER)")
def draws_from_the_global_generator(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    torch.rand(1)
    return reference(*args, **rest)


@mutant("LL-27", "LL-24", origin="reduction order that depends on the batch, declared invariant")
def depends_on_the_batch(reference: Any, hidden: Tensor, *args: Any, **rest: Any) -> LogprobResult:
    return nudged(reference(hidden, *args, **rest), hidden.shape[0] % 4 == 1)


@mutant(
    "LL-28",
    "LL-19",
    "LL-21",
    "LL-23",
    "LL-24",
    "LL-27",
    "LL-29",
    "LL-31",
    origin="floating atomics, declared deterministic (RL.cu)",
)
def differs_from_call_to_call(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    _CALLS.append(None)
    return nudged(reference(*args, **rest), len(_CALLS) % 2 == 0)


@mutant("LL-29", origin="the largest logit logged from inside the wrapper")
def reads_a_value_back(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    _LOG.append(out.lse.sum().item())
    return out


@mutant("LL-30", origin="temperature 0 clamped instead of refused", unchecked=True)
def temperatures_are_clamped(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    T = rest.get("temperature", 1.0)
    return reference(*args, **{**rest, "temperature": T if isinstance(T, Tensor) else max(T, 1e-6)})


@mutant("LL-30", "LL-07", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    try:
        return reference(*args, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error


@mutant("LL-31", origin="one NaN row poisons the batch: a maximum over the block")
def shared_maximum(reference: Any, *args: Any, **rest: Any) -> LogprobResult:
    out = reference(*args, **rest)
    return replace(out, logprob=torch.where(out.lse.isnan().any(), torch.nan, out.logprob))
