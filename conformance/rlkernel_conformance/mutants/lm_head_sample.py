"""Planted bugs in lm_head_sample@1: of tiles, of the head, of what reaches the draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlkernel_common import philox
from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.sampling import Status

_OF = "rlkernel_torch.lm_head_sample"
_CALLS: list[None] = []
_FILTERS = ("top_k", "top_p", "min_p")


@mutant(
    "LH-01",
    "LH-06",
    "LH-07",
    "LH-08",
    "LH-09",
    "LH-10",
    "LH-11",
    "LH-12",
    "LH-18",
    "LH-21",
    origin="noise of the place in the tile, not of the token id",
)
def noise_starts_anew_in_every_tile(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    def words(seed: Tensor, step: Tensor, low: int, high: int, stream: int) -> Tensor:
        return philox.range_words(seed, step, 0, high - low, stream)

    with patch("rlkernel_torch.running_draw.range_words", words):
        return reference(hidden, weight, **rest)


@mutant(
    "LH-01",
    "LH-02",
    "LH-06",
    "LH-07",
    "LH-08",
    "LH-09",
    "LH-10",
    "LH-11",
    "LH-12",
    "LH-18",
    "LH-21",
    origin="logits rounded to bfloat16 on the way to the draw",
)
def logits_in_bfloat16(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    with patch(f"{_OF}.cap", lambda x, softcap: _cap(x, softcap).bfloat16().to(x.dtype)):
        return reference(hidden, weight, **rest)


def _cap(x: Tensor, softcap: float | None) -> Tensor:
    return x if softcap is None else softcap * torch.tanh(x / softcap)


@mutant(
    "LH-01",
    "LH-02",
    "LH-06",
    "LH-07",
    "LH-08",
    "LH-09",
    "LH-10",
    "LH-11",
    "LH-12",
    "LH-18",
    "LH-21",
    origin="filters accepted and ignored by the streamed kernel (RL.cu)",
)
def filters_ignored(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    return reference(hidden, weight, **{**rest, **dict.fromkeys(_FILTERS)})


@mutant(
    "LH-02",
    "LH-01",
    "LH-06",
    "LH-07",
    "LH-08",
    "LH-09",
    "LH-10",
    "LH-11",
    "LH-12",
    origin="the sum of the last tile alone",
)
def sums_restart(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out = reference(hidden, weight, **rest)
    off = 1e-2 * (weight.shape[0] > 1024)
    return replace(out, logprob=torch.where(out.logprob < 0, out.logprob + off, out.logprob))


@mutant("LH-02", "LH-10", origin="raw log p of the tempered logits")
def raw_is_tempered(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out = reference(hidden, weight, **rest)
    return out if out.raw_logprob is None else replace(out, raw_logprob=out.logprob + out.log_kept_mass)


@mutant("LH-03", "LH-16", origin="all logits are made and kept")
def stores_the_logits(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    if hidden.dtype == weight.dtype:
        _ = hidden.detach() @ weight.detach().T
    return reference(hidden, weight, **rest)


@mutant(
    "LH-04",
    "LH-01",
    "LH-02",
    "LH-06",
    "LH-07",
    "LH-08",
    "LH-09",
    "LH-10",
    "LH-11",
    "LH-12",
    "LH-16",
    "LH-18",
    "LH-21",
    origin="a later tile must win by a margin to replace the winner so far",
)
def later_tiles_lose(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    V = weight.shape[0]
    bias = rest.get("bias")
    bias = torch.zeros(V, dtype=weight.dtype, device=weight.device) if bias is None else bias
    late = torch.arange(V, device=weight.device) >= 1024
    return reference(hidden, weight, **{**rest, "bias": torch.where(late, bias - 1.0, bias)})


@mutant("LH-05", origin="NaN taken for the largest logit, as argmax does")
def nan_is_the_best(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out = reference(hidden, weight, **rest)
    bad = (out.status & Status.NAN.value) != 0
    return replace(out, token=torch.where(bad, 0, out.token))


@mutant("LH-05", "LH-06", origin="a tile of -inf alone leaves an invalid id (vLLM #42259)")
def empty_rows_give_the_last_id(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out = reference(hidden, weight, **rest)
    empty = (out.status & Status.EMPTY.value) != 0
    return replace(out, token=torch.where(empty, weight.shape[0] - 1, out.token))


@mutant("LH-06", origin="the bitmask read from its first word in every tile")
def masks_start_anew_in_every_tile(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    allowed = rest.get("allowed")
    if allowed is not None and allowed.shape[1] > 32:
        words = torch.arange(allowed.shape[1], device=allowed.device) % 32
        rest["allowed"] = allowed[:, words]
    return reference(hidden, weight, **rest)


@mutant("LH-07", "LH-04", "LH-05", "LH-16", origin="the bias of the head accepted and ignored")
def head_bias_ignored(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    return reference(hidden, weight, **{**rest, "bias": None})


@mutant("LH-07", origin="the bias added after the scale")
def bias_after_the_scale(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    bias, scale = rest.get("bias"), rest.get("logit_scale", 1.0)
    return reference(hidden, weight, **{**rest, "bias": None if bias is None else bias / scale})


@mutant("LH-08", origin="the bias of a row added before the cap")
def row_bias_before_the_cap(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    bias, cap = rest.get("logit_bias"), rest.get("softcap")
    if bias is not None and cap is not None:
        rest["logit_bias"] = replace(bias, values=torch.where(bias.values > 0, bias.values.clamp(max=cap), bias.values))
    return reference(hidden, weight, **rest)


@mutant("LH-09", "LH-07", "LH-16", origin="divides by the scale")
def divides_by_the_scale(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    return reference(hidden, weight, **{**rest, "logit_scale": 1.0 / rest.get("logit_scale", 1.0)})


@mutant("LH-10", "LH-07", "LH-08", origin="the cap after the temperature")
def caps_last(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    T, cap = rest.get("temperature", 1.0), rest.get("softcap")
    if cap is None:
        return reference(hidden, weight, **rest)
    hot = torch.as_tensor(T, device=hidden.device).max().clamp(min=0.1)
    return reference(hidden, weight, **{**rest, "softcap": float(cap * hot)})


@mutant("LH-11", "LH-16", origin="a padded head read to its end")
def reads_the_padding(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    return reference(hidden, weight, **{**rest, "vocab_size": None})


@mutant("LH-12", origin="fp32 hidden states rounded to the dtype of the head")
def rounds_the_hidden_states(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    return reference(hidden.to(weight.dtype), weight, **rest)


@mutant(
    "LH-13",
    "LH-01",
    "LH-06",
    "LH-07",
    "LH-08",
    "LH-09",
    "LH-10",
    "LH-11",
    "LH-12",
    "LH-16",
    "LH-19",
    origin="the row number enters the noise (FlashInfer)",
)
def noise_of_the_row(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    step = rest["step"]
    return reference(hidden, weight, **{**rest, "step": step + rows if rest.get("slot") is None else step})


@mutant("LH-19", origin="split sums for large batches, declared invariant")
def sums_depend_on_the_batch(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out = reference(hidden, weight, **rest)
    return replace(out, logprob=out.logprob * (1 + 2**-22 * (hidden.shape[0] > 100)))


@mutant(
    "LH-14",
    "LH-05",
    "LH-09",
    "LH-13",
    "LH-17",
    "LH-06",
    "LH-18",
    "LH-19",
    origin="the scale folded into the head, in place",
)
def scales_the_head_in_place(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out = reference(hidden, weight, **rest)
    with torch.no_grad():
        weight.mul_(1.0 + 2**-6)
    return out


@mutant("LH-15", origin="a launch of zero blocks")
def no_rows_fail(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    if hidden.shape[0] == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(hidden, weight, **rest)


@mutant("LH-16", origin="a scale of 0 taken for none", unchecked=True)
def scale_zero_is_taken(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    return reference(hidden, weight, **{**rest, "logit_scale": rest.get("logit_scale", 1.0) or 1.0})


@mutant("LH-16", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    try:
        return reference(hidden, weight, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error


@mutant("LH-18", origin="ranks counted from 1")
def ranks_from_one(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out = reference(hidden, weight, **rest)
    return out if out.rank is None else replace(out, rank=out.rank + 1)


@mutant("LH-20", "LH-05", "LH-11", "LH-17", "LH-19", "LH-21", origin="floating atomics, declared deterministic (RL.cu)")
def differs_from_call_to_call(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    _CALLS.append(None)
    out = reference(hidden, weight, **rest)
    lower = torch.nextafter(out.logprob, torch.full_like(out.logprob, -torch.inf))
    return replace(out, logprob=lower if len(_CALLS) % 2 else out.logprob)


@mutant("LH-21", origin="padding rows draw token 0")
def padding_rows_draw(reference: Any, hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
    out, slot = reference(hidden, weight, **rest), rest.get("slot")
    return out if slot is None else replace(out, token=torch.where(slot < 0, 0, out.token))
