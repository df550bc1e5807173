"""What a bundle can be made for: one row a target, as data. Imports nothing.

Sources: CUDA C++ Programming Guide, table of technical specifications per compute capability (shared memory, threads,
blocks and registers of a multiprocessor); CUDA release notes for the PTX versions; AMD's ISA manuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Target(NamedTuple):
    """One architecture as a compiler and a launch see it."""

    kind: str  # "cuda" or "hip", as Triton calls it
    arch: int | str  # as Triton calls it
    warp: int  # lanes of a warp
    shared: int  # bytes of shared memory (LDS) that one program may use
    of_multiprocessor: int  # bytes of shared memory of a multiprocessor, of which each program takes 1 KiB more
    threads: int  # of a multiprocessor
    programs: int  # of a multiprocessor, at most
    planned: int  # multiprocessors that launches are planned for, whatever a part has: bits are the same on all of them
    ptx: int = 0  # ISA version of the PTX, 85 for 8.5; 0: no PTX that a later chip could run

    @property
    def nvidia(self) -> bool:
        """Whether it is a GPU of NVIDIA's."""
        return self.kind == "cuda"


_KIB: Final = 1024
# PTX 8.5 is what the driver of CUDA 12.5 and later takes, and with it that of JetPack 6.1 (CUDA 12.6). From sm_90 on
# Triton compiles for the architecture with its own features (sm_90a), whose PTX runs nowhere else.
TARGETS: Final[Mapping[str, Target]] = {
    "sm_80": Target("cuda", 80, 32, 163 * _KIB, 164 * _KIB, 2048, 32, 108, 85),
    "sm_86": Target("cuda", 86, 32, 99 * _KIB, 100 * _KIB, 1536, 16, 84, 85),
    "sm_87": Target("cuda", 87, 32, 163 * _KIB, 164 * _KIB, 1536, 16, 8, 85),
    "sm_89": Target("cuda", 89, 32, 99 * _KIB, 100 * _KIB, 1536, 24, 76, 85),
    "sm_90": Target("cuda", 90, 32, 227 * _KIB, 228 * _KIB, 2048, 32, 132),
    "sm_100": Target("cuda", 100, 32, 227 * _KIB, 228 * _KIB, 2048, 32, 148),
    "sm_110": Target("cuda", 110, 32, 227 * _KIB, 228 * _KIB, 1536, 24, 20),
    "sm_120": Target("cuda", 120, 32, 99 * _KIB, 100 * _KIB, 1536, 24, 188),
    "gfx90a": Target("hip", "gfx90a", 64, 64 * _KIB, 64 * _KIB, 2048, 32, 110),
    "gfx942": Target("hip", "gfx942", 64, 64 * _KIB, 64 * _KIB, 2048, 32, 304),
    "gfx950": Target("hip", "gfx950", 64, 160 * _KIB, 160 * _KIB, 2048, 32, 256),
    "gfx1100": Target("hip", "gfx1100", 32, 64 * _KIB, 128 * _KIB, 2048, 32, 96),
    "gfx1201": Target("hip", "gfx1201", 32, 64 * _KIB, 128 * _KIB, 2048, 32, 64),
}
_REGISTERS: Final = 65536  # of a multiprocessor
_RESERVED: Final = 1024  # bytes of shared memory that the system takes of every program


def occupancy(target: str, registers: int, shared: int, warps: int) -> int:
    """How many programs of a kernel a multiprocessor of an NVIDIA GPU holds: the occupancy formula.

    Registers are given out in units of 256 a warp.
    """
    of = TARGETS[target]
    a_warp = -(-registers * 32 // 256) * 256
    by_registers = _REGISTERS // (a_warp * warps) if registers else of.programs
    by_shared = of.of_multiprocessor // (shared + _RESERVED)
    return min(by_registers, by_shared, of.threads // (32 * warps), of.programs)
