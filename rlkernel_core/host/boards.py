"""Jetson boards: chips, modules, releases of Jetson Linux, and where a torch for them comes from. Data alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Chip(NamedTuple):
    """A system on a chip whose GPU shares its memory."""

    family: str
    arch: str  # as torch reports it: compute capability 8.7 is sm87
    soc_id: str  # /sys/devices/soc0/soc_id: the chip's number, in decimal


class Module(NamedTuple):
    """A compute module, as it is sold."""

    name: str
    chip: str  # key of CHIPS
    gigabytes: int
    multiprocessors: int
    gb_per_s: float  # of its memory at the fastest power mode


class Release(NamedTuple):
    """What comes with a release of Jetson Linux (L4T)."""

    jetpack: str
    cuda: str
    python: str  # of its Ubuntu
    tegra_driver: bool  # GPU programs need builds for Tegra; otherwise those for Arm servers (SBSA) run


# compatible strings: Linux' Documentation/devicetree/bindings/arm/tegra.yaml. Chip numbers: the names in hexadecimal,
# as drivers/soc/tegra/fuse exports them (0x23 = 35).
CHIPS: Final[Mapping[str, Chip]] = {
    "nvidia,tegra194": Chip("Jetson Xavier", "sm72", "25"),
    "nvidia,tegra234": Chip("Jetson Orin", "sm87", "35"),
    "nvidia,tegra264": Chip("Jetson Thor", "sm110", "38"),
}
# What torch calls a chip's GPU: Thor was sm101 up to CUDA 12.
ALIASES: Final[Mapping[str, str]] = {"sm101": "sm110"}

# Part numbers: NVIDIA's Jetson Linux Developer Guide (quick start), jetson-stats' table. Sizes: module data sheets.
MODULES: Final[Mapping[str, Module]] = {
    "p3767-0000": Module("Jetson Orin NX 16 GB", "nvidia,tegra234", 16, 8, 102.4),
    "p3767-0001": Module("Jetson Orin NX 8 GB", "nvidia,tegra234", 8, 8, 102.4),
    "p3767-0003": Module("Jetson Orin Nano 8 GB", "nvidia,tegra234", 8, 8, 102.4),
    "p3767-0004": Module("Jetson Orin Nano 4 GB", "nvidia,tegra234", 4, 4, 51.2),
    "p3767-0005": Module("Jetson Orin Nano 8 GB (developer kit)", "nvidia,tegra234", 8, 8, 102.4),
    "p3701-0000": Module("Jetson AGX Orin (developer kit)", "nvidia,tegra234", 32, 16, 204.8),
    "p3701-0004": Module("Jetson AGX Orin 32 GB", "nvidia,tegra234", 32, 14, 204.8),
    "p3701-0005": Module("Jetson AGX Orin 64 GB", "nvidia,tegra234", 64, 16, 204.8),
    "p3701-0008": Module("Jetson AGX Orin Industrial", "nvidia,tegra234", 64, 16, 204.8),
    "p3834-0008": Module("Jetson T5000 (Thor)", "nvidia,tegra264", 128, 20, 273.0),
}

# NVIDIA's JetPack archive; a release that is not listed is known by its number before the point.
RELEASES: Final[Mapping[str, Release]] = {
    "36.3": Release("6.0", "12.2", "3.10", tegra_driver=True),
    "36.4": Release("6.1 to 6.2.1", "12.6", "3.10", tegra_driver=True),
    "36.5": Release("6.2.2 or newer", "12.6", "3.10", tegra_driver=True),
    "38.2": Release("7.0", "13.0", "3.12", tegra_driver=False),
    "38.4": Release("7.1", "13.0", "3.12", tegra_driver=False),
    "39.2": Release("7.2", "13.2", "3.12", tegra_driver=False),
    "35": Release("5", "11.4", "3.8", tegra_driver=True),
    "36": Release("6", "12.6", "3.10", tegra_driver=True),
    "38": Release("7", "13.0", "3.12", tegra_driver=False),
    "39": Release("7", "13.2", "3.12", tegra_driver=False),
}
# Of those, exactly: revision -> JetPack.
JETPACKS: Final[Mapping[str, str]] = {
    "36.4.0": "6.1", "36.4.3": "6.2", "36.4.4": "6.2.1", "36.4.7": "6.2.1", "36.5.0": "6.2.2", "36.5.2": "6.2.3",
    "38.2.0": "7.0", "38.2.1": "7.0", "38.4.0": "7.1", "39.2.0": "7.2", "39.2.1": "7.2.1",
}  # fmt: skip


def released(l4t: str | None) -> Release | None:
    """What is known about a release of Jetson Linux, such as "36.4.3"; None where nothing is."""
    if l4t is None:
        return None
    major, _, rest = l4t.partition(".")
    found = RELEASES.get(f"{major}.{rest.partition('.')[0]}") or RELEASES.get(major)
    exact = JETPACKS.get(l4t)
    return found._replace(jetpack=exact) if found and exact else found
