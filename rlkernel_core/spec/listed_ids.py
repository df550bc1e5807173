"""Ids of rows, one of each or a list: what logprob and linear_logprob share.

Legend: K listed ids of a row. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import Feature

if TYPE_CHECKING:
    from torch import Tensor

MANY_IDS: Final = Feature("many_ids", "several ids per row, [..., K], by one pass over the vocabulary")


def check_ids(ids: Any, rows: Any, beside: Tensor, where: str) -> None:
    """Ids are integers, one per row or K >= 1 of each, on the device of the tensor beside them, named `where`."""
    found = checks.tensor("ids", ids, kind="integer")
    if found.dim() != len(rows) + 1:
        what = f"{where} without its last dimension"
        checks.aligned("ids", found, rows, what, kind="integer", beside=beside, where=where)
        return
    if tuple(found.shape[:-1]) != tuple(rows) or found.shape[-1] < 1:
        problem = f"must be {list(rows)}, or have one dimension K >= 1 more, for this {where}"
        raise ArgumentError("ids", checks.describe(found), problem, "Pass one id per row, or [..., K].")
    checks.same_device("ids", found, beside, where)


def check_one_id(ids: Tensor, beside: Tensor) -> None:
    """A support goes with one id per row: which ids it keeps depends on the chosen one."""
    if ids_per_row(ids, beside) is not None:
        problem = "is for one id per row, and ids lists several"
        raise ArgumentError("support", f"a Support beside ids {list(ids.shape)}", problem, "Pass None, or ids [...].")


def ids_per_row(ids: Tensor, beside: Tensor) -> int | None:
    """K of ids [..., K] beside a tensor [..., V] or [..., D]; None for ids [...], of which each row has one."""
    return ids.shape[-1] if ids.dim() == beside.dim() else None


def many_ids(ids: Any, beside: Any) -> dict[str, object]:
    """Whether a call, which need not have been checked, lists several ids per row."""
    ranks = [len(x.shape) for x in (ids, beside) if checks.is_tensor(x)]
    return {"many_ids": len(ranks) == 2 and ranks[0] == ranks[1]}
