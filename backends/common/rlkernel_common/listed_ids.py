"""Several ids of each row, whose log-probabilities come from one logsumexp: which count, and their gradient.

The listed id with the largest logit becomes the row's chosen id. Its own log-probability keeps its precision where p is
near 1, as `row_statistics` says; every other listed id has p <= 1/2, and log p = z - lse loses nothing there.

    log p_k = (y_k - top) / T - log_total
    d (sum_j g_j log p_j) / d z_i = own_i - p_i sum_j g_j,   own_i the sum of g_j over the j with id_j = i

At a listed id that is own (1 - p) - others p, where `others` sums over the other ids: no two large numbers cancel.

Legend: N rows · K listed ids of a row · w columns of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.row_statistics import SoftmaxStats, Upstream, tree_sum


class ListedIds(NamedTuple):
    """The ids of each row made safe to use, and what became of the others."""

    ids: Tensor  # [N, K] int64; -1 where there is none: padding, an invalid id, or any id of a masked row
    invalid: Tensor  # [N, K] bool: ids of counted rows that are neither padding nor in range


def list_ids(ids: Tensor, mask: Tensor | None, V: Tensor | int) -> ListedIds:
    """Select the ids that may be used, of ids [N, K] and a mask [N]."""
    ids = ids.to(torch.int64)
    outside = (ids < 0) | (ids >= V)
    invalid, usable = outside & (ids != -1), ~outside
    if mask is not None:
        invalid, usable = invalid & mask[:, None], usable & mask[:, None]
    return ListedIds(torch.where(usable, ids, -1), invalid)


def chosen_of(ids: Tensor, y: Tensor) -> Tensor:
    """[N] the listed id with the largest logit, the first of equals; -1 where a row lists none.

    Args:
        ids: [N, K] as `ListedIds` has them.
        y: [N, K] their logits; any number where there is no id.
    """
    there = ids >= 0
    key = torch.where(there & ~y.isnan(), y, -torch.inf)
    best = there & (key == key.amax(1, keepdim=True))
    first = best.to(torch.int8).argmax(1, keepdim=True)  # the first of several
    return torch.where(best.any(1), ids.gather(1, first)[:, 0], -1)


def log_probabilities(listed: ListedIds, y: Tensor, chosen: Tensor, T: Tensor, row: SoftmaxStats) -> Tensor:
    """[N, K] log p of the listed ids: 0 where there is none, NaN where it is invalid."""
    values = _shift(y, T, row) - row.log_total[:, None]
    values = torch.where(listed.ids == chosen[:, None], row.logprob[:, None], values)
    return torch.where(listed.ids >= 0, values, torch.where(listed.invalid, torch.nan, 0.0).to(values.dtype))


def _shift(y: Tensor, T: Tensor, row: SoftmaxStats) -> Tensor:
    return (y - row.top[:, None]) / T[:, None]


def upstream_of(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Upstream gradients [N, K] of the listed ids, 0 where there is none, whatever g holds; and their sums, [N]."""
    each = torch.where(ids >= 0, g.reshape(ids.shape), 0.0)
    return each, tree_sum(each)


def gradient_at(
    ids: Tensor, y: Tensor, chosen: Tensor, T: Tensor, row: SoftmaxStats, g: Tensor, up: Upstream
) -> Tensor:  # fmt: skip
    """[N, K] gradient of the loss with respect to y of each listed id; the same number for a repeated id.

    Args:
        ids: [N, K] as `ListedIds` has them.
        y: [N, K] their logits under the cap.
        chosen: [N] as `chosen_of` finds it.
        T: [N] temperatures.
        row: of the rows, [N].
        g: [N, K] as `upstream_of` has it.
        up: upstream gradients of the results of a row, [N]; that of its log-probabilities is not read.
    """
    own, others = torch.zeros_like(y), torch.zeros_like(y)
    for j in range(ids.shape[1]):  # in one order, whatever the ids
        same, g_j = ids == ids[:, j : j + 1], g[:, j : j + 1]
        own += torch.where(same, g_j, 0.0)
        others += torch.where(same, 0.0, g_j)
    d = _shift(y, T, row)
    absent = y == -torch.inf
    log_p = torch.where(ids == chosen[:, None], row.logprob[:, None], d - row.log_total[:, None])
    p, rest = torch.exp(log_p), -torch.expm1(log_p)
    dz = own * rest - others * p
    if up.lse is not None:
        dz += up.lse[:, None] * p
    if up.entropy is not None and row.mean is not None:
        dz -= up.entropy[:, None] * p * (d - row.mean[:, None]).masked_fill(absent, 0.0)
    return dz / T[:, None]


def put(dx: Tensor, ids: Tensor, values: Tensor, first: Tensor | int = 0) -> Tensor:
    """A gradient [n, w] of columns from `first` on with these values, [n, K], at the listed ids among them.

    One column more takes what has no place, so that no shape depends on data; a repeated id has one value.
    """
    w = dx.shape[1]
    at = ids - first
    at = torch.where((ids >= 0) & (at >= 0) & (at < w), at, w)
    return torch.nn.functional.pad(dx, (0, 1)).scatter_(1, at, values)[:, :w]
