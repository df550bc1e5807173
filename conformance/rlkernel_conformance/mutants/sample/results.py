"""Planted bugs in what sample@1 returns beside its token, and in how it treats its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.sampling import Status

_FILTERS: Final = ("top_k", "top_p", "min_p")
_SEEN: dict[tuple[int, int], Any] = {}


@mutant("SA-21", "SA-38", origin="padding columns read as logits (xgrammar #220)")
def reads_padding(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "vocab_size": None})


@mutant("SA-22", origin="padding rows of a graph draw as the first request")
def padding_draws(reference: Any, logits: Tensor, **rest: Any) -> Any:
    slot = rest.get("slot")
    return reference(logits, **{**rest, "slot": None if slot is None else slot.clamp(min=0)})


@mutant("SA-23", "SA-06", "SA-32", origin="one NaN poisons the batch (vLLM #20177)")
def poison_spreads(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    bad = ((out.status & Status.NAN.value) != 0).any()
    return replace(out, log_kept_mass=torch.where(bad, -out.log_kept_mass - 1, out.log_kept_mass))


@mutant("SA-23", "SA-01", "SA-19", "SA-20", "SA-21", origin="a row without a law gives the last id")
def empty_rows_give_the_last_id(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    empty = (out.status & Status.EMPTY.value) != 0
    return replace(out, token=torch.where(empty, logits.shape[1] - 1, out.token))


@mutant("SA-24", origin="temperatures without meaning taken for 1")
def any_temperature_is_taken(reference: Any, logits: Tensor, **rest: Any) -> Any:
    T = rest.get("temperature", 1.0)
    if isinstance(T, Tensor):
        T = torch.where((T >= 0) & T.isfinite(), T, 1.0)
    return reference(logits, **{**rest, "temperature": T})


@mutant("SA-25", origin="the raw log p of processed logits")
def raw_is_tempered(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    return out if out.raw_logprob is None else replace(out, raw_logprob=out.logprob + out.log_kept_mass)


@mutant("SA-26", origin="top log-probabilities always of the processed law (SGLang)")
def top_n_always_processed(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "top_n_from": "processed"})


@mutant("SA-27", origin="top log-probabilities always of the raw law (vLLM)")
def top_n_always_raw(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "top_n_from": "raw"})


@mutant("SA-28", origin="entropy of the law before the filters")
def entropy_without_filters(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    if out.entropy is None:
        return out
    return replace(out, entropy=reference(logits, **{**rest, **dict.fromkeys(_FILTERS)}).entropy)


@mutant("SA-29", origin="log p normalised over the capped list (SGLang #34037)")
def capped_list_is_the_law(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    cut = (out.status & Status.KEPT_OVERFLOW.value) != 0
    return replace(out, logprob=torch.where(cut, out.logprob * 0.9, out.logprob))


@mutant("SA-32", origin="a reduction that depends on the batch, declared invariant")
def sums_depend_on_the_batch(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    return replace(out, logprob=out.logprob * (1 + 2**-22 * (logits.shape[0] > 100)))


@mutant(
    "SA-33",
    "SA-08",
    "SA-17",
    "SA-21",
    "SA-23",
    "SA-29",
    "SA-32",
    "SA-34",
    origin="floating atomics, declared deterministic (FlashInfer #4831)",
)
def differs_from_call_to_call(reference: Any, logits: Tensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    out = reference(logits, **rest)
    return replace(out, logprob=out.logprob * (1 + 2**-22 * (differs_from_call_to_call.calls % 2)))  # type: ignore[attr-defined]


@mutant("SA-34", "SA-37", origin="the step is read on the host and baked into the graph (Megatron #5697)")
def step_on_the_host(reference: Any, logits: Tensor, **rest: Any) -> Any:
    step = rest["step"]
    baked = torch.tensor(step.tolist(), device=logits.device) if isinstance(step, Tensor) else step
    return reference(logits, **{**rest, "step": baked})


@mutant("SA-34", "SA-22", "SA-24", "SA-30", "SA-38", origin="results remembered by address (KernelBench)")
def remembers_by_address(reference: Any, logits: Tensor, **rest: Any) -> Any:
    key = (logits.data_ptr(), torch.as_tensor(rest["seed"]).data_ptr())
    if key not in _SEEN:
        _SEEN[key] = reference(logits, **rest), logits, rest["seed"]  # both live on, so no other has their address
    return _SEEN[key][0]


@mutant(
    "SA-36",
    "SA-03",
    "SA-04",
    "SA-05",
    "SA-06",
    "SA-08",
    "SA-09",
    "SA-10",
    "SA-13",
    "SA-14",
    "SA-15",
    "SA-17",
    "SA-18",
    "SA-21",
    "SA-23",
    "SA-25",
    "SA-26",
    "SA-27",
    "SA-28",
    "SA-29",
    "SA-32",
    "SA-34",
    origin="logits divided by the temperature in place (Triebwerk)",
)
def divides_in_place(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    with torch.no_grad():
        logits.mul_(1.0 + 2**-6)
    return out


@mutant("SA-36", origin="draws from the global generator beside its own (AITER)")
def moves_the_global_generator(reference: Any, logits: Tensor, **rest: Any) -> Any:
    torch.rand(1)
    return reference(logits, **rest)


@mutant("SA-37", origin="a launch of zero blocks")
def no_rows_fail(reference: Any, logits: Tensor, **rest: Any) -> Any:
    if logits.shape[0] == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(logits, **rest)


@mutant("SA-38", "SA-22", origin="one seed for a batch is spread over it: all rows draw alike", unchecked=True)
def shared_noise_is_taken(reference: Any, logits: Tensor, **rest: Any) -> Any:
    seed = torch.as_tensor(rest["seed"]).reshape(-1).expand(logits.shape[0])
    return reference(logits, **{**rest, "seed": seed if rest.get("slot") is None else rest["seed"]})


@mutant("SA-38", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, logits: Tensor, **rest: Any) -> Any:
    try:
        return reference(logits, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error
