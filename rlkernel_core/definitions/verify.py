"""Verification of drafts, one request at a time in numpy and float64, after rlkernel_core/spec/verify.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from rlkernel_core.definitions.sampling import gumbel, sample_row, uniform, words

ACCEPT, RESIDUAL = 2, 3


@dataclass
class Outcome:
    """What one request emits."""

    accepted: int = 0
    tokens: list[int] = field(default_factory=list)  # of the rows up to the last emitted one
    laws: list = field(default_factory=list)  # Drawn, one per row that was looked at
    sure: bool = True  # no rounding changes a decision


def verify_request(logits, drafts, q, row, dtype=np.float32, score=4e-6, mass=2e-6):
    """logits [k + 1, V], drafts [k], q [k, V] laws of the drafts or None, row: the request's Row.

    `score` and `mass` are what an implementation may be off by: in a noised score, and relatively in a probability.
    """
    out = Outcome()
    V = logits.shape[1]
    count = row.out_count
    for j in range(len(drafts) + 1):
        here = replace(row, step=row.step + j, out_count=count)
        law = sample_row(logits[j], here, dtype)
        out.laws.append(law)
        out.sure &= law.sure(mass, 8e-6)
        if law.log_p is None:
            return out
        draft = int(drafts[j]) if j < len(drafts) else None
        known = draft is not None and 0 <= draft < V
        if draft is None or q is None:
            out.sure &= law.gap > score
            token, accept = law.token, draft is not None and law.token == draft
        else:
            token, accept = _tested(law, q[j], draft if known else None, here, out, score, mass)
        out.tokens.append(token)
        if not accept:
            return out
        out.accepted += 1
        if count is not None:
            count = count + (np.arange(V) == draft)
    return out


def _tested(law, q, draft, row, out, score, mass):
    p, q = np.exp(law.log_p), np.where(q > 0, q, 0.0)
    V = p.size
    if draft is not None:
        u = uniform(words(row.seed, row.step, V, ACCEPT))[draft]
        out.sure &= bool(abs(u * q[draft] - p[draft]) > 4 * mass * p[draft]) or p[draft] == q[draft] == 0
        if u * q[draft] < p[draft]:
            return draft, True
    residual = np.maximum(p - q, 0.0)
    slack = 4 * mass * (p + q)  # what rounding may leave of a residual that is 0, or take from one that is not
    if not residual.any():
        residual, slack = p, 4 * mass * p
    noise = gumbel(words(row.seed, row.step, V, RESIDUAL))
    with np.errstate(divide="ignore"):
        at_least = np.log(np.maximum(residual - slack, 0.0)) + noise - score
        at_most = np.log(np.where(p > 0, residual + slack, 0.0)) + noise + score
        token = int(np.argmax(np.log(residual) + noise))
    out.sure &= bool((at_most[np.arange(V) != token] < at_least[token]).all())
    return token, False
