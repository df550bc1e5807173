"""The kept ids of a truncated law, as masks of the block at hand: never [N, V] at once.

Built without host synchronization: the ragged ids keep their length, entries that do not matter go to a spare row.

Legend: N rows · nnz kept ids in all · n, w rows and columns of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common.graphs.audit import recording
from rlkernel_core.spec.logprob import Support


def readable(x: Tensor) -> bool:
    """Whether values of x may be looked at: real CPU tensors, and no graph that would freeze what was seen."""
    return type(x) in {Tensor, torch.nn.Parameter} and x.is_cpu and not recording()


def positions(index: Tensor | None, N: int) -> Tensor | None:
    """[N] place of each row among those worked on, -1 for none."""
    if index is None:
        return None
    place = index.new_full((N,), -1)
    place[index] = torch.arange(index.shape[0], device=index.device)
    return place


class KeptIds:
    """A `Support` in the order of the rows that are worked on."""

    def __init__(
        self, support: Support, V: Tensor | int, position: Tensor | None = None, offset: Tensor | int = 0
    ) -> None:
        """Place every kept id.

        Args:
            support: kept ids per row; entries beyond the last offset are ignored.
            V: size of the whole vocabulary; a kept id outside of it makes its row bad.
            position: [N] place of each row among those worked on, -1 for none; None where all are, in order.
            offset: first id of the columns that `block` counts from 0.
        """
        offsets, ids = support.offsets.to(torch.int64).contiguous(), support.ids.to(torch.int64)
        N = offsets.shape[0] - 1
        entry = torch.arange(ids.shape[0], device=ids.device)
        row = torch.searchsorted(offsets, entry, right=True) - 1
        row = torch.where((row >= 0) & (row < N), row, N)
        outside = (ids < 0) | (ids >= V)
        bad = torch.zeros(N + 1, dtype=torch.bool, device=ids.device)
        bad.index_fill_(0, torch.where(outside, row, N), True)  # `bad[...] = True` would copy from the host
        self.bad = bad[:N]  # [N] rows with a kept id out of range
        if position is not None:
            row = torch.cat((position, position.new_full((1,), -1)))[row]
        self._row, self._column = row, ids - offset
        self._bounded = readable(ids)
        if self._bounded and position is not None:
            self._row, self._column = row[row >= 0], self._column[row >= 0]

    def block(self, first_row: int, n: int, first_column: int, w: int) -> Tensor:
        """[n, w] bool: which of these columns are kept in these rows."""
        row, column = self._row, self._column
        if self._bounded:  # rows ascend: look at this block's entries only
            ends = torch.tensor((first_row, first_row + n), device=row.device)
            low, high = torch.searchsorted(row, ends).tolist()
            row, column = row[low:high], column[low:high]
        row, column = row - first_row, column - first_column
        inside = (row >= 0) & (row < n) & (column >= 0) & (column < w)
        mask = torch.zeros((n + 1) * w, dtype=torch.bool, device=row.device)
        mask.index_fill_(0, torch.where(inside, row * w + column, n * w), True)
        return mask.view(n + 1, w)[:n]
