"""The tokens of packed sequences that a rank of context parallelism has, and the id that follows each of them.

    from rlkernel.context_parallel import next_ids

    mine = next_ids(ids, cu_seqlens, layout="zigzag", rank=rank, ranks=4)   # from the whole batch
    mine = next_ids(share, cu_seqlens, layout="zigzag", group=group)        # from what each rank has of it

A label is the next id of the same sequence, on whichever rank that is; the last token of a sequence has none. R ranks
share N packed tokens, those of sequence i from cu_seqlens[i] to cu_seqlens[i + 1]:

    ulysses    rank r has run r of R equal ones of all N tokens, whatever sequences they cut; tokens beyond
               cu_seqlens[-1] are padding (DeepSpeed-Ulysses, arXiv:2309.14509, outside attention)
    ring       every sequence is cut into R equal runs, of which rank r has run r (Ring Attention, arXiv:2310.01889)
    zigzag     every sequence is cut into 2 R equal runs, of which rank r has runs r and 2 R - 1 - r: as much causal
               attention on every rank (Llama 3, arXiv:2407.21783, section 3.3.2; Transformer Engine's THD)

Imports torch when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from rlkernel import spread
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["IGNORED", "LAYOUTS", "NextIds", "next_ids"]

LAYOUTS: Final = ("ulysses", "ring", "zigzag")  # how tokens are spread over ranks
IGNORED: Final = -100  # the label of a token that has no next one, as torch's cross_entropy leaves it out


@dataclass(frozen=True)
class NextIds:
    """What a rank has."""

    ids: Tensor  # [n] of the dtype of ids: its tokens, in the order of its layout
    labels: Tensor  # [n] of the same dtype: the id of the next token of the same sequence, or -100
    places: Tensor  # [n] int64: where its tokens stand among all N, for everything else that is laid out like them


def next_ids(
    ids: Tensor,  # [N], or [n] with group
    cu_seqlens: Tensor,  # [B + 1]
    *,
    layout: str,
    rank: int = 0,
    ranks: int = 1,
    lengths: Tensor | None = None,  # [B]
    group: ProcessGroup | None = None,
) -> NextIds:
    """The share of a rank, and its labels.

    The host reads `cu_seqlens` and `lengths`. With `group`, one all-gather exchanges the first id of each run, at most
    two per sequence and rank; all ranks must pass the same `cu_seqlens`, `lengths` and layout.

    Args:
        ids: int32 or int64 [N], all tokens; with `group` the share of this rank [n], in the order of the layout.
        cu_seqlens: [B + 1] integer, from 0, not descending, at most N; N itself for `ring` and `zigzag`.
        layout: "ulysses", "ring" or "zigzag", see above.
        rank: whose share, where the ids are whole.
        ranks: how many there are, then.
        lengths: [B] integer, how many tokens of each sequence come before its padding; None: no padding. A padding
            token has no label, and is the label of none.
        group: the ranks of context parallelism, where each has its share alone.

    Returns:
        NextIds, on the device of `ids`. The labels of all ranks, put to their places, are those of the whole batch.

    Raises:
        ArgumentTypeError: ids, cu_seqlens or lengths of another dtype, or a group that is none.
        ArgumentError: an unknown layout, a rank that is none of the ranks, sizes that do not match, or a length that
            the layout cannot cut into equal runs.
    """
    checks.choice("layout", layout, LAYOUTS)
    checks.tensor("ids", ids, ndim=1)
    if str(ids.dtype) not in {"torch.int32", "torch.int64"}:
        raise ArgumentTypeError("ids", checks.describe(ids), "must be int32 or int64", "Pass token ids.")
    group = spread.group_of(group)
    checks.process_group("group", group)
    if group is not None:
        if (rank, ranks) != (0, 1):
            given = f"rank={checks.describe(rank)}, ranks={checks.describe(ranks)}"
            raise ArgumentError("group", given, "has a rank and a size of its own", "Leave out rank and ranks.")
        rank, ranks = group.rank(), group.size()
    checks.integer("ranks", ranks, at_least=1)
    checks.integer("rank", rank, at_least=0, at_most=ranks - 1)
    total = len(ids) * (ranks if group is not None else 1)
    starts = _starts(cu_seqlens, total)
    real = _real(lengths, starts)
    runs = [_runs(layout, starts, total, r, ranks) for r in range(ranks)]
    places = _places(runs[rank]).to(ids.device)
    if group is None:
        whole, mine = ids, ids[places]
    else:
        whole, mine = _with_borders(ids, runs, total, places, group), ids.clone()
    return NextIds(mine, _labels(whole, starts, real)[places], places)


def _starts(cu_seqlens: Tensor, total: int) -> list[int]:
    checks.tensor("cu_seqlens", cu_seqlens, ndim=1, kind="integer")
    starts: list[int] = cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] > total or starts != sorted(starts):
        remedy = "Pass [B + 1] bounds; with group, ids are the share of a rank."
        problem = f"must go from 0 up to at most {total} tokens"
        raise ArgumentError("cu_seqlens", checks.describe(starts), problem, remedy)
    return starts


def _real(lengths: Tensor | None, starts: list[int]) -> list[int]:
    """Tokens of each sequence that are no padding."""
    sizes = [end - start for start, end in pairwise(starts)]
    if lengths is None:
        return sizes
    checks.tensor("lengths", lengths, ndim=1, kind="integer")
    real: list[int] = lengths.tolist()
    remedy = "Pass for each sequence how many of its tokens are no padding."
    if len(real) != len(sizes):
        raise ArgumentError("lengths", checks.describe(lengths), f"must be [{len(sizes)}], one per sequence", remedy)
    for i, (count, size) in enumerate(zip(real, sizes, strict=True)):
        if not 0 <= count <= size:
            raise ArgumentError("lengths", count, f"must be 0 to {size} for sequence {i}", remedy)
    return real


def _runs(layout: str, starts: list[int], total: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """First place of each run of a rank and the one past its last, in the order of its tokens; no run is empty."""
    if layout == "ulysses":
        if total % ranks:
            raise ArgumentError("ids", f"{total} tokens", f"must be a multiple of {ranks} ranks", "Pad the batch.")
        return [(rank * (total // ranks), (rank + 1) * (total // ranks))] if total else []
    if starts[-1] != total:
        remedy = "Give padding to a sequence, and its real length in lengths."
        problem = f"must end at {total}, the number of tokens, for {layout}"
        raise ArgumentError("cu_seqlens", checks.describe(starts), problem, remedy)
    pieces, own = (ranks, (rank,)) if layout == "ring" else (2 * ranks, (rank, 2 * ranks - 1 - rank))
    found = []
    for i, (start, end) in enumerate(pairwise(starts)):
        size, rest = divmod(end - start, pieces)
        if rest:
            remedy = "Pad it, and pass its real length in lengths."
            problem = f"must give sequence {i} a multiple of {pieces} tokens for {layout}"
            raise ArgumentError("cu_seqlens", f"{end - start} tokens", problem, remedy)
        found += [(start + piece * size, start + (piece + 1) * size) for piece in own if size]
    return found


def _places(runs: list[tuple[int, int]]) -> Tensor:  # -> [n] int64
    import torch

    return torch.cat([torch.arange(0), *(torch.arange(first, last) for first, last in runs)])


def _with_borders(
    ids: Tensor, runs: list[list[tuple[int, int]]], total: int, places: Tensor, group: ProcessGroup
) -> Tensor:  # -> [N]
    """All ids that labels of this rank need, at their places: its own, and the first of every run of all ranks."""
    import torch
    import torch.distributed as dist

    if len(ids) != len(places):
        raise ArgumentError("ids", f"{len(ids)} tokens", f"must be the {len(places)} of this rank", "Pass its share.")
    whole = ids.new_zeros(total)
    whole[places] = ids
    heads = [torch.tensor([first for first, _ in of_rank], dtype=torch.int64, device=ids.device) for of_rank in runs]
    mine = whole[heads[group.rank()]]
    theirs = [torch.empty_like(mine) for _ in runs]  # every rank has as many runs
    dist.all_gather(theirs, mine, group=group)
    whole[torch.cat(heads)] = torch.cat(theirs)
    return whole


def _labels(whole: Tensor, starts: list[int], real: list[int]) -> Tensor:  # [N] -> [N]
    """Of all tokens; what follows a token that has its label is known, the rest may hold anything."""
    import torch

    known = torch.zeros(len(whole), dtype=torch.bool)
    for start, count in zip(starts, real, strict=False):
        known[start : start + max(count - 1, 0)] = True
    return torch.where(known.to(whole.device), whole.roll(-1), IGNORED)
