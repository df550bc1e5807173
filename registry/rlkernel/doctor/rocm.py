"""What goes wrong on machines with AMD GPUs: kinds that are mixed, builds that do not fit, flavours of fp8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from packaging.version import Version

from rlkernel.doctor.finding import Finding, note, problem, warning
from rlkernel.doctor.machine import Machine

# Architectures whose matrix instructions take fp8 with FNUZ codes only (AMD's CDNA3 ISA).
_FNUZ: Final = ("gfx940", "gfx941", "gfx942")
_AITER_BELOW: Final = "2.13"  # torch; release wheels of amd-aiter are built for older ones


def mixed(machine: Machine) -> Iterator[Finding]:
    """All visible GPUs are of one architecture."""
    archs = list(dict.fromkeys(g.arch for g in machine.hardware.amd if g.arch))
    if len(archs) > 1 and not machine.environ.get("HIP_VISIBLE_DEVICES"):
        text = f"AMD GPUs of several architectures are here: {', '.join(archs)}"
        cost = "ranks may run different kernels; tools that ask for the first GPU compile for the wrong one"
        yield warning("rocm/mixed", text, cost, "HIP_VISIBLE_DEVICES with the positions of one kind")


def triton_build(machine: Machine) -> Iterator[Finding]:
    """A ROCm build of torch has the Triton that it was built with."""
    torch, wanted = machine.torch, machine.torch_triton or ""
    if torch is None or not torch.hip or not wanted.startswith(("triton-rocm", "pytorch-triton-rocm")):
        return
    name = wanted.partition("=")[0]
    if machine.has("triton") and not machine.has(name):
        text = f"PyPI's triton {machine.packages['triton']} is installed where torch {torch.version} asks for {wanted}"
        fix = f"pip uninstall triton, then reinstall torch, which brings {name}, and pip install 'rlkernel[rocm]'"
        yield problem("rocm/triton", text, "kernels may not compile for this GPU", fix)


def aiter_torch(machine: Machine) -> Iterator[Finding]:
    """AITER and torch are of versions that were built for each other."""
    torch = machine.torch
    if torch is None or not torch.hip or not machine.has("amd-aiter"):
        return
    if Version(torch.version) >= Version(_AITER_BELOW):
        text = f"amd-aiter {machine.packages['amd-aiter']} beside torch {torch.version}; its wheels are for older torch"
        cost = "its compiled modules may not load"
        yield warning("rocm/aiter-torch", text, cost, f"a torch older than {_AITER_BELOW}, or no AITER")


def fp8(machine: Machine) -> Iterator[Finding]:
    """Which codes 8-bit floats have here."""
    if any(g.arch in _FNUZ for g in machine.hardware.amd):
        text = (
            "fp8 on gfx942 is FNUZ; weights with OCP codes (e4m3fn, as checkpoints have them) mean half as much there"
        )
        cost = "products off by a factor of 4 where both operands are taken for the other kind"
        yield note("rocm/fp8-flavour", text, cost, "rlkernel_rocm.fp8.to_fnuz converts weights exactly")


CHECKS: Final[tuple[Callable[[Machine], Iterator[Finding]], ...]] = (mixed, triton_build, aiter_torch, fp8)
