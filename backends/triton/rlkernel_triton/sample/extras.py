"""Ranked results of a draw, on request: the kept ids, the n best, the rank. Each sorts or scans the rows in torch.

Legend: N rows · V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def order(x: Tensor, n: int) -> Tensor:
    """[N, n] ids by (logit descending, id ascending). Adding 0 makes -0 and 0 one value for sorts that look at bits."""
    return torch.sort(x + 0.0, dim=1, descending=True, stable=True).indices[:, :n]


def kept_ids(x: Tensor, count: Tensor, none: Tensor, capacity: int) -> Tensor:
    """[N, capacity] kept ids, best first, -1 behind the last: what is kept is a prefix of the order."""
    best = order(x, capacity)
    ids = best.new_full((x.shape[0], capacity), -1)
    place = torch.arange(best.shape[1], device=x.device)
    ids[:, : best.shape[1]] = torch.where((place < count[:, None]) & ~none[:, None], best, -1)
    return ids


def rank_of(x: Tensor, token: Tensor) -> Tensor:
    """[N] int32: how many tokens stand before this one."""
    own = x.gather(1, token.clamp(0, x.shape[1] - 1)[:, None])
    ids = torch.arange(x.shape[1], device=x.device)
    return ((x > own) | ((x == own) & (ids < token[:, None]))).sum(1).to(torch.int32)


def top_of(x: Tensor, stats: Tensor, count: Tensor | None, padding: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n best ids and their log-probabilities, [N, n]; -1 and -inf where there is no n-th token.

    Args:
        x: [N, V] fp32 logits without NaN.
        stats: [N, 3] best logit, T, log of the weights; or [N, 2] without the T, which is 1.
        count: [N] kept tokens; None where nothing is dropped.
        padding: [N] rows that stand for nothing.
        n: how many.
    """
    best = order(x, n)
    v = x.gather(1, best)
    top = stats[:, :1]
    # Beside +inf all others have no mass.
    there = (v > -torch.inf) & ((top < torch.inf) | (v == top)) & ~padding[:, None]
    if count is not None:
        there &= torch.arange(best.shape[1], device=x.device) < count[:, None]
    y = torch.where(v == top, 0.0, v - top)
    y = y / stats[:, 1:2] if stats.shape[1] == 3 else y
    return torch.where(there, best, -1), torch.where(there, y - stats[:, -1:], -torch.inf)
