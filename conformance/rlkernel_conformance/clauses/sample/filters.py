"""Attacks on the filters of sample@1: which tokens are kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.sample.cases import (
    SCALE,
    Draws,
    alive,
    call,
    definitions,
    described,
    everything,
    plain_draws,
    same_draws,
)
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.sampling_batches import Batch, pack, ragged_bias, to
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.sampling import Penalties

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def kept_as_defined(subject: Subject, batch: Batch) -> None:
    """Count and kept set of every row whose set is beyond rounding."""
    out = call(subject, batch)
    count = plain(out.kept_count, "kept_count")
    for i, row in alive(subject, batch):
        found = described(out, i, row.x)
        text = f"row {i} ({batch.rows[i].temperature=}, {batch.rows[i].top_k=}, {batch.rows[i].top_p=}, "
        text += f"{batch.rows[i].min_p=})"
        require(int(count[i]) == len(row.kept), f"{text} keeps {count[i]} tokens, expected {len(row.kept)}")
        require(found == sorted(row.kept.tolist()), f"{text} keeps {found}, expected {sorted(row.kept.tolist())}")


@attack("SA-08", plain_draws, scale=SCALE)
def neutral_values_change_no_bit(subject: Subject, case: Draws) -> None:
    """Every way to say off, one after the other."""
    batch = case.batch(subject, temperature=0.7, **OFF)
    arguments = batch.arguments(subject.claims, subject.device)
    for name in OFF:
        arguments.pop(name, None)
    x, V, N = batch.logits.to(subject.device), case.V, case.N
    asked = everything(subject, V)
    bare = subject(x, **arguments, **asked)
    every = pack(np.ones((N, V), bool))
    neutral: dict[str, tuple[Any, ...]] = {
        "top_k": (0, -1, V, V + 700),
        "top_p": (1.0, 3.0),
        "min_p": (0.0, -1.0),
        "penalties": (Penalties(1.0, 0.0, 0.0, every),),
        "bias": (ragged_bias([{0: 0.0, V - 1: 0.0}] * N),),
        "allowed": (every,),
    }
    for name, values in neutral.items():
        for value in values if name in subject.claims else ():
            given = {n: v for n, v in arguments.items() if n != name} | {name: to(subject.device, value)}
            same_draws(subject, subject(x, **given, **asked), bare, f"with {name} = {value}")


@attack("SA-09", plain_draws, scale=SCALE)
def exactly_k_are_kept(subject: Subject, case: Draws) -> None:
    """Ties included: kept_count = min(k, tokens left), the lowest ids among equals."""
    kept_as_defined(subject, case.batch(subject, top_p=1.0, min_p=0.0))


@attack("SA-10", plain_draws, scale=SCALE)
def the_nucleus_ends_with_the_crossing_token(subject: Subject, case: Draws) -> None:
    """Kept iff the mass before it is below p."""
    for p in (0.5, 0.9):
        batch = case.batch(subject, top_k=0, min_p=0.0, top_p=float(np.float32(p)))
        for row in batch.rows:
            row.temperature = row.temperature or 1.0
        kept_as_defined(subject, batch)
    kept_as_defined(subject, case.batch(subject))  # and behind the other filters, renormalized


@attack("SA-11", plain_draws, scale=SCALE)
def min_p_keeps_what_is_near_the_best(subject: Subject, case: Draws) -> None:
    """Kept iff y >= ln(min_p)."""
    for m in (0.05, 0.6):
        kept_as_defined(subject, case.batch(subject, top_k=0, top_p=1.0, min_p=float(np.float32(m))))


@attack("SA-12", plain_draws, scale=SCALE)
def weaker_filters_keep_supersets(subject: Subject, case: Draws) -> None:
    """A larger k or p, a smaller min_p."""
    few = 7 - case.seed % 7
    p = 0.25 + (case.seed % 4) / 8
    for name, strict, weaker in (("top_k", few, few + 2), ("top_p", p, p + 0.125), ("min_p", 0.125, 0.03125)):
        if name not in subject.claims:
            continue
        tight = case.batch(subject, **OFF | {"temperature": 0.7, name: strict})
        loose = case.batch(subject, **OFF | {"temperature": 0.7, name: weaker})
        less, more = call(subject, tight), call(subject, loose)
        for i, row in enumerate(definitions(tight)):
            if row.x is not None:
                lost = set(described(less, i, row.x)) - set(described(more, i, row.x))
                require(not lost, f"row {i}: {name} = {weaker} drops {sorted(lost)}, kept by {strict}")


def in_order(subject: Subject, case: Draws) -> None:
    """All three filters at values that bite, where the order is seen."""
    for k, p, m in ((2, 0.5, 0.0), (9, 0.7, 0.05), (20, 0.3, 0.5)):
        given = {"temperature": 1.5, "top_k": k, "top_p": float(np.float32(p)), "min_p": float(np.float32(m))}
        kept_as_defined(subject, case.batch(subject, **given))


@attack("SA-13", lambda s: plain_draws(s, filter_order="joint"), scale=SCALE)
def joint_filters_intersect(subject: Subject, case: Draws) -> None:
    """Top-k and top-p on the tempered law."""
    in_order(subject, case)


@attack("SA-14", lambda s: plain_draws(s, filter_order="topp_topk"), scale=SCALE)
def the_nucleus_may_come_first(subject: Subject, case: Draws) -> None:
    """Top-p, then top-k."""
    in_order(subject, case)


@attack("SA-15", lambda s: plain_draws(s, tie="keep_all", kinds="tied"), scale=SCALE)
def ties_with_the_last_token_are_kept(subject: Subject, case: Draws) -> None:
    """Each filter on logits with many equals."""
    kept_as_defined(subject, case.batch(subject))
    in_order(subject, case)


@attack("SA-16", plain_draws, scale=SCALE)
def rows_have_their_own_parameters(subject: Subject, case: Draws) -> None:
    """Tensors of parameters against numbers, one call per row."""
    batch = case.batch(subject)
    together = call(subject, batch)
    for i, row in enumerate(batch.rows):
        alone = {n: getattr(row, n) for n in OFF if n in subject.claims}
        alone = {n: v for n, v in alone.items() if not math.isnan(v)}
        noise = to(subject.device, {n: batch.arguments()[n][i : i + 1] for n in ("seed", "step")})
        one = subject(batch.logits[i : i + 1].to(subject.device), temperature=row.temperature, **alone, **noise)
        text = f"row {i} in a batch and alone"
        same = int(one.token) == int(together.token[i])
        require(same or not subject.exact_noise, f"{text}: {int(together.token[i])}, {int(one.token)}")
        require(int(one.kept_count) == int(together.kept_count[i]), f"{text}: another kept set")
        if same:
            want = plain(one.logprob, "logprob")
            close(subject, "logprob", together.logprob[i : i + 1], want, case.dtype, scale=2.0)
