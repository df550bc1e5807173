"""Attacks on "together" and "real sizes", numbers 97 and 98 of each spec, made from the operator's space of calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from rlkernel_conformance.attack import Coverage, Table, attack
from rlkernel_conformance.spaces import space_of
from rlkernel_conformance.spaces.space import Point, array, judge, points, real_sizes, simpler
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.form import OpSpec, prefix_of

TOLD = 40  # pairs without a case that a report names


def is_the_definitions(subject: Subject, point: Point) -> None:
    """Results and gradients, arguments as they were."""
    judge(space_of(subject.op), subject, point)


def pairs_covered(subject: Subject, executed: Sequence[Point]) -> Coverage:
    """Pairs of levels of any two factors."""
    space = space_of(subject.op)
    factors, made = space.all_factors(subject), array(space, subject)
    known = [p.levels for p in executed if all(p[name] in levels for name, levels in factors.items())]
    covered = made.covered(factors, known)
    missed = sorted(made.pairs - covered)
    told = [" with ".join(f"{name}={factors[name][level]!r}" for name, level in pair) for pair in missed[:TOLD]]
    more = [f"and {len(missed) - TOLD} more"] if len(missed) > TOLD else []
    return Coverage(len(covered), len(made.pairs), (*told, *more))


def sizes_covered(subject: Subject, executed: Sequence[Point]) -> Coverage:
    """Real sizes."""
    space, done = space_of(subject.op), {p.seed for p in executed}
    rows, changes = real_sizes(space, subject), space.real(subject)
    missed = tuple(str(changes[p.seed]) for p in rows if p.seed not in done)
    return Coverage(len(rows) - len(missed), len(rows), missed)


TABLES: dict[int, tuple[Table, float]] = {
    97: (
        Table(
            lambda s: points(space_of(s.op), s), lambda s, p: simpler(space_of(s.op), s, p), pairs_covered, splits=True
        ),
        2.0,
    ),
    98: (Table(lambda s: real_sizes(space_of(s.op), s), lambda *_: iter(()), sizes_covered), 1.0),
}


@cache
def attack_operator(spec: OpSpec[Any, Any]) -> None:
    """Register both attacks on an operator."""
    for number, (table, scale) in TABLES.items():
        attack(f"{prefix_of(spec)}-{number}", table, scale=scale)(is_the_definitions)
