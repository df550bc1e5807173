"""What the manifest says, and what importing and installing it costs."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from rlkernel.survey import Situation, foresee
from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_jetson import backend
from rlkernel_triton.aot.bundle import Bundle, write_bundle
from rlkernel_triton.aot.configurations import Code, Configuration

HERE = Path(__file__).parents[1]


def test_the_entry_point_names_the_backend() -> None:
    points = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["entry-points"]["rlkernel.backends"]
    assert points == {backend.name: "rlkernel_jetson:backend"}


def test_installing_pulls_neither_torch_nor_triton() -> None:
    needed = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needed == ["rlkernel==0.1.0", "rlkernel-triton==0.1.0"]  # which asks for rlkernel alone


def test_importing_claims_loads_neither_torch_nor_triton() -> None:
    code = "import sys, rlkernel_jetson; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "set()"


def test_without_rlkernel_triton_the_error_names_the_line_that_installs_it(monkeypatch) -> None:
    from rlkernel_jetson.claims import manifest

    monkeypatch.setitem(sys.modules, "rlkernel_triton.claims", None)
    with pytest.raises(RLKernelError, match="pip install rlkernel-triton"):
        manifest()


@pytest.mark.parametrize(("arch", "served"), [("sm87", True), ("sm110", True), ("sm90", False), ("sm121", False)])
def test_orin_and_thor_are_served_and_no_other_chip(arch, served) -> None:
    import rlkernel as rlk

    with rlk.registered(backend), rlk.use("jetson", fallback="error"):
        decision = foresee("logprob", Situation(device="cuda", arch=arch, dtype="bfloat16"))
    assert (decision.backend == "jetson") is served


def test_operators_of_bundles_come_from_the_bundle_and_what_is_asked_for_wants_triton() -> None:
    from rlkernel_triton.aot.backend import OPERATORS

    first = {op: next(i for i in backend.impls if i.op.partition("@")[0] == op) for op in (*OPERATORS, "capture")}
    assert {op: first[op].target for op in OPERATORS} == {op: f"rlkernel_jetson.bundled:{op}" for op in OPERATORS}
    wanting = [i.target.partition(":")[2] for i in backend.impls if i.requires.packages == ("triton>=3.4",)]
    assert wanting == ["prepare_trainer_bits"]
    assert first["capture"].requires.packages == ()
    assert backend.self_test == "rlkernel_jetson.bundled:self_test"


def test_without_a_driver_the_bundle_is_not_looked_for_and_the_error_says_what_to_install(monkeypatch) -> None:
    from rlkernel_triton.aot import driver
    from rlkernel_triton.aot.backend import BundleBackend

    monkeypatch.setattr(driver.Driver.__init__, "__defaults__", ("no-such-cuda.so",))
    prepare = BundleBackend(list)("logprob")
    with pytest.raises(RLKernelError, match="Install NVIDIA's driver"):
        prepare(LogprobCall(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)))


def test_orin_s_code_elsewhere_is_a_backend_of_its_own_that_no_jetson_takes() -> None:
    from rlkernel_jetson.elsewhere import backend as elsewhere

    assert elsewhere.name == "orin-ptx"
    assert {i.requires.arch for i in elsewhere.impls} == {("sm89+",)}
    assert {i.target.partition(":")[0] for i in elsewhere.impls} == {"rlkernel_jetson.elsewhere"}


def bundle(path, *targets) -> None:
    """A bundle of one build for each target."""
    files = {"cubin": b"machine code"}
    codes = [
        (
            Code(Configuration("m:kernel", (), ()), target, "kernel", 0, 0, 1, 0, "s", (), dict.fromkeys(files, "")),
            files,
        )
        for target in targets
    ]
    write_bundle(path, codes, {})


@pytest.fixture
def hook(tmp_path):
    """What builds a wheel in an empty folder."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("hatch_build", HERE / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BundleHook(str(tmp_path), {}, None, None, "", "wheel")


def test_a_wheel_compiles_the_bundle_for_both_chips_where_none_lies(hook, monkeypatch, tmp_path) -> None:
    def build(targets, out) -> None:
        Path(out).parent.mkdir(parents=True)
        bundle(Path(out), *targets)

    monkeypatch.setattr("rlkernel_triton.aot.command.build", build)
    data = {"artifacts": []}
    hook.initialize("standard", data)
    assert data == {"artifacts": ["rlkernel_jetson/bundles/jetson.zip"]}
    assert set(Bundle(tmp_path / data["artifacts"][0]).targets) == {"sm_87", "sm_110"}


def test_a_wheel_cannot_be_built_without_its_bundle_or_what_compiles_one(hook, monkeypatch, tmp_path) -> None:
    data = {"artifacts": []}
    hook.initialize("editable", data)
    assert data == {"artifacts": []}
    monkeypatch.setitem(sys.modules, "rlkernel_triton.aot.command", None)
    with pytest.raises(RuntimeError, match="rlkernel aot build --target sm_87 --target sm_110 --out"):
        hook.initialize("standard", data)
    path = tmp_path / "rlkernel_jetson" / "bundles" / "jetson.zip"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"is no bundle.*Make it again with Triton 3\.7 or newer"):
        hook.initialize("standard", data)
    bundle(path, "sm_87")
    with pytest.raises(RuntimeError, match=r"has sm_87, and the wheel is for sm_110 too.*--target sm_110 --out"):
        hook.initialize("standard", data)
    bundle(path, "sm_87", "sm_110")
    hook.initialize("standard", data)
    assert data == {"artifacts": ["rlkernel_jetson/bundles/jetson.zip"]}
