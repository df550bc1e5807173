"""Whatever tested code does to its process, it is reported as what it did, in bounded time, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlkernel as rlk
from rlkernel_conformance import isolation
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.isolation import attack_apart
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from tests import bad_backends

EFFORT = Profile("test", 2, 30)


def attacks(*clauses: str) -> list[Attack]:
    return [a for a in attacks_on("logprob") if a.clause.id in clauses]


def carried_out(name: str, *clauses: str, effort: Profile = EFFORT) -> list[Outcome]:
    where = f"tests.bad_backends:{name}_manifest"
    manifest = getattr(bad_backends, f"{name}_manifest")
    with rlk.registered(manifest):
        return attack_apart(Subject(manifest.name, "logprob"), attacks(*clauses), effort, manifest=where)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    rlk.refresh()
    yield
    rlk.refresh()


def test_a_backend_that_works_holds() -> None:
    outcomes = carried_out("works", "LP-05", "LP-06")
    assert [(o.clause, o.status, o.executed) for o in outcomes] == [("LP-05", "held", 2), ("LP-06", "held", 2)]


@pytest.mark.parametrize(
    "name, fault",
    [
        ("segfaults", "segfault"),
        ("aborts", "abort"),
        ("leaves", "protocol_error"),
        ("lies_on_stdout", "protocol_error"),
        ("lies_on_every_channel", "protocol_error"),
        ("raises_import_error", "import_error"),
    ],
)
def test_a_fault_has_its_name_and_the_next_clause_is_attacked(name, fault) -> None:
    outcomes = carried_out(name, "LP-05", "LP-06")
    assert [(o.clause, o.status, o.fault) for o in outcomes] == [("LP-05", "fault", fault), ("LP-06", "fault", fault)]


def test_a_backend_that_hangs_is_ended() -> None:
    (outcome,) = carried_out("hangs", "LP-05", effort=Profile("test", 2, 4))
    assert (outcome.status, outcome.fault) == ("fault", "timeout")


def test_a_backend_that_eats_memory_meets_its_limit(monkeypatch) -> None:
    monkeypatch.setattr(isolation, "MEMORY", 12 << 30)
    (outcome,) = carried_out("eats_memory", "LP-05")
    assert (outcome.status, outcome.fault) == ("fault", "out_of_memory")


def test_a_backend_that_stops_the_clock_changes_nothing_here() -> None:
    assert [o.status for o in carried_out("stops_the_clock", "LP-05", "LP-06")] == ["held", "held"]
