"""A report that is made in several runs: what a run replaces, what stays, and what it leaves to the next."""

from __future__ import annotations

import json

import pytest

from rlkernel_conformance import documents, tolerances
from rlkernel_conformance import report as reports
from rlkernel_conformance.faults import message_of
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.profiles import PROFILES, Profile
from rlkernel_conformance.run import run
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError

WHITEN, FILTER = Subject("torch", "whiten"), Subject("torch", "group_filter")
EFFORT = Profile("test", 3, 60)
OTHER = "0" * 16  # a fingerprint of other sources
LATE = {"status": "not_run", "executed": 0, "message": "the run's time was over"}
UNASKED = {"status": "not_run", "executed": 0, "message": reports.NOT_ASKED}


def report(*clauses: dict, subject: Subject = WHITEN, effort: Profile = EFFORT, **more) -> dict:
    """A report in which the clauses of an operator that are given held, but for what is said of them."""
    spec = [c.id for c in subject.spec.clauses]
    claims = tuple(sorted(subject.claims))
    held = {"op": subject.op, "title": "t", "status": "held", "executed": 3, "features": claims, "seconds": 1.0}
    outcomes = [Outcome(**{**held, "clause": name, **said}) for name, said in zip(spec, clauses, strict=False)]
    return reports.report({subject: outcomes}, effort, **more)


def clauses(content: dict, op: str = "whiten@1") -> list[tuple[str, str | None]]:
    """Status and sources of each clause of an operator."""
    return [(c["status"], c["sources"]) for c in content["operators"][op]["clauses"]]


def now(subject: Subject = WHITEN) -> str:
    return reports.present(subject)


def test_a_run_of_one_operator_leaves_the_others_as_they_were() -> None:
    old = report({}, {"status": "violated", "fault": "nan"}, subject=FILTER, sources={"group_filter": OTHER})
    whole = reports.merged(old, report({}, {}))
    assert whole["operators"]["group_filter@1"] == old["operators"]["group_filter@1"]
    assert clauses(whole) == [("held", now())] * 2
    assert (whole["verdict"], whole["summary"]["held"], whole["summary"]["violated"]) == ("fails", 3, 1)


def test_what_another_report_still_held_from_an_earlier_day_replaces_no_later_result() -> None:
    found = report({}, {})
    earlier = report({"status": "violated", "fault": "nan"}, {}, sources={"whiten": OTHER})
    for clause in earlier["operators"]["whiten@1"]["clauses"]:
        clause["date"] = "2026-01-01"
    assert clauses(reports.merged(found, earlier)) == [("held", now())] * 2
    assert clauses(reports.merged(earlier, found)) == [("held", now())] * 2


def test_a_run_replaces_what_it_ran() -> None:
    old = report({"status": "violated", "fault": "nan"}, {}, sources={"whiten": OTHER})
    whole = reports.merged(old, report({}, {}))
    assert (clauses(whole), whole["verdict"]) == ([("held", now())] * 2, "holds")


@pytest.mark.parametrize(
    ("was", "said", "expected"),
    [
        (None, LATE, ("held", None)),  # of the same sources
        (OTHER, LATE, ("not_run", None)),
        (None, UNASKED, ("held", None)),
        (OTHER, UNASKED, ("held", OTHER)),
    ],
)
def test_a_clause_that_was_not_run_keeps_its_result_of_the_same_sources_or_if_nobody_asked(was, said, expected) -> None:
    old = report({}, {}, sources={"whiten": was or now()})
    whole = reports.merged(old, report({}, said))
    assert clauses(whole) == [("held", now()), (expected[0], expected[1] or now())]
    assert whole["verdict"] == ("unfinished" if expected[0] == "not_run" else "holds")


def test_a_clause_that_no_run_reached_is_not_run() -> None:
    whole = reports.merged(report({}, UNASKED), report(UNASKED, LATE))
    assert [status for status, _ in clauses(whole)] == ["held", "not_run"]


def test_a_feature_is_proved_by_the_clauses_of_all_runs() -> None:
    first, *others = sorted(WHITEN.claims)
    old = report({"features": (first,)}, UNASKED)
    whole = reports.merged(old, report(UNASKED, {"features": tuple(others)}))
    assert whole["operators"]["whiten@1"]["unproved_claims"] == []


def test_every_clause_names_the_run_it_comes_from_with_profile_and_environment(monkeypatch) -> None:
    old = report({}, {}, effort=PROFILES["standard"])
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    whole = reports.merged(old, report({}, UNASKED, effort=PROFILES["deep"]))
    made = [whole["runs"][c["run"]] for c in whole["operators"]["whiten@1"]["clauses"]]
    assert [run["profile"]["name"] for run in made] == ["deep", "standard"]
    assert [run["environment"]["variables"].get("NVIDIA_TF32_OVERRIDE") for run in made] == ["0", None]
    assert "torch" in made[0]["environment"]


def test_the_profile_of_a_report_is_the_weakest_that_a_clause_was_attacked_with() -> None:
    old = report({}, {}, subject=FILTER, effort=PROFILES["standard"])
    whole = reports.merged(old, report({}, effort=PROFILES["quick"]))
    assert (whole["profile"], whole["operators"]["group_filter@1"]["profile"]) == ("quick", "standard")
    renewed = reports.merged(whole, report({}, effort=PROFILES["deep"]))
    assert (renewed["profile"], sorted(r["profile"]["name"] for r in renewed["runs"].values())) == (
        "standard",
        ["deep", "standard"],
    )


