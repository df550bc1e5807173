"""sample: noise of neighbouring steps, seeds and streams is independent. The law itself: clauses SA-02 to SA-04."""

from __future__ import annotations

import math

import torch

from rlkernel_torch.direct import sample


def chi_square_limit(freedom: int, alpha: float = 1e-7) -> float:
    """Quantile 1 - alpha of chi-square after Wilson and Hilferty (1931); within 1 % of exact for freedom >= 3."""
    z = {1e-7: 5.199}[alpha]
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def test_noise_of_neighbouring_tokens_steps_and_seeds_is_independent() -> None:
    n, V = 5000, 4
    x = torch.zeros(n, V)
    a = sample(x, seed=1, step=torch.arange(n)).token
    families = sample(x, seed=torch.arange(n), step=7).token
    pairs = {
        "next step": (a[:-1], a[1:]),
        "next seed": (a, sample(x, seed=2, step=torch.arange(n)).token),
        "other stream": (a, sample(x, seed=1, step=torch.arange(n), stream=1).token),
        "seeds in a row": (families[:-1], families[1:]),
        "far step": (a, sample(x, seed=1, step=torch.arange(n) + 2**32).token),
        "far seed": (a, sample(x, seed=1 + 2**32, step=torch.arange(n)).token),
    }
    for left, right in pairs.values():
        table = torch.bincount(left * V + right, minlength=V * V).double()
        expected = left.shape[0] / V**2
        assert float(((table - expected) ** 2 / expected).sum()) < chi_square_limit(V * V - 1)
