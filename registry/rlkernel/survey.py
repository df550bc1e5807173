"""What would serve each operator: decisions taken ahead of any call, here or for hardware that is not here.

Imports torch only to settle a decision on a device that is here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlkernel import policy
from rlkernel.decide import foreseen, settle
from rlkernel.explanation import judge, with_room
from rlkernel_core.decision import Call, Decision
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec


@dataclass(frozen=True)
class Situation:
    """What is known about calls to come."""

    device: str = "cpu"  # torch device string
    arch: str | None = None  # "sm90", "gfx942"; None: unknown, which no implementation refuses
    dtype: str | None = None  # None: any
    grad: bool = False
    features: frozenset[str] = frozenset()
    rows: int | None = None  # compared with the limits that implementations state; None: any
    vocab: int | None = None

    def call(self, spec: OpSpec[Any, Any]) -> Call:
        """A call of an operator in this situation."""
        kind = self.device.partition(":")[0]
        return Call(spec.id, kind, self.dtype, self.grad, self.features & spec.feature_names, self.arch)


def named(op: str) -> OpSpec[Any, Any]:
    """The spec of an operator.

    Raises:
        UnknownNameError: there is none of that name; the nearest ones are suggested.
    """
    if not policy.is_operator(op):
        raise UnknownNameError("operator", op, OPERATORS)
    return OPERATORS[op]


def foresee(op: str, situation: Situation, *, locked: bool = True, here: bool = False) -> Decision:
    """The decision that calls of an operator would get.

    Args:
        op: operator name.
        situation: what is known about the calls.
        locked: whether the lock in force counts; not when a new one is being written.
        here: the device is in this machine: load the implementation and run its backend's self-test as a call would.
    """
    spec = named(op)
    call = situation.call(spec)
    if here:
        with policy.PROCESS.lock:
            return settle(spec, call, situation.device, locked=locked)[0]
    check = judge(None, {"rows": situation.rows, "vocab": situation.vocab})
    return with_room(foreseen(spec, call, situation.device, check, locked=locked))


def survey(
    situation: Situation, *, ops: Iterable[str] = OPERATORS, locked: bool = True, here: bool = False
) -> list[Decision]:
    """`foresee` for every operator, in the catalog's order."""
    return [foresee(op, situation, locked=locked, here=here) for op in ops]


def served(decision: Decision) -> bool:
    """Whether a call would run: somebody takes it, nobody ties, and no forbidden fallback is involved."""
    forbidden = decision.fell_back_from is not None and decision.policy.fallback == "error"
    return decision.backend is not None and not decision.ambiguous and not forbidden
