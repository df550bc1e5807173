"""docs/rocm.md says what the reports and the recorded signatures say."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import evidence


def rows(markdown):
    """Operator -> its cells."""
    cells = [[c.strip() for c in line.split("|")] for line in markdown.splitlines() if line.startswith("| `")]
    return {row[1]: row[2:-1] for row in cells}


def test_the_page_says_what_the_reports_say() -> None:
    page = (evidence.ROOT / "docs" / "rocm.md").read_text()
    said = rows(page.partition(evidence.BEGIN)[2].partition(evidence.END)[0])
    found = rows(evidence.table())
    cells = slice(2, None)  # simulated, AITER, run on AMD hardware; the others are what rlkernel-triton says of itself
    assert {op: row[cells] for op, row in said.items()} == {op: found[op][cells] for op in said}
    assert said


def test_nothing_is_said_to_have_run_on_amd_hardware_without_a_report_from_it() -> None:
    reports = list(evidence.REPORTS.glob("rocm-gfx*"))
    assert [op for op, row in rows(evidence.table()).items() if not reports and row[-1] != "no"] == []
