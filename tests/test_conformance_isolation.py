"""Whatever tested code does to its process, it is reported as what it did, in bounded time, and the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import rlkernel as rlk
from rlkernel_conformance import hostile as zoo
from rlkernel_conformance import isolation
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.faults import FAULTS
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.hostile import attack_hostile, hostile_backends
from rlkernel_conformance.isolation import attack_in_processes
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.process_reaper import own_descendants
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from tests import bad_backends

EFFORT = Profile("test", 2, 30)


def attacks(*clauses: str) -> list[Attack]:
    return [attacks_with_leak_check("logprob")[c] for c in clauses]


def carried_out(name: str, *clauses: str, effort: Profile = EFFORT) -> list[Outcome]:
    where = f"tests.bad_backends:{name}_manifest"
    manifest = getattr(bad_backends, f"{name}_manifest")
    with rlk.registered(manifest):
        return attack_in_processes(Subject(manifest.name, "logprob"), attacks(*clauses), effort, manifest=where)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    rlk.refresh()
    yield
    rlk.refresh()


@pytest.fixture(scope="module")
def server() -> None:
    """The process from which workers are forked, which stays."""
    attack_in_processes(Subject("torch", "logprob"), attacks("LP-05"), EFFORT)


@pytest.mark.usefixtures("server")
def test_a_clause_that_the_end_of_the_run_cuts_short_is_not_run() -> None:
    with rlk.registered(bad_backends.hangs_manifest):
        subject = Subject(bad_backends.hangs_manifest.name, "logprob")
        until, where = time.monotonic() + 2, "tests.bad_backends:hangs_manifest"
        outcomes = attack_in_processes(subject, attacks("LP-01", "LP-02"), EFFORT, manifest=where, until=until)
    assert [(o.clause, o.status) for o in outcomes] == [("LP-01", "not_run"), ("LP-02", "not_run")]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("hostile", hostile_backends(), ids=lambda h: h.name)
def test_a_hostile_backend_is_called_what_it_is_and_nothing_of_it_is_left(hostile) -> None:
    before = set(own_descendants())  # such as the resource tracker that Python keeps once a test has spawned
    verdict = attack_hostile(hostile)
    assert verdict.faults == (hostile.fault,) * len(hostile.clauses)
    assert set(own_descendants()) - before == set()


def test_the_command_says_of_a_hostile_backend_what_it_did(cli, monkeypatch) -> None:
    first = hostile_backends()[0]
    monkeypatch.setattr(zoo, "BACKENDS", {first.name: first})
    done = cli("conformance", "mutants", "--hostile")
    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if first.name in line and first.fault in line] != []


def test_every_fault_that_a_cpu_can_show_is_shown_by_a_hostile_backend() -> None:
    of_gpus = {"unsupported_arch", "shared_memory_exceeded", "illegal_access", "compile_error", "jit_error"}
    of_gpus |= {"race", "uninitialized_read", "bad_barrier"}
    of_chance = {"killed", "unknown", "illegal_instruction"}
    assert {h.fault for h in hostile_backends()} == set(FAULTS) - of_gpus - of_chance


def test_a_backend_that_works_holds() -> None:
    outcomes = carried_out("works", "LP-05", "LP-06", "CO-01")
    assert [(o.clause, o.status, o.executed) for o in outcomes] == [
        ("LP-05", "held", 2),
        ("LP-06", "held", 2),
        ("CO-01", "held", 1),
    ]


def test_a_case_that_ends_the_process_comes_with_a_script_that_shows_it_alone(monkeypatch) -> None:
    (outcome,) = carried_out("leaves", "LP-05")
    ended = []
    monkeypatch.setattr(bad_backends.os, "_exit", ended.append)
    monkeypatch.setattr(bad_backends, "right", lambda *_, **__: None)
    with pytest.raises(AttributeError):  # it goes on without a result
        exec(outcome.reproduce, {})
    assert ended == [0]


def test_a_child_of_the_tested_code_has_no_say() -> None:
    assert [o.status for o in carried_out("goes_on_in_a_child", "LP-05", "LP-06")] == ["held", "held"]


@pytest.mark.usefixtures("server")
def test_a_backend_that_never_answers_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(isolation, "MAX_TIMEOUTS", 1)
    outcomes = carried_out("hangs", "LP-05", "LP-06", effort=Profile("test", 2, 1))
    assert [o.fault for o in outcomes] == ["timeout", "timeout"]
    assert outcomes[1].message.startswith("not attacked")


def test_what_a_device_that_fails_could_not_run_is_no_fault_of_the_backend() -> None:
    outcomes = attack_in_processes(Subject("torch", "logprob", "cuda:63"), attacks("LP-05", "LP-06"), EFFORT)
    assert [(o.status, o.fault, o.failed) for o in outcomes] == [("not_run", None, False)] * 2
    assert "cuda:63 cannot add numbers" in outcomes[0].message


def test_features_that_calls_needed_are_told() -> None:
    (outcome,) = attack_in_processes(Subject("torch", "logprob"), attacks("LP-12"), EFFORT)
    assert outcome.features == ("entropy", "lse")
