"""Several ids of each row, whose log-probabilities come from one logsumexp: which count, and their gradient.

The listed id with the largest logit becomes the row's chosen id. Its own log-probability keeps its precision where p is
near 1, as `row_statistics` says; every other listed id has p <= 1/2, and log p = z - lse loses nothing there.

    log p_k = (y_k - top) / T - log_total
    d (sum_j g_j log p_j) / d z_i = own_i - p_i sum_j g_j,   own_i the sum of g_j over the j with id_j = i

At a listed id that is own (1 - p) - others p, where `others` sums over the other ids: it is the difference of two sums
in float64, so that none of it is lost in fp32. Sums are those of neighbors in the order of the list, one after the
other.

Lists lie one behind the other, [M], with the row of each entry, whether they are as long as each other or not.

Legend: N rows · M listed ids of all rows · K those of a row where all have as many · n, w rows and columns of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.kept_ids import readable
from rlkernel_common.row_statistics import SoftmaxStats
from rlkernel_core.spec.sampling import TokenLists


class ListedIds(NamedTuple):
    """The ids of each row made safe to use, and what became of the others; every tensor is [M]."""

    ids: Tensor  # int64; -1 where there is none: padding, an invalid id, or any id of a masked row
    row: Tensor  # int64, ascending: whose list it is in; of entries beyond the last list that of the last row
    invalid: Tensor  # bool: ids of counted rows that are neither padding nor in range


def list_ids(ids: Tensor | TokenLists, N: int, mask: Tensor | None, V: Tensor | int) -> ListedIds:
    """Select the ids that may be used, of ids N * K or lists of N rows, and a mask [N]."""
    if isinstance(ids, TokenLists):
        each, at = ids.ids.to(torch.int64), torch.arange(ids.ids.shape[0], device=ids.ids.device)
        row = torch.searchsorted(ids.offsets.to(torch.int64).contiguous(), at, right=True) - 1
        inside: Tensor | None = (row >= 0) & (row < N)
        row = row.clamp(0, max(N - 1, 0))
    else:
        each, inside = ids.reshape(-1).to(torch.int64), None
        row = torch.arange(N, device=ids.device).repeat_interleave(ids.shape[-1])
    if not N:  # no entry is in a list
        return ListedIds(torch.full_like(each, -1), row, torch.zeros_like(each, dtype=torch.bool))
    outside = (each < 0) | (each >= V)
    invalid, usable = outside & (each != -1), ~outside
    for counted in (inside, None if mask is None else mask[row]):
        if counted is not None:
            invalid, usable = invalid & counted, usable & counted
    return ListedIds(torch.where(usable, each, -1), row, invalid)


def chosen_of(listed: ListedIds, y: Tensor, N: int) -> Tensor:
    """[N] the listed id with the largest logit, the first of equals; -1 where a row lists none.

    Args:
        listed: the ids.
        y: [M] their logits; any number where there is no id.
        N: rows.
    """
    ids, row, _ = listed
    M, there = ids.shape[0], ids >= 0
    if not M or not N:
        return ids.new_full((N,), -1)
    key = torch.where(there & ~y.isnan(), y, -torch.inf)
    best = there & (key == key.new_full((N,), -torch.inf).scatter_reduce(0, row, key, "amax")[row])
    at = torch.where(best, torch.arange(M, device=ids.device), M)
    first = at.new_full((N,), M).scatter_reduce(0, row, at, "amin")
    return torch.where(first < M, ids[first.clamp_max(M - 1)], -1)


def log_probabilities(listed: ListedIds, y: Tensor, chosen: Tensor, T: Tensor, row: SoftmaxStats) -> Tensor:
    """[M] log p of the listed ids: 0 where there is none, NaN where it is invalid.

    Args:
        listed: the ids.
        y: [M] their logits under the cap.
        chosen: [N] as `chosen_of` finds it.
        T: [N] temperatures.
        row: of the rows, [N].
    """
    if not chosen.shape[0]:
        return torch.zeros_like(y)
    values = _log_p(listed.ids, listed.row, y, chosen, T, row)
    return torch.where(listed.ids >= 0, values, torch.where(listed.invalid, torch.nan, 0.0).to(values.dtype))


def _log_p(ids: Tensor, row: Tensor, y: Tensor, chosen: Tensor, T: Tensor, of: SoftmaxStats) -> Tensor:
    return torch.where(ids == chosen[row], of.logprob[row], _shift(y, row, T, of) - of.log_total[row])


def _shift(y: Tensor, row: Tensor, T: Tensor, of: SoftmaxStats) -> Tensor:
    return (y - of.top[row]) / T[row]


def upstream_of(ids: Tensor, row: Tensor, g: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Upstream gradients [M] of the listed ids, 0 where there is none whatever g holds, and their sums, [N] float64."""
    each = torch.where(ids >= 0, g.reshape(-1), 0.0)
    return each, _sums(each, row, N)


