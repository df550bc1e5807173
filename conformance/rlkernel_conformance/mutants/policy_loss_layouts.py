"""Planted bugs in what policy_loss@1 does with batches, masks, layouts, ranks and arguments."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.policy_loss import LossResult

_LOG: deque[float] = deque(maxlen=10)
_CALLS: list[None] = []


@mutant("PL-09", "PL-04", origin="a parameter that is accepted and has no effect")
def limit_ignored(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "log_ratio_limit": None})


@mutant("PL-10", origin="a correction that a kind cannot have is dropped", unchecked=True)
def foreign_corrections_dropped(reference: Any, *args: Any, **rest: Any) -> LossResult:
    try:
        return reference(*args, **rest)
    except ArgumentError as error:
        if not error.argument.startswith("correction") or rest["kind"] not in {"vespo", "gmpo"}:
            raise
        return reference(*args, **{**rest, "correction": None})


@mutant("PL-11", "PL-09", "PL-34", origin="the denominator of a rank is its own count")
def global_count_ignored(reference: Any, *args: Any, **rest: Any) -> LossResult:
    return reference(*args, **{**rest, "denominator": None})


@mutant(
    "PL-12",
    "PL-01",
    "PL-02",
    "PL-04",
    "PL-05",
    "PL-06",
    "PL-07",
    "PL-11",
    "PL-16",
    "PL-17",
    "PL-18",
    "PL-20",
    "PL-22",
    "PL-23",
    "PL-24",
    "PL-25",
    origin="the mean over all positions of the padded batch",
)
def padding_counts(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    if rest.get("aggregate") != "token_mean" or rest.get("denominator") is not None or not logprob.numel():
        return reference(logprob, *args, **rest)
    return reference(logprob, *args, **{**rest, "denominator": float(logprob.numel())})


@mutant(
    "PL-13",
    "PL-01",
    "PL-02",
    "PL-09",
    "PL-16",
    "PL-17",
    "PL-19",
    "PL-20",
    "PL-23",
    "PL-24",
    origin="the mean over all sequences, the empty ones too (verl)",
)
def empty_sequences_always_count(reference: Any, *args: Any, **rest: Any) -> LossResult:
    counts = str(rest.get("aggregate")).startswith("seq_") and rest.get("denominator") is None
    return reference(*args, **{**rest, "count_empty": True} if counts else rest)


@mutant("PL-14", "PL-23", origin="0 / 0 where everything is masked")
def mean_of_nothing(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    out = reference(logprob, *args, **rest)
    mask = rest.get("mask")
    return out if mask is None else replace(out, loss=torch.where(mask.any(), out.loss, torch.nan))


@mutant("PL-15", "PL-14", "PL-17", origin="masks that multiply: NaN * 0 is NaN")
def multiplied_mask(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    out, mask = reference(logprob, *args, **rest), rest.get("mask")
    return out if mask is None else replace(out, loss=out.loss + (0.0 * (logprob * ~mask).sum()).to(out.loss.dtype))


@mutant(
    "PL-16",
    "PL-01",
    "PL-02",
    "PL-04",
    "PL-13",
    "PL-17",
    "PL-18",
    "PL-20",
    "PL-21",
    "PL-22",
    "PL-23",
    "PL-24",
    "PL-25",
    "PL-28",
    origin="sequence starts of a packed batch off by one",
)
def starts_off_by_one(reference: Any, *args: Any, **rest: Any) -> LossResult:
    starts = rest.get("cu_seqlens")
    if starts is None or len(starts) < 3:
        return reference(*args, **rest)
    moved = torch.cat([starts[:1], starts[1:-1] + 1, starts[-1:]])
    return reference(*args, **{**rest, "cu_seqlens": moved})


@mutant("PL-17", origin="padding at the end of a packed batch belongs to its last sequence")
def the_tail_counts(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    starts = rest.get("cu_seqlens")
    if starts is not None and len(starts) > 1:
        rest["cu_seqlens"] = torch.cat([starts[:-1], torch.full_like(starts[:1], logprob.numel())])
    return reference(logprob, *args, **rest)


@mutant(
    "PL-18",
    "PL-02",
    "PL-04",
    "PL-16",
    "PL-17",
    "PL-20",
    "PL-21",
    "PL-22",
    "PL-24",
    origin="without old log-probabilities the ratio is the constant 1",
)
def on_policy_without_gradient(reference: Any, logprob: Tensor, old_logprob: Any, *args: Any, **rest: Any) -> Any:
    out = reference(logprob, old_logprob, *args, **rest)
    return replace(out, loss=out.loss.detach() + 0.0 * out.loss) if old_logprob is None else out


@mutant("PL-27", origin="rows read as if they were contiguous")
def ignores_strides(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    if logprob.dim() == 2 and not logprob.is_contiguous() and not logprob.requires_grad:
        logprob = logprob.as_strided(logprob.shape, (logprob.shape[1], 1))
    return reference(logprob, *args, **rest)


@mutant(
    "PL-28",
    "PL-01",
    "PL-02",
    "PL-03",
    "PL-04",
    "PL-05",
    "PL-06",
    "PL-07",
    "PL-11",
    "PL-13",
    "PL-16",
    "PL-17",
    "PL-18",
    "PL-20",
    "PL-21",
    "PL-22",
    "PL-23",
    "PL-24",
    "PL-25",
    "PL-27",
    origin="batch[0]'s advantage for all sequences",
)
def first_advantage_for_all(reference: Any, logprob: Tensor, old_logprob: Any, advantages: Tensor, **rest: Any) -> Any:
    if advantages.shape[0] and advantages.shape != logprob.shape:
        advantages = advantages[:1].expand(advantages.shape)
    return reference(logprob, old_logprob, advantages, **rest)


@mutant("PL-29", origin="a launch of zero blocks")
def no_tokens_fail(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    if logprob.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(logprob, *args, **rest)


@mutant("PL-30", "PL-34", origin="masked log-probabilities cleared in place")
def clears_in_place(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    if rest.get("mask") is not None:
        with torch.no_grad():
            logprob.masked_fill_(~rest["mask"], 0.0)
    return reference(logprob, *args, **rest)


@mutant("PL-31", origin="constants detached without a word", unchecked=True)
def constants_detached(reference: Any, logprob: Tensor, *args: Any, **rest: Any) -> LossResult:
    free = [x.detach() if isinstance(x, Tensor) else x for x in args]
    kept = {k: x.detach() if isinstance(x, Tensor) and k != "entropy" else x for k, x in rest.items()}
    return reference(logprob, *free, **kept)


@mutant("PL-32", "PL-15", "PL-27", "PL-33", origin="floating atomics, declared deterministic")
def differs_from_call_to_call(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    _CALLS.append(None)
    more = torch.nextafter(out.loss.detach(), torch.full_like(out.loss, torch.inf)) - out.loss.detach()
    return replace(out, loss=out.loss + torch.where(out.loss != 0, more * (len(_CALLS) % 2), 0.0))


@mutant("PL-33", origin="a statistic logged from inside the kernel's wrapper")
def reads_the_loss_back(reference: Any, *args: Any, **rest: Any) -> LossResult:
    out = reference(*args, **rest)
    _LOG.append(out.loss.item())
    return out


@mutant("PL-34", origin="a denominator clamped instead of refused", unchecked=True)
def denominators_are_clamped(reference: Any, *args: Any, **rest: Any) -> LossResult:
    d = rest.get("denominator")
    return reference(*args, **{**rest, "denominator": max(d, 1.0)} if isinstance(d, float) else rest)


@mutant("PL-34", "PL-10", "PL-31", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, *args: Any, **rest: Any) -> LossResult:
    try:
        return reference(*args, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error
