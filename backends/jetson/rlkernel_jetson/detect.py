"""Whether this is a Jetson, in two stages: its files, before torch is imported; then its GPU's own properties.

The files decide what has to be decided early (allocator settings are read when torch first allocates). The properties
decide what runs: a container may hide every file, and a board may carry a discrete GPU beside its own (IGX Orin).
Sharing memory with the CPU is not enough to be a Jetson: Grace Hopper and GB10 (DGX Spark) do too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

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
        properties: of the GPU that is meant; None before CUDA may be initialised.
    """
    found = board(root)
    if properties is None:
        return Detected(found, None, found is not None, tuple(_environment(found is not None, environ)))
    arch = f"sm{properties.major}{properties.minor}"
    jetson = bool(properties.is_integrated) and arch in ARCHS
    problems = [*_environment(jetson, environ), *_disagreement(found, arch, properties, jetson=jetson)]
    return Detected(found, arch, jetson, tuple(problems))


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
