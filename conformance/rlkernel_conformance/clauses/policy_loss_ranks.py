"""Attacks on policy_loss@1 with a batch that is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import same_results
from rlkernel_conformance.clauses.policy_loss_batches import (
    CORRECTIONS,
    REJECTIONS,
    Batch,
    Found,
    arguments,
    batches,
    call,
    check_gradient,
    check_loss,
    expected,
)
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.ranks import collectives, on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import policy_loss as oracle


def split(subject: Subject, case: Batch, bounds: Sequence[int], **options: Any) -> list[Found]:
    """What each rank gives: rank i has sequences bounds[i] to bounds[i + 1]; `options` beside those of the case."""
    x = case.arrays()

    def on_rank(rank: int, group: Any) -> Found:
        rows = slice(bounds[rank], bounds[rank + 1])
        part = replace(case, B=rows.stop - rows.start)
        return call(subject, part, process_group=group, **options, **{n: a[rows] for n, a in x.items()})

    return on_ranks(subject, len(bounds) - 1, on_rank)


def of_tokens(subject: Subject, case: Batch, bounds: Sequence[int]) -> list[Found]:
    """What each rank gives: rank i has tokens bounds[i] to bounds[i + 1], of sequences that nobody tells it."""
    per_token = np.broadcast_to(case.arrays()["adv"].reshape(case.B, -1), (case.B, case.T))
    whole = arguments(subject, case, adv=per_token)

    def on_rank(rank: int, group: Any) -> Found:
        at = slice(bounds[rank], bounds[rank + 1])
        tensors = {n: x.reshape(-1)[at].clone() for n, x in whole.items() if isinstance(x, torch.Tensor)}
        leaves = [tensors[n].requires_grad_("grad" in subject.claims) for n in ("logprob", "entropy") if n in tensors]
        out = subject(**{**whole, **tensors, "process_group": group})
        if "grad" not in subject.claims:
            return Found(out)
        return Found(out, *[plain(g, "gradient") for g in torch.autograd.grad(out.loss, leaves)])

    return on_ranks(subject, len(bounds) - 1, on_rank)


def per_token(case: Batch) -> bool:
    """Whether nothing is asked per sequence."""
    rules = CORRECTIONS.get(case.correction), REJECTIONS.get(case.rejection)
    levels = {case.level, *(rule.level for rule in rules if rule is not None)}
    return levels == {"token"} and case.aggregate.startswith("token_")


def counted(subject: Subject, case: Batch) -> dict[str, Any]:
    """Options that say what is counted: none, or one that is claimed and has a meaning for the case."""
    per_sequence = case.aggregate.startswith("seq_")
    ways: list[dict[str, Any]] = [{}]
    if case.aggregate != "token_sum":
        ways.append({"denominator": 5.0})
        ways.append({"denominator": torch.tensor(5.0, device=subject.device)})
    if per_sequence and "count_empty" in subject.claims:
        ways.append({"count_empty": True})
    if case.bonus and {"entropy_aggregate", "aggregate:seq_mean_token_mean"} <= subject.claims:
        ways.append({"entropy_aggregate": "seq_mean_token_mean"})
    return ways[case.seed // 3 % len(ways)]


def check(subject: Subject, case: Batch, ranks: list[Found], *, sequences: bool = True, **options: Any) -> None:
    """Loss and statistics of every rank, and the mean of their gradients, are the definition's for the whole batch."""
    options = {n: x.item() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    args, named = case.definition(**options)
    want, size = oracle.statistics(*args, **named), expected(case, **options).size
    for found in ranks:
        check_loss(subject, case, found, **options)
        for name, have in vars(found.result.stats).items() if "stats" in subject.claims else ():
            if have is not None and (sequences or name != "sequences"):
                scale = 1 + 10 * size if name == "policy_loss" else 4.0
                close(subject, "stats", have, want[name], case.dtype, scale=scale, name=f"stats.{name}")
    if ranks[0].dlogprob is None:
        return
    shape = case.B, case.T
    of_logprob = np.concatenate([f.dlogprob for f in ranks]).reshape(shape) / len(ranks)
    of_entropy = np.concatenate([f.dentropy for f in ranks]).reshape(shape) / len(ranks) if case.bonus else None
    check_gradient(subject, case, Found(ranks[0].result, of_logprob, of_entropy), **options)


def grouped(subject: Subject) -> st.SearchStrategy[Batch]:
    """Batches of several sequences."""
    return batches(subject, B=4)


# The seed says which of the ways of `counted`: none, a number, a tensor, with empty sequences, another for the bonus.
EXAMPLES = tuple(
    Batch(B=4, T=5, seed=3 * seed, aggregate=way, dtype="float32", bonus=True, rollout=True, correction=rule)
    for seed, way, rule in (
        (0, "token_mean", "normalized tokens"),
        (0, "seq_mean_token_mean", "normalized sequences"),
        (1, "token_mean", ""),
        (2, "seq_mean_token_sum", ""),
        (3, "seq_mean_token_sum_norm", ""),
        (4, "seq_mean_token_sum", ""),
        (1, "token_sum", ""),
    )
)


def claimed(subject: Subject, case: Batch) -> bool:
    """Whether an example asks for nothing that is not claimed."""
    given = arguments(subject, case)
    return case.dtype in subject.dtypes and subject.spec.needs(subject.spec.call(**given)) <= subject.claims


@attack("PL-35", grouped, examples=EXAMPLES, scale=0.4)
def a_split_batch_is_the_whole_one(subject: Subject, case: Batch) -> None:
    """One to four ranks, one of them empty or with nothing in the loss."""
    if not claimed(subject, case):
        return
    B, N, cut, options = case.B, case.B * case.T, 1 + case.seed % 3, counted(subject, case)
    for bounds in ((0, B), (0, cut, B), (0, cut, cut, B), (0, 1, 2, 3, B)):
        check(subject, case, split(subject, case, bounds, **options), **options)
    if per_token(case) and not case.packed:
        check(subject, case, of_tokens(subject, case, (0, 1 + case.seed % N, N)), sequences=False)


@attack("PL-36", grouped, scale=0.3)
def ranks_agree_bit_by_bit(subject: Subject, case: Batch) -> None:
    """Three ranks with shares of their own sizes."""
    first, *others = split(subject, case, (0, 1, 3, case.B))
    for other in others:
        same_results(other.result, first.result, "on another rank")


@attack("PL-37", grouped, scale=0.2)
def two_collectives_are_enough(subject: Subject, case: Batch) -> None:
    """Counted on a rank with all sequences and on one with none."""
    x = case.arrays()

    def on_rank(rank: int, group: Any) -> tuple[int, int]:
        rows = slice(0, case.B) if rank else slice(0, 0)
        part = replace(case, B=rows.stop)
        given = arguments(subject, part, **{n: a[rows] for n, a in x.items()})
        leaf = given["logprob"].requires_grad_("grad" in subject.claims)
        before = collectives(group)
        out = subject(**given, process_group=group)
        between = collectives(group)
        if leaf.requires_grad:
            torch.autograd.grad(out.loss, leaf)
        return between - before, collectives(group) - between

    first, second = on_ranks(subject, 2, on_rank)
    require(first == second, f"a rank without tokens makes {first[0]} and {first[1]} collectives, another {second}")
    require(first[0] <= 2, f"a call makes {first[0]} collectives")
    require(first[1] == 0, f"a backward pass makes {first[1]} collectives")
