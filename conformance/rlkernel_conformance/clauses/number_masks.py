"""Rows of which some ids hold one finite number far below the others, as masks do; and LP-39, the attack with them.

Legend: N rows · V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as oracle

# The last is the least number of a dtype; a dtype that does not hold one of the others takes its least in place of it.
VALUES: Final = (-1e4, -1e9, -1e10, -1e12, -1e20, -1e30, -2e38, -3e38, float(np.finfo(np.float32).min), -math.inf)
PLACES: Final = ("run", "all but some", "every other")  # ids that hold the number
SIZES: Final = (193, 130, 256, 300, 1283)  # one of several tiles
TEMPERATURES: Final = (1.0, 0.5, 0.7, 1.7)
RUN: Final = (64, 130)  # ids
LEFT: Final = (1, 4)  # ids that "all but some" leaves
BEST: Final = 6  # most likely ids that are asked for: some are masked


@dataclass(frozen=True)
class Masked:
    """A row for each place and three of the values."""

    V: int
    seed: int
    dtype: str = "float32"
    temperature: float = 1.0

    def value(self, i: int, least: float = 1.0) -> float:
        """The number that row i is masked by, at least `least` times the dtype's least number."""
        return max(VALUES[(self.seed + 3 * i) % len(VALUES)], least * torch.finfo(getattr(torch, self.dtype)).min)

    def mask(self, place: str, i: int) -> Tensor:
        """[V] bool: the ids of row i that are masked."""
        rng, ids = np.random.default_rng((self.seed, i)), torch.arange(self.V)
        if place == "run":
            length = min(int(rng.integers(RUN[0], RUN[1] + 1)), self.V - 1)
            first = int(rng.integers(0, self.V - length + 1))
            return (ids >= first) & (ids < first + length)
        if place == "all but some":
            kept = rng.choice(self.V, int(rng.integers(LEFT[0], LEFT[1] + 1)), replace=False)
            return ~torch.isin(ids, torch.from_numpy(kept))
        return ids % 2 == i % 2

    def rows(self) -> list[tuple[Tensor, float]]:
        """The masked ids [V] of each row and what they hold."""
        places = [place for place in PLACES for _ in range(3)]
        return [(self.mask(place, i), self.value(i)) for i, place in enumerate(places)]

    def tensors(self, device: str) -> tuple[Tensor, Tensor]:
        """Logits [N, V], and ids [N]: of every second row one that is masked where there are such."""
        rows, dtype = self.rows(), getattr(torch, self.dtype)
        x = 2 * draw.normal((len(rows), self.V), self.seed, "cpu")
        for row, (mask, value) in zip(x, rows, strict=True):
            row[mask] = value
        masked = torch.stack([mask for mask, _ in rows])
        return x.to(dtype).to(device), chosen(masked, self.seed).to(device)


def chosen(masked: Tensor, seed: int) -> Tensor:
    """[N] ids of rows whose masked ids are [N, V]: a masked one in every second row."""
    want = (torch.arange(len(masked)) + seed) % 2 == 0
    score = torch.rand(masked.shape, generator=torch.Generator().manual_seed(seed))
    return (score + (masked == want[:, None])).argmax(1)


def masked_rows(subject: Subject) -> st.SearchStrategy[Masked]:
    """Every claimed dtype and all values."""
    return st.builds(
        Masked,
        V=st.sampled_from(SIZES),
        seed=st.integers(0, 255),
        dtype=st.sampled_from(subject.dtypes),
        temperature=st.sampled_from(TEMPERATURES),
    )


def law_of(z: Any, ids: Any, temperature: float, g: Any = None) -> oracle.Row:
    """The definition, of float64 logits; products with numbers that fp32 just holds may leave it."""
    with np.errstate(over="ignore"):
        return oracle.logprob(z, ids, temperature=temperature, g=g)


def near(subject: Subject, name: str, found: Tensor, want: oracle.Row, V: int, dtype: str) -> None:
    """A result is that of the definition, up to a sum over V ids."""
    with np.errstate(over="ignore"):
        close(subject, name, found, getattr(want, name), dtype, scale=math.log(V))


@attack("LP-39", masked_rows, examples=(Masked(193, 0), Masked(1283, 8, temperature=0.5)), scale=0.5)
def a_number_masks_as_minus_infinity_does(subject: Subject, case: Masked) -> None:
    """Log-probability, and what else is claimed, of ids that are masked and of others."""
    if case.dtype not in subject.dtypes:
        return
    x, ids = case.tensors(subject.device)
    both = torch.stack((ids, ids.roll(1)), 1)
    for these in (ids, both) if "many_ids" in subject.claims else (ids,):
        agrees(subject, case, x, these)
    if "top_logprobs" in subject.claims:
        best = subject(x, ids, temperature=case.temperature, top_logprobs=BEST)
        want = law_of(plain(x, "logits"), plain(best.top_ids, "top_ids"), case.temperature)
        near(subject, "logprob", best.top_logprobs, want, case.V, case.dtype)


def agrees(subject: Subject, case: Masked, x: Tensor, ids: Tensor) -> None:
    """Every claimed result, and its gradient, is that of the definition."""
    names = ("logprob", *(n for n in ("lse", "entropy") if n in subject.claims))
    shapes = {n: ids.shape if n == "logprob" else ids.shape[:1] for n in names}
    up = {n: draw.normal(tuple(s), case.seed + i, subject.device, "float32") for i, (n, s) in enumerate(shapes.items())}
    g = {n: plain(u, n) for n, u in up.items()}
    want = law_of(plain(x, "logits"), plain(ids, "ids"), case.temperature, g)
    leaf = x.clone().requires_grad_("grad" in subject.claims)
    out = subject(leaf, ids, temperature=case.temperature, **({"entropy": True} if "entropy" in names else {}))
    size = math.log(case.V)
    for name in names:
        near(subject, name, getattr(out, name), want, case.V, case.dtype)
    if out.entropy is not None:
        have = plain(out.entropy, "entropy")
        require(bool(((have >= -1e-5) & (have <= size + 1e-3)).all()), f"entropy {have} of {case.V} tokens")
    if leaf.requires_grad:
        total = sum((up[n].to(getattr(out, n).dtype) * getattr(out, n)).sum() for n in names)
        (grad,) = torch.autograd.grad(total, leaf)
        most = sum(np.abs(v).reshape(len(x), -1).sum(1) for v in g.values())[:, None] / case.temperature
        close(subject, "grad_logits", grad, want.grad, case.dtype, scale=most * 2 * size)
