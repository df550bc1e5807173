"""Count, mean and sum of squared deviations of masked values: shifted two-pass, merged in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Moments(NamedTuple):
    """Moments of some values; all [] and of one floating dtype.

    The mean is shift + moved, kept apart: rounding it to one number would lose what shifting has saved.
    """

    n: Tensor  # how many
    shift: Tensor  # the first of them
    moved: Tensor  # mean of value - shift
    m2: Tensor  # sum of squared deviations from the mean

    @property
    def mean(self) -> Tensor:
        """Mean of the values."""
        return self.shift + self.moved

    def centered(self, x: Tensor) -> Tensor:
        """Distance from the mean; exactly 0 for a constant."""
        return (x - self.shift) - self.moved

    def variance(self, ddof: int) -> Tensor:
        """m2 / (n - ddof), 0 where there are too few values."""
        return variance(self.m2, self.n, ddof)

    def rstd(self, ddof: int, eps: float, mode: str) -> Tensor:
        """The factor that scales by the standard deviation; 0 without a value, where there is nothing to scale by."""
        return torch.where(self.n > 0, reciprocal(self.variance(ddof), eps, mode), 0.0)


def moments(x: Tensor, member: Tensor, counts: Tensor | None = None) -> Moments:
    """Moments of `x` where `member`; with `counts`, each value counts that often.

    The first that counts is subtracted before anything is summed: a constant gives m2 = 0 and its own value as the
    mean, exactly, and a large offset costs no precision.
    """
    x, member = x.reshape(-1), member.reshape(-1)
    times = member.to(x.dtype) if counts is None else torch.where(member, counts.to(x.dtype), 0.0)
    if not x.shape[0]:
        zero = x.new_zeros(())
        return Moments(zero, zero, zero, zero)
    total = times.sum()
    member = times > 0
    first = member.to(torch.int8).argmax(keepdim=True)
    shift = torch.where(member.any(), x[first][0], 0.0)
    away = torch.where(member, x - shift, 0.0)
    moved = (times * away).sum() / total.clamp(min=1.0)
    m2 = (times * torch.where(member, away - moved, 0.0).square()).sum()
    return Moments(total, shift, moved, m2)


def merged(a: Moments, b: Moments) -> Moments:
    """Moments of both together (Chan, Golub and LeVeque 1979); one without values changes nothing."""
    n = a.n + b.n
    apart = (b.shift - a.shift) + (b.moved - a.moved)
    share = b.n / n.clamp(min=1.0)
    some = a.n > 0
    return Moments(
        n,
        torch.where(some, a.shift, b.shift),
        torch.where(some, a.moved + apart * share, b.moved),
        a.m2 + b.m2 + torch.where(some, apart.square() * a.n * share, 0.0),
    )


def across_ranks(local: Moments, process_group: ProcessGroup | None) -> Moments:
    """Moments of all ranks: one all_gather of four numbers, merged in rank order, so that all ranks agree bitwise.

    Every rank takes part, also one without values.
    """
    if process_group is None:
        return local
    from rlkernel_common.vocab_parallel import gathered

    total, *others = (Moments(*each.unbind()) for each in gathered(torch.stack(local), process_group))
    for other in others:
        total = merged(total, other)
    return total


def variance(m2: Tensor, count: Tensor, ddof: int) -> Tensor:
    """m2 / (count - ddof), 0 where there are too few values."""
    free = count - ddof
    return torch.where(free > 0, m2 / torch.where(free > 0, free, 1.0), 0.0)  # counts may be fractions


def reciprocal(var: Tensor, eps: float, mode: str) -> Tensor:
    """The factor that scales by a standard deviation; 0 where it would be infinite."""
    std = var.sqrt()
    if mode == "threshold":
        return torch.where(std > eps, 1.0 / torch.where(std > eps, std, 1.0), 0.0)
    below = {"std_add": std + eps, "var_add": (var + eps).sqrt(), "var_clamp": var.clamp(min=eps).sqrt()}[mode]
    return torch.where(below > 0, 1.0 / torch.where(below > 0, below, 1.0), 0.0)
