"""Ids of rows, one of each, a list of K, or a list of any length: what logprob and linear_logprob share.

Legend: N rows · K listed ids of a row · M listed ids of all rows. Imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import Feature

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

    from rlkernel_core.spec.sampling import TokenLists

MANY_IDS: Final = Feature("many_ids", "several ids per row, [..., K], by one pass over the vocabulary")
RAGGED_IDS: Final = Feature("ragged_ids", "a list of ids of any length per row, TokenLists, by one pass")


def is_ragged(ids: Any) -> TypeIs[TokenLists]:
    """Whether ids are lists of any length: by their fields, since the module of TokenLists imports this one."""
    return hasattr(ids, "offsets") and not hasattr(ids, "values")


def check_ids(ids: Any, rows: Any, beside: Tensor, where: str) -> None:
    """Ids are integers, one per row, K >= 1 of each or lists, on the device of the tensor beside them, `where`."""
    if is_ragged(ids):
        for name, x in (("ids.ids", ids.ids), ("ids.offsets", ids.offsets)):
            checks.tensor(name, x, ndim=1, kind="integer")
            checks.same_device(name, x, beside, where)
        checks.shape("ids.offsets", ids.offsets, (math.prod(rows) + 1,), "the rows, plus one")
        return
    found = checks.tensor("ids", ids, kind="integer")
    if found.dim() != len(rows) + 1:
        what = f"{where} without its last dimension"
        checks.aligned("ids", found, rows, what, kind="integer", beside=beside, where=where)
        return
    if tuple(found.shape[:-1]) != tuple(rows) or found.shape[-1] < 1:
        problem = f"must be {list(rows)}, or have one dimension K >= 1 more, for this {where}"
        raise ArgumentError("ids", checks.describe(found), problem, "Pass one id per row, [..., K], or TokenLists.")
    checks.same_device("ids", found, beside, where)


def check_one_id(ids: Tensor | TokenLists, beside: Tensor) -> None:
    """A support goes with one id per row: which ids it keeps depends on the chosen one."""
    if listed_shape(ids, beside) is not None:
        problem = "is for one id per row, and ids lists several"
        got = f"a Support beside ids {list(flat_ids(ids).shape)}"
        raise ArgumentError("support", got, problem, "Pass None, or ids [...].")


def flat_ids(ids: Tensor | TokenLists) -> Tensor:
    """The tensor that holds the ids; results that belong to ids have its shape."""
    return ids.ids if is_ragged(ids) else ids


def ids_per_row(ids: Tensor | TokenLists, beside: Tensor) -> int | None:
    """K of ids [..., K] beside a tensor [..., V] or [..., D]; None for one id per row, and for lists of any length."""
    if is_ragged(ids):
        return None
    return ids.shape[-1] if ids.dim() == beside.dim() else None


def listed_shape(ids: Tensor | TokenLists, beside: Tensor) -> tuple[int, int] | None:
    """Sizes of ids that list several per row, (N, K) or (1, M); None for ids [...], of which each row has one."""
    if is_ragged(ids):
        return 1, ids.ids.shape[0]
    K = ids_per_row(ids, beside)
    return None if K is None else (math.prod(ids.shape[:-1]), K)


def many_ids(ids: Any, beside: Any) -> dict[str, object]:
    """Whether a call, which need not have been checked, lists several ids per row, and how."""
    ranks = [len(x.shape) for x in (ids, beside) if checks.is_tensor(x)]
    return {"many_ids": len(ranks) == 2 and ranks[0] == ranks[1], "ragged_ids": is_ragged(ids)}
