"""Clauses shared out to processes: every row of a table in one part, and one outcome of all parts."""

from dataclasses import asdict, replace

import pytest

from rlkernel_conformance.attack import Attack, Coverage, Table
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.harness import carry_out
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.run import run
from rlkernel_conformance.shares import joined, shares
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec import OPERATORS

SUBJECT = Subject("torch", "logprob")
EFFORT = Profile("test", 4, 60, thorough=True)
CLAUSES = {c.id: c for c in OPERATORS["logprob"].clauses}
ROWS = tuple(range(10, 21))
TOOK = {"LP-97": 40.0, "LP-1": 90.0, "LP-2": 1.0}


def table(prop=lambda *_: None, *, splits=True):
    cases = Table(
        lambda _: ROWS,
        lambda *_: iter(()),
        lambda _, taken: Coverage(len(taken), len(ROWS), tuple(str(r) for r in ROWS if r not in taken)),
        splits,
    )
    return Attack("logprob", CLAUSES["LP-97"], cases, prop)


def others(number):
    return [replace(table(splits=False), clause=replace(CLAUSES["LP-01"], id=f"LP-{i}")) for i in range(number)]


def in_parts(attack, number):
    """Outcomes of the parts."""
    return [carry_out(SUBJECT, replace(attack, part=(i, number)), EFFORT) for i in range(number)]


@pytest.mark.parametrize(("clauses", "most", "expected"), [(11, 8, 5), (11, 2, 2), (1, 8, 1), (0, 8, 0)])
def test_a_process_takes_two_clauses_at_least(clauses, most, expected) -> None:
    found = shares(others(clauses), most, {})
    assert len(found) == expected
    assert sorted(a.clause.id for share in found for a in share) == sorted(a.clause.id for a in others(clauses))


@pytest.mark.parametrize(("clauses", "most"), [(0, 1), (0, 6), (3, 6), (40, 6), (2, 64)])
def test_every_part_of_a_table_is_due_once_and_no_process_has_two(clauses, most) -> None:
    found = shares([*others(clauses), table()], most, TOOK)
    parts = [[a.part for a in share if a.clause.id == "LP-97"] for share in found]
    told = [part for share in parts for part in share]
    assert sorted(told) == [(i, len(told)) for i in range(len(told))]
    assert max(map(len, parts)) == 1
    assert len(found) <= most


def test_what_took_longest_is_begun_first_and_processes_have_as_much_to_do() -> None:
    found = shares([*others(4), table()], 3, TOOK)
    assert [[a.clause.id for a in share] for share in found] == [
        ["LP-1", "LP-97"], ["LP-0", "LP-97", "LP-2"], ["LP-3", "LP-97"]
    ]  # fmt: skip


def test_a_table_of_which_no_time_is_known_is_begun_first() -> None:
    found = shares([*others(4), table()], 1, {"LP-3": 30.0})
    assert [[a.clause.id for a in share] for share in found] == [["LP-97", "LP-0", "LP-1", "LP-2", "LP-3"]]
    assert [share[0].clause.id for share in shares([*others(4), table()], 3, {"LP-3": 30.0})] == ["LP-97"] * 3


@pytest.mark.parametrize("number", [1, 3, 20])  # 20: some parts have no rows
def test_the_parts_of_a_table_execute_what_the_whole_does(number) -> None:
    seen = []
    attack = table(lambda _, row: seen.append(row))
    found = joined(SUBJECT, attack, in_parts(attack, number))
    assert sorted(seen) == list(ROWS)
    assert (found.status, found.executed) == ("held", len(ROWS))
    assert found.coverage == asdict(Coverage(len(ROWS), len(ROWS)))


def test_one_part_that_is_refuted_refutes_the_clause() -> None:
    def prop(_, row):
        if row == 15:
            raise Violation("15 is wrong")

    found = joined(SUBJECT, table(prop), in_parts(table(prop), 3))
    assert (found.status, found.message) == ("violated", "15 is wrong")
    assert "15" in found.reproduce


def test_a_part_that_was_not_run_leaves_the_clause_not_run() -> None:
    late = replace(in_parts(table(), 1)[0], status="not_run", message="no time")
    found = joined(SUBJECT, table(), [*in_parts(table(), 2)[:1], late])
    assert (found.status, found.message) == ("not_run", "no time")


def test_processes_that_share_a_table_report_what_one_does() -> None:
    seen = []
    asked = {"ops": ("shape_rewards",), "clauses": ("SR-97",)}
    alone = run("torch", EFFORT, **asked)
    shared = run("torch", EFFORT, **asked, jobs=3, watch=seen.append)
    assert [(p.outcome.clause, p.outcome.status, p.done) for p in seen] == [("SR-97", "held", 1)]
    assert shared["hash"] == alone["hash"]


def test_parts_that_no_time_was_left_for_are_told_once() -> None:
    seen = []
    content = run("torch", EFFORT, ops=("shape_rewards",), clauses=("SR-97",), jobs=3, within=0.0, watch=seen.append)
    assert [(p.outcome.clause, p.outcome.status, p.done) for p in seen] == [("SR-97", "not_run", 0)]
    clauses = content["operators"]["shape_rewards@1"]["clauses"]
    assert [c["status"] for c in clauses if c["clause"] == "SR-97"] == ["not_run"]


def test_the_pairs_of_options_split_and_real_sizes_do_not() -> None:
    of = {a.clause.id: a.cases for a in attacks_on("logprob")}
    assert [of[name].splits for name in ("LP-97", "LP-98")] == [True, False]
