"""Planted bugs in logprob@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError

_SEEN: dict[tuple[int, int], Any] = {}


@mutant("LP-02", origin="z - lse, which rounds to 0 on confident rows")
def naive_difference(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return replace(out, logprob=(out.logprob + out.lse) - out.lse)


@mutant(
    "LP-01",
    "LP-07",
    "LP-08",
    "LP-10",
    "LP-11",
    "LP-12",
    "LP-13",
    "LP-15",
    "LP-16",
    origin="temperature applied twice (RL-Kernel #81)",
)
def temperature_twice(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    T = rest.get("temperature", 1.0)
    return reference(logits, ids, **{**rest, "temperature": T * T})


@mutant(
    "LP-08", "LP-07", "LP-12", "LP-13", origin="entropy of softmax(z) beside log p of softmax(z / T) (OpenRLHF #1319)"
)
def raw_entropy(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return (
        out
        if out.entropy is None
        else replace(out, entropy=reference(logits, ids, **{**rest, "temperature": 1.0}).entropy)
    )


@mutant("LP-09", origin="batch[0]'s parameter for all rows (RL.cu)")
def first_rows_temperature(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    T = rest.get("temperature", 1.0)
    return reference(logits, ids, **{**rest, "temperature": T[:1] if isinstance(T, Tensor) else T})


@mutant("LP-11", "LP-27", origin="masks that multiply: NaN * 0 is NaN")
def multiplied_mask(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    mask = rest.pop("mask", None)
    out = reference(logits, torch.where(mask, ids, 0) if mask is not None else ids, **rest)
    return out if mask is None else replace(out, logprob=out.logprob * mask)


@mutant("LP-17", origin="an id out of range gives 0.0 (RL-Kernel)")
def out_of_range_is_zero(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return replace(out, logprob=torch.where(out.invalid, 0.0, out.logprob))


@mutant("LP-17", origin="validate accepted and ignored")
def validation_ignored(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    return reference(logits, ids, **{**rest, "validate": False})


@mutant("LP-01", "LP-04", "LP-13", "LP-25", origin="running maximum that starts at 0 (verl #7439)")
def maximum_starts_at_zero(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    lost = out.lse < -90
    return replace(out, logprob=torch.where(lost, torch.inf, out.logprob), lse=torch.where(lost, -torch.inf, out.lse))


@mutant("LP-07", "LP-12", "LP-13", origin="0 * -inf in the entropy (VeOmni #720)")
def entropy_of_the_impossible(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    holes = (logits == -torch.inf).any(-1)
    return out if out.entropy is None else replace(out, entropy=torch.where(holes, torch.nan, out.entropy))


@mutant(
    "LP-20",
    "LP-02",
    "LP-05",
    "LP-08",
    "LP-09",
    "LP-11",
    "LP-13",
    "LP-14",
    "LP-17",
    "LP-18",
    "LP-19",
    "LP-21",
    "LP-22",
    "LP-25",
    "LP-27",
    "LP-23",
    origin="logits divided by the temperature in place (Triebwerk)",
)
def divides_in_place(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    with torch.no_grad():
        logits.mul_(1.0 + 2**-6)
    return out


@mutant("LP-20", origin="a kernel that reseeds or draws from the user's generator (AITER)")
def draws_from_the_global_generator(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    torch.rand(1)
    return reference(logits, ids, **rest)


@mutant(
    "LP-13",
    "LP-11",
    "LP-14",
    "LP-19",
    "LP-22",
    "LP-27",
    origin="gradient detached, and grad claimed all the same (RL-Kernel)",
)
def detached(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    with torch.no_grad():
        return reference(logits, ids, **rest)


@mutant("LP-13", origin="the temperature missing in the gradient")
def gradient_without_temperature(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    T = rest.get("temperature", 1.0)
    out = reference(logits, ids, **rest)
    return replace(out, logprob=out.logprob.detach() + T * (out.logprob - out.logprob.detach()).nan_to_num())


@mutant("LP-14", "LP-13", "LP-27", origin="a gradient that is not centred")
def gradient_with_an_offset(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    first = logits[..., 0].float()
    return replace(out, logprob=out.logprob + 0.01 * (first - first.detach()).nan_to_num())


@mutant(
    "LP-03",
    "LP-01",
    "LP-02",
    "LP-04",
    "LP-05",
    "LP-06",
    "LP-07",
    "LP-08",
    "LP-10",
    "LP-11",
    "LP-12",
    "LP-13",
    "LP-15",
    "LP-16",
    "LP-24",
    origin="tile of 8 columns, the rest dropped (verl #2656)",
)
def drops_the_tail(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    V = logits.shape[-1]
    outside = (torch.arange(V) >= V - V % 8) & (torch.arange(V) != ids[..., None]) & (V > 8)
    return reference(torch.where(outside, -torch.inf, logits), ids, **rest)


@mutant(
    "LP-06",
    "LP-01",
    "LP-02",
    "LP-04",
    "LP-07",
    "LP-08",
    "LP-10",
    "LP-11",
    "LP-12",
    "LP-13",
    "LP-15",
    "LP-16",
    origin="a position that counts: the first token favoured",
)
def favours_the_first_token(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    bonus = torch.zeros_like(logits[..., :1]).expand_as(logits).clone()
    bonus[..., 0] = 0.05
    return reference(logits + bonus, ids, **rest)


@mutant("LP-21", origin="reduction order that depends on the batch, declared invariant")
def depends_on_the_batch(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return replace(out, logprob=out.logprob * (1.0 + 1e-6 * (logits.shape[0] > 100)))


@mutant(
    "LP-22",
    "LP-01",
    "LP-07",
    "LP-13",
    "LP-17",
    "LP-18",
    "LP-21",
    "LP-25",
    "LP-26",
    "LP-23",
    origin="floating atomics, declared deterministic (RL.cu)",
)
def differs_from_call_to_call(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    out = reference(logits, ids, **rest)
    return replace(out, logprob=out.logprob * (1.0 + 2**-21 * (differs_from_call_to_call.calls % 2)))  # type: ignore[attr-defined]


@mutant("LP-15", origin="topk without a rule for ties")
def ties_to_the_highest_id(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    if out.top_ids is None:
        return out
    V, n = logits.shape[-1], out.top_ids.shape[-1]
    order = logits.float().flip(-1).argsort(-1, descending=True, stable=True)[..., :n]
    return replace(out, top_ids=V - 1 - order)


@mutant("LP-10", origin="softcap after the temperature")
def caps_last(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    T, cap = rest.get("temperature", 1.0), rest.get("softcap")
    return (
        reference(logits / T, ids, **{**rest, "temperature": 1.0})
        if cap is not None
        else reference(logits, ids, **rest)
    )


@mutant("LP-16", origin="log p of the whole vocabulary for a truncated draw (trl #6789)")
def support_ignored(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    if rest.get("support") is None:
        return out
    return replace(out, logprob=reference(logits, ids, **{**rest, "support": None}).logprob)


@mutant("LP-18", "LP-05", origin="rows read as if they were contiguous")
def ignores_strides(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    flat = (
        logits
        if logits.requires_grad or logits.is_contiguous()
        else logits.as_strided(logits.shape, (logits.shape[1], 1))
    )
    return reference(flat, ids, **rest)


@mutant("LP-25", origin="one NaN row poisons the batch")
def shared_maximum(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    bad = out.lse.isnan().any() & torch.tensor(rest.get("mask") is None)
    return replace(out, logprob=torch.where(bad, torch.nan, out.logprob))


@mutant("LP-19", origin="a launch of zero blocks")
def no_rows_fail(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    if ids.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(logits, ids, **rest)


@mutant("LP-24", origin="temperature 0 clamped instead of refused", unchecked=True)
def temperature_zero_is_taken(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    T = rest.get("temperature", 1.0)
    return reference(logits, ids, **{**rest, "temperature": max(T, 1e-6) if isinstance(T, float) else T})


@mutant("LP-26", "LP-13", origin="another kernel when gradients are wanted: on-policy ratios are not 1")
def another_kernel_for_gradients(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return replace(out, logprob=out.logprob * (1.0 + 1e-6)) if logits.requires_grad else out


@mutant("LP-27", origin="the mask multiplies the upstream gradient")
def upstream_gradient_leaks(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    mask = rest.get("mask")
    out = reference(logits, ids, **rest)
    if mask is None or not logits.requires_grad:
        return out
    return replace(out, logprob=out.logprob + 0.0 * logits.nan_to_num().sum(-1).float())


@mutant("LP-12", "LP-07", "LP-08", "LP-13", origin="entropy in bits")
def entropy_in_bits(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return out if out.entropy is None else replace(out, entropy=out.entropy * 1.4427)


@mutant(
    "LP-05",
    "LP-01",
    "LP-02",
    "LP-04",
    "LP-07",
    "LP-08",
    "LP-10",
    "LP-11",
    "LP-13",
    "LP-16",
    origin="half precision on the way to the logsumexp",
)
def half_precision(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return replace(out, logprob=out.logprob + (out.lse.bfloat16().to(out.lse.dtype) - out.lse).nan_to_num())


@mutant("LP-04", "LP-01", "LP-13", origin="a logsumexp without a shift, good to +-88")
def no_shift(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    out = reference(logits, ids, **rest)
    return replace(out, logprob=torch.where(out.lse.abs() > 88, torch.nan, out.logprob))


@mutant(
    "LP-21",
    "LP-01",
    "LP-02",
    "LP-04",
    "LP-05",
    "LP-07",
    "LP-08",
    "LP-09",
    "LP-10",
    "LP-12",
    "LP-15",
    "LP-16",
    "LP-17",
    "LP-24",
    "LP-25",
    origin="results remembered by address (KernelBench)",
)
def remembers_by_address(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    key = (logits.shape[0], logits.shape[-1])
    if key not in _SEEN or logits.requires_grad:
        _SEEN[key] = reference(logits, ids, **rest)
    return _SEEN[key]


@mutant("LP-24", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, logits: Tensor, ids: Tensor, **rest: Any) -> Any:
    try:
        return reference(logits, ids, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error
