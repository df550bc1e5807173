"""What has run in this process: every decided kind of call, with its count and its decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from rlkernel import policy
from rlkernel.decide import ByShape, Hit
from rlkernel_core.decision import Decision
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS


@dataclass(frozen=True)
class Ran:
    """One kind of call and what served it."""

    decision: Decision
    calls: int  # bound calls and replays of a recorded graph go past the count

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
        return f"{d.call} -> {d.backend}: {d.target} [{d.version}] {d.hash} x{self.calls}{fell}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"calls": self.calls, **self.decision.as_dict()}


def status() -> list[Ran]:
    """Every kind of call decided in this process, in order of operator; counts are exact on one thread."""
    merged: dict[Decision, int] = {}
    for scope in policy.scopes():
        for table in scope.tables.values():
            for hit in _flat(table.values()):
                merged[hit.decision] = merged.get(hit.decision, 0) + hit.calls
    return sorted((Ran(d, n) for d, n in merged.items()), key=lambda r: (r.op, str(r.decision.call)))


def last_decision(op: str) -> Decision | None:
    """The decision behind the latest call of an operator in this process; None before the first."""
    import rlkernel

    if op not in OPERATORS:
        raise UnknownNameError("operator", op, OPERATORS)
    hit: Hit | None = getattr(rlkernel, op).last
    if hit is not None and isinstance(hit.run, ByShape):
        hit = hit.run.last
    return hit.decision if hit is not None else None


def decisions_hash() -> str:
    """12 hex digits over all decisions so far: equal on two processes that ran the same kernels."""
    hashes = sorted({r.decision.hash for r in status()})
    return sha256(" ".join(hashes).encode()).hexdigest()[:12]


def _flat(hits: Any) -> Iterator[Hit]:
    for hit in list(hits):
        if isinstance(hit.run, ByShape):
            yield from _flat(hit.run.hits.values())
        else:
            yield hit
