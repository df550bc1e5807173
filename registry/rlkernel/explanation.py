"""Explain a decision before it is taken: for a real call, or for hardware that is not here.

Imports torch only for real tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from rlkernel import policy
from rlkernel.decide import Verdicts, call_of, facts_for, place
from rlkernel.resolve import resolve
from rlkernel.wording import explanation
from rlkernel_core.decision import Call, Decision
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS

if TYPE_CHECKING:
    import torch


class Explanation(str):
    """The explanation as text; `decision` is the same as data."""

    decision: Decision
    __slots__ = ("decision",)

    def __new__(cls, decision: Decision) -> Self:
        """Word a decision."""
        text = super().__new__(cls, explanation(decision))
        text.decision = decision
        return text

    def __getnewargs__(self) -> tuple[Decision]:  # type: ignore[override]  # pickled as what __new__ takes
        return (self.decision,)


def explain(
    op: str,
    *args: Any,
    device: str | torch.device | None = None,
    arch: str | None = None,
    dtype: str | torch.dtype | None = None,
    grad: bool | None = None,
    need: Iterable[str] = (),
    **kwargs: Any,
) -> Explanation:
    """Which backend would take a call, and why every other would not. Nothing is run and nothing is warned about.

    With arguments of the operator it explains that very call, sizes included; without, the call that `device`, `arch`,
    `dtype`, `grad` and `need` describe, on hardware that need not be there. Both together: the words override the call,
    but for a word that is an argument of the operator too (`dtype` of quantize), which is taken for that.

    Args:
        op: operator name.
        *args: the operator's arguments.
        device: torch device; default "cpu".
        arch: "sm90", "gfx942"; default unknown, which no implementation refuses.
        dtype: "bfloat16"; default any.
        grad: whether gradients are needed.
        need: further features the call needs.
        **kwargs: the operator's keyword arguments.

    Returns:
        The text, with the Decision as `.decision`.

    Raises:
        UnknownNameError: no such operator or feature; the nearest ones are suggested.
        ArgumentError: the operator itself would refuse these arguments.
    """
    if op not in OPERATORS:
        raise UnknownNameError("operator", op, OPERATORS)
    spec, wanted = OPERATORS[op], frozenset(need)
    if unknown := wanted - spec.feature_names:
        raise UnknownNameError(f"feature of {op}", min(unknown), spec.feature_names)
    check, found, here = None, Call(spec.id, "cpu"), "cpu"
    if args or kwargs:
        if device is not None and "device" in spec.parameters:
            kwargs["device"], device = device, None
        if dtype is not None and "dtype" in spec.parameters:
            kwargs["dtype"], dtype = dtype, None
        given = spec.call(*args, **kwargs)
        found, here = call_of(spec, given), str(place(spec, given)[0])
        check = Verdicts(given).of
    where = here if device is None else str(device)
    call = Call(
        spec.id,
        where.partition(":")[0],
        found.dtype if dtype is None else str(dtype).removeprefix("torch."),
        found.grad if grad is None else grad,
        found.features | wanted,
        arch or (found.arch if device is None else None),
    )
    rules, source = policy.policy_for(policy.current(), spec)
    return Explanation(resolve(policy.installed(), facts_for(where), call, rules, source=source, check=check))
