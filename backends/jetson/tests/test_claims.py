"""What the manifest says, and what importing and installing it costs."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlkernel.survey import Situation, foresee
from rlkernel_core.errors import RLKernelError
from rlkernel_jetson import backend

HERE = Path(__file__).parents[1]


def test_the_entry_point_names_the_backend() -> None:
    points = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["entry-points"]["rlkernel.backends"]
    assert points == {backend.name: "rlkernel_jetson:backend"}


def test_installing_pulls_neither_torch_nor_triton() -> None:
    needed = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needed == ["rlkernel==0.1.0"]


def test_importing_claims_loads_neither_torch_nor_triton() -> None:
    code = "import sys, rlkernel_jetson; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "set()"


def test_without_rlkernel_triton_the_error_names_the_line_that_installs_it(monkeypatch) -> None:
    from rlkernel_jetson.claims import manifest

    monkeypatch.setitem(sys.modules, "rlkernel_triton.claims", None)
    with pytest.raises(RLKernelError, match="pip install --no-deps rlkernel-triton"):
        manifest()


@pytest.mark.parametrize(("arch", "served"), [("sm87", True), ("sm110", True), ("sm90", False), ("sm121", False)])
def test_orin_and_thor_are_served_and_no_other_chip(arch, served) -> None:
    import rlkernel as rlk

    with rlk.registered(backend), rlk.use("jetson", fallback="error"):
        decision = foresee("logprob", Situation(device="cuda", arch=arch, dtype="bfloat16"))
    assert (decision.backend == "jetson") is served
