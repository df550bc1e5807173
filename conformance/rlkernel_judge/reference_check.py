"""Whether a candidate's result is that of the reference on the same arguments.

Coarser than the clauses, which have judged accuracy by then: here a result that belongs to other inputs, to an earlier
call or to no call at all must show, on sizes that no definition in float64 would finish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_judge.workloads import named_leaves
from rlkernel_torch import direct

# Largest error over the largest value of a result; a stale result is wrong by the order of the values themselves.
_ERROR: Final = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
_SHARE: Final = 0.01  # of integers, such as drawn tokens, that may differ: sums in another order round another way


def reference_of(op: str) -> Callable[..., Any]:
    """The reference implementation of an operator, as a function of its arguments."""
    found: Callable[..., Any] = getattr(direct, op)
    return found


def difference(found: Any, expected: Any, dtype: str) -> str:
    """The first result that is not the reference's, described, or "".

    Results that the candidate leaves out are not compared; the clauses know which must be there.
    """
    have, want = named_leaves(found), named_leaves(expected)
    for name, x in want.items():
        y = have.get(name)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and (text := _differs(y, x, getattr(torch, dtype))):
            return f"{name or 'the result'} {text}"
    if not any(isinstance(have.get(name), Tensor) for name, x in want.items() if isinstance(x, Tensor)):
        return "has none of the operator's results"
    return ""


def _differs(y: Tensor, x: Tensor, dtype: torch.dtype) -> str:
    if y.shape != x.shape:
        return f"has shape {list(y.shape)}, not {list(x.shape)}"
    if not x.numel():
        return ""
    if not x.is_floating_point():
        share = float((y != x).double().mean())
        return f"differs in {share:.1%} of its elements" if share > _SHARE else ""
    nan = x.isnan()
    if not torch.equal(y.isnan(), nan):
        return "has NaN elsewhere"
    finite = x.isfinite()
    if not torch.equal(y[~finite & ~nan].double(), x[~finite & ~nan].double()):
        return "has infinities elsewhere"
    if not bool(finite.any()):
        return ""
    worst = float((y[finite].double() - x[finite].double()).abs().max())
    allowed = _ERROR[dtype] * max(1.0, float(x[finite].double().abs().max()))
    return f"is off by {worst:.3g}" if worst > allowed else ""


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments on memory of their own, so that nothing that happens to them reaches the originals."""
    from rlkernel_core.tree import flatten

    found, structure = flatten(dict(given))
    copied: dict[str, Any] = structure.build([x.clone() if isinstance(x, Tensor) else x for x in found])
    return copied
