"""Terms of divergences between two distributions and what their gradients need, and lists of a teacher's ids.

A term and its s w belong to one mass of either side: an id, or a tail of ids. They are those of
`rlkernel_core.spec.divergence`, from logarithms; -inf stands for no mass.

Legend: n rows · w masses · K listed ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_core.spec.divergence import LEAST_TAIL, MOST_MASS


def beta_of(beta: float | None) -> float:
    """The weight of the teacher in a JSD."""
    return 0.5 if beta is None else float(beta)


def terms(kind: str, beta: float, log_s: Tensor, log_t: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of the divergence, and s w, with w its derivative with respect to s; both [n, w]."""
    s, t = log_s.exp(), log_t.exp()
    if kind == "forward_kl":
        return _kl(t, log_t, s, log_s), -t
    if kind == "reverse_kl":
        return _kl(s, log_s, t, log_t), _times(s, log_s, log_s - log_t)
    if kind == "jsd":
        log_m = _log_add(log_t + math.log(beta), log_s + math.log(1 - beta))
        m = log_m.exp()
        term = beta * _kl(t, log_t, m, log_m) + (1 - beta) * _kl(s, log_s, m, log_m)
        return term, (1 - beta) * _times(s, log_s, log_s - log_m)
    return (s - t).abs() / 2, s * torch.sign(s - t) / 2


def _kl(a: Tensor, log_a: Tensor, b: Tensor, log_b: Tensor) -> Tensor:
    """Terms a log(a / b) - a + b = a (d + e^-d - 1), none of them negative, d = log a - log b."""
    d = log_a - log_b
    near = d.abs() < 0.25
    close = torch.where(near, d, 0.0)
    term = torch.where(near, a * (close + torch.expm1(-close)), a * (d - 1) + b)
    term = torch.where(d == torch.inf, torch.inf, term)  # also where a itself is below the least number
    return torch.where(log_a == -torch.inf, b, term)


def _log_add(x: Tensor, y: Tensor) -> Tensor:
    """log(e^x + e^y); the bits of `torch.logaddexp` on a CPU depend on where an element stands."""
    top = torch.maximum(x, y)
    more = torch.log1p(torch.exp(torch.minimum(x, y) - top))
    return torch.where(top == -torch.inf, top, top + more)


def _times(a: Tensor, log_a: Tensor, d: Tensor) -> Tensor:
    """The product a d, 0 where a is none."""
    return torch.where(log_a == -torch.inf, 0.0, a * d)


class Listed(NamedTuple):
    """A teacher's list made safe to use."""

    ids: Tensor  # [n, K] int64, 0 in place of padding and of what is out of range
    there: Tensor  # [n, K] bool: entries that count
    log_t: Tensor  # [n, K] their log-probabilities, -inf for the others; NaN in a row whose list is wrong
    log_tail: Tensor  # [n] of the teacher's tail, -inf where all V ids are listed


def listed(ids: Tensor, log_t: Tensor, V: int, dtype: torch.dtype) -> Listed:
    """Ids [n, K] and log-probabilities [n, K] of a teacher, in the accumulator's type; reads no value on the host.

    The mass of the list is summed in float64, or little would be right of a small tail.
    """
    ids = ids.to(torch.int64)
    there, known = ids != -1, (ids >= 0) & (ids < V)
    ascending = torch.where(known, ids, -1).sort(dim=1).values
    twice = ((ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)).any(1)
    log_t = torch.where(there, log_t, -torch.inf)
    mass = ordered_sum(log_t.double().exp())
    wrong = twice | (there & ~known).any(1) | ~(mass <= MOST_MASS)
    log_t = torch.where(wrong[:, None], torch.nan, log_t.to(dtype))
    tail = torch.where(known.sum(1) == V, 0.0, (1 - mass).clamp_min(LEAST_TAIL))
    return Listed(torch.where(known, ids, 0), there & known, log_t, tail.log().to(dtype))


def ordered_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, of size K, in an order that depends on K alone."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = torch.cat((x[..., :half] + x[..., half : 2 * half], rest), -1)
    return x[..., 0]
