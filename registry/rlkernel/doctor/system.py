"""Python, accelerators, drivers, and whether the installed torch fits them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from packaging.version import Version

from rlkernel.doctor import jetson
from rlkernel.doctor.finding import Finding, note, ok, problem, warning
from rlkernel.doctor.hardware import Gpu, Hardware
from rlkernel.doctor.machine import Machine

_PYTHON: Final = ((3, 11), (3, 14))  # from, below: requires-python of the distribution
_TORCH: Final = "2.9"  # the oldest that is tested
_ON_CPU: Final = "every operator runs on the CPU"
# Where the build of torch for each kind of machine comes from.
_INSTALL: Final = {
    "cpu": "pip install torch --index-url https://download.pytorch.org/whl/cpu",
    "nvidia": "pip install torch",
    "amd": "install the ROCm build: https://pytorch.org/get-started/locally",
}
_HIDING: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def install_line(hardware: Hardware) -> str:
    """How to install the torch that fits."""
    if hardware.board is not None:
        return jetson.install_line(hardware.board)
    return _INSTALL["nvidia" if hardware.nvidia else "amd" if hardware.amd else "cpu"]


def python(machine: Machine) -> Iterator[Finding]:
    """The interpreter is one of those that are tested."""
    said = f"Python {'.'.join(map(str, machine.python))}, {machine.system}"
    if _PYTHON[0] <= machine.python[:2] < _PYTHON[1]:
        yield ok("python/version", said)
    else:
        yield problem("python/version", said, "rlkernel is made for 3.11 to 3.13", "python3.12 -m venv .venv")


def accelerators(machine: Machine) -> Iterator[Finding]:
    """What is in the machine, torch or not."""
    found = machine.hardware
    for gpu in found.gpus:
        words = [gpu.name, gpu.arch or "unknown architecture"]
        if gpu in found.nvidia and found.nvidia_driver:
            words.append(f"driver {found.nvidia_driver}")
            words += [f"serves CUDA up to {found.nvidia_cuda}"] if found.nvidia_cuda else []
        if gpu == found.jetson:
            words.append("memory shared with the CPU")
        yield ok("hardware/gpu", ", ".join(words))
    if found.nvidia_problem:
        yield problem(
            "hardware/nvidia-driver",
            f"an NVIDIA driver is installed and does not answer: {found.nvidia_problem}",
            _ON_CPU,
            "reboot after a driver update; in a container, start it with --gpus all",
        )
    if found.amd_device and not found.amd_access:
        yield problem(
            "hardware/kfd-access",
            "/dev/kfd is there and this user may not open it",
            _ON_CPU,
            "sudo usermod -aG render,video $USER and log in again; in a container, --device=/dev/kfd --device=/dev/dri",
        )
    if not found.gpus and not found.nvidia_problem:
        yield note("hardware/none", "no GPU found (nvidia-smi, /dev/kfd, device tree)", _ON_CPU)


def torch_build(machine: Machine) -> Iterator[Finding]:
    """Torch is there, imports, is new enough and is built for what is in the machine."""
    torch, hardware = machine.torch, machine.hardware
    fix = install_line(hardware)
    if torch is None:
        yield problem("torch/missing", "torch is not installed", "no operator can run", fix)
    elif torch.error:
        yield problem("torch/broken", f"torch cannot be imported: {torch.error}", "no operator can run", fix)
    elif Version(torch.version) < Version(_TORCH):
        text = f"torch {torch.version} is older than {_TORCH}"
        yield problem(
            "torch/old", text, "untested: operators may fail", fix.replace("install torch", "install -U torch")
        )
    elif hardware.gpus and torch.cuda is None and torch.hip is None:
        text = f"torch {torch.version} is a CPU build, and here is {_named(hardware)}"
        yield problem("torch/cpu-build", text, _ON_CPU, f"pip uninstall torch, then {fix}")
    elif (torch.hip and hardware.gpus and not hardware.amd) or (torch.cuda and hardware.amd and not _nvidia(hardware)):
        text = f"torch {torch.version} is built for {torch.kind}, and here is {_named(hardware)}"
        yield problem("torch/wrong-build", text, _ON_CPU, f"pip uninstall torch, then {fix}")
    else:
        yield ok("torch/version", f"torch {torch.version}, built for {torch.kind}")


def torch_devices(machine: Machine) -> Iterator[Finding]:
    """Torch sees the devices that are there."""
    torch, hardware = machine.torch, machine.hardware
    if torch is None or torch.error or not (torch.cuda or torch.hip) or not hardware.gpus:
        return
    if torch.seen:
        names = ", ".join(f"{d.name} ({d.arch})" for d in torch.devices)
        yield ok("torch/devices", f"torch sees {len(torch.devices)} device(s): {names}")
        return
    said = f": {torch.warnings[0]}" if torch.warnings else ""
    fix = "python -c 'import torch; torch.cuda.init()' prints the reason"
    if torch.cuda and hardware.nvidia_cuda and _major(torch.cuda) > _major(hardware.nvidia_cuda):
        said = f": it is built for CUDA {torch.cuda}, the driver serves {hardware.nvidia_cuda}"
        index = hardware.nvidia_cuda.replace(".", "")
        fix = f"update the driver, or pip install torch --index-url https://download.pytorch.org/whl/cu{index}"
    elif hidden := _hidden(machine):
        said, fix = f": {hidden} hides them", f"unset {hidden.partition('=')[0]}"
    yield problem("torch/no-device", f"torch sees no device{said}", _ON_CPU, fix)


def architectures(machine: Machine) -> Iterator[Finding]:
    """The build of torch has code for the devices."""
    torch = machine.torch
    if torch is None or torch.error:
        return
    for gpu in dict.fromkeys(torch.devices):
        if gpu.arch is not None and torch.covers(gpu.arch) is False:
            text = f"torch {torch.version} has no code for {gpu.arch} ({gpu.name}); it has {', '.join(torch.archs)}"
            cost = "its kernels fail at their first launch"
            yield problem("torch/no-code", text, cost, install_line(machine.hardware))


def environment(machine: Machine) -> Iterator[Finding]:
    """Variables that change what the hardware looks like."""
    environ = machine.environ
    if "HSA_OVERRIDE_GFX_VERSION" in environ:
        text = f"HSA_OVERRIDE_GFX_VERSION={environ['HSA_OVERRIDE_GFX_VERSION']} makes the GPU report another one"
        yield warning(
            "environment/hsa-override", text, "kernels for the wrong architecture", "unset HSA_OVERRIDE_GFX_VERSION"
        )
    visible = {environ[name] for name in _HIDING if environ.get(name)}
    if len(visible) > 1:
        said = ", ".join(f"{name}={environ[name]}" for name in _HIDING if environ.get(name))
        yield warning(
            "environment/visible-devices", f"{said} contradict each other", "not the GPUs you mean", "set one"
        )
    if environ.get("TRITON_INTERPRET") == "1":
        text = "TRITON_INTERPRET=1 runs Triton kernels in the Python interpreter"
        yield warning("environment/triton-interpret", text, "thousands of times slower", "unset TRITON_INTERPRET")


def _named(hardware: Hardware) -> str:
    gpu: Gpu = hardware.gpus[0]
    return f"{gpu.name} ({gpu.arch})" if gpu.arch else gpu.name


def _nvidia(hardware: Hardware) -> bool:
    return bool(hardware.nvidia) or hardware.board is not None


def _hidden(machine: Machine) -> str | None:
    """The variable that hides every device."""
    return next((f"{n}={machine.environ[n]}" for n in _HIDING if machine.environ.get(n) in {"", "-1"}), None)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


CHECKS: Final[tuple[Callable[[Machine], Iterator[Finding]], ...]] = (
    python,
    accelerators,
    torch_build,
    torch_devices,
    architectures,
    environment,
)
