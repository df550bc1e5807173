"""The suite `host`: every operator has a row beside plain torch that does the same job, and goals are the design's."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from rlkernel_bench import ceilings, suites, timing
from rlkernel_bench.candidates import Candidate
from rlkernel_bench.ceilings import Ceilings
from rlkernel_bench.measure import Effort, measure
from rlkernel_bench.run import fails, run
from rlkernel_bench.suites import host
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.suites.host_calls import CASES
from rlkernel_bench.suites.host_first import first_call
from rlkernel_bench.suites.host_graphs import graphed
from rlkernel_bench.work import Goal, Judgment, Problem, Work

import rlkernel as rlk
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.advantage_kinds import KINDS

MACHINE = Ceilings(copy=1e12, read=1e12, cached=1e12, flops={"float32": 1e12}, cache_bytes=1 << 20)
QUICK = Effort(0.001, memory=False)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """Ceilings say nothing about host time."""
    monkeypatch.setattr(ceilings, "measure", lambda device: MACHINE)


def rows(size: str, task: str) -> list[Work]:
    return [work for work in suites.works(["host"], size) if work.task == task]


def test_every_operator_and_every_kind_of_advantage_has_a_row() -> None:
    forward = rows("full", "forward")
    assert {work.op for work in (*forward, *rows("full", "replay"))} == set(OPERATORS)
    assert {work.options["kind"] for work in forward if work.op == "advantage"} == set(KINDS)
    assert all(work.why for work in forward)
    assert {work.op for work in rows("toy", "forward")} == {work.op for work in forward}


@pytest.mark.parametrize("case", CASES, ids=lambda c: " ".join([c.op, *map(str, c.options.values())]))
def test_plain_torch_does_the_same_job(case) -> None:
    problem = host.problem(next(w for w in rows("full", "forward") if host.case_of(w) is case), "cpu")
    given = problem.make(0)
    judged = problem.judge(given, problem.expected(given), case.plain(given))
    assert judged
    assert all(j.over <= 1 or j.coarse <= 1 for j in judged.values())


@pytest.mark.parametrize("task", ["forward", "forward+backward", "replay"])
def test_the_reference_is_right_in_every_way_of_a_row(task) -> None:
    for work in rows("toy", task):
        problem = host.problem(work, "cpu")
        given = problem.make(0)
        want = problem.expected(given)
        said = {c.name: c.run(given) for c in host.candidates(problem, "cpu", ("reference",), None)}
        judged = {name: problem.judge(given, want, found) for name, found in said.items()}
        assert {name for name, j in judged.items() for x in j.values() if min(x.over, x.coarse) > 1} == set(), work


def test_a_result_that_is_off_is_not_right() -> None:
    problem = host.problem(rows("toy", "forward")[0], "cpu")
    given = problem.make(0)
    want = problem.expected(given)
    assert problem.judge(given, want, {"logprob": want["logprob"] * 1.5})["logprob"].over > 1
    assert problem.judge(given, want, {"logprob": want["logprob"] * torch.nan})["logprob"].over > 1


def test_each_way_of_a_row_is_measured_beside_torch() -> None:
    content = run(["host"], only=["8x128 float32 forward+backward"], use=("reference",), effort=QUICK)
    assert fails(content) == []
    said = {c["name"]: c for r in content["results"] if r["op"] == "policy_loss" for c in r["candidates"]}
    assert {n: c["status"] for n, c in said.items()} == dict.fromkeys(
        ("torch", "reference:eager", "reference:bound"), "measured"
    )
    assert all(c["host"]["best"] <= c["host"]["median"] for c in said.values())
    assert said["torch"]["times_ruler"]["median"] == 1.0
    assert said["reference:eager"]["times_ruler"]["n"] == said["reference:eager"]["host"]["n"]


def test_the_way_to_an_implementation_that_does_nothing_has_a_goal_in_microseconds() -> None:
    content = run(["host"], only=["dispatch"], effort=QUICK)
    assert fails(content) == []
    for result in content["results"]:
        goals = {c["name"]: [g["unit"] for g in c["goals"]] for c in result["candidates"]}
        assert goals == {"direct": [], "stub:dispatch": ["over"], "stub:bound": []}


def test_graphs_are_said_to_be_absent_where_there_are_none() -> None:
    content = run(["host"], size="full", only=["64x1024 bfloat16 captured"], effort=QUICK)
    assert fails(content) == []
    assert {c["status"] for c in content["results"][0]["candidates"]} == {"absent"}


@pytest.mark.parametrize("case", [c for c in CASES if c.graphs], ids=lambda c: c.op)
def test_a_captured_call_gives_what_the_call_gives(case) -> None:
    given, later = case.make(Draw("cpu", 0)), case.make(Draw("cpu", 1))

    def call(inputs):
        return case.outputs(case.call(getattr(rlk, case.op), inputs))

    replay = graphed(call, case.graphs)
    with rlk.use("reference"):
        replay(given)
        for name, found in replay(given | {n: later[n] for n in case.graphs}).items():
            assert torch.equal(found, call(given | {n: later[n] for n in case.graphs})[name])


def test_a_first_call_is_made_in_a_process_with_caches_of_its_own(tmp_path) -> None:
    case = next(c for c in CASES if c.op == "whiten")
    assert first_call(case, "reference", "cpu", tmp_path, warmed=True) > 0
    with pytest.raises(RuntimeError, match="unknown backend 'acme'"):
        first_call(case, "acme", "cpu", tmp_path, warmed=False)


def test_batches_of_all_candidates_are_timed_in_turns_and_slow_ones_are_small(monkeypatch) -> None:
    now, made = count(), {"quick": 0, "slow": 0}
    clock = [0]

    def quick() -> None:
        made["quick"] += 1
        clock[0] += 1_000

    def slow() -> None:
        made["slow"] += 1
        clock[0] += 5_000_000

    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(now))
    found = timing.on_the_host(timing.Stopwatch("cpu"), {"quick": quick, "slow": slow}, seconds=0.0, batch=50)
    assert found == {"quick": [1.0] * 5, "slow": [5000.0] * 5}
    assert made == {"quick": 3 + 5 * 50, "slow": 3 + 5 * 2}


def test_a_ratio_goal_is_judged_by_the_ratio_and_a_difference_by_the_difference() -> None:
    def judge(given, want, found):
        return {"y": Judgment(0.0, 0.0)}

    for unit, key in (("times", "times_ruler"), ("over", "us_over_ruler")):
        work = Work("none", "logprob", {}, "float32", goals=(Goal(1e9, unit),), ruler="r", clock="host")
        problem = Problem(work, lambda seed: {}, {}, lambda given: {}, judge)
        both = [Candidate("r", "ruler", run=lambda _: {}), Candidate("x", "backend", run=lambda _: {})]
        said = measure(problem, both, "cpu", MACHINE, QUICK)["candidates"][1]
        have = said[key]["median"] if unit == "times" else said[key]
        assert [(g["unit"], g["have"], g["met"]) for g in said["goals"]] == [
            (unit, pytest.approx(have, abs=1e-3), True)
        ]
