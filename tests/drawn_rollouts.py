"""Rollouts of a model that is two tables: a logit is of the last id and of the sum of all ids before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.rollouts import Params, Record, Rollout

V, P, STOP = 64, 5, 7


class Tables:
    """Logits [B, V] behind ids [B, T], and `verify`'s callback for them."""

    def __init__(self, seed: int = 0, scale: float = 2.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.last, self.sums = (scale * torch.randn(V, V, generator=g) for _ in range(2))

    def behind(self, ids: Tensor) -> Tensor:
        return self.last[ids[:, -1]] + self.sums[ids.sum(1) % V]

    def __call__(self, ids: Tensor, first: int) -> Iterable[Tensor]:
        rows = self.last[ids] + self.sums[ids.cumsum(0) % V]
        return [rows[first : first + 5], rows[first + 5 :]]

    def quantized(self, bits: int) -> Tables:
        """The same with weights on a grid of 2^bits - 1 steps a row."""
        other = Tables()
        for name in ("last", "sums"):
            table = getattr(self, name)
            step = table.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            setattr(other, name, (table / step).round() * step)
        return other


TABLES = Tables()


def draws(params: Params) -> dict[str, Any]:
    """A law as `sample` takes it."""
    names = ("temperature", "top_k", "top_p", "min_p", "filter_order", "tie", "vocab_size", "stream")
    return {name: getattr(params, name) for name in names}


def noisy(error: float) -> Callable[[Tensor], Tensor]:
    """Adds errors of a standard deviation to logits, as other numerics do."""
    g = torch.Generator().manual_seed(5)
    return lambda x: x + error * torch.randn(x.shape, generator=g)


def rollout(
    params: Params | None = None,
    *,
    model: Tables = TABLES,
    through: Callable[[Tensor], Tensor] = lambda x: x,
    tokens: int = 32,
    sequences: int = 8,
    seed: int = 100,
    said: Params | None = None,
    weights: str = "step 1",
) -> Record:
    """Sequences drawn by `sample` from what `through` makes of the model's logits, stated as drawn under `said`."""
    params = params or Params()
    ids = torch.randint(0, V, (sequences, P), generator=torch.Generator().manual_seed(1))
    seeds = torch.arange(sequences) + seed
    logprob, mass = [], []
    for _ in range(tokens):
        draw = rlk.sample(through(model.behind(ids)), **draws(params), seed=seeds, step=ids.shape[1])
        ids = torch.cat([ids, draw.token[:, None]], 1)
        logprob.append(draw.logprob)
        mass.append(draw.log_kept_mass)
    said = replace(said or params, max_new_tokens=tokens)
    columns = zip(ids.tolist(), torch.stack(logprob, 1).tolist(), torch.stack(mass, 1).tolist(), strict=True)
    return Record(
        tuple(
            Rollout(tuple(row[:P]), seed + i, P, said, tuple(row[P:]), tuple(lp), tuple(m), ((weights, tokens),))
            for i, (row, lp, m) in enumerate(columns)
        ),
        decisions=rlk.decisions_hash(),
    )


def changed(record: Record, i: int, **fields: Any) -> Record:
    """With some fields of sequence i replaced."""
    rows = list(record.rollouts)
    rows[i] = replace(rows[i], **fields)
    return replace(record, rollouts=tuple(rows))
