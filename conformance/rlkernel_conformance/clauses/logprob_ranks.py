"""Attacks on logprob@1 with a vocabulary that is split over ranks.

Legend: N rows · V vocabulary · K listed ids of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import same_results
from rlkernel_conformance.clauses.listed_ids import Given, Lists, cases, stay_precise
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.ranks import collectives, on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.spec.logprob import LogprobResult, Support

RESULTS: Final = ("logprob", "lse", "entropy", "log_kept_mass")


@dataclass(frozen=True)
class Found:
    """What one rank has."""

    result: LogprobResult
    grad: Tensor | None  # [N, n] of its logits, where that is claimed
    forward: int  # collectives
    backward: int


def split_cases(subject: Subject) -> st.SearchStrategy[Lists]:
    """Rows of at least five ids: up to four ranks have some each."""
    return cases(subject).map(lambda c: replace(c, V=max(c.V, 5), K=min(c.K, 5)))


def arguments(subject: Subject, case: Lists) -> Given:
    """The call for all of the vocabulary: every second case lists several ids per row, others may have a support."""
    given = case.given(subject)
    several = "many_ids" in subject.claims and case.seed % 2 == 0
    if not several:
        given["ids"] = given["ids"][:, 0]
    if "softcap" in subject.claims and case.seed % 3 == 0:
        given["softcap"] = 20.0
    if "per_row_temperature" in subject.claims and case.seed % 5 < 2:
        given["temperature"] = torch.linspace(0.5, 1.5, case.N, device=subject.device)
    if "support" in subject.claims and not several and case.seed % 4 == 1:
        kept = [torch.arange(i % case.V, case.V, 3, device=subject.device) for i in range(case.N)]
        offsets = torch.tensor([0, *np.cumsum([len(k) for k in kept])], device=subject.device)
        given["support"] = Support(torch.cat(kept), offsets)
    return given | ({"entropy": True} if "entropy" in subject.claims else {})


def cuts_of(case: Lists) -> tuple[int, ...]:
    """Where the vocabulary is cut: into two, three or four shards, none like the next."""
    V = case.V
    return ((0, V // 3, V), (0, 1, V // 2 + 1, V), (0, 2, 3, V - 1, V))[case.seed % 3]


def upstream(out: LogprobResult, seed: int) -> dict[str, Tensor]:
    """A gradient of its own for every result that there is."""
    there = [(i, n, x) for i, n in enumerate(RESULTS) if (x := getattr(out, n)) is not None]
    return {n: draw.normal(tuple(x.shape), seed + 20 + i, str(x.device)).to(x.dtype) for i, n, x in there}


def whole(subject: Subject, given: Given, seed: int, group: Any = None) -> Found:
    """A call with these logits; of one rank where there is a group."""
    leaf = given["logits"].clone().requires_grad_("grad" in subject.claims)
    start = collectives(group) if group is not None else 0
    out = subject(**{**given, "logits": leaf, "group": group})
    between = collectives(group) if group is not None else 0
    grad = None
    if leaf.requires_grad:
        up = upstream(out, seed)
        (grad,) = torch.autograd.grad([getattr(out, n) for n in up], leaf, list(up.values()))
    end = collectives(group) if group is not None else 0
    return Found(out, grad, between - start, end - between)


def split(subject: Subject, given: Given, cuts: Sequence[int], seed: int) -> list[Found]:
    """What each rank has: rank i the ids cuts[i] to cuts[i + 1]."""

    def on_rank(rank: int, group: Any) -> Found:
        mine = given["logits"][:, cuts[rank] : cuts[rank + 1]]
        return whole(subject, {**given, "logits": mine}, seed, group)

    return on_ranks(subject, len(cuts) - 1, on_rank)


def joined(ranks: list[Found]) -> Tensor | None:
    """The gradient of all logits."""
    parts = [found.grad for found in ranks if found.grad is not None]
    return torch.cat(parts, 1) if parts else None


@attack("LP-31", split_cases)
def a_split_row_is_the_whole_one(subject: Subject, case: Lists) -> None:
    """Two to four shards against the definition; a row that leads by 12 to 40 nats; rows that hold no id or no law."""
    given, cuts = arguments(subject, case), cuts_of(case)
    ranks = split(subject, given, cuts, case.seed)
    matches(subject, case, given, ranks)
    x, ids = draw.normal((case.N, case.V), case.seed, subject.device, "float32"), given["ids"].reshape(case.N, -1)
    lead = x.amax(1, keepdim=True) + 12.0 + 28.0 * (case.seed % 11) / 10
    sure = {"logits": x.scatter(1, ids[:, :1], lead), "ids": given["ids"]}
    want = oracle.logprob(plain(sure["logits"], "logits"), plain(sure["ids"], "ids"))
    for found in split(subject, sure, cuts, case.seed):
        stay_precise(found.result, want)
    beside(subject, case, given, cuts, ranks)


def matches(subject: Subject, case: Lists, given: Given, ranks: list[Found]) -> None:
    """Values of every rank and the joined gradient are the definition's."""
    ids, support, T = given["ids"], given.get("support"), given["temperature"]
    kept = None
    if support is not None:
        kept = np.split(plain(support.ids, "ids"), plain(support.offsets, "offsets")[1:-1])
    T = plain(T, "temperature") if isinstance(T, Tensor) else T
    g = {n: plain(x, n) for n, x in upstream(ranks[0].result, case.seed).items()}
    want = oracle.logprob(
        plain(given["logits"], "logits"), plain(ids, "ids"), temperature=T, softcap=given.get("softcap"), kept=kept, g=g
    )
    size = np.maximum(1, np.abs(want.lse))
    for found in ranks:
        out = found.result
        close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=2 * of_ids(size, ids))
        if "lse" in subject.claims:
            close(subject, "lse", out.lse, want.lse, case.dtype, scale=size)
        if out.entropy is not None:
            close(subject, "entropy", out.entropy, want.entropy, case.dtype, scale=np.maximum(1, np.abs(want.lse) / 4))
        if out.log_kept_mass is not None:
            close(subject, "logprob", out.log_kept_mass, want.log_kept_mass, case.dtype, scale=4 * size)
    grad = joined(ranks)
    if grad is not None and bool(torch.isfinite(ranks[0].result.logprob).all()):
        most = sum(np.abs(v).reshape(case.N, -1).sum(1) for v in g.values()) / T
        scale = (most * np.maximum(4, size))[:, None]
        close(subject, "grad_logits", grad, want.grad, case.dtype, scale=scale)


