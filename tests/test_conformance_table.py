"""The table of operators by backends says what reports say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlkernel_conformance import documents, table
from rlkernel_conformance import report as reports
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


def test_it_is_written_between_its_markers(tmp_path, cli) -> None:
    write(Path("conformance/reports/good"), "held")
    page = Path("page.md")
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    assert cli("conformance", "table", "page.md").exit_code == 0
    said = cli("conformance", "table").stdout
    assert page.read_text() == f"before\n{table.BEGIN}\n\n{said}\n{table.END}\nafter\n"
    assert json.loads(cli("conformance", "table", "--json").stdout)[0]["report"] == "good"


def test_a_file_without_markers_is_an_error(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ConfigError, match="has no place for the table"):
        table.write(page, tmp_path)


def test_the_readme_says_what_the_reports_say() -> None:
    between = (ROOT / "README.md").read_text().partition(table.BEGIN)[2].partition(table.END)[0]
    # A change of a kernel makes no cell wrong but older.
    page, now = (
        re.sub(r", (\d+ )?\*older\*", "", text) for text in (between, table.table(ROOT / "conformance" / "reports"))
    )
    assert page.strip() == now


def test_plain_torch_has_a_report_of_the_standard_profile_without_a_waiver() -> None:
    content = documents.read(ROOT / "conformance" / "reports" / "torch")
    assert (content["backend"], content["profile"], content["summary"]["waived"]) == ("torch", "standard", 0)
