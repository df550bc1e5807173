"""A vocabulary split over the ranks of a process group: where a shard stands, and how statistics are gathered.

Two collectives on the way forward, one of three integers and one of a few numbers per row. What arrives is joined in
rank order by the code that joins the tiles of one rank, so every rank gets the same bits. Nothing waits for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common.kept_ids import readable
from rlkernel_common.row_statistics import Part, Sums
from rlkernel_core.errors import ArgumentError


class Shard(NamedTuple):
    """This rank's place in the whole vocabulary."""

    group: dist.ProcessGroup | None  # None: there is one rank, without a group
    offset: Tensor | int  # first id of this rank; 0-dim on the device where there is a group
    V: Tensor | int  # size of the whole vocabulary


def locate(group: dist.ProcessGroup | None, V: int, N: int, D: int, device: torch.device) -> Shard:
    """Learn the sizes of all shards; shards of any size, in rank order."""
    if group is None:
        return Shard(None, 0, V)
    mine = torch.cat([torch.full((1,), size, dtype=torch.int64, device=device) for size in (V, N, D)])
    every = gathered(mine, group)
    if readable(every) and bool((every[:, 1:] != mine[1:]).any()):
        raise ArgumentError(
            "hidden",
            every[:, 1:].tolist(),
            "must be the same on all ranks of the group",
            "Pass equal [N, D] everywhere.",
        )
    return Shard(group, every[: group.rank(), 0].sum(), every[:, 0].sum())


def gather(part: Part, group: dist.ProcessGroup) -> Part:
    """This rank's statistics, [n], beside those of the others, [n, ranks]: one all-gather."""
    fields = [part.target, *part.rest, *(part.kept or ())]
    packed = torch.stack([x for x in fields if x is not None])
    arrived = iter(gathered(packed, group).permute(1, 2, 0).unbind())
    target, *rest = (None if x is None else next(arrived) for x in fields)
    width = len(Sums._fields)
    kept = Sums(*rest[width:]) if part.kept is not None else None  # type: ignore[arg-type]
    return Part(target, Sums(*rest[:width]), kept)  # type: ignore[arg-type]


def add(x: Tensor, group: dist.ProcessGroup) -> None:
    """Sum x over the ranks, in place."""
    dist.all_reduce(x, group=group)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A contiguous x of every rank in rank order, [ranks, ...]: one all-gather."""
    out = x.new_empty((group.size(), *x.shape))
    dist.all_gather(list(out.unbind()), x, group=group)
    return out
