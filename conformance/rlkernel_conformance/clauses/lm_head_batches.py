"""Clauses of lm_head_sample on rows of other batches: the same draws, and the same bits where that is claimed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.clauses.lm_heads import SCALE, Heads, Operands, heads
from rlkernel_conformance.compare import require, same_bits
from rlkernel_conformance.sampling_batches import Batch
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.sampling import SampleResult


def in_other_batches(subject: Subject, made: Operands, **more: Any) -> Iterator[tuple[list[int], str, SampleResult]]:
    """Rows of the call in batches of other sizes and orders, where rows have parameters of their own."""
    back = list(range(len(made.batch.rows)))[::-1]
    ways = {"in a reversed batch": back, "among 150 rows": back * 30, "alone": [2]}
    for when, rows in ways.items() if "per_row_parameters" in subject.claims else ():
        some = Batch(made.batch.logits[rows], [made.batch.rows[i] for i in rows])
        part = replace(made, hidden=made.hidden[rows], batch=some, error=made.error[rows])
        yield rows, when, subject(**part.arguments(subject, **more))


@attack("LH-13", lambda s: heads(s, N=5, D=16), scale=SCALE)
def a_request_draws_the_same_token_in_any_batch(subject: Subject, case: Heads) -> None:
    """Alone, reversed, among 150 rows, in strided memory."""
    made = case.operands(subject)
    given = made.arguments(subject)
    want = subject(**given)
    sure = {i for i, _ in made.definitions()}
    for rows, when, out in in_other_batches(subject, made):
        for k, i in enumerate(rows):
            if i in sure:
                require(int(out.token[k]) == int(want.token[i]), f"row {i} draws another token {when}")
    wide = torch.full((10, 32), math.nan, dtype=made.hidden.dtype, device=subject.device)
    wide[::2, 8:24] = given["hidden"]
    out = subject(**given | {"hidden": wide[::2, 8:24]})
    for i in sorted(sure):
        require(int(out.token[i]) == int(want.token[i]), f"row {i} draws another token in strided memory")


@attack("LH-19", lambda s: heads(s, N=5).map(lambda case: replace(case, D=(16, 5, 33)[case.seed % 3])), scale=SCALE)
def a_row_has_the_same_bits_in_any_batch(subject: Subject, case: Heads) -> None:
    """Alone, reversed, among 150 rows; in float64 too, and ranked beside rows that may not draw an infinite logit."""
    for dtype in sorted({case.dtype, "float64"} & set(subject.dtypes)):
        some = replace(case, dtype=dtype)
        calls: list[tuple[Operands, dict[str, Any]]] = [(some.operands(subject), {})]
        if {"bias", "allowed"} <= subject.claims:
            calls.append((_apart(some.operands(subject, bias=_infinite(some)), case.V // 2), {"rank": True}))
        for made, more in calls:
            want = leaves(subject(**made.arguments(subject, **more)))
            for rows, when, out in in_other_batches(subject, made, **more):
                for name, value in leaves(out).items():
                    same_bits(name, value, want[name][rows], when)


def _infinite(case: Heads) -> Tensor:
    """A bias that makes one token's logit infinite."""
    bias = torch.zeros(case.V, dtype=getattr(torch, case.dtype))
    bias[case.V // 2] = math.inf
    return bias


def _apart(made: Operands, token: int) -> Operands:
    """The same, but every other row may not draw a token."""
    others = np.arange(len(made.weight)) != token
    rows = [
        replace(row, allowed=others if row.allowed is None else row.allowed & others) if i % 2 else row
        for i, row in enumerate(made.batch.rows)
    ]
    return replace(made, batch=Batch(made.batch.logits, rows))
