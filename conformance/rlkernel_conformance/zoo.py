"""Planted bugs against the suite: each dies on the clause it was planted for and on none that it does not name.

The clauses that every operator owes (91 to 96) are proved by bugs of their own: those are held against no others, and
all others not against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from rlkernel import policy
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.harness import clauses_of
from rlkernel_conformance.isolation import attack_in_processes
from rlkernel_conformance.mutants import Mutant, mutants_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.form import common_clauses, prefix_of

# Share of a clause's cases where it must not refute: what a bug breaks as well, it breaks often.
ELSEWHERE: Final = 0.3


@dataclass(frozen=True)
class Death:
    """How a mutant died, or that it did not."""

    mutant: Mutant
    killed_by: tuple[str, ...]

    @property
    def as_stated(self) -> bool:
        """It died on the clause it was planted for, and on no other than it names."""
        return set(self.killed_by) == {self.mutant.planted}


def against(bug: Mutant, subject: Subject) -> list[Attack]:
    """What a mutant is held against: the clause it was planted for, then every other that it does not name."""
    due = {a.clause.id: a for a in clauses_of(subject)[0]}
    common = {c.id for c in common_clauses(prefix_of(subject.spec))}
    alike = common if bug.planted in common else due.keys() - common
    others = (a for c, a in due.items() if c in alike - bug.kills)
    return [due[bug.planted], *(replace(a, scale=ELSEWHERE * a.scale, examples=()) for a in others)]


def zoo(op: str, profile: Profile, *, watch: Callable[[Death], None] = lambda _: None) -> list[Death]:
    """Attack every mutant of an operator."""
    deaths = []
    for bug in mutants_of(op):
        with policy.registered(bug.manifest):
            subject = Subject(bug.manifest.name, op)
            outcomes = attack_in_processes(subject, against(bug, subject), profile, manifest=bug.where)
        # Tampering is found by any clause, so that it speaks for none.
        death = Death(bug, tuple(o.clause for o in outcomes if o.failed and o.fault != "tampering"))
        deaths.append(death)
        watch(death)
    return deaths
