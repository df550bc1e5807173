"""The tables of operators by backends and by hardware say what reports, results and builds say."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlkernel_conformance import documents, table
from rlkernel_conformance import report as reports
from rlkernel_conformance.evidence import sources_now
from rlkernel_conformance.hardware import hardware
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError

ROOT = Path(__file__).parents[1]
SUBJECT = Subject("torch", "whiten")


def write(folder: Path, *statuses: str, variables: dict[str, str] | None = None) -> None:
    claims = tuple(sorted(SUBJECT.claims))
    faults = {"violated": "wrong_result", "fault": "segfault"}
    outcomes = [
        Outcome("whiten", f"WH-{i:02}", "t", status, faults.get(status), executed=1, features=claims)
        for i, status in enumerate(statuses, 1)
    ]
    content = reports.report({SUBJECT: outcomes}, Profile("test", 1, 60))
    for made in content["runs"].values():
        made["environment"]["variables"] = variables or {}
    content["hash"] = reports.content_hash(content)
    documents.write(content, folder)


def test_a_cell_says_the_verdict_and_how_many_clauses_it_stands_for(tmp_path) -> None:
    write(tmp_path / "good", "held", "held", "not_claimed")
    write(tmp_path / "bad", "held", "violated", "fault")
    lines = table.table(tmp_path).splitlines()
    assert "| Operator | `bad` | `good` |" in lines
    assert "| `whiten` | fails, 1 of 3 hold | holds 2 |" in lines
    assert "| `logprob` | - | - |" in lines


def test_a_cell_counts_clauses_that_had_no_answer_in_time() -> None:
    clauses = [{"status": "held", "fault": None}, {"status": "fault", "fault": "timeout"}]
    assert reports.standing("fails", clauses) == "fails, 1 of 2 hold, 1 late"


def test_a_cell_says_how_many_claims_no_case_needed(tmp_path) -> None:
    outcome = Outcome("whiten", "WH-01", "t", "held", executed=1, features=tuple(sorted(SUBJECT.claims))[2:])
    documents.write(reports.report({SUBJECT: [outcome]}, Profile("test", 1, 60)), tmp_path / "here")
    assert "| `whiten` | fails, 1 of 1 hold, 2 claims untried |" in table.table(tmp_path)


def test_it_says_where_a_report_was_made(tmp_path) -> None:
    write(tmp_path / "here", "held", variables={"TRITON_INTERPRET": "1"})
    assert "on Triton interpreter, CPU" in table.table(tmp_path)
    assert table.rows(tmp_path)[0]["verdict"] == "holds"


@pytest.mark.parametrize(("changed", "cell"), [(0, "holds 2"), (1, "holds 2, 1 *older*"), (2, "holds 2, *older*")])
def test_a_cell_says_how_many_clauses_are_of_other_sources(tmp_path, changed, cell) -> None:
    write(tmp_path / "here", "held", "held")
    content = documents.read(tmp_path / "here")
    for clause in content["operators"]["whiten@1"]["clauses"][:changed]:
        clause["sources"] = "0" * 16
    documents.write({**content, "hash": reports.content_hash(content)}, tmp_path / "here")
    assert f"| `whiten` | {cell} |" in table.table(tmp_path)


def test_a_folder_without_reports_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no report in"):
        table.table(tmp_path)


def test_links_lead_from_the_folder_of_the_page(tmp_path) -> None:
    write(tmp_path / "reports" / "here", "held")
    said = table.table(tmp_path / "reports", tmp_path / "docs")
    assert "(../reports/here/report.md)" in said


def test_it_is_written_between_its_markers(tmp_path, cli) -> None:
    write(Path("conformance/reports/good"), "held")
    page = Path("page.md")
    begin, end = table.markers("conformance")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert cli("conformance", "table", "page.md").exit_code == 0
    said = cli("conformance", "table").stdout
    assert page.read_text() == f"before\n{begin}\n\n{said}\n{end}\nafter\n"
    assert json.loads(cli("conformance", "table", "--json").stdout)[0]["report"] == "good"


def test_a_file_without_markers_is_an_error(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ConfigError, match="has no place for a table"):
        table.write(page, tmp_path)


@pytest.mark.parametrize(("page", "name"), [("docs/conformance.md", "conformance"), ("README.md", "hardware")])
def test_a_page_says_what_the_reports_say(page, name) -> None:
    begin, end = table.markers(name)
    between = (ROOT / page).read_text().partition(begin)[2].partition(end)[0]
    with contextlib.chdir(ROOT):
        made = table.TABLES[name](Path("conformance/reports"), Path(page).parent)
    # A change of a kernel makes no cell wrong but older.
    there, now = (re.sub(r", (\d+ )?\*older\*", "", text) for text in (between, made))
    assert there.strip() == now


@pytest.mark.parametrize(("there", "age"), [(True, ""), (False, ", *older*")])
def test_hardware_is_measured_where_a_report_of_kernels_was_made_on_its_card(tmp_path, there, age) -> None:
    write(tmp_path / "triton", "held", "violated")
    on_card(tmp_path / "triton", "triton")
    operators = documents.read(tmp_path / "triton")["operators"]
    now = sources_now(documents.read(tmp_path / "triton"))["whiten@1"]
    for clause in operators["whiten@1"]["clauses"]:
        clause["sources"] = now if there else "0" * 16
    renamed(tmp_path / "triton", operators=operators)
    lines = by_hardware(tmp_path).splitlines()
    assert lines[0] == "| Operator | NVIDIA Hopper |"
    assert f"| `whiten` | measured on H100; `triton` fails 1 clause{age} |" in lines
    assert lines[-1].startswith("Reports: [`triton`](triton/report.md) (")


def test_hardware_tells_a_clause_that_had_no_answer_in_time_from_one_that_fails(tmp_path) -> None:
    write(tmp_path / "triton", "violated", "fault")
    on_card(tmp_path / "triton", "triton")
    operators = documents.read(tmp_path / "triton")["operators"]
    now = sources_now(documents.read(tmp_path / "triton"))["whiten@1"]
    for clause in operators["whiten@1"]["clauses"]:
        clause |= {"sources": now, "fault": "timeout" if clause["status"] == "fault" else clause["fault"]}
    renamed(tmp_path / "triton", operators=operators)
    said = "measured on H100; `triton` fails 1 clause and had no answer in time for 1 clause"
    assert f"| `whiten` | {said} |" in by_hardware(tmp_path).splitlines()


def test_plain_torch_on_a_card_is_not_a_kernel_that_was_measured(tmp_path) -> None:
    write(tmp_path / "torch", "held")
    on_card(tmp_path / "torch", "torch")
    assert "measured" not in by_hardware(tmp_path)


def test_hardware_whose_machine_code_a_simulator_ran_says_so(tmp_path) -> None:
    write(tmp_path / "simulated", "held")
    renamed(tmp_path / "simulated", backend="simulated-gfx942")
    assert "| `whiten` | executed in a simulator |" in by_hardware(tmp_path)


def test_hardware_is_compiled_where_every_build_was(tmp_path) -> None:
    write(tmp_path / "torch", "held")
    builds = tmp_path / "builds.md"
    builds.write_text(
        "## whiten\n\n| kernel | build | sm80 | gfx1100 |\n|---|---|---|---|\n"
        "| `k` | a | 47 | 20 |\n| `k` | b | 40 |  |\n"
    )
    lines = by_hardware(tmp_path, builds).splitlines()
    assert lines[0] == "| Operator | NVIDIA Ampere, Ada | AMD RDNA 3, 4 |"
    assert "| `whiten` | compiled | compiled in part |" in lines


def test_an_operator_that_a_benchmark_timed_was_measured_on_its_card(tmp_path) -> None:
    write(tmp_path / "torch", "held")
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    row = {"op": "whiten", "candidates": [{"name": "triton", "status": "measured"}]}
    machine = {"device_arch": "sm90", "device_name": "NVIDIA H200"}
    (folder / "results.json").write_text(json.dumps({"environment": machine, "results": [row]}))
    assert "| `whiten` | measured on H200 |" in by_hardware(tmp_path)


def by_hardware(folder: Path, builds: Path = Path("none")) -> str:
    return hardware(folder, folder / "results", builds, folder)


def renamed(folder: Path, **changed: Any) -> None:
    """A report of another backend or device than that which made it."""
    content = {**documents.read(folder), **changed}
    documents.write({**content, "hash": reports.content_hash(content)}, folder)


def on_card(folder: Path, backend: str) -> None:
    runs = documents.read(folder)["runs"]
    for run in runs.values():
        run["environment"] |= {"device_arch": "sm90", "device_name": "NVIDIA H100 80GB HBM3"}
    renamed(folder, backend=backend, device="cuda", runs=runs)


def test_plain_torch_has_a_report_of_the_standard_profile_without_a_waiver() -> None:
    content = documents.read(ROOT / "conformance" / "reports" / "torch")
    assert (content["backend"], content["profile"], content["summary"]["waived"]) == ("torch", "standard", 0)
