"""Whether a candidate's result is that of the reference on the same arguments.

The clauses have judged accuracy by then, against definitions in float64 and on drawn sizes. Here a result that belongs
to other inputs, to an earlier call or to no call at all must show, and one that is coarser than the contract allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.spec import OPERATORS
from rlkernel_judge.workloads import named_leaves
from rlkernel_torch import direct

# Times the tolerance of the contract that a result may differ from the reference's: both are off, and the clauses know
# what each error is relative to.
_SLACK: Final = 4.0
_ROUNDED: Final = 1e-3  # share of integers, such as codes, that sums in another order round another way
_DRAWN: Final = 0.01  # the same where tokens are drawn, which take their other results with them


def reference_of(op: str) -> Callable[..., Any]:
    """The reference implementation of an operator, as a function of its arguments."""
    found: Callable[..., Any] = getattr(direct, op)
    return found


def difference(found: Any, expected: Any, dtype: str, op: str, leaves_out: frozenset[str] = frozenset()) -> str:
    """The first result that is not the reference's, described, or "".

    Args:
        found: what the candidate gave.
        expected: what the reference gave, on the same arguments.
        dtype: of the main argument, by which tolerances go.
        op: name of the operator.
        leaves_out: fields that the candidate does not claim to give.
    """
    have, want = named_leaves(found), named_leaves(expected)
    drawn = any(name.partition(".")[0] == "token" for name in want)
    for name, x in want.items():
        y, shown = have.get(name), name or "the result"
        if isinstance(x, Tensor):
            if y is None and name.partition(".")[0] in leaves_out:
                continue
            if not isinstance(y, Tensor):
                return f"{shown} is missing" if y is None else f"{shown} is no tensor"
            if text := _differs(y, x, _tolerance(op, name, dtype), _DRAWN if drawn else _ROUNDED, drawn=drawn):
                return f"{shown} {text}"
        elif x is not None and y is not None and (type(y) is not type(x) or y != x):
            return f"{shown} is {y!r}, not {x!r}"
    return ""


def _tolerance(op: str, name: str, dtype: str) -> tuple[float, float]:
    """(atol, rtol) of a result for inputs of a dtype; the widest of the operator's results where it has no row."""
    results = [t for t in OPERATORS[op].tolerances if not t.output.startswith("grad")]
    rows = [t for t in results if t.output in {name, name.partition(".")[0]}] or results
    rows = [t for t in rows if t.dtype in {dtype, "any"}] or [t for t in rows if t.dtype == "float32"]
    return max((t.atol for t in rows), default=0.0), max((t.rtol for t in rows), default=0.0)


def _differs(y: Tensor, x: Tensor, tolerance: tuple[float, float], share: float, *, drawn: bool) -> str:
    if y.shape != x.shape:
        return f"has shape {list(y.shape)}, not {list(x.shape)}"
    if y.dtype != x.dtype:
        return f"is {str(y.dtype).removeprefix('torch.')}, not {str(x.dtype).removeprefix('torch.')}"
    if not x.numel():
        return ""
    if not x.is_floating_point():
        differing = float((y != x).double().mean())
        return f"differs in {differing:.1%} of its elements" if differing > share else ""
    a, b = y.double(), x.double()
    atol, rtol = tolerance
    finite = b.isfinite() & a.isfinite()
    scale = float(b[finite].abs().max()) if bool(finite.any()) else 0.0
    off = (a - b).abs()
    too_far = off > _SLACK * (atol * max(1.0, scale) + rtol * b.abs())
    wrong = torch.where(finite, too_far, (a != b) & ~(a.isnan() & b.isnan()))
    if float(wrong.double().mean()) <= (share if drawn else 0.0):
        return ""
    if not torch.equal(a.isnan(), b.isnan()):
        return "has NaN elsewhere"
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "has infinities elsewhere"
    return (
        f"is off by {float(off[wrong & finite].max()):.3g}" if bool((wrong & finite).any()) else "has other infinities"
    )


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments on memory of their own, so that nothing that happens to them reaches the originals."""
    from rlkernel_core.tree import flatten

    found, structure = flatten(dict(given))
    copied: dict[str, Any] = structure.build([x.clone() if isinstance(x, Tensor) else x for x in found])
    return copied
