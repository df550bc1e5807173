"""Which rows count, which ids may be used, and what becomes of the rest: shared by both log-probability operators.

A masked row gives 0 and gradient 0 whatever it holds. An unmasked row with an id out of range gives NaN, gradient 0 and
a flag. Everything is selected, nothing multiplied.

Legend: N rows · V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.kept_ids import KeptIds
from rlkernel_common.row_statistics import SoftmaxStats, Upstream
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.listed_ids import flat_ids, is_ragged, listed_shape
from rlkernel_core.spec.logprob import LogprobCall


class Chosen(NamedTuple):
    """The chosen ids made safe to use, and what became of the others; every tensor is [N]."""

    ids: Tensor  # int64; -1 where the row is masked or invalid
    counted: Tensor | None  # bool, None: all rows count
    invalid: Tensor  # bool: counted rows whose id, or a kept id, is out of range


def choose(ids: Tensor, mask: Tensor | None, V: Tensor | int, kept: KeptIds | None) -> Chosen:
    """Select the ids that may be used; those of masked rows are never looked at."""
    ids = ids.to(torch.int64)
    invalid = (ids < 0) | (ids >= V)
    if kept is not None:
        invalid = invalid | kept.bad
    if mask is not None:
        invalid = invalid & mask
    usable = ~invalid if mask is None else mask & ~invalid
    return Chosen(torch.where(usable, ids, -1), mask, invalid)


def check_values(call: LogprobCall, V: int) -> None:
    """The checks of `validate=True` with a vocabulary of V ids: they read values, hence wait for the device."""
    ids, rows, support = flat_ids(call.ids), call.logits.shape[:-1], call.support
    counted = torch.ones(rows, dtype=torch.bool, device=ids.device) if call.mask is None else call.mask
    wrong, range_ = (ids < 0) | (ids >= V), f"lie in [0, {V}) in every row that counts"
    if is_ragged(call.ids):
        _check_offsets("ids", call.ids.offsets, len(ids), "ids of each row")
        lengths = call.ids.offsets.diff()
        of_row = torch.nn.functional.pad(
            counted.reshape(-1).repeat_interleave(lengths), (0, len(ids) - int(lengths.sum()))
        )
        _refuse("ids.ids", ids, of_row & wrong & (ids != -1), f"must be -1 or {range_}")
    elif listed_shape(call.ids, call.logits) is None:
        _refuse("ids", ids, counted & wrong, f"must {range_}")
    else:
        _refuse("ids", ids, counted[..., None] & wrong & (ids != -1), f"must be -1 or {range_}")
    if isinstance(call.temperature, Tensor):
        T = call.temperature.expand(rows)
        _refuse("temperature", T, counted & ~((T > 0) & T.isfinite()), "must be > 0 and finite in every row")
    if support is None:
        return
    _check_offsets("support", support.offsets, len(support.ids), "kept ids")
    bad = KeptIds(support, V).bad.view(rows) & counted
    _refuse("support.ids", None, bad, f"must lie in [0, {V}) in every row that counts")


def _check_offsets(name: str, offsets: Tensor, size: int, counted: str) -> None:
    ordered = bool((offsets[1:] >= offsets[:-1]).all()) and int(offsets[0]) == 0
    if not ordered or int(offsets[-1]) > size:
        raise ArgumentError(
            f"{name}.offsets",
            offsets.tolist()[:8],
            f"must start at 0, never decrease and end within the {size} ids",
            f"Pass the running sum of the numbers of {counted}.",
        )


def _refuse(name: str, x: Tensor | None, bad: Tensor, problem: str) -> None:
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        got = "one that does not" if x is None else x[first].item()
        raise ArgumentError(name, f"{got} in row {list(first)}", problem, "Mask the row, or correct the value.")


def results(
    row: SoftmaxStats, ids: Tensor, counted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The differentiable results of each row: NaN where the id is invalid, 0 where the row is masked."""
    unusable = ids < 0
    values = row.logprob.masked_fill(unusable, torch.nan)
    mass = None if row.log_kept_mass is None else row.log_kept_mass.masked_fill(unusable, torch.nan)
    every = (values, row.lse.clone(), row.entropy, mass)
    if counted is not None:
        every = tuple(None if x is None else torch.where(counted, x, 0.0) for x in every)  # type: ignore[assignment]
    return every


def selected(upstream: tuple[Tensor | None, ...], ids: Tensor, counted: Tensor | None) -> Upstream:
    """Upstream gradients with those of masked rows and of invalid ids left out: whatever they hold, it is 0."""
    g = [x if x is None or counted is None else torch.where(counted, x, 0.0) for x in upstream]
    for i in (0, 3):  # log-probability and kept mass depend on the id
        x = g[i]
        g[i] = None if x is None else torch.where(ids >= 0, x, 0.0)
    return Upstream(*g)
