"""Planted bugs in the filters and edits of sample@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.spec.sampling import LogitBias, TokenLists

_FILTERS: Final = ("top_k", "top_p", "min_p")


@mutant("SA-08", "SA-17", "SA-18", origin="another kernel as soon as a filter is passed, whatever its value")
def off_is_another_path(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    asked = any(rest.get(n) is not None for n in _FILTERS)
    return replace(out, logprob=out.logprob * (1 + 2**-22)) if asked else out


@mutant(
    "SA-09",
    "SA-01",
    "SA-02",
    "SA-07",
    "SA-10",
    "SA-13",
    "SA-14",
    "SA-18",
    "SA-29",
    "SA-30",
    origin="everything tied with the k-th is kept (FlashInfer #3774)",
)
def keeps_ties(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "tie": "keep_all"})


@mutant(
    "SA-10",
    "SA-01",
    "SA-02",
    "SA-03",
    "SA-05",
    "SA-06",
    "SA-13",
    "SA-14",
    "SA-15",
    "SA-27",
    "SA-28",
    "SA-29",
    "SA-30",
    origin="top-p accepted and ignored (RL-Kernel, AITER)",
)
def top_p_ignored(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "top_p": None})


@mutant(
    "SA-10",
    "SA-03",
    "SA-05",
    "SA-06",
    "SA-13",
    "SA-14",
    "SA-15",
    "SA-22",
    "SA-27",
    "SA-28",
    "SA-29",
    "SA-30",
    origin="the crossing token of the nucleus dropped",
)
def crossing_token_dropped(reference: Any, logits: Tensor, **rest: Any) -> Any:
    if rest.get("top_p") is None:
        return reference(logits, **rest)
    count = reference(logits, **rest).kept_count.long()
    cut = (torch.as_tensor(rest["top_p"]) < 1) & (count > 1)
    return reference(logits, **{**rest, "top_k": torch.where(cut, count - 1, count.clamp(min=1)), "top_p": None})


@mutant("SA-11", "SA-13", "SA-22", "SA-38", origin="min-p on the law before the temperature")
def min_p_before_the_temperature(reference: Any, logits: Tensor, **rest: Any) -> Any:
    if rest.get("min_p") is None:
        return reference(logits, **rest)
    T = torch.as_tensor(rest.get("temperature", 1.0))
    m = torch.as_tensor(rest["min_p"]).broadcast_to(logits.shape[:1])
    return reference(logits, **{**rest, "min_p": torch.where((m > 0) & (T > 0), m ** (1 / T), m)})


@mutant(
    "SA-12",
    "SA-13",
    "SA-14",
    "SA-15",
    "SA-17",
    "SA-18",
    "SA-21",
    "SA-38",
    origin="k counted modulo the width of a tile",
)
def k_wraps_around(reference: Any, logits: Tensor, **rest: Any) -> Any:
    k = rest.get("top_k")
    if k is None:
        return reference(logits, **rest)
    k = torch.as_tensor(k)
    return reference(logits, **{**rest, "top_k": torch.where((k > 0) & (k < logits.shape[1]), (k - 1) % 8 + 1, k)})


@mutant("SA-13", origin="one order of filters for all names")
def joint_is_not_joint(reference: Any, logits: Tensor, **rest: Any) -> Any:
    order = rest.get("filter_order", "topk_topp")
    return reference(logits, **{**rest, "filter_order": "topk_topp" if order == "joint" else order})


@mutant("SA-14", origin="one order of filters for all names")
def nucleus_never_first(reference: Any, logits: Tensor, **rest: Any) -> Any:
    order = rest.get("filter_order", "topk_topp")
    return reference(logits, **{**rest, "filter_order": "topk_topp" if order == "topp_topk" else order})


@mutant("SA-15", origin="tie='keep_all' accepted and ignored")
def tie_ignored(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "tie": "lowest_id"})


@mutant(
    "SA-16",
    "SA-02",
    "SA-05",
    "SA-06",
    "SA-09",
    "SA-10",
    "SA-11",
    "SA-15",
    "SA-17",
    "SA-18",
    "SA-22",
    "SA-24",
    "SA-27",
    "SA-28",
    "SA-29",
    "SA-30",
    "SA-32",
    "SA-38",
    origin="the first row's parameters for all rows (RL.cu)",
)
def first_rows_parameters(reference: Any, logits: Tensor, **rest: Any) -> Any:
    firsts = {n: rest[n][:1] for n in ("temperature", *_FILTERS) if isinstance(rest.get(n), Tensor)}
    return reference(logits, **{**rest, **(firsts if rest.get("slot") is None else {})})


@mutant("SA-17", "SA-06", "SA-25", "SA-26", origin="repetition divides negative logits, which makes repeats likelier")
def repetition_divides(reference: Any, logits: Tensor, **rest: Any) -> Any:
    asked = rest.get("penalties")
    if asked is None or asked.repetition is None:
        return reference(logits, **rest)
    r = torch.as_tensor(asked.repetition, dtype=logits.dtype).reshape(-1, 1)
    flipped = torch.where(logits < 0, logits / r / r, logits)
    return reference(flipped, **rest) if r.shape[0] in {1, logits.shape[0]} else reference(logits, **rest)


@mutant("SA-17", "SA-06", origin="tokens of the prompt count for the presence penalty")
def prompt_is_present(reference: Any, logits: Tensor, **rest: Any) -> Any:
    asked = rest.get("penalties")
    if asked is None or asked.prompt_bits is None or asked.output_ids is None or rest.get("slot") is not None:
        return reference(logits, **rest)
    ids = torch.arange(logits.shape[1], device=logits.device)
    said = (asked.prompt_bits[:, ids >> 5] >> (ids & 31)) & 1
    counts = torch.ones_like(asked.output_ids) if asked.output_counts is None else asked.output_counts
    more = replace(
        asked,
        output_ids=torch.cat((asked.output_ids, ids.expand(logits.shape[0], -1)), 1),
        output_counts=torch.cat((counts, said.to(counts.dtype)), 1),
    )
    return reference(logits, **{**rest, "penalties": more})


@mutant("SA-18", origin="a scatter that overwrites: of repeated ids the last counts")
def bias_overwrites(reference: Any, logits: Tensor, **rest: Any) -> Any:
    bias = rest.get("bias")
    if bias is None:
        return reference(logits, **rest)
    entry = torch.arange(bias.ids.shape[0], device=logits.device)
    row = torch.searchsorted(bias.offsets.long().contiguous(), entry, right=True)
    again = (bias.ids[:, None] == bias.ids) & (row[:, None] == row) & (entry[:, None] < entry)
    values = torch.where(again.any(1), 0.0, bias.values)
    return reference(logits, **{**rest, "bias": LogitBias(bias.ids, values, bias.offsets)})


@mutant("SA-19", "SA-04", "SA-20", origin="infinite noise on -inf is NaN, and argmax loves NaN (SGLang #25106)")
def masked_tokens_win(reference: Any, logits: Tensor, **rest: Any) -> Any:
    def best(score: Tensor, keep: Tensor, words: Tensor) -> Tensor:
        u = (words >> 8).double() * 2.0**-24
        noised = torch.where(keep, score, -torch.inf) - torch.log(-torch.log1p(-u))
        return noised.argmax(1)

    with patch("rlkernel_torch.sample.best_noised", best):
        return reference(logits, **rest)


@mutant(
    "SA-19",
    "SA-02",
    "SA-05",
    "SA-06",
    "SA-08",
    "SA-27",
    "SA-28",
    "SA-29",
    origin="words read as signed: bit 31 is lost",
)
def sign_bits_lost(reference: Any, logits: Tensor, **rest: Any) -> Any:
    allowed = rest.get("allowed")
    return reference(logits, **{**rest, "allowed": None if allowed is None else allowed & 0x7FFFFFFF})


@mutant("SA-20", origin="negative ids index from the end")
def foreign_ids_wrap(reference: Any, logits: Tensor, **rest: Any) -> Any:
    banned = rest.get("banned")
    if banned is not None:
        rest["banned"] = TokenLists(banned.ids % logits.shape[1], banned.offsets)
    return reference(logits, **rest)


@mutant("SA-20", origin="offsets ignored: the bans of all rows for every row")
def bans_for_all(reference: Any, logits: Tensor, **rest: Any) -> Any:
    banned = rest.get("banned")
    if banned is not None:
        N, n = logits.shape[0], banned.ids.shape[0]
        rest["banned"] = TokenLists(banned.ids.repeat(N), torch.arange(N + 1) * n)
    return reference(logits, **rest)
