"""Batches of rewards, values and ratios, and the oracle's answer for each row of them."""

from __future__ import annotations

import numpy as np
import torch

from rlkernel_core.definitions import advantage as oracle


def batch(B=4, T=33, seed=0, dtype=torch.float64, keep=0.7):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    mask = torch.rand(B, T, generator=g) < keep
    return {
        "r": draw(B, T),
        "v": draw(B, T),
        "q": draw(B, T),
        "ratio": draw(B, T).exp(),
        "boot": draw(B),
        "mask": mask,
        "done": torch.rand(B, T, generator=g) < 0.1,
        "lam": torch.rand(B, T, generator=g, dtype=torch.float64).to(dtype),
        "turns": torch.randint(0, 4, (B, T), generator=g).sort(-1).values,
    }


def rows(f, B):
    """Stack an oracle's two results over the rows of a batch."""
    done = [f(i) for i in range(B)]
    return np.stack([a for a, _ in done]), np.stack([b for _, b in done])


def gae_rows(b, gamma, lam, *, boot=None, done=None, carry=False):
    """The oracle's GAE of every row; `lam` a number or one per row or token."""
    n = {k: x.double().numpy() if x.is_floating_point() else x.numpy() for k, x in b.items()}
    return rows(
        lambda i: oracle.gae_row(
            n["r"][i],
            n["v"][i],
            n["mask"][i],
            gamma,
            lam if isinstance(lam, float) else lam[i].numpy(),
            n["boot"][i] if boot is not None else 0.0,
            n["done"][i] if done is not None else None,
            carry,
        ),
        len(n["r"]),
    )


def poisoned(x, mask):
    return torch.where(mask, x, torch.nan)


def close(actual, expected, atol=1e-10):
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=0, atol=atol)
