"""What the manifests say, and what importing them costs."""

import subprocess
import sys
import tomllib
from pathlib import Path

from rlkernel_triton import backend
from rlkernel_triton.claims import ASKED_FOR, CLAIMS
from rlkernel_triton.interpreted import backend as interpreted

HERE = Path(__file__).parents[1]


def test_the_entry_point_names_the_backend() -> None:
    points = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["entry-points"]["rlkernel.backends"]
    assert points == {backend.name: "rlkernel_triton:backend", "aot": "rlkernel_triton.aot.backend:backend"}


def test_the_interpreter_offers_the_same_kernels_on_the_cpu() -> None:
    kernels = [claim.target for claim in (*CLAIMS.values(), *ASKED_FOR.values()) if claim.kernels]
    assert kernels == [i.target for i in interpreted.impls]
    assert [claim.target for claim in (*CLAIMS.values(), *ASKED_FOR.values())] == [i.target for i in backend.impls]
    assert {i.requires.device for i in backend.impls} <= {"cuda"}
    assert {i.requires.device for i in interpreted.impls} <= {"cpu"}


def test_importing_claims_loads_neither_torch_nor_triton() -> None:
    code = "import sys, rlkernel_triton.interpreted; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE)
    assert done.stdout.strip() == "set()"


def test_a_launch_on_a_cpu_without_the_interpreter_names_the_remedy() -> None:
    code = (
        "import torch\n"
        "from rlkernel_triton.launchers import on_device_of\n"
        "from rlkernel_core.errors import RLKernelError\n"
        "try:\n"
        "    on_device_of(torch.zeros(1))\n"
        "except RLKernelError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE)
    assert "TRITON_INTERPRET=1" in done.stdout
