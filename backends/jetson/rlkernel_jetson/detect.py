"""Whether this is a Jetson, in two stages: its files, before torch is imported; then its GPU's own properties.

The files decide what has to be decided early (allocator settings are read when torch first allocates). The properties
decide what runs: a container may hide every file, and a board may carry a discrete GPU beside its own (IGX Orin).
Sharing memory with the CPU is not enough to be a Jetson: Grace Hopper and GB10 (DGX Spark) do too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from rlkernel_core.errors import RLKernelError
from rlkernel_core.host.allocator import faults
from rlkernel_core.host.board import Board, board
from rlkernel_core.host.boards import ALIASES, CHIPS

ARCHS: Final = frozenset({*(chip.arch for chip in CHIPS.values()), *ALIASES})


class Properties(Protocol):
    """What is read of `torch.cuda.get_device_properties`."""

    name: str
    major: int
    minor: int
    is_integrated: int


class Problem(NamedTuple):
    """What keeps kernels from running, or makes a device seem what it is not."""

    code: str  # stable: "allocator"
    text: str
    fix: str


@dataclass(frozen=True)
class Detected:
    """What the two stages found."""

    board: Board | None  # by the files
    arch: str | None  # of the GPU, once it has been asked: "sm87"
    jetson: bool  # by the GPU where it has been asked, else by the files
    problems: tuple[Problem, ...] = ()


def detect(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None, properties: Properties | None = None
) -> Detected:
    """Look at a machine.

    Args:
        root: where its file system starts.
        environ: its environment; empty unless given.
        properties: of the GPU that is meant; None before CUDA may be initialized.
    """
    found = board(root)
    if properties is None:
        return Detected(found, None, found is not None, tuple(_environment(found is not None, environ)))
    arch = f"sm{properties.major}{properties.minor}"
    jetson = bool(properties.is_integrated) and arch in ARCHS
    problems = [*_environment(jetson, environ), *_disagreement(found, arch, properties, jetson=jetson)]
    return Detected(found, arch, jetson, tuple(problems))


def inspect(device: str, accelerator: Any, root: Path = Path("/")) -> Detected:
    """What a device is, before anything is run on it.

    Args:
        device: torch device string.
        accelerator: `torch.cuda`.
        root: where the file system starts.

    Raises:
        RLKernelError: torch sees no GPU, this one is no Jetson's, or a setting makes its first allocation fail.
    """
    if not accelerator.is_available():
        named = detect(root).board
        here = f"the files name {named.name}: " if named else ""
        raise RLKernelError(f"{here}torch sees no GPU; rlkernel doctor says whether its build has code for it")
    found = detect(root, os.environ, accelerator.get_device_properties(int(device.partition(":")[2] or 0)))
    fatal = [p for p in found.problems if p.code != "allocator-risk"]
    if fatal:
        raise RLKernelError("; ".join(f"{p.text}. {p.fix}" for p in fatal))
    if not found.jetson:
        raise RLKernelError(f"{device} is {found.arch}, no GPU of a Jetson: another backend serves it")
    return found


def _environment(jetson: bool, environ: Mapping[str, str] | None) -> list[Problem]:
    """Allocator settings that fail there."""
    return [
        Problem("allocator" if fault.fatal else "allocator-risk", f"{fault.setting}: {fault.why}", fault.fix)
        for fault in (faults(environ or {}) if jetson else ())
    ]


def _disagreement(found: Board | None, arch: str, properties: Properties, *, jetson: bool) -> list[Problem]:
    """What files and GPU say of each other."""
    if not jetson and arch in ARCHS:
        text = f"{properties.name} is {arch} and says that it has memory of its own: no Jetson known does"
        return [
            Problem("not-integrated", text, "order = ['triton', 'auto'] in rlkernel.toml runs the portable kernels")
        ]
    if jetson and found is not None and found.kind.arch != ALIASES.get(arch, arch):
        text = f"the files name {found.name} ({found.kind.arch}), the GPU is {properties.name} ({arch})"
        return [Problem("another-board", text, "mount this board's own /sys and /proc in the container")]
    if not jetson and found is not None:
        text = f"{properties.name} ({arch}) is a GPU beside that of {found.name}"
        return [Problem("another-gpu", text, "CUDA_VISIBLE_DEVICES with the position of the board's own GPU")]
    return []
