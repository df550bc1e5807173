"""Explain a decision before it is taken: for a real call, or for hardware that is not here.

Imports torch only for real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from rlkernel import hardware, limits, policy
from rlkernel.decide import Verdicts, call_of, chosen, foreseen, place
from rlkernel.wording import explanation
from rlkernel_core.decision import Call, Decision
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS

if TYPE_CHECKING:
    import torch

    from rlkernel_core.manifest import Impl


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
    rows: int | None = None,
    vocab: int | None = None,
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
        rows: rows (tokens) of the call, compared with the limits that implementations state.
        vocab: ids of its vocabulary, the same.
        **kwargs: the operator's keyword arguments.

    Returns:
        The text, with the Decision as `.decision`.

    Raises:
        UnknownNameError: no such operator, feature, device, architecture or dtype; the nearest ones are suggested.
        ArgumentError: the operator itself would refuse these arguments.
    """
    if not policy.is_operator(op):
        raise UnknownNameError("operator", op, OPERATORS)
    spec, wanted = OPERATORS[op], frozenset(need)
    if unknown := wanted - spec.feature_names:
        raise UnknownNameError(f"feature of {op}", min(unknown), spec.feature_names)
    found, here, given = Call(spec.id, "cpu"), "cpu", None
    if args or kwargs:
        if device is not None and "device" in spec.parameters:
            kwargs["device"], device = device, None
        if dtype is not None and "dtype" in spec.parameters:
            kwargs["dtype"], dtype = dtype, None
        given = spec.call(*args, **kwargs)
        found, here = call_of(spec, given), str(place(spec, given)[0])
    where = here if device is None else str(device)
    if isinstance(device, str) or arch is not None:
        asked = hardware.in_order()
        where = hardware.device(where, asked, "device") if isinstance(device, str) else where
        arch = arch and hardware.architecture(arch, where.partition(":")[0], asked, "arch")
    if isinstance(dtype, str):
        dtype = hardware.dtype(dtype, hardware.in_order(), "dtype")
    call = Call(
        spec.id,
        where.partition(":")[0],
        found.dtype if dtype is None else str(dtype).removeprefix("torch."),
        found.grad if grad is None else grad,
        found.features | wanted,
        arch or (found.arch if device is None else None),
    )
    check = judge(given, {"rows": rows, "vocab": vocab})
    return Explanation(with_room(foreseen(spec, call, where, check), given))


def judge(call: Any, sizes: Mapping[str, int | None]) -> Callable[[Impl], Reason | None]:
    """Asks implementations about a record, None where there is none, and about sizes that are only named."""
    check = Verdicts(call).of if call is not None else None
    named = {name: n for name, n in sizes.items() if n is not None}

    def judged(impl: Impl) -> Reason | None:
        said = limits.too_large(impl.limits, named) if impl.limits is not None else None
        return said or (check(impl) if check is not None else None)

    return judged


def with_room(decision: Decision, call: Any = None) -> Decision:
    """A decision with the limits of what was chosen, and the memory that the call needs where there is a record."""
    impl = chosen(decision)
    return decision if impl is None else replace(decision, room=limits.room(impl, call))
