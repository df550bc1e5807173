"""The suite proves itself: the reference keeps every attacked clause; every mutant dies on just what it names."""

from __future__ import annotations

import pytest

import rlkernel as rlk
from rlkernel_conformance import clauses, mutants
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.harness import carry_out, clauses_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject

QUICK = Profile("test", 12, 60)
ZOO = [m for op in mutants.MODULES for m in mutants.mutants_of(op)]
ATTACKED = [op for op in clauses.MODULES if clauses.attacks_on(op)]


def failed(subject: Subject, attacks: list[Attack]) -> dict[str, str]:
    with subject.chosen():
        outcomes = [carry_out(subject, a, QUICK, shrink=False) for a in attacks]
    return {o.clause: o.message for o in outcomes if o.failed}


@pytest.fixture(autouse=True)
def fresh():
    rlk.refresh()
    yield
    rlk.refresh()


@pytest.mark.parametrize("op", ATTACKED)
def test_the_reference_keeps_every_clause(op) -> None:
    subject = Subject("reference", op)
    assert failed(subject, clauses_of(subject)[0]) == {}


@pytest.mark.parametrize("mutant", ZOO, ids=lambda m: f"{m.op}-{m.name}")
def test_a_mutant_dies_on_the_clause_it_was_planted_for_and_on_no_other_than_it_names(mutant) -> None:
    with rlk.registered(mutant.manifest):
        subject = Subject(mutant.manifest.name, mutant.op)
        dead = set(failed(subject, clauses_of(subject)[0]))
    assert mutant.planted in dead
    assert dead <= mutant.kills


@pytest.mark.parametrize("op", ATTACKED)
def test_every_attack_kills_a_mutant(op) -> None:
    killed = {m.planted for m in mutants.mutants_of(op)}
    assert {a.clause.id for a in clauses.attacks_on(op)} - killed == set()
