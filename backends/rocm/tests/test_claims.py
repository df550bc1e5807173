"""What the manifest says on every architecture, and what importing it costs."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlkernel.survey import Situation, foresee
from rlkernel_core.errors import RLKernelError
from rlkernel_rocm import backend
from rlkernel_rocm.architectures import ARCHITECTURES, base, spelled
from rlkernel_rocm.self_test import inspect
from rlkernel_triton.claims import manifest as portable

HERE = Path(__file__).parents[1]
SIMULATED = ("gfx90a", "gfx942", "gfx950")


def test_the_entry_point_names_the_backend() -> None:
    points = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["entry-points"]["rlkernel.backends"]
    others = {name: f"rlkernel_rocm.{name}:backend" for name in ("aiter", "hipblaslt")}
    assert points == {backend.name: "rlkernel_rocm:backend", **others}


def test_installing_pulls_neither_torch_nor_triton_nor_aiter() -> None:
    needed = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needed == ["rlkernel==0.1.0", "rlkernel-triton==0.1.0"]  # which asks for rlkernel alone


def test_importing_claims_loads_no_torch_no_triton_no_numpy_and_no_aiter() -> None:
    code = (
        "import sys, rlkernel_rocm, rlkernel_rocm.detect, rlkernel_rocm.simulated.gfx942\n"
        "import rlkernel_rocm.aiter, rlkernel_rocm.hipblaslt\n"
        "print({'torch', 'triton', 'numpy', 'aiter'} & set(sys.modules))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "set()"


def test_without_rlkernel_triton_the_error_names_the_line_that_installs_it(monkeypatch) -> None:
    from rlkernel_rocm.claims import manifest

    monkeypatch.setitem(sys.modules, "rlkernel_triton.claims", None)
    with pytest.raises(RLKernelError, match="pip install rlkernel-triton"):
        manifest()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_known_architecture_is_served_and_graphs_where_they_work(arch) -> None:
    import rlkernel as rlk

    with rlk.registered(backend), rlk.use("rocm", fallback="error"):
        decision = foresee("logprob", Situation(device="cuda", arch=arch, dtype="bfloat16", grad=True))
        assert decision.backend == "rocm"
        captured = Situation(device="cuda", arch=arch, dtype="bfloat16", features=frozenset({"capturable"}))
        served = foresee("logprob", captured).backend == "rocm"
    assert served is ARCHITECTURES[arch].graphs


@pytest.mark.parametrize("arch", ["gfx1030", "gfx906", "gfx1250", "sm90"])
def test_other_architectures_are_refused(arch) -> None:
    import rlkernel as rlk

    with rlk.registered(backend), rlk.use("rocm", fallback="error"):
        decision = foresee("logprob", Situation(device="cuda", arch=arch, dtype="bfloat16"))
    assert decision.backend is None
    assert decision.rejected[0].reason.slug == "arch/unsupported"


@pytest.mark.parametrize("arch", SIMULATED)
def test_the_simulated_backend_offers_every_kernel_of_the_portable_one(arch) -> None:
    simulated = importlib.import_module(f"rlkernel_rocm.simulated.{arch}").backend
    assert simulated.name == f"simulated-{arch}"
    assert [(i.op, i.supports, i.check) for i in simulated.impls] == [
        (i.op, i.supports, i.check) for i in portable("interpreted", device="cpu", asked_for=False).impls
    ]
    assert {i.requires.device for i in simulated.impls} == {"cpu"}


def test_names_lose_their_suffixes_and_versions_are_spelled_as_compilers_do() -> None:
    assert base("gfx942:sramecc+:xnack-") == "gfx942"
    assert [spelled(v) for v in (90402, 90010, 90500, 110000, 110501, 120001)] == [
        "gfx942", "gfx90a", "gfx950", "gfx1100", "gfx1151", "gfx1201",
    ]  # fmt: skip


def accelerator(name, *, there=True):
    """What torch.cuda says on a machine with one GPU."""
    return SimpleNamespace(
        is_available=lambda: there, get_device_properties=lambda _: SimpleNamespace(gcnArchName=name)
    )


def test_a_device_is_recognised_by_its_name_without_suffixes() -> None:
    assert inspect("cuda:0", "7.2.0", accelerator("gfx942:sramecc+:xnack-")) == "gfx942"


@pytest.mark.parametrize(
    ("hip", "name", "there", "said"),
    [
        (None, "gfx942", True, "not built for ROCm"),
        ("7.2.0", "gfx942", False, "sees no AMD GPU"),
        ("7.2.0", "gfx1031", True, "gfx1031, for which no kernel was compiled"),
    ],
)
def test_what_keeps_a_device_from_being_used_is_said(hip, name, there, said) -> None:
    with pytest.raises(RLKernelError, match=said):
        inspect("cuda:0", hip, accelerator(name, there=there))
