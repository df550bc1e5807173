"""Reports: the same for the same findings, refused when changed, and honest about what was not proved."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance import documents, tolerances
from rlkernel_conformance import report as reports
from rlkernel_conformance.harness import Outcome, carry_out, clauses_of
from rlkernel_conformance.mutants import mutants_of
from rlkernel_conformance.profiles import PROFILES, Profile
from rlkernel_conformance.run import run
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import FileError, UnknownNameError

SUBJECT = Subject("torch", "group_filter")
EFFORT = Profile("test", 3, 60)
CLAIMS = tuple(sorted(SUBJECT.claims))


def found(**changes) -> list[Outcome]:
    """One clause that held, whose calls needed all that is claimed."""
    given = {"op": "group_filter", "clause": "GF-01", "title": "t", "status": "held", "executed": 3, "features": CLAIMS}
    return [Outcome(**{**given, **changes})]


def verdict(effort=EFFORT, **changes) -> str:
    return reports.report({SUBJECT: found(**changes)}, effort)["verdict"]


@pytest.fixture(scope="module")
def content() -> dict:
    return run("torch", EFFORT, ops=("group_filter",))


def test_two_runs_have_one_hash_whenever_they_were_made(content) -> None:
    again = run("torch", EFFORT, ops=("group_filter",))
    [clause, *_] = again["operators"]["group_filter@1"]["clauses"]
    clause |= {"date": "2001-01-01", "seconds": 1e9}
    assert reports.content_hash(again) == content["hash"]


def test_a_report_says_with_which_tolerances_and_under_which_variables_it_was_made(content, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HOME", "/nobody")
    again = reports.report({SUBJECT: found()}, EFFORT)
    [made] = again["runs"].values()
    assert made["environment"]["variables"]["TRITON_INTERPRET"] == "1"
    assert "HOME" not in made["environment"]["variables"]
    assert documents.place(again).startswith("Triton interpreter, CPU")
    assert [r["operators"]["group_filter@1"]["tolerances"] for r in (again, content)] == [
        tolerances.version(("group_filter",))
    ] * 2


def test_a_report_survives_its_files(content, tmp_path) -> None:
    documents.write(content, tmp_path)
    assert documents.read(tmp_path) == content
    assert ET.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"
    assert json.loads((tmp_path / "badge.json").read_text())["schemaVersion"] == 1


def test_a_report_that_was_changed_is_refused(content, tmp_path) -> None:
    changed = json.loads(json.dumps(content))
    changed["operators"]["group_filter@1"]["clauses"][0]["status"] = "violated"
    (tmp_path / "report.json").write_text(json.dumps(changed))
    with pytest.raises(FileError, match="was changed"):
        documents.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 9, "hash": ""}'])
def test_what_is_no_report_is_refused(tmp_path, text) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(FileError, match=r"report\.json"):
        documents.read(tmp_path)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "holds"),
        ({"executed": 0, "features": ()}, "fails"),  # held, without a case
        ({"features": CLAIMS[1:]}, "fails"),  # a claim without an executed case
        ({"status": "violated", "fault": "wrong_result"}, "fails"),
        ({"status": "fault", "fault": "segfault", "executed": 0}, "fails"),
        ({"status": "not_attacked", "executed": 0, "features": ()}, "partial"),
        ({"status": "no_room", "executed": 0, "features": ()}, "partial"),
        ({"status": "not_run", "executed": 0, "features": ()}, "unfinished"),
    ],
)
def test_the_verdict_is_the_worst_that_was_found(changes, expected) -> None:
    assert verdict(**changes) == expected


def test_a_clause_that_is_not_attacked_excuses_no_claim() -> None:
    outcomes = [*found(features=CLAIMS[1:]), *found(clause="GF-02", status="not_attacked", executed=0, features=())]
    assert reports.report({SUBJECT: outcomes}, EFFORT)["verdict"] == "fails"


def test_a_clause_that_needs_a_larger_device_is_listed_and_excuses_no_claim() -> None:
    large = found(clause="GF-02", status="no_room", executed=0, features=(), message="needs a device with 64 GiB free")
    content = reports.report({SUBJECT: [*found(), *large]}, EFFORT)
    assert content["verdict"] == "holds"
    assert "GF-02" in documents.markdown(content)
    assert reports.report({SUBJECT: [*found(features=CLAIMS[1:]), *large]}, EFFORT)["verdict"] == "fails"


def test_a_quick_run_that_drew_no_case_of_a_claim_is_partial() -> None:
    assert verdict(PROFILES["quick"], features=CLAIMS[1:]) == "partial"


def test_numbers_that_json_does_not_have_are_written_as_text() -> None:
    content = reports.report({SUBJECT: found(measures={"y": float("inf")})}, EFFORT)
    assert json.dumps(content, allow_nan=False)


def test_a_claim_without_an_executed_case_is_named() -> None:
    operator = reports.report({SUBJECT: found(features=CLAIMS[1:])}, EFFORT)["operators"]["group_filter@1"]
    assert operator["unproved_claims"] == [CLAIMS[0]]


def test_what_a_device_could_not_run_is_an_error_in_junit_and_no_failure() -> None:
    outcomes = found(status="not_run", executed=0, message="cuda:1 cannot add numbers")
    case = ET.fromstring(documents.junit(reports.report({SUBJECT: outcomes}, EFFORT))).find(".//testcase")
    assert [child.tag for child in case] == ["error"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (str({"lengths": ((5, 300), *[(1, 2)] * 1024, (1, 3)), "D": 64}),
         "{'lengths': ((5, 300), 1024 x (1, 2), (1, 3)), 'D': 64}"),
        (str({"lengths": [7] * 8, "heads": (2, 2, 2, 2)}), "{'lengths': [8 x 7], 'heads': (2, 2, 2, 2)}"),
        (str([1] * 7), str([1] * 7)),
        (str([1] * 8 + [12]), "[8 x 1, 12]"),
        (str([21] + [1] * 8), "[21, 8 x 1]"),
    ],
)  # fmt: skip
def test_equal_entries_in_a_row_are_counted_for_people(text, expected) -> None:
    assert documents.counted(text) == expected


def test_sizes_that_were_not_executed_are_printed_with_equal_entries_counted(tmp_path, cli) -> None:
    missed = str({"lengths": ((1, 2),) * 1024})
    covered = {"executed": 1, "possible": 2, "missed": [missed]}
    documents.write(reports.report({SUBJECT: found(coverage=covered)}, PROFILES["standard"]), tmp_path)
    said = cli("conformance", "report", str(tmp_path)).stdout
    assert "GF-01 t: not executed\n  {'lengths': (1024 x (1, 2))}" in said
    assert documents.read(tmp_path)["operators"]["group_filter@1"]["clauses"][0]["coverage"]["missed"] == [missed]


def test_a_call_that_fails_is_written_with_equal_entries_counted() -> None:
    call = f"group_filter(lengths={((1, 2),) * 1024})"
    content = reports.report({SUBJECT: found(status="fault", fault="exception", message="m", call=call)}, EFFORT)
    assert "The call: `group_filter(lengths=(1024 x (1, 2)))`" in documents.markdown(content)
    assert content["operators"]["group_filter@1"]["clauses"][0]["call"] == call


def test_reports_are_compared_clause_by_clause(content) -> None:
    worse = json.loads(json.dumps(content))
    worse["operators"]["group_filter@1"]["clauses"][1]["status"] = "violated"
    worse["operators"]["group_filter@1"]["tolerances"] = "0"
    assert reports.compare(content, content) == []
    assert reports.compare(content, worse) == [
        "group_filter@1 GF-01: held -> violated",
        f"group_filter@1 tolerances: {content['operators']['group_filter@1']['tolerances']} -> 0",
    ]


def test_an_unknown_backend_or_operator_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torch'"):
        run("toch", PROFILES["quick"])
    with pytest.raises(UnknownNameError, match="did you mean 'logprob'"):
        run("torch", PROFILES["quick"], ops=("logprb",))


def test_a_counterexample_comes_with_a_script_that_shows_it_alone() -> None:
    bug = next(m for m in mutants_of("logprob") if m.name == "entropy_in_bits")
    with rlk.registered(bug.manifest):
        subject = bug.subject
        attack = next(a for a in clauses_of(subject)[0] if a.clause.id == "LP-12")
        with subject.chosen():
            outcome = carry_out(subject, attack, Profile("test", 20, 60), manifest=bug.where)
    assert "times the tolerance" in outcome.message
    with pytest.raises(AssertionError, match="entropy"):  # registers the backend by itself
        exec(outcome.reproduce, {})
    assert torch.is_grad_enabled()
