"""What must be renewed: which parts of a report are of other sources than are here, and with which command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

import rlkernel
from rlkernel_conformance import documents, evidence, table
from rlkernel_conformance import report as reports
from rlkernel_conformance.attack_sources import attack_sources
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.leak_check import CLAUSE
from rlkernel_conformance.manifests import importable, known, load, sources_of
from rlkernel_conformance.profiles import PROFILES
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError, ResolutionError

WHITEN, NORM = Subject("torch", "whiten"), Subject("torch", "rms_norm")
FOLDER = Path("conformance/reports")


def put(name: str = "here", *, of: Subject = WHITEN, sources: str | None = None, without: int = 0, **changes) -> None:
    """A report on one operator, but for its last clauses, in the folder that commands look into."""
    ids = [*(c.id for c in of.spec.clauses), CLAUSE.id]
    given = {"status": "held", "executed": 1, "features": tuple(sorted(of.claims)), "seconds": 2.0}
    outcomes = [Outcome(of.op, c, "t", **given) for c in ids[: len(ids) - without]]
    told = {of.op: sources or reports.present(of)}
    content = {**reports.report({of: outcomes}, PROFILES["standard"], sources=told), **changes}
    documents.write({**content, "hash": reports.content_hash(content)}, FOLDER / name)


def states() -> dict[str, str]:
    """Operator -> state, those apart that the report does not have."""
    return {e.op: e.state for e in evidence.evidence(FOLDER) if e.state != "absent"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "current"), ({"sources": "0" * 16}, "older"), ({"without": 2}, "missing")],
)
def test_a_report_is_held_against_the_present_sources(cli, given, expected) -> None:
    put(**given)
    assert states() == {"whiten@1": expected}


def test_a_report_of_sources_that_nobody_knows_is_older(cli) -> None:
    put()
    content = documents.read(FOLDER / "here")
    for clause in content["operators"]["whiten@1"]["clauses"]:
        clause["sources"] = None
    documents.write({**content, "hash": reports.content_hash(content)}, FOLDER / "here")
    assert states() == {"whiten@1": "older"}


def put_with_attack(fingerprint: str | None, clause: str = "WH-01") -> None:
    """A report whose result of a clause is of another attack; of one that it does not name, for None."""
    put()
    content = documents.read(FOLDER / "here")
    for result in content["operators"]["whiten@1"]["clauses"]:
        if result["clause"] == clause:
            result["attack"] = fingerprint
    documents.write({**content, "hash": reports.content_hash(content)}, FOLDER / "here")


def test_a_report_names_the_attack_of_each_clause(cli) -> None:
    put()
    told = {c["clause"]: c["attack"] for c in documents.read(FOLDER / "here")["operators"]["whiten@1"]["clauses"]}
    assert told == attack_sources("whiten")


@pytest.mark.parametrize(("fingerprint", "expected"), [("0" * 16, ("changed", 1)), (None, ("current", 0))])
def test_a_result_of_another_attack_is_changed_but_not_one_that_names_none(cli, fingerprint, expected) -> None:
    put_with_attack(fingerprint)
    [due] = [e for e in evidence.evidence(FOLDER) if e.op == "whiten@1"]
    assert (due.state, due.clauses) == expected
    assert bool(due.command) == (fingerprint is not None)


def test_a_changed_clause_is_attacked_again_by_the_command_that_renews_it(cli) -> None:
    put_with_attack("0" * 16)
    [due] = [e for e in evidence.evidence(FOLDER) if e.op == "whiten@1"]
    assert cli(*shlex.split(due.command)[1:], "--json").exit_code == 0
    assert states() == {"whiten@1": "current"}
    ran = documents.read(FOLDER / "here")["operators"]["whiten@1"]["clauses"]
    assert [c["clause"] for c in ran if c["executed"] > 1] == ["WH-01"]


def test_the_table_marks_a_changed_clause_as_older(cli) -> None:
    put_with_attack("0" * 16)
    [row] = table.rows(FOLDER)
    assert row["operators"]["whiten@1"] == f"holds {len(WHITEN.spec.clauses) + 1}, 1 *older*"


def test_a_report_of_a_backend_that_is_not_here_is_unknown(cli) -> None:
    put(backend="acme", manifest="no_such_module:backend")
    assert states() == {"whiten@1": "unknown"}


def test_an_operator_that_the_backend_implements_no_more_is_gone(cli) -> None:
    put(backend="cublaslt", device="cuda")
    assert states() == {"whiten@1": "gone"}


def test_operators_that_a_report_does_not_have_are_absent(cli) -> None:
    put()
    assert {e.op for e in evidence.evidence(FOLDER) if e.state == "absent"} == set(
        evidence.sources(load("rlkernel_torch:backend"), "cpu")
    ) - {"whiten@1"}


def test_each_has_the_command_that_renews_it(cli) -> None:
    put(without=2)
    [due] = [e for e in evidence.evidence(FOLDER) if e.op == "whiten@1"]
    assert (due.clauses, due.seconds) == (2, 0.0)
    renewed = cli(*shlex.split(due.command)[1:], "--json")
    assert renewed.exit_code == 0, renewed.output
    assert states() == {"whiten@1": "current"}
    ran = documents.read(FOLDER / "here")["operators"]["whiten@1"]["clauses"]
    assert sum(c["executed"] > 1 for c in ran) == 2


def test_a_command_names_a_manifest_that_no_distribution_does_and_the_interpreter(cli) -> None:
    put(backend="triton-interpreter", manifest="rlkernel_triton.interpreted:backend")
    content = documents.read(FOLDER / "here")
    [made] = content["runs"].values()
    made["environment"]["variables"]["TRITON_INTERPRET"] = "1"
    assert evidence.renewal(content, "whiten@1", FOLDER / "here") == (
        "TRITON_INTERPRET=1 rlkernel conformance run triton-interpreter --op whiten --missing --profile standard "
        "--device cpu --manifest rlkernel_triton.interpreted:backend --report conformance/reports/here"
    )


COMMITTED = Path(__file__).parents[1] / "conformance" / "reports"
RUN = (
    "rlkernel conformance run {} --op whiten --missing --profile {{profile}} --device cuda "
    "--manifest aot_compile_missing:backend --report {{report}}"
)
COMPILING = "PYTHONPATH=backends/triton/tools AOT_MISSING=missing.jsonl"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("rocm-simulated-gfx942", "python tools/simulated_reports.py gfx942 whiten --to {parent}"),
        ("aot-sm90", f"{COMPILING} {RUN.format('aot-compiling')}"),
        ("orin-ptx", f"{COMPILING} AOT_CODE=ptx {RUN.format('orin-ptx')}"),
    ],
)
def test_a_report_that_a_tool_of_the_clone_has_made_is_renewed_by_that_tool(name, command) -> None:
    content = documents.read(COMMITTED / name)
    assert evidence.renewal(content, "whiten@1", COMMITTED / name) == command.format(
        parent=COMMITTED, report=COMMITTED / name, profile=content["profile"]
    )
    tools = [word for word in command.split() if word.startswith(("tools/", "PYTHONPATH="))]
    assert [t for t in tools if not (COMMITTED.parents[1] / t.removeprefix("PYTHONPATH=")).exists()] == []


@pytest.mark.parametrize("name", ["aot-sm90", "orin-ptx"])
def test_a_report_of_what_compiles_missing_builds_is_compared_with_it(name) -> None:
    found = evidence.manifest_of(documents.read(COMMITTED / name))
    assert found is not None
    assert found.impls[0].target.partition(":")[0] == "aot_compile_missing"


def test_the_command_that_renews_a_report_names_no_installed_backend_with_a_manifest() -> None:
    contents = {path: documents.read(path) for path in evidence.reports(COMMITTED)}
    commands = {c["backend"]: evidence.renewal(c, "whiten@1", path.parent) for path, c in contents.items()}
    named = {backend for backend, command in commands.items() if "--manifest" in command}
    assert {backend: backend in known() for backend in named} == {"aot-compiling": False, "orin-ptx": False}


def test_the_command_names_no_manifest_where_its_backend_has_been_installed_since(cli) -> None:
    put(manifest=known()["torch"])
    assert "--manifest" not in evidence.renewal(documents.read(FOLDER / "here"), "whiten@1", FOLDER / "here")


def test_the_command_line_prints_what_is_due_and_json_has_all(cli) -> None:
    put("old", sources="0" * 16)
    put("new")
    said = cli("conformance", "evidence", "--op", "whiten").stdout
    assert "1 of 2 to renew" in said
    assert "--report conformance/reports/old" in said
    assert "--report conformance/reports/new" not in said
    assert "cannot be compared" not in said
    rows = json.loads(cli("conformance", "evidence", "--op", "whiten", "--json").stdout)
    assert [(r["report"], r["state"], bool(r["command"])) for r in rows] == [
        ("new", "current", False),
        ("old", "older", True),
    ]


def test_the_command_line_says_how_many_reports_it_cannot_compare(cli) -> None:
    put("acme", backend="acme", manifest="no_such_module:backend")
    said = cli("conformance", "evidence", "--op", "whiten").stdout
    assert said.splitlines()[-1] == "1 more cannot be compared: install their backends, or set PYTHONPATH: acme"


def test_a_folder_without_reports_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no report in"):
        next(evidence.evidence(tmp_path))


def test_backends_of_the_clone_are_known_although_they_are_not_installed() -> None:
    assert {"torch", "triton", "cuda", "rocm", "jetson"} <= set(known())
    with importable():
        assert load(known()["triton"]).name == "triton"


def conformant(reports=FOLDER):
    return rlkernel.use("torch", need="conformant", reports=str(reports))


def test_a_policy_that_needs_conformance_runs_what_a_report_holds_for(cli) -> None:
    put()
    with conformant():
        assert rlkernel.whiten(torch.tensor([1.0, 3.0])).y.sum() == 0
        assert rlkernel.explain("whiten").decision.backend == "torch"


def test_a_report_is_read_once_until_its_file_changes(cli, monkeypatch) -> None:
    put()
    opened, read = [], evidence.read
    monkeypatch.setattr(evidence, "read", lambda path: opened.append(path) or read(path))
    with conformant():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            rlkernel.whiten(torch.tensor([1.0, 3.0], dtype=dtype))
    assert len(opened) == 1
    put(without=2)
    rlkernel.refresh()
    with conformant(), pytest.raises(ResolutionError, match="has no result for"):
        rlkernel.whiten(torch.tensor([1.0, 3.0]))
    assert len(opened) == 2


def test_a_policy_that_needs_conformance_wants_results_of_todays_attacks(cli) -> None:
    put_with_attack("0" * 16)
    with conformant():
        [rejected] = [r for r in rlkernel.explain("whiten").decision.rejected if r.backend == "torch"]
    assert rejected.reason.slug == "evidence/not-held"
    assert rejected.reason.text.endswith("has no result of today's attacks for WH-01")


def other_torch(content):
    runs = content["runs"]
    return {r: {**run, "environment": {**run["environment"], "torch": "2.0.0"}} for r, run in runs.items()}


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"backend": "acme"}, "evidence/none", "no report in"),
        ({"sources": "0" * 16}, "evidence/older", "of other sources"),
        ({"without": 2}, "evidence/not-held", "has no result for CO-01, WH-98"),
    ],
)
def test_a_policy_that_needs_conformance_passes_over_what_no_report_holds_for(cli, given, code, said) -> None:
    put(**given)
    with conformant():
        [rejected] = [r for r in rlkernel.explain("whiten").decision.rejected if r.backend == "torch"]
        assert rejected.reason.slug == code
        assert said in rejected.reason.text
        assert rejected.reason.fix.startswith("rlkernel conformance run torch --op whiten")
        with pytest.raises(ResolutionError, match=code):
            rlkernel.whiten(torch.tensor([1.0, 3.0]))


def test_a_report_of_another_manifest_by_that_name_is_no_evidence(cli) -> None:
    where = "rlkernel_triton.interpreted:backend"
    with importable():
        put(manifest=where, sources=sources_of(load(where), "whiten@1", "cpu"))
    with conformant():
        [rejected] = [r for r in rlkernel.explain("whiten").decision.rejected if r.backend == "torch"]
    assert (rejected.reason.slug, rejected.reason.text.endswith("of other sources")) == ("evidence/older", True)


def test_a_report_made_with_another_torch_is_older(cli) -> None:
    put()
    content = documents.read(FOLDER / "here")
    content["runs"] = other_torch(content)
    documents.write({**content, "hash": reports.content_hash(content)}, FOLDER / "here")
    with conformant():
        [rejected] = [r for r in rlkernel.explain("whiten").decision.rejected if r.backend == "torch"]
    assert rejected.reason.text == f"{FOLDER.absolute() / 'here'} is of other torch 2.0.0 (here {torch.__version__})"


def test_an_operator_that_the_report_does_not_have_has_no_evidence(cli) -> None:
    put()
    with conformant():
        [rejected] = [r for r in rlkernel.explain("logprob").decision.rejected if r.backend == "torch"]
    assert rejected.reason.slug == "evidence/none"


def test_conformance_without_a_folder_of_reports_names_the_key(cli) -> None:
    with rlkernel.use("torch", need="conformant"):
        [rejected] = [r for r in rlkernel.explain("whiten").decision.rejected if r.backend == "torch"]
    assert rejected.reason.fix.startswith("reports = ")


@pytest.mark.parametrize(("without", "expected"), [(0, []), (2, ["evidence/not-held"])])
def test_exact_bits_want_a_report_as_conformance_does(cli, without, expected) -> None:
    put(of=NORM, without=without)
    with rlkernel.use("torch", need="exact", reports=str(FOLDER)):
        decision = rlkernel.explain("rms_norm").decision
    assert [r.reason.slug for r in decision.rejected if r.backend == "torch"] == expected
    assert decision.sums == (None if expected else "lanes1024/tree64/f32")


def test_the_suite_attacks_what_no_report_holds_for_yet(cli) -> None:
    with conformant(), WHITEN.chosen():
        assert rlkernel.explain("whiten").decision.backend == "torch"
