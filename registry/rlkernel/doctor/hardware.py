"""Which accelerators are in this machine, from the driver's own files and tools; torch is not asked.

NVIDIA: `nvidia-smi` and /dev/nvidia0. AMD: /dev/kfd and the kernel driver's topology in /sys/class/kfd. Jetson: see
rlkernel_core.host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlkernel_core.host.board import Board, board
from rlkernel_core.host.memory import Memory, memory
from rlkernel_core.host.power import PowerState, nvpmodel, power

_NVIDIA_SMI_TIMEOUT_S: Final = 20.0  # it initializes the driver where no process holds it
_QUERY: Final = "--query-gpu=name,compute_cap,driver_version"


@dataclass(frozen=True)
class Gpu:
    """One accelerator."""

    name: str
    arch: str | None = None  # "sm90", "gfx942"


@dataclass(frozen=True)
class Hardware:
    """What was found without torch."""

    nvidia: tuple[Gpu, ...] = ()
    nvidia_driver: str | None = None  # "570.86.15"
    nvidia_cuda: str | None = None  # newest CUDA the driver serves: "12.8"
    nvidia_problem: str | None = None  # what the driver's tool said instead of an answer
    amd: tuple[Gpu, ...] = ()
    amd_device: bool = False  # /dev/kfd exists
    amd_access: bool = False  # and this user may open it
    nvidia_tool: bool = False  # nvidia-smi is installed
    board: Board | None = None  # a Jetson, and on it:
    memory: Memory | None = None
    power: PowerState | None = None

    @property
    def jetson(self) -> Gpu | None:
        """The GPU of a Jetson."""
        return Gpu(self.board.name, self.board.kind.arch) if self.board else None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All accelerators."""
        jetson = self.jetson
        return (*((jetson,) if jetson else self.nvidia), *self.amd)


def look(root: Path = Path("/"), smi: Callable[[], tuple[str, str] | None] | None = None) -> Hardware:
    """Look for accelerators.

    Args:
        root: where the file system starts.
        smi: answers of nvidia-smi (see `nvidia_smi`), None where it is not installed.
    """
    jetson = board(root)
    said = (smi or nvidia_smi)()
    gpus, driver, cuda, wrong = _nvidia(said, device=(root / "dev/nvidia0").exists())
    if jetson is not None:  # its nvidia-smi, where there is one, leaves most fields empty
        gpus, wrong = (), None
    kfd = root / "dev/kfd"
    return Hardware(
        gpus,
        driver,
        cuda,
        wrong,
        _amd(root),
        kfd.exists(),
        os.access(kfd, os.R_OK | os.W_OK),
        nvidia_tool=said is not None,
        board=jetson,
        memory=memory(root) if jetson else None,
        power=power(root, nvpmodel) if jetson else None,
    )


def nvidia_smi() -> tuple[str, str] | None:
    """Answers of nvidia-smi: the table of GPUs as CSV, and its header page; None where it is not installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    answers = []
    for arguments in ([_QUERY, "--format=csv,noheader"], []):
        try:
            done = subprocess.run(  # noqa: S603 the driver's own tool
                [tool, *arguments], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"failed: {error}", ""
        answers.append(done.stdout if done.returncode == 0 else f"failed: {(done.stdout + done.stderr).strip()}")
    return answers[0], answers[1]


def _nvidia(
    said: tuple[str, str] | None, *, device: bool
) -> tuple[tuple[Gpu, ...], str | None, str | None, str | None]:
    """GPUs, driver, newest CUDA, and what is wrong."""
    if said is None:
        return (), None, None, "/dev/nvidia0 is there and nvidia-smi is not" if device else None
    table, header = said
    if table.startswith("failed:"):
        return (), None, None, table.removeprefix("failed:").strip().partition("\n")[0] or "nvidia-smi failed"
    gpus, driver = [], None
    for line in table.strip().splitlines():
        name, capability, driver = (field.strip() for field in line.rsplit(",", 2))
        digits = re.fullmatch(r"(\d+)\.(\d+)", capability)
        gpus.append(Gpu(name, f"sm{digits[1]}{digits[2]}" if digits else None))
    cuda = re.search(r"CUDA(?: UMD)? Version:\s*(\d+\.\d+)", header)
    return tuple(gpus), driver, cuda[1] if cuda else None, None


def _amd(root: Path) -> tuple[Gpu, ...]:
    """GPUs of the kernel driver's topology; nodes without SIMD units are CPUs."""
    found = []
    for file in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError:  # another user's partition of the card
            continue
        properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
        version = int(properties.get("gfx_target_version", "0"))
        if version:
            found.append(Gpu("AMD GPU", gfx(version)))
    return tuple(found)


def gfx(version: int) -> str:
    """`gfx_target_version` in the LLVM spelling: 90402 -> gfx942, 90010 -> gfx90a, 110001 -> gfx1101."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
