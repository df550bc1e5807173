"""SECURITY.md promises what tests hold: each row of its tables names a test that exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

import pytest

from tests.distributions import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
PROMISES = [row for row in ROWS if len(row) == 5 and row[0] != "Asset" and set(row[0]) != {"-"}]
TESTS = sorted([*(ROOT / "tests").glob("test_*.py"), *(ROOT / "backends").rglob("tests/**/test_*.py")])
LIBRARY = [
    path
    for folder in ("rlkernel_core", "registry", "conformance", "backends", "benchmarks/rlkernel_bench")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "tests" not in path.parts and "build" not in path.parts
]


@cache
def defined() -> Counter[str]:
    """The tests of the repository by name."""
    return Counter(name for p in TESTS for name in re.findall(r"^def (test_\w+)", p.read_text(), re.MULTILINE))


def test_every_promise_names_one_test_that_exists() -> None:
    named = [re.findall(r"`(test_\w+)`", row[4]) for row in PROMISES]
    assert [row for row, names in zip(PROMISES, named, strict=True) if len(names) != 1] == []
    known = defined()
    assert [name for (name,) in named if not known[name]] == []


def test_every_promise_says_of_what_against_whom_and_how_far() -> None:
    assert [row for row in PROMISES if not (row[0] and row[1] and (row[2] or row[3]))] == []
    assert len(PROMISES) > 30


@pytest.mark.parametrize("row", ["| a | b | c | d |  |", "| a | b | c | d | `test_that_is_not_there` |"])
def test_a_row_without_a_test_is_noticed(row) -> None:
    *_, cell = [part.strip() for part in row.strip("|").split("|")]
    names = re.findall(r"`(test_\w+)`", cell)
    assert len(names) != 1 or not defined()[names[0]]


def test_nothing_is_unpickled_but_what_the_judge_sends_to_its_worker() -> None:
    unpickling = {"load", "loads", "Unpickler", "_Unpickler", "read_pickle"}
    found = set()
    for path in LIBRARY:
        text = path.read_text()
        if not re.search(r"pickle|torch\.load|marshal|shelve|joblib", text):
            continue
        for node in ast.walk(ast.parse(text)):
            owner, _, name = ast.unparse(node).rpartition(".") if isinstance(node, ast.Attribute) else ("", "", "")
            if owner in {"pickle", "marshal", "shelve", "joblib"} and name in unpickling:
                found.add(path.name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                found |= set() if "weights_only=True" in ast.unparse(node) else {path.name}
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                found |= {path.name} if {a.name for a in node.names} & unpickling else set()
    assert found == {"wire.py"}
