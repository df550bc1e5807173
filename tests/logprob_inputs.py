"""Rows and heads that the log-probability tests share."""

from typing import NamedTuple

import torch

from rlkernel_core.spec.logprob import Support


def rows(N, V, *, seed=0, dtype=torch.float32, peak=0.0):
    """Logits of standard deviation 3 and ids; `peak` lifts the chosen logit."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, V, generator=g, dtype=torch.float64) * 3
    ids = torch.randint(0, V, (N,), generator=g)
    logits[torch.arange(N), ids] += peak
    return logits.to(dtype), ids


def ragged(lists):
    offsets = torch.tensor([0, *(len(k) for k in lists)]).cumsum(0)
    return Support(torch.tensor([i for k in lists for i in k], dtype=torch.int64), offsets)


class Operands(NamedTuple):
    hidden: torch.Tensor  # [N, D]
    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor  # [V]
    ids: torch.Tensor  # [N]


def head(N, D, V, *, seed=0, dtype=torch.float32):
    """Operands whose logits have a standard deviation of about 3."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((N, D), (V, D), (V,)))
    ids = torch.randint(0, V, (N,), generator=g)
    return Operands(hidden.to(dtype), (weight * 3 / D**0.5).to(dtype), bias.to(dtype), ids)
