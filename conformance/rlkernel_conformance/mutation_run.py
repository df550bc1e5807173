"""Mutants against the suite: each must fail the clause that it names.

The clauses that every operator has are proved by mutants of their own. Those of 91 to 96 must keep the other five;
what 97 and 98 compare is everything, and any bug may show there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rlkernel import policy
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.clauses.common_clauses import ATTACKED
from rlkernel_conformance.harness import Outcome, clauses_of
from rlkernel_conformance.isolation import attack_in_processes
from rlkernel_conformance.mutants import Mutant, mutants_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.form import common_clauses, prefix_of

MISTAKES: Final = ("AttributeError", "ImportError", "KeyError", "NameError", "TypeError")


@dataclass(frozen=True)
class MutantResult:
    """The clauses that a mutant failed."""

    mutant: Mutant
    failed: tuple[str, ...]

    @property
    def killed(self) -> bool:
        """It failed the clause that it names, and no other that it was attacked with."""
        return set(self.failed) == {self.mutant.clause}


def refuted(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """The clauses that a mutant failed, by what its bug does.

    A mistake in the mutant's own code would fail any clause, and so does tampering with the suite: neither counts.
    """
    failed = [o for o in outcomes if o.failed and o.fault != "tampering"]
    return tuple(o.clause for o in failed if o.status == "violated" or not o.message.startswith(MISTAKES))


def attacks_for(mutant: Mutant, subject: Subject) -> list[Attack]:
    """The attack on the clause that a mutant names; if all operators have it, those on the others of its kind too."""
    common = {c.id for c in common_clauses(prefix_of(subject.spec)) if int(c.id.rpartition("-")[2]) in ATTACKED}
    wanted = common if mutant.clause in common else {mutant.clause}
    return [a for a in clauses_of(subject)[0] if a.clause.id in wanted]


def mutation_run(
    op: str, profile: Profile, *, watch: Callable[[MutantResult], None] = lambda _: None
) -> list[MutantResult]:
    """Attack every mutant of an operator; `watch` gets each result as it comes."""
    results = []
    for mutant in mutants_of(op):
        with policy.registered(mutant.manifest):
            subject = mutant.subject
            outcomes = attack_in_processes(subject, attacks_for(mutant, subject), profile, manifest=mutant.where)
        result = MutantResult(mutant, refuted(outcomes))
        results.append(result)
        watch(result)
    return results
