"""How a clause is attacked: a property of a subject over drawn cases.

    @attack("LP-08", cases)
    def temperature_is_applied_once(subject, case):
        ...raise Violation(...) or return

`cases(subject)` is a hypothesis strategy of frozen dataclasses of plain values (sizes, a seed, names of distributions),
never of tensors: they shrink well, print as source, and rebuild the same tensors anywhere.

Where combinations matter more than values a `Table` of cases stands in place of the strategy: all its rows are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hypothesis.strategies import SearchStrategy

from rlkernel_conformance.subject import Subject
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import Clause

__all__ = ["Attack", "Coverage", "Table", "attack"]


@dataclass(frozen=True)
class Coverage:
    """How much of what a table is for was executed."""

    executed: int  # of what is possible, in the table's own unit: pairs of levels, or sizes
    possible: int  # by the rules and by what the subject claims
    missed: tuple[str, ...] = ()  # what was not, in words


@dataclass(frozen=True)
class Table:
    """Cases that are all tried, those first that find most."""

    rows: Callable[[Subject], Sequence[Any]]  # subject -> all cases
    simpler: Callable[[Subject, Any], Iterator[Any]]  # cases that are a little simpler than one that fails
    coverage: Callable[[Subject, Sequence[Any]], Coverage]  # by the cases that were executed
    splits: bool = False  # small rows: several processes may run some each


@dataclass(frozen=True)
class Attack:
    """One property that tries to refute one clause."""

    op: str  # operator name
    clause: Clause  # what it tries to refute
    cases: Callable[[Subject], SearchStrategy[Any]] | Table  # subject -> a strategy of cases, or all cases
    prop: Callable[[Subject, Any], None]  # subject, case: raises a Violation where the clause does not hold
    examples: tuple[Any, ...] = ()  # tried first, always: every bug that was ever found
    scale: float = 1.0  # examples of a profile times this
    memory: int = 0  # bytes on a device, without which it is not carried out; on a host it then never is
    part: tuple[int, int] = (0, 1)  # (first, step): every step-th row of a table; without a table it says nothing

    @property
    def name(self) -> str:
        """Name of the property."""
        return self.prop.__name__


ATTACKS: Final[dict[str, Attack]] = {}


def attack(
    clause: str,
    cases: Callable[[Subject], SearchStrategy[Any]] | Table,
    *,
    examples: tuple[Any, ...] = (),
    scale: float = 1.0,
    memory: int = 0,
) -> Callable[[Callable[[Subject, Any], None]], Callable[[Subject, Any], None]]:
    """Register a property as the attack on a clause; `cases`, `examples`, `scale` and `memory` are those of `Attack`.

    Raises:
        ValueError: no spec has this clause, or it has an attack already.
    """
    found = [(op, c) for op, spec in OPERATORS.items() for c in spec.clauses if c.id == clause]
    if len(found) != 1 or clause in ATTACKS:
        raise ValueError(
            f"{clause} is a clause of {[op for op, _ in found]}; an attack needs one, and a clause one attack"
        )
    op, spec_clause = found[0]

    def register(prop: Callable[[Subject, Any], None]) -> Callable[[Subject, Any], None]:
        ATTACKS[clause] = Attack(op, spec_clause, cases, prop, examples, scale, memory)
        return prop

    return register
