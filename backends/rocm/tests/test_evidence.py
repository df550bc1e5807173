"""docs/rocm.md says what the reports and the recorded signatures say."""

import ast
import sys
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "triton" / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import evidence
import kernel_sources
import pytest

KERNELS = {
    "claims.py": "CLAIM = 'any dtype'\n",
    "tiles.py": "TILE = 64\nOTHER = 8\nTILES = {}\nTILES['wide'] = 128\n",
    "scan.py": '''
from pkg import tiles as cut
from pkg.tiles import OTHER

BUILDS = [OTHER]

def scan_kernel(x):
    """Sums."""
    return x * cut.TILE  # elements

def other_kernel(x):
    return x + cut.TILES["wide"]
''',
    "op.py": """
from pkg.claims import CLAIM

def run(x):
    from pkg.scan import scan_kernel as kernel
    return kernel(x)

def fits(x):
    return CLAIM
""",
}


def hashed(root, *, file="op.py", old="", new="", places=(("pkg.op", "run"),)):
    """The hash of `run` in a package of which one file reads otherwise."""
    (root / "pkg").mkdir(parents=True)
    assert old in KERNELS[file]
    for name, text in KERNELS.items():
        (root / "pkg" / name).write_text(text.replace(old, new) if name == file else text)
    return kernel_sources.hash_of(list(places), root)


def rows(markdown):
    """Operator -> its cells, whichever kernels they are of: a change of a kernel makes no page wrong but older."""
    lines = [line.replace(evidence.EARLIER, "") for line in markdown.splitlines() if line.startswith("| `")]
    cells = [[c.strip() for c in line.split("|")] for line in lines]
    return {row[1]: row[2:-1] for row in cells}


def test_the_page_says_what_the_reports_say() -> None:
    page = (evidence.ROOT / "docs" / "rocm.md").read_text()
    said = rows(page.partition(evidence.BEGIN)[2].partition(evidence.END)[0])
    found = rows(evidence.table())
    cells = itemgetter(2, 3, 4, 5, 7)  # simulated, AITER, AMD hardware; the others say of rlkernel-triton what it says
    assert {op: cells(row) for op, row in said.items()} == {op: cells(found[op]) for op in said}
    assert said


def test_nothing_is_said_to_have_run_on_amd_hardware_without_a_report_from_it() -> None:
    reports = list(evidence.REPORTS.glob("rocm-gfx*"))
    assert [op for op, row in rows(evidence.table()).items() if not reports and row[-1] != "no"] == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("claims.py", "any", "one"),
        ("tiles.py", "OTHER = 8", "OTHER = 9"),  # a table of builds alone names it
        ("tiles.py", "128", "256"),  # another kernel's
        ("scan.py", "# elements", "# tokens"),
        ("scan.py", "Sums.", "Sums of rows."),
        ("scan.py", "BUILDS = [OTHER]", "BUILDS = []"),
        ("scan.py", "x + cut", "x - cut"),
        ("op.py", "return CLAIM", "return None"),
    ],
)
def test_a_report_is_not_older_for_a_change_that_its_kernels_do_not_see(tmp_path, file, old, new) -> None:
    assert hashed(tmp_path / "a", file=file, old=old, new=new) == hashed(tmp_path / "b")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiles.py", "TILE = 64", "TILE = 32"),
        ("scan.py", "x * cut", "x - cut"),
        ("op.py", "return kernel(x)", "return kernel(-x)"),
    ],
)
def test_a_report_is_older_than_a_change_of_what_it_judged(tmp_path, file, old, new) -> None:
    assert hashed(tmp_path / "a", file=file, old=old, new=new) != hashed(tmp_path / "b")


def test_what_a_statement_puts_into_a_table_counts_as_the_table(tmp_path) -> None:
    places = (("pkg.scan", "other_kernel"),)
    changed = hashed(tmp_path / "a", file="tiles.py", old="128", new="256", places=places)
    assert changed != hashed(tmp_path / "b", places=places)


@pytest.mark.parametrize(
    ("op", "kernels"),
    [
        ("logprob", {"sweep", "gradient"}),
        ("affine_suffix_scan", {"scan_kernel", "chain_kernel"}),
        ("policy_loss", {"loss_kernel", "total_kernel"}),
        ("sample", {"tiles", "finish", "searched"}),
        ("qmatmul", {"byte_product", "follow"}),
    ],
)
def test_the_kernels_of_an_operator_are_among_its_sources(op, kernels) -> None:
    definitions = kernel_sources.reached(kernel_sources.entries(op), kernel_sources.TRITON)
    names = {node.name for _, node in definitions if isinstance(node, ast.FunctionDef)}
    assert kernels - names == set()
