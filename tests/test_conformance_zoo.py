"""The suite proves itself: the reference keeps every attacked clause; every mutant dies on just what it names.

Clauses that every operator has are proved in `test_common_clauses`.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies
from hypothesis.internal.conjecture import providers

import rlkernel as rlk
from rlkernel_conformance import clauses, mutants
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.harness import carry_out, clauses_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.search import search
from rlkernel_conformance.subject import Subject
from rlkernel_conformance.zoo import against
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import common_clauses, prefix_of

pytestmark = pytest.mark.usefixtures("fresh")

OWED = {c.id for spec in OPERATORS.values() for c in common_clauses(prefix_of(spec))}
QUICK = Profile("test", 12, 60)
OFTEN = Profile("test", 24, 60)  # of plain torch, whose semantics are tested here and nowhere else
ZOO = [m for op in mutants.MODULES for m in mutants.mutants_of(op) if m.planted not in OWED]
ATTACKED = [op for op in clauses.MODULES if clauses.attacks_on(op)]


def failed(subject: Subject, attacks: list[Attack], effort: Profile) -> dict[str, str]:
    with subject.chosen():
        outcomes = [carry_out(subject, a, effort, shrink=False) for a in attacks]
    return {o.clause: o.message for o in outcomes if o.failed}


@pytest.mark.parametrize("op", ATTACKED)
def test_the_reference_keeps_every_clause(op) -> None:
    subject = Subject("torch", op)
    assert failed(subject, [a for a in clauses_of(subject)[0] if a.clause.id not in OWED], OFTEN) == {}


@pytest.mark.parametrize(("place", "mutant"), list(enumerate(ZOO)), ids=[f"{m.op}-{m.name}" for m in ZOO])
def test_a_mutant_dies_on_the_clause_it_was_planted_for_and_on_no_other_than_it_names(place, mutant) -> None:
    """It meets a third of the others here, its neighbours the rest; `rlkernel conformance mutants` has it meet all."""
    with rlk.registered(mutant.manifest):
        subject = Subject(mutant.manifest.name, mutant.op)
        planted, *others = against(mutant, subject)
        assert set(failed(subject, [planted, *others[place % 3 :: 3]], QUICK)) == {mutant.planted}


def test_a_case_does_not_depend_on_what_is_loaded(monkeypatch) -> None:
    drawn: list[list[int]] = []

    def note(number: int) -> None:
        drawn[-1].append(number)

    for numbers in ((), (123_457, 234_578, 987_654_321)):
        found = providers.Constants(**{n: providers.SortedSet() for n in ("floats", "bytes", "strings")})
        found.integers |= providers.SortedSet(numbers)
        monkeypatch.setattr(providers, "_get_local_constants", lambda found=found: found)
        monkeypatch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024))
        drawn.append([])
        search(note, strategies.integers(0, 10**9), examples=100)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("op", ATTACKED)
def test_every_attack_kills_a_mutant(op) -> None:
    killed = {m.planted for m in mutants.mutants_of(op)}
    small = {a.clause.id for a in clauses.attacks_on(op) if not a.memory}
    assert small - killed == set()


@pytest.mark.parametrize("op", OPERATORS)
def test_every_clause_has_an_attack(op) -> None:
    assert {c.id for c in OPERATORS[op].clauses} - {a.clause.id for a in clauses.attacks_on(op)} == set()
