"""The suite under pytest: a test a clause, skipped with a reason, failing with a counterexample and its script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rlkernel_core.spec import OPERATORS

ROOT = Path(__file__).parents[1]
# A backend that serves `whiten@1` without claiming `deterministic`, and is off by one.
OFF = """
from dataclasses import replace

from rlkernel_core import Backend, Impl, Requires
from rlkernel_torch import backend as reference
from rlkernel_torch.advantage.whitening import whiten as right


def whiten(call):
    out = right(call)
    return replace(out, y=out.y + 1)


impl = Impl(
    op="whiten@1",
    target="off_kernels:whiten",
    requires=Requires(device="*"),
    supports=reference.of("whiten@1")[0].supports - {"deterministic"},
)
backend = Backend(name="off", api=(2, 0), impls=(impl,))
"""


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    plugin = ["--pyargs", "rlkernel_conformance", "-p", "rlkernel_conformance.plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "--tb=short", *plugin, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_backend_that_keeps_its_claims_passes_clause_by_clause(tmp_path) -> None:
    done = pytest_in(tmp_path, "--backend", "torch", "--conformance-op", "glu", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plugin.py::glu::GL-01 matches float64 PASSED" in done.stdout
    assert "plugin.py::glu::CO-01 leaves nothing behind PASSED" in done.stdout
    assert re.search(rf"\b{len(OPERATORS['glu'].clauses) + 1} passed", done.stdout)


def test_a_refuted_clause_fails_with_its_script_and_one_not_claimed_is_skipped(tmp_path) -> None:
    (tmp_path / "off_kernels.py").write_text(OFF)
    words = ["--backend", "off", "--conformance-manifest", "off_kernels:backend", "-k", "WH-01 or WH-12"]
    done = pytest_in(tmp_path, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong_result" in done.stdout
    assert "reproduce('off', 'whiten', 'WH-01'" in done.stdout
    assert "off does not claim deterministic" in done.stdout
    assert "1 failed, 1 skipped" in done.stdout


def test_an_unknown_name_is_an_error_that_names_the_nearest(tmp_path) -> None:
    done = pytest_in(tmp_path, "--backend", "toch")
    assert (done.returncode, "did you mean 'torch'" in done.stderr) == (4, True)


def test_without_a_backend_nothing_is_collected(tmp_path) -> None:
    assert "no tests ran" in pytest_in(tmp_path).stdout


def test_nothing_loads_the_plugin_unasked() -> None:
    from importlib.metadata import entry_points

    assert [e for e in entry_points(group="pytest11") if e.value.startswith("rlkernel")] == []
