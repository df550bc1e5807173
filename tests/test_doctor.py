"""Every finding of the doctor, on machines that are written down instead of found."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from rlkernel import config
from rlkernel.discover import Candidate
from rlkernel.doctor import SEVERITIES, Finding, Machine, diagnose
from rlkernel.doctor.hardware import Gpu, Hardware
from rlkernel.doctor.machine import UNTESTED
from rlkernel.doctor.torchbuild import TorchBuild
from rlkernel_core.decision import Pin
from rlkernel_core.host.board import Board
from rlkernel_core.host.memory import Memory
from rlkernel_core.host.power import Clock, PowerState
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.reasons import Reason

H100 = Gpu("NVIDIA H100", "sm90")
MI300 = Gpu("AMD GPU", "gfx942")
MI350 = Gpu("AMD GPU", "gfx950")
CU128 = TorchBuild("2.9.0+cu128", "12.8", None, ("sm_80", "sm_90", "sm_100", "compute_100"), seen=True, devices=(H100,))
ROCM = TorchBuild("2.9.0+rocm7.0", None, "7.0.5", ("gfx90a", "gfx942"), seen=True, devices=(MI300,))
CPU = TorchBuild("2.9.0+cpu")
NVIDIA = Hardware((H100,), "570.86", "12.8")
AMD = Hardware(amd=(MI300,), amd_device=True, amd_access=True)
NANO = Board("NVIDIA Jetson Orin Nano", "nvidia,tegra234", "p3767-0005", "36.4.3", ("/proc/device-tree",))
ORIN = Gpu(NANO.name, "sm87")
JETSON = Hardware(board=NANO)
JETPACK_7 = Hardware(board=replace(NANO, l4t="39.2.0"))
THOR = Hardware(board=Board("NVIDIA Jetson AGX Thor", "nvidia,tegra264", "p3834-0008", "38.2.0", ()))
GIB = 1 << 30
ROOM = Memory(total=8 * GIB, available=6 * GIB, free=GIB, cached=2 * GIB)
FULL_MEMORY = replace(ROOM, available=2 * GIB, zram=4 * GIB)
MOVING = PowerState("15W", {"VDD_IN": 6.1}, {"gpu": 48.0}, Clock(306.0, 306.0, 1020.0))
ORIN_WHEEL = TorchBuild("2.9.0", "12.6", None, ("sm_87",), seen=True, devices=(ORIN,))
SERVER_WHEEL = TorchBuild("2.9.0+cu130", "13.0", None, ("sm_80", "sm_90", "sm_110", "compute_120"))
IMPL = Impl(op="logprob@1", target="pkg.mod:fn", requires=Requires(device="*"))


def candidate(name: str = "acme", dist: str = "acme", reason: Reason | None = None) -> Candidate:
    manifest = None if reason else Backend(name=name, api=API_VERSION, impls=(IMPL,))
    return Candidate(name, dist, "1.0", manifest, reason)


def machine(**facts) -> Machine:
    facts.setdefault("packages", {"rlkernel": "0.1.0"})
    facts.setdefault("torch", CPU)
    facts.setdefault("python", (3, 12, 1))
    return Machine(system="Linux x86_64", **facts)


def policy(**values):
    return config.merge([("rlkernel.toml", config.validated(values, "test", ("acme", "torch", "cuda")))])


def findings(found: Machine) -> list[Finding]:
    return [f for section in diagnose(found).values() for f in section]


def packages(**versions: str) -> dict[str, str]:
    return {"rlkernel": "0.1.0"} | {name.replace("_", "-"): version for name, version in versions.items()}


BROKEN = Reason("load", "import-error", "raised OSError", "pip install -U acme")
FAILED = Reason("probe", "failed", "self-test of acme: wrong result")
FULL = packages(
    torch="2.9.0", triton="3.5.0", flashinfer_python="0.7.2", rlkernel_cuda="0.1.0", rlkernel_triton="0.1.0"
)
OLD_DRIVER = replace(CU128, seen=False, devices=(), warnings=("CUDA initialization: the driver is too old",))

# (what is wrong, its severity, a machine that has it, a fact that the text names, a command or name in the fix)
CASES = [
    ("python/version", "problem", machine(python=(3, 9, 1)), "3.9.1", "python3.12"),
    ("hardware/none", "note", machine(), "", ""),
    ("hardware/nvidia-driver", "problem", machine(hardware=Hardware(nvidia_problem="mismatch")), "mismatch", "reboot"),
    ("hardware/kfd-access", "problem", machine(hardware=Hardware(amd=(MI300,), amd_device=True)), "kfd", "usermod"),
    ("torch/missing", "problem", machine(torch=None), "", "whl/cpu"),
    ("torch/missing", "problem", machine(torch=None, hardware=NVIDIA), "", "pip install torch"),
    ("torch/missing", "problem", machine(torch=None, hardware=AMD), "", "ROCm"),
    ("torch/missing", "problem", machine(torch=None, hardware=JETSON), "", "jetson-ai-lab.io/jp6"),
    ("torch/missing", "problem", machine(torch=None, hardware=THOR), "", "sbsa/cu130"),
    ("torch/broken", "problem", machine(torch=TorchBuild(error="libc10.so")), "libc10.so", "pip install"),
    ("torch/old", "problem", machine(torch=TorchBuild("2.8.1")), "2.8.1", "install -U torch"),
    ("torch/cpu-build", "problem", machine(hardware=NVIDIA), "NVIDIA H100 (sm90)", "pip uninstall torch"),
    ("torch/cpu-build", "problem", machine(hardware=JETSON), "Orin", "jetson-ai-lab"),
    ("torch/wrong-build", "problem", machine(hardware=AMD, torch=CU128), "CUDA 12.8", "ROCm"),
    ("torch/wrong-build", "problem", machine(hardware=NVIDIA, torch=ROCM), "ROCm 7.0.5", "pip install torch"),
    ("torch/no-device", "problem", machine(hardware=NVIDIA, torch=OLD_DRIVER), "driver", "torch.cuda.init"),
    ("torch/no-device", "problem",
     machine(hardware=replace(NVIDIA, nvidia_cuda="12.4"), torch=replace(OLD_DRIVER, cuda="13.0")),
     "12.4", "whl/cu124"),
    ("torch/no-device", "problem", machine(hardware=NVIDIA, torch=OLD_DRIVER, environ={"CUDA_VISIBLE_DEVICES": ""}),
     "CUDA_VISIBLE_DEVICES=", "unset CUDA_VISIBLE_DEVICES"),
    ("torch/no-code", "problem",
     machine(hardware=JETSON, torch=replace(CU128, devices=(ORIN,), archs=("sm_90", "compute_90"))),
     "sm87", "jetson"),
    ("torch/no-code", "problem", machine(hardware=AMD, torch=replace(ROCM, devices=(Gpu("RX", "gfx1031"),))),
     "gfx1031", "ROCm"),
    ("environment/hsa-override", "warning", machine(environ={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}), "10.3.0", "unset"),
    ("environment/visible-devices", "warning",
     machine(environ={"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}),
     "", ""),
    ("environment/triton-interpret", "warning", machine(environ={"TRITON_INTERPRET": "1"}), "", "unset"),
    ("triton/missing", "warning", machine(hardware=NVIDIA, torch=CU128), "", "rlkernel[triton]"),
    ("triton/twice", "problem", machine(packages=packages(triton="3.5", triton_rocm="3.5")),
     "", "pip uninstall triton triton-rocm"),
    ("triton/version", "warning", machine(packages=packages(triton="3.4.0"), torch_triton="triton==3.5.0"),
     "3.4.0", "pip install 'triton==3.5.0'"),
    ("flashinfer/unrelated", "problem", machine(packages=packages(flashinfer="0.1")), "", "uninstall"),
    ("flashinfer/twice", "problem", machine(packages=packages(flashinfer_python="0.7", amd_flashinfer="0.5")),
     "", "uninstall"),
    ("flashinfer/missing", "note", machine(packages=packages(rlkernel_cuda="0.1.0")), "", "flashinfer-python"),
    ("flashinfer/parts", "problem", machine(packages=packages(flashinfer_python="0.7.2", flashinfer_cubin="0.7.1")),
     "", "pip install flashinfer-cubin==0.7.2"),
    ("torch/missing", "problem", machine(torch=None, hardware=JETPACK_7), "", "TORCH_CUDA_ARCH_LIST=8.7"),
    ("jetson/release", "note", machine(hardware=Hardware(board=replace(NANO, l4t=None))),
     "/etc/nv_tegra_release", "--runtime nvidia"),
    ("jetson/old", "problem", machine(hardware=Hardware(board=replace(NANO, l4t="35.4.1"))), "35.4.1", "JetPack"),
    ("triton/missing", "note", machine(hardware=JETSON, torch=ORIN_WHEEL), "", "--no-deps"),
    ("rlkernel/backend-missing", "warning", machine(hardware=JETSON, torch=ORIN_WHEEL),
     "jetson", "pip install 'rlkernel[jetson]'"),
    ("jetson/hidden", "note", machine(torch=ORIN_WHEEL), "sm87", "--runtime nvidia"),
    ("jetson/wheel", "problem", machine(hardware=JETSON, torch=SERVER_WHEEL), "sm87", "TORCH_CUDA_ARCH_LIST=8.7"),
    ("jetson/nvml", "note", machine(hardware=JETSON), "nvidia-smi", "rlkernel memory"),
    ("jetson/nvml", "note", machine(hardware=replace(JETSON, nvidia_tool=True)), "nvidia-smi", "rlkernel memory"),
    ("jetson/clocks", "note", machine(hardware=replace(JETSON, power=MOVING)), "306 MHz", "sudo jetson_clocks"),
    ("jetson/memory", "warning", machine(hardware=replace(JETSON, memory=FULL_MEMORY)),
     "819.2 MiB", "multi-user.target"),
    ("jetson/zram", "note", machine(hardware=replace(JETSON, memory=FULL_MEMORY)), "4.00 GiB", "nvzramconfig"),
    ("jetson/allocator", "problem",
     machine(hardware=JETSON, environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
     "expandable_segments:True", "unset PYTORCH_CUDA_ALLOC_CONF"),
    ("jetson/allocator", "warning", machine(hardware=JETSON, environ={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
     "cudaMallocAsync", "unset PYTORCH_ALLOC_CONF"),
    ("rocm/mixed", "warning", machine(hardware=Hardware(amd=(MI300, MI350))), "gfx942, gfx950", "HIP_VISIBLE_DEVICES"),
    ("rocm/triton", "problem",
     machine(torch=ROCM, packages=packages(triton="3.5.0"), torch_triton="triton-rocm==3.5.0"),
     "triton-rocm==3.5.0", "rlkernel[rocm]"),
    ("rocm/aiter-torch", "warning",
     machine(torch=replace(ROCM, version="2.13.0+rocm7.2"), packages=packages(amd_aiter="0.1.20")),
     "2.13.0", "2.13"),
    ("rocm/fp8-flavour", "note", machine(hardware=AMD), "FNUZ", "to_fnuz"),
    ("aiter/unrelated", "problem", machine(packages=packages(aiter="0.13.20191203")), "", "pip uninstall aiter"),
    ("aiter/old", "problem", machine(packages=packages(amd_aiter="0.1.7.post2.dev18")), "0.1.12", "ROCm/aiter"),
    ("aiter/missing", "note", machine(hardware=AMD, torch=ROCM, packages=packages(rlkernel_rocm="0.1.0")),
     "", "ROCm/aiter"),
    ("rlkernel/not-installed", "problem", machine(packages={"torch": "2.9"}), "", "pip install"),
    ("rlkernel/versions", "problem", machine(packages=packages(rlkernel_triton="0.2.0")),
     "rlkernel 0.1.0 and rlkernel-triton 0.2.0", "pip install rlkernel==0.2.0 rlkernel-triton==0.2.0"),
    ("rlkernel/backend-missing", "warning", machine(hardware=NVIDIA, torch=CU128),
     "cuda", "pip install 'rlkernel[cuda]'"),
    ("rlkernel/backend-missing", "warning", machine(hardware=AMD, torch=ROCM), "rocm", "pip install 'rlkernel[rocm]'"),
    ("rlkernel/backend-missing", "warning", machine(hardware=AMD, torch=ROCM),
     "triton", "pip install rlkernel-triton"),  # without the extra, whose torch is for CUDA
    ("backend/broken", "note", machine(candidates=(candidate(reason=BROKEN),)), "OSError", "pip install -U acme"),
    ("backend/broken", "problem",
     machine(candidates=(candidate(reason=BROKEN),), policy=policy(order=["acme", "auto"])),
     "load/import-error", "pip install -U acme"),
    ("backend/broken", "problem", machine(candidates=(candidate("triton", "rlkernel-triton", BROKEN),)),
     "triton", "pip install"),
    ("config/malformed", "problem", machine(config_problems=("x.toml: unknown key",)), "unknown key", ""),
    ("config/not-installed", "warning", machine(policy=policy(order=["cuda", "auto"])), "cuda", "rlkernel[cuda]"),
    ("config/not-installed", "warning", machine(policy=policy(ops={"logprob": {"order": ["acme"]}})), "acme", ""),
    ("lock/missing", "problem",
     machine(policy=policy(lock="r.lock"), locked={"logprob@1": frozenset({Pin("a:b", "acme 0.9")})}),
     "a:b [acme 0.9]", "rlkernel lock"),
    ("cache/read-only", "warning", machine(cache="/c", cache_problem="Read-only file system"),
     "Read-only file system", "XDG_CACHE"),
    ("probe/failed", "problem", machine(self_tests={("acme", "cpu"): FAILED}), "wrong result", "doctor --probe"),
    ("probe/untested", "note", machine(self_tests={("acme", "cpu"): UNTESTED}), "", "doctor --probe"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "severity", "found", "text", "fix"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_what_is_wrong_is_found_with_its_remedy(code, severity, found, text, fix) -> None:
    matching = [f for f in findings(found) if f.code == code and text in f.text]
    assert matching, findings(found)
    assert {f.severity for f in matching} == {severity}
    assert all(fix in f.fix for f in matching)


def test_every_finding_that_is_not_ok_says_what_it_costs_and_most_what_fixes_it() -> None:
    for _, _, found, _, _ in CASES:
        for finding in findings(found):
            assert finding.severity in SEVERITIES
            assert (finding.cost != "") == (finding.severity != "ok")
            assert finding.fix or finding.severity in {"ok", "note"}


@pytest.mark.parametrize(
    "found",
    [
        machine(hardware=NVIDIA, torch=CU128, packages=FULL, torch_triton="triton==3.5.0", policy=policy()),
        machine(candidates=(candidate(),), policy=policy(order=["acme"]), self_tests={("acme", "cpu"): None}),
        machine(
            policy=policy(lock="r"),
            candidates=(candidate(),),
            locked={"l@1": frozenset({Pin("pkg.mod:fn", "acme 1.0")})},
        ),
        machine(
            hardware=AMD,
            torch=ROCM,
            packages=packages(rlkernel_rocm="0.1.0", rlkernel_triton="0.1.0", triton_rocm="3.5", amd_aiter="0.1.20"),
        ),
        machine(
            hardware=replace(JETSON, memory=ROOM, power=replace(MOVING, gpu=Clock(1020.0, 1020.0, 1020.0))),
            torch=ORIN_WHEEL,
            packages=packages(rlkernel_jetson="0.1.0", rlkernel_triton="0.1.0", triton="3.4.0"),
        ),
    ],
)
def test_a_machine_in_order_has_neither_problem_nor_warning(found) -> None:
    assert [f for f in findings(found) if f.severity in {"problem", "warning"}] == []


def test_a_board_in_order_is_told_with_all_that_is_known_of_it() -> None:
    board = replace(JETSON, memory=ROOM, power=replace(MOVING, gpu=Clock(1020.0, 1020.0, 1020.0)))
    told = " ".join(f.text for f in findings(machine(hardware=board, torch=ORIN_WHEEL)) if f.severity == "ok")
    known = (
        "Jetson Orin Nano", "sm87", "8 multiprocessors", "102.4 GB/s", "36.4.3", "JetPack 6.2", "CUDA 12.6", "sm_87",
        "15W", "6.1 W", "48 °C", "1020 MHz", "6.00 GiB", "4.80 GiB",
    )  # fmt: skip
    assert [fact for fact in known if fact not in told] == []


def test_every_finding_of_the_source_is_among_the_cases() -> None:
    folder = Path(__file__).parents[1] / "registry" / "rlkernel" / "doctor"
    said = {
        node.args[0].value
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"note", "warning", "problem"}
    }
    assert said == {code for code, *_ in CASES}
