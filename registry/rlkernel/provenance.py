"""What has run in this process: every decided kind of call, with its count and its decision."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from rlkernel import policy
from rlkernel.audit import Audited
from rlkernel.plans import Choice
from rlkernel.wording import implementation
from rlkernel_core.decision import Decision
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS


@dataclass(frozen=True)
class Ran:
    """One kind of call and what served it."""

    decision: Decision  # what runs, and why
    calls: int  # replays of a recorded graph go past the count
    audit: Audited | None = None  # what comparing some of them with the reference found; None where no policy said so

    @property
    def op(self) -> str:
        """Operator id."""
        return self.decision.call.op

    @property
    def backend(self) -> str:
        """Name of the backend that served it."""
        return str(self.decision.backend)

    def __str__(self) -> str:
        d = self.decision
        fell = f" (fallback from {d.fell_back_from})" if d.fell_back_from else ""
        seen = f" (audit: {self.audit})" if self.audit is not None else ""
        return f"{d.call} -> {d.backend}: {implementation(d)} [{d.version}] {d.hash} x{self.calls}{fell}{seen}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        audit = self.audit.as_dict() if self.audit is not None else None
        return {"calls": self.calls, "audit": audit, **self.decision.as_dict()}


def status() -> list[Ran]:
    """Every kind of call decided in this process, in order of operator; counts are exact on one thread."""
    merged: dict[Decision, Ran] = {}
    for scope in policy.scopes():
        for choice in scope.choices():
            so_far = merged.get(choice.decision, Ran(choice.decision, 0))
            found = [a for a in (so_far.audit, choice.audit) if a is not None]
            audit = sum(found, Audited()) if found else None
            merged[choice.decision] = Ran(choice.decision, so_far.calls + choice.calls, audit)
    return sorted(merged.values(), key=lambda r: (r.op, str(r.decision.call)))


def last_decision(op: str) -> Decision | None:
    """The decision behind the latest call of operator `op` in this process; None before the first.

    Raises:
        UnknownNameError: no such operator.
    """
    import rlkernel

    if not policy.is_operator(op):
        raise UnknownNameError("operator", op, OPERATORS)
    choice: Choice | None = getattr(rlkernel, op).last
    return choice.decision if choice is not None else None


def decisions_hash() -> str:
    """12 hex digits over all decisions so far: equal on two processes that ran the same kernels."""
    hashes = sorted({r.decision.hash for r in status()})
    return sha256(" ".join(hashes).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Planned:
    """The plans of one operator, over all policies of this process."""

    op: str  # operator name
    plans: int  # held now
    made: int
    evicted: int  # because a table was full

    def __str__(self) -> str:
        dropped = f", {self.evicted} dropped because a table was full" if self.evicted else ""
        return f"{self.op}: {self.plans} held, {self.made} made{dropped}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"op": self.op, "plans": self.plans, "made": self.made, "evicted": self.evicted}


def plans() -> list[Planned]:
    """What the tables of plans hold, for every operator that has been called."""
    out = []
    for op in OPERATORS:
        tables = [scope.tables[op] for scope in policy.scopes()]
        if made := sum(t.made for t in tables):
            out.append(Planned(op, sum(map(len, tables)), made, sum(t.evicted for t in tables)))
    return out
