"""Profiles under compute-sanitizer: findings are faults by clause. The tool is a stand-in here; no GPU is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from rlkernel_conformance import sanitizer
from rlkernel_conformance.harness import Outcome, clauses_of
from rlkernel_conformance.isolation import attack_in_processes
from rlkernel_conformance.profiles import profile
from rlkernel_conformance.run import run
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError
from tests.compute_sanitizer_stand_in import __file__ as stand_in
from tests.compute_sanitizer_stand_in import log_of


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in on PATH; the file with its plan."""
    program = tmp_path / "bin" / sanitizer.EXECUTABLE
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stand_in}" "$@"\n')
    program.chmod(0o755)
    plan = tmp_path / "plan"
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("STAND_IN_PLAN", str(plan))
    return plan


def attacked(plan: Path, tool: str, processes: list[str]) -> list[Outcome]:
    plan.write_text("\n".join(processes))
    subject = Subject("torch", "group_filter")
    due = [a for a in clauses_of(subject)[0] if a.clause.id in {"GF-01", "GF-02", "GF-07"}][: len(processes)]
    return attack_in_processes(subject, due, profile(tool))


def test_a_finding_is_a_fault_of_the_clause_in_whose_process_it_was_made(tool: Path) -> None:
    found = attacked(tool, "memcheck", ["nothing", "memcheck", "nothing"])
    assert [(o.clause, o.status, o.fault) for o in found] == [
        ("GF-01", "held", None),
        ("GF-02", "fault", "illegal_access"),
        ("GF-07", "held", None),
    ]
    assert found[1].message == (
        "memcheck: Invalid __global__ write of size 4 bytes at fill_kernel(int *, int)+0x70 in /src/fill.cu:34 "
        "(ERROR SUMMARY: 2 errors)"
    )


def test_a_process_that_the_tool_did_not_see_to_its_end_proves_nothing(tool: Path) -> None:
    (cut, idle) = attacked(tool, "racecheck", ["cut", "idle"])
    assert (cut.status, idle.status) == ("not_run", "not_run")
    assert cut.message == "racecheck did not look at it to the end: COMPUTE-SANITIZER"
    assert "terminated before first instrumented API call" in idle.message


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("memcheck", "Invalid __global__ write of size 4 bytes at fill_kernel(int *, int)+0x70 in /src/fill.cu:34"),
        ("racecheck", "Race reported between Write access at sum_kernel(float *)+0x5f0 in /src/sum.cu:34"),
        (
            "initcheck",
            "Uninitialized __global__ memory read of size 4 bytes at add_kernel(int *)+0x70 in /src/add.cu:21",
        ),
        (
            "synccheck",
            "Barrier error detected. Divergent thread(s) in warp at reduce_kernel(float *)+0x1a0 in /src/reduce.cu:61",
        ),
    ],
)
def test_messages_of_each_tool_are_read(name: str, finding: str) -> None:
    assert sanitizer.findings(log_of(name, name)) == [finding]
    assert sanitizer.findings(log_of("nothing", name)) == []
    assert sanitizer.summary(log_of("nothing", name)) is not None


def test_a_missing_tool_is_one_line_before_anything_runs(
    cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    done = cli("conformance", "run", "torch", "--device", "cuda", "--profile", "memcheck")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: compute-sanitizer is not on PATH nor in {tmp_path}/bin")
    assert done.stderr.count("\n") == 1


def test_a_tool_needs_a_gpu_to_look_at(tool: Path) -> None:
    with pytest.raises(ConfigError, match="profile synccheck looks at kernels on an NVIDIA GPU, and the device is cpu"):
        run("torch", profile("synccheck"))


@pytest.mark.parametrize(
    ("op", "clause", "expected"),
    [
        ("group_filter", "GF-01", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        ("glu", "GL-11", {}),
        ("capture", "GC-01", {}),
    ],
)
def test_torchs_cache_of_memory_is_off_but_where_a_graph_needs_it(
    op: str, clause: str, expected: dict[str, str]
) -> None:
    (found,) = (a.clause for a in clauses_of(Subject("torch", op))[0] if a.clause.id == clause)
    assert sanitizer.variables(op, found) == expected
