"""Reports: the same for the same findings, refused when changed, and honest about what was not proved."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance import report as reports
from rlkernel_conformance.harness import Outcome, carry_out, clauses_of
from rlkernel_conformance.mutants import mutants_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.run import run
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError, UnknownNameError

EFFORT = Profile("test", 2, 60)
SUBJECT = Subject("reference", "logprob")


def found(**changes) -> list[Outcome]:
    given = {"op": "logprob", "clause": "LP-01", "title": "t", "status": "held", "executed": 3, **changes}
    return [Outcome(**given)]


@pytest.fixture(scope="module")
def content() -> dict:
    return run("reference", EFFORT, ops=("logprob",))


def test_two_runs_give_one_report_but_for_the_time(content) -> None:
    again = run("reference", EFFORT, ops=("logprob",))
    assert again["hash"] == content["hash"]
    assert {k: v for k, v in again.items() if k not in {"created", "seconds"}} == {
        k: v for k, v in content.items() if k not in {"created", "seconds"}
    }


def test_a_report_survives_its_files(content, tmp_path) -> None:
    reports.write(content, tmp_path)
    assert reports.read(tmp_path) == content
    assert ET.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"
    assert json.loads((tmp_path / "badge.json").read_text())["schemaVersion"] == 1


def test_a_report_that_was_changed_is_refused(content, tmp_path) -> None:
    changed = json.loads(json.dumps(content))
    changed["operators"]["logprob@1"]["clauses"][0]["status"] = "violated"
    (tmp_path / "report.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="was changed"):
        reports.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 9, "hash": ""}'])
def test_what_is_no_report_is_refused(tmp_path, text) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match=r"report\.json"):
        reports.read(tmp_path)


def test_a_clause_that_holds_without_a_case_is_a_failure() -> None:
    assert reports.report({SUBJECT: found(executed=0)}, "test")["verdict"] == "fails"


def test_a_clause_without_an_attack_makes_the_verdict_partial() -> None:
    assert reports.report({SUBJECT: found(status="not_attacked", executed=0)}, "test")["verdict"] == "partial"


def test_a_claim_that_no_clause_proved_is_listed() -> None:
    operator = reports.report({SUBJECT: found()}, "test")["operators"]["logprob@1"]
    assert "entropy" in operator["unproved_claims"]


def test_reports_are_compared_clause_by_clause(content) -> None:
    worse = json.loads(json.dumps(content))
    worse["operators"]["logprob@1"]["clauses"][0]["status"] = "violated"
    assert reports.compare(content, content) == []
    assert reports.compare(content, worse) == ["logprob@1 LP-01: held -> violated"]


def test_an_unknown_backend_or_operator_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        run("refrence", EFFORT)
    with pytest.raises(UnknownNameError, match="did you mean 'logprob'"):
        run("reference", EFFORT, ops=("logprb",))


def test_a_counterexample_comes_with_a_script_that_shows_it_alone() -> None:
    bug = next(m for m in mutants_of("logprob") if m.name == "entropy_in_bits")
    with rlk.registered(bug.manifest):
        subject = Subject(bug.manifest.name, "logprob")
        attack = next(a for a in clauses_of(subject)[0] if a.clause.id == "LP-12")
        with subject.chosen():
            outcome = carry_out(subject, attack, Profile("test", 20, 60), manifest=bug.where)
        assert "times the tolerance" in outcome.message
        with pytest.raises(AssertionError, match="entropy"):
            exec(outcome.reproduce, {})
    assert f"manifest={bug.where!r}" in outcome.reproduce
    assert torch.is_grad_enabled()
