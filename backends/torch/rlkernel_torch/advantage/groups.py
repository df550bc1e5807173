"""Groups of sequences by arbitrary ids, without knowing how many there are: sort once, then sums over runs.

Nothing here reads a value off the device: B groups is the upper bound, and all shapes are [B].
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_torch.advantage.suffix import suffix_scan


class Groups:
    """A partition of B sequences. Every method takes and returns one entry per sequence, in the caller's order."""

    def __init__(self, *ids: Tensor) -> None:
        """Sequences are in one group where all their ids, each [B] integer, are equal."""
        self.ids = ids
        self.order = order_by(*ids)
        self.inverse = torch.argsort(self.order)
        self._segment = _runs(self.order, ids)
        at = torch.arange(self.order.shape[0], device=self.order.device)
        first = torch.ones_like(at, dtype=torch.bool)
        first[1:] = self._segment[1:] != self._segment[:-1]
        self._start = torch.where(first, at, 0).cummax(0).values if at.shape[0] else at

    @classmethod
    def of(cls, group: int | Tensor, sequences: int, device: torch.device) -> Groups:
        """Groups of a size (adjacent members) or by ids."""
        if isinstance(group, Tensor):
            return cls(group)
        return _Adjacent(group, sequences, device)

    def total(self, x: Tensor) -> Tensor:  # [..., B] -> [..., B]
        """Sum over the group; exact for integers and for one summand that is not 0."""
        x = x[..., self.order]
        sums = suffix_scan(torch.ones_like(x), x, self._segment)
        return sums[..., self._start][..., self.inverse]

    def heads(self, member: Tensor) -> Tensor:  # [B] bool -> [B] bool
        """The first member of each group, in the caller's order."""
        counted = member[self.order].to(torch.int64)
        running = counted.cumsum(0)
        rank = running - (running - counted)[self._start]
        return (counted.bool() & (rank == 1))[self.inverse]

    def first(self, x: Tensor, member: Tensor) -> Tensor:  # [B], [B] bool
        """Value of the first member of the group; 0 where there is none."""
        return self.total(torch.where(self.heads(member), x, 0))

    def best_two(self, x: Tensor, member: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Largest and second largest x among the members, and where the largest is (a tie: the first of them).

        Members must have finite x. Without two members the values mean nothing.
        """
        key = torch.where(member, -x, torch.inf)
        order = order_by(*self.ids, key)
        segment = _runs(order, self.ids)
        at = torch.arange(order.shape[0], device=order.device)
        head = torch.ones_like(at, dtype=torch.bool)
        head[1:] = segment[1:] != segment[:-1]
        second = torch.cat([torch.zeros_like(head[:1]), head[:-1]]) & ~head
        back = torch.argsort(order)
        member, x = member[order], x[order]
        best, runner_up = member & head, member & second
        pick = (best[back], runner_up[back])
        x = x[back]
        return self.total(torch.where(pick[0], x, 0)), self.total(torch.where(pick[1], x, 0)), pick[0]


class _Adjacent(Groups):
    """Groups of one size side by side: the same bits unsorted, in log2(size) additions in place of log2(B) passes."""

    def __init__(self, size: int, sequences: int, device: torch.device) -> None:
        """Sequences [0, size) are one group, [size, 2 size) the next."""
        self.ids = (torch.arange(sequences, device=device) // size,)
        self._shape = (sequences // size, size)

    def total(self, x: Tensor) -> Tensor:  # [..., B] -> [..., B]
        """Sum over the group, neighbors first, as a suffix scan adds them up."""
        y = x.reshape(*x.shape[:-1], *self._shape)
        while y.shape[-1] > 1:
            if y.shape[-1] % 2:
                y = torch.nn.functional.pad(y, (0, 1))
            y = y[..., ::2] + y[..., 1::2]
        return y.expand(*x.shape[:-1], *self._shape).reshape(x.shape)

    def heads(self, member: Tensor) -> Tensor:  # [B] bool -> [B] bool
        """The first member of each group."""
        counted = member.reshape(self._shape).to(torch.int64)
        return (counted.bool() & (counted.cumsum(1) == 1)).reshape(member.shape)


def order_by(*keys: Tensor) -> Tensor:  # each [B] -> [B] int64
    """Permutation that sorts by the first key, ties by the next, and so on, then by position."""
    order = torch.arange(keys[0].shape[0], device=keys[0].device)
    for key in reversed(keys):
        order = order[torch.argsort(key[order], stable=True)]
    return order


def _runs(order: Tensor, ids: tuple[Tensor, ...]) -> Tensor:
    """Numbers of the runs of equal ids in sorted order."""
    differs = torch.zeros_like(order, dtype=torch.bool)
    for x in ids:
        arranged = x[order]
        differs[1:] |= arranged[1:] != arranged[:-1]
    return differs.to(torch.int64).cumsum(0)