def _sums(x: Tensor, of: Tensor, count: int) -> Tensor:
    """[count] float64 sums of x [M] over neighbors that belong together: `of`, ascending, says to which of them."""
    ends = torch.searchsorted(of, torch.arange(count + 1, device=x.device))
    wide = x.double()[:, None]  # in one dimension a GPU's order of sums depends on where they begin
    return torch.segment_reduce(wide, "sum", offsets=ends, unsafe=True, initial=0.0)[:, 0]


def gradient_at(
    ids: Tensor, row: Tensor, y: Tensor, chosen: Tensor, T: Tensor, of: SoftmaxStats, g: tuple[Tensor, Tensor],
    g_lse: Tensor | None, g_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    """[M] gradient of the loss with respect to y of each listed id; the same number for a repeated id.

    Args:
        ids: [M] as `ListedIds` has them.
        row: [M] the same.
        y: [M] their logits under the cap.
        chosen: [N] as `chosen_of` finds it.
        T: [N] temperatures.
        of: statistics of the rows, [N].
        g: as `upstream_of` has it.
        g_lse: [N] upstream gradient of lse.
        g_entropy: [N] that of the entropy.
    """
    M, (each, total) = ids.shape[0], g
    if not M or not T.shape[0]:
        return torch.zeros_like(y)
    # Stable sorts by id and then by row: repeated ids become neighbors, in the order of the list.
    order = torch.sort(ids, stable=True).indices
    order = order[torch.sort(row[order], stable=True).indices]
    begins = (ids[order].diff() != 0) | (row[order].diff() != 0)
    place = torch.cat((begins.new_zeros(1), begins)).cumsum(0)
    own = torch.empty_like(total[row]).scatter_(0, order, _sums(each[order], place, M)[place])
    others = (total[row] - own).to(y.dtype)
    d = _shift(y, row, T, of)
    log_p = _log_p(ids, row, y, chosen, T, of)
    p, rest = torch.exp(log_p), -torch.expm1(log_p)
    dz = own.to(y.dtype) * rest - others * p
    if g_lse is not None:
        dz += g_lse[row] * p
    if g_entropy is not None and of.mean is not None:
        dz -= g_entropy[row] * p * (d - of.mean[row]).masked_fill(p == 0, 0.0)
    return dz / T[row]


class ListedGradient:
    """Gradients at the listed ids, to be put in their places in blocks of rows and columns."""

    def __init__(self, ids: Tensor, row: Tensor, values: Tensor, K: int | None, position: Tensor | None = None) -> None:
        """Place every entry.

        Args:
            ids: [M] counted from the first column of this rank, below 0 where there is none.
            row: [M] as `ListedIds` has it.
            values: [M] gradients, the same of an id that its row lists twice.
            K: entries of each row where all have as many.
            position: [N] place of each row among those worked on, -1 for none; None where all are, in order.
        """
        self._K, self._bounded = K if position is None else None, readable(ids)
        if position is not None:
            row = torch.cat((position, position.new_full((1,), -1)))[row]  # the last where there are no rows at all
        there = (row >= 0) if self._bounded and position is not None else slice(None)
        self._row, self._column, self._values = row[there], ids[there], values[there]

    def put(self, dy: Tensor, first_row: int, first_column: int) -> Tensor:
        """A block dy [n, w] of a gradient with these values in their places.

        One number more takes what has no place, so that no shape depends on data.
        """
        n, w = dy.shape
        some = slice(None)
        if self._K is not None:
            some = slice(first_row * self._K, (first_row + n) * self._K)
        elif self._bounded:  # rows ascend: look at this block's entries only
            ends = torch.tensor((first_row, first_row + n), device=dy.device)
            some = slice(*torch.searchsorted(self._row, ends).tolist())
        row, column = self._row[some] - first_row, self._column[some] - first_column
        inside = (row >= 0) & (row < n) & (column >= 0) & (column < w)
        room = torch.nn.functional.pad(dy.reshape(-1), (0, 1))
        return room.scatter_(0, torch.where(inside, row * w + column, n * w), self._values[some])[: n * w].view(n, w)
