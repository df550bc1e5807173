"""Do counts follow a law? Tests whose error bounds hold for every sample size, so no table of quantiles is needed.

    n KL(found || p) = sum over k categories of c log(c / (n p))            half of the G statistic
    P(n KL >= t) <= exp(-t) (e t / (k - 1))^(k - 1)  for t > k - 1          Agrawal, arXiv 1904.02291, theorem I.2

Unlike the chi-square approximation, which is off by orders of magnitude this far out in the tail, this is a proven
bound at any n and p. Its price is power: a bug shows once n KL(bug || p) is well above `limit(k)`.

A judgment is wrong with probability at most ALPHA over the choice of the seeds, which are fixed: a run that passes
passes always. 10^4 judgments, more than the deepest profile makes, stay below 1e-6 together.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from rlkernel_conformance.compare import require

ALPHA: Final = 1e-10


def limit(categories: int) -> float:
    """The smallest t with exp(-t) (e t / f)^f <= ALPHA, f = categories - 1."""
    f = categories - 1
    if f == 0:
        return 0.0
    t = low = float(f)
    high = 2.0 * f + 100.0  # the bound is below ALPHA there for every f below 10^5
    while high - low > 1e-6:
        t = (low + high) / 2
        low, high = (low, t) if t - f * (1 + math.log(t / f)) >= -math.log(ALPHA) else (t, high)
    return high


def divergence(found: Any, p: Any) -> float:
    """N KL(found || p) in nats; infinite where something impossible was found."""
    c, p = np.asarray(found, np.float64), np.asarray(p, np.float64)
    some = c > 0
    if (p[some] <= 0).any():
        return math.inf
    return float((c[some] * np.log(c[some] / (c.sum() * p[some]))).sum())


def follows(what: str, tokens: Any, p: Any) -> None:
    """`tokens` are drawn from the law `p` [V]; rare tokens are pooled, which raises the power."""
    p = np.asarray(p, np.float64)
    found = np.bincount(np.asarray(tokens).reshape(-1), minlength=p.size)
    require(found.size == p.size, f"{what}: token {found.size - 1} of a vocabulary of {p.size}")
    impossible = np.flatnonzero((p == 0) & (found > 0))
    require(impossible.size == 0, f"{what}: tokens {impossible.tolist()} have no mass and were drawn")
    rare = found.sum() * p < 5
    found, p = np.append(found[~rare], found[rare].sum()), np.append(p[~rare], p[rare].sum())
    have, most = divergence(found, p / p.sum()), limit(int((p > 0).sum()))
    require(have <= most, f"{what}: {found.tolist()} of {found.sum()} draws, n KL = {have:.1f} above {most:.1f}")


def share(what: str, found: int, n: int, p: float) -> None:
    """`found` of n draws hit an event of probability p: Chernoff's bound, both tails together."""
    have = divergence([found, n - found], [p, 1 - p])
    require(have <= math.log(2 / ALPHA), f"{what}: {found} of {n} draws, expected {n * p:.1f}")


def independent(what: str, first: Any, second: Any, p: Any) -> None:
    """Pairs of tokens of the law `p` are independent; the vocabulary is pooled into four classes of similar mass."""
    p = np.asarray(p, np.float64)
    group = np.minimum((4 * (np.cumsum(p) - p / 2)).astype(int), 3)
    mass = np.bincount(group, weights=p, minlength=4)
    a, b = group[np.asarray(first)], group[np.asarray(second)]
    follows(f"{what}: pairs", 4 * a + b, np.outer(mass, mass).reshape(-1))
