"""Whether this machine is a Jetson, from its files alone: before torch is imported, where allocator settings count.

A Jetson's device tree names its chip. Containers hide the device tree (it lies in /sys/firmware, which Docker masks)
but not /sys/devices/soc0, where the kernel's fuse driver names family and chip number. /etc/nv_tegra_release names the
release, and is missing on NixOS and in most containers: a board is a board without it. Grace Hopper and GB10 (DGX
Spark) share memory with their CPU too and are not Jetson: they boot by ACPI and have neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlkernel_core.host.boards import CHIPS, MODULES, Chip, Module, Release, released

_TREES: Final = ("proc/device-tree", "sys/firmware/devicetree/base")
_SOCS: Final = "sys/devices/soc*"  # firmware may list the chip a second time, under a number of its own
_RELEASE: Final = "etc/nv_tegra_release"
_MODULE: Final = re.compile(r"p\d{4}-\d{4}")


@dataclass(frozen=True)
class Board:
    """A Jetson board."""

    name: str  # as its firmware names it
    chip: str  # key of CHIPS
    module: str | None  # key of MODULES; None where the part number is hidden or unknown
    l4t: str | None  # release of Jetson Linux: "36.4.3"; None where no file says it
    evidence: tuple[str, ...]  # the files that told

    @property
    def kind(self) -> Chip:
        """The chip."""
        return CHIPS[self.chip]

    @property
    def sold_as(self) -> Module | None:
        """The module, where its part number is known."""
        return MODULES.get(self.module) if self.module else None

    @property
    def release(self) -> Release | None:
        """JetPack and CUDA of its release."""
        return released(self.l4t)


def board(root: Path = Path("/")) -> Board | None:
    """The Jetson board that a file system belongs to; None on anything else.

    Args:
        root: where the file system starts.
    """
    tree = next((root / t for t in _TREES if read(root / t / "compatible")), None)
    names = read(tree / "compatible").split("\0") if tree else []
    chip, place, model = next((name for name in names if name in CHIPS), None), tree, "model"
    if chip is None:
        (chip, place), model = _soc(root), "machine"
    if chip is None or place is None:
        return None
    l4t = release_of(root)
    evidence = (place, *([root / _RELEASE] if l4t else []))
    told = tuple(f"/{path.relative_to(root)}" for path in evidence)
    return Board(read(place / model) or CHIPS[chip].family, chip, _part(names), l4t, told)


def release_of(root: Path = Path("/")) -> str | None:
    """The release of Jetson Linux that a file system has: `# R36 (release), REVISION: 4.3, …` is 36.4.3."""
    found = re.search(r"R(\d+).*REVISION:\s*([\d.]+)", read(root / _RELEASE))
    return f"{found[1]}.{found[2]}" if found else None


def read(path: Path) -> str:
    """Text of a small file without its last line end or NUL; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:  # a sensor that is switched off answers with an input/output error
        return ""


def _soc(root: Path) -> tuple[str | None, Path | None]:
    """The chip by the number that the kernel exports, and where it stands."""
    for folder in sorted(root.glob(_SOCS)):
        number = read(folder / "soc_id")
        chip = next((name for name, chip in CHIPS.items() if chip.soc_id == number), None)
        if chip and read(folder / "family").lower().startswith("tegra"):
            return chip, folder
    return None, None


def _part(names: Iterable[str]) -> str | None:
    """The module among the part numbers of `compatible`; the carrier board has one too."""
    return next((part for name in names for part in _MODULE.findall(name) if part in MODULES), None)
