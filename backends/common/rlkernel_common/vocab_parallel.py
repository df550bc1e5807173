"""A vocabulary split over the ranks of a process group: where a shard stands, and how statistics are gathered.

Two collectives on the way forward, one of three integers and one of a few numbers per row. What arrives is joined in
rank order by the code that joins the tiles of one rank, so every rank gets the same bits. Nothing waits for the host.
A rank cuts its shard into pieces and hands out the statistics of each. Equal shards of 1, 2, 4 or 8 ranks are cut at
the same ids, so that what is joined, and in which order, does not depend on how many ranks there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common.kept_ids import readable
from rlkernel_common.row_statistics import Part, Sums
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.linear_logprob import LEAST_PIECE, PIECES


class Shard(NamedTuple):
    """This rank's place in the whole vocabulary."""

    group: dist.ProcessGroup | None  # None: there is one rank, without a group
    offset: Tensor | int  # first id of this rank; 0-dim on the device where there is a group
    V: Tensor | int  # size of the whole vocabulary


def locate(
    group: dist.ProcessGroup | None, V: int, N: int, D: int, device: torch.device, name: str = "hidden",
    sizes: str = "[N, D]",
) -> Shard:  # fmt: skip
    """Learn the sizes of all shards; shards of any size, in rank order.

    Args:
        group: the ranks.
        V: size of this rank's shard.
        N: rows, the same on all ranks.
        D: the other size that all ranks share.
        device: of the call.
        name: the argument that has these sizes.
        sizes: what they are called.
    """
    if group is None:
        return Shard(None, 0, V)
    mine = torch.cat([torch.full((1,), size, dtype=torch.int64, device=device) for size in (V, N, D)])
    every = gathered(mine, group)
    if readable(every) and bool((every[:, 1:] != mine[1:]).any()):
        problem = "must be the same on all ranks of the group"
        raise ArgumentError(name, every[:, 1:].tolist(), problem, f"Pass equal {sizes} everywhere.")
    return Shard(group, every[: group.rank(), 0].sum(), every[:, 0].sum())


def pieces(V: int, ranks: int) -> tuple[int, int]:
    """How many pieces a shard of V ids has, and how many ids each; the last are short, or empty.

    With several ranks the number depends on nothing else: shards may differ in size, and every rank hands out as many.
    """
    count = PIECES // ranks if PIECES % ranks == 0 else 1
    size = max(-(-V // count), LEAST_PIECE)
    return (-(-V // size) if ranks == 1 else count), size


def gather(part: Part, group: dist.ProcessGroup) -> Part:
    """This rank's statistics, [n, pieces], beside those of the others, [n, ranks * pieces]: one all-gather."""
    fields = [part.target, *part.rest, *(part.kept or ())]
    packed = torch.stack([x for x in fields if x is not None])
    arrived = iter(gathered(packed, group).permute(1, 2, 0, 3).flatten(2).unbind())
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