def test_a_folder_keeps_a_report_of_one_backend_and_device(tmp_path) -> None:
    documents.put(report({}), tmp_path)
    other = {**report({}), "device": "cuda"}
    with pytest.raises(ConfigError, match="the report is of torch cpu x86_64, not of torch cuda"):
        documents.put(other, tmp_path)


def test_a_report_in_parts_survives_its_files_with_its_hash(tmp_path) -> None:
    documents.put(report({}, {}, subject=FILTER), tmp_path)
    whole = documents.put(report({}, LATE), tmp_path)
    assert documents.read(tmp_path) == whole
    assert list(whole["operators"]) == ["whiten@1", "group_filter@1"]  # as the specs stand
    text = (tmp_path / "report.md").read_text()
    assert f"| `group_filter@1` | holds | test | {whole['created'][:10]} | `{now(FILTER)}` |" in text


def schema_1(content: dict) -> dict:
    """A report as it was written before clauses named their runs."""
    [made] = content["runs"].values()
    told = {"date", "features", "run", "seconds", "sources"}
    operators = {
        op: {k: v for k, v in found.items() if k not in {"problems", "profile"}}
        | {"clauses": [{k: v for k, v in c.items() if k not in told} for c in found["clauses"]]}
        for op, found in content["operators"].items()
    }
    rest = {k: v for k, v in content.items() if k not in {"manifest", "runs", "hash"}}
    about = {"provider": made["provider"], "environment": made["environment"], "tolerances": tolerances.version()}
    old = {**rest, **about, "schema": 1, "operators": operators}
    return {**old, "hash": reports.content_hash(old)}


def test_a_report_of_schema_1_is_read_as_of_sources_that_nobody_knows(tmp_path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(schema_1(report({}, {}, effort=PROFILES["standard"]))))
    content = documents.read(tmp_path)
    assert clauses(content) == [("held", None)] * 2
    assert (content["verdict"], content["profile"]) == ("holds", "standard")
    assert content["operators"]["whiten@1"]["unproved_claims"] == []


def test_a_report_of_schema_1_is_renewed_clause_by_clause(tmp_path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(schema_1(report({}, {}, effort=PROFILES["standard"]))))
    whole = documents.put(report({}, UNASKED, effort=PROFILES["standard"]), tmp_path)
    assert (clauses(whole), whole["verdict"]) == ([("held", now()), ("held", None)], "holds")
    assert documents.read(tmp_path) == whole


def test_a_run_of_what_is_missing_attacks_what_has_no_result_of_these_sources_and_this_effort() -> None:
    seen = []
    known = run("torch", EFFORT, ops=("group_filter",), clauses=("GF-01", "GF-02", "GF-91"))
    entries = {c["clause"]: c for c in known["operators"]["group_filter@1"]["clauses"]}
    entries["GF-02"]["sources"] = OTHER
    due = sum(c["status"] == "not_run" for c in entries.values()) + 1
    few = {"earlier": known, "watch": seen.append, "ops": ("group_filter",), "within": 0.001}
    run("torch", EFFORT, **few)
    assert [p.outcome.clause for p in seen if p.outcome.clause in {"GF-01", "GF-02", "GF-91"}] == ["GF-02"]
    assert {p.due for p in seen} == {due}
    seen.clear()
    entries["GF-91"]["status"] = "fault"  # no result: of the machine, maybe
    run("torch", EFFORT, **few)
    assert {p.due for p in seen} == {due + 1}
    seen.clear()
    run("torch", Profile("more", 4, 60), **few)
    assert {p.due for p in seen} == {due + 2}


def test_a_run_that_is_cut_off_is_finished_by_the_next(cli, tmp_path) -> None:
    words = ("conformance", "run", "torch", "--op", "group_filter", "--report", str(tmp_path))
    assert cli(*words, "--clause", "GF-01").exit_code == 1  # unfinished
    assert cli(*words, "--missing", "--within", "1").exit_code == 1
    assert documents.read(tmp_path)["operators"]["group_filter@1"]["clauses"][1]["status"] == "held"
    assert cli(*words, "--missing").exit_code == 0
    first = documents.read(tmp_path)
    done = cli(*words, "--missing", "--json")  # nothing is left to do
    assert (done.exit_code, json.loads(done.stdout)["hash"]) == (0, first["hash"])


def test_a_report_of_another_machine_renews_one(cli, tmp_path) -> None:
    documents.put(report({}, {}, sources={"whiten": OTHER}), tmp_path / "kept")
    documents.write(report({}, UNASKED), tmp_path / "brought")
    assert cli("conformance", "report", str(tmp_path / "brought"), "--report", str(tmp_path / "kept")).exit_code == 0
    assert clauses(documents.read(tmp_path / "kept")) == [("held", now()), ("held", OTHER)]


def test_a_report_of_another_machine_renews_the_operators_that_are_asked_for(cli, tmp_path) -> None:
    both = reports.merged(report({}, {}), report({}, {}, subject=FILTER))
    documents.write(both, tmp_path / "brought")
    words = ("conformance", "report", str(tmp_path / "brought"), "--report", str(tmp_path / "kept"))
    assert cli(*words, "--op", "whiten").exit_code == 0
    assert list(documents.read(tmp_path / "kept")["operators"]) == ["whiten@1"]


def test_what_is_missing_needs_a_report(cli) -> None:
    done = cli("conformance", "run", "torch", "--missing")
    assert (done.exit_code, "--report" in done.stderr) == (2, True)


def test_a_fault_of_a_case_that_held_and_failed_says_how_it_failed() -> None:
    error = ExceptionGroup("inconsistent results", [TimeoutError("no rank answered")])
    assert message_of(error) == "ExceptionGroup: inconsistent results (1 sub-exception); TimeoutError: no rank answered"