def of_ids(of_rows: Any, ids: Tensor) -> Any:
    """[N] numbers of rows as they belong to ids [N] or [N, K]."""
    return of_rows.reshape(-1, *[1] * (ids.dim() - 1))


def beside(subject: Subject, case: Lists, given: Given, cuts: Sequence[int], ranks: list[Found]) -> None:
    """An id of no rank, and NaN on one rank alone: flagged or NaN there, and no other row moves."""
    for bad in (-2, case.V, 2**40):
        ids = given["ids"].clone()
        ids[0] = bad
        of_bad = split(subject, {**given, "ids": ids}, cuts, case.seed)
        for found, before in zip(of_bad, ranks, strict=True):
            out = found.result
            require(bool(out.logprob[0].isnan().all()), f"id {bad} gives {out.logprob[0].tolist()}, not NaN")
            require(out.invalid is not None and bool(out.invalid[0].all()), f"id {bad} is not flagged")
            same_bits("logprob", out.logprob[1:], before.result.logprob[1:], f"beside id {bad}")
            if found.grad is not None:
                require(bool(found.grad.isfinite().all()), f"id {bad} has a gradient that is not finite")
    if "support" in given:  # of which NaN among the ids that are not kept is no part
        return
    x = given["logits"].clone()
    x[0, cuts[1]] = torch.nan
    for found, before in zip(split(subject, {**given, "logits": x}, cuts, case.seed), ranks, strict=True):
        have = found.result.logprob
        require(bool(have[0].isnan().all()), f"NaN on the second rank gives {have[0].tolist()}")
        same_bits("logprob", have[1:], before.result.logprob[1:], "beside NaN on another rank")
    if "mask" in subject.claims:
        mask = torch.arange(case.N, device=subject.device) > 0
        for found in split(subject, {**given, "logits": x, "mask": mask}, cuts, case.seed):
            require(bool((found.result.logprob[0] == 0).all()), "a masked row is not 0")
            require(found.grad is None or bool((found.grad[0] == 0).all()), "a masked row has a gradient")


@attack("LP-32", split_cases, scale=0.5)
def a_group_of_one_gives_the_bits_of_none(subject: Subject, case: Lists) -> None:
    """Results and gradients."""
    given = arguments(subject, case)
    [found], want = split(subject, given, (0, case.V), case.seed), whole(subject, given, case.seed)
    same_results(found.result, want.result, "in a group of one")
    if found.grad is not None and want.grad is not None:
        same_bits("dlogits", found.grad, want.grad, "in a group of one")


@attack("LP-33", split_cases, scale=0.5)
def ranks_agree_bit_by_bit(subject: Subject, case: Lists) -> None:
    """All results of two to four ranks."""
    first, *others = split(subject, arguments(subject, case), cuts_of(case), case.seed)
    for other in others:
        same_results(other.result, first.result, "on another rank")


@attack("LP-34", split_cases, scale=0.3)
def a_few_collectives_are_enough(subject: Subject, case: Lists) -> None:
    """Counted on every rank."""
    given = arguments(subject, case)
    most = 2 if given["ids"].dim() == 1 else 3
    ranks = split(subject, given, cuts_of(case), case.seed)
    counts = [(found.forward, found.backward) for found in ranks]
    require(len(set(counts)) == 1, f"ranks make different numbers of collectives: {counts}")
    require(counts[0][0] <= most, f"a call makes {counts[0][0]} collectives")
    require(counts[0][1] == 0, f"a backward pass makes {counts[0][1]} collectives")
