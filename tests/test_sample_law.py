"""Draws follow the law: chi-square over steps, tails, independence of the noise, couplings between filters.

Seeds are fixed, so a test passes or fails always; the stated false-alarm rate is that of the choice of the seeds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlkernel_core.definitions.sampling import Row, sample_row
from rlkernel_torch.direct import sample

STEPS = 20_000


def chi_square_limit(freedom: int, alpha: float = 1e-7) -> float:
    """Quantile 1 - alpha of chi-square after Wilson and Hilferty (1931); within 1 % of exact for freedom >= 3."""
    z = {1e-7: 5.199}[alpha]
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def pmf(logits, **arguments) -> np.ndarray:
    drawn = sample_row(logits, Row(**arguments))
    y = np.asarray(logits, np.float64) / (arguments.get("temperature") or 1.0)
    p = np.zeros(len(logits))
    p[drawn.kept] = np.exp(y[drawn.kept] - y.max())
    return p / p.sum()


def counts(logits, *, steps=STEPS, seed=11, **arguments) -> np.ndarray:
    V = len(logits)
    found = np.zeros(V, int)
    row = torch.as_tensor(logits, dtype=torch.float32)
    for low in range(0, steps, 5000):
        step = torch.arange(low, min(low + 5000, steps))
        token = sample(row.expand(len(step), V), seed=seed, step=step, **arguments).token
        found += torch.bincount(token, minlength=V).numpy()
    return found


def assert_follows(found: np.ndarray, p: np.ndarray) -> None:
    """Pearson's chi-square, tokens of expectation below 5 pooled."""
    assert found[p == 0].sum() == 0
    expected = found.sum() * p
    rare = (expected < 5) & (p > 0)
    seen = np.append(found[expected >= 5], found[rare].sum())
    wanted = np.append(expected[expected >= 5], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    assert ((seen - wanted) ** 2 / wanted).sum() < chi_square_limit(max(len(seen) - 1, 1))


def row(seed: int, V: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=V) * scale).astype(np.float32)


@pytest.mark.parametrize("V", [3, 37, 64])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
        {"top_k": 9, "top_p": 0.8, "filter_order": "joint"},
    ],
    ids=str,
)
def test_tokens_follow_the_processed_law(V, arguments) -> None:
    """21 tests at 1e-7 each: false alarm below 3e-6."""
    x = row(V, V, 1.5)
    single = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in arguments.items()}
    assert_follows(counts(x, **arguments), pmf(x, **single))


@pytest.mark.parametrize("stream", [1, 3])
def test_other_streams_follow_the_law_too(stream) -> None:
    x = row(1, 37, 1.5)
    assert_follows(counts(x, stream=stream), pmf(x))


def test_seeds_are_as_good_as_steps() -> None:
    x = row(2, 37, 1.5)
    rows = torch.as_tensor(x).expand(STEPS // 2, 37)
    token = sample(rows, seed=torch.arange(STEPS // 2), step=0).token
    assert_follows(torch.bincount(token, minlength=37).numpy(), pmf(x))


def test_a_high_temperature_is_uniform_over_what_is_allowed() -> None:
    x = row(3, 16, 3.0)
    x[5] = -np.inf
    p = np.full(16, 1 / 15)
    p[5] = 0
    assert_follows(counts(x, temperature=1e30), p)


def test_rare_tokens_keep_their_frequency() -> None:
    """512 tokens 10 nats below one head; the exact tail of the noise further down is tested in test_philox."""
    steps = 4000
    x = np.full(513, -10.0, np.float32)
    x[100] = 0.0
    p = 512 * math.exp(-10.0)
    p /= 1 + p
    found = steps - counts(x, steps=steps, seed=5)[100]
    assert abs(found - steps * p) < 5.3 * math.sqrt(steps * p * (1 - p)) + 3  # about 1e-7 two-sided


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


def test_the_unfiltered_winner_wins_every_draw_that_keeps_it() -> None:
    n, V = 2000, 50
    x = torch.as_tensor(row(6, V, 2.0)).expand(n, V)
    free = sample(x, seed=3, step=torch.arange(n)).token
    for arguments in ({"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.5}):
        kept = sample(x[:1], seed=3, step=0, kept_capacity=V, **arguments).kept_ids[0]
        token = sample(x, seed=3, step=torch.arange(n), **arguments).token
        inside = torch.isin(free, kept)
        assert torch.equal(token[inside], free[inside])
        assert 0 < int(inside.sum()) < n


def test_a_token_at_the_edge_of_the_nucleus_changes_few_draws() -> None:
    """Noise belongs to tokens: one more kept token changes only the draws that it wins."""
    n, V = 2000, 50
    x = torch.as_tensor(row(7, V, 1.0)).expand(n, V)
    fewer, more = (sample(x, seed=3, step=torch.arange(n), top_k=k).token for k in (10, 11))
    added = sample(x[:1], seed=3, step=0, top_k=11, kept_capacity=11).kept_ids[0, 10]
    assert torch.equal(fewer[more != added], more[more != added])


def test_mean_log_probability_is_minus_the_entropy() -> None:
    n = 4000
    x = torch.as_tensor(row(8, 30, 1.5)).expand(n, 30)
    result = sample(x, seed=5, step=torch.arange(n), top_p=0.9, entropy=True)
    assert float(result.logprob.mean()) == pytest.approx(-float(result.entropy[0]), abs=0.06)
