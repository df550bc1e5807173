"""The suite proves itself: plain torch keeps every attacked clause; every mutant fails the clause that it names.

Clauses that every operator has are proved in `test_common_clauses`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies
from hypothesis.internal.conjecture import providers

import rlkernel as rlk
from rlkernel_conformance import clauses
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.harness import Outcome, carry_out, clauses_of
from rlkernel_conformance.mutants import common, mutants_of
from rlkernel_conformance.mutation_run import attacks_for, refuted
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.search import search
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import common_clauses, prefix_of

pytestmark = pytest.mark.usefixtures("fresh")

OWED = {c.id for spec in OPERATORS.values() for c in common_clauses(prefix_of(spec))}
QUICK = Profile("test", 12, 60)
OFTEN = Profile("test", 16, 60)  # of plain torch, whose semantics are tested here and nowhere else
MUTANTS = [m for op in OPERATORS for m in mutants_of(op) if m.clause not in OWED]
# Memory that grows with rows is measured at hundreds of them: of three heads, linear_logprob stands for the others.
LONG = {("linear_policy_loss", "makes_all_logits"), ("linear_divergence", "keeps_the_logits")}
ATTACKED = [op for op in clauses.MODULES if clauses.attacks_on(op)]


def attacked(subject: Subject, attacks: list[Attack], effort: Profile) -> list[Outcome]:
    with subject.chosen():
        return [carry_out(subject, a, effort, shrink=False) for a in attacks]


def failed(subject: Subject, attacks: list[Attack], effort: Profile) -> dict[str, str]:
    return {o.clause: o.message for o in attacked(subject, attacks, effort) if o.failed}


@pytest.mark.parametrize("op", ATTACKED)
def test_plain_torch_keeps_every_clause(op) -> None:
    subject = Subject("torch", op)
    assert failed(subject, [a for a in clauses_of(subject)[0] if a.clause.id not in OWED], OFTEN) == {}


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=f"{m.op}-{m.name}", marks=[pytest.mark.slow] if (m.op, m.name) in LONG else [])
        for m in MUTANTS
    ],
)
def test_a_mutant_fails_the_clause_that_it_names(mutant) -> None:
    with rlk.registered(mutant.manifest):
        assert refuted(attacked(mutant.subject, attacks_for(mutant, mutant.subject), QUICK)) == (mutant.clause,)


def test_an_error_in_the_code_of_a_mutant_refutes_nothing() -> None:
    mistaken = Outcome("logprob", "LP-01", "", "fault", "unknown", "TypeError: lower() takes one argument")
    assert refuted([mistaken, replace(mistaken, message="RuntimeError: invalid argument")]) == ("LP-01",)


@pytest.mark.parametrize(
    ("check", "refuted"), [("rlkernel_core.spec.logprob:check", set()), (f"{common.__name__}:fits", {"LP-24"})]
)
def test_a_subject_is_called_through_a_front_door_with_the_check_that_it_names(check, refuted) -> None:
    subject = Subject("torch", "logprob", check=check)
    assert set(failed(subject, [a for a in clauses_of(subject)[0] if a.clause.id == "LP-24"], QUICK)) == refuted


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
    killed = {m.clause for m in mutants_of(op)}
    small = {a.clause.id for a in clauses.attacks_on(op) if not a.memory}
    assert small - killed == set()


@pytest.mark.parametrize("op", OPERATORS)
def test_every_clause_has_an_attack(op) -> None:
    assert {c.id for c in OPERATORS[op].clauses} - {a.clause.id for a in clauses.attacks_on(op)} == set()
