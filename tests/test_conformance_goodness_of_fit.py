"""Goodness of fit: the bounds are those stated, laws that hold pass, and bugs of the stated size do not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlkernel_conformance.compare import Violation
from rlkernel_conformance.goodness_of_fit import ALPHA, divergence, follows, independent, limit, share


@pytest.mark.parametrize("categories", [2, 3, 16, 64, 1000])
def test_the_limit_is_where_the_bound_reaches_alpha(categories) -> None:
    f, t = categories - 1, limit(categories)
    assert -t + f * (1 + math.log(t / f)) == pytest.approx(math.log(ALPHA), abs=1e-4)


def test_the_bound_covers_an_exact_tail() -> None:
    """Two categories: the binomial tail beyond the limit, summed exactly, is below alpha."""
    for n, p in ((50, 0.5), (400, 0.03), (2000, 0.9)):
        beyond = [
            math.lgamma(n + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * math.log(p)
            + (n - k) * math.log1p(-p)
            for k in range(n + 1)
            if divergence([k, n - k], [p, 1 - p]) > limit(2)
        ]
        assert sum(math.exp(x) for x in beyond) < ALPHA


def test_draws_of_the_law_pass() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.dirichlet(np.full(24, 0.5))
        tokens = rng.choice(24, 4096, p=p)
        follows("draws", tokens, p)
        independent("draws", tokens[::2], tokens[1::2], p)
        share("draws of token 0", int((tokens == 0).sum()), 4096, p[0])


def test_bugs_of_the_stated_size_are_refuted() -> None:
    rng = np.random.default_rng(1)
    y = rng.normal(size=24) * 1.5
    p = np.exp(y) / np.exp(y).sum()
    hot = np.exp(y / 1.5) / np.exp(y / 1.5).sum()
    tokens = rng.choice(24, 4096, p=p)
    with pytest.raises(Violation, match="n KL"):
        follows("another temperature", rng.choice(24, 4096, p=hot), p)
    with pytest.raises(Violation, match="no mass"):
        follows("a filter ignored", tokens, np.where(p > np.sort(p)[3], p, 0) / p[p > np.sort(p)[3]].sum())
    with pytest.raises(Violation, match="pairs"):
        independent("equal neighbors", tokens[:100], tokens[:100], p)
    with pytest.raises(Violation, match="expected"):
        share("a third lost", 328, 2048, 0.24)
