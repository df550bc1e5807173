"""Planted bugs in attention@1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.attention import AttentionCall, AttentionResult


def counts(cu: Tensor) -> Tensor:
    return cu.long().diff()


def keys_of(call: AttentionCall) -> Tensor:
    if call.seqused_k is not None:
        return call.seqused_k.long()
    return counts(call.cu_q if call.cu_k is None else call.cu_k)


def sequence_of(cu: Tensor, rows: int) -> Tensor:
    """Of each row; that of the last for rows of none."""
    at = torch.arange(rows, device=cu.device)
    return (torch.searchsorted(cu.long(), at, right=True) - 1).clamp(0, max(cu.shape[0] - 2, 0))


def aligned_to_the_start(right: Run, call: AttentionCall) -> AttentionResult:
    """Query i stands at position i, behind a cache too (FlashAttention before 2.1)."""
    keys, queries = keys_of(call), counts(call.cu_q)
    if not call.causal or call.page_table is None:
        return right(call)
    return right(replace(call, seqused_k=torch.minimum(keys, queries).to(call.seqused_k.dtype)))  # type: ignore[union-attr]


def neighbors_weigh(weight: float, *, pages_alone: bool = False) -> Callable[[Run, AttentionCall], AttentionResult]:
    """Values beyond a sequence, or beyond its keys in a page, are multiplied by a weight and added."""

    def how(right: Run, call: AttentionCall) -> AttentionResult:
        out = right(call)
        if pages_alone and call.page_table is None:
            return out
        share = weight * call.v.detach().double().sum()
        return replace(out, out=out.out + share.to(out.out.dtype))

    return how


def bad_pages_are_the_first(call: AttentionCall) -> Tensor | None:
    table = call.page_table
    return None if table is None else torch.where((table < 0) | (table >= call.k.shape[0]), 0, table)


def pages_in_order(call: AttentionCall) -> Tensor | None:
    table = call.page_table
    if table is None or not table.numel():
        return table
    known = (table >= 0) & (table < call.k.shape[0])
    return torch.where(known, table.sort(1).values, table)


def lse_in_base_2(call: AttentionCall, out: AttentionResult) -> Tensor:
    del call
    return out.lse * 1.4426950408889634


def changed_bits(when: Callable[[AttentionCall], Tensor]) -> Callable[[Run, AttentionCall], AttentionResult]:
    """Another last digit in the queries that `when` says, [T]."""

    def how(right: Run, call: AttentionCall) -> AttentionResult:
        out = right(call)
        return replace(out, out=plant.lower(out.out, when(call)[:, None, None]))

    return how


def of_few_queries(call: AttentionCall) -> Tensor:
    """Sequences that ask for less than 16: their keys are split over programs."""
    few = counts(call.cu_q) < 16
    at = sequence_of(call.cu_q, call.q.shape[0])
    return few[at] if few.numel() else at > 0


def beside_a_longer(call: AttentionCall) -> Tensor:
    """Queries of all but the longest sequence (vLLM 51902: one block size for all)."""
    keys, at = keys_of(call), sequence_of(call.cu_q, call.q.shape[0])
    return (keys < keys.max())[at] if keys.numel() else at > 0


def heads_in_another_order(call: AttentionCall) -> Tensor:
    """Query head h reads keys of head h % Hk."""
    Hq, Hk = call.q.shape[1], call.k.shape[-2]
    return call.q.unflatten(1, (Hq // Hk, Hk)).transpose(1, 2).flatten(1, 2)


def interleaved_heads(right: Run, call: AttentionCall) -> AttentionResult:
    out = right(replace(call, q=heads_in_another_order(call)))
    Hq, Hk = call.q.shape[1], call.k.shape[-2]

    def back(x: Tensor) -> Tensor:
        return x.unflatten(1, (Hk, Hq // Hk)).transpose(1, 2).flatten(1, 2)

    return AttentionResult(back(out.out), back(out.lse))


def empty_is_nan(call: AttentionCall, out: AttentionResult) -> Tensor:
    """0 / 0 where no key is seen."""
    del call
    return torch.where(out.lse[..., None].isneginf(), torch.nan, out.out)


def all_keys_share(call: AttentionCall, out: AttentionResult) -> Tensor:
    """Later keys of a sequence change the last digit."""
    k = call.k.detach()
    return plant.lower(out.out, k.nan_to_num().abs().amax() > 20)


def sink_has_a_value(right: Run, call: AttentionCall) -> AttentionResult:
    """The sink is left out of the sum that weights are divided by."""
    out = right(call)
    return out if call.sinks is None else replace(out, out=right(replace(call, sinks=None)).out)


def without_its_own_check(call: AttentionCall) -> AttentionCall:
    heads = call.q.dim() == 3 and call.k.dim() == 3 and call.k.shape[-1] > call.q.shape[-1] >= 1
    if not heads:
        return call
    D = call.q.shape[-1]
    return replace(call, k=call.k[..., :D], v=call.v[..., :D])


def keys_without_gradient_of_whole_tiles(right: Run, call: AttentionCall) -> AttentionResult:
    """Keys beyond whole tiles get no gradient."""
    if call.page_table is not None or call.k.shape[0] < 17:
        return right(call)
    kept = call.k.shape[0] // 16 * 16
    k, v = (torch.cat([x[:kept], x[kept:].detach()]) for x in (call.k, call.v))
    return right(replace(call, k=k, v=v))


def scales(call: AttentionCall) -> None:
    call.k.mul_(2)


BUGS: Final = {
    "scale_is_ignored": Bug("AT-01", "the scale is always that of the width", plant.ignores("scale")),
    "aligned_to_the_start": Bug("AT-01", "queries behind a cache stand at the start", aligned_to_the_start),
    "heads_are_interleaved": Bug("AT-01", "query heads read keys of head h % Hk", interleaved_heads),
    "lse_in_base_2": Bug("AT-01", "lse is not in natural units", plant.returns(lse=lse_in_base_2)),
    "values_are_scaled": Bug(
        "AT-02",
        "weights that do not add up to 1",
        plant.returns(out=lambda _, out: plant.lower(out.out)),
    ),
    "no_key_is_nan": Bug("AT-03", "0 / 0 where no key is seen (RL.cu)", plant.returns(out=empty_is_nan)),
    "neighbors_weigh": Bug("AT-04", "values of other sequences have a weight", neighbors_weigh(2.0**-80)),
    "whole_pages_weigh": Bug(
        "AT-04", "values behind the last key have a weight", neighbors_weigh(2.0**-80, pages_alone=True)
    ),
    "neighbors_times_zero": Bug("AT-19", "values of other sequences multiplied by 0", neighbors_weigh(0.0)),
    "whole_pages_times_zero": Bug(
        "AT-19", "values behind the last key multiplied by 0", neighbors_weigh(0.0, pages_alone=True)
    ),
    "later_keys_count": Bug("AT-05", "a maximum over masked scores too", plant.returns(out=all_keys_share)),
    "pages_in_order": Bug("AT-06", "pages are taken in ascending order", plant.given(page_table=pages_in_order)),
    "a_bad_page_is_the_first": Bug(
        "AT-07", "bad pages are read as page 0", plant.given(page_table=bad_pages_are_the_first)
    ),
    "window_of_a_key_more": Bug("AT-08", "the window counts keys to the left", plant.maps(window=lambda n: n + 1)),
    "softcap_is_doubled": Bug("AT-09", "the cap is twice what it should be", plant.maps(softcap=lambda c: 2 * c)),
    "sink_is_in_lse_alone": Bug("AT-10", "the sink takes no share", sink_has_a_value),
    "lse_has_no_gradient": Bug(
        "AT-11", "lse detached, and grad claimed all the same", plant.returns(lse=lambda _, out: out.lse.detach())
    ),
    "sinks_are_constants": Bug("AT-11", "sinks detached", plant.maps(sinks=Tensor.detach)),
    "keys_of_whole_tiles_alone": Bug(
        "AT-11", "keys beyond whole tiles get no gradient", keys_without_gradient_of_whole_tiles
    ),
    "no_queries_fail": Bug("AT-12", "a launch of zero blocks", plant.fails_if(lambda c: c.q.numel() == 0)),
    "cuts_what_is_too_wide": plant.lenient("AT-13", "widths never looked at: keys are cut", without_its_own_check),
    "scales_in_place": Bug("AT-14", "keys are changed", plant.writes(scales)),
    "differs_from_call_to_call": plant.nondeterministic("AT-15", "out"),
    "splits_few_queries": Bug(
        "AT-16", "keys are split where few queries would idle the device", changed_bits(of_few_queries)
    ),
    "a_longer_neighbor": Bug(
        "AT-16", "one block size for all, chosen by the longest (vLLM)", changed_bits(beside_a_longer)
    ),
    "asks_the_host": plant.reads_a_value("AT-17", lambda c: c.cu_q),
    "max_k_is_ignored": Bug("AT-18", "the bound is accepted and has no effect", plant.ignores("max_k")),
    "window_is_ignored": Bug("AT-08", "the window is accepted and has no effect", plant.ignores("window")),
    "softcap_is_ignored": Bug("AT-09", "the softcap is accepted and has no effect", plant.ignores("softcap")),
    "sinks_are_ignored": Bug("AT-10", "sinks are accepted and have no effect", plant.ignores("sinks")),
}
