"""A policy loss of a batch that is split over ranks: what they count before it, and the sums that they join after it.

    Counts.whole(group)        one all-gather: denominators of the whole batch
    of_all_ranks(sums, group)  one all-gather: partial sums of every rank, for one to add up

Between the two a rank works on its own tokens, each with the weight that it has in the whole batch, times the number of
ranks: the mean of the ranks' losses, as of their gradients, is that of the whole. Both are joined in rank order, so
that all ranks get the same bits. Nothing waits for the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_common.vocab_parallel import gathered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Rows of a table of sums over tokens, [K, P] for P programs or ranks. Two are means over ranks. Least and most are
# extremes; v = ratio * weight is summed in units of the largest v of a column, `top`, and so are its squares.
ROWS: Final = (
    "loss", "policy", "tokens", "ratio", "least", "most", "low", "high", "dual", "k1", "k3", "top", "share", "squares",
    "entropy", "kl", "gap", "missing", "weight", "outside",
)  # fmt: skip
_LEAST, _MOST, _TOP = ROWS.index("least"), ROWS.index("most"), ROWS.index("top")
_SHARE, _SQUARES, _MEANS = ROWS.index("share"), ROWS.index("squares"), slice(0, 2)


class Counts(NamedTuple):
    """What denominators and fractions are made of; all []."""

    tokens: Tensor  # int64, in the loss
    filled: Tensor  # int64, sequences with such tokens
    sequences: Tensor | int  # those without, too
    offered: Tensor  # int64, tokens before rejection
    weight: Tensor | None = None  # sum of correction weights, over what their mean is taken of; None: not asked for
    share: Tensor | None = None  # of how many that is the sum

    def whole(self, group: ProcessGroup | None) -> Counts:
        """Of all ranks, from those of each."""
        if group is None:
            return self
        numbers = [x for x in self if x is not None]
        like = self.tokens
        mine = [x.double() if isinstance(x, Tensor) else like.new_full((), x, dtype=torch.float64) for x in numbers]
        total = iter(gathered(torch.stack(mine), group).sum(0).unbind())  # counts below 2^53 are exact
        tokens, filled, sequences, offered = [next(total).long() for _ in range(4)]
        weight, share = [None if x is None else next(total).to(x.dtype) for x in (self.weight, self.share)]
        return Counts(tokens, filled, sequences, offered, weight, share)


def joined(table: Tensor) -> Tensor:  # [K, P] -> [K]
    """One column for all of them; of none, that of no token."""
    none = table.new_zeros(len(ROWS), 1)
    none[_LEAST], none[_MOST] = torch.inf, -torch.inf
    table = torch.cat([table, none], 1)
    top = table[_TOP].amax()
    unit = table[_TOP] / torch.where(top > 0, top, 1.0)
    out = table.sum(1)
    out[_LEAST], out[_MOST], out[_TOP] = table[_LEAST].amin(), table[_MOST].amax(), top
    out[_SHARE], out[_SQUARES] = (table[_SHARE] * unit).sum(), (table[_SQUARES] * unit.square()).sum()
    return out


def of_all_ranks(table: Tensor, group: ProcessGroup) -> Tensor:  # [K, P] -> [K, ranks]
    """A column for every rank, made of those of each."""
    mine = joined(table)
    mine[_MEANS] /= group.size()
    return gathered(mine, group).T.contiguous()
