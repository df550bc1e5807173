"""Triton, FlashInfer, AITER and our own distributions: present, of one version, and what their names say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

from rlkernel.discover import FIRST_PARTY
from rlkernel.doctor.finding import Finding, note, ok, problem, warning
from rlkernel.doctor.machine import Machine

# Distributions that write the import package `triton`; a second one overwrites the first one's files.
_TRITONS: Final = ("triton", "triton-rocm", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
# Distributions that write the import package `flashinfer`, beside the one that is meant.
_OTHER_FLASHINFERS: Final = ("flashinfer", "amd-flashinfer")
_AITER: Final = "0.1.12"  # older ones reseed torch's generator in their samplers; PyPI's only wheel is one of them
# AMD's wheels lie beside its releases; this one is for ROCm 7.2 and Python 3.12, other names say what they are for.
AITER_INSTALL: Final = (
    "pip install 'amd-aiter==0.1.20.post1+rocm7.2.manylinux.2.28' "
    "--find-links https://github.com/ROCm/aiter/releases/expanded_assets/v0.1.20.post1"
)
_PLAIN: Final = "the reference in plain torch serves: right, slow, and it holds whole [N, V] tensors"


def triton(machine: Machine) -> Iterator[Finding]:
    """One Triton, the one torch was built with."""
    found = [name for name in _TRITONS if machine.has(name)]
    if len(found) > 1:
        text = f"{' and '.join(found)} are installed and write into the same folder"
        fix = f"pip uninstall {' '.join(found)}, then reinstall torch"
        yield problem("triton/twice", text, "files of two versions, mixed", fix)
    elif not found:
        if machine.hardware.board is not None:
            text, cost = (
                "Triton is not installed; kernels from a bundle need none",
                "other operators run in plain torch",
            )
            yield note("triton/missing", text, cost, "a Triton built for this torch, with --no-deps (docs/jetson.md)")
        elif machine.torch is not None and machine.torch.devices:
            text = "Triton is not installed"
            yield warning(
                "triton/missing", text, _PLAIN, f"{FIRST_PARTY['triton'].install}; torch for ROCm brings its own"
            )
    else:
        version = machine.packages[found[0]]
        wanted = Requirement(machine.torch_triton) if machine.torch_triton else None
        if wanted is not None and wanted.name == found[0] and not wanted.specifier.contains(version, prereleases=True):
            text = f"{found[0]} {version} is installed, torch asks for {wanted}"
            yield warning("triton/version", text, "torch.compile may fail", f"pip install '{wanted}'")
        else:
            yield ok("triton/version", f"{found[0]} {version}")


def flashinfer(machine: Machine) -> Iterator[Finding]:
    """flashinfer-python is what is meant; its parts are of one version."""
    others = [name for name in _OTHER_FLASHINFERS if machine.has(name)]
    version = machine.packages.get("flashinfer-python")
    if "flashinfer" in others:
        text = f"the distribution flashinfer {machine.packages['flashinfer']} is not FlashInfer, flashinfer-python is"
        fix = "pip uninstall flashinfer, then pip install 'rlkernel[cuda]'"
        yield problem("flashinfer/unrelated", text, "imports find the wrong package", fix)
    if version is not None and "amd-flashinfer" in others:
        text = "flashinfer-python (CUDA) and amd-flashinfer (ROCm) write into the same folder"
        yield problem(
            "flashinfer/twice", text, "files of two packages, mixed", "uninstall both, install the one you need"
        )
    elif version is not None:
        yield ok("flashinfer/version", f"flashinfer-python {version}")
    elif machine.has("rlkernel-cuda"):
        text = "rlkernel-cuda is installed without flashinfer-python"
        cost = "nothing, but where an order names the backend flashinfer, or for its peer in rlkernel bench"
        yield note("flashinfer/missing", text, cost, "pip install 'flashinfer-python>=0.7.2,<0.8'")
    for part in ("flashinfer-cubin", "flashinfer-jit-cache"):
        have = machine.packages.get(part)
        if version is not None and have is not None and have.partition("+")[0] != version:
            text = f"{part} {have} and flashinfer-python {version} disagree"
            yield problem("flashinfer/parts", text, "importing flashinfer raises", f"pip install {part}=={version}")


def amd_aiter(machine: Machine) -> Iterator[Finding]:
    """AMD's kernels are amd-aiter; aiter 0.13 on PyPI is an asyncio package of 2019."""
    other, ours = machine.packages.get("aiter"), machine.packages.get("amd-aiter")
    if other is not None and other.startswith("0.13."):
        text = f"the distribution aiter {other} is an unrelated asyncio package; AMD's kernels are amd-aiter"
        yield problem("aiter/unrelated", text, "imports find the wrong package", "pip uninstall aiter")
    version = ours or (other if other is not None and not other.startswith("0.13.") else None)
    if version is not None and Version(version) < Version(_AITER):
        text = f"amd-aiter {version} is older than {_AITER}"
        cost = "its samplers reseed torch's generator: random numbers repeat"
        yield problem("aiter/old", text, cost, AITER_INSTALL)
    elif version is not None:
        yield ok("aiter/version", f"amd-aiter {version}")
    elif machine.has("rlkernel-rocm") and machine.hardware.amd:
        text = "AITER is not installed; it is optional"
        yield note("aiter/missing", text, "Triton kernels serve instead", AITER_INSTALL)


def ours(machine: Machine) -> Iterator[Finding]:
    """Our distributions agree in version, and those made for this hardware are there."""
    dists = sorted({known.dist for known in FIRST_PARTY.values()})
    have = {dist: machine.packages[dist] for dist in dists if machine.has(dist)}
    if "rlkernel" not in have:
        text = "rlkernel is imported from a folder and is not installed"
        fix = "pip install -e . in its clone, or pip install rlkernel"
        yield problem("rlkernel/not-installed", text, "no backend is found: no operator can run", fix)
    elif len(set(have.values())) > 1:
        text = " and ".join(f"{dist} {version}" for dist, version in have.items()) + " disagree"
        newest = max(have.values(), key=Version)
        fix = "pip install " + " ".join(f"{dist}=={newest}" for dist in have)
        yield problem("rlkernel/versions", text, "manifests and operators may not fit together", fix)
    else:
        yield ok("rlkernel/versions", ", ".join(f"{dist} {version}" for dist, version in have.items()))
    for gpu in dict.fromkeys(machine.hardware.gpus):
        for name, known in FIRST_PARTY.items():
            if gpu.arch is not None and known.made_for("cuda", gpu.arch) and not machine.has(known.dist):
                text = f"the backend {name} is made for {gpu.arch} and is not installed"
                fix = known.install_on(gpu.arch)
                yield warning("rlkernel/backend-missing", text, _PLAIN, fix)


CHECKS: Final[tuple[Callable[[Machine], Iterator[Finding]], ...]] = (triton, flashinfer, amd_aiter, ours)
