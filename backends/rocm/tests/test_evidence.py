"""Which report speaks for which kernels, and what may be said of AMD hardware."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "triton" / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import evidence


def rows(markdown):
    """Operator -> its cells, whichever kernels they are of: a change of a kernel makes no page wrong but older."""
    lines = [line.replace(evidence.EARLIER, "") for line in markdown.splitlines() if line.startswith("| `")]
    cells = [[c.strip() for c in line.split("|")] for line in lines]
    return {row[1]: row[2:-1] for row in cells}


def test_nothing_is_said_to_have_run_on_amd_hardware_without_a_report_from_it() -> None:
    reports = list(evidence.REPORTS.glob("rocm-gfx*"))
    assert [op for op, row in rows(evidence.table()).items() if not reports and row[-1] != "no"] == []
